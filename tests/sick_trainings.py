"""Short real trainings on the CPU: healthy ones, some of which look frightening, and the same with one fault each."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import holter

Batches = Iterator[tuple[Tensor, Tensor]]
CLASSES, INPUTS = 4, 16


class Net(nn.Module):
    """A ReLU, a tanh and a branch beside it; `cut` detaches the branch from what learns."""

    def __init__(self, cut: bool = False) -> None:
        super().__init__()
        self.encoder, self.relu = nn.Linear(INPUTS, 64), nn.ReLU()
        self.middle, self.tanh = nn.Linear(64, 32), nn.Tanh()
        self.branch = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 8))
        self.head = nn.Linear(40, CLASSES)
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.encoder(x))
        beside = self.branch(hidden)
        beside = beside.detach() if self.cut else beside
        return self.head(torch.cat([self.tanh(self.middle(hidden)), beside], 1))


def batches(size: int = 64, stuck_at: int | None = None, seed: int = 0) -> Batches:
    """Four clouds of points, a class each; from `stuck_at` on the loader gives the same batch again and again."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, INPUTS, generator=random)
    batch = None
    for step in itertools.count():
        if batch is None or stuck_at is None or step < stuck_at:
            labels = torch.randint(CLASSES, (size,), generator=random)
            batch = centres[labels] + torch.randn(size, INPUTS, generator=random), labels
        yield batch


def train(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    data: Batches | None = None,
    *,
    steps: int = 24,
    loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
    after: Callable[[int], Any] = lambda step: None,
    **options: Any,
) -> Path:
    """A plain loop under a monitor that looks often."""
    data = data if data is not None else batches()
    optimizer = optimizer if optimizer is not None else torch.optim.AdamW(model.parameters(), 3e-3)
    loss_of = loss_of or (lambda model, x, y: F.cross_entropy(model(x).float(), y))
    often = {"weights": 4, "updates": 2, "activations": 4, "histograms": 8, "budget": None}
    with holter.watch(model, optimizer, run=path, **{**often, **options}) as monitor:
        for step in range(steps):
            x, y = next(data)
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss, inputs=x, targets=y)
            after(step)
    return path


# Faults -----------------------------------------------------------------------------------------------------------


def healthy(path: Path, **options: Any) -> Path:
    return train(path, Net(), **options)


def dead_relu(path: Path, **options: Any) -> Path:
    model = Net()
    nn.init.constant_(model.encoder.bias, -100.0)
    return train(path, model, **options)


def saturated_tanh(path: Path, **options: Any) -> Path:
    model = Net()
    with torch.no_grad():
        model.middle.weight.mul_(100)
    return train(path, model, **options)


def frozen_layer(path: Path, **options: Any) -> Path:
    model = Net()
    model.encoder.requires_grad_(False)
    return train(path, model, **options)


def layer_not_held(path: Path, **options: Any) -> Path:
    model = Net()
    held = [parameter for name, parameter in model.named_parameters() if not name.startswith("branch.0.")]
    return train(path, model, torch.optim.AdamW(held, 3e-3), **options)


def detached_branch(path: Path, **options: Any) -> Path:
    return train(path, Net(cut=True), **options)


def repeated_batch(path: Path, **options: Any) -> Path:
    return train(path, Net(), data=batches(stuck_at=10), **options)


def float16_underflow(path: Path, **options: Any) -> Path:
    """Nothing scales the loss up, and float16 ends at 6e-8."""
    model = Net().half()
    return train(
        path,
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        loss_of=lambda model, x, y: 1e-5 * F.cross_entropy(model(x.half()).float(), y),
        **options,
    )


def float16_rounding(path: Path) -> Path:
    """As under autocast: gradients are computed in float16, weights are float32."""
    model = Net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.half().float())
    return train(path, model, loss_of=lambda model, x, y: 1e-5 * F.cross_entropy(model(x), y))


def bfloat16_updates_lost(path: Path) -> Path:
    model = Net().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    return train(path, model, optimizer, loss_of=lambda model, x, y: F.cross_entropy(model(x.bfloat16()).float(), y))


def nan_in_weights(path: Path) -> Path:
    model = Net()

    def spoil(step: int) -> None:
        if step == 11:
            model.middle.weight.data[0, 0] = torch.nan

    return train(path, model, after=spoil)


# Healthy, though it may not look like it ------------------------------------------------------------------------


