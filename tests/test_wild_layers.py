"""Layers of trainings that nobody here wrote: what a rule may take for a fault, and that fault on such models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import holter
from tests.wild_trainings import CLASSES, INPUTS, WORDS, Mamba, Training, alarms, images, numbers, sentences, vectors


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def mean_square(output: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(output, y)


def scalar_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 16), nn.ELU(), nn.Linear(16, 1))


class Spectral(nn.Module):
    """A layer of a Fourier operator; what comes in has one channel at first."""

    def __init__(self, width: int = 16, modes: int = 6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, modes, dtype=torch.cfloat) / width**2)
        self.point, self.modes = nn.Conv1d(width, width, 1), modes

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x)
        mixed = torch.einsum("bil,iol->bol", spectrum[..., : self.modes], self.weight)
        kept = F.pad(mixed, (0, spectrum.shape[-1] - self.modes))
        return F.gelu(torch.fft.irfft(kept, x.shape[-1]) + self.point(x))


def curves(step: int) -> tuple[Tensor, Tensor]:
    x = torch.cumsum(torch.randn(16, 1, 32, generator=torch.Generator().manual_seed(step)), -1) / 5
    return x, torch.sin(x)


class Conditioned(nn.Module):
    """A label of two kinds joins in late: two points lie on a line, whatever the layers before made of them."""

    def __init__(self) -> None:
        super().__init__()
        self.kind, self.stem = nn.Embedding(2, 16), nn.Linear(INPUTS, 32)
        self.join, self.head = nn.Linear(16, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        kind = self.kind((x[:, 0] > 0).long())
        return self.head(torch.relu(self.stem(x) + self.join(kind)))


class Scaled(nn.Module):
    """A model whose output is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def separable(inputs: int, outputs: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
        nn.BatchNorm2d(inputs),
        nn.ReLU6(),
        nn.Conv2d(inputs, outputs, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    ]


def mobilenet(dropout: float = 0.2) -> nn.Sequential:
    parts = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6()]
    parts += [*separable(8, 16, 2), *separable(16, 16), *separable(16, 32, 2), *separable(32, 32)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(dropout), nn.Linear(32, CLASSES))


def smoothed() -> nn.Sequential:
    """Depthwise filters that all start as the mean of their neighbours: each has a channel of its own."""
    model = mobilenet()
    for module in model:
        if isinstance(module, nn.Conv2d) and module.groups > 1:
            nn.init.constant_(module.weight, 1 / 9)
    return model


def shrinking() -> nn.Sequential:
    """As torch initialises it: each layer makes the gradient about half as large."""
    parts: list[nn.Module] = []
    for _ in range(6):
        parts += [nn.Linear(16, 16), nn.Tanh()]
    return nn.Sequential(*parts, nn.Linear(16, 1))


def deep(layers: int = 8) -> nn.Sequential:
    """As torch initialises it: the first layer gets a hundredth of the gradient of the last, or less."""
    parts: list[nn.Module] = [nn.Linear(INPUTS, 32), nn.SiLU()]
    for _ in range(layers):
        parts += [nn.Linear(32, 32), nn.SiLU()]
    return nn.Sequential(*parts, nn.Linear(32, CLASSES))


def adaptive(model: nn.Module, rate: float = 3e-3) -> Training:
    optimizer = torch.optim.Adam(model.parameters(), rate)
    return Training(model, vectors(noise=0.5), optimizer=optimizer, steps=70)


def easy(step: int) -> tuple[Tensor, Tensor]:
    x, _ = numbers(16)(step)
    return x, 1 + 0.01 * x[:, :1]


def slow(model: nn.Module) -> Training:
    def line(step: int) -> tuple[Tensor, Tensor]:
        x, _ = numbers()(step)
        return x, 3 * x

    return Training(model, line, mean_square, torch.optim.SGD(model.parameters(), 0.1))


class Surrogate(torch.autograd.Function):
    """A step, with the slope of a smooth one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] / (1 + 5 * x.abs()) ** 2


class Leaky(nn.Module):
    """Charges up over several calls and puts out a spike: at the first call hardly any unit does."""

    def forward(self, x: Tensor, charge: Tensor) -> tuple[Tensor, Tensor]:
        charge = 0.9 * charge + x
        spikes: Tensor = Surrogate.apply(charge - 1)
        return spikes, charge - spikes.detach()


class Spiking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.leaky, self.head = nn.Linear(INPUTS, 64), Leaky(), nn.Linear(64, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        current, charge = self.first(0.3 * x), torch.zeros(len(x), 64)
        total = torch.zeros(())
        for _ in range(15):
            spikes, charge = self.leaky(current, charge)
            total = total + spikes
        return self.head(total / 5)


class Resized(nn.Module):
    def forward(self, table: Tensor) -> Tensor:
        return F.interpolate(table, 8)


class Placed(nn.Module):
    """Positions start at zero, and a module without weights puts them out right after the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.resize, self.head = nn.Linear(INPUTS, 8), Resized(), nn.Linear(8, CLASSES)
        self.places = nn.Parameter(torch.zeros(1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.stem(x)) + self.resize(self.places)[:, 0])


class Product(nn.Module):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight


class Generated(nn.Module):
    """Weights that start at zero are those of a module, and are used by one within it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.product = nn.Parameter(torch.zeros(32, 16)), Product()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


class Mixed(nn.Module):
    """Nothing has a gradient in the first step but the weights that are zero, and the output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mixed, self.head = nn.Linear(INPUTS, 32), Generated(), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixed(torch.tanh(self.stem(x))))


