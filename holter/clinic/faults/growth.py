"""Slow faults: something grows a little every step, and the loss is fine for a long time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random

from holter.clinic.building import blocks
from holter.clinic.case import Recipe
from holter.clinic.models import ATTENDING
from holter.clinic.plan import Illness, Planted, onset
from holter.clinic.training import Hooks


@dataclass
class GrowingBranch(Hooks):
    """The last layer of one residual branch grows by a constant factor a step."""

    at: int
    parameter: str
    factor: float

    def after_step(self, t: int) -> None:
        if t >= self.at:
            self.training.model.get_parameter(self.parameter).data.mul_(self.factor)


@dataclass
class GrowingLogits(Hooks):
    """The projections of queries and keys of one attention grow by a constant factor a step."""

    at: int
    attention: str
    factor: float

    def after_step(self, t: int) -> None:
        if t >= self.at:
            weight = self.training.model.get_parameter(f"{self.attention}.in_proj_weight")
            weight.data[: 2 * len(weight) // 3].mul_(self.factor)


@dataclass
class DriftingLogits(Hooks):
    """All biases of the output move together, ever faster: the softmax does not mind, until its digits run out."""

    at: int
    head: str
    first: float
    factor: float

    def after_step(self, t: int) -> None:
        if t >= self.at:
            bias = self.training.model.get_parameter(f"{self.head}.bias")
            bias.data.add_(self.first * self.factor ** (t - self.at))


def _growing_branch(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random, 0.2, 0.3)
    place = random.randrange(blocks(recipe))
    block, last = {
        "residual": (f"blocks.{place}", "down"),
        "transformer": (f"blocks.{place}", "down"),
        "patches": (f"encoder.{place}", "linear2"),
    }[recipe.architecture]
    parameter = f"{block}.{last}.weight"
    factor = 1 + random.uniform(0.014, 0.02)
    return Planted(partial(GrowingBranch, at, parameter, factor), at, layer=(block, f"{block}.{last}"))


def _growing_logits(recipe: Recipe, random: Random) -> Planted:
    at, place = onset(recipe, random, 0.15, 0.25), random.randrange(blocks(recipe))
    attention = f"blocks.{place}.attention" if recipe.architecture == "transformer" else f"encoder.{place}.self_attn"
    factor = 1 + random.uniform(0.006, 0.009)
    return Planted(partial(GrowingLogits, at, attention, factor), at, layer=attention)


def _drifting_logits(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random, 0.2, 0.35)
    head = {"mlp": "head", "convnet": "classifier", "transformer": "head"}[recipe.architecture]
    sign = random.choice((-1, 1))
    return Planted(partial(DriftingLogits, at, head, sign * random.uniform(0.03, 0.06), 1.012), at, layer=head)


def _long(recipe: Recipe, random: Random) -> Recipe:
    """Slow faults need time; where a step takes long, the model is kept small."""
    recipe = replace(recipe, schedule="constant", warmup=0, steps=460)
    return replace(recipe, steps=400, width=min(recipe.width, 56)) if recipe.architecture in ATTENDING else recipe


ILLNESSES = (
    Illness(
        "residual-growth",
        (("transformer", "adamw"), ("residual", "momentum"), ("patches", "adam")),
        _growing_branch,
        _long,
        slow=True,
    ),
    Illness(
        "attention-logit-growth",
        (("transformer", "adamw"), ("patches", "adam"), ("transformer", "momentum")),
        _growing_logits,
        _long,
        slow=True,
    ),
    Illness(
        "output-logit-drift",
        (("mlp", "momentum"), ("transformer", "adamw"), ("convnet", "adam")),
        _drifting_logits,
        _long,
        slow=True,
    ),
)
