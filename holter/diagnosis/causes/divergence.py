"""Divergence: weights that have outgrown their beginnings, and a loss that has risen with them and stays up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.diagnosis.chart import Chart
from holter.diagnosis.evidence import finds_its_rate, matrices, rate_of, typical_of
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Floats, Series, median, overall_median
from holter.words import number

_RECENT = 20  # losses that stand for "now"
_GROWN = 3.0  # times their first size: weights that run away
_LEAPT = 1.3  # times its size from one look to the next: from there on they ran away
_LOST = 1e3  # times its start: a loss that no batch and no target makes


def diverges(case: Case) -> Iterator[Suspicion]:
    """lr-too-high: a loss that has grown a thousandfold, or that steps whose length an optimizer found by itself have
    left above its start. What led there may be a rate, or targets that the model makes itself."""
    chart = case.chart
    times = _risen(chart)
    is_own = finds_its_rate(chart)
    if times is None or not times > (1.02 if is_own else _LOST) or not _weights_grown(chart) > _GROWN:
        return
    sizes = typical_of(chart, "update", "ratio")[1]
    since, largest = _grew_since(chart), float(np.max(sizes, initial=0.0))
    rates = rate_of(chart)[1]
    rate = float(rates[-1]) if len(rates) else float("nan")
    remedy = (
        f"multiply what the optimizer finds by less (a rate of {number(0.1 * rate)} in place of {number(rate)}), or "
        "hold it back (a growth_rate of 1.02, or a smaller d0)"
        if is_own
        else f"lower the rate from {number(rate)} to about {number(0.1 * rate)} and clip the gradients "
        "(monitor.clip_grad_norm_(1.0)); where the targets come from the model itself, take them from a copy that is "
        "renewed every few hundred steps"
    )
    yield Suspicion(
        "lr-too-high",
        "lr",
        rose_since(chart) if since is None else since,
        0.8,
        Kind.STATE if since is None else Kind.PATTERN,
        severity="critical",
        evidence={"loss_over_start": times, "update_ratio": largest, "rate": rate},
        advice=f"The loss is {number(times)} times what it was at the start and stays there, and the weights have "
        f"outgrown their first sizes: {remedy}. Go on from a checkpoint before it rose, or start anew.",
        check="It worked if the loss stays below its start and the weights keep their size.",
    )


def _risen(chart: Chart) -> float | None:
    """How many times its start the lowest of the last losses is, but for a few; None where a loss that goes below zero
    has no size, and where it is too early."""
    losses = chart.scalar("loss")
    opening, recent = losses.opening[:, 0], losses.values[-_RECENT:, 0]
    if losses.seen < 2 * _RECENT or not (opening > 0).all() or not (recent > 0).all() or not np.isfinite(recent).all():
        return None
    return float(np.quantile(recent, 0.1)) / overall_median(opening[:5])


def _weights_grown(chart: Chart) -> float:
    """How many times its first size a typical matrix is."""
    norms = chart.table("update", "weight_norm")
    return float(_typical_growth(chart, norms, norms.opening[:1], norms.values[-1:])[0]) if len(norms) > 1 else 0.0


def _grew_since(chart: Chart) -> int | None:
    """The look after which a typical matrix leapt for the first time."""
    norms = chart.table("update", "weight_norm")
    leaps = np.flatnonzero(_typical_growth(chart, norms, norms.values[:-1], norms.values[1:]) > _LEAPT)
    return int(norms.steps[leaps[0]]) if len(leaps) else None


def _typical_growth(chart: Chart, norms: Series, before: Floats, after: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return median((after / before)[:, matrices(chart, norms)].T)


def rose_since(chart: Chart) -> int:
    """The step after the last, of those kept, at which the loss was not far above its start."""
    losses = chart.scalar("loss")
    near = losses.steps[losses.values[:, 0] < 10 * overall_median(losses.opening[:5, 0])]
    return int(near[-1]) + 1 if len(near) else chart.first_step


RULES = (diverges,)
