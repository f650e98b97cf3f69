"""Faults of the training loop."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from holter.clinic.case import Recipe
from holter.clinic.plan import Illness, Planted, onset, with_
from holter.clinic.training import Hooks


@dataclass
class NeverZeroed(Hooks):
    at: int

    def zeroes_gradients(self, t: int) -> bool:
        return t < self.at


@dataclass
class Accumulating(Hooks):
    """From a step on, several micro-batches make a step."""

    at: int
    times: int

    def micro_batches(self, t: int) -> int:
        return self.times if t >= self.at else 1


@dataclass
class AccumulatingSums(Accumulating):
    """... and nobody divides by their number."""

    def share(self, t: int) -> float:
        return 1.0


def _never_zeroed(recipe: Recipe, random: Random) -> Planted:
    at = 0 if random.random() < 0.4 else onset(recipe, random)
    return Planted(partial(NeverZeroed, at), at)


def _not_averaged(recipe: Recipe, random: Random) -> Planted:
    at, times = onset(recipe, random), random.choice((3, 4))
    return Planted(partial(AccumulatingSums, at, times), at, healthy=partial(Accumulating, at, times))


ILLNESSES = (
    Illness(
        "zero-grad-missing",
        (("mlp", "momentum"), ("transformer", "adamw"), ("convnet", "adam"), ("tanh", "sgd")),
        _never_zeroed,
        with_(clip=None),  # a clip would scale down what was left over, too
    ),
    Illness(
        "accumulation-not-averaged",
        (("mlp", "momentum"), ("transformer", "adamw"), ("residual", "sgd")),
        _not_averaged,
        with_(schedule="constant", warmup=0, steps=240),
        shows_at_once=True,
    ),
)
