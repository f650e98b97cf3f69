"""A run read once, entry by entry, in bounded memory: all that a comparison looks at.

Every scalar of every step is kept, and of the layers the few statistics that are compared. The diagnosis sees each
record as it passes.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from holter.comparison.sheets import ROOM, Sheet
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding, from_problem
from holter.history import names_in
from holter.integrity import Integrity
from holter.record import EXECUTION_ORDER, Entry, Problem, Record
from holter.run import Run, find_run
from holter.series import Floats, Integers
from holter.tail import Tail

# What is compared of the layers of a role, in the order in which things happen within a step.
_STATISTICS = {
    "batch": ("hash", "norm"),
    "weight": ("norm", "nonfinite"),
    "activation": ("norm", "nonfinite"),
    "gradient": ("norm", "nonfinite"),
    "momentum": ("norm",),
    "second_moment": ("norm",),
    "update": ("ratio", "norm"),
}
_DERIVED = ("norm", "nonfinite")  # from the rows that every role has
_MOST_PROBLEMS = 200


class Reading:
    """The line of a training that survived, by step. What came late for a step is the newest."""

    def __init__(self, path: Path, room: int = ROOM) -> None:
        self.path, self._room = path, room
        self.info: Mapping[str, Any] = {}
        self.state = "empty"
        self.integrity = Integrity()
        self.findings: tuple[Finding, ...] = ()
        self.begin()

    def begin(self) -> None:
        """From the first entry on."""
        self._doctor: Doctor | None = None
        self._problems: list[Problem] = []
        self._steps = array("q")
        self._scalars: dict[str, tuple[array[int], array[float]]] = {}
        self._sheets: dict[str, dict[str, Sheet]] = {}  # by role and statistic
        self._order: str | None = None

    def take(self, entry: Entry) -> None:
        if isinstance(entry, Record):
            self._take_record(entry)
        elif isinstance(entry, Problem) and len(self._problems) < _MOST_PROBLEMS:
            self._problems.append(entry)

    def _take_record(self, record: Record) -> None:
        self._doctor = self._doctor or Doctor(self.info)
        self._doctor.take(record)
        if not record.late:
            self._steps.append(record.step)
        for name, value in record.scalars.items():
            steps, values = self._scalars.setdefault(name, (array("q"), array("d")))
            steps.append(record.step)
            values.append(value)
        self._order = record.notes.get(EXECUTION_ORDER, self._order)
        for role, rows in record.rows.items():
            sheets = self._sheets.setdefault(role, {})
            for statistic in _STATISTICS.get(role, ("norm",)):
                if statistic in _DERIVED or statistic in rows.extras:
                    sheet = sheets.setdefault(statistic, Sheet(statistic, self._room))
                    sheet.put(record.step, rows, is_late=record.late)

    def finish(self) -> None:
        """No more entries will come; `findings` are as `Run.findings` tells them."""
        if self._doctor is not None:
            self._doctor.finish()
            self.findings = self._doctor.findings
        self.findings = (*self.findings, *map(from_problem, self._problems), *self.integrity.findings)
        self._doctor = None  # it remembers much

    @property
    def steps(self) -> Integers:
        return np.unique(np.array(self._steps, dtype=np.int64))

    @property
    def scalars(self) -> dict[str, tuple[Integers, Floats]]:
        """Ascending steps and the newest value of each."""
        return {name: _ascending(np.array(steps), np.array(values)) for name, (steps, values) in self._scalars.items()}

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(self._sheets)

    def statistics(self, role: str) -> tuple[str, ...]:
        """Those of a role that are compared and were recorded."""
        known = self._sheets.get(role, {})
        return tuple(statistic for statistic in _STATISTICS.get(role, ("norm",)) if statistic in known)

    def span(self, role: str) -> int:
        """One in so many steps is kept of its layers."""
        return max((sheet.span for sheet in self._sheets.get(role, {}).values()), default=1)

    def series(self, role: str, statistic: str) -> tuple[Integers, tuple[str, ...], Floats]:
        depth = {name: place for place, name in enumerate(names_in(self._order))}
        return self._sheets[role][statistic].series(depth)


def read_run(run: Run | str | os.PathLike[str], room: int = ROOM) -> Reading:
    """Of a directory, from its journals; of an open run, what it has read."""
    if isinstance(run, Run):
        reading = Reading(run.path, room)
        reading.info = run.info
        entries: list[Entry] = [*run.history.latest().records, *run.problems]
        for entry in entries:
            reading.take(entry)
        reading.state, reading.integrity = run.state, run.integrity
    else:
        reading = Reading(find_run(run), room)
        tail = Tail(reading.path, reading.begin)
        for entry in tail.read():
            reading.info = tail.run.info
            reading.take(entry)
        reading.info = tail.run.info
        reading.state, reading.integrity = tail.state(time.time()), tail.integrity
    reading.finish()
    return reading


def _ascending(steps: Integers, values: Floats) -> tuple[Integers, Floats]:
    if not len(steps) or (np.diff(steps) > 0).all():
        return steps, values
    order = np.argsort(steps, kind="stable")
    newest = np.append(np.diff(steps[order]) > 0, True)
    return steps[order][newest], values[order][newest]
