"""Faults of the loss."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from random import Random

from torch import Tensor, nn
from torch.nn import functional

from holter.clinic.case import Recipe
from holter.clinic.plan import Illness, Planted, onset, with_
from holter.clinic.training import Hooks, Training


@dataclass
class SoftmaxTwice(Hooks):
    """The model ends in a softmax, and the loss applies its own."""

    head: str

    def built(self, training: Training) -> None:
        super().built(training)
        head = training.model.get_submodule(self.head)
        setattr(training.model, self.head, nn.Sequential(head, nn.Softmax(-1)))


@dataclass
class WrongSign(Hooks):
    at: int

    def loss(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(t, x, y)
        return -loss if t >= self.at else loss


class Summed(Hooks):
    """reduction="sum" where the mean was meant."""

    def loss(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        output = self.training.output(x)
        if self.training.examples.is_classes:
            return functional.cross_entropy(output.flatten(0, -2), y.flatten(), reduction="sum")
        return functional.mse_loss(output, y, reduction="sum")


_HEADS = {"mlp": "head", "tanh": "out", "convnet": "classifier", "lstm": "head", "transformer": "head"}


def _softmax_twice(recipe: Recipe, random: Random) -> Planted:
    return Planted(partial(SoftmaxTwice, _HEADS[recipe.architecture]))


def _wrong_sign(recipe: Recipe, random: Random) -> Planted:
    at = 0 if random.random() < 0.5 else onset(recipe, random)
    return Planted(partial(WrongSign, at), at)


def _summed(recipe: Recipe, random: Random) -> Planted:
    return Planted(Summed)


ILLNESSES = (
    Illness("double-softmax", (("mlp", "adamw"), ("convnet", "momentum"), ("lstm", "adam")), _softmax_twice),
    Illness("loss-sign", (("mlp", "momentum"), ("transformer", "adamw"), ("convnet", "adam")), _wrong_sign),
    Illness(
        "loss-reduction",
        (("mlp", "adamw"), ("transformer", "adam"), ("convnet", "momentum")),
        _summed,
        with_(clip=1.0),
        shows_at_once=True,
    ),
)
