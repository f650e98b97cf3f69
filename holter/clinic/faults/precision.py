"""Faults of half precision, in real float16 and bfloat16."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from torch import Tensor

from holter.clinic.building import spine
from holter.clinic.case import Recipe
from holter.clinic.plan import Illness, Planted, onset
from holter.clinic.training import Hooks

LARGEST = torch.finfo(torch.float16).max


@dataclass
class NearOverflow(Hooks):
    """What one layer puts out is scaled up until many a batch reaches beyond float16; the norm behind it hides that."""

    at: int
    module: str
    reach: float  # of the largest output, as a share of what float16 holds

    def before_step(self, t: int) -> None:
        if t == self.at - 1:
            self.handle = self.training.model.get_submodule(self.module).register_forward_hook(self._see)
        elif t == self.at:
            self.handle.remove()
            layer = self.training.model.get_submodule(self.module)
            for parameter in layer.parameters():
                parameter.data.mul_(self.reach * LARGEST / self.largest)

    def _see(self, module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        self.largest = float(output.detach().abs().max())


@dataclass
class SmallLoss(Hooks):
    """One part of a larger objective: the loss counts by a small weight. The mean without it is logged."""

    weight: float

    def loss(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(t, x, y)
        return loss.detach() + self.weight * (loss - loss.detach())


def _overflow(recipe: Recipe, random: Random) -> Planted:
    at = onset(recipe, random, 0.35, 0.5)
    if recipe.architecture == "convnet":
        module, reach = f"stages.{random.randrange(recipe.depth)}.0", random.uniform(1.08, 1.25)
    else:  # where every token of every batch has its share in the largest value
        module, reach = random.choice(spine(recipe)[1:-1]) + ".down", random.uniform(1.05, 1.2)
    return Planted(partial(NearOverflow, at, module, reach), at, layer=module)


def _underflow(recipe: Recipe, random: Random) -> Planted:
    lowest = {"mlp": -5.1, "convnet": -4.75, "transformer": -3.4}[recipe.architecture]
    weight = 10 ** random.uniform(lowest, lowest + 0.2)
    return Planted(partial(SmallLoss, weight), recipe=replace(recipe, scaler=None), healthy=partial(SmallLoss, weight))


def _update_lost(recipe: Recipe, random: Random) -> Planted:
    return Planted(recipe=replace(recipe, precision="bfloat16"))


def _half(recipe: Recipe, random: Random) -> Recipe:
    """A skipped first step would come before the scheduler's: no schedule."""
    return replace(
        recipe,
        precision="float16",
        scaler=2.0**14,
        schedule="constant",
        warmup=0,
        clip=1.0,
        width=min(recipe.width, 64),
    )


def _half_with_small_eps(recipe: Recipe, random: Random) -> Recipe:
    """Adam does not mind a small loss as long as its eps is smaller still."""
    return replace(_half(recipe, random), eps=1e-15)


def _small_steps(recipe: Recipe, random: Random) -> Recipe:
    """So small as one takes them at the end of a training or to fine-tune."""
    factor = 0.13 if recipe.optimizer in ("adam", "adamw") else 0.1
    return replace(recipe, rate=recipe.rate * factor)


ILLNESSES = (
    Illness(
        "fp16-overflow", (("convnet", "momentum"), ("transformer", "adamw"), ("convnet", "adam")), _overflow, _half
    ),
    Illness(
        "fp16-underflow",
        (("mlp", "adamw"), ("convnet", "adam"), ("transformer", "adam")),
        _underflow,
        _half_with_small_eps,
        shows_at_once=True,
    ),
    Illness(
        "bf16-update-lost",
        (("mlp", "adamw"), ("transformer", "adam"), ("residual", "momentum")),
        _update_lost,
        _small_steps,
        shows_at_once=True,
    ),
)