HEALTHY: dict[str, Callable[[], Training]] = {
    "spikes at the last of many calls": lambda: Training(Spiking(), vectors(), steps=120),
    "positions of zero": lambda: Training(Placed(), vectors()),
    "a product with weights of zero": lambda: Training(Mixed(), vectors()),
    "one number in, two layers without a bend": lambda: Training(scalar_net(), numbers(), mean_square),
    "one channel in": lambda: Training(
        nn.Sequential(nn.Conv1d(1, 16, 1), Spectral(), nn.Conv1d(16, 1, 1)), curves, mean_square
    ),
    "a gradient that shrinks, and a loss that falls": lambda: Training(shrinking(), easy, mean_square, steps=70),
    "a gradient that shrinks a hundredfold, under Adam": lambda: adaptive(deep()),
    "ten thousandfold": lambda: adaptive(deep(12), 1e-2),
    "two labels": lambda: Training(Conditioned(), vectors()),
    "a factor of zero": lambda: slow(Scaled()),
    "state-space": lambda: Training(Mamba(), sentences(4), steps=15),
    "depthwise": lambda: Training(mobilenet(), images()),
    "hardly anything is left by a dropout": lambda: Training(mobilenet(0.99), images(8)),
    "depthwise, all filters the same": lambda: Training(smoothed(), images(), steps=30),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_is_not_warned_of(name: str) -> None:
    assert alarms(HEALTHY[name](), budget=None) == []


def with_equal_rows(model: nn.Sequential, place: int) -> nn.Sequential:
    with torch.no_grad():
        weight = model.get_submodule(str(place)).get_parameter("weight")
        weight.copy_(weight[:1].expand_as(weight))
    return model


def enlarged(model: nn.Module, factor: float) -> nn.Module:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj.weight" in name:
                parameter.mul_(factor)
    return model


class Repeated(nn.Module):
    """One layer that is called many times."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.cell, self.act = nn.Linear(INPUTS, 32), nn.Linear(32, 32), nn.ReLU()
        self.head = nn.Linear(32, CLASSES)
        nn.init.constant_(self.cell.bias, -50.0)

    def forward(self, x: Tensor) -> Tensor:
        state = stem = torch.tanh(self.stem(x))
        for _ in range(5):
            state = stem + self.act(self.cell(state))
        return self.head(state)


class Handwritten(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Parameter(torch.randn(INPUTS, 64)), nn.Parameter(torch.randn(64, 64))
        self.w3 = nn.Parameter(torch.randn(64, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.relu(x @ self.w1) @ self.w2) @ self.w3


def dying() -> Training:
    model = mobilenet()
    norm = model.get_submodule("19")
    return Training(model, images(), before=lambda step: step == 20 and norm.get_parameter("bias").data.sub_(30))


FAULTS: dict[str, tuple[Callable[[], Training], str, str]] = {
    "equal rows behind one number": (
        lambda: Training(with_equal_rows(scalar_net(), 1), numbers(), mean_square),
        "init-symmetric",
        "1.weight",
    ),
    "equal filters": (
        lambda: Training(with_equal_rows(mobilenet(), 12), images(), steps=30),
        "init-symmetric",
        "12.weight",
    ),
    "large projections of a state-space model": (
        lambda: Training(enlarged(Mamba(), 20.0), sentences(4), steps=15),
        "init-too-large",
        "layers.0.in_proj.weight",
    ),
    "large weights without a module": (lambda: Training(Handwritten(), vectors()), "init-too-large", "w1"),
    "a gradient that shrinks, and a loss that stands still": (
        lambda: adaptive(deep(), 1e-6),
        "vanishing-gradient",
        "0.weight",
    ),
    "units that are dead at every call": (lambda: Training(Repeated(), vectors()), "dead-relu", "cell"),
    "dead channels behind a depthwise filter": (dying, "dead-relu", "19"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_such_a_model_is_named(name: str) -> None:
    training, cause, layer = FAULTS[name]
    assert alarms(training(), budget=None, activations=5)[:1] == [(cause, layer)]


def pixels(step: int) -> tuple[Tensor, Tensor]:
    x, y = images()(step)
    return 100 + 60 * x, y


def test_inputs_that_are_too_large_are_no_weights_that_are_too_small() -> None:
    first, second = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
    for layer in (first, second):
        nn.init.trunc_normal_(layer.weight, std=0.02)
    parts = [first, nn.GELU(), nn.LayerNorm(14), second, nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*parts, nn.Linear(16, CLASSES))
    assert alarms(Training(model, pixels, steps=30))[:1] == [("input-scale", None)]


class MeanOfWords(nn.Module):
    """A number for each text."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(tokens).mean(1))
        return out


@pytest.mark.parametrize("has_targets", [True, False])
def test_a_number_that_is_learnt_from_a_text_is_no_logit_that_drifts(has_targets: bool) -> None:
    torch.manual_seed(0)
    model = MeanOfWords()
    optimizer = torch.optim.SGD(model.parameters(), 0.002, momentum=0.9)
    with holter.watch(model, optimizer, run=False) as monitor:
        for _ in range(60):
            tokens = torch.randint(WORDS, (16, 20))
            wanted = 3 + (tokens == 5).float().sum(1, keepdim=True)
            loss = nn.functional.mse_loss(model(tokens), wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss, inputs=tokens, **({"targets": wanted} if has_targets else {}))
        assert monitor.flush(30)
        assert not [finding for finding in monitor.findings if finding.severity != "info"]
