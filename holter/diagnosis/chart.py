"""Chart: what a diagnosis knows of a training, filled step by step. The same from a live run and from a stored one.

It keeps the opening and the recent past of every series, so that a step costs the same however long the run is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from holter.diagnosis.sheet import Sheet
from holter.record import EXECUTION_ORDER, LayerRows, Record
from holter.series import Floats, Integers, Series

Answer = TypeVar("Answer")
Words = ParamSpec("Words")


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
    """Puts records together to steps: values logged after a step come in a record of their own."""

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


def once_a_step(
    question: Callable[Concatenate[Chart, Words], Answer],
) -> Callable[Concatenate[Chart, Words], Answer]:
    """For what many rules ask of a chart: the answer is kept until the next step."""

    @wraps(question)
    def answer(chart: Chart, /, *words: Words.args, **named: Words.kwargs) -> Answer:
        key = question, words, *named.items()
        if key not in chart.answers:
            chart.answers[key] = question(chart, *words, **named)
        return cast(Answer, chart.answers[key])

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
        self.answers: dict[object, object] = {}  # of `once_a_step`
        self.peak_rate = 0.0  # the largest of all steps: series are short
        self.peaks = Series(("peak_rate",))  # what it was before each step
        self._scalars: dict[str, Series] = {}
        self._sheets: dict[str, Sheet] = {}
        self._layers = {str(layer.get("name")): layer for layer in info.get("layers", ()) if isinstance(layer, dict)}
        # Names as they were at the start, from the input to the output where that is known.
        self.parameters = tuple(self._layers)
        self._matrices = frozenset(name for name in self._layers if len(self.shape(name)) > 1)

    def add(self, moment: Moment) -> None:
        if self.step < 0:
            self.first_step, self.segment = moment.step, moment.segment
        elif moment.segment != self.segment:
            self.segment = moment.segment
            self.resumed.append(moment.step)
        self.step = moment.step
        self.answers.clear()
        rates = [value for name, value in moment.scalars.items() if name.startswith("learning_rate")]
        if rates:
            self.peaks.add(moment.step, np.array([self.peak_rate]))
            self.peak_rate = max(self.peak_rate, *rates)
        for name, value in moment.scalars.items():
            if name not in self._scalars:
                self._scalars[name] = Series((name,))
            self._scalars[name].add(moment.step, np.array([value]))
        for role, rows in moment.rows.items():
            self.roles_since.setdefault(role, moment.step)
            if role not in self._sheets:
                self._sheets[role] = Sheet(role)
            self._sheets[role].add(moment.step, rows)
        if EXECUTION_ORDER in moment.notes and moment.notes[EXECUTION_ORDER].startswith("["):
            names = json.loads(moment.notes[EXECUTION_ORDER])
            self.depth = {str(name): place for place, name in enumerate(names)}
            self.parameters = self.in_depth(self._layers)

    # For the rules ----------------------------------------------------------------------------------------------

    def scalar(self, name: str) -> Series:
        """Of one column; empty where it was never recorded."""
        series = self._scalars.get(name)
        return series if series is not None else Series((name,))

    def scalars(self, prefix: str) -> dict[str, Series]:
        """Those whose names begin so, such as the rates of all groups."""
        return {name: series for name, series in self._scalars.items() if name.startswith(prefix)}

    def table(self, role: str, statistic: str) -> Series:
        sheet = self._sheets.get(role)
        return sheet.series(statistic) if sheet is not None else Series(())

    def has(self, role: str) -> bool:
        return role in self.roles_since

    def shape(self, parameter: str) -> tuple[int, ...]:
        shape = self._layers.get(parameter, {}).get("shape")
        return tuple(shape) if isinstance(shape, list) else ()

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

    def is_matrix(self, parameter: str) -> bool:
        return parameter in self._matrices

    def in_depth(self, names: Iterable[str]) -> tuple[str, ...]:
        """From the input to the output where that is known; else as they come."""
        return tuple(sorted(names, key=lambda name: self.depth.get(name, len(self.depth))))

    @property
    def total_steps(self) -> int | None:
        planned = self.info.get("total_steps")
        return planned if isinstance(planned, int) else None


def last_of(series: Series) -> Floats:
    """The latest values [layers]; NaN where there are none."""
    return series.values[-1] if len(series) else np.full(len(series.names), np.nan)


def column(series: Series) -> tuple[Integers, Floats]:
    """Steps and values of a scalar."""
    return series.steps, series.values[:, 0] if len(series.names) else np.zeros(0)