class LowRank(nn.Module):
    """LoRA: B is zero at first, so that A has no gradient in the first step."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def low_rank(path: Path, steps: int = 24) -> Path:
    model = nn.Sequential(LowRank(nn.Linear(INPUTS, 64)), nn.ReLU(), nn.Linear(64, CLASSES))
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return train(path, model, torch.optim.AdamW(learning, 1e-2), steps=steps)


def low_rank_first_step(path: Path) -> Path:
    """All that was looked at is the start."""
    return low_rank(path, steps=1)


class Tokens(nn.Module):
    """An embedding of which a batch uses few rows, tied to the output."""

    def __init__(self, sparse: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(5000, 8, sparse=sparse)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 5000, bias=False)
        if tied:
            self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.table(tokens))).mean(1))


def token_batches() -> Batches:
    random = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(0, 5000, (8, 6), generator=random)
        yield tokens, tokens[:, 0]


def tied_weights(path: Path) -> Path:
    return train(path, Tokens(), data=token_batches())


def sparse_rows(path: Path) -> Path:
    model = Tokens(tied=False)
    return train(path, model, torch.optim.SGD(model.parameters(), 0.1), token_batches())


def sparse_gradients(path: Path) -> Path:
    model = Tokens(sparse=True, tied=False)
    return train(path, model, torch.optim.SGD(model.parameters(), 0.1), token_batches())


def frozen_backbone(path: Path) -> Path:
    model = Net()
    for module in (model.encoder, model.middle, model.branch):
        module.requires_grad_(False)
    return train(path, model, torch.optim.AdamW(model.head.parameters(), 1e-2))


def dropout_and_small_batches(path: Path) -> Path:
    layers = (nn.Linear(INPUTS, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5))
    return train(path, nn.Sequential(*layers, nn.Linear(64, CLASSES)), data=batches(size=2))


def single_examples(path: Path) -> Path:
    layers = (nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    return train(path, nn.Sequential(*layers), data=batches(size=1))


class Residual(nn.Module):
    """A branch whose last gain is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(INPUTS, INPUTS), nn.BatchNorm1d(INPUTS), nn.ReLU())
        self.last = nn.BatchNorm1d(INPUTS)
        nn.init.zeros_(self.last.weight)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.last(self.layers(x)))


def zero_gains(path: Path) -> Path:
    return train(path, nn.Sequential(Residual(), Residual(), nn.Linear(INPUTS, CLASSES)), steps=2)


def zero_biases(path: Path) -> Path:
    model = Net()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return train(path, model)


class Experts(nn.Module):
    """A mixture whose router never asks the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(INPUTS, 16), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        parts = [(x[:, 0] > 0), (x[:, 0] <= 0)]
        hidden = torch.zeros(len(x), 16)
        for chosen, expert in zip(parts, self.experts, strict=False):
            hidden = hidden.index_put((chosen,), expert(x[chosen]))
        return self.head(hidden)


def idle_experts(path: Path) -> Path:
    return train(path, Experts())


def teacher(path: Path) -> Path:
    """A copy that follows the model without a gradient of its own."""
    student = Net()
    model = nn.ModuleDict({"student": student, "teacher": copy.deepcopy(student).requires_grad_(False)})

    def follow(step: int) -> None:
        with torch.no_grad():
            for ours, theirs in zip(model["teacher"].parameters(), student.parameters(), strict=True):
                ours.lerp_(theirs, 0.1)

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(student(x), y)

    return train(path, model, torch.optim.AdamW(student.parameters(), 1e-2), loss_of=loss_of, after=follow)


def sure_of_itself(path: Path) -> Path:
    """The output's sigmoid is at its bounds once the classes are told apart."""
    layers = (nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, CLASSES), nn.Sigmoid())

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy(model(4 * x), F.one_hot(y, CLASSES).float())

    model = nn.Sequential(*layers)
    return train(path, model, torch.optim.AdamW(model.parameters(), 0.1), loss_of=loss_of, steps=60)


def scaler_that_searches(path: Path) -> Path:
    """It starts far too high and skips until it has found its scale."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    data = batches()
    with holter.watch(model, optimizer, run=path, scaler=scaler, budget=None, weights=4, activations=4) as monitor:
        for _ in range(40):
            x, y = next(data)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = 64 * F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            monitor.log(loss=loss, inputs=x, targets=y)
    return path


def warm_up_to_decay(path: Path) -> Path:
    """The first rate and the last are zero."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = holter.get_linear_schedule_with_warmup(optimizer, 4, 23)
    return train(path, model, optimizer, after=lambda step: schedule.step())


def before_the_warm_up(path: Path) -> Path:
    """All that was looked at is a step with a rate of zero."""
    model = Net()
    return train(path, model, torch.optim.AdamW(model.parameters(), 0.0, weight_decay=0.0), steps=1)


def epochs_in_order(path: Path) -> Path:
    """Eight batches, never shuffled: worth a word, no warning."""
    eight = list(itertools.islice(batches(), 8))
    return train(path, Net(), data=itertools.cycle(eight))
