"""Chart: what a diagnosis knows of a training, filled step by step. The same from a live run and from a stored one.

It keeps the opening and the recent past of every series, so that a step costs the same however long the run is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from holter.diagnosis.sheet import Sheet
from holter.history import dtypes_in, names_in
from holter.record import ACTIVATION_DTYPES, EXECUTION_ORDER, LayerRows, Record
from holter.series import OPENING, Floats, Integers, Series

Answer = TypeVar("Answer")
Words = ParamSpec("Words")

STEP = "step"  # it is news at every one
COURSE = "course"  # another segment, order of execution, scalar or role: rare, and news for all
_NONE, _EMPTY = Series(("",)), Series(())


@dataclass
class Moment:
    """All that was recorded of one step, put together."""

    step: int
    segment: int = 0
    time: float = 0.0
    scalars: dict[str, float] = field(default_factory=dict)
    rows: dict[str, LayerRows] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


class Moments:
    """Puts records together to steps: values logged after a step may come in a record of their own."""

    def __init__(self) -> None:
        self._open: Moment | None = None

    def add(self, record: Record) -> Iterator[Moment]:
        """The step before, once the next one begins: by then what was logged for it has come."""
        if record.late:
            if self._open is not None and self._open.step == record.step:
                self._open.scalars.update(record.scalars)
                self._open.rows.update(record.rows)
            return
        yield from self.finish()
        self._open = Moment(
            record.step, record.segment, record.time, dict(record.scalars), dict(record.rows), dict(record.notes)
        )

    def finish(self) -> Iterator[Moment]:
        """The step that is still open, at the end of a run."""
        if self._open is not None:
            yield self._open
        self._open = None


def until_news(
    question: Callable[Concatenate[Chart, Words], Answer],
) -> Callable[Concatenate[Chart, Words], Answer]:
    """For what many rules ask of a chart: the answer is kept until there is news of what it was taken from."""

    @wraps(question)
    def answer(chart: Chart, /, *words: Words.args, **named: Words.kwargs) -> Answer:
        if chart.has_news:
            chart.hear()
        key = question, words, *named.items()
        if key not in chart.answers:
            chart.answers[key] = chart.reads_of(partial(question, chart, *words, **named))
        found, reads = chart.answers[key]
        chart.reads |= reads
        return cast(Answer, found)

    return answer


class Chart:
    """`info` is run.json: what is being trained."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.info = info
        self.step = -1
        self.first_step = 0
        self.segment = 0
        self.resumed: list[int] = []  # steps at which a segment after the first began
        self.depth: dict[str, int] = {}  # names of modules and parameters in the order in which they run
        self.roles_since: dict[str, int] = {}
        self.answers: dict[object, tuple[object, set[str]]] = {}  # of `until_news`, and what each was taken from
        self.kept: dict[object, object] = {}  # what rules remember of series that have become too long
        # By the names of scalars and roles: what has come since the rules were asked, and what a rule has looked at.
        self.news: set[str] = set()
        self._unheard: set[str] = set()  # by the answers that are kept
        self.reads: set[str] = set()
        self.peak_rate = 0.0  # the largest of all steps: series are short
        self.peaks = Series(("peak_rate",))  # what it was before each step
        self._scalars: dict[str, Series] = {}
        self._sheets: dict[str, Sheet] = {}
        listed = info.get("layers")
        known = listed if isinstance(listed, list) else ()
        self._activation_dtypes: dict[str, str] = {}
        self._repeats: dict[str, int] = {}
        self._layers = {str(layer.get("name")): layer for layer in known if isinstance(layer, dict)}
        # Names as they were at the start, from the input to the output where that is known.
        self.parameters = tuple(self._layers)
        shapes = {name: layer.get("shape") for name, layer in self._layers.items()}
        self._shapes = {name: tuple(shape) for name, shape in shapes.items() if isinstance(shape, list)}
        self._matrices = frozenset(name for name, shape in self._shapes.items() if len(shape) > 1)

    def add(self, moment: Moment) -> None:
        new = {STEP, *moment.scalars, *moment.rows}
        if self.step < 0:
            self.first_step, self.segment = moment.step, moment.segment
        elif moment.segment != self.segment:
            self.segment = moment.segment
            self.resumed.append(moment.step)
            new.add(COURSE)
        self.step = moment.step
        rates = [value for name, value in moment.scalars.items() if name.startswith("learning_rate")]
        if rates:
            self.peaks.add(moment.step, self.peak_rate)
            self.peak_rate = max(self.peak_rate, *rates)
        for name, value in moment.scalars.items():
            if name not in self._scalars:
                self._scalars[name] = Series((name,))
                new.add(COURSE)
            self._scalars[name].add(moment.step, value)
        for role, rows in moment.rows.items():
            if role not in self._sheets:
                self._sheets[role] = Sheet(role)
                self.roles_since[role] = moment.step
                new.add(COURSE)
            self._sheets[role].add(moment.step, rows)
            if role == "weight" and not self._repeats:
                self._repeats = _repeats_in(rows)
        if names := names_in(moment.notes.get(EXECUTION_ORDER)):
            self.depth = {name: place for place, name in enumerate(names)}
            self.parameters = self.in_depth(self._layers)
            new.add(COURSE)
        if dtypes := dtypes_in(moment.notes.get(ACTIVATION_DTYPES)):
            self._activation_dtypes.update(dtypes)
            new.add(COURSE)
        self.news |= new
        self._unheard |= new

    @property
    def has_news(self) -> bool:
        return bool(self._unheard)

    def hear(self) -> None:
        """Forgets the answers to which there is news."""
        new, self._unheard = self._unheard, set()
        for key in [key for key, (_, reads) in self.answers.items() if not reads.isdisjoint(new)]:
            del self.answers[key]

    def reads_of(self, question: Callable[[], Answer]) -> tuple[Answer, set[str]]:
        """The answer, and what it was taken from: until there is news of that, it would be the same."""
        outer, self.reads = self.reads, {COURSE}
        try:
            return question(), self.reads
        finally:
            self.reads = outer

    # For the rules ----------------------------------------------------------------------------------------------

    def scalar(self, name: str) -> Series:
        """Of one column; empty where it was never recorded."""
        self.reads.add(name)
        return self._scalars.get(name, _NONE)

    def latest(self, name: str) -> float:
        """The last value of one column; NaN where there is none."""
        self.reads.add(name)
        series = self._scalars.get(name)
        return float(series.values[-1, 0]) if series is not None else math.nan

    def opening(self, name: str) -> tuple[Integers, Floats]:
        """Steps and values with which a column began: once they are all there, nothing of it is news any more."""
        series = self._scalars.get(name, _NONE)
        if series.seen < OPENING:
            self.reads.add(name)
        return series.opening_steps, series.opening[:, 0]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all columns."""
        return tuple(self._scalars)

    def scalars(self, prefix: str) -> dict[str, Series]:
        """Those whose names begin so, such as the rates of all groups."""
        found = {name: series for name, series in self._scalars.items() if name.startswith(prefix)}
        self.reads.update(found)
        return found

    def table(self, role: str, statistic: str) -> Series:
        self.reads.add(role)
        sheet = self._sheets.get(role)
        return sheet.series(statistic) if sheet is not None else _EMPTY

    def first(self, role: str, statistic: str, most: int) -> tuple[tuple[str, ...], Floats]:
        """Layers, and the first so many rows: once they are all there, nothing of them is news any more."""
        sheet = self._sheets.get(role)
        series = sheet.series(statistic) if sheet is not None else _EMPTY
        if series.seen < most:
            self.reads.add(role)
        return series.names, series.opening[:most]

    def now(self, role: str, statistic: str) -> tuple[tuple[str, ...], Floats]:
        """Layers and values of the last step with such rows: a quick look at whether there is anything to look into."""
        self.reads.add(role)
        sheet = self._sheets.get(role)
        return sheet.last(statistic) if sheet is not None else ((), np.zeros(0))

    def layers(self, role: str) -> Collection[str]:
        """All that such rows were measured of, in no order."""
        self.reads.add(role)
        sheet = self._sheets.get(role)
        return sheet.layers if sheet is not None else ()

    def last_step(self, name: str) -> int:
        """The last step at which this role or scalar was recorded; -1 where it never was."""
        if name in self._sheets:
            return self._sheets[name].last_step
        series = self._scalars.get(name, _NONE)
        return int(series.steps[-1]) if len(series) else -1

    def has_column(self, name: str) -> bool:
        return name in self._scalars

    def has(self, role: str) -> bool:
        return role in self.roles_since

    def shape(self, parameter: str) -> tuple[int, ...]:
        return self._shapes.get(parameter, ())

    def part(self, parameter: str) -> str:
        """attention, ffn, embedding, norm, output, conv, recurrent or other."""
        return str(self._layers.get(parameter, {}).get("part", "other"))

    def module(self, parameter: str) -> str:
        """The class of the module whose parameter it is, such as Linear; empty where that is not known."""
        return str(self._layers.get(parameter, {}).get("module", ""))

    def told(self, parameter: str, key: str) -> object:
        """What run.json says of it besides: trained, selected, tied_to; None where it says nothing."""
        return self._layers.get(parameter, {}).get(key)

    def dtype(self, parameter: str) -> str:
        return str(self._layers.get(parameter, {}).get("dtype", ""))

    def activation_dtype(self, name: str) -> str | None:
        """The dtype of what a layer puts out, such as bfloat16, as last observed; of a parameter that of the nearest
        layer that holds it. None where none was observed."""
        while name and name not in self._activation_dtypes:
            name = name.rpartition(".")[0]
        return self._activation_dtypes.get(name or "model")

    def repeats(self, parameter: str) -> int | None:
        """How often, at most, every value of a weight stood in it when its first histogram was taken: a multiple of the
        number of its rows if all of them are equal, and 1 in nearly all that are random. None without a histogram."""
        return self._repeats.get(parameter)

    def is_matrix(self, parameter: str) -> bool:
        return parameter in self._matrices

    def in_depth(self, names: Iterable[str]) -> tuple[str, ...]:
        """From the input to the output where that is known; else as they come."""
        return tuple(sorted(names, key=lambda name: self.depth.get(name, len(self.depth))))

    @property
    def total_steps(self) -> int | None:
        planned = self.info.get("total_steps")
        return planned if isinstance(planned, int) else None


def _repeats_in(found: LayerRows) -> dict[str, int]:
    histograms = found.rows.histograms
    if histograms is None:
        return {}
    return {name: int(np.gcd.reduce(histograms[place].counts)) for place, name in enumerate(found.layers)}


def last_of(series: Series) -> Floats:
    """The latest values [layers]; NaN where there are none."""
    return series.values[-1] if len(series) else np.full(len(series.names), np.nan)


def column(series: Series) -> tuple[Integers, Floats]:
    """Steps and values of a scalar."""
    return series.steps, series.values[:, 0] if len(series.names) else np.zeros(0)
