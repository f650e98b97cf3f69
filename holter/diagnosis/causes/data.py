"""The data: batches that are broken or out of scale."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.diagnosis.causes.batches import (
    OFF,
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
from holter.series import Series, known_median, logs, overall_median, spread
from holter.words import number

_SHORT = 3  # batches in a row that are an accident; more of them are how the data is now
_FAR = 10.0  # times the usual spread of a statistic of batches
_LATELY = 40  # steps for which an accident that is over is still told
_FLAT = 0.02  # the largest value of inputs that are too small; sparse ones (one-hot) have ones among them
_LEVEL = 6  # batches that make a level
_OPENING = 24  # batches at the start that tell what is usual
_RESCALED = 2.5  # times its former size: what the next stage of a curriculum hardly does


# One batch that is broken -----------------------------------------------------------------------------------------


def corrupt(case: Case) -> Iterator[Suspicion]:
    """batch-corrupt: a batch or two far from all others, and a gradient or a loss that shows it in the same step."""
    near = [event for name in ("batch/std", "batch/abs_max") for event in case.lately(name, _LATELY)]
    labels = classes_in(case.chart) if near else set()
    found = [
        event
        for event in near
        if event.layer not in labels
        and event.until is not None
        and event.values <= _SHORT
        and np.isfinite(event.factor)
        and _is_far(case, event)
    ]
    if not found:
        return
    worst = max(found, key=lambda event: (_at_once(case, event.since) is not None, _size(event)))
    both = len({event.series for event in found if abs(event.since - worst.since) <= 1}) == 2
    effect = _at_once(case, worst.since)
    if effect is None and not (both and _size(worst) >= 5):
        return
    what = "its spread" if worst.series == "batch/std" else "its largest value"
    size = _times(worst)
    shown = f", and {effect.series.replace('_', ' ').replace('/', ' ')} at once" if effect is not None else ""
    yield Suspicion(
        "batch-corrupt",
        "data",
        worst.since,
        0.9 if effect is not None else 0.6,
        Kind.FACT,
        evidence={
            "tensor": worst.layer,
            "statistic": worst.series,
            "times": worst.factor,
            "effect": effect.series if effect is not None else None,
            "effect_times": effect.factor if effect is not None else None,
        },
        advice=f"The batch of step {worst.since:,} is unlike all others: {what} ({worst.layer}) is {size} the "
        f"usual{shown}. Look at its examples, drop what is out of range when loading, and skip or clip such a step.",
        check="It worked if no batch leaves the band of the others and the loss has no spike there.",
    )


def _size(event: Event) -> float:
    return max(event.factor, 1 / max(event.factor, 1e-30))


def _is_far(case: Case, event: Event) -> bool:
    """Whether it lies where batches of this spread never do: of small ones many a statistic has a long tail."""
    series = case.chart.table("batch", event.series.removeprefix("batch/"))
    values = logs(series.before(event.since, 48)[:, series.names.index(event.layer or "")])
    values = values[np.isfinite(values)]
    if len(values) < 8:
        return False
    usual = max(float(spread(values[:, None])[0]), 0.01)
    return abs(float(np.log10(max(event.factor, 1e-30)))) > max(_FAR * usual, 1.3 * float(np.ptp(values)))


def _times(event: Event) -> str:
    return f"{number(event.factor)} times" if event.factor >= 1e-3 else "next to nothing of"


def _at_once(case: Case, step: int) -> Event | None:
    """The largest departure of loss or gradient in the same step, or the one after where it was not measured then."""
    found = [
        event
        for name in ("loss", "gradient_norm")
        for event in case.events.of(name, direction=1, since=step)
        if event.since <= step + 1
    ]
    return max(found, key=_size) if found else None


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
        ratio = np.median(deviations.values[-_LEVEL:, places], axis=0) / usual
        shift = (np.median(means.values[-_LEVEL:, places], axis=0) - usual_mean) / usual
        off = (ratio >= _RESCALED) | (ratio <= 1 / _RESCALED) | (np.abs(shift) >= _RESCALED)
    if not off.any():
        return
    place = int(np.flatnonzero(off)[0])
    by_ratio = not 1 / _RESCALED < ratio[place] < _RESCALED
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
