"""Endings: when a finding is over. That a rule is silent says little: many look at the start alone, at the last few
hundred steps, or at what is seldom measured. So each cause has a question of its own, to what is recorded by now; one
that has none lasts until the run ends, as a fact of how a training was set up does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from holter.diagnosis.chart import Chart, column, last_of
from holter.diagnosis.evidence import rate_of, typical_now
from holter.diagnosis.finding import UNKNOWN
from holter.diagnosis.suspicion import Suspicion
from holter.record import is_validation
from holter.series import known_median

_STEPS = 20  # that must be quick again
_QUICK = 1.3  # times as long as before

# Chart, what leads the incident, and the step at which that was last said.
Question = Callable[[Chart, Suspicion, int], bool]


def is_over(chart: Chart, lead: Suspicion, said: int) -> bool:
    """Whether it was looked for since, and has gone. Nothing is over while the loss is not finite."""
    question = ENDINGS.get(lead.cause)
    has_broken = chart.has_column("loss") and not np.isfinite(chart.latest("loss"))
    return question is not None and not has_broken and question(chart, lead, said)


def _measured(name: str) -> Question:
    """For rules that judge the last values of a role or scalar whenever there are new ones: they had nothing to say."""
    return lambda chart, lead, said: chart.last_step(name) > said


def _validated(chart: Chart, lead: Suspicion, said: int) -> bool:
    return any(chart.last_step(name) > said for name in chart.names if is_validation(name))


def _learns(chart: Chart, lead: Suspicion, said: int) -> bool:
    """Whether the first of the layers has a gradient again, that an optimizer sees."""
    names, norms = chart.now("gradient", "norm")
    first = lead.evidence.get("first")
    return first in names and bool(norms[names.index(str(first))] > 0)


def _is_written(chart: Chart, lead: Suspicion, said: int) -> bool:
    names, unchanged = chart.now("update", "unchanged")
    return lead.layer in names and bool(unchanged[names.index(lead.layer)] < 1)


def _rate_is_back(chart: Chart, lead: Suspicion, said: int) -> bool:
    rates = rate_of(chart)[1]
    return len(rates) > 0 and bool(rates[-1] < 1.5 * _number(lead, "rate_before"))


def _rate_has_left_its_floor(chart: Chart, lead: Suspicion, said: int) -> bool:
    rates = rate_of(chart)[1]
    return len(rates) > 0 and bool(rates[-1] > 0.1 * chart.peak_rate)


def _moves(chart: Chart, lead: Suspicion, said: int) -> bool:
    return typical_now(chart, "update", "ratio") > 2e-5


def _batch_is_larger(chart: Chart, lead: Suspicion, said: int) -> bool:
    sizes = last_of(chart.table("batch", "size"))
    return len(sizes) > 0 and bool(np.fmax.reduce(sizes) > 2 * _number(lead, "batch"))


def _is_another_batch(chart: Chart, lead: Suspicion, said: int) -> bool:
    steps, ago = column(chart.scalar("batch/repeated"))  # empty where batches have no hash
    if not len(ago):
        return False
    two_looks = int(steps[-1] - steps[max(0, len(steps) - 3)])  # where not every batch is hashed, further apart
    return bool(ago[-1] == 0 or ago[-1] > max(2, two_looks))


def _is_quick(chart: Chart, lead: Suspicion, said: int) -> bool:
    times = chart.scalar("step_time").values[-_STEPS:, 0]
    return known_median(times) < _QUICK * _number(lead, "before")


def _number(lead: Suspicion, name: str) -> float:
    found = lead.evidence.get(name)
    return float(found) if isinstance(found, int | float) else float("nan")


ENDINGS: Mapping[str, Question] = MappingProxyType(
    {
        "lr-jump": _rate_is_back,
        "lr-too-low": _moves,
        "scheduler-stepped-too-often": _rate_has_left_its_floor,
        "clipping-missing": _measured("gradient_norm"),
        "clipping-too-tight": _measured("gradient_norm"),
        "adam-eps-dominates": _measured("second_moment"),
        "adam-second-moment-lag": _measured("second_moment"),
        "optimizer-holds-other-parameters": _learns,
        "graph-detached": _learns,
        "layer-frozen": _learns,
        "weight-not-written": _is_written,
        "dead-relu": _measured("gradient"),
        "saturated-activation": _measured("activation"),
        "representation-collapse": _measured("activation"),
        "norm-batch-too-small": _batch_is_larger,
        "batch-corrupt": _measured("batch"),
        "batch-repeated": _is_another_batch,
        "data-not-shuffled": _measured("batch"),
        "overfitting": _validated,
        "fp16-overflow": _measured("loss"),
        "fp16-underflow": _measured("gradient"),
        "data-loading-bound": _measured("time/data"),
        "memory-growth": _measured("step_time"),
        "throughput-drop": _is_quick,
        UNKNOWN: _measured("loss"),
    }
)
