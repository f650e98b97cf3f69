"""Histograms with fixed logarithmic buckets, read off the bits of a float32: sign, exponent, top two mantissa bits.

No range is chosen beforehand, one outlier spoils nothing, and any two histograms merge exactly by adding counts.
A bucket spans at most a quarter of its lower edge, so its middle is within 12.5 % of every value in it (normal
float32 numbers; below 2**-126 the buckets are linear, and bucket 0, below 2**-128, holds both signs). Nothing here
needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SHIFT = 21  # float32 has 23 mantissa bits; two are kept
SIZE = 1 << (32 - SHIFT)  # 2048 buckets: half for each sign
HALF = SIZE // 2
FIRST_NONFINITE = 255 << (23 - SHIFT)  # exponent 255: Inf and NaN, within one sign's half

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# The smallest positive number each format can hold, subnormals counted; half of it rounds to zero.
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float8_e4m3": 2.0**-9, "float8_e5m2": 2.0**-16}


def _bucket_edges() -> tuple[Floats, Floats]:
    """Edges of every bucket nearer to and farther from zero, signed, float64 [SIZE]."""
    bits = np.arange(HALF + 1, dtype=np.uint32) << np.uint32(SHIFT)
    bits[FIRST_NONFINITE + 1 :] = 0x7F80_0000
    magnitude = bits.view(np.float32).astype(np.float64)
    magnitude[FIRST_NONFINITE] = 2.0**128  # the edge that the largest finite bucket would have
    near, far = magnitude[:-1], magnitude[1:]
    return np.concatenate([near, -near]), np.concatenate([far, -far])


NEAR, FAR = _bucket_edges()
MIDDLE = np.where(np.isfinite(FAR), (NEAR + np.where(np.isfinite(FAR), FAR, 0)) / 2, NEAR)
LOWER, UPPER = np.minimum(NEAR, FAR), np.maximum(NEAR, FAR)
FINITE = np.tile(np.arange(HALF) < FIRST_NONFINITE, 2)


def bucket_of(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """The bucket of each value, as the backends compute it on the device.

    What is too large for float32 is not infinite: the last finite bucket takes it.
    """
    numbers = np.atleast_1d(np.asarray(values))
    with np.errstate(over="ignore", invalid="ignore"):
        single = numbers.astype(np.float32)
    too_large = np.isinf(single) & np.isfinite(numbers)
    single[too_large] = np.copysign(np.finfo(np.float32).max, single[too_large])
    bucket = (single.view(np.uint32) >> np.uint32(SHIFT)).astype(np.uint16)
    bucket[bucket == HALF] = 0  # what is below 2**-128, minus zero before all, has no sign
    return bucket


@dataclass(frozen=True, eq=False)
class Histograms:
    """Histograms of `n` tensors, only the occupied buckets: those of tensor i stand at offsets[i]:offsets[i+1].

    Counts include zeros (bucket 0) and non-finite values (the buckets that `FINITE` excludes).
    """

    offsets: Integers  # [n + 1]
    buckets: npt.NDArray[np.uint16]  # [m], ascending within a tensor
    counts: Integers  # [m]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @classmethod
    def from_dense(cls, dense: npt.NDArray[np.integer]) -> Histograms:
        """From counts [n, SIZE]."""
        tensor, bucket = np.nonzero(dense)
        offsets = np.searchsorted(tensor, np.arange(len(dense) + 1))
        counts = dense[tensor, bucket].astype(np.int64)
        return cls(offsets.astype(np.int64), bucket.astype(np.uint16), counts)

    @classmethod
    def of(cls, arrays: Sequence[npt.ArrayLike]) -> Histograms:
        """Measured here, with numpy: for small data and as the reference of the backends."""
        rows = [np.bincount(bucket_of(np.ravel(np.asarray(a))), minlength=SIZE) for a in arrays]
        return cls.from_dense(np.stack(rows) if rows else np.zeros((0, SIZE), np.int64))

    def dense(self) -> Integers:
        """Counts [n, SIZE]."""
        full = np.zeros((len(self), SIZE), dtype=np.int64)
        full[self._tensor_of_bucket(), self.buckets] = self.counts
        return full

    def scaled(self, factor: float) -> Histograms:
        """Histograms of the values times a positive factor: exact for powers of two, else by buckets' middles."""
        moves = FINITE[self.buckets] & (self.buckets % HALF != 0)  # the middle of the zero bucket is not zero
        target = np.where(moves, bucket_of(MIDDLE[self.buckets] * factor), self.buckets)
        moved = np.zeros((len(self), SIZE), dtype=np.int64)
        np.add.at(moved, (self._tensor_of_bucket(), target), self.counts)
        return Histograms.from_dense(moved)

    def total(self) -> Histograms:
        """All tensors' histograms added into one."""
        added = np.zeros(SIZE, dtype=np.int64)
        np.add.at(added, self.buckets, self.counts)
        return Histograms.from_dense(added[None, :])

    @staticmethod
    def merge(parts: Sequence[Histograms]) -> Histograms:
        """Histograms of shards of the same tensors: exactly those of the whole."""
        added = parts[0].dense()
        for part in parts[1:]:
            added = added + part.dense()
        return Histograms.from_dense(added)

    def __getitem__(self, index: int) -> Histogram:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        index %= len(self)
        if self.offsets[index] == self.offsets[index + 1]:
            return _EMPTY
        piece = slice(int(self.offsets[index]), int(self.offsets[index + 1]))
        return Histogram(self.buckets[piece], self.counts[piece])

    def _tensor_of_bucket(self) -> Integers:
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))


