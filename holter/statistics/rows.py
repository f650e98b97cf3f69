"""Rows: what is measured of tensors, one row a tensor. Only what merges is kept; what people read is derived.

A row holds counts, sums and extremes, so rows of shards, ranks or steps add up to the row of the whole:
measure -> merge -> derive. Nothing here needs torch: a stored run is read with numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holter.statistics.histogram import Histograms

Floats = npt.NDArray[np.float64]

# Non-finite values are counted in their own columns and kept out of the sums and extremes.
COLUMNS = (
    "count",
    "zeros",
    "nans",
    "infs_positive",
    "infs_negative",
    "sum",
    "sum_abs",
    "sum_squares",
    "sum_fourths",
    "min",
    "max",
)
MIN, MAX = COLUMNS.index("min"), COLUMNS.index("max")


@dataclass(frozen=True, eq=False)
class Rows:
    """Measured rows of `n` tensors: `values` is float64 [n, len(COLUMNS)], histograms where they were taken.

    A tensor with no finite value has the merge identity as extremes (min +inf, max -inf); `derive` gives NaN.
    """

    values: Floats
    histograms: Histograms | None = None

    def __post_init__(self) -> None:
        if self.values.ndim != 2 or self.values.shape[1] != len(COLUMNS):
            raise ValueError(f"rows need {len(COLUMNS)} columns {COLUMNS}, got shape {self.values.shape}")

    def __len__(self) -> int:
        return len(self.values)

    def column(self, name: str) -> Floats:
        """One measured column, float64 [n]."""
        return self.values[:, COLUMNS.index(name)]

    def derive(self, statistic: str) -> Floats:
        """A statistic of every row, float64 [n]: one of `STATISTICS`."""
        return derive(self.values, statistic)

    def scaled(self, factor: float) -> Rows:
        """The rows of the same tensors multiplied by a positive factor."""
        values = self.values.copy()
        for name, power in (
            ("sum", 1),
            ("sum_abs", 1),
            ("sum_squares", 2),
            ("sum_fourths", 4),
            ("min", 1),
            ("max", 1),
        ):
            values[:, COLUMNS.index(name)] *= factor**power
        return Rows(values, self.histograms.scaled(factor) if self.histograms is not None else None)

    def total(self) -> Rows:
        """All rows merged into one: the row of the concatenated tensors."""
        histograms = self.histograms.total() if self.histograms is not None else None
        return Rows(_fold(self.values, axis=0)[None, :], histograms)


def merge(parts: Sequence[Rows]) -> Rows:
    """Rows of shards of the same tensors, merged: part k holds shard k of tensor i in its row i."""
    if not parts:
        raise ValueError("merge needs at least one part")
    stacked = np.stack([part.values for part in parts])
    histograms = [part.histograms for part in parts if part.histograms is not None]
    merged = Histograms.merge(histograms) if len(histograms) == len(parts) else None
    return Rows(_fold(stacked, axis=0), merged)


def _fold(values: Floats, axis: int) -> Floats:
    folded: Floats = values.sum(axis=axis)
    folded[..., MIN] = values[..., MIN].min(axis=axis, initial=np.inf)
    folded[..., MAX] = values[..., MAX].max(axis=axis, initial=-np.inf)
    return folded


def derive(values: Floats, statistic: str) -> Floats:
    """A statistic from measured columns; `values` may have any leading shape: [..., len(COLUMNS)]."""
    formula = _FORMULAS.get(statistic)
    if formula is None:
        raise ValueError(f"unknown statistic {statistic!r}; there are {', '.join(STATISTICS)}")
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        return formula(_Columns(values))


class _Columns:
    """Columns by name, so that the formulas below read like formulas."""

    def __init__(self, values: Floats) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Floats:
        column: Floats = self._values[..., COLUMNS.index(name)]
        return column

    @property
    def nonfinite(self) -> Floats:
        return self.nans + self.infs_positive + self.infs_negative

    @property
    def finite(self) -> Floats:
        return self.count - self.nonfinite

    @property
    def mean(self) -> Floats:
        return self.sum / self.finite

    def known(self, extreme: Floats) -> Floats:
        """NaN where no finite value was seen, instead of the infinite merge identity."""
        return np.where(self.finite > 0, extreme, np.nan)


_FORMULAS: dict[str, Callable[[_Columns], Floats]] = {
    "norm": lambda c: np.sqrt(c.sum_squares),
    # As torch gives it: NaN or infinite where a value is.
    "full_norm": lambda c: np.where(c.nans > 0, np.nan, np.where(c.nonfinite > 0, np.inf, np.sqrt(c.sum_squares))),
    "mean": lambda c: c.mean,
    "std": lambda c: np.sqrt(np.maximum(c.sum_squares / c.finite - c.mean**2, 0.0)),
    "rms": lambda c: np.sqrt(c.sum_squares / c.finite),
    "abs_mean": lambda c: c.sum_abs / c.finite,
    "min": lambda c: c.known(c.min),
    "max": lambda c: c.known(c.max),
    "abs_max": lambda c: c.known(np.maximum(c.max, -c.min)),
    # About zero, not about the mean: the third moment is not measured. 3 for a centred normal.
    "kurtosis": lambda c: c.sum_fourths * c.finite / c.sum_squares**2,
    "zero_share": lambda c: c.zeros / c.count,
    "nonfinite": lambda c: c.nonfinite,
    "count": lambda c: c.count,
}
STATISTICS = tuple(_FORMULAS)
