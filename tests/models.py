"""Small real trainings that the promise tests run with and without a monitor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[], Tensor]


@dataclass
class Training:
    """A model, its optimizer and one step of its loop; `clip` is torch's or a monitor's."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    accumulate: int = 1
    scaler: Any = None
    monitor: Any = None
    clip: bool = True
    losses: list[float] = field(default_factory=list)
    random_states: list[Tensor] = field(default_factory=list)

    def step(self) -> None:
        total = 0.0
        for _ in range(self.accumulate):
            x, y = self.batch()
            if self.scaler is None:
                loss = self.loss(self.model, x, y) / self.accumulate
                loss.backward()
            else:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = self.loss(self.model, x, y) / self.accumulate
                self.scaler.scale(loss).backward()
            total += float(loss.detach())
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.clip:
            if self.monitor is not None:
                self.monitor.clip_grad_norm_(0.5)
            else:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.optimizer.zero_grad()
        self.losses.append(total)
        self.random_states.append(torch.get_rng_state())
        if self.monitor is not None:
            self.monitor.log(loss=total, inputs=x, targets=y)


class Sequence(nn.Module):
    """An LSTM over a sequence, read out at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class Bag(nn.Module):
    """A sparse embedding, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)
        self.out = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).mean(1))


class Encoder(nn.Module):
    """A small transformer encoder with dropout."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.body(x).mean(1))


def _classify(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).float(), y)


def _loud(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return 64 * _classify(model, x, y)


def _batches(shape: tuple[int, ...], integers: bool = False) -> Callable[[], tuple[Tensor, Tensor]]:
    def batch() -> tuple[Tensor, Tensor]:
        x = torch.randint(0, 50, shape) if integers else torch.randn(shape)
        return x, torch.randint(0, 4, shape[:1])

    return batch


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, 4))


def cnn() -> nn.Module:
    convolutions = nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.ReLU()
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(6 * 36, 4))


def make(name: str, seed: int = 0) -> Training:
    """One of MODELS, seeded: the same call gives the same training, bit by bit."""
    torch.manual_seed(seed)
    if name == "mlp":
        model = mlp()
        return Training(model, torch.optim.AdamW(model.parameters(), 3e-3), _batches((16, 12)), _classify)
    if name == "cnn+bn":
        model = cnn()
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        return Training(model, optimizer, _batches((8, 1, 8, 8)), _classify)
    if name == "transformer+dropout":
        model = Encoder()
        return Training(model, torch.optim.AdamW(model.parameters(), 1e-3), _batches((8, 6, 16)), _classify)
    if name == "lstm":
        model = Sequence()
        return Training(model, torch.optim.RMSprop(model.parameters(), 1e-3), _batches((8, 7, 8)), _classify)
    if name == "sparse embedding":
        model = Bag()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return Training(model, optimizer, _batches((8, 5), integers=True), _classify, clip=False)
    if name == "accumulation+amp":
        model = mlp()
        # At the edge of bfloat16's range, so that steps are skipped at the start and now and then later.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10)
        optimizer = torch.optim.Adam(model.parameters(), 3e-3)
        return Training(model, optimizer, _batches((8, 12)), _loud, accumulate=3, scaler=scaler)
    raise ValueError(name)


MODELS = ("mlp", "cnn+bn", "transformer+dropout", "lstm", "sparse embedding", "accumulation+amp")


def trace(training: Training) -> Iterator[tuple[str, Any]]:
    """Everything that a training changes, by name, for a comparison to the bit."""
    yield "losses", training.losses
    yield "random state", torch.stack(training.random_states)
    for name, value in training.model.state_dict().items():
        yield name, value
    for place, state in training.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            yield f"optimizer {place} {name}", value
    if training.scaler is not None:
        yield "scaler", training.scaler.state_dict()


def differences(one: Training, other: Training) -> list[str]:
    """The names of what is not bit-equal between two trainings."""
    left, right = dict(trace(one)), dict(trace(other))
    differing = [name for name in left.keys() | right.keys() if not _same(left.get(name), right.get(name))]
    return sorted(differing)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    return bool(a == b)
