"""A gradient norm seven standard deviations above the mean of the last 1,000 steps: the spike score of OLMo 2."""

from __future__ import annotations

import numpy as np

from holter.clinic.rivals.alarms import UNNAMED, in_order, told
from holter.diagnosis.finding import Finding
from holter.history import History

SIGMAS, WINDOW, LEAST = 7.0, 1000, 20


def seven_sigma(history: History) -> tuple[Finding, ...]:
    steps, norms = history.scalar("gradient_norm")
    alarms = np.zeros(len(norms), dtype=bool)
    for i in range(LEAST, len(norms)):
        past = norms[max(0, i - WINDOW) : i]
        past = past[np.isfinite(past)]
        if len(past) >= LEAST:
            alarms[i] = not norms[i] - past.mean() <= SIGMAS * past.std()
    return in_order(told(steps, alarms, UNNAMED, "optimizer"))
