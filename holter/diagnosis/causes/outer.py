"""The outer limits: what is beyond them is told even where no cause is known, with the series that left first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.diagnosis.causes.batches import labels_changed
from holter.diagnosis.causes.divergence import rose_since
from holter.diagnosis.chart import Chart
from holter.diagnosis.events import Event
from holter.diagnosis.evidence import first_nonfinite
from holter.diagnosis.finding import UNKNOWN
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Series, overall_median
from holter.words import number

_LASTING = 12  # values in a row that lie outside
_CREPT = 20  # values that stand for "now"
_BEFORE = 20  # steps before it in which what led to it is looked for
_WINDOW = 200  # steps in which a departure is looked for
_FIRST_HELD = "batch/first_nonfinite"  # of a batch whose rows were not measured
_FEW = 4  # values that stand for a level
_BACK = 1.1  # times its level before: a series that is back there has recovered


def unexplained(case: Case) -> Iterator[Suspicion]:
    """unknown: a loss or a gradient far above what it was, and still there, or not finite any more; a note where it has
    come back since."""
    limits, over = case.limits, None
    for name, warns, stops, least in (
        ("loss", limits.loss_spike, limits.critical_loss_spike, 0.0),
        ("gradient_norm", limits.norm_jump, limits.norm_jump, limits.critical_norm),
    ):
        lost = _lost_since(case, name)
        if lost is not None:
            yield _unknown(case, name, lost, float("inf"), "critical")
            return
        series = case.chart.scalar(name)
        for event in case.lately(name, _WINDOW, direction=1):
            if event.values < _LASTING or event.factor < warns or labels_changed(case.chart, event.since):
                continue
            if _is_back(series, event, least):
                over = over or event
            elif event.until is None and _is_beyond(series, least):
                severity = "critical" if event.factor >= stops else "warning"
                yield _unknown(case, name, event.since, event.factor, severity)
                return
    times = _crept_up(case.chart)
    if times >= limits.critical_loss_spike:
        severity = "critical" if times >= limits.critical_loss_spike**2 else "warning"
        yield _unknown(case, "loss", rose_since(case.chart), times, severity)
    elif over is not None:
        yield _unknown(case, over.series, over.since, over.factor, "info")


def _is_back(series: Series, event: Event, least: float) -> bool:
    """Return whether the last values are at the level before the departure, or below, and some were beyond the limit
    meanwhile."""
    before, after = series.before(event.since, _LASTING)[:, 0], series.since(event.since)[:, 0]
    if len(before) < _FEW or len(after) < event.values + _FEW or not np.isfinite(after[-_FEW:]).all():
        return False
    return bool(after.max() > least) and overall_median(after[-_FEW:]) <= _BACK * overall_median(before)


def _crept_up(chart: Chart) -> float:
    """How many times the highest of its first values the lowest of the last losses is: little by little, so that none
    of them was far above those just before. NaN where one is negative, and has no size."""
    losses = chart.scalar("loss")
    opening, recent = losses.opening[:, 0], losses.values[-_CREPT:, 0]
    if losses.seen < len(opening) + _CREPT or not (opening > 0).all() or not (recent > 0).all():
        return float("nan")
    return float(recent.min() / opening.max())


def _is_beyond(series: Series, least: float) -> bool:
    """Whether the last value is; one that may be negative has no level to be a multiple of."""
    is_size = series.names[0] != "loss" or not (series.values <= 0).any()
    return is_size and len(series) > 0 and bool(series.values[-1, 0] > least)


def _lost_since(case: Case, name: str) -> int | None:
    """Since when the last values have not been finite; a scaler that skips one step is not meant."""
    if np.isfinite(case.chart.latest(name)):
        return None
    series = case.chart.scalar(name)
    if name != "loss" and len(case.chart.scalar("loss_scale")):
        return None
    if len(series) < 3 or np.isfinite(series.values[-3:]).any():
        return None
    finite = np.flatnonzero(np.isfinite(series.values[:, 0]))
    return int(series.steps[finite[-1] + 1]) if len(finite) else first_nonfinite(series)


def _unknown(case: Case, name: str, since: int, factor: float, severity: str) -> Suspicion:
    first = _first(case, since)
    what = name.replace("_", " ")
    is_over = severity == "info"
    course = "is not finite" if np.isinf(factor) else f"{'was' if is_over else 'is'} {number(factor)} times what it was"
    led = "nothing that was recorded left its band before"
    if first is not None:
        led = f"{_told(first)} left its band first, at step {first.since:,}"
    return Suspicion(
        UNKNOWN,
        "layer" if first is not None and first.layer in case.chart.parameters else "loss",
        since if first is None else first.since,
        0.55,
        Kind.STATE,
        layer=first.layer if first is not None and first.layer in case.chart.parameters else None,
        severity=severity,
        evidence={"series": name, "times": factor, "first": _told(first) if first is not None else None},
        advice=f"{'After' if is_over else 'Since'} step {since:,} the {what} {course}"
        f"{' and came back' if is_over else ''}, and no cause that Holter knows fits; {led}. "
        f"{_unseen(case.chart, since) if np.isinf(factor) else ''}Look at what "
        f"changed around that step in the data, the schedule and the code"
        f"{'' if is_over else ', and go on from a checkpoint before it'}.",
        check=f"It worked if the {what} stays in its band past that step.",
    )


def _unseen(chart: Chart, since: int) -> str:
    """What is said of a batch of which it is not known whether it held the first NaN."""
    later = chart.scalar("batch/nonfinite").steps  # where several make a step
    is_first_seen = since in chart.table("batch", "nonfinite").steps or since in chart.scalar(_FIRST_HELD).steps
    if is_first_seen and (not len(later) or since in later):
        return ""
    which = f"{'A later micro-batch' if is_first_seen else 'The batch'} of step {since:,}"
    told = "measured (budget=None measures all)" if chart.layers("batch") else "logged (inputs=, targets=)"
    return f"{which} may have held NaN or infinite values: it was not {told}. "


def _first(case: Case, since: int) -> Event | None:
    """What left its band first, of all that did not long before."""
    near = [event for event in case.events.all(since - _BEFORE) if event.since <= since and event.is_sustained]
    return min(near, key=lambda event: event.since) if near else None


def _told(event: Event) -> str:
    series = event.series.replace("/", " ").replace("_", " ")
    return f"{series} of {event.layer}" if event.layer is not None else series


RULES = (unexplained,)
