"""Faults of the optimizer, its settings and its state."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from torch import Tensor

from holter.clinic.building import spine
from holter.clinic.case import Recipe
from holter.clinic.plan import Illness, Planted, onset, with_
from holter.clinic.training import Hooks, Training


@dataclass
class HardBatches(Hooks):
    """Every now and then a batch weighs far more than the others, as one with a rare class does in a weighted loss.

    The loss that is logged is the mean without weights.
    """

    first: int
    every: int
    weight: float

    def loss(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(t, x, y)
        is_hard = t >= self.first and (t - self.first) % self.every == 0
        return loss + (self.weight - 1) * (loss - loss.detach()) if is_hard else loss


@dataclass
class HardBatchesUnclipped(HardBatches):
    def max_norm(self, t: int) -> float | None:
        return None


@dataclass
class TightClip(Hooks):
    at: int
    norm: float

    def max_norm(self, t: int) -> float | None:
        return self.norm if t >= self.at else super().max_norm(t)


@dataclass
class ReplacedLayer(Hooks):
    """A layer is swapped for a copy of itself, with the same numbers; the optimizer goes on with the old one."""

    at: int
    layer: str

    def before_step(self, t: int) -> None:
        if t == self.at:
            parent, _, name = self.layer.rpartition(".")
            holder = self.training.model.get_submodule(parent)
            fresh = copy.deepcopy(holder.get_submodule(name))
            fresh.zero_grad()
            holder.register_module(name, fresh)


@dataclass
class ForgottenState(Hooks):
    """A resume that loads the model, but not the optimizer."""

    at: int

    def before_step(self, t: int) -> None:
        if t == self.at:
            self.training.optimizer.state.clear()


@dataclass
class LouderSignal(Hooks):
    """The gradient of one tensor grows at once and stays so: the average of its squares takes hundreds of steps to
    follow, and until then every update is too large."""

    at: int
    parameter: str
    factor: float

    def __post_init__(self) -> None:
        self.now = 0

    def built(self, training: Training) -> None:
        super().built(training)
        training.model.get_parameter(self.parameter).register_hook(self._grow)

    def before_step(self, t: int) -> None:
        self.now = t

    def _grow(self, gradient: Tensor) -> Tensor:
        return gradient * self.factor if self.now >= self.at else gradient


@dataclass
class Decay(Hooks):
    at: int
    decay: float

    def before_step(self, t: int) -> None:
        if t == self.at:
            for group in self.training.optimizer.param_groups:
                group["weight_decay"] = self.decay


@dataclass
class TransposedWeight(Hooks):
    """A weight keeps its numbers but not its layout, as after loading a transposed checkpoint."""

    at: int
    parameter: str

    def before_step(self, t: int) -> None:
        if t == self.at:
            parameter = self.training.model.get_parameter(self.parameter)
            with torch.no_grad():
                parameter.data = parameter.data.t().contiguous().t()


def _clipping_missing(recipe: Recipe, random: Random) -> Planted:
    first, every = onset(recipe, random, 0.3, 0.5), random.randrange(31, 47)
    weight = random.uniform(12, 20) if recipe.architecture == "tanh" else random.uniform(25, 45)
    return Planted(
        partial(HardBatchesUnclipped, first, every, weight), first, healthy=partial(HardBatches, first, every, weight)
    )


def _clipped_above_its_norms(recipe: Recipe, random: Random) -> Recipe:
    """So that the clip of the twin changes nothing but the hard batches."""
    norm = {"tanh": 5.0, "lstm": 3.0, "transformer": 5.0}[recipe.architecture]
    return replace(recipe, clip=norm, schedule="constant", warmup=0)


def _clipping_too_tight(recipe: Recipe, random: Random) -> Planted:
    at = 0 if random.random() < 0.5 else onset(recipe, random, 0.1, 0.25)
    return Planted(partial(TightClip, at, 10 ** random.uniform(-3.3, -2.6)), at)


def _middle(recipe: Recipe, random: Random) -> str:
    """A layer that is neither the first nor the last."""
    inner = spine(recipe)[1:-1]
    return inner[random.randrange(len(inner))]


def _replaced(recipe: Recipe, random: Random) -> Planted:
    at, layer = onset(recipe, random, 0.1, 0.5), _middle(recipe, random)
    return Planted(partial(ReplacedLayer, at, layer), at, layer=layer)


def _forgotten(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random, 0.5, 0.7)
    return Planted(partial(ForgottenState, at), at)


def _eps(recipe: Recipe, random: Random) -> Planted:
    return Planted(recipe=replace(recipe, eps=10 ** random.uniform(-1, 0.3)))


def _lag(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random, 0.5, 0.7)
    parameter = {"residual": random.choice(("stem.weight", "out.weight")), "lstm": "lstm.weight_hh_l0"}
    layer = parameter[recipe.architecture]
    return Planted(partial(LouderSignal, at, layer, random.uniform(60, 150)), at, layer=layer)


def _decay(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random, 0.25, 0.4)
    shrink = random.uniform(0.004, 0.007)  # a step
    if recipe.optimizer == "momentum":  # which adds up ten steps of it
        shrink /= 10
    return Planted(partial(Decay, at, shrink / recipe.rate), at)


def _transposed(recipe: Recipe, random: Random) -> Planted:
    at, layer = onset(recipe, random, 0.1, 0.5), _middle(recipe, random)
    parameter = f"{layer}.weight" if recipe.architecture == "mlp" else f"{layer}.up.weight"
    return Planted(partial(TransposedWeight, at, parameter), at, layer=parameter)


def _fast_and_unclipped(recipe: Recipe, random: Random) -> Recipe:
    """At a low rate so small a model forgives even updates that are ten times too large."""
    factor = {"residual": 14.0, "lstm": 5.0}[recipe.architecture]
    return replace(recipe, rate=factor * recipe.rate, clip=None, schedule="constant", warmup=40)


ILLNESSES = (
    Illness(
        "clipping-missing",
        (("tanh", "momentum"), ("lstm", "sgd"), ("transformer", "momentum")),
        _clipping_missing,
        _clipped_above_its_norms,
        shows_at_once=True,
    ),
    Illness(
        "clipping-too-tight",
        (("mlp", "momentum"), ("convnet", "sgd"), ("transformer", "momentum")),
        _clipping_too_tight,
        with_(clip=2.0),
    ),
    Illness(
        "optimizer-holds-other-parameters",
        (("mlp", "momentum"), ("transformer", "adamw"), ("residual", "adam")),
        _replaced,
        shows_at_once=True,
    ),
    Illness(
        "weight-not-written",
        (("mlp", "flat-adam"), ("residual", "flat-momentum"), ("transformer", "flat-adam")),
        _transposed,
        shows_at_once=True,
    ),
    Illness(
        "optimizer-state-lost",
        (("mlp", "adamw"), ("transformer", "adam"), ("lstm", "rmsprop")),
        _forgotten,
        with_(schedule="constant", warmup=0),
        shows_at_once=True,
    ),
    Illness("adam-eps-dominates", (("mlp", "adam"), ("transformer", "adamw"), ("convnet", "rmsprop")), _eps),
    Illness(
        "adam-second-moment-lag",
        (("residual", "adam"), ("lstm", "adamw"), ("residual", "adamw")),
        _lag,
        _fast_and_unclipped,
        shows_at_once=True,
    ),
    Illness(
        "weight-decay-too-high",
        (("mlp", "adamw"), ("transformer", "adamw"), ("convnet", "momentum"), ("tanh", "momentum")),
        _decay,
        with_(schedule="constant", warmup=0, steps=440),
        slow=True,
    ),
)
