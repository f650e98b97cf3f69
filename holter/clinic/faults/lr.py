"""Faults of the learning rate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random

from holter.clinic.case import Recipe
from holter.clinic.plan import Illness, Planted, onset, with_
from holter.clinic.training import Hooks


@dataclass
class RateJump(Hooks):
    """Someone multiplies the rate of every group, the base rates of a scheduler included."""

    at: int
    factor: float

    def before_step(self, t: int) -> None:
        if t != self.at:
            return
        for group in self.training.optimizer.param_groups:
            group["lr"] *= self.factor
        if self.training.scheduler is not None:
            self.training.scheduler.base_lrs = [rate * self.factor for rate in self.training.scheduler.base_lrs]


@dataclass
class EagerScheduler(Hooks):
    """scheduler.step() once a micro-batch, or once in two places: several times a step."""

    times: int

    def scheduler_steps(self, t: int) -> int:
        return self.times


def _too_high(recipe: Recipe, random: Random) -> Planted:
    factor = random.uniform(60, 150)
    return Planted(recipe=replace(recipe, rate=recipe.rate * factor))


def _jump(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random)
    # Adam forgives more than SGD does, whose steps grow with the gradients that they cause.
    factor = random.uniform(15, 40) if recipe.optimizer in ("adam", "adamw", "rmsprop") else random.uniform(12, 25)
    return Planted(partial(RateJump, at, factor), at)


def _too_low(recipe: Recipe, random: Random) -> Planted:
    return Planted(recipe=replace(recipe, rate=recipe.rate * random.uniform(0.5e-4, 2e-4)))


def _stepped_too_often(recipe: Recipe, random: Random) -> Planted:
    times = random.choice((3, 4, 5))
    return Planted(partial(EagerScheduler, times), onset=0, shows=recipe.steps // times)


def _without_warmup(recipe: Recipe, random: Random) -> Planted:
    return Planted(recipe=replace(recipe, warmup=0))


def _high_but_warmed_up(recipe: Recipe, random: Random) -> Recipe:
    """A rate that a training bears once its second moments are grown, not before."""
    factor = {"adam": 22.0, "rmsprop": 8.0 if recipe.architecture == "residual" else 12.0}[recipe.optimizer]
    return replace(recipe, rate=recipe.rate * factor, warmup=60, schedule="constant", clip=None, beta2=0.999)


ILLNESSES = (
    Illness(
        "lr-too-high",
        (("mlp", "momentum"), ("transformer", "adamw"), ("convnet", "sgd")),
        _too_high,
        with_(schedule="constant", warmup=0),
        shows_at_once=True,
    ),
    Illness(
        "lr-jump",
        (("mlp", "momentum"), ("transformer", "adamw"), ("residual", "adam"), ("lstm", "rmsprop")),
        _jump,
        shows_at_once=True,
    ),
    Illness("lr-too-low", (("mlp", "momentum"), ("transformer", "adamw"), ("residual", "adam")), _too_low),
    Illness(
        "scheduler-stepped-too-often",
        (("mlp", "momentum"), ("transformer", "adamw"), ("convnet", "adam")),
        _stepped_too_often,
        with_(schedule="linear", warmup=12),
    ),
    Illness(
        "warmup-missing",
        (("residual", "adam"), ("mlp", "rmsprop"), ("residual", "rmsprop")),
        _without_warmup,
        _high_but_warmed_up,
        shows_at_once=True,
    ),
)
