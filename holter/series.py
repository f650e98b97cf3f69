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
_FIRST = 4  # rows that it begins with; RECENT is a multiple of it, by a power of two
OPENING = 64  # of its first ones
TINY = 1e-30  # on a log scale, what is smaller counts as this much


class Series:
    """The values of several layers at the steps at which they were known: [n, layers], the latest last."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._steps = np.zeros(_FIRST, dtype=np.int64)
        self._values = np.full((_FIRST, len(self.names)), np.nan)
        self._count = 0  # rows that are filled
        self._gone = 0  # values that were here before them
        self._opening_steps, self._opening = self._steps[:0], self._values[:0]  # of those that have gone

    def __len__(self) -> int:
        return min(self._count, RECENT)

    def add(self, step: int, values: Floats | float) -> None:
        if self._count == len(self._steps):
            self._make_room(1)
        self._steps[self._count], self._values[self._count] = step, values
        self._count += 1

    def extend(self, steps: Integers, values: Floats) -> None:
        """Several steps at once, no more than RECENT: [k] and [k, layers]."""
        self._make_room(len(steps))
        place = slice(self._count, self._count + len(steps))
        self._steps[place], self._values[place] = steps, values
        self._count += len(steps)

    def _make_room(self, more: int) -> None:
        if self._count + more > 2 * RECENT:  # the older ones go; so the kept ones always lie in one piece
            if not self._gone:
                self._opening_steps, self._opening = self._steps[:OPENING].copy(), self._values[:OPENING].copy()
            self._gone += self._count - RECENT
            self._steps[:RECENT] = self._steps[self._count - RECENT : self._count].copy()
            self._values[:RECENT] = self._values[self._count - RECENT : self._count].copy()
            self._count = RECENT
        while self._count + more > len(self._steps):  # most series have few values: room is made as they come
            self._steps = np.concatenate([self._steps, np.zeros_like(self._steps)])
            self._values = np.concatenate([self._values, np.full_like(self._values, np.nan)])

    @property
    def steps(self) -> Integers:
        return self._steps[max(0, self._count - RECENT) : self._count]

    @property
    def values(self) -> Floats:
        return self._values[max(0, self._count - RECENT) : self._count]

    @property
    def opening_steps(self) -> Integers:
        return self._opening_steps if self._gone else self._steps[: min(self._count, OPENING)]

    @property
    def opening(self) -> Floats:
        return self._opening if self._gone else self._values[: min(self._count, OPENING)]

    @property
    def seen(self) -> int:
        """Values so far, kept or not."""
        return self._gone + self._count

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
        wider._steps, wider._count, wider._gone = self._steps.copy(), self._count, self._gone
        wider._opening_steps = self._opening_steps
        wider._values = np.full((len(self._values), len(names)), np.nan)
        wider._opening = np.full((len(self._opening), len(names)), np.nan)
        wider._values[:, known], wider._opening[:, known] = self._values[:, chosen], self._opening[:, chosen]
        return wider


def logs(values: Floats) -> Floats:
    """Of sizes, to the base of 10; NaN and infinities stay what they are."""
    with np.errstate(invalid="ignore"):
        return np.log10(np.maximum(values, TINY))


def spread(values: Floats) -> Floats:
    """How far values lie from their median, as a standard deviation of a bell would tell it: [n, k] to [k]."""
    return np.asarray(1.4826 * median(np.abs(values - median(values))))


def scale_of(losses: Floats) -> float:
    """By what a rise or a fall of a loss is measured: its level, or how far its values lie apart where that is more.

    A loss may be negative, cross zero, or begin there: that of a policy gradient is 1e-8 at first and 0.1 in the next
    step, and a multiple of such a value says nothing. NaN where nothing is finite.

    >>> scale_of(np.array([2.0, 2.1, 1.9])), round(scale_of(np.array([1e-8, 0.1, -0.1, 0.05])), 2)
    (2.0, 0.2)
    """
    losses = losses[np.isfinite(losses)]
    if not len(losses):
        return float("nan")
    return max(abs(overall_median(losses)), float(np.ptp(losses)))


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
    _FEW = 2  # of which room is made for at first: a wide model may have been measured once
    _EVERY = 8  # the usual changes slowly: it is found anew after so many values

    def __init__(self, layers: int, floor: float = 0.03) -> None:
        self._floor = floor  # a spread below this many powers of ten is rounding
        self._levels = np.full((self._FEW, layers), np.nan)
        self._residuals = np.full((self._FEW, layers), np.nan)
        self._rows = 0  # of these that are needed, as none of the series has more values
        self.count = np.zeros(layers, dtype=np.int64)  # values that made it
        self._outside = np.zeros(layers, dtype=np.int64)  # in a row
        self._age, self._changed = 0, np.zeros(layers, dtype=bool)  # values since it was found last, and whose
        self.level = np.full(layers, np.nan)
        self.scale = np.full(layers, np.inf)

    def grow(self, layers: int) -> None:
        """Makes room for so many more series."""
        self._levels, self._residuals = (
            np.concatenate([old, np.full((len(old), layers), np.nan)], axis=1)
            for old in (self._levels, self._residuals)
        )
        self.count, self._outside = (
            np.concatenate([old, np.zeros(layers, dtype=np.int64)]) for old in (self.count, self._outside)
        )
        self._changed = np.concatenate([self._changed, np.zeros(layers, dtype=bool)])
        self.level = np.concatenate([self.level, np.full(layers, np.nan)])
        self.scale = np.concatenate([self.scale, np.full(layers, np.inf)])

    def add(self, values: Floats, limit: float = 6.0, places: Integers | None = None) -> Floats:
        """Takes in the values of a step, of all series or of those at these places, and gives their deviations from
        what was usual before: how many times its usual spread each lies from its level, 0 where nothing is usual yet.

        NaN is for what was not measured; a value that is not a number is infinite.
        """
        places = np.arange(len(self.count)) if places is None else places
        self._make_room(1)
        count, level = self.count[places], self.level[places]
        is_usual = np.isfinite(level)
        with np.errstate(invalid="ignore"):
            away = values - level
            # While little is known of a series its spread is known badly, and the first steps change fast.
            found = away / (self.scale[places] * np.where(count < 3 * self.LEAST, 2.0, 1.0))
        found = np.where((count >= self.LEAST) & is_usual, found, np.where(np.isnan(values), np.nan, 0.0))
        outside = np.abs(found) > limit
        admitted = np.isfinite(values) & ~outside
        if not admitted.all():
            admitted |= self._settled(values, outside, places)
            places, values, away = places[admitted], values[admitted], away[admitted]
            count, is_usual = self.count[places], np.isfinite(self.level[places])
        self._outside[places] = 0
        self._levels[count % self.LEVEL, places] = values
        self._residuals[count % self.MEMORY, places] = np.where(is_usual, away, 0.0)
        self.count[places] = count + 1
        self._changed[places] = True
        self._age += 1
        if self._age >= self._EVERY or (count < 3 * self.LEAST).any():
            self._find()
        return found

    def extend(self, values: Floats, limit: float, places: Integers) -> bool:
        """The same for several steps [k, places] of grown series, all at once, if nothing of them is outside: says
        whether that is so, and else takes in nothing. There may be as many as there is `room` for."""
        count, away = self.count[places], values - self.level[places]
        if not (np.abs(away) <= limit * self.scale[places]).all():
            return False
        self._make_room(len(values))
        counts = count + np.arange(len(values))[:, None]
        self._levels[counts % self.LEVEL, places] = values
        self._residuals[counts % self.MEMORY, places] = away
        self._outside[places] = 0
        self.count[places] = count + len(values)
        self._changed[places] = True
        self._age += len(values)
        if self._age >= self._EVERY:
            self._find()
        return True

    @property
    def room(self) -> int:
        """Steps after which the usual is found anew."""
        return self._EVERY - self._age

    def is_grown(self, places: Integers) -> bool:
        """Whether enough is known of all these."""
        return bool((self.count[places] >= 3 * self.LEAST).all())

    def _make_room(self, more: int) -> None:
        self._rows += more
        if self._rows > len(self._levels):
            self._levels = _with_rows(self._levels, self._rows, self.LEVEL)
        if self._rows > len(self._residuals):
            self._residuals = _with_rows(self._residuals, self._rows, self.MEMORY)

    def _settled(self, values: Floats, outside: Flags, places: Integers) -> Flags:
        """Which finite values have been outside for so long that their level is the usual one."""
        self._outside[places] = np.where(np.isnan(values), self._outside[places], self._outside[places] + 1)
        self._outside[places[~outside & ~np.isnan(values)]] = 0
        settled = self._outside[places] > self.MEMORY
        if settled.any():
            self._forget(places[settled])
        return np.asarray(settled & np.isfinite(values))

    def _find(self) -> None:
        """Of those that have new values: most series are not measured at every step."""
        self._age = 0
        chosen = np.flatnonzero(self._changed)
        self._changed[chosen] = False
        count = self.count[chosen]
        most = count.max(initial=0)
        self.level[chosen] = _middle(self._levels[:most, chosen], np.minimum(count, self.LEVEL))
        away = np.abs(self._residuals[:most, chosen])
        self.scale[chosen] = np.maximum(1.4826 * _middle(away, np.minimum(count, self.MEMORY)), self._floor)

    def _forget(self, chosen: Integers) -> None:
        self._levels[:, chosen] = np.nan
        self._residuals[:, chosen] = np.nan
        self.count[chosen], self._outside[chosen], self.level[chosen] = 0, 0, np.nan


def _with_rows(values: Floats, least: int, most: int) -> Floats:
    """With twice as many rows, or more where that is not enough; new ones are NaN."""
    missing = min(most, max(least, 2 * len(values))) - len(values)
    return np.concatenate([values, np.full((missing, values.shape[1]), np.nan)]) if missing > 0 else values


def median(values: Floats) -> Floats:
    """Over the first axis, without NaN; NaN where there is nothing. np.nanmedian takes ten times as long."""
    if not len(values):
        return np.full(values.shape[1], np.nan)
    return _middle(values, (~np.isnan(values)).sum(axis=0))


def _middle(values: Floats, known: Integers) -> Floats:
    """The same where it is known how many there are in each column."""
    ordered = np.sort(values, axis=0)  # NaN comes last
    least = int(known.min(initial=len(values)))
    if least and least == known.max(initial=0):
        return np.asarray((ordered[(least - 1) // 2] + ordered[least // 2]) / 2)
    columns = np.arange(values.shape[1])
    low, high = ordered[np.maximum(known - 1, 0) // 2, columns], ordered[np.maximum(known, 1) // 2, columns]
    return np.where(known > 0, (low + high) / 2, np.nan)


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
