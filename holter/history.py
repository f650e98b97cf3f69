"""History: records as aligned series, per layer and global. All that a rule or a chart sees, live or stored."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holter.record import Record
from holter.statistics.histogram import Histogram
from holter.statistics.rows import COLUMNS, STATISTICS, derive

if TYPE_CHECKING:
    import pandas

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class History:
    """The records of a training in the order in which they were written, repeated and earlier steps included.

    >>> from holter.record import Record
    >>> history = History([Record(step=0, time=0.0, scalars={"loss": 2.0}), Record(step=1, time=1.0)])
    >>> history.scalar("loss")
    (array([0]), array([2.]))
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.records: Sequence[Record] = tuple(records)
        self._stacks: dict[str, tuple[Integers, tuple[str, ...], Floats]] = {}

    def __len__(self) -> int:
        """How many optimizer steps were recorded."""
        return sum(not record.late for record in self.records)

    def __repr__(self) -> str:
        return f"<History of {len(self)} steps: scalars {self.scalars}, roles {self.roles}>"

    @property
    def steps(self) -> Integers:
        return _integers(record.step for record in self.records if not record.late)

    @property
    def segments(self) -> Integers:
        """The segment of every step of `steps`; a resume begins a new one."""
        return _integers(record.segment for record in self.records if not record.late)

    @property
    def scalars(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for record in self.records for name in record.scalars))

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(role for record in self.records for role in record.rows))

    def layers(self, role: str) -> tuple[str, ...]:
        """Every layer that ever had a row in this role, in the order of first sight."""
        return tuple(dict.fromkeys(name for layers in self._tables(role) for name in layers))

    def scalar(self, name: str) -> tuple[Integers, Floats]:
        """Steps and values of one scalar; empty arrays where it was never recorded."""
        found = [(record.step, record.scalars[name]) for record in self.records if name in record.scalars]
        return _integers(step for step, _ in found), np.array([value for _, value in found], dtype=np.float64)

    def series(self, role: str, statistic: str) -> tuple[Integers, tuple[str, ...], Floats]:
        """Steps [s], layers [n] and the statistic [s, n] of one role; NaN where a layer was not measured."""
        steps, layers, values = self._stack(role)
        return steps, layers, derive(values, statistic)

    def histogram(self, role: str, layer: str) -> tuple[Integers, list[Histogram]]:
        """Steps and histograms of one layer, at the steps where they were taken."""
        found = []
        for record in self.records:
            layer_rows = record.rows.get(role)
            if layer_rows and layer_rows.rows.histograms is not None and layer in layer_rows.layers:
                found.append((record.step, layer_rows.rows.histograms[layer_rows.layers.index(layer)]))
        return _integers(step for step, _ in found), [histogram for _, histogram in found]

    def latest(self) -> History:
        """The line of training that survived: where a resume repeated steps, only the newest of each."""
        first_of: dict[int, int] = {}
        for record in self.records:
            first_of[record.segment] = min(record.step, first_of.get(record.segment, record.step))
        order = sorted(first_of)
        # A segment counts up to where the first of its successors starts.
        until = {segment: min((first_of[s] for s in order if s > segment), default=None) for segment in order}
        newest = {(r.step, r.late): i for i, r in enumerate(self.records) if not r.late}
        kept = []
        for place, record in enumerate(self.records):
            limit = until[record.segment]
            if (limit is None or record.step < limit) and (record.late or newest[record.step, False] == place):
                kept.append(record)
        return History(kept)

    def to_dataframe(self, role: str | None = None) -> pandas.DataFrame:
        """Scalars as a table, a line a step; with a role, a line a step and layer with every statistic of it."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_dataframe needs pandas: pip install 'holter[parquet]'") from error
        if role is None:
            lines: dict[tuple[int, int], dict[str, float]] = {}
            for record in self.records:
                lines.setdefault((record.segment, record.step), {}).update(record.scalars)
            frame = pandas.DataFrame(list(lines.values()), columns=list(self.scalars), dtype=np.float64)
            frame.insert(0, "step", [step for _, step in lines])
            frame.insert(1, "segment", [segment for segment, _ in lines])
            return frame
        steps, layers, values = self._stack(role)
        measured = values[..., COLUMNS.index("count")] >= 0  # NaN where there was no row
        when, which = np.nonzero(measured)
        columns: dict[str, object] = {"step": steps[when], "layer": np.array(layers, dtype=object)[which]}
        columns.update({name: derive(values[when, which], name) for name in STATISTICS})
        return pandas.DataFrame(columns)

    def _tables(self, role: str) -> Iterable[tuple[str, ...]]:
        return dict.fromkeys(record.rows[role].layers for record in self.records if role in record.rows)

    def _stack(self, role: str) -> tuple[Integers, tuple[str, ...], Floats]:
        """Steps [s], layers [n], measured columns [s, n, COLUMNS] of a role; remembered, records never change."""
        if role not in self._stacks:
            records = [record for record in self.records if role in record.rows]
            layers = self.layers(role)
            place = {name: i for i, name in enumerate(layers)}
            columns_of = {table: [place[name] for name in table] for table in self._tables(role)}
            values = np.full((len(records), len(layers), len(COLUMNS)), np.nan)
            for i, record in enumerate(records):
                layer_rows = record.rows[role]
                values[i, columns_of[layer_rows.layers]] = layer_rows.rows.values
            self._stacks[role] = _integers(record.step for record in records), layers, values
        return self._stacks[role]


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, dtype=np.int64)
