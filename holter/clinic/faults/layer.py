"""Faults of single layers while a training runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

from holter.clinic.building import spine
from holter.clinic.case import Recipe
from holter.clinic.plan import Illness, Planted, onset
from holter.clinic.training import Batch, Hooks, Training


@dataclass
class ChangedParameter(Hooks):
    """A parameter is multiplied and shifted at a step."""

    at: int
    parameter: str
    factor: float = 1.0
    shift: float = 0.0

    def before_step(self, t: int) -> None:
        if t == self.at:
            self.training.model.get_parameter(self.parameter).data.mul_(self.factor).add_(self.shift)


@dataclass
class Detached(Hooks):
    """Someone calls detach() on what a module puts out."""

    at: int
    module: str

    def before_step(self, t: int) -> None:
        if t == self.at:
            module = self.training.model.get_submodule(self.module)
            module.register_forward_hook(lambda module, args, output: output.detach())


@dataclass
class Frozen(Hooks):
    at: int
    module: str

    def before_step(self, t: int) -> None:
        if t == self.at:
            self.training.model.get_submodule(self.module).requires_grad_(False)


@dataclass
class Views(Hooks):
    """Two views of every example, and beside the task a loss that wants their features to point the same way."""

    head: str
    weight: float

    def built(self, training: Training) -> None:
        super().built(training)
        self.random = torch.Generator().manual_seed(training.recipe.seed + 2)
        training.model.get_submodule(self.head).register_forward_pre_hook(self._see)

    def _see(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.features: Tensor = args[0]

    def loss(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        view = x + 0.3 * torch.randn(x.shape, generator=self.random)
        output = self.training.output(torch.cat([x, view]))
        first, second = self.features.chunk(2)
        apart = 1 - nn.functional.cosine_similarity(first, self.partners(t, second)).mean()
        return self.training.criterion(output[: len(x)], y) + self.weight * apart

    def partners(self, t: int, views: Tensor) -> Tensor:
        return views


@dataclass
class MixedViews(Views):
    """From a step on the views belong to other examples: all features are pulled into one direction."""

    at: int = 0

    def partners(self, t: int, views: Tensor) -> Tensor:
        return views.roll(1, 0) if t >= self.at else views


@dataclass
class TinyBatches(Hooks):
    at: int
    size: int

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        return (x[: self.size], y[: self.size]) if t >= self.at else (x, y)


def _inner(recipe: Recipe, random: Random) -> tuple[int, str]:
    """A layer between the first and the last, and its place."""
    names = spine(recipe)
    place = random.randrange(1, len(names) - 1)
    return place, names[place]


def _dead(recipe: Recipe, random: Random) -> Planted:
    at = 0 if random.random() < 0.4 else onset(recipe, random)
    place, layer = _inner(recipe, random)
    shift = -random.uniform(15, 30)
    if recipe.architecture == "mlp":
        return Planted(
            partial(ChangedParameter, at, f"{layer}.bias", shift=shift), at, layer=(layer, f"activations.{place}")
        )
    if recipe.architecture == "residual":
        return Planted(
            partial(ChangedParameter, at, f"{layer}.up.bias", shift=2 * shift),
            at,
            layer=(f"{layer}.up", f"{layer}.act", layer),
        )
    stage = layer.removesuffix(".0")
    norm = f"{stage}.1"
    return Planted(
        partial(ChangedParameter, at, f"{norm}.bias", shift=shift), at, layer=(norm, f"{stage}.2", stage, layer)
    )


def _saturated(recipe: Recipe, random: Random) -> Planted:
    at = 0 if random.random() < 0.3 else onset(recipe, random)
    place, layer = _inner(recipe, random)
    factor = random.uniform(15, 40)
    if recipe.architecture == "convnet":
        stage = layer.removesuffix(".0")
        return Planted(
            partial(ChangedParameter, at, f"{stage}.1.weight", factor), at, layer=(f"{stage}.1", f"{stage}.2", stage)
        )
    activation = f"act{place + 1}" if recipe.architecture == "tanh" else f"activations.{place}"
    return Planted(partial(ChangedParameter, at, f"{layer}.weight", factor), at, layer=(layer, activation))


def _detached(recipe: Recipe, random: Random) -> Planted:
    at = 0 if random.random() < 0.3 else onset(recipe, random, 0.1, 0.6)
    place, layer = _inner(recipe, random)
    # Seen from outside, the cut lies between the last layer without a gradient and the first that has one.
    beside = {"mlp": (f"activations.{place}",), "convnet": (layer.removesuffix(".0"),)}.get(recipe.architecture, ())
    return Planted(partial(Detached, at, layer), at, layer=(layer, *beside, spine(recipe)[place + 1]))


def _frozen(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random, 0.1, 0.6)
    _, layer = _inner(recipe, random)
    return Planted(partial(Frozen, at, layer), at, layer=layer)


def _collapse(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random, 0.3, 0.4)
    weight = random.uniform(25, 40) if recipe.architecture == "convnet" else random.uniform(7, 12)
    *_, before, last, head = spine(recipe)
    beside = {
        "mlp": (last, f"activations.{recipe.depth - 1}"),
        "convnet": (last.removesuffix(".0"), "pool"),
    }.get(recipe.architecture, (last,))
    return Planted(
        partial(MixedViews, head, weight, at),
        at,
        layer=(*beside, before, head),
        healthy=partial(Views, head, weight),
    )


def _tiny_batches(recipe: Recipe, random: Random) -> Planted:
    at = 0 if random.random() < 0.4 else onset(recipe, random, 0.2, 0.5)
    size = random.choice((2, 3, 4))
    norms = "norms.{}" if recipe.architecture == "mlp" else "stages.{}.1"
    return Planted(
        partial(TinyBatches, at, size), at, layer=tuple(norms.format(place) for place in range(recipe.depth))
    )


def _bounded(recipe: Recipe, random: Random) -> Recipe:
    return replace(recipe, activation="tanh")


def _with_norm(recipe: Recipe, random: Random) -> Recipe:
    return replace(recipe, norm=True)


ILLNESSES = (
    Illness(
        "dead-relu",
        (("mlp", "momentum"), ("convnet", "adamw"), ("residual", "adam")),
        _dead,
        shows_at_once=True,
    ),
    Illness(
        "saturated-activation",
        (("tanh", "momentum"), ("convnet", "adamw"), ("mlp", "adam")),
        _saturated,
        _bounded,
    ),
    Illness(
        "graph-detached",
        (("mlp", "momentum"), ("transformer", "adamw"), ("convnet", "adam"), ("residual", "sgd")),
        _detached,
        shows_at_once=True,
    ),
    Illness(
        "layer-frozen",
        (("mlp", "momentum"), ("transformer", "adamw"), ("residual", "adam")),
        _frozen,
        shows_at_once=True,
    ),
    Illness(
        "representation-collapse",
        (("mlp", "adamw"), ("convnet", "momentum"), ("residual", "adam")),
        _collapse,
        lambda recipe, random: replace(recipe, schedule="constant", warmup=0, steps=360),
    ),
    Illness(
        "norm-batch-too-small",
        (("convnet", "momentum"), ("mlp", "adamw"), ("convnet", "adam")),
        _tiny_batches,
        _with_norm,
    ),
)