@dataclass(frozen=True, eq=False, slots=True)
class Histogram:
    """The histogram of one tensor: occupied buckets and their counts."""

    buckets: npt.NDArray[np.uint16]
    counts: Integers

    @property
    def count(self) -> int:
        """How many values were counted, non-finite ones included."""
        return int(self.counts.sum())

    def quantile(self, q: float | Floats) -> Floats:
        """The value at each quantile of the finite values, within 12.5 %: the middle of the bucket that holds
        the ceil(q n)-th smallest (numpy's "inverted_cdf"). NaN where there is no finite value."""
        asked = np.asarray(q, dtype=np.float64)
        if np.any((asked < 0) | (asked > 1)):
            raise ValueError(f"a quantile lies in [0, 1], got {q}")
        buckets, counts = self._ascending()
        if not len(buckets):
            return np.full(asked.shape, np.nan)
        cumulated = np.cumsum(counts)
        rank = np.clip(np.ceil(asked * cumulated[-1]), 1, cumulated[-1])
        return np.asarray(_representative(buckets)[np.searchsorted(cumulated, rank)])

    def edges(self) -> tuple[Integers, Floats]:
        """Counts [m] and ascending edges [m + 1] over the occupied range, as ordinary histogram tools want them.

        Gaps between occupied buckets become buckets of count zero; a lone zero gets the width of its bucket.
        """
        buckets, counts = self._ascending()
        if not len(buckets):
            return np.zeros(0, np.int64), np.zeros(0)
        lower, upper = LOWER[buckets], UPPER[buckets]
        all_edges = np.unique(np.concatenate([lower, upper]))
        filled = np.zeros(len(all_edges) - 1, dtype=np.int64)
        np.add.at(filled, np.searchsorted(all_edges, lower), counts)
        return filled, all_edges

    def flushed_share(self, number_format: str) -> float:
        """The share of the finite non-zero values that rounding to this format would turn into zero.

        Read off whole buckets: those below half of the format's smallest number. Zeros themselves cannot be told
        from values below 2**-128, so both stay out.
        """
        if number_format not in SMALLEST:
            raise ValueError(f"unknown format {number_format!r}; there are {', '.join(SMALLEST)}")
        buckets, counts = self._ascending()
        nonzero = buckets % HALF != 0
        magnitude = np.abs(FAR[buckets])
        lost = nonzero & (magnitude <= SMALLEST[number_format] / 2)
        seen = counts[nonzero].sum()
        return float(counts[lost].sum() / seen) if seen else 0.0

    def _ascending(self) -> tuple[Integers, Integers]:
        """The finite buckets and their counts, from the most negative value to the most positive."""
        finite = FINITE[self.buckets]
        buckets, counts = self.buckets[finite].astype(np.int64), self.counts[finite]
        order = np.argsort(MIDDLE[buckets], kind="stable")
        return buckets[order], counts[order]


_EMPTY = Histogram(np.zeros(0, np.uint16), np.zeros(0, np.int64))  # one for all


def _representative(buckets: Integers) -> Floats:
    """The middle of a bucket; exactly zero for the two that hold the zeros."""
    return np.where(buckets % HALF == 0, 0.0, MIDDLE[buckets])
