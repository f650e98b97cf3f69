"""Two series side by side: where they meet, from where on they differ, and what a loss ended at. Pure numpy.

Everything takes arrays (positions or values, a row a step), so that it does not matter where they come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from holter.series import TINY, Flags, Floats, Integers, median, spread

SMOOTHED = 10  # values over which a loss is averaged before it counts as having reached a level
_FAR = 6.0  # times its own usual change from step to step: beyond, a difference is material
_ZERO = 1e-3  # of the usual value: on a log scale nothing is smaller
_BLOCK = 16  # series at a time: long runs of large models need not be held ten times over
_ENOUGH = 4096  # values for a median
_ON_END = 3  # values, for a series that always jumps now and then; and
_LONG = 10  # where two runs began apart
_FLOOR = 0.02  # a share of the value: what differs by less is never material
_UNKNOWN_FLOOR = 0.25  # the same where so few values are there that nobody knows what is usual
_FEW = 8
_SUDDEN = 0.5  # of the value: so far off, one value is enough where they were equal before it
_MANY_PIECES = 5
_ERRORS = 3.0  # times its error that a difference of losses must have
_WILD = 10.0  # times as large an error as the other's
_LEAST_SHARE = 0.02  # of the loss, and
_LEAST_PROGRESS = 0.01  # of how far it fell: less is no difference that anybody would act on


def align(ours: Floats, theirs: Floats, reach: float = 0.0) -> tuple[Integers, Integers]:
    """Indices into both, ascending, of what stands at the same place.

    With a `reach`, each place of the coarser one is paired with the last of the finer one at or before it, no farther
    away than that: two trainings with other batch sizes hardly ever have seen exactly as many samples.
    """
    if not (len(ours) and len(theirs)):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    if reach <= 0:
        _, left, right = np.intersect1d(ours, theirs, return_indices=True)
        return left, right
    swapped = len(theirs) < len(ours)
    coarse, fine = (theirs, ours) if swapped else (ours, theirs)
    found = np.searchsorted(fine, coarse, side="right") - 1
    near = (found >= 0) & (coarse - fine[np.maximum(found, 0)] < reach)
    places, found = np.flatnonzero(near), found[near]
    return (found, places) if swapped else (places, found)


def differing(ours: Floats, theirs: Floats) -> Flags:
    """Where two values are not the same; NaN is NaN."""
    return np.asarray(~((ours == theirs) | (np.isnan(ours) & np.isnan(theirs))))


def first_true(flags: Flags) -> Integers:
    """Of each column the first row that is true, -1 where none is: [n, k] to [k]."""
    if not len(flags):
        return np.full(flags.shape[1], -1)
    return np.where(flags.any(axis=0), flags.argmax(axis=0), -1)


def departing(ours: Floats, theirs: Floats, apart_by: float = 0.0) -> Flags:
    """Where two series [n, k] are farther apart than is usual for them, on a log scale where nothing is negative.

    What is usual is how far the steadier of the two moves from one value to the next. The distance must last for three
    values; but one is enough where they were equal right before it and it is large, or where one of them is not finite.
    Runs that began apart, as with other seeds, differ by chance: they must be a share of `apart_by` apart, for long.
    """
    if not len(ours):
        return np.zeros(ours.shape, dtype=bool)
    if ours.shape[1] > _BLOCK:
        blocks = [slice(start, start + _BLOCK) for start in range(0, ours.shape[1], _BLOCK)]
        return np.concatenate([departing(ours[:, block], theirs[:, block], apart_by) for block in blocks], axis=1)
    finite = np.isfinite(ours), np.isfinite(theirs)
    both = finite[0] & finite[1]
    apart, usual, size = _distances(np.where(both, ours, np.nan), np.where(both, theirs, np.nan))
    count, equal = both.sum(axis=0), ~differing(ours, theirs)
    share = apart_by or np.where(count < _FEW, _UNKNOWN_FLOOR, _FLOOR)
    far = apart > np.maximum(_FAR * usual, share * size)
    if apart_by:
        return np.asarray(_lasting(far, _LONG) | (finite[0] != finite[1]))
    was_equal = np.concatenate([np.zeros_like(equal[:1]), equal[:-1]])
    sudden = was_equal & (apart > np.maximum(_FAR * usual, _SUDDEN * size))
    return np.asarray(_lasting(far, _ON_END) | sudden | (finite[0] != finite[1]))


def _distances(ours: Floats, theirs: Floats) -> tuple[Floats, Floats, Floats]:
    """How far two series are apart [n, k], how far the steadier one moves by itself [k], and what the whole of a usual
    value is on the same scale [k]. NaN is for what one of them does not have."""
    with np.errstate(all="ignore"):
        is_log = ~(np.fmin(ours, theirs) < 0).any(axis=0)
        larger = np.maximum(np.abs(ours), np.abs(theirs))
        size = np.nan_to_num(median(_some(np.where(larger > 0, larger, np.nan))))
        least = np.maximum(_ZERO * size, TINY)
        x, y = (np.where(is_log, np.log(np.maximum(values, least)), values) for values in (ours, theirs))
        usual = np.nan_to_num(np.fmin(_usual_change(x), _usual_change(y)))
        return np.nan_to_num(np.abs(y - x)), usual, np.where(is_log, 1.0, size)


def _usual_change(values: Floats) -> Floats:
    """From one value to the next, as a standard deviation of one of them would tell it: [n, k] to [k]."""
    change = _some(np.diff(values, axis=0))
    return np.asarray(1.4826 * median(np.abs(change - median(change))) / np.sqrt(2))


def _some(values: Floats) -> Floats:
    """Rows that are enough for a median, spread over all of them: to sort a long run takes long."""
    return values[:: max(1, len(values) // _ENOUGH)]


def _lasting(flags: Flags, on_end: int) -> Flags:
    """Those that are the first of so many on end; of a very short series, of all that are left."""
    rest = flags[-1:] & (len(flags) < _FEW and on_end < _FEW)
    padded = np.concatenate([flags, rest.repeat(on_end - 1, axis=0)])
    return np.asarray(np.all([padded[place : place + len(flags)] for place in range(on_end)], axis=0))


@dataclass(frozen=True)
class Level:
    """The mean of the last values, and how far another training like it may end from there by chance: its error.

    The error is NaN where there are too few values to tell. `lowest` is the best of the stretches that the last values
    are made of.
    """

    mean: float
    error: float
    values: int
    lowest: float = float("nan")


def last_level(values: Floats) -> Level | None:
    """Over the last tenth, or 20 values if that is more, but no more than half; None where there is nothing.

    With another seed a run ends elsewhere by more than the standard error of its last values: it is a little behind or
    ahead. How far the mean over as many values wandered in the last half of the run tells by about how much.
    """
    if not len(values):
        return None
    count = max(1, min(max(20, len(values) // 10), len(values) // 2))
    tail, half = values[-count:], values[len(values) // 2 :]
    with np.errstate(all="ignore"):
        mean = float(tail.mean())
        if len(half) < _FEW:
            return Level(mean, float("nan"), count, mean)
        pieces = max(3, min(10, count // 3))
        chance = _spread_of_means(tail, pieces) / np.sqrt(pieces)
        wandered = _wandered(half, max(3, len(half) // count))
        lowest = min(float(piece.mean()) for piece in np.array_split(tail, pieces))
        return Level(mean, float(np.hypot(chance, wandered)), count, lowest)


def _spread_of_means(values: Floats, pieces: int) -> float:
    """Of as many pieces: neighbouring values are alike, so that single ones would tell too little."""
    return float(np.std([piece.mean() for piece in np.array_split(values, pieces)], ddof=1))


def _wandered(values: Floats, pieces: int) -> float:
    """How far the means of as many pieces lie apart; of many, one that stands out, after a spike, does not count."""
    means = np.array([piece.mean() for piece in np.array_split(values, pieces)])
    apart = float(np.std(means, ddof=1))
    return apart if pieces < _MANY_PIECES else min(apart, 2 * float(spread(means[:, None])[0]))


def judge_levels(was: Level, now: Level, first: float) -> str:
    """Whether a loss that started at `first` ended better, worse, or the same within what chance does.

    To count, a difference must be three times its error, 2 % of the loss, and 1 % of what it fell by in all.
    """
    if not (np.isfinite(was.mean) and np.isfinite(now.mean)):
        return "same" if np.isfinite(was.mean) == np.isfinite(now.mean) else _worse_if(np.isfinite(was.mean))
    fell = abs(first - was.mean) if np.isfinite(first) else 0.0
    error = float(np.hypot(was.error, now.error))
    least = max(_LEAST_SHARE * abs(was.mean), _LEAST_PROGRESS * fell)
    # Without an error to go by, only what nobody would call chance.
    limit = max(_ERRORS * error, least) if np.isfinite(error) else max(0.25 * abs(was.mean), 0.1 * fell)
    if abs(now.mean - was.mean) > limit:
        return _worse_if(now.mean > was.mean)
    return _despite_its_error(was, now)


def _despite_its_error(was: Level, now: Level) -> str:
    """One that swings wildly has so large an error that it is like anything; but where even its best stretch is worse
    than the other one, there is no doubt."""
    for wild, calm, outcome in ((now, was, "worse"), (was, now, "better")):
        is_wild = wild.error > _WILD * calm.error
        if is_wild and wild.lowest > calm.mean + max(_ERRORS * calm.error, _LEAST_SHARE * abs(calm.mean)):
            return outcome
    return "same"


def _worse_if(is_worse: bool | np.bool_) -> str:
    return "worse" if is_worse else "better"


def smooth(values: Floats) -> Floats:
    """Means over ten values; the first stands for the first ten."""
    return np.convolve(values, np.ones(SMOOTHED) / SMOOTHED, "valid") if len(values) >= SMOOTHED else values[:0]


def steps_to(values: Floats, level: float, steps: Integers | None = None) -> int | None:
    """How many steps it takes until the smoothed series is as low as this; None where it never is.

    `steps` are those of the values, which may lack some; without them there is a value for every step.
    """
    reached = np.flatnonzero(smooth(values) <= level)
    if not len(reached):
        return None
    last = int(reached[0]) + SMOOTHED - 1
    return (last if steps is None else int(steps[last])) + 1


def common_level(losses: list[Floats]) -> float | None:
    """A loss that all of them reach, a little above the worst of their bests; where one of them has learnt next to
    nothing, one that the best of them ended near. None where no loss fell."""
    courses = [smooth(values) for values in losses if len(values) >= SMOOTHED]
    courses = [course[np.isfinite(course)] for course in courses]
    courses = [course for course in courses if len(course)]
    if not courses:
        return None
    first, best = courses[0][0], min(float(course.min()) for course in courses)
    worst = max(float(course.min()) for course in courses)
    if not best < first:
        return None
    level = worst if first - worst > 0.2 * (first - best) else best
    return float(level + 0.05 * (first - level))


def thin(values: Floats, most: int) -> Integers:
    """Indices of at most so many points that draw the same curve: of every stretch its lowest and its highest, the
    first and the last of all, and what is not finite."""
    if len(values) <= most:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), (most - 2) // 3 + 1).astype(np.int64)
    kept = {0, len(values) - 1}
    for start, stop in pairwise(edges.tolist()):
        piece = values[start:stop]
        known = np.flatnonzero(np.isfinite(piece))
        if len(known):
            kept |= {start + int(known[piece[known].argmin()]), start + int(known[piece[known].argmax()])}
        if len(known) < len(piece):
            kept.add(start + int(np.flatnonzero(~np.isfinite(piece))[0]))
    return np.array(sorted(kept), dtype=np.int64)
