"""Proportion: what readers make of a file takes memory in proportion to its size, whoever wrote it.

A row or a name takes a few bytes of a file, and a hundred times as many once there are series, a baseline and a matrix
of it. In a real training a layer comes in very many records, so that its series are filled. What names ever new layers
or scalars, or lets nearly all of them out, is left out where it would take too much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from holter.record import LayerRows, Record

Value = TypeVar("Value")

# Bytes of memory for a byte of the file. A training of some steps takes 3 to 8. That of thousands of layers may take 18
# at its first step, without histograms: what is left out then is read when the file has grown.
MOST = 14
ALLOWANCE = 1 << 20  # bytes for any file: a first step names everything, and a small run is small
# Bytes, as the diagnosis, the history, the summary and the dashboard take them at most (tests/test_hostile_journals.py
# measures them).
_ROLE, _LAYER, _ROW, _CELL = 3000, 1200, 110, 200  # a cell: one layer at one step, whether it was measured or not
_EXTRA, _EXTRA_CELL = 1100, 32
_SCALAR, _VALUE, _RECORD = 1700, 150, 600
_NOTED_NAME = 350


@dataclass
class _Role:
    """What has been seen of one role."""

    layers: set[str] = field(default_factory=set)
    extras: set[str] = field(default_factory=set)
    last: tuple[str, ...] = ()  # a journal's table is one object for all of its records
    lines: int = 0  # records
    rows: int = 0

    @property
    def bytes(self) -> int:
        cells, extras = self.lines * len(self.layers), len(self.extras)
        fixed = _ROLE + _LAYER * len(self.layers) + _EXTRA * extras
        return fixed + _ROW * self.rows + (_CELL + _EXTRA_CELL * extras) * cells

    def with_rows(self, found: LayerRows) -> _Role:
        is_known = found.layers is self.last or self.layers.issuperset(found.layers)
        layers = self.layers if is_known else self.layers.union(found.layers)
        extras = self.extras if self.extras.issuperset(found.extras) else self.extras.union(found.extras)
        return _Role(layers, extras, found.layers, self.lines + 1, self.rows + len(found.layers))


class Proportion:
    """Of one file, given its records in their order."""

    def __init__(self) -> None:
        self._roles: dict[str, _Role] = {}
        self._scalars: set[str] = set()
        self._noted = 0  # names in the longest note
        self._taken = 0  # bytes

    def fit(self, record: Record, size: float) -> Record:
        """The same record where a file of this size can have it; else what of it the file can have."""
        most = MOST * size + ALLOWANCE
        self._taken += _RECORD
        rows = {role: found for role, found in record.rows.items() if self._takes(role, found, most)}
        scalars = _kept(record.scalars, lambda name: self._takes_scalar(name, most))
        notes = _kept(record.notes, lambda name: self._takes_note(record.notes[name], most))
        if (len(rows), len(scalars), len(notes)) == (len(record.rows), len(record.scalars), len(record.notes)):
            return record
        return replace(record, rows=rows, scalars=scalars, notes=notes)

    def _takes(self, role: str, found: LayerRows, most: float) -> bool:
        old = self._roles.get(role)
        new = (old or _Role()).with_rows(found)
        taken = self._taken + new.bytes - (old.bytes if old is not None else 0)
        if taken <= most:
            self._roles[role], self._taken = new, taken
        return taken <= most

    def _takes_scalar(self, name: str, most: float) -> bool:
        taken = self._taken + _VALUE + (0 if name in self._scalars else _SCALAR)
        if taken <= most:
            self._scalars.add(name)
            self._taken = taken
        return taken <= most

    def _takes_note(self, text: str, most: float) -> bool:
        """Readers keep the newest note of a kind, taken apart."""
        named = text.count('"') // 2
        taken = self._taken + len(text) + _NOTED_NAME * max(0, named - self._noted)
        if taken <= most:
            self._noted, self._taken = max(self._noted, named), taken
        return taken <= most


def _kept(found: Mapping[str, Value], is_taken: Callable[[str], bool]) -> dict[str, Value]:
    return {name: value for name, value in found.items() if is_taken(name)}
