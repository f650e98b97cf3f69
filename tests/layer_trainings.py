"""Small real trainings whose layers can be made sick, and healthy ones that look odd."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import holter
from holter.diagnosis.causes import depth, growth, units, unwritten, wiring
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding

RULES = (*depth.RULES, *units.RULES, *wiring.RULES, *unwritten.RULES, *growth.RULES)
INPUTS, CLASSES, WORDS, LENGTH = 20, 6, 40, 12

Change = Callable[[int], Any]  # called before every step


def stack(depth: int = 6, width: int = 48, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Plain layers, initialised by the book."""
    parts: list[nn.Module] = []
    for place in range(depth):
        layer = nn.Linear(INPUTS if place == 0 else width, width)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu" if activation is nn.ReLU else "tanh")
        parts += [layer, activation()]
    return nn.Sequential(*parts, nn.Linear(width, CLASSES))


class Images(nn.Module):
    """A convolution net with batch norm, and skips around its later stages."""

    def __init__(self, width: int = 12, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.first, self.bn, self.act = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), activation()
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), activation()) for _ in range(3)
        )
        self.fc = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.bn(self.first(x.view(-1, 1, 4, 5))))
        for stage in self.stages:
            x = x + stage(x)
        return self.fc(x.mean((2, 3)))


class Branch(nn.Module):
    """One block of a language model with attention by hand: its projections are linear layers of their own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.fc_in, self.act, self.fc_out = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        mixed = F.scaled_dot_product_attention(self.q_proj(y), self.k_proj(y), self.v_proj(y), is_causal=True)
        x = x + self.o_proj(mixed)
        return x + self.fc_out(self.act(self.fc_in(self.ln_2(x))))


class Words(nn.Module):
    """A language model; its output shares the embedding's weight where they are tied."""

    def __init__(self, width: int = 32, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.h = nn.ModuleList(Branch(width) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=not tied)
        for table in (self.wte, self.wpe, self.lm_head):
            nn.init.normal_(table.weight, std=0.02)
        if tied:
            self.lm_head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.wte(x) + self.wpe.weight[: x.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def points(batch: int = 32) -> Iterator[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(3)
    centres = 0.8 * torch.randn(CLASSES, INPUTS, generator=random)
    while True:
        y = torch.randint(CLASSES, (batch,), generator=random)
        yield centres[y] + torch.randn(batch, INPUTS, generator=random), y


def sentences(batch: int = 8) -> Iterator[tuple[Tensor, Tensor]]:
    """Every word follows from the one before, with a little doubt; most words are rare."""
    random = torch.Generator().manual_seed(4)
    following = torch.randperm(WORDS, generator=random)
    while True:
        words = [(torch.rand(batch, generator=random) ** 3 * WORDS).long()]
        for _ in range(LENGTH):
            other = torch.randint(WORDS, (batch,), generator=random)
            words.append(torch.where(torch.rand(batch, generator=random) < 0.2, other, following[words[-1]]))
        text = torch.stack(words, 1)
        yield text[:, :-1], text[:, 1:]


def train(
    path: Path,
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    steps: int = 80,
    before: Change = lambda step: None,
    after: Change = lambda step: None,
    data: Iterator[tuple[Tensor, Tensor]] | None = None,
    warmup: int = 0,
    **options: Any,
) -> tuple[Finding, ...]:
    """A plain loop under a monitor, and what the rules of the layers say of it."""
    torch.set_num_threads(1)
    if optimizer is None:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-3)
    data = data if data is not None else sentences() if isinstance(model, Words) else points()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, t / warmup) if warmup else 1.0)
    with holter.watch(model, optimizer, run=path, **{"budget": None, **options}) as monitor:
        for step in range(steps):
            before(step)
            x, y = next(data)
            loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            monitor.log(loss=loss, inputs=x, targets=y)
            after(step)
    return diagnose(path)


def diagnose(path: Path) -> tuple[Finding, ...]:
    run = holter.open_run(path)
    doctor = Doctor(run.info, rules=RULES)
    for record in run.records:
        doctor.take(record)
    doctor.finish()
    return doctor.findings


def at(step: int, change: Callable[[], Any]) -> Change:
    """Once, before this step."""
    return lambda now: change() if now == step else None


def scaled(model: nn.Module, factor: float) -> nn.Module:
    """With all matrices but those of the output and of embeddings so many times as large."""
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and not name.startswith(("lm_head", "fc.", "wte", "wpe")):
            parameter.data.mul_(factor)
    return model


def replaced(model: nn.Module, name: str) -> None:
    """A part of the model becomes a copy of itself, of which the optimizer does not know."""
    parent, _, own = name.rpartition(".")
    holder = model.get_submodule(parent)
    setattr(holder, own, copy.deepcopy(holder.get_submodule(own)))
