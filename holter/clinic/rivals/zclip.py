"""ZClip (arXiv 2504.02507): a norm is a spike where its z-score against moving averages is above 2.5."""

from __future__ import annotations

import numpy as np

from holter.clinic.rivals.alarms import UNNAMED, in_order, told
from holter.diagnosis.finding import Finding
from holter.history import History

THRESHOLD, ALPHA, WARMUP, EPS = 2.5, 0.97, 25, 1e-6


def zclip(history: History) -> tuple[Finding, ...]:
    steps, norms = history.scalar("gradient_norm")
    alarms = np.zeros(len(norms), dtype=bool)
    first = norms[:WARMUP][np.isfinite(norms[:WARMUP])]
    if len(norms) > WARMUP and len(first):
        mean, variance = float(first.mean()), float(first.var())
        for i in range(WARMUP, len(norms)):
            z = (norms[i] - mean) / (variance**0.5 + EPS)
            alarms[i] = not z <= THRESHOLD
            # A spike enters the averages as it is clipped: pulled towards the mean.
            value = mean + THRESHOLD**2 / z * variance**0.5 if z > THRESHOLD else norms[i]
            if np.isfinite(value):
                mean = ALPHA * mean + (1 - ALPHA) * value
                variance = ALPHA * variance + (1 - ALPHA) * (value - mean) ** 2
    return in_order(told(steps, alarms, UNNAMED, "optimizer"))
