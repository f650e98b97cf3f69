"""Layers that look sick and are healthy: the rules of the layers stay silent."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layer_trainings import CLASSES, INPUTS, Images, Words, points, sentences, stack, train

OFTEN = {"activations": 5, "weights": 10, "updates": 5}
Setup = tuple[nn.Module, dict[str, Any]]


class Adapted(nn.Module):
    """LoRA: what it adds is zero at first, so that its first factor has no gradient then."""

    def __init__(self, inner: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.inner = inner
        self.a, self.b = nn.Linear(inner.in_features, rank, bias=False), nn.Linear(rank, inner.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + self.b(self.a(x))


def adapters(frozen: bool) -> Setup:
    model = Words()
    for block in model.h:
        block.q_proj, block.v_proj = Adapted(block.q_proj), Adapted(block.v_proj)
    chosen = [p for name, p in model.named_parameters() if ".a." in name or ".b." in name]
    if frozen:
        for parameter in model.parameters():
            parameter.requires_grad_(any(parameter is one for one in chosen))
    return model, {"optimizer": torch.optim.AdamW(chosen, 2e-3), "warmup": 10}


class Experts(nn.Module):
    """Two of six experts get no work, ever; the others as much as the gate gives them."""

    def __init__(self, called_with_nothing: bool) -> None:
        super().__init__()
        self.stem, self.gate = nn.Linear(INPUTS, 32), nn.Linear(32, 6)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)) for _ in range(6))
        self.head = nn.Linear(32, CLASSES)
        self.gate.bias.data[4:] = -50
        self.called_with_nothing = called_with_nothing

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            rows = (chosen == place).nonzero()[:, 0]
            if len(rows) or self.called_with_nothing:
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return self.head(x + out)


def deserted() -> Setup:
    """All experts had work, until the gate sends everything to the first."""
    model = Experts(False)
    model.gate.bias.data.zero_()

    def desert(step: int) -> None:
        if step == 20:
            model.gate.bias.data[1:] = -50

    return model, {"before": desert}


class Scaffold(nn.Module):
    """A first layer that helps at the beginning, and is then left out."""

    def __init__(self) -> None:
        super().__init__()
        self.aid, self.stem, self.head = nn.Linear(INPUTS, 32), nn.Linear(INPUTS, 32), nn.Linear(32, CLASSES)
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        aid = self.aid(x) if self.steps <= 20 else torch.zeros(())
        logits: Tensor = self.head(torch.relu(self.stem(x) + aid))
        return logits


class Residual(nn.Module):
    """Branches that start at zero, the output too; with `drop` they are left out by chance."""

    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.stem = nn.Linear(INPUTS, 48)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48)) for _ in range(4)
        )
        self.head = nn.Linear(48, CLASSES)
        self.drop = drop
        if not drop:
            for layer in (self.head, *(block[3] for block in self.blocks)):
                nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            if torch.rand(()) >= self.drop:
                x = x + block(x)
        return self.head(x)


class Teacher(nn.Module):
    """A student and its running average, which has no gradient."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.student = stack(4)
        self.teacher = copy.deepcopy(self.student).requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x) + 0 * taught

    def follow(self, step: int) -> None:
        for mean, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.data.lerp_(new.data, 0.05)


def teacher(frozen: bool) -> Setup:
    model = Teacher(frozen)
    return model, {"optimizer": torch.optim.AdamW(model.student.parameters(), 2e-3), "after": model.follow}


def backbone(declared: bool) -> Setup:
    model = stack(6)
    for place in range(0, 8, 2):
        model[place].requires_grad_(not declared)
    chosen = [p for place in (8, 10, 12) for p in model[place].parameters()]
    return model, {"optimizer": torch.optim.AdamW(model.parameters() if declared else chosen, 2e-3)}


class Unused(Words):
    """A pooler that runs, and whose output nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Sequential(nn.Linear(32, 32), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        self.pooler(self.wte(x)[:, 0])
        return logits


class Massive(Words):
    """One value a thousand times as large as the others, as trained language models have it."""

    def forward(self, x: Tensor) -> Tensor:
        stream = self.wte(x) + self.wpe.weight[: x.shape[1]]
        mask = torch.zeros(stream.shape[1:])
        mask[0, 3] = 50.0
        for block in self.h:
            stream = block(stream + mask)
        logits: Tensor = self.lm_head(self.ln_f(stream))
        return logits


class Encoder(nn.Module):
    """torch's own layers, the norm behind the branch as in the first transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.out = nn.Linear(32, 40)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits: Tensor = self.out(self.encoder(self.table(x), mask=mask))
        return logits


