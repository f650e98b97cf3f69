"""Series over the steps of a run, kept short, and what is usual for each of them. Pure numpy, vectorised over layers.

Everything here costs the same at every step, however long the run: a series remembers its opening and its last few
hundred values, a baseline what the values of late were like.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

RECENT = 512  # values of a series that are kept
_FIRST = 16  # rows that it begins with; RECENT is a multiple of it, by a power of two
OPENING = 64  # of its first ones
TINY = 1e-30  # on a log scale, what is smaller counts as this much


class Series:
    """The values of several layers at the steps at which they were known: [n, layers], the latest last.

    What is added waits until somebody looks: numpy takes as long for one step as for many.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._waiting: list[tuple[int, Floats]] = []
        self._steps = np.zeros(_FIRST, dtype=np.int64)
        self._values = np.full((_FIRST, len(self.names)), np.nan)
        self._count = self._seen = 0
        self._opening_steps = np.zeros(0, dtype=np.int64)
        self._opening = np.zeros((0, len(self.names)))

    def __len__(self) -> int:
        return min(self._count + len(self._waiting), RECENT)

    def add(self, step: int, values: Floats) -> None:
        self._waiting.append((step, values))
        if len(self._waiting) >= OPENING:
            self._settle()

    def extend(self, steps: Integers, values: Floats) -> None:
        """Several steps at once, no more than RECENT: [k] and [k, layers]."""
        self._settle()
        if self._seen < OPENING:
            more = slice(0, OPENING - self._seen)
            self._opening_steps = np.concatenate([self._opening_steps, steps[more]])
            self._opening = np.concatenate([self._opening, values[more]])
        if self._count + len(steps) > 2 * RECENT:  # the older ones go; so the kept ones always lie in one piece
            kept = slice(self._count - RECENT + len(steps), self._count)
            self._count = RECENT - len(steps)
            self._steps[: self._count] = self._steps[kept].copy()
            self._values[: self._count] = self._values[kept].copy()
        while self._count + len(steps) > len(self._steps):  # most series have few values: room is made as they come
            self._steps = np.concatenate([self._steps, np.zeros_like(self._steps)])
            self._values = np.concatenate([self._values, np.full_like(self._values, np.nan)])
        place = slice(self._count, self._count + len(steps))
        self._steps[place], self._values[place] = steps, values
        self._count += len(steps)
        self._seen += len(steps)

    def _settle(self) -> None:
        if self._waiting:
            steps, values = zip(*self._waiting, strict=True)
            self._waiting.clear()
            self.extend(np.array(steps, dtype=np.int64), np.array(values))

    @property
    def steps(self) -> Integers:
        self._settle()
        return self._steps[max(0, self._count - RECENT) : self._count]

    @property
    def values(self) -> Floats:
        self._settle()
        return self._values[max(0, self._count - RECENT) : self._count]

    @property
    def opening_steps(self) -> Integers:
        self._settle()
        return self._opening_steps

    @property
    def opening(self) -> Floats:
        self._settle()
        return self._opening

    @property
    def seen(self) -> int:
        """Values so far, kept or not."""
        return self._seen + len(self._waiting)

    def since(self, step: int) -> Floats:
        """Values at this step and later."""
        return self.values[np.searchsorted(self.steps, step) :]

    def before(self, step: int, most: int = RECENT) -> Floats:
        """The last so many values before this step."""
        stop = int(np.searchsorted(self.steps, step))
        return self.values[max(0, stop - most) : stop]

    def renamed(self, names: Sequence[str]) -> Series:
        """The same series among others: a model may get new layers. What is not known of them is NaN."""
        wider = Series(names)
        place = {name: index for index, name in enumerate(self.names)}
        columns = [place.get(name, -1) for name in wider.names]
        known = np.array([column >= 0 for column in columns], dtype=bool)
        chosen = [column for column in columns if column >= 0]
        self._settle()
        wider._steps, wider._count, wider._seen = self._steps.copy(), self._count, self._seen
        wider._values = np.full((len(self._values), len(names)), np.nan)
        wider._values[:, known] = self._values[:, chosen]
        wider._opening_steps = self._opening_steps
        wider._opening = np.full((len(self._opening), len(names)), np.nan)
        wider._opening[:, known] = self._opening[:, chosen]
        return wider


def logs(values: Floats) -> Floats:
    """Of sizes, to the base of 10; NaN and infinities stay what they are."""
    with np.errstate(invalid="ignore"):
        return np.log10(np.maximum(values, TINY))


def spread(values: Floats) -> Floats:
    """How far values lie from their median, as a standard deviation of a bell would tell it: [n, k] to [k]."""
    return np.asarray(1.4826 * median(np.abs(values - median(values))))


def slope(steps: Integers, values: Floats) -> float:
    """Per step, by least squares over the finite values; NaN where there are fewer than three."""
    return float(slopes(steps, values[:, None])[0])


def slopes(steps: Integers, values: Floats) -> Floats:
    """The same of several series: [n] and [n, k] to [k]."""
    usable = np.isfinite(values)
    count = usable.sum(axis=0)
    x, y = (
        np.where(usable, part - np.where(usable, part, 0.0).sum(axis=0) / np.maximum(count, 1), 0.0)
        for part in (steps[:, None].astype(np.float64), values)
    )
    length = (x * x).sum(axis=0)
    is_known = (count >= 3) & (length > 0)
    return np.where(is_known, (x * y).sum(axis=0) / np.where(is_known, length, 1.0), np.nan)


