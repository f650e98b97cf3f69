"""A run while it grows: what a live view shows of it, in bounded memory however long it is.

Only what is new is read, and the diagnosis sees each record once. Where a resume repeats steps, all is read again with
the line of training that survived: what is found is what `holter diagnose` says of the same files.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding, from_problem
from holter.history import History
from holter.layer_summary import ORDER, Layer, Role, summarise_roles
from holter.record import LayerRows, Problem, Record, is_validation
from holter.report.buckets import Buckets
from holter.report.verdict import more
from holter.scalar_summary import Scalars, summarise_scalars
from holter.statistics.rows import Rows
from holter.tail import Tail

Floats = npt.NDArray[np.float64]

LOOKS = 24  # of each role, that the layers are compared over
_RECENT = 200  # records that tell how it goes now
_CELLS = 200  # of a line that draws a whole run, at least
_MOST_VALIDATIONS, _MOST_PROBLEMS = 2, 50
_DRAWN = ("loss", "gradient_norm", "learning_rate")


class Trace:
    """One scalar over the whole run: its first value, its last, and the course between."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.last = math.nan
        self._buckets = Buckets(_CELLS)

    def put(self, step: int, value: float) -> None:
        self.first = value if self.first is None else self.first
        self.last = value
        # Buckets keep the extremes of what is a number: infinite stays seen, NaN would not.
        self._buckets.put(step, np.array([value if math.isfinite(value) else math.inf]))

    @property
    def values(self) -> Floats:
        """One a stretch of steps: the last in it, or what is not finite."""
        high, last = self._buckets.high[:, 0], self._buckets.last[:, 0]
        return np.where(np.isfinite(high), last, np.nan).astype(np.float64)


@dataclass(frozen=True)
class Vitals:
    """What a live view shows. What is not known is None, NaN or empty."""

    path: Path
    state: str = "waiting"
    error: str = ""
    unread: float = 0.0  # the share of the files that is still to be read
    info: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 0  # the number of the next one
    pace: float | None = None  # steps a second, of late
    seconds: float = 0.0  # since the first record, or to the last one where it is over
    traces: Mapping[str, Trace] = field(default_factory=dict)
    scalars: Scalars | None = None  # of late
    newest: Mapping[str, float] = field(default_factory=dict)  # of every scalar
    roles: tuple[Role, ...] = ()  # of late
    findings: tuple[Finding, ...] = ()
    damage: tuple[str, ...] = ()  # a sentence each

    @property
    def total_steps(self) -> int | None:
        planned = self.info.get("total_steps")
        return planned if isinstance(planned, int) and planned > 0 else None

    @property
    def seconds_left(self) -> float | None:
        if self.state != "running" or self.total_steps is None or not self.pace:
            return None
        return max(0, self.total_steps - self.steps) / self.pace


