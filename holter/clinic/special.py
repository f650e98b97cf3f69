"""Models that only some controls need: what is odd about them is meant."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from holter.clinic import models, tasks
from holter.clinic.case import Recipe
from holter.clinic.tasks import Examples

Built = tuple[nn.Module, Examples]


class Words(nn.Module):
    """A large table of words of which a batch needs a few; with sparse gradients if asked for."""

    def __init__(self, words: int, width: int, outputs: int, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width, sparse=sparse)
        self.hidden, self.act, self.head = nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)

    def forward(self, words: Tensor) -> Tensor:
        logits: Tensor = self.head(self.act(self.hidden(self.table(words).mean(1))))
        return logits


class Experts(nn.Module):
    """A mixture whose router, fixed by a feature, never asks half of its experts."""

    def __init__(self, inputs: int, width: int, outputs: int, experts: int) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(experts))
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        stream: Tensor = torch.relu(self.stem(x))
        chosen = (x[:, 0] > 0).long()
        mixed = stream.clone()
        for place in chosen.unique().tolist():
            mixed[chosen == place] = stream[chosen == place] + self.experts[place](stream[chosen == place])
        logits: Tensor = self.head(mixed)
        return logits


class LoraLinear(nn.Module):
    """A frozen layer and beside it A, then B, which begins at zero: A has no gradient in the first step."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, rank, bias=False)
        self.b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.base(x) + self.b(self.a(x))
        return result


class Gains(nn.Module):
    """Residual branches behind a gain that begins at zero."""

    def __init__(self, inputs: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.stem, self.out = nn.Linear(inputs, width), nn.Linear(width, outputs)
        self.branches = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(depth)
        )
        self.gains = nn.Parameter(torch.zeros(depth))

    def forward(self, x: Tensor) -> Tensor:
        stream = self.stem(x)
        for gain, branch in zip(self.gains, self.branches, strict=True):
            stream = stream + gain * branch(stream)
        result: Tensor = self.out(stream)
        return result


class Checkpointed(models.Mlp):
    """Its layers run a second time in the backward pass."""

    def features(self, x: Tensor) -> Tensor:
        for layer, activation in zip(self.layers, self.activations, strict=True):
            x = checkpoint(nn.Sequential(layer, activation), x, use_reentrant=False)
        return x


class Taught(nn.Module):
    """A student and its teacher, which follows it without gradients of its own."""

    def __init__(self, student: nn.Module) -> None:
        super().__init__()
        self.student, self.teacher = student, copy.deepcopy(student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.student(x)
        return logits


def _words(recipe: Recipe) -> Built:
    """Words are frequent or rare as in a language; each class prefers some of them."""
    count, length = 1500, 12
    random = torch.Generator().manual_seed(recipe.seed)
    total = recipe.examples + 512
    labels = torch.randint(recipe.classes, (total,), generator=random)
    frequency = 1 / torch.arange(1.0, count + 1)
    taste = torch.rand(recipe.classes, count, generator=random).pow(4)
    words = torch.multinomial((frequency * taste)[labels], length, replacement=True, generator=random)
    examples = Examples(words[512:], labels[512:], words[:512], labels[:512], recipe.classes)
    return Words(count, recipe.width // 2, recipe.classes, sparse=recipe.optimizer == "sgd"), examples


def _tied(recipe: Recipe) -> Built:
    model = models.Transformer(recipe.width // 2, 2, tasks.CONTEXT, tasks.BYTES)
    model.head.weight = model.embedding.weight
    return model, tasks.text(recipe.seed, recipe.examples)


def _massive(recipe: Recipe) -> Built:
    """One channel of the stream is hundreds of times as large as the others, as in large language models."""
    model = models.Transformer(recipe.width // 2, 2, tasks.CONTEXT, tasks.BYTES)
    with torch.no_grad():
        model.position.weight[:2, 3] = 300.0
    return model, tasks.text(recipe.seed, recipe.examples)


def _points(recipe: Recipe) -> Examples:
    return tasks.points(recipe.seed, recipe.examples, recipe.classes)


def _mlp(recipe: Recipe) -> models.Mlp:
    return models.Mlp(tasks.FEATURES, recipe.width, recipe.depth, recipe.classes)


def _experts(recipe: Recipe) -> Built:
    return Experts(tasks.FEATURES, recipe.width, recipe.classes, experts=4), _points(recipe)


def _lora(recipe: Recipe) -> Built:
    model = _mlp(recipe)
    for place, layer in enumerate(model.layers):
        assert isinstance(layer, nn.Linear)
        model.layers[place] = LoraLinear(layer, rank=4)
    return model, _points(recipe)


def _gains(recipe: Recipe) -> Built:
    return Gains(tasks.FEATURES, recipe.width, recipe.depth, 4), tasks.function(recipe.seed, recipe.examples, 4)


def _dropout(recipe: Recipe) -> Built:
    model = models.Mlp(tasks.FEATURES, 2 * recipe.width, recipe.depth // 2, recipe.classes)
    for place, activation in enumerate(model.activations):
        model.activations[place] = nn.Sequential(activation, nn.Dropout(0.5))
    return model, _points(recipe)


def _checkpointed(recipe: Recipe) -> Built:
    return Checkpointed(tasks.FEATURES, recipe.width, recipe.depth, recipe.classes), _points(recipe)


def _taught(recipe: Recipe) -> Built:
    return Taught(_mlp(recipe)), _points(recipe)


def _frozen(recipe: Recipe) -> Built:
    model = _mlp(recipe)
    model.layers.requires_grad_(False)
    return model, _points(recipe)


ARCHITECTURES: dict[str, Callable[[Recipe], Built]] = {
    "words": _words,
    "tied": _tied,
    "massive": _massive,
    "experts": _experts,
    "lora": _lora,
    "gains": _gains,
    "dropout": _dropout,
    "checkpointed": _checkpointed,
    "taught": _taught,
    "frozen": _frozen,
}