class Baseline:
    """What is usual for each of several series on a log scale: its level of late, and how far values lie from it.

    The level follows a drift: it is the median of the last few values. A value outside does not move it; if all stay
    outside for as long as the memory lasts, the new level is the usual one.
    """

    MEMORY, LEVEL, LEAST = 48, 16, 8  # values remembered, those that make the level, those needed for a judgement
    _EVERY = 4  # the usual changes slowly: it is found anew after so many values

    def __init__(self, layers: int, floor: float = 0.03) -> None:
        self._floor = floor  # a spread below this many powers of ten is rounding
        self._levels = np.full((self.MEMORY, layers), np.nan)
        self._residuals = np.full((self.MEMORY, layers), np.nan)
        self.count = np.zeros(layers, dtype=np.int64)  # values that made it
        self._outside = np.zeros(layers, dtype=np.int64)  # in a row
        self._age, self._changed = 0, np.zeros(layers, dtype=bool)  # values since it was found last, and whose
        self.level = np.full(layers, np.nan)
        self.scale = np.full(layers, np.inf)

    def grow(self, layers: int) -> None:
        """Makes room for so many more series."""
        self._levels, self._residuals = (
            np.concatenate([old, np.full((self.MEMORY, layers), np.nan)], axis=1)
            for old in (self._levels, self._residuals)
        )
        self.count, self._outside = (
            np.concatenate([old, np.zeros(layers, dtype=np.int64)]) for old in (self.count, self._outside)
        )
        self._changed = np.concatenate([self._changed, np.zeros(layers, dtype=bool)])
        self.level = np.concatenate([self.level, np.full(layers, np.nan)])
        self.scale = np.concatenate([self.scale, np.full(layers, np.inf)])

    def deviations(self, values: Floats) -> Floats:
        """How many times its usual spread each lies from its level; 0 where nothing is usual yet, NaN stays NaN."""
        known = (self.count >= self.LEAST) & np.isfinite(self.level)
        # While little is known of a series its spread is known badly, and the first steps change fast.
        young = np.where(self.count < 3 * self.LEAST, 2.0, 1.0)
        with np.errstate(invalid="ignore"):
            found = (values - self.level) / (self.scale * young)
        return np.where(known, found, np.where(np.isnan(values), np.nan, 0.0))

    def add(self, values: Floats, limit: float = 6.0) -> Floats:
        """Takes in the values of a step, and gives their deviations from what was usual before.

        NaN is for what was not measured; a value that is not a number is infinite.
        """
        found = self.deviations(values)
        outside = np.abs(found) > limit
        self._outside = np.where(np.isnan(values), self._outside, np.where(outside, self._outside + 1, 0))
        settled = self._outside > self.MEMORY
        if settled.any():
            self._forget(settled)
        admitted = np.isfinite(values) & (~outside | settled)
        places = np.where(admitted)[0]
        slots = self.count[places] % self.MEMORY
        self._levels[slots, places] = values[places]
        usual = np.where(np.isfinite(self.level), self.level, values)
        self._residuals[slots, places] = values[places] - usual[places]
        self.count[places] += 1
        self._changed[places] = True
        self._age += 1
        if self._age >= self._EVERY or (self.count[places] <= 3 * self.LEAST).any():
            self._find()
        return found

    def _find(self) -> None:
        """Of those that have new values: most series are not measured at every step."""
        self._age = 0
        chosen = np.flatnonzero(self._changed)
        self._changed[chosen] = False
        newest = (self.count[chosen] - 1)[None, :] - np.arange(self.LEVEL)[:, None]
        rows = np.where(newest >= 0, newest % self.MEMORY, 0)
        recent = np.where(newest >= 0, self._levels[rows, chosen[None, :]], np.nan)
        with np.errstate(all="ignore"):
            self.level[chosen] = median(recent)
            self.scale[chosen] = np.maximum(1.4826 * median(np.abs(self._residuals[:, chosen])), self._floor)

    def _forget(self, chosen: Flags) -> None:
        self._levels[:, chosen] = np.nan
        self._residuals[:, chosen] = np.nan
        self.count[chosen], self._outside[chosen], self.level[chosen] = 0, 0, np.nan


def median(values: Floats) -> Floats:
    """Over the first axis, without NaN; NaN where there is nothing. np.nanmedian takes ten times as long."""
    if not len(values):
        return np.full(values.shape[1], np.nan)
    ordered = np.sort(values, axis=0)  # NaN comes last
    count = (~np.isnan(values)).sum(axis=0)
    columns = np.arange(values.shape[1])
    low, high = ordered[np.maximum(count - 1, 0) // 2, columns], ordered[np.maximum(count, 1) // 2, columns]
    return np.where(count > 0, (low + high) / 2, np.nan)


def overall_median(values: Floats) -> float:
    """Of all these numbers, NaN if one is or if there are none: what np.median says, in a fifth of its time."""
    if not values.size:
        return float("nan")
    ordered = np.sort(values, axis=None)
    low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
    return float(ordered[-1] if np.isnan(ordered[-1]) else low if low == high else (low + high) / 2)


def known_median(values: Floats) -> float:
    """The same without those that are NaN."""
    return overall_median(values[~np.isnan(values)])
