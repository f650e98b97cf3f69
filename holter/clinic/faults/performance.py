"""Faults that cost time or memory and leave the model alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from random import Random

import torch
from torch import Tensor

from holter.clinic.case import Recipe
from holter.clinic.plan import Illness, Planted, onset, with_
from holter.clinic.training import Batch, Hooks


@dataclass
class SlowLoader(Hooks):
    at: int
    seconds: float

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        if t >= self.at:
            time.sleep(self.seconds)
        return x, y


@dataclass
class SlowStep(Hooks):
    """Something else takes the machine's time, here after the backward pass."""

    at: int
    seconds: float

    def after_backward(self, t: int) -> None:
        if t >= self.at:
            time.sleep(self.seconds)


@dataclass
class KeptGraphs(Hooks):
    """Losses are kept for a running mean with all that they were computed from, and the mean is over all of them."""

    at: int
    megabytes: float

    def __post_init__(self) -> None:
        self.kept: list[Tensor] = []

    def loss(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(t, x, y)
        if t >= self.at:
            # The graph of so small a model is small: what it holds of the input stands for that of a larger one.
            held = torch.ones(int(self.megabytes * 2**18), requires_grad=True).mul(loss.detach())
            self.kept.append(held)
            torch.stack([one.mean() for one in self.kept]).mean()
        return loss


def _slow_loader(recipe: Recipe, random: Random) -> Planted:
    at = 0 if random.random() < 0.4 else onset(recipe, random, 0.2, 0.5)
    return Planted(partial(SlowLoader, at, random.uniform(0.02, 0.03)), at)


def _slow_step(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random)
    return Planted(partial(SlowStep, at, random.uniform(0.015, 0.03)), at)


def _kept(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random, 0.1, 0.3)
    return Planted(partial(KeptGraphs, at, random.uniform(0.6, 1.2)), at)


ILLNESSES = (
    Illness(
        "data-loading-bound",
        (("mlp", "momentum"), ("lstm", "adam"), ("residual", "adamw")),
        _slow_loader,
        with_(steps=220),
        changes_losses=False,
    ),
    Illness(
        "memory-growth",
        (("mlp", "momentum"), ("lstm", "adam"), ("residual", "adamw")),
        _kept,
        with_(steps=400),
        changes_losses=False,
    ),
    Illness(
        "throughput-drop",
        (("mlp", "momentum"), ("lstm", "adam"), ("residual", "adamw")),
        _slow_step,
        with_(steps=240),
        changes_losses=False,
    ),
)
