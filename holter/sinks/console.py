"""Console: findings as they come and, if asked for, a line a layer every so many steps.

Whole lines only, in one write, to stderr: the standard output of a training may be read by another program. Names come
from the user's model and may hold anything: all of them pass through `printable`.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np
from rich.console import Console as RichConsole
from rich.console import ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holter.diagnosis.finding import Finding
from holter.diagnosis.render import render_findings
from holter.diagnosis.thresholds import Thresholds
from holter.record import LayerRows, Record, is_validation
from holter.sinks.panels import FEW, QUANTILES, Panels, quantiles, tag
from holter.statistics.rows import STATISTICS
from holter.tables import Column, FittingTable, shorten
from holter.words import duration, number, printable

SUMMARY_EVERY = 1000  # steps between two summaries of the histograms
HIGH, LOW = Thresholds().update_ratio_high, Thresholds().update_ratio_low
_PLAIN_CELLS = 120  # that a line may take where the stream is no terminal
_MOST_SCALARS = 6
_MOST_OUTSIDE = 8  # layers that are shown for their update alone
_CLEAN_LINE = "\r\x1b[2K"  # a progress bar may stand there; it draws itself again below
_NEW_LINE = "\n"
_SIGNED = ("holter  ", "bold cyan")
_SHORTEST_NAME, _LONGEST_NAME = 16, 56
_LINE_CELLS, _SUMMARY_CELLS = 46, 63  # that the numbers of a line take
_FIRST = ("loss", "gradient_norm", "learning_rate", "step_time")  # of the scalars


@dataclass(frozen=True)
class _Line:
    """What is said of one layer; NaN where it is not known."""

    layer: str
    norm: float
    mean: float
    std: float
    ratio: float
    nonfinite: float

    @property
    def remark(self) -> str:
        if self.nonfinite > 0:
            return f"{self.nonfinite:,.0f} not finite"
        return f"update above {HIGH:g}" if self.ratio > HIGH else f"update below {LOW:g}" if self.ratio < LOW else ""

    @property
    def style(self) -> str:
        return "bold red" if self.nonfinite > 0 else "yellow" if self.remark else ""


class Console:
    """Prints to `stream` (None: stderr, as it is at that time), and does not close it.

    `every`: one of so many steps has its lines, once what is logged after it is known; None for findings only.
    `layers`: how many of them, or "all"; one whose update is out of proportion is shown besides.
    """

    def __init__(self, stream: TextIO | None = None, *, every: int | None = None, layers: int | str = FEW) -> None:
        if stream is not None and not callable(getattr(stream, "write", None)):
            raise ValueError(f"stream={stream!r}: give an open text file, such as sys.stdout, or None for stderr")
        if every is not None and (not isinstance(every, int) or isinstance(every, bool) or every < 1):
            raise ValueError(f"every={every!r}: give a number of steps, such as 100, or None for findings only")
        self._stream, self._every, self._panels = stream, every, Panels(layers)
        # As last known: not everything is measured or logged at every step.
        self._scalars: dict[str, float] = {}
        self._rows: dict[str, LayerRows] = {}
        self._with_histograms: LayerRows | None = None
        self._due: int | None = None  # the step whose lines wait for the next
        self._turns: dict[str, int] = {}

    def write(self, record: Record) -> None:
        if self._every is None:
            return
        if not record.late:
            self._print_due()
        self._note(record)
        if not record.late and self._is_turn("lines", record.step // self._every):
            self._due = record.step

    def alert(self, finding: Finding) -> None:
        self._panels.note(finding)
        self._print(_finding(finding))

    def close(self) -> None:
        self._print_due()

    def _note(self, record: Record) -> None:
        self._scalars.update({name: value for name, value in record.scalars.items() if _is_told(name)})
        self._rows.update({role: rows for role, rows in record.rows.items() if role in ("gradient", "update")})
        gradients = record.rows.get("gradient")
        if gradients is not None and gradients.rows.histograms is not None:
            self._with_histograms = gradients

    def _is_turn(self, of: str, turn: int) -> bool:
        """Whether this is another turn than the last; steps may be missing, or come again."""
        is_another = self._turns.get(of) != turn
        self._turns[of] = turn
        return is_another

    def _print_due(self) -> None:
        step, self._due = self._due, None
        if step is None:
            return
        shown = self._shown(step)
        lines = _lines(self._rows)
        outside = [line for line in lines if line.layer not in shown and line.remark]
        chosen = shown | {line.layer for line in outside[:_MOST_OUTSIDE]}
        parts: list[RenderableType] = _table([line for line in lines if line.layer in chosen])
        if len(outside) > _MOST_OUTSIDE:
            parts.append(Text(f" … and {len(outside) - _MOST_OUTSIDE:,} more layers with such remarks", "yellow"))
        if self._with_histograms is not None and self._is_turn("summary", step // SUMMARY_EVERY):
            parts += _summary(self._with_histograms, shown)
        if parts or self._scalars:
            self._print(Group(_header(step, self._scalars), *parts))

    def _shown(self, step: int) -> set[str]:
        tags = self._panels.of(Record(step, 0.0, rows=self._rows)).scalars
        names = (name for role, rows in self._rows.items() for name in rows.layers if tag(role, name, "norm") in tags)
        return set(names)

    def _print(self, said: RenderableType) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        if stream is None:  # a program without a console
            return
        is_terminal = _is_terminal(stream)
        console = RichConsole(
            file=io.StringIO(), force_terminal=is_terminal, width=None if is_terminal else _PLAIN_CELLS, highlight=False
        )
        with console.capture() as captured:
            console.print(said)
        block = "\n".join(line.rstrip() for line in captured.get().split("\n")).rstrip("\n")
        before = _CLEAN_LINE if is_terminal and not console.is_dumb_terminal else ""
        # The empty line sets a block apart, and ends the line of a progress bar in a file.
        text = f"{before}{_NEW_LINE if _NEW_LINE in block else ''}{block}{_NEW_LINE}"
        stream.write(_encodable(text, stream))
        stream.flush()


def _is_told(name: str) -> bool:
    return name in _FIRST or "loss" in name.lower() or is_validation(name)


def _is_terminal(stream: TextIO) -> bool:
    try:
        return stream.isatty()
    except (AttributeError, ValueError):  # no such method; or it is closed, which writing will tell
        return False


def _encodable(text: str, stream: TextIO) -> str:
    """What the stream's encoding does not have, written out."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


