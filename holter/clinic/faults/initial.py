"""Faults that are there before the first step: initialisation, and activations that let no gradient through."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch

from holter.clinic.building import spine
from holter.clinic.case import Recipe
from holter.clinic.plan import Illness, Planted, with_
from holter.clinic.training import Hooks, Training


@dataclass
class ScaledWeights(Hooks):
    """The matrices of these layers are so many times as large as they should be."""

    layers: tuple[str, ...]
    factor: float

    def built(self, training: Training) -> None:
        super().built(training)
        for layer in self.layers:
            for parameter in training.model.get_submodule(layer).parameters():
                if parameter.ndim > 1:
                    parameter.data.mul_(self.factor)


@dataclass
class ConstantWeights(Hooks):
    """Every weight of these layers is the same, and so is every unit, for ever."""

    layers: tuple[str, ...]

    def built(self, training: Training) -> None:
        super().built(training)
        for layer in self.layers:
            for parameter in training.model.get_submodule(layer).parameters():
                if parameter.ndim > 1:
                    torch.nn.init.constant_(parameter, parameter[0].numel() ** -0.5 / 2)


def _first_third(layers: list[str]) -> tuple[str, ...]:
    """Where a chain begins: it is there that one should look."""
    return tuple(layers[: max(2, len(layers) // 3)])


def _too_large(recipe: Recipe, random: Random) -> Planted:
    hidden = spine(recipe)[:-1]
    return Planted(partial(ScaledWeights, tuple(hidden), random.uniform(2.5, 3.5)), layer=_first_third(hidden))


def _too_small(recipe: Recipe, random: Random) -> Planted:
    hidden = spine(recipe)[:-1]
    return Planted(partial(ScaledWeights, tuple(hidden), random.uniform(0.12, 0.25)), layer=_first_third(hidden))


def _symmetric(recipe: Recipe, random: Random) -> Planted:
    layers = spine(recipe)
    return Planted(partial(ConstantWeights, tuple(layers)), layer=tuple(layers[:-1]))


def _sigmoids(recipe: Recipe, random: Random) -> Planted:
    return Planted(recipe=replace(recipe, activation="sigmoid"), layer=_first_third(spine(recipe)[:-1]))


def _deep(recipe: Recipe, random: Random) -> Recipe:
    return replace(recipe, depth=recipe.depth + 4)


def _deep_without_norm(recipe: Recipe, random: Random) -> Recipe:
    """A convolution without norm learns only at a lower rate."""
    rate = recipe.rate / 2 if recipe.architecture == "convnet" else recipe.rate
    return replace(recipe, norm=False, rate=rate, clip=1.0)


ILLNESSES = (
    Illness(
        "vanishing-gradient",
        (("mlp", "momentum"), ("tanh", "adam"), ("convnet", "adamw")),
        _sigmoids,
        lambda recipe, random: replace(_deep_without_norm(_deep(recipe, random), random), width=48),
        shows_at_once=True,
    ),
    Illness(
        "init-too-large",
        (("mlp", "momentum"), ("residual", "adamw"), ("convnet", "adam")),
        _too_large,
        _deep_without_norm,
        shows_at_once=True,
    ),
    Illness(
        "init-too-small",
        (("mlp", "momentum"), ("tanh", "adam"), ("convnet", "adamw")),
        _too_small,
        _deep_without_norm,
        also_right=("vanishing-gradient",),
        shows_at_once=True,
    ),
    Illness(
        "init-symmetric",
        (("mlp", "adamw"), ("tanh", "momentum"), ("convnet", "adam")),
        _symmetric,
        with_(norm=None),
        shows_at_once=True,
    ),
)
