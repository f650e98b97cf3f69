"""Controls: healthy trainings that look frightening. No warning on any of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from torch import Tensor

from holter.clinic.building import make_optimizer
from holter.clinic.case import Recipe
from holter.clinic.plan import Control, with_
from holter.clinic.special import Taught
from holter.clinic.training import Batch, Hooks, Training


class HeadOnly(Hooks):
    """The optimizer was given the head alone; the rest has gradients that nobody uses."""

    def built(self, training: Training) -> None:
        super().built(training)
        training.optimizer = make_optimizer(training.recipe, training.model.get_submodule("head"))


@dataclass
class Curriculum(Hooks):
    """Half of the classes at first, all of them from a step on."""

    at: int

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        if t >= self.at:
            return x, y
        easy = y < self.training.recipe.classes // 2
        return x[easy], y[easy]


class NoisyLabels(Hooks):
    """One label in five is any."""

    def built(self, training: Training) -> None:
        super().built(training)
        random = torch.Generator().manual_seed(training.recipe.seed + 3)
        targets = training.examples.targets
        wrong = torch.rand(len(targets), generator=random) < 0.2
        any_ = torch.randint(training.recipe.classes, targets.shape, generator=random)
        targets[wrong] = any_[wrong]


class FollowingTeacher(Hooks):
    def after_step(self, t: int) -> None:
        model = self.training.model
        assert isinstance(model, Taught)
        with torch.no_grad():
            for theirs, ours in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                theirs.lerp_(ours, 0.05)


@dataclass
class Ramp(Hooks):
    """Batches grow from an eighth to the whole, doubling."""

    every: int

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        size = min(len(x), max(2, len(x) // 8 * 2 ** (t // self.every)))
        return x[:size], y[:size]


def _to_the_end(recipe: Recipe, random: Random) -> Recipe:
    """Little to learn and a rate that falls to zero: gradients become a thousandth of what they were."""
    return replace(recipe, classes=4, examples=256, schedule="linear", warmup=10, steps=400, rate=1.5 * recipe.rate)


def _shallow(recipe: Recipe, random: Random) -> Recipe:
    """What a few random layers make of the inputs can still be told apart."""
    return replace(recipe, depth=recipe.depth // 2 + 1, schedule="constant", warmup=0)


_CONSTANT = with_(schedule="constant", warmup=0)

CONTROLS = (
    Control("warmup-cosine", (("transformer", "adamw"), ("mlp", "momentum")), with_(schedule="cosine", warmup=50)),
    Control("step-decay", (("convnet", "momentum"), ("mlp", "adam")), with_(schedule="steps", warmup=0)),
    Control("cyclical-rate", (("mlp", "momentum"), ("transformer", "adam")), with_(schedule="cyclic", warmup=0)),
    Control("warm-restarts", (("convnet", "momentum"), ("residual", "adam")), with_(schedule="restarts", warmup=0)),
    Control("sparse-rows", (("words", "sgd"), ("words", "adam")), with_(clip=None)),
    Control("tied-weights", (("tied", "adamw"), ("tied", "momentum"))),
    Control("frozen-backbone", (("frozen", "adamw"), ("frozen", "momentum")), _shallow),
    Control("backbone-not-held", (("mlp", "adamw"), ("mlp", "momentum")), _shallow, lambda recipe, random: HeadOnly),
    Control("accumulation", (("mlp", "momentum"), ("transformer", "adamw")), with_(accumulate=3, steps=220)),
    Control(
        "scaler-searching",
        (("convnet", "adam"), ("mlp", "momentum")),
        with_(precision="float16", scaler=2.0**24, schedule="constant", warmup=0),
    ),
    Control("tiny-batches", (("mlp", "sgd"), ("residual", "adam"), ("tanh", "adamw")), with_(batch=2)),
    Control("idle-experts", (("experts", "adamw"), ("experts", "momentum"))),
    Control("lora", (("lora", "adamw"), ("lora", "adam"))),
    Control("zero-gains", (("gains", "adamw"), ("gains", "momentum"))),
    Control(
        "curriculum",
        (("mlp", "momentum"), ("convnet", "adam")),
        _CONSTANT,
        lambda recipe, random: partial(Curriculum, random.randrange(recipe.steps // 3, recipe.steps // 2)),
    ),
    Control(
        "large-steps", (("mlp", "momentum"), ("convnet", "momentum")), lambda r, random: replace(r, rate=2 * r.rate)
    ),
    Control("label-noise", (("mlp", "adamw"), ("convnet", "momentum")), hooks=lambda recipe, random: NoisyLabels),
    Control("massive-activations", (("massive", "adamw"), ("massive", "momentum"))),
    Control("dropout", (("dropout", "adamw"), ("dropout", "momentum"))),
    Control("checkpointing", (("checkpointed", "adamw"), ("checkpointed", "sgd"))),
    Control(
        "ema-teacher", (("taught", "adamw"), ("taught", "momentum")), hooks=lambda recipe, random: FollowingTeacher
    ),
    Control(
        "batch-ramp",
        (("mlp", "momentum"), ("transformer", "adamw")),
        _CONSTANT,
        lambda recipe, random: partial(Ramp, recipe.steps // 5),
    ),
    Control("end-of-training", (("lstm", "adam"), ("convnet", "momentum")), _to_the_end),
)
