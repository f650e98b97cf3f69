"""AutoTrainer's symptoms (ICSE 2021), with the thresholds of its own code.

Those that need an accuracy (slow convergence, oscillation) are left out: a loop need not log one. Its checks run once
an epoch; here at every step.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.clinic.rivals.alarms import in_order, series, told
from holter.diagnosis.finding import Finding
from holter.history import History

VANISHING_RATIO, VANISHING_FIRST, EXPLODING_RATIO, DYING, LARGEST_LOSS = 1e-3, 1e-4, 70.0, 0.7, 1e5


def autotrainer(history: History) -> tuple[Finding, ...]:
    return in_order((*_of_gradients(history), *_of_loss(history)))


def _of_gradients(history: History) -> Iterator[Finding]:
    steps, layers, norms = series(history, "gradient", "norm")
    kernels = [place for place, layer in enumerate(layers) if layer.endswith("weight")]
    if len(kernels) < 2:
        return
    _, _, zeros = series(history, "gradient", "zero_share")
    _, _, counts = series(history, "gradient", "count")
    first, last = norms[:, kernels[0]], norms[:, kernels[-1]]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = first / last
        dead = np.nansum(zeros * counts, axis=1) / np.nansum(counts, axis=1)
    vanishing = (ratio < VANISHING_RATIO) & (first < VANISHING_FIRST)
    yield from told(steps, dead >= DYING, "dead-relu", "layer", layers[kernels[0]])
    yield from told(steps, ratio > EXPLODING_RATIO, "lr-too-high", "lr")
    yield from told(steps, vanishing, "vanishing-gradient", "layer", layers[kernels[0]])


def _of_loss(history: History) -> Iterator[Finding]:
    steps, losses = history.scalar("loss")
    yield from told(steps, ~(losses < LARGEST_LOSS), "lr-too-high", "lr")
