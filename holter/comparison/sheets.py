"""One statistic of the layers of a role over the steps of a run, in bounded memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from holter.history import layers_by_depth
from holter.record import LayerRows
from holter.series import Floats, Integers

_SIZES = ("norm", "ratio")  # measured of the finite values of a tensor alone
ROOM = 6_000_000  # numbers in a sheet, at most: 48 MB
_BESIDE = 40  # numbers that would fit where a row is kept, beside its values


class Sheet:
    """A row a look. Where they become too many, the first look of every 2, 4, 8, ... steps is kept: so two runs that
    were looked at in the same steps keep the same ones."""

    def __init__(self, statistic: str, room: int = ROOM) -> None:
        self.statistic, self.span = statistic, 1
        self._room, self._taken = room, 0
        self._rows: dict[int, list[tuple[tuple[str, ...], Floats]]] = {}
        self._stretches: set[int] = set()  # that have a row, each of `span` steps

    def put(self, step: int, rows: LayerRows, *, is_late: bool = False) -> None:
        if step not in self._rows and step // self.span in self._stretches:
            return
        values = self._values(rows)
        before = self._rows.get(step, []) if is_late else []
        self._rows[step] = [*before, (rows.layers, values)]
        self._stretches.add(step // self.span)
        self._taken += len(values) + _BESIDE
        while self._taken > self._room and len(self._rows) > 1:
            self._thin()

    def _values(self, rows: LayerRows) -> Floats:
        """Infinite where some values of a tensor were not finite: the norm of the others, which may be none at all,
        would look like that of a small tensor. Not NaN, which is for what was not measured."""
        extra = rows.extras.get(self.statistic)
        values = rows.rows.derive(self.statistic) if extra is None else extra
        return np.where(rows.rows.derive("nonfinite") > 0, np.inf, values) if self.statistic in _SIZES else values

    def _thin(self) -> None:
        self.span *= 2
        first: dict[int, int] = {}
        for step in sorted(self._rows):
            first.setdefault(step // self.span, step)
        self._rows = {step: self._rows[step] for step in first.values()}
        self._stretches = set(first)
        self._taken = sum(len(values) + _BESIDE for looks in self._rows.values() for _, values in looks)

    def series(self, depth: Mapping[str, int]) -> tuple[Integers, tuple[str, ...], Floats]:
        """Ascending steps [s], layers [n] in the order in which they run, and the values [s, n]; NaN for what was not
        measured, and infinity for the norm of what was not all finite."""
        steps = np.array(sorted(self._rows), dtype=np.int64)
        tables = dict.fromkeys(table for looks in self._rows.values() for table, _ in looks)
        layers = layers_by_depth(dict.fromkeys(name for table in tables for name in table), depth)
        place = {name: index for index, name in enumerate(layers)}
        places = {table: [place[name] for name in table] for table in tables}
        values = np.full((len(steps), len(layers)), np.nan)
        for line, step in zip(values, steps.tolist(), strict=True):
            for table, measured in self._rows[step]:
                line[places[table]] = measured
        return steps, layers, values
