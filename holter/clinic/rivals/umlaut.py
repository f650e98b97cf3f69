"""UMLAUT's heuristics (CHI 2021), those that need neither an accuracy nor the source text. Once an epoch there, here at
every step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.clinic.rivals.alarms import UNNAMED, in_order, series, told
from holter.diagnosis.finding import Finding
from holter.history import History

LOWEST, HIGHEST = -1.0, 1.0  # of normalised inputs
LOW_RATE, HIGH_RATE = 1e-7, 0.01


def umlaut(history: History) -> tuple[Finding, ...]:
    return in_order((*_of_inputs(history), *_of_rate(history), *_of_losses(history)))


def _of_inputs(history: History) -> Iterator[Finding]:
    steps, layers, least = series(history, "batch", "min")
    _, _, most = series(history, "batch", "max")
    for place, layer in enumerate(layers):
        if layer.startswith("inputs"):
            out = (least[:, place] < LOWEST) | (most[:, place] > HIGHEST)
            yield from told(steps, out, "input-scale", "data")


def _of_rate(history: History) -> Iterator[Finding]:
    steps, rates = history.scalar("learning_rate")
    yield from told(steps, rates > HIGH_RATE, "lr-too-high", "lr")
    yield from told(steps, rates < LOW_RATE, "lr-too-low", "lr")


def _of_losses(history: History) -> Iterator[Finding]:
    steps, losses = history.scalar("loss")
    yield from told(steps, np.isnan(losses), UNNAMED, "loss")
    held_steps, held = history.scalar("val_loss")
    trained = losses[np.searchsorted(steps, held_steps)] if len(held_steps) else np.empty(0)
    worse = np.zeros(len(held), dtype=bool)
    worse[1:] = (np.diff(held) > 0) & (np.diff(trained) <= 0)
    yield from told(held_steps, worse, "overfitting", "data")