# What is said ---------------------------------------------------------------------------------------------------


def _finding(finding: Finding) -> RenderableType:
    if finding.until is not None:
        place = f" in {printable(finding.layer)}" if finding.layer else ""
        seen = f" since step {finding.since:,}, last seen at step {finding.until:,}"
        return Text.assemble(_SIGNED, ("over: ", "green"), f"{printable(finding.cause)}{place}", (seen, "dim"))
    grid = Table.grid()
    grid.add_column(no_wrap=True)
    grid.add_row(Text.assemble(_SIGNED), render_findings([finding], 0))
    return grid


def _header(step: int, scalars: Mapping[str, float]) -> Text:
    line = Text.assemble(_SIGNED, (f"step {step:,}", "bold"))
    first = [name for name in _FIRST if name in scalars]
    for name in [*first, *(name for name in scalars if name not in first)][:_MOST_SCALARS]:
        if name == "step_time":
            line.append(f"  {duration(scalars[name])} a step", "dim")
            continue
        style = "" if math.isfinite(scalars[name]) else "bold red"
        line.append(f"  {printable(name).replace('_', ' ')} ", "dim").append(number(scalars[name]), style)
    return line


def _lines(rows: Mapping[str, LayerRows]) -> list[_Line]:
    gradients, updates = rows.get("gradient"), rows.get("update")
    columns = [_by_layer(gradients, name) for name in ("norm", "mean", "std")]
    columns += [_by_layer(updates, "ratio"), _by_layer(gradients, "nonfinite")]
    names = dict.fromkeys(name for column in columns for name in column)
    return [_Line(name, *(column.get(name, math.nan) for column in columns)) for name in names]


def _by_layer(rows: LayerRows | None, statistic: str) -> dict[str, float]:
    if rows is None:
        return {}
    found = rows.extras.get(statistic)
    if found is None:
        found = rows.rows.derive(statistic) if statistic in STATISTICS else np.full(len(rows.layers), np.nan)
    return dict(zip(rows.layers, found.tolist(), strict=True))


class _Fitting:
    """A table in which names are as long as the width allows: the numbers are what it is printed for."""

    def __init__(self, build: Callable[[int], RenderableType], numbers: int) -> None:
        self._build, self._numbers = build, numbers  # cells that they take

    def __rich_console__(self, console: RichConsole, options: ConsoleOptions) -> RenderResult:
        cells = min(max(options.max_width - self._numbers - 1, _SHORTEST_NAME), _LONGEST_NAME)
        yield Padding(self._build(cells), (0, 0, 0, 1))


def _table(lines: Sequence[_Line]) -> list[RenderableType]:
    def build(cells: int) -> RenderableType:
        columns: list[Column[_Line]] = [
            Column("gradients", 0, lambda a: Text(shorten(printable(a.layer), cells), a.style), right=False),
            Column("norm", 1, lambda a: Text(_known(a.norm), a.style)),
            Column("mean", 3, lambda a: Text(_known(a.mean))),
            Column("std", 4, lambda a: Text(_known(a.std))),
            Column("update ratio", 2, lambda a: Text(_known(a.ratio) + (" !" if a.remark else "  "), a.style)),
            Column("", 5, lambda a: Text(a.remark, a.style), right=False),
        ]
        return FittingTable(columns if any(line.remark for line in lines) else columns[:-1], lines)

    return [_Fitting(build, _LINE_CELLS)] if lines else []


def _summary(rows: LayerRows, shown: Iterable[str]) -> list[RenderableType]:
    """E3: the quantiles of each layer's gradients, to as many digits as a histogram knows."""
    assert rows.rows.histograms is not None
    found = {name: quantiles(rows.rows.histograms[place]) for place, name in enumerate(rows.layers) if name in shown}
    known = [(name, values) for name, values in found.items() if values]

    def build(cells: int) -> RenderableType:
        columns: list[Column[tuple[str, dict[str, float]]]] = [
            Column("quantiles", 0, lambda one: Text(shorten(printable(one[0]), cells)), right=False)
        ]
        for name in QUANTILES:
            columns.append(Column(name, 1, lambda one, name=name: Text(f"{one[1][name]:.2g}")))  # type: ignore[misc]
        return FittingTable(columns, known)

    return [Text(), _Fitting(build, _SUMMARY_CELLS)] if known else []


def _known(value: float) -> str:
    return "–" if math.isnan(value) else number(value)
