"""Convergence: does the loss still fall, and where will it be. Pure numpy over the series of a run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holter.series import Floats, Integers, overall_median

_BINS = 24  # points that a curve is reduced to before it is fitted
_EXPONENTS = np.linspace(0.05, 2.0, 40)
_STARTS = (0.0, 0.1, 0.2, 0.3, 0.45)  # the first steps may not be of the same curve as the rest
_DELAYS = (0.0, 0.1, 0.3, 1.0)  # of the steps so far, for which the loss stood before it began to fall
_LEAST = 40  # values that a forecast needs


@dataclass(frozen=True)
class Forecast:
    """Where the loss is expected at a step, and the range in which it will lie in nine of ten cases."""

    step: int
    loss: float
    low: float
    high: float


@dataclass(frozen=True)
class Outlook:
    """How the loss goes on: whether it has stopped falling, and where it is expected at the end of the plan, or after
    as many steps again where there is none."""

    is_flat: bool
    forecast: Forecast | None


def outlook(steps: Integers, losses: Floats, total_steps: int | None) -> Outlook:
    if len(losses) and not np.isfinite(losses[-1]):  # it goes nowhere
        return Outlook(False, None)
    at = total_steps - 1 if total_steps is not None else 2 * int(steps[-1]) if len(steps) else 0
    return Outlook(is_flat(losses), forecast(steps, losses, at))


def forecast(steps: Integers, losses: Floats, at: int) -> Forecast | None:
    """Fits a + b (t + d)^-c to the curve so far; None where there is too little of it.

    How far such a fit can be trusted is found on the run itself: what a fit of its first two thirds would have said
    about its end.
    """
    usable = np.isfinite(losses)
    steps, losses = steps[usable], losses[usable]
    if len(losses) < _LEAST or at <= steps[-1]:
        return None
    x, y = _reduced(steps, losses)
    is_positive = bool((losses > 0).all())
    candidates, weights = _predictions(x, y, at, is_positive)
    if not len(candidates):
        return None
    middle, low, high = (float(_quantile(candidates, weights, share)) for share in (0.5, 0.05, 0.95))
    part = x <= x[0] + 0.67 * (x[-1] - x[0])
    earlier, earlier_weights = _predictions(x[part], y[part], float(x[-1]), is_positive)
    missed = abs(float(_quantile(earlier, earlier_weights, 0.5)) - float(y[-1])) if len(earlier) else float(np.ptp(y))
    farther = np.log1p((at - x[-1]) / x[-1]) / np.log1p(0.5)  # than the end was from the first two thirds
    noise = overall_median(np.abs(np.diff(y[len(y) // 2 :]))) if len(y) > 6 else 0.0
    room = float(1.6 * missed * farther + 2 * noise)
    floor, ceiling = _bracket(steps, losses, at)
    middle = float(np.clip(middle, floor, ceiling))
    # A loss above 0 is missed by a factor: as far down as up on a log scale, which does not lead to 0 or below.
    least = middle / (1 + room / middle) if is_positive else middle - room
    low, high = max(min(low, least), floor), min(max(high, middle + room), ceiling)
    return Forecast(at, middle, min(low, middle), max(high, middle))


def _bracket(steps: Integers, losses: Floats, at: int) -> tuple[float, float]:
    """A loss that falls more and more slowly stays between where it is and where its present slope leads; with room for
    what is not known of both. Where that is below 0, it says nothing of a loss above 0: the fit alone keeps it there.
    """
    recent = slice(-max(20, len(losses) // 5), None)
    x, y = steps[recent] - steps[-1], losses[recent]
    slope, level = np.polyfit(x, y, 1)
    error = float(np.std(y - (level + slope * x))) / np.sqrt(len(x))
    uncertain = 2 * error * np.sqrt(1 + 12 * float(at - int(steps[-1])) ** 2 / max(float(np.ptp(x)), 1.0) ** 2)
    lowest = level + min(slope, 0.0) * (at - steps[-1]) - uncertain
    highest = level + max(slope, 0.0) * (at - steps[-1]) + 4 * error
    return float(lowest), float(max(highest, y.min()))  # the line through a quick fall ends below its last losses


def is_flat(losses: Floats, within: float = 0.01) -> bool:
    """E18: whether the loss has stopped falling: its last quarter is no lower than the one before it by this share,
    beyond what noise makes of it."""
    losses = losses[np.isfinite(losses)]
    if len(losses) < 80:
        return False
    quarter = len(losses) // 4
    before, after = losses[-2 * quarter : -quarter], losses[-quarter:]
    gain = float(overall_median(before) - overall_median(after))
    error = 1.2533 * float(np.hypot(before.std(), after.std())) / np.sqrt(quarter)  # of a difference of medians
    return bool(gain < within * abs(overall_median(before)) and gain <= 3 * error) or gain <= 0


def _reduced(steps: Integers, losses: Floats) -> tuple[Floats, Floats]:
    """Medians over stretches that grow with time, so that late values do not outvote early ones."""
    x = steps - steps[0] + 1.0
    edges = np.unique(np.geomspace(1, x[-1] + 1, _BINS + 1).round())
    place = np.searchsorted(edges, x, side="right")
    found = [(overall_median(x[place == p]), overall_median(losses[place == p])) for p in np.unique(place)]
    points = np.array(found)
    return points[:, 0] + steps[0], points[:, 1]


def _predictions(x: Floats, y: Floats, at: float, is_positive: bool) -> tuple[Floats, Floats]:
    """What curves of several exponents and beginnings say about a step, and how much each counts."""
    said, errors = [], []
    for start in _STARTS:
        part = slice(int(start * len(x)), None)
        if len(x[part]) < 5:
            continue
        for delay in _DELAYS:
            t = x[part] + delay * x[-1]
            shapes = (t / t[-1]) ** -_EXPONENTS[:, None]  # [exponents, points]
            level, scale = _fitted(shapes, y[part], is_positive)
            late = np.linspace(0.3, 1.0, len(t))  # the end of the curve is nearer to what comes
            said.append(level + scale * ((at + delay * x[-1]) / t[-1]) ** -_EXPONENTS)
            errors.append((late * (y[part] - level[:, None] - scale[:, None] * shapes) ** 2).mean(axis=1))
    if not said:
        return np.zeros(0), np.zeros(0)
    spread = np.concatenate(errors)
    best = max(float(spread.min()), 1e-12 * float(np.var(y)) + 1e-300)
    return np.concatenate(said), np.exp(-0.5 * len(x) * np.log(np.maximum(spread, best) / best))


def _fitted(shapes: Floats, values: Floats, is_positive: bool) -> tuple[Floats, Floats]:
    """Level and scale of each shape, by least squares. Those of a positive loss level off at 0 or above: left free, the
    fit of a quick fall goes through 0 soon after its end."""
    about = shapes - shapes.mean(axis=1, keepdims=True)
    scale = about @ values / (about**2).sum(axis=1)
    level = values.mean() - scale * shapes.mean(axis=1)
    to_zero = is_positive & (level < 0)
    level = np.where(to_zero, 0.0, level)
    return level, np.where(to_zero, shapes @ values / (shapes**2).sum(axis=1), scale)


def _quantile(values: Floats, weights: Floats, share: float) -> float:
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, share * total[-1])])
