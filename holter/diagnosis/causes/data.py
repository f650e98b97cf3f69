"""The data: batches that are broken or out of scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from holter.diagnosis.causes.batches import (
    OFF,
    USUAL,
    Columns,
    classes_in,
    first_inputs,
    first_losses,
    guess_loss,
    numeric_inputs,
    target_power,
)
from holter.diagnosis.causes.nonfinite import not_finite
from holter.diagnosis.causes.repeated import repeated
from holter.diagnosis.chart import Chart, column
from holter.diagnosis.events import Event
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import TINY, Series, known_median, logs, overall_median, spread
from holter.words import number

_SHORT = 3  # batches in a row that are an accident; more of them are how the data is now
_FAR = 10.0  # times the usual spread of a statistic of batches: a heavy tail passes it once in 100,000 batches
_EVEN = 0.01  # powers of ten: the least spread of batches that all look the same
_RANGE = 1.3  # times the whole range of the batches before
_KNOWN = 8  # batches that tell what is usual
_BROKEN = 5.0  # times the usual, or a part of it: less is told of dense inputs alone, with an effect on the loss
_RARE = 100.0  # times the usual: counts of clicks or words span two powers of ten, and large ones cost a larger loss
_LATELY = 40  # steps for which an accident that is over is still told
_FLAT = 0.02  # the largest value of inputs that are too small; sparse ones (one-hot) have ones among them
_LEVEL = 6  # batches that make a level
_OPENING = 24  # batches at the start that tell what is usual
_EACH = 1.5  # the same of each batch of a level
_RESCALED = 2.5  # times its former size: what the next stage of a curriculum hardly does


# One batch that is broken -----------------------------------------------------------------------------------------


def corrupt(case: Case) -> Iterator[Suspicion]:
    """batch-corrupt: a batch or two far from all others, and a gradient or a loss that shows it in the same step."""
    near = [event for name in ("batch/std", "batch/abs_max") for event in case.lately(name, _LATELY)]
    labels = classes_in(case.chart) if near else set()
    short = [
        event for event in near if event.layer not in labels and event.until is not None and event.values <= _SHORT
    ]
    found = [one for one in (_departure(case, event) for event in short) if one is not None]
    if not found:
        return
    worst = max(found, key=lambda one: (_at_once(case, one.event.since) is not None, _size(one.times)))
    event = worst.event
    both = len({one.event.series for one in found if abs(one.event.since - event.since) <= 1}) == 2
    effect = _at_once(case, event.since)
    if not _counts(worst, both, effect is not None):
        return
    what = "its spread" if event.series == "batch/std" else "its largest value"
    size = f"{number(worst.times)} times" if worst.times >= 1e-3 else "next to nothing of"
    shown = f", and {effect.series.replace('_', ' ').replace('/', ' ')} at once" if effect is not None else ""
    yield Suspicion(
        "batch-corrupt",
        "data",
        event.since,
        0.9 if effect is not None else 0.6,
        Kind.FACT,
        evidence={
            "tensor": event.layer,
            "statistic": event.series,
            "times": worst.times,
            "effect": effect.series if effect is not None else None,
            "effect_times": effect.factor if effect is not None else None,
        },
        advice=f"The batch of step {event.since:,} is unlike all others: {what} ({event.layer}) is {size} the "
        f"usual{shown}. Look at its examples, drop what is out of range when loading, and skip or clip such a step.",
        check="It worked if no batch leaves the band of the others and the loss has no spike there.",
    )


class _Departure(NamedTuple):
    """A batch that lies where no others do."""

    event: Event
    times: float  # the usual of its statistic, over batches where that is not 0
    of_the_rest: float  # times the usual spread, without the value that lies farthest out
    is_sparse: bool  # whether its tensor has one value nearly everywhere: its largest one is a rare event


def _counts(found: _Departure, both: bool, has_effect: bool) -> bool:
    """Return whether a departure is a broken batch.

    One value of many decides the largest value and the spread alike, so that the two together say no more than one of
    them. Without an effect the rest of the batch has to be off as well.
    """
    rest = _size(found.of_the_rest)
    if has_effect:
        return not found.is_sparse or rest >= _BROKEN or _size(found.times) >= _RARE
    return both and min(_size(found.times), rest) >= _BROKEN


def _size(times: float) -> float:
    return max(times, 1 / max(times, TINY))


def _departure(case: Case, event: Event) -> _Departure | None:
    """Return how far the batch is out, or None if it lies where batches of this spread do.

    The usual size is that of batches which are not all zeros: no number is a multiple of 0.
    """
    series = case.chart.table("batch", event.series.removeprefix("batch/"))
    place = series.names.index(event.layer or "")
    before = series.before(event.since, USUAL)[:, place]
    usual = logs(before[np.isfinite(before) & (before > 0)])
    during = (series.steps >= event.since) & (series.steps < (event.until or 0)) & np.isfinite(series.values[:, place])
    if len(usual) < _KNOWN or not during.any():
        return None
    away = logs(series.values[during, place]) - overall_median(usual)
    farthest = int(np.argmax(np.abs(away)))
    band = max(_FAR * max(float(spread(usual[:, None])[0]), _EVEN), _RANGE * float(np.ptp(usual)))
    if not abs(away[farthest]) > band:
        return None
    columns = Columns(case.chart, event.layer or "", int(series.steps[during][farthest]))
    if columns.is_chance():
        return None
    return _Departure(event, float(10.0 ** away[farthest]), columns.rest(), columns.is_sparse)


def _at_once(case: Case, step: int) -> Event | None:
    """The largest departure of loss or gradient in the same step, or the one after where it was not measured then."""
    found = [
        event
        for name in ("loss", "gradient_norm")
        for event in case.events.of(name, direction=1, since=step)
        if event.since <= step + 1
    ]
    return max(found, key=lambda event: _size(event.factor)) if found else None


# The scale of all inputs ------------------------------------------------------------------------------------------


def scale(case: Case) -> Iterator[Suspicion]:
    """input-scale: inputs far from the size that layers are made for, from the first batch on or from some step on."""
    chart = case.chart
    deviations = chart.table("batch", "std")
    if len(deviations) < 3:
        return
    if not _may_be_off(chart):
        return
    places = numeric_inputs(chart)
    if not places:
        return
    if case.step - chart.first_step <= 100 and not chart.resumed:
        yield from _at_first(case, places)
    if len(deviations) >= 4 * _LEVEL:
        yield from _rescaled(case, places)


def _may_be_off(chart: Chart) -> bool:
    """A quick look at the first batch and the last: nearly always they are alike and of a size near 1."""
    mean, std, top = (chart.table("batch", name) for name in ("mean", "std", "abs_max"))
    first, was = mean.opening[0], std.opening[0]
    with np.errstate(invalid="ignore", divide="ignore"):
        is_odd = (np.hypot(first, was) > OFF) | (top.opening[0] < _FLAT)
        times, shift = std.values[-1] / was, np.abs(mean.values[-1] - first) / was
    return bool((is_odd | ~((times > 0.6) & (times < 1.7) & (shift < 1.5))).any())


def _at_first(case: Case, places: list[int]) -> Iterator[Suspicion]:
    chart = case.chart
    mean, std, top = (first_inputs(chart, name, places) for name in ("mean", "std", "abs_max"))
    with np.errstate(invalid="ignore"):
        sizes = np.sqrt(mean**2 + std**2)
        off = (sizes > OFF) | ((top < _FLAT) & (top > 0))
    if not off.any():
        return
    place = int(np.flatnonzero(off)[0])
    is_large = bool(sizes[place] > OFF)
    harmed = (_lost_at_first(chart) or _makes_large(chart)) if is_large else _stands_still(chart)
    if not harmed and not sizes[place] > 2 * OFF:
        return
    name = chart.table("batch", "mean").names[places[place]]
    yield Suspicion(
        "input-scale",
        "data",
        chart.first_step,
        0.85 if harmed else 0.55 if _normalises_first(chart) else 0.65,
        Kind.FACT,
        severity="warning" if harmed else "info",  # the model may well divide by their size itself
        evidence={"tensor": name, "mean": float(mean[place]), "std": float(std[place]), **harmed},
        advice=f"{name} has mean {number(float(mean[place]))} and standard deviation {number(float(std[place]))}; "
        f"layers are initialised for about 0 and 1. Normalise: x = (x - {number(float(mean[place]))}) / "
        f"{number(max(float(std[place]), 1e-12))}.",
        check="It worked if mean and std of the inputs are near 0 and 1 and the first loss is that of a guess.",
    )


def _makes_large(chart: Chart) -> dict[str, float]:
    """What the first layer makes of them, where that is far from 1 too; a model may divide by their size itself."""
    sizes = chart.table("activation", "rms")
    if not len(sizes.opening) or not sizes.opening[0, 0] > OFF:
        return {}
    return {"first_activation": float(sizes.opening[0, 0])}


def _lost_at_first(chart: Chart) -> dict[str, float]:
    """A first loss far above that of a guess, with what is known of it; empty where it is as it should be."""
    losses = first_losses(chart)
    if not len(losses):
        return {}
    loss, guess, power = overall_median(losses), guess_loss(chart), target_power(chart)
    if guess > 0 and loss > 1.5 * guess:
        return {"first_loss": loss, "of_a_guess": guess}
    return {"first_loss": loss, "of_zeros": power} if power > 0 and loss > 5 * power else {}


def _normalises_first(chart: Chart) -> bool:
    """Whether a norm comes first, or right after the first layer: then the scale of the inputs matters little."""
    owners = list(dict.fromkeys(name.rpartition(".")[0] for name in chart.parameters))[:2]
    return any(chart.part(name) == "norm" for name in chart.parameters if name.rpartition(".")[0] in owners)


def _stands_still(chart: Chart) -> dict[str, float]:
    """The loss of the first steps, where it hardly falls; empty where it does."""
    _, losses = column(chart.scalar("loss"))
    if len(losses) < 20 or not np.isfinite(losses).all():
        return {}
    first, last = overall_median(losses[:5]), overall_median(losses[-5:])
    return {"first_loss": first, "loss": last} if last > 0.95 * first > 0 else {}


def _rescaled(case: Case, places: list[int]) -> Iterator[Suspicion]:
    chart = case.chart
    means, deviations = chart.table("batch", "mean"), chart.table("batch", "std")
    with np.errstate(invalid="ignore", divide="ignore"):
        usual_mean = np.median(means.opening[:_OPENING, places], axis=0)
        usual = np.median(deviations.opening[:_OPENING, places], axis=0)
        ratios = deviations.values[-_LEVEL:, places] / usual
        shifts = (means.values[-_LEVEL:, places] - usual_mean) / usual
        ratio, shift = np.median(ratios, axis=0), np.median(shifts, axis=0)
        # All of them: a few large values that happen to come together leave some batches as they were.
        is_large = (ratio >= _RESCALED) & (ratios.min(axis=0) >= _EACH)
        is_small = (ratio <= 1 / _RESCALED) & (ratios.max(axis=0) <= 1 / _EACH)
        is_shifted = (np.abs(shift) >= _RESCALED) & ((shifts * np.sign(shift)).min(axis=0) >= _EACH)
        off = is_large | is_small | is_shifted
    if not off.any():
        return
    place = int(np.flatnonzero(off)[0])
    by_ratio = bool(is_large[place] or is_small[place])
    series = deviations if by_ratio else means
    since = _left(series, places[place], is_size=by_ratio)
    far = max(float(ratio[place]), 1 / max(float(ratio[place]), 1e-30), abs(float(shift[place])))
    rise = _risen(chart, since)
    if since is None or (far < 5 and not rise > 1.2) or not _is_fault(series, places[place], since, by_ratio):
        return
    name = series.names[places[place]]
    became = f"{number(float(ratio[place]))} times" if by_ratio else f"{number(float(shift[place]))} deviations from"
    yield Suspicion(
        "input-scale",
        "data",
        since,
        0.9 if rise > 1.2 else 0.65,
        Kind.FACT,
        evidence={"tensor": name, "std_times": float(ratio[place]), "mean_shift": float(shift[place]), "loss": rise},
        advice=f"From step {since:,} on {name} is {became} what it was at the start (mean "
        f"{number(float(usual_mean[place]))}, standard deviation {number(float(usual[place]))}): look for a "
        "normalisation that was lost or done twice, and bring the inputs back to that.",
        check="It worked if mean and std of the inputs stay where they were at the start.",
    )


def _is_fault(series: Series, place: int, since: int, is_size: bool) -> bool:
    """Whether it was level, and went at once or grows by a factor a step: what an agent sees as it learns, and a buffer
    as it fills, becomes other from the start, little by little, and slower and slower."""
    with np.errstate(divide="ignore", invalid="ignore"):
        before, after, first = (
            np.log(rows[:, place]) if is_size else rows[:, place]
            for rows in (series.before(since, _LEVEL), series.since(since), series.opening[:_OPENING])
        )
    usual = known_median(first)
    whole = abs(known_median(after[-_LEVEL:]) - usual)
    parts = (before, first[: _OPENING // 3], first[-_OPENING // 3 :])
    if any(abs(known_median(part) - usual) > 0.3 * whole for part in parts):
        return False
    if abs(known_median(after[:_LEVEL]) - known_median(before)) > 0.5 * whole:
        return True
    half = len(after) // 2
    if not is_size or half < _LEVEL:
        return False
    start, middle, end = (known_median(part) for part in (after[:3], after[half - 1 : half + 2], after[-3:]))
    return abs(end - start) > 0.5 * whole and abs(end - middle) > 0.8 * abs(middle - start)


def _left(series: Series, place: int, is_size: bool) -> int | None:
    """The step after the last at which it was as in the opening."""
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.log(series.values[:, place]) if is_size else series.values[:, place]
        opening = series.opening[:_OPENING, place]
        opening = np.log(opening) if is_size else opening
    level = known_median(opening)
    band = 3 * 1.4826 * known_median(np.abs(opening - level))
    inside = np.flatnonzero(np.abs(values - level) <= max(band, 0.02 if is_size else 1e-12))
    if not len(inside) or inside[-1] + 1 >= len(values):
        return None
    return int(series.steps[inside[-1] + 1])


def _risen(chart: Chart, since: int | None) -> float:
    """The loss of late over that before a step; 0 where it is not known."""
    losses = chart.scalar("loss")
    before, now = losses.before(since or 0, 12), losses.values[-_LEVEL:]
    if since is None or len(before) < 3 or not len(now):
        return 0.0
    was, is_now = overall_median(before), overall_median(now)
    return np.inf if not np.isfinite(is_now) else is_now / was if was > 0 else 0.0


RULES = (not_finite, corrupt, scale, repeated)
