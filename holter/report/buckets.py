"""Series of any length in bounded memory: stretches of steps that grow as a run does, with the extremes of each.

A series has at most twice as many buckets as were asked for. When steps go beyond the last one, neighbours are merged
and every bucket covers twice as many steps. So a value that was seen in a single step of a million still shows. Memory
is taken as steps come: a short run of many layers is small.
"""

from __future__ import annotations

import warnings
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

BUCKETS = 800  # what a wide screen shows
_FEWEST = 128
_FIRST_ROWS = 2
_SMALL = 16 << 10  # bytes of several layers that are taken at once: scalars may be many


def buckets_for(layers: int, cells: int, most: int = BUCKETS) -> int:
    """As many as a strip chart of so many layers may have, where it is to have so many cells."""
    return min(most, max(_FEWEST, cells // max(1, layers)))


class Buckets:
    """The lowest and the highest value of every layer in every stretch of steps, and the last one.

    Only stretches that hold something take memory.

    >>> found = Buckets(2, layers=1)
    >>> for step in range(8):
    ...     found.put(step, np.array([float(step)]))
    >>> found.span, found.steps.tolist(), found.high[:, 0].tolist()
    (2, [0, 2, 4, 6], [1.0, 3.0, 5.0, 7.0])
    """

    def __init__(self, buckets: int = BUCKETS, layers: int = 1) -> None:
        self.span = 1  # steps in a bucket
        self._room = 2 * buckets
        self._numbers: list[int] = []  # of the buckets that hold something, ascending
        self._arrays = np.full((3, 0, layers), np.nan, dtype=np.float32)  # low, high, last; a row for each, and room

    @property
    def steps(self) -> Integers:
        """The first step of each bucket that holds something."""
        return np.array(self._numbers, dtype=np.int64) * self.span

    @property
    def low(self) -> Singles:
        """[buckets, layers], of those in `steps`; NaN where a layer was not measured."""
        return self._of(0)

    @property
    def high(self) -> Singles:
        return self._of(1)

    @property
    def last(self) -> Singles:
        return self._of(2)

    def _of(self, which: int) -> Singles:
        found: Singles = self._arrays[which, : len(self._numbers)].copy()
        return found

    def put(self, step: int, values: Floats, places: Integers | slice = slice(None)) -> None:
        """Values of the layers at these places; what is not known of one is NaN."""
        if step < 0:
            return
        while step >= self._room * self.span:
            self._fold()
        row = self._row_of(step // self.span)
        with np.errstate(over="ignore"):  # beyond float32 it is infinite, and shown as such
            single = values.astype(np.float32)
        low, high, last = self._arrays[:, row]
        low[places] = np.fmin(low[places], single)
        high[places] = np.fmax(high[places], single)
        last[places] = np.where(np.isnan(single), last[places], single)

    def grow(self, layers: int) -> None:
        """Makes room for so many layers; new ones were not measured so far."""
        more = layers - self._arrays.shape[2]
        if more > 0:
            self._arrays = np.pad(self._arrays, ((0, 0), (0, 0), (0, more)), constant_values=np.nan)

    def rewind(self, step: int) -> None:
        """Forgets what came at this step and after it: a checkpoint of before was loaded."""
        kept = bisect_left(self._numbers, -(-step // self.span))
        del self._numbers[kept:]
        self._arrays[:, kept:] = np.nan

    def _row_of(self, number: int) -> int:
        """Where the bucket of this number is; it is put in its place where it is new."""
        row = bisect_left(self._numbers, number)
        if row < len(self._numbers) and self._numbers[row] == number:
            return row
        count = len(self._numbers)
        if count == self._arrays.shape[1]:
            layers = self._arrays.shape[2]
            is_small = layers > 1 and self._arrays.itemsize * 3 * self._room * layers <= _SMALL
            more = self._room - count if is_small else min(self._room - count, max(count, _FIRST_ROWS))
            self._arrays = np.pad(self._arrays, ((0, 0), (0, more), (0, 0)), constant_values=np.nan)
        if row < count:  # what was logged late
            self._arrays[:, row + 1 : count + 1] = self._arrays[:, row:count].copy()
            self._arrays[:, row] = np.nan
        self._numbers.insert(row, number)
        return row

    def _fold(self) -> None:
        """Merges neighbours: a bucket covers twice as many steps."""
        self.span *= 2
        if not self._numbers:
            return
        halves = np.array(self._numbers, dtype=np.int64) // 2
        firsts = np.flatnonzero(np.diff(halves, prepend=-1))
        second = np.flatnonzero(np.diff(halves, prepend=-1) == 0)  # of a pair
        low, high, last = self._arrays[:, : len(halves)]
        merged = np.stack((low[firsts], high[firsts], last[firsts]))
        into = np.searchsorted(firsts, second) - 1
        merged[0, into] = np.fmin(merged[0, into], low[second])
        merged[1, into] = np.fmax(merged[1, into], high[second])
        merged[2, into] = np.where(np.isnan(last[second]), merged[2, into], last[second])
        self._arrays[:, : len(firsts)], self._arrays[:, len(firsts) :] = merged, np.nan
        self._numbers = halves[firsts].tolist()


def telling(buckets: Buckets) -> Singles:
    """Of each bucket and layer the extreme that is farther from what the layer usually has, as ratios go.

    [buckets, layers]: one colour a cell, in which a single vanished or exploded step is still seen.
    """
    low, high, last = buckets.low, buckets.high, buckets.last
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a layer that was never measured
        usual = np.nanmedian(np.where(np.isfinite(last), last, np.nan), axis=0)
        below = np.abs(np.log(np.abs(low)) - np.log(np.abs(usual)))
        above = np.abs(np.log(np.abs(high)) - np.log(np.abs(usual)))
    return np.where(np.nan_to_num(below, nan=-1.0) > np.nan_to_num(above, nan=-1.0), low, high).astype(np.float32)