class Spread(nn.Module):
    """A linear layer behind which neighbours are mixed, as in a net on a graph."""

    def __init__(self, inputs: int, outputs: int, edges: Tensor) -> None:
        super().__init__()
        self.lin, self.edges = nn.Linear(inputs, outputs, bias=False), edges
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.edges @ self.lin(x) + self.bias
        return mixed


class Graph(nn.Module):
    """Two numbered layers one after the other, without a branch between them."""

    def __init__(self, edges: Tensor) -> None:
        super().__init__()
        self.convs = nn.ModuleList([Spread(16, 32, edges), Spread(32, CLASSES, edges)])

    def forward(self, x: Tensor) -> Tensor:
        return self.convs[1](nn.functional.dropout(self.convs[0](x).relu(), 0.5, self.training))


def graph() -> Setup:
    """The whole graph is the batch, at every step; neighbours are mostly of one class."""
    random = torch.Generator().manual_seed(5)
    kinds = torch.arange(CLASSES).repeat_interleave(20)
    edges = (torch.rand(len(kinds), len(kinds), generator=random) < 0.01 + 0.1 * (kinds[:, None] == kinds)).float()
    edges = edges + torch.eye(len(kinds))
    features = torch.randn(len(kinds), 16, generator=random)
    features[:, :CLASSES] += nn.functional.one_hot(kinds, CLASSES)
    model = Graph(edges / edges.sum(1, keepdim=True))
    optimizer = torch.optim.Adam(model.parameters(), 0.01, weight_decay=5e-4)
    return model, {"data": repeat((features, kinds)), "optimizer": optimizer}


def dropped() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(part, nn.Dropout(0.5)) if i % 2 else part for i, part in enumerate(stack(4))])


def fixed_table() -> nn.Module:
    model = Words()
    model.wpe.requires_grad_(False)
    return model


HEALTHY: dict[str, Callable[[], Setup]] = {
    "plain": lambda: (stack(), {}),
    "deep": lambda: (stack(16), {}),
    "tanh": lambda: (stack(8, activation=nn.Tanh), {}),
    "images": lambda: (Images(), {}),
    "words": lambda: (Words(), {}),
    "words with momentum": lambda: _with_momentum(Words()),
    "encoder": lambda: (Encoder(), {"data": sentences()}),
    "warm-up": lambda: (Words(), {"warmup": 50}),
    "tied": lambda: (Words(tied=True), {}),
    "adapters": lambda: adapters(frozen=True),
    "adapters beside what is not frozen": lambda: adapters(frozen=False),
    "idle experts": lambda: (Experts(False), {}),
    "experts called with nothing": lambda: (Experts(True), {}),
    "deserted experts": deserted,
    "a layer that is left out": lambda: (Scaffold(), {}),
    "zero gains": lambda: (Residual(), {"warmup": 15}),
    "stochastic depth": lambda: (Residual(0.3), {}),
    "teacher": lambda: teacher(frozen=True),
    "teacher that requires gradients": lambda: teacher(frozen=False),
    "backbone": lambda: backbone(declared=True),
    "backbone that is not held": lambda: backbone(declared=False),
    "frozen positions": lambda: (fixed_table(), {}),
    "unused pooler": lambda: (Unused(), {}),
    "massive activations": lambda: (Massive(), {}),
    "graph": graph,
    "dropout": lambda: (dropped(), {}),
    "tiny batches": lambda: (stack(), {"data": points(2)}),
    "single examples": lambda: (stack(), {"data": points(1)}),
}


def _with_momentum(model: nn.Module) -> Setup:
    return model, {"optimizer": torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_is_not_warned_of(tmp_path: Path, name: str) -> None:
    torch.manual_seed(1)
    model, options = HEALTHY[name]()
    assert train(tmp_path / "run", model, **options, steps=60, **OFTEN) == ()


@pytest.mark.parametrize("name", ["words", "images", "adapters", "idle experts", "deserted experts"])
def test_nor_where_layers_are_looked_at_rarely(tmp_path: Path, name: str) -> None:
    torch.manual_seed(2)
    model, options = HEALTHY[name]()
    assert train(tmp_path / "run", model, **options, steps=210) == ()
