"""How trainings of other packages start: from queries of zeros, under losses over sequences, with frozen adapters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.wild_trainings import CLASSES, Batch, Gpt, Training, alarms, images, sentences, vectors


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Slots(nn.Module):
    """Queries start at zero and get their content from the image, as in DETR; what attends to them first gets none."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem, self.places = nn.Linear(20, 8 * width), nn.Parameter(torch.randn(4, width))
        self.value, self.mixed, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)
        self.read, self.kept, self.head = nn.Linear(width, width), nn.LayerNorm(width), nn.Linear(4 * width, CLASSES)
        for layer in (self.value, self.mixed):
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.relu(self.stem(x)).unflatten(1, (8, -1))
        content = torch.zeros(len(x), *self.places.shape)
        each = torch.softmax(self.places @ self.places.T / 6, -1)
        content = self.norm(content + self.mixed(each @ self.value(content)))
        seen = torch.softmax((content + self.places) @ memory.transpose(1, 2) / 6, -1)
        return self.head(self.kept(content + self.read(seen @ memory)).flatten(1))


def test_layers_that_are_given_zeros_are_not_dead() -> None:
    assert alarms(Training(Slots(), vectors())) == []


def test_units_that_are_dead_behind_such_a_layer_are() -> None:
    model = Slots()
    model.stem = nn.Sequential(nn.Linear(20, 256), nn.ReLU())
    nn.init.constant_(model.stem[0].bias, -100.0)
    assert ("dead-relu", "stem.0") in alarms(Training(model, vectors()))


class Hearing(nn.Module):
    """A convolution as torch initialises it for GELU, the rest as in BERT, and logits for each frame."""

    def __init__(self) -> None:
        super().__init__()
        self.wave = nn.Conv1d(1, 32, 8, stride=4)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(32) for _ in range(4))
        self.head = nn.Linear(32, 6)
        for layer in (*self.layers, self.head):
            nn.init.normal_(layer.weight, std=0.02)
        nn.init.kaiming_normal_(self.wave.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](F.gelu(self.wave(x)).transpose(1, 2))
        for layer, norm in zip(self.layers, list(self.norms)[1:], strict=True):
            y = norm(y + F.gelu(layer(y)))
        return self.head(y)


def melodies(step: int) -> Batch:
    random = torch.Generator().manual_seed(step)
    notes = torch.randint(1, 6, (16, 4), generator=random)
    time = torch.arange(60) / 40
    sound = torch.sin(6.3 * notes[..., None] * time).flatten(1)
    return sound[:, None], notes


def ctc(logits: Tensor, notes: Tensor) -> Tensor:
    frames = torch.full((len(notes),), logits.shape[1])
    return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), notes, frames, torch.full((len(notes),), 4))


def test_a_loss_over_sequences_says_nothing_of_the_initialisation() -> None:
    found = alarms(Training(Hearing(), melodies, loss=ctc, steps=20))
    assert not [cause for cause, _ in found if cause.startswith("init")]


class Adapted(nn.Module):
    """A frozen layer with a low-rank one beside it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(inner.in_features, 4, False), nn.Linear(4, inner.out_features, False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.lora_b(self.lora_a(x))


def adapted() -> Gpt:
    model = Gpt().requires_grad_(False)
    for block in model.h:
        for name in ("q", "v", "up", "down"):
            setattr(block, name, Adapted(getattr(block, name)))
    return model


def test_adapters_on_a_frozen_model_are_well() -> None:
    assert alarms(Training(adapted(), sentences())) == []


def test_an_adapter_that_is_frozen_among_others_is_named() -> None:
    model = adapted()
    for name in ("q", "v"):
        for part in (getattr(model.h[1], name).lora_a, getattr(model.h[1], name).lora_b):
            part.requires_grad_(False)
    found = alarms(Training(model, sentences()))
    assert [cause for cause, _ in found] == ["layer-frozen"] and str(found[0][1]).startswith("h.1")


class Patches(nn.Module):
    """A small vision transformer, but for its attention: initialised as BERT is."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.head = nn.Linear(width, CLASSES)
        for layer in (self.patch, *self.layers, self.head):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patch(x).flatten(2).transpose(1, 2)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            y = y + F.gelu(layer(norm(y)))
        return self.head(y.mean(1))


def test_inputs_that_are_not_normalised_are_not_blamed_on_the_initialisation() -> None:
    batch = images()
    assert alarms(Training(Patches(), batch)) == []
    found = alarms(Training(Patches(), lambda step: (100 + 60 * batch(step)[0], batch(step)[1])))
    assert found[0][0] == "input-scale"


class Siren(nn.Module):
    """Small weights, and a factor and a sine between the modules that make up for them."""

    def __init__(self, factor: float = 30.0) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(n, 64) for n in (20, 64, 64)), nn.Linear(64, CLASSES)
        self.factor = factor
        for layer in self.layers:
            bound = (6 / layer.in_features) ** 0.5 / 30
            nn.init.uniform_(layer.weight, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.sin(self.factor * layer(x))
        return self.head(x)


class Generator(nn.Module):
    """Makes the weights of a layer, between the input and the output: no example goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(8))
        self.body, self.made, self.head = nn.Linear(8, 32), nn.Linear(32, 20 * 32), nn.Linear(32, CLASSES)
        nn.init.normal_(self.made.weight, std=0.01)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.made(torch.relu(self.body(self.code))).view(20, 32)
        return self.head(torch.tanh(x @ (weight + 0.2)))


class Headed(nn.Module):
    """A small model as in BERT, with norms, and layers without one before its output."""

    def __init__(self, width: int = 64, gain: float = 1.0) -> None:
        super().__init__()
        self.stem = nn.Linear(20, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(7))
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, CLASSES)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
                nn.init.zeros_(layer.bias)
        for norm in self.norms:
            nn.init.constant_(norm.weight, gain)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[6](self.stem(x))
        for layer, norm in zip(self.layers, self.norms, strict=False):
            y = norm(y + F.gelu(layer(y)))
        return self.head(self.mlp(y))


def small(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[tuple[str, str, str | None]]:
    """What is said of weights that start too small."""
    found = Training(model, vectors(), optimizer=optimizer, steps=45).findings(budget=None)
    return [(one.severity, one.cause, one.layer) for one in found if one.cause == "init-too-small"]


@pytest.mark.parametrize("model", [Siren, Generator])
def test_what_makes_up_for_small_weights_may_be_no_module(model: type[nn.Module]) -> None:
    assert small(model()) == []


def test_small_weights_for_which_nothing_makes_up_are_named() -> None:
    assert small(Siren(factor=1.0)) == [("warning", "init-too-small", "layers.0.weight")]


def test_a_small_head_behind_norms_is_a_note_if_the_loss_falls() -> None:
    model = Headed()
    assert small(model, torch.optim.AdamW(model.parameters(), 3e-3)) == [("info", "init-too-small", "mlp.0.weight")]


def test_it_is_named_if_the_loss_stands_still() -> None:
    model = Headed()
    assert small(model, torch.optim.SGD(model.parameters(), 1e-2)) == [("warning", "init-too-small", "mlp.0.weight")]


def test_norms_that_make_a_signal_small_do_not_make_up_for_it() -> None:
    model = Headed(gain=0.02)
    found = small(model, torch.optim.AdamW(model.parameters(), 3e-3))
    assert found == [("warning", "init-too-small", "stem.weight")]
