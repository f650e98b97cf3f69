"""Small real trainings, sound or with a fault put in, and what the doctor says of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import holter
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding
from holter.diagnosis.suspicion import Rule

Batch = tuple[Tensor, Tensor]
CLASSES = 6


class Words(nn.Module):
    """A transformer's outline: an embedding, attention, a head; reads tokens and names the one that follows each."""

    def __init__(self, vocabulary: int = 40, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm, self.ffn = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        mask = torch.full((tokens.size(1), tokens.size(1)), -torch.inf).triu(1)
        x = self.norm(x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0])
        return self.head(x + self.ffn(x))


class Reader(nn.Module):
    """A recurrent net over a series of numbers."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x)[0][:, -1])


def mlp(outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, outputs))


def conv(outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 16, outputs),
    )


def _classes(shape: tuple[int, ...], seed: int, doubt: float) -> Callable[[int, int], Batch]:
    centres = torch.randn(CLASSES, *shape, generator=torch.Generator().manual_seed(seed))

    def batch(step: int, size: int) -> Batch:
        random = torch.Generator().manual_seed(10_000 * seed + step)
        y = torch.randint(CLASSES, (size,), generator=random)
        return centres[y] + doubt * torch.randn(size, *shape, generator=random), y

    return batch


def _words(seed: int, vocabulary: int = 40) -> Callable[[int, int], Batch]:
    random = torch.Generator().manual_seed(seed)
    follows = torch.softmax(2.5 * torch.randn(vocabulary, vocabulary, generator=random), -1)

    def batch(step: int, size: int) -> Batch:
        random = torch.Generator().manual_seed(10_000 * seed + step)
        line = [torch.randint(vocabulary, (size,), generator=random)]
        for _ in range(12):
            line.append(torch.multinomial(follows[line[-1]], 1, generator=random)[:, 0])
        tokens = torch.stack(line, 1)
        return tokens[:, :-1], tokens[:, 1:]

    return batch


def _function(seed: int) -> Callable[[int, int], Batch]:
    weights = torch.randn(24, 3, generator=torch.Generator().manual_seed(seed)) / 5

    def batch(step: int, size: int) -> Batch:
        random = torch.Generator().manual_seed(10_000 * seed + step)
        x = torch.randn(size, 24, generator=random)
        return x, torch.tanh(x @ weights) * 2 + 0.1 * torch.randn(size, 3, generator=random)

    return batch


def cross_entropy(output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.float().flatten(0, -2), y.flatten())


@dataclass
class Patient:
    """A training; what is not given is sound."""

    kind: str = "mlp"  # or conv, words, reader, numbers
    seed: int = 0
    steps: int = 160
    size: int = 32
    rate: float = 3e-3
    adaptive: bool = True
    doubt: float = 1.6
    model: Callable[[], nn.Module] | None = None
    prepare: Callable[[nn.Module], Any] | None = None  # the model, before it is watched
    batch: Callable[[int, Tensor, Tensor], Batch] = lambda step, x, y: (x, y)
    drawn: Callable[[int], int] = lambda step: step  # which batch comes at a step
    sized: Callable[[int], int] | None = None
    loss: Callable[[int, Tensor, Tensor], Tensor] | None = None
    autocast: torch.dtype | None = None
    scaler: Any = None
    accumulate: int = 1
    logs_batch: bool = True
    validate: Callable[[nn.Module], float] | None = None
    watch: dict[str, Any] = field(default_factory=lambda: {"budget": None})

    def _parts(self) -> tuple[nn.Module, Callable[[int, int], Batch], Callable[[Tensor, Tensor], Tensor]]:
        torch.manual_seed(self.seed)
        data: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Batch]]] = {
            "mlp": (mlp, _classes((24,), self.seed, self.doubt)),
            "conv": (conv, _classes((1, 8, 8), self.seed, self.doubt)),
            "reader": (Reader, _classes((6, 8), self.seed, self.doubt)),
            "words": (Words, _words(self.seed)),
            "numbers": (lambda: mlp(3), _function(self.seed)),
        }
        make, batch = data[self.kind]
        model = (self.model or make)()
        if self.prepare is not None:
            self.prepare(model)
        return model, batch, F.mse_loss if self.kind == "numbers" else cross_entropy

    def train(self, path: Path) -> Path:
        torch.set_num_threads(1)
        model, data, criterion = self._parts()
        kind = torch.optim.AdamW if self.adaptive else torch.optim.SGD
        optimizer = kind(model.parameters(), self.rate)
        loss_of = self.loss or (lambda step, output, y: criterion(output, y))
        with holter.watch(model, optimizer, run=path, scaler=self.scaler, **self.watch) as monitor:
            for step in range(self.steps):
                total = self._step(step, model, optimizer, data, loss_of, monitor)
                monitor.log(loss=total)
                if self.validate is not None and step % 10 == 9:
                    monitor.log(val_loss=self.validate(model))
        return path

    def _step(
        self, step: int, model: nn.Module, optimizer: Any, data: Any, loss_of: Any, monitor: holter.Monitor
    ) -> Tensor:
        total = torch.zeros(())
        for part in range(self.accumulate):
            size = self.size if self.sized is None else self.sized(step)
            x, y = self.batch(step, *data(self.accumulate * self.drawn(step) + part, size))
            with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
                output = model(x)
            loss = loss_of(step, output, y) / self.accumulate
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = total + loss.detach()
            if self.logs_batch:
                monitor.log(inputs=x, targets=y)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
        optimizer.zero_grad()
        return total


def examine(run: Path, rules: Sequence[Rule]) -> tuple[Finding, ...]:
    """What these rules make of a stored run."""
    opened = holter.open_run(run)
    doctor = Doctor(opened.info, rules)
    for record in opened.records:
        doctor.take(record)
    doctor.finish()
    return doctor.findings
