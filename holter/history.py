"""History: records as aligned series, per layer and global. All that a rule or a chart sees, live or stored."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from holter.record import ACTIVATIONS, EXECUTION_ORDER, OPTIMIZER_SETTINGS, Record, is_validation
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
        # Of each role, once it was asked for: records never change.
        self._stacks: dict[str, tuple[Integers, tuple[str, ...], Floats]] = {}
        self._extras: dict[str, Mapping[str, None]] = {}

    def __len__(self) -> int:
        """How many training steps were recorded."""
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

    @cached_property
    def scalars(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for record in self.records for name in record.scalars))

    @cached_property
    def validation(self) -> tuple[str, ...]:
        """Those of `scalars` that are of data which is not trained on, by their names: val_loss, eval/accuracy, ..."""
        return tuple(filter(is_validation, self.scalars))

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._by_role)

    @cached_property
    def depth(self) -> Mapping[str, int]:
        """The place of each module and parameter in the order in which they run: that of their first call in a
        training forward, as last observed. Empty where it was not."""
        notes = (record.notes.get(EXECUTION_ORDER) for record in reversed(self.records))
        found = next((order for order in map(names_in, notes) if order), [])
        return {name: place for place, name in enumerate(found)}

    @property
    def activations_note(self) -> str:
        """How activations were last seen, where it was not in a forward of the training; or why they were not."""
        told = (
            record for record in reversed(self.records) if ACTIVATIONS in record.notes or "activation" in record.rows
        )
        newest = next(told, None)
        return newest.notes.get(ACTIVATIONS, "") if newest is not None else ""

    @property
    def settings_note(self) -> str:
        """Of which optimizers the settings were recorded, where not of all; empty if of all."""
        notes = (record.notes.get(OPTIMIZER_SETTINGS, "") for record in reversed(self.records))
        return next(filter(None, notes), "")

    def layers(self, role: str) -> tuple[str, ...]:
        """Every layer that ever had a row in this role, in the order in which they run; where that is not known, in
        the order of first sight."""
        return layers_by_depth(dict.fromkeys(name for layers in self._tables(role) for name in layers), self.depth)

    def scalar(self, name: str) -> tuple[Integers, Floats]:
        """Steps and values of one scalar; empty arrays where it was never recorded.

        What was logged late for a step replaces what the step itself had.
        """
        steps, values = self._by_scalar.get(name, ((), ()))
        return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)

    def series(self, role: str, statistic: str) -> tuple[Integers, tuple[str, ...], Floats]:
        """Steps [s], layers [n] and the statistic [s, n] of one role; NaN where a layer was not measured.

        A statistic is one of rows.STATISTICS, or of `extras(role)`.
        """
        steps, layers, values = self._stack(role)
        if statistic in self._extras_of(role):
            return steps, layers, self._extra(role, statistic)
        return steps, layers, derive(values, statistic)

    def extras(self, role: str) -> tuple[str, ...]:
        """What is known of the layers of a role besides the statistics of their rows."""
        return tuple(self._extras_of(role))

    def histogram(self, role: str, layer: str) -> tuple[Integers, list[Histogram]]:
        """Steps and histograms of one layer, at the steps where they were taken."""
        found = []
        for record in self.records_of(role):
            layer_rows = record.rows[role]
            if layer_rows.rows.histograms is not None and layer in layer_rows.layers:
                found.append((record.step, layer_rows.rows.histograms[layer_rows.layers.index(layer)]))
        return _integers(step for step, _ in found), [histogram for _, histogram in found]

    def latest(self) -> History:
        """The line of training that survived: where a resume repeated steps, only the newest of each."""
        first_of: dict[int, int] = {}
        for record in self.records:
            first_of[record.segment] = min(record.step, first_of.get(record.segment, record.step))
        until = ends_of_segments(first_of)
        alive = [record for record in self.records if record.step < until[record.segment]]
        newest = {record.step: place for place, record in enumerate(alive) if not record.late}
        return History(record for place, record in enumerate(alive) if place >= newest.get(record.step, 0))

    def to_dataframe(self, role: str | None = None) -> pandas.DataFrame:
        """Scalars as a table, a line a step; with a role, a line a step and layer with every statistic of it."""
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_dataframe needs pandas: pip install 'holter[parquet]'") from error
        lines = _by_step(self.records if role is None else self.records_of(role))
        steps, segments = _integers(line[0].step for line in lines), _integers(line[0].segment for line in lines)
        if role is None:
            logged = [{name: record.scalars[name] for record in line for name in record.scalars} for line in lines]
            frame = pandas.DataFrame(logged, range(len(lines)), list(self.scalars), dtype=np.float64)
            # What the user logs under the names of our own columns keeps a column of its own.
            frame = frame.rename(columns={name: f"logged/{name}" for name in ("step", "segment")})
            frame.insert(0, "step", steps)
            frame.insert(1, "segment", segments)
            return frame
        _, layers, values = self._stack(role)
        measured = values[..., COLUMNS.index("count")] >= 0  # NaN where there was no row
        when, which = np.nonzero(measured)
        columns: dict[str, object] = {"step": steps[when], "segment": segments[when]}
        columns["layer"] = np.array(layers, dtype=object)[which]
        columns.update({name: derive(values[when, which], name) for name in STATISTICS})
        columns.update({name: self._extra(role, name)[when, which] for name in self.extras(role)})
        return pandas.DataFrame(columns)

    def _extra(self, role: str, name: str) -> Floats:
        _, layers, _ = self._stack(role)
        place = {layer: i for i, layer in enumerate(layers)}
        lines = _by_step(self.records_of(role))
        values = np.full((len(lines), len(layers)), np.nan)
        for i, line in enumerate(lines):
            for layer_rows in (record.rows[role] for record in line):
                if name in layer_rows.extras:
                    values[i, [place[layer] for layer in layer_rows.layers]] = layer_rows.extras[name]
        return values

    def _tables(self, role: str) -> Iterable[tuple[str, ...]]:
        return dict.fromkeys(record.rows[role].layers for record in self.records_of(role))

    def _extras_of(self, role: str) -> Mapping[str, None]:
        if role not in self._extras:
            named = (record.rows[role].extras for record in self.records_of(role))
            self._extras[role] = dict.fromkeys(name for extras in named for name in extras)
        return self._extras[role]

    def records_of(self, role: str) -> Sequence[Record]:
        """Return those that have rows of this role."""
        return self._by_role.get(role, ())

    @cached_property
    def _by_role(self) -> Mapping[str, Sequence[Record]]:
        """The records that have each role, in one pass: to search all of them per role takes roles times records."""
        found: dict[str, list[Record]] = {}
        for record in self.records:
            for role in record.rows:
                found.setdefault(role, []).append(record)
        return found

    @cached_property
    def _by_scalar(self) -> Mapping[str, tuple[array[int], array[float]]]:
        """Steps and values of every scalar, in one pass, for the same reason."""
        found: dict[str, tuple[array[int], array[float]]] = {}
        for line in _by_step(self.records):
            newest = line[0].scalars
            if len(line) > 1:
                newest = {name: record.scalars[name] for record in line for name in record.scalars}
            for name, value in newest.items():
                steps, values = found.setdefault(name, (array("q"), array("d")))
                steps.append(line[0].step)
                values.append(value)
        return found

    def _stack(self, role: str) -> tuple[Integers, tuple[str, ...], Floats]:
        """Steps [s], layers [n], measured columns [s, n, COLUMNS] of a role."""
        if role not in self._stacks:
            lines = _by_step(self.records_of(role))
            layers = self.layers(role)
            place = {name: i for i, name in enumerate(layers)}
            columns_of = {table: [place[name] for name in table] for table in self._tables(role)}
            values = np.full((len(lines), len(layers), len(COLUMNS)), np.nan)
            for i, line in enumerate(lines):
                for layer_rows in (record.rows[role] for record in line):
                    values[i, columns_of[layer_rows.layers]] = layer_rows.rows.values
            self._stacks[role] = _integers(line[0].step for line in lines), layers, values
        return self._stacks[role]


def ends_of_segments(first_steps: Mapping[int, float]) -> dict[int, float]:
    """Return the step before which each segment counts: the lowest first step of its successors.

    >>> ends_of_segments({0: 0, 1: 50, 2: 30})
    {2: inf, 1: 30, 0: 30}
    """
    ends: dict[int, float] = {}
    end = math.inf
    for segment in sorted(first_steps, reverse=True):
        ends[segment] = end
        end = min(end, first_steps[segment])
    return ends


def _by_step(records: Iterable[Record]) -> list[list[Record]]:
    """The records of each step that was taken: its own, then the late ones that belong to it."""
    lines: list[list[Record]] = []
    newest: dict[tuple[int, int], list[Record]] = {}
    for record in records:
        key = record.segment, record.step
        if not record.late or key not in newest:
            newest[key] = []
            lines.append(newest[key])
        newest[key].append(record)
    return lines


def names_in(note: str | None) -> list[str]:
    """The names in a list written as JSON; none where it says something else."""
    try:
        found = json.loads(note) if note is not None else []
    except (ValueError, RecursionError):
        return []
    return found if isinstance(found, list) and all(isinstance(name, str) for name in found) else []


def dtypes_in(note: str | None) -> dict[str, str]:
    """The dtype of each layer's output, in a note of ACTIVATION_DTYPES; none if it says something else.

    >>> dtypes_in('{"bfloat16":["fc1","fc2"],"float32":["norm"]}')
    {'fc1': 'bfloat16', 'fc2': 'bfloat16', 'norm': 'float32'}
    """
    try:
        found = json.loads(note) if note is not None else {}
    except (ValueError, RecursionError):
        return {}
    lists = found.items() if isinstance(found, dict) else ()
    return {str(layer): dtype for dtype, layers in lists if isinstance(layers, list) for layer in layers}


def layers_by_depth(names: Iterable[str], depth: Mapping[str, int]) -> tuple[str, ...]:
    """Names in the order of their depth; one that has none stays behind the name that it came after."""
    places: dict[str, int] = {}
    last = -1
    for name in names:
        last = places[name] = depth.get(name, last)
    return tuple(sorted(places, key=lambda name: places[name]))


def _integers(values: Iterable[int]) -> Integers:
    return np.fromiter(values, dtype=np.int64)
