"""SageMaker Debugger's built-in rules with their documented defaults, as far as a record has what they read."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.clinic.rivals.alarms import UNNAMED, Floats, in_order, series, told, told_of_layers
from holter.diagnosis.finding import Finding
from holter.history import History

VANISHING = 1e-7  # of the mean of absolute gradients
LARGE_UPDATE, SMALL_UPDATE = 10.0, 1e-8
DEAD_LAYER = SATURATED_LAYER = 0.5
VARIANCES, FIRST_STEPS = 10.0, 10  # PoorWeightInitialization: largest over smallest variance, steps that it looks at
DECREASE, EVERY = 0.001, 10  # LossNotDecreasing
OVERFIT = 0.1


def sagemaker(history: History) -> tuple[Finding, ...]:
    rules = (_vanishing, _exploding, _updates, _dead, _saturated, _initialisation, _not_decreasing, _overfit)
    return in_order(finding for rule in rules for finding in rule(history))


def _vanishing(history: History) -> Iterator[Finding]:
    steps, layers, means = series(history, "gradient", "abs_mean")
    yield from told_of_layers(steps, layers, means < VANISHING, "vanishing-gradient")


def _exploding(history: History) -> Iterator[Finding]:
    steps, layers, counts = series(history, "gradient", "nonfinite")
    yield from told_of_layers(steps, layers, counts > 0, UNNAMED)
    steps, losses = history.scalar("loss")
    yield from told(steps, ~np.isfinite(losses), UNNAMED, "loss")


def _updates(history: History) -> Iterator[Finding]:
    steps, layers, ratios = series(history, "update", "ratio")
    yield from told_of_layers(steps, layers, ratios > LARGE_UPDATE, "lr-too-high", "lr")
    yield from told_of_layers(steps, layers, ratios < SMALL_UPDATE, "lr-too-low", "lr")


def _dead(history: History) -> Iterator[Finding]:
    steps, layers, shares = series(history, "activation", "dead")
    yield from told_of_layers(steps, layers, shares > DEAD_LAYER, "dead-relu")


def _saturated(history: History) -> Iterator[Finding]:
    steps, layers, shares = series(history, "activation", "saturated")
    yield from told_of_layers(steps, layers, shares > SATURATED_LAYER, "saturated-activation")


def _initialisation(history: History) -> Iterator[Finding]:
    steps, _, deviations = series(history, "activation", "std")
    if not len(steps):
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        variances: Floats = np.fmax.reduce(deviations**2, axis=1) / np.fmin.reduce(deviations**2, axis=1)
    yield from told(steps, (steps < FIRST_STEPS) & (variances > VARIANCES), "init-too-large", "layer")


def _not_decreasing(history: History) -> Iterator[Finding]:
    steps, losses = history.scalar("loss")
    alarms = np.zeros(len(losses), dtype=bool)
    for i in range(EVERY, len(losses), EVERY):
        alarms[i] = not losses[i] <= losses[i - EVERY] * (1 - DECREASE)
    yield from told(steps, alarms, UNNAMED, "loss")


def _overfit(history: History) -> Iterator[Finding]:
    steps, held = history.scalar("val_loss")
    all_steps, losses = history.scalar("loss")
    near = np.array([losses[max(0, i - EVERY) : i + 1].mean() for i in np.searchsorted(all_steps, steps)])
    if len(steps):
        yield from told(steps, (held - near) / near > OVERFIT, "overfitting", "data")
