"""Series of any length in bounded memory: stretches of steps that grow as a run does, with the extremes of each.

A series has at most twice as many buckets as were asked for. When steps go beyond the last one, neighbours are merged
and every bucket covers twice as many steps. So a value that was seen in a single step of a million still shows. Memory
is taken as steps come: a short run of many layers is small.
"""

from __future__ import annotations

import warnings

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]

BUCKETS = 800  # what a wide screen shows
_FEWEST = 128


def buckets_for(layers: int, cells: int, most: int = BUCKETS) -> int:
    """As many as a strip chart of so many layers may have, where it is to have so many cells."""
    return min(most, max(_FEWEST, cells // max(1, layers)))


_FIRST_ROWS = 8


class Buckets:
    """The lowest and the highest value of every layer in every stretch of steps, and the last one.

    >>> found = Buckets(2, layers=1)
    >>> for step in range(8):
    ...     found.put(step, np.array([float(step)]))
    >>> found.span, found.steps.tolist(), found.high[:, 0].tolist()
    (2, [0, 2, 4, 6], [1.0, 3.0, 5.0, 7.0])
    """

    def __init__(self, buckets: int = BUCKETS, layers: int = 1) -> None:
        self.span = 1  # steps in a bucket
        self._room = 2 * buckets
        self._arrays = np.full((3, 0, layers), np.nan, dtype=np.float32)  # low, high, last
        self._used: npt.NDArray[np.bool_] = np.zeros(0, dtype=bool)

    @property
    def steps(self) -> Integers:
        """The first step of each bucket that holds something."""
        return np.flatnonzero(self._used) * self.span

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
        found: Singles = self._arrays[which, self._used]
        return found

    def put(self, step: int, values: Floats, places: Integers | slice = slice(None)) -> None:
        """Values of the layers at these places; what is not known of one is NaN."""
        if step < 0:
            return
        while step >= self._room * self.span:
            self._fold()
        row = step // self.span
        if row >= len(self._used):
            self._lengthen(min(self._room, max(row + 1, 2 * len(self._used), _FIRST_ROWS)))
        self._used[row] = True
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
        first = -(-step // self.span)
        self._used[first:] = False
        self._arrays[:, first:] = np.nan

    def _lengthen(self, rows: int) -> None:
        more = rows - len(self._used)
        self._arrays = np.pad(self._arrays, ((0, 0), (0, more), (0, 0)), constant_values=np.nan)
        self._used = np.pad(self._used, (0, more))

    def _fold(self) -> None:
        self._lengthen(len(self._used) + len(self._used) % 2)
        pairs = self._arrays.reshape(3, len(self._used) // 2, 2, self._arrays.shape[2])
        low = np.fmin(pairs[0, :, 0], pairs[0, :, 1])
        high = np.fmax(pairs[1, :, 0], pairs[1, :, 1])
        last = np.where(np.isnan(pairs[2, :, 1]), pairs[2, :, 0], pairs[2, :, 1])
        self._arrays = np.stack((low, high, last))
        self._used = self._used[::2] | self._used[1::2]
        self.span *= 2


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
