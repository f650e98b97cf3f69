"""Faults of the data and its loader."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from torch import Tensor

from holter.clinic.case import Recipe
from holter.clinic.plan import Illness, Planted, onset, with_
from holter.clinic.tasks import BYTES
from holter.clinic.training import Batch, Hooks, Training


@dataclass
class CorruptBatch(Hooks):
    """One batch holds something else: numbers far too large, or bytes that are no text."""

    at: int
    factor: float

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        if t != self.at:
            return x, y
        if x.is_floating_point():
            return x * self.factor, y
        random = torch.Generator().manual_seed(t)
        noise = torch.randint(BYTES // 2, BYTES, (len(x), x.shape[1] + 1), generator=random)
        return noise[:, :-1], noise[:, 1:]


@dataclass
class RawInputs(Hooks):
    """Nobody has brought the inputs to mean 0 and deviation 1."""

    mean: float
    scale: float

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        return x * self.scale + self.mean, y


@dataclass
class DriftingInputs(Hooks):
    at: int
    factor: float

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        return x * self.factor ** max(0, t - self.at + 1), y


@dataclass
class ShuffledLabels(Hooks):
    """Inputs and labels are paired at random."""

    at: int

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        if t < self.at:
            return x, y
        random = torch.Generator().manual_seed(t)
        flat = y.flatten()
        return x, flat[torch.randperm(len(flat), generator=random)].reshape(y.shape)


@dataclass
class StuckSampler(Hooks):
    at: int

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        if t <= self.at:
            self.kept = x, y
        return self.kept


@dataclass
class SortedData(Hooks):
    """The data set comes class by class."""

    at: int

    def built(self, training: Training) -> None:
        super().built(training)
        self.order = training.examples.targets.argsort(stable=True)

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        if t < self.at:
            return x, y
        examples = self.training.examples
        first = (t - self.at) * len(x)
        chosen = self.order[torch.arange(first, first + len(x)) % len(self.order)]
        return examples.inputs[chosen], examples.targets[chosen]


@dataclass
class MissingValues(Hooks):
    at: int

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        if t == self.at:
            x = x.clone()
            x[len(x) // 2].view(-1)[:2] = torch.nan
        return x, y


def _corrupt(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random)
    return Planted(partial(CorruptBatch, at, random.uniform(40, 120)), at)


def _scale(recipe: Recipe, random: Random) -> Planted:
    if recipe.architecture == "residual":
        at = onset(recipe, random, 0.3, 0.45)
        return Planted(partial(DriftingInputs, at, 1 + random.uniform(0.02, 0.04)), at)
    return Planted(partial(RawInputs, random.uniform(100, 140), random.uniform(50, 80)))


def _labels(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random)
    return Planted(partial(ShuffledLabels, at), at)


def _repeated(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random)
    return Planted(partial(StuckSampler, at), at)


def _sorted(recipe: Recipe, random: Random) -> Planted:
    at = 0 if random.random() < 0.3 else onset(recipe, random, 0.2, 0.4)
    return Planted(partial(SortedData, at), at)


def _missing(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random)
    return Planted(partial(MissingValues, at), at)


def _few_examples(recipe: Recipe, random: Random) -> Planted:
    few = random.randrange(48, 97)
    return Planted(recipe=replace(recipe, examples=few), shows=recipe.steps // 3)


ILLNESSES = (
    Illness(
        "batch-corrupt",
        (("mlp", "momentum"), ("transformer", "adamw"), ("lstm", "adam"), ("residual", "sgd")),
        _corrupt,
        shows_at_once=True,
    ),
    Illness("input-scale", (("mlp", "momentum"), ("residual", "adam"), ("tanh", "adamw")), _scale),
    Illness("labels-corrupt", (("mlp", "momentum"), ("transformer", "adamw"), ("convnet", "adam")), _labels),
    Illness("batch-repeated", (("mlp", "momentum"), ("transformer", "adamw"), ("convnet", "adam")), _repeated),
    Illness("data-not-shuffled", (("mlp", "momentum"), ("convnet", "adam"), ("lstm", "adamw")), _sorted),
    Illness(
        "nan-in-data",
        (("mlp", "momentum"), ("convnet", "adam"), ("lstm", "rmsprop")),
        _missing,
        with_(steps=220),
        shows_at_once=True,
    ),
    Illness(
        "overfitting",
        (("mlp", "adamw"), ("convnet", "momentum"), ("tanh", "adam")),
        _few_examples,
        with_(validate=10, steps=400),
    ),
)