class Pulse:
    """Of the run in a directory, which may not be there yet. `read_on()` as often as it is to be shown."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._tail = Tail(path, self._begin)

    def _begin(self) -> None:
        self._doctor: Doctor | None = None
        self._failed = ""  # why the diagnosis ended
        self._problems: dict[tuple[str, str], Problem] = {}  # the different ones
        self._more_problems = 0  # beyond those that are kept
        self._traces: dict[str, Trace] = {}
        self._newest: dict[str, float] = {}
        self._recent: deque[Record] = deque(maxlen=_RECENT)
        self._looks: dict[str, deque[Record]] = {}
        self._broken: dict[tuple[str, str], tuple[int, int]] = {}  # role, layer: values not finite so far, and since
        self._began: float | None = None
        self._last_time = 0.0
        self._steps = 0

    def read_on(self, seconds: float = math.inf) -> bool:
        """Reads what is new, for about so long; says whether that is all there is."""
        until = time.monotonic() + seconds
        for entry in self._tail.read():
            if isinstance(entry, Record):
                self._take_record(entry)
            elif isinstance(entry, Problem):
                self._take_problem(entry)
            if time.monotonic() > until:
                return False
        return True

    def finish(self) -> None:
        """No more will be read: the diagnosis need not wait for what belongs to the last step."""
        self._examine(Doctor.finish)

    def _take_problem(self, problem: Problem) -> None:
        key = problem.where, problem.what
        if key in self._problems or len(self._problems) < _MOST_PROBLEMS:
            self._problems[key] = problem
        else:
            self._more_problems += 1

    def _take_record(self, record: Record) -> None:
        self._doctor = self._doctor or Doctor(self._tail.run.info)
        self._examine(lambda doctor: doctor.take(record))
        self._began = record.time if self._began is None else self._began
        self._last_time = max(self._last_time, record.time)
        if not record.late:
            self._steps = record.step + 1
        for name, value in record.scalars.items():
            if trace := self._trace_of(name):
                is_bad = name == "gradient_norm" and record.scalars.get("gradient_nonfinite")
                trace.put(record.step, math.nan if is_bad else value)
        self._newest.update(record.scalars)
        self._recent.append(replace(record, rows={}, notes={}))
        for role, rows in record.rows.items():
            looks = self._looks.setdefault(role, deque(maxlen=LOOKS))
            looks.append(Record(record.step, record.time, rows={role: _without_histograms(rows)}))
            bad = rows.rows.derive("nonfinite")
            for place in np.flatnonzero(bad):
                count, since = self._broken.get((role, rows.layers[place]), (0, record.step))
                self._broken[role, rows.layers[place]] = count + int(bad[place]), since

    def _examine(self, examine: Callable[[Doctor], None]) -> None:
        if self._doctor is None or self._failed:
            return
        try:
            examine(self._doctor)
        except Exception as error:  # all else can still be shown
            self._failed = f"The diagnosis failed with {type(error).__name__} at step {self._steps:,}."

    def _trace_of(self, name: str) -> Trace | None:
        if name not in self._traces:
            others = sum(map(is_validation, self._traces))
            if name not in _DRAWN and not (is_validation(name) and others < _MOST_VALIDATIONS):
                return None
            self._traces[name] = Trace()
        return self._traces[name]

    # What is shown ----------------------------------------------------------------------------------------------

    def vitals(self, now: float, *, all_is_read: bool = True) -> Vitals:
        """`now` in seconds since 1970."""
        state = self._tail.state(now) if all_is_read else "reading"
        ending = self._tail.ending
        problems = (*map(from_problem, self._problems.values()), *self._tail.integrity.findings)
        recent = History(self._recent)
        until = now if state == "running" else self._last_time
        return Vitals(
            path=self.path,
            state=state,
            error=ending.error if ending is not None else "",
            unread=0.0 if all_is_read else self._tail.bytes_unread / max(1, self._tail.bytes_there),
            info=self._tail.run.info if self._tail.is_there else {},
            steps=self._steps,
            pace=_pace(self._recent),
            seconds=max(0.0, until - self._began) if self._began is not None else 0.0,
            traces=self._traces,
            scalars=summarise_scalars(recent) if len(recent) else None,
            newest=self._newest,
            roles=tuple(self._roles()),
            findings=(*(self._doctor.findings if self._doctor is not None else ()), *problems),
            damage=tuple(self._damage(state)),
        )

    def _roles(self) -> Iterator[Role]:
        """Of late, but for what was not finite: that is told since it began."""
        for role in sorted(self._looks, key=lambda role: ORDER.index(role) if role in ORDER else len(ORDER)):
            for found in summarise_roles(History(self._looks[role]), self._tail.run.layers):
                yield replace(found, layers=tuple(map(partial(self._since_it_began, role), found.layers)))

    def _since_it_began(self, role: str, layer: Layer) -> Layer:
        if not layer.nonfinite:
            return layer
        count, since = self._broken[role, layer.layer]
        return replace(layer, nonfinite=count, nonfinite_since=since)

    def _damage(self, state: str) -> Iterator[str]:
        if not self._tail.is_there:
            return
        if not self._tail.run.info:
            yield "run.json is missing or damaged: what is being trained is not known."
        if self._failed:
            yield self._failed
        if self._more_problems:
            yield f"{more(self._more_problems, 'problem')} of Holter's own: see `holter diagnose`."
        found = self._tail.integrity
        if state in ("running", "reading"):  # what is behind the last entry is still being written, or to be read
            found = replace(found, unreadable_bytes=found.damage.unreadable_bytes + found.lost_tail)
        if found.sentence:
            yield found.sentence
        ending = self._tail.ending
        dropped = max(self._newest.get("dropped", 0.0), ending.dropped if ending is not None else 0)
        if dropped > 0:
            yield f"{dropped:,.0f} records were dropped: the disk could not keep up."


def _without_histograms(rows: LayerRows) -> LayerRows:
    return rows if rows.rows.histograms is None else replace(rows, rows=Rows(rows.rows.values))


def _pace(recent: deque[Record]) -> float | None:
    """Steps a second by the clock, since the newest segment began or for as long as is remembered."""
    own = [record for record in recent if not record.late and record.segment == recent[-1].segment]
    if len(own) < 2 or own[-1].time <= own[0].time:
        return None
    return (own[-1].step - own[0].step) / (own[-1].time - own[0].time)
