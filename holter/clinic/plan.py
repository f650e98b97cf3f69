"""From an illness (one cause on some architectures and optimizers) to the cases of both halves, each with its twin.

Development and held-out cases are drawn from different seeds, widths, depths, batch sizes, class counts and rates, and
have their faults at other steps: what fits one half by its constants does not fit the other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random

from holter.clinic.case import CAUSES, SPLITS, Case, Recipe, Split
from holter.clinic.models import ATTENDING
from holter.clinic.training import Hooks

Pair = tuple[str, str]  # architecture and optimizer

_SHORT: dict[Split, str] = {"development": "dev", "held-out": "held"}
_WIDTHS: dict[Split, tuple[int, ...]] = {"development": (48, 64, 80), "held-out": (40, 56, 72, 96)}
_DEPTHS: dict[Split, tuple[int, ...]] = {"development": (3, 5), "held-out": (4, 6)}
_BATCHES: dict[Split, tuple[int, ...]] = {"development": (24, 40), "held-out": (32, 48)}
_CLASSES: dict[Split, tuple[int, ...]] = {"development": (8, 10), "held-out": (6, 12)}
_FACTORS: dict[Split, tuple[float, ...]] = {"development": (0.8, 1.0, 1.25), "held-out": (0.7, 0.9, 1.15, 1.4)}
_CLIPS: dict[Split, tuple[float | None, ...]] = {
    "development": (1.0, 1.0, 4.0, None),
    "held-out": (1.0, 2.0, 6.0, None),
}

# Rates at which a healthy training learns well: sgd, momentum, adam (and adamw), rmsprop.
_RATES: dict[str, tuple[float, float, float, float]] = {
    "mlp": (0.15, 0.03, 2.5e-3, 8e-4),
    "tanh": (0.15, 0.03, 2.5e-3, 8e-4),
    "convnet": (0.2, 0.03, 4e-3, 1e-3),
    "lstm": (0.3, 0.04, 3e-3, 1e-3),
    "transformer": (0.25, 0.05, 3e-3, 8e-4),
    "patches": (0.15, 0.03, 2e-3, 7e-4),
    "residual": (0.04, 0.008, 1e-3, 3e-4),
}
_ALIKE = {"tied": "transformer", "massive": "transformer", "gains": "residual"}
_PLACES = {"sgd": 0, "momentum": 1, "flat-momentum": 1, "adam": 2, "adamw": 2, "flat-adam": 2, "rmsprop": 3}


@dataclass(frozen=True)
class Planted:
    """A fault as it was planted in a healthy recipe. `recipe` is that of the sick one where it differs."""

    fault: Callable[[], Hooks] = Hooks
    onset: int = 0
    shows: int | None = None  # None: at its onset
    layer: str | tuple[str, ...] | None = None
    recipe: Recipe | None = None
    healthy: Callable[[], Hooks] = Hooks  # of the twin, where the fault is to do the same wrongly


@dataclass(frozen=True)
class Illness:
    """A cause, the trainings that get it, and how. `prepare` makes a drawn recipe fit for it, twin and all."""

    cause: str
    pairs: tuple[Pair, ...]
    plant: Callable[[Recipe, Random], Planted]
    prepare: Callable[[Recipe, Random], Recipe] = lambda recipe, random: recipe
    also_right: tuple[str, ...] = ()
    slow: bool = False
    shows_at_once: bool = False
    changes_losses: bool = True


@dataclass(frozen=True)
class Control:
    """A healthy training that looks frightening, and what makes it so."""

    name: str
    pairs: tuple[Pair, ...]
    prepare: Callable[[Recipe, Random], Recipe] = lambda recipe, random: recipe
    hooks: Callable[[Recipe, Random], Callable[[], Hooks]] = lambda recipe, random: Hooks


def control_cases(controls: Iterable[Control]) -> Iterator[Case]:
    for control in controls:
        for split in SPLITS:
            for number, pair in enumerate(control.pairs, 1):
                name = f"control/{control.name}/{pair[0]}/{pair[1]}/{_SHORT[split]}-{number}"
                random = Random(name)
                recipe = control.prepare(draw(name, pair, split, random), random)
                yield Case(name, "control", recipe, control.hooks(recipe, random), split)


def cases_of(illnesses: Iterable[Illness]) -> Iterator[Case]:
    """Sick cases and their twins, of both halves."""
    for illness in illnesses:
        for split in SPLITS:
            for number, pair in enumerate(illness.pairs, 1):
                yield from _case_and_twin(illness, pair, split, number)


def _case_and_twin(illness: Illness, pair: Pair, split: Split, number: int) -> Iterator[Case]:
    name = f"{illness.cause}/{pair[0]}/{pair[1]}/{_SHORT[split]}-{number}"
    random = Random(name)  # a string seeds it the same way everywhere
    recipe = illness.prepare(draw(name, pair, split, random), random)
    planted = illness.plant(recipe, random)
    twin = f"healthy/{name}"
    yield Case(
        name,
        "sick",
        planted.recipe or recipe,
        planted.fault,
        split,
        cause=illness.cause,
        where=CAUSES[illness.cause],
        layer=planted.layer,
        onset=planted.onset,
        shows=planted.onset if planted.shows is None else planted.shows,
        also_right=illness.also_right,
        slow=illness.slow,
        shows_at_once=illness.shows_at_once,
        changes_losses=illness.changes_losses,
        twin=twin,
    )
    yield Case(twin, "twin", recipe, planted.healthy, split)


def draw(name: str, pair: Pair, split: Split, random: Random) -> Recipe:
    """A healthy recipe of its half."""
    architecture, optimizer = pair
    rates = _RATES.get(_ALIKE.get(architecture, architecture), _RATES["mlp"])
    batch, steps = random.choice(_BATCHES[split]), random.randrange(280, 341, 10)
    schedule = random.choice(("constant", "cosine"))
    return Recipe(
        architecture,
        optimizer,
        seed=zlib.crc32(name.encode()),
        steps=steps - 60 if architecture in ATTENDING else steps,  # a step of theirs takes longer
        width=random.choice(_WIDTHS[split]),
        depth=random.choice(_DEPTHS[split]),
        batch=batch // 3 if rates is _RATES["transformer"] else batch,  # of sequences: each is many examples
        classes=random.choice(_CLASSES[split]),
        rate=rates[_PLACES[optimizer]] * random.choice(_FACTORS[split]),
        clip=random.choice(_CLIPS[split]),
        schedule=schedule,
        warmup=random.randrange(8, 24) if schedule == "cosine" else 0,
    )


def onset(recipe: Recipe, random: Random, first: float = 0.35, last: float = 0.6) -> int:
    """A step in the middle of a training, where it has a past and a future."""
    return random.randrange(int(first * recipe.steps), int(last * recipe.steps))


def with_(**changes: object) -> Callable[[Recipe, Random], Recipe]:
    """A `prepare` that sets some fields of every recipe."""
    return lambda recipe, random: replace(recipe, **changes)  # type: ignore[arg-type]
