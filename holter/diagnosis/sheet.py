"""Sheet: the rows of one role over the steps, as series. What people read is derived when a rule looks, many steps at
once: numpy takes as long for one as for many."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from holter.record import LayerRows
from holter.series import Floats, Integers, Series
from holter.statistics.rows import derive

# What is kept of each role, besides its extras.
_STATISTICS = {
    "gradient": ("norm", "zero_share", "nonfinite", "abs_max"),
    "weight": ("norm", "rms", "std", "nonfinite"),
    "update": ("norm",),
    "activation": ("rms", "std", "mean", "abs_max", "zero_share", "count", "nonfinite"),
    "momentum": ("norm",),
    "second_moment": ("norm", "zero_share"),
    "batch": ("count", "mean", "std", "abs_max", "min", "max", "nonfinite"),
}
_NONE = Series(())
_MOST_WAITING, _MOST_NUMBERS = 32, 1 << 18  # steps, and numbers: their rows are kept until then


@dataclass(frozen=True, eq=False)
class _Line:
    """The rows of one step, without their histograms."""

    step: int
    layers: tuple[str, ...]
    rows: Floats  # [layers, columns]
    extras: Mapping[str, Floats]


class Sheet:
    def __init__(self, role: str) -> None:
        self._statistics = _STATISTICS.get(role, ("norm",))
        self._waiting: list[_Line] = []
        self._last: _Line | None = None
        self.layers: set[str] = set()  # of all steps
        self._taken: dict[str, int] = {}  # how many of those that wait are in the series already
        self._series: dict[str, Series] = {}

    def add(self, step: int, rows: LayerRows) -> None:
        # Copies: these arrays may be views of tensors, which nobody should keep alive.
        extras = {name: values.copy() for name, values in rows.extras.items()}
        if self._last is None or self._last.layers is not rows.layers:
            self.layers.update(rows.layers)
        self._last = _Line(step, rows.layers, rows.rows.values.copy(), extras)
        self._waiting.append(self._last)
        if len(self._waiting) >= _MOST_WAITING or len(self._waiting) * rows.rows.values.size >= _MOST_NUMBERS:
            for name in dict.fromkeys((*self._statistics, *(name for line in self._waiting for name in line.extras))):
                self._settle(name)
            self._waiting, self._taken = [], {}

    def series(self, statistic: str) -> Series:
        """Empty where it was never measured."""
        if self._taken.get(statistic, 0) < len(self._waiting):
            self._settle(statistic)
        return self._series.get(statistic, _NONE)

    @property
    def last_step(self) -> int:
        """At which there were such rows; -1 where there never were."""
        return self._last.step if self._last is not None else -1

    def last(self, statistic: str) -> tuple[tuple[str, ...], Floats]:
        """Layers and values of the last step, with no series made of them: a quick look. NaN where it was not known."""
        if self._last is None:
            return (), np.zeros(0)
        if statistic in self._statistics:
            return self._last.layers, derive(self._last.rows, statistic)
        return self._last.layers, self._last.extras.get(statistic, np.full(len(self._last.layers), np.nan))

    def _settle(self, name: str) -> None:
        lines = self._waiting[self._taken.get(name, 0) :]
        self._taken[name] = len(self._waiting)
        is_derived = name in self._statistics
        known = lines if is_derived else [line for line in lines if name in line.extras]
        place = self._widened(name, known)
        for layers, alike in groupby(known, key=lambda line: line.layers):
            same = list(alike)
            steps = np.array([line.step for line in same], dtype=np.int64)
            if is_derived:
                self._extend(name, layers, place, steps, derive(np.array([line.rows for line in same]), name))
            else:
                self._extend(name, layers, place, steps, np.array([line.extras[name] for line in same]))

    def _widened(self, name: str, lines: list[_Line]) -> dict[str, int]:
        """Makes room for all layers of these lines at once, and says where each is: nothing where all are the same."""
        series = self._series.get(name)
        if series is None and lines:
            series = self._series[name] = Series(lines[0].layers)
        if series is None or all(line.layers == series.names for line in lines):
            return {}
        names = dict.fromkeys((*series.names, *(layer for line in lines for layer in line.layers)))
        if len(names) > len(series.names):
            self._series[name] = series.renamed(tuple(names))
        return {layer: index for index, layer in enumerate(names)}

    def _extend(
        self, name: str, layers: tuple[str, ...], place: dict[str, int], steps: Integers, values: Floats
    ) -> None:
        series = self._series[name]
        if series.names != layers:
            lines = np.full((len(values), len(series.names)), np.nan)
            lines[:, [place[layer] for layer in layers]] = values
            values = lines
        series.extend(steps, values)
