"""Runs for the terminal: a summary in, a rich renderable out. Nothing is printed here.

Names come from the user's model and disk, and may hold anything: all of them pass through `printable`.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holter.glance import Glance
from holter.summary import FAR, Course, Floats, Layer, Role, Summary
from holter.words import amount, duration, number, printable, share, size, times

WORST = 15  # layers of a role that are shown unless all are asked for
_GAP = 2  # cells between columns
_NAME_CELLS = 44  # a name may take
_FOLDED_CELLS = 24  # that a text needs which may be broken
_WIDE_SPREAD = 100.0  # between layers of a role

_STATE_STYLES = {
    "finished": "green",
    "running": "cyan",
    "failed": "bold red",
    "crashed": "bold red",
    "unreadable": "bold red",
    "interrupted": "yellow",
    "ended": "yellow",
}

# Tables that fit ----------------------------------------------------------------------------------------------

Line = TypeVar("Line")


@dataclass(frozen=True)
class Column(Generic[Line]):
    """`rank` says which columns stay where not all fit: the lowest."""

    title: str
    rank: int
    cell: Callable[[Line], Text]
    right: bool = True
    folds: bool = False  # its text may be broken over several lines


class FittingTable(Generic[Line]):
    """A table of as many columns as fit into the width that is there."""

    def __init__(self, columns: Sequence[Column[Line]], lines: Iterable[Line]) -> None:
        self._columns = columns
        self._cells = [[column.cell(line) for column in columns] for line in lines]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = self._that_fit(options.max_width)
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
        for place in shown:
            column = self._columns[place]
            table.add_column(
                column.title, justify="right" if column.right else "left", overflow="fold", no_wrap=not column.folds
            )
        for line in self._cells:
            table.add_row(*(line[place] for place in shown))
        yield table

    def _that_fit(self, cells: int) -> list[int]:
        """Places of the columns that fit side by side, chosen by rank and shown in their order."""
        chosen: list[int] = []
        left = cells + _GAP  # the last column needs no gap
        for place in sorted(range(len(self._columns)), key=lambda place: self._columns[place].rank):
            needed = self._width(place) + _GAP
            if not chosen or needed <= left:
                chosen.append(place)
                left -= needed
        return sorted(chosen)

    def _width(self, place: int) -> int:
        column = self._columns[place]
        longest = max((line[place].cell_len for line in self._cells), default=0)
        return max(cell_len(column.title), min(longest, _FOLDED_CELLS) if column.folds else longest)


def shorten(text: str, cells: int) -> str:
    """The end of a printable text, if it is longer than this: the end of a layer's name tells it from others.

    >>> shorten("transformer.h.11.mlp.weight", 16)
    '…h.11.mlp.weight'
    """
    if len(text) <= cells and cell_len(text) <= cells:
        return text
    kept = text[-(cells - 1) :]
    while cell_len(kept) > cells - 1:
        kept = kept[1:]
    return f"…{kept}"


def _name(text: str, style: str = "") -> Text:
    return Text(shorten(printable(text), _NAME_CELLS), style)


def _plain(text: str, style: str = "") -> Text:
    return Text(text, style)


# A list of runs -----------------------------------------------------------------------------------------------


def render_runs(glances: Sequence[Glance], now: float) -> RenderableType:
    columns: list[Column[Glance]] = [
        Column("run", 0, lambda g: _name(g.path.name), right=False),
        Column("state", 1, lambda g: _plain(printable(g.state), _STATE_STYLES.get(g.state, "dim")), right=False),
        Column("steps", 3, lambda g: _plain("–" if g.steps is None else f"{g.steps:,}")),
        Column("loss", 3, lambda g: _plain(number(g.loss), _bad_if(g.loss is not None and not np.isfinite(g.loss)))),
        Column("model", 6, lambda g: _name(g.model or "–"), right=False),
        Column("parameters", 8, lambda g: _plain(amount(g.parameters))),
        Column("age", 5, lambda g: _plain("–" if g.created is None else duration(now - g.created))),
        Column("size", 7, lambda g: _plain(size(g.size))),
    ]
    if any(glance.trouble for glance in glances):
        columns.append(
            Column("what is wrong", 2, lambda g: _plain(printable(g.trouble), "red"), right=False, folds=True)
        )
    return FittingTable(columns, glances)


def _bad_if(condition: bool) -> str:
    return "bold red" if condition else ""


# One run ------------------------------------------------------------------------------------------------------


def render_run(summary: Summary, *, all_layers: bool = False) -> RenderableType:
    """The header, then a table a role."""
    parts: list[RenderableType] = [render_header(summary)]
    for role in summary.roles:
        parts += [Text(), *_render_role(role, len(role.layers) if all_layers else WORST)]
    if not summary.roles:
        parts += [Text(), Text("No layers were measured.", "dim")]
    return Group(*parts)


def render_demo(summary: Summary) -> RenderableType:
    """What the demo recorded, in short, and what to try next."""
    parts: list[RenderableType] = [Text(), render_header(summary), Text()]
    parts += [role_heading(role) for role in summary.roles]
    gradients = next((role for role in summary.roles if role.role == "gradient"), None)
    if gradients is not None:
        parts += [Text("\nfarthest from their siblings", "dim"), _indented(layer_table(gradients.layers[:5]))]
    run = printable(shlex.quote(summary.path))
    commands = (f"holter show {run}", f"holter export {run} --to csv")
    parts += [Text("\nnext", "dim"), *(Text(f" {command}", "bold") for command in commands)]
    return Group(*parts)


def render_header(summary: Summary) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("run", Text(printable(summary.path), "bold"))
    grid.add_row("state", _state_line(summary))
    grid.add_row("model", _model_line(summary))
    for title, course in (("loss", summary.loss), ("gradient", summary.gradient_norm)):
        if course is not None:
            grid.add_row(title, _course_line(course, summary.clipped_share if title != "loss" else None))
    grid.add_row("recorded", _recorded_line(summary))
    if summary.monitor_cost is not None:
        grid.add_row("monitoring", Text(f"{share(summary.monitor_cost)} of the time"))
    for problem in summary.problems:
        words = f"step {problem.step}: Holter could not {problem.where}: {problem.what}"
        grid.add_row("problem", Text(printable(words), "yellow"))
    return grid


def _state_line(summary: Summary) -> Text:
    error = f" with {printable(summary.error)}" if summary.error else ""
    steps = f"{summary.steps:,} step{'' if summary.steps == 1 else 's'} in {duration(summary.seconds)}"
    again = f", in {summary.segments} segments" if summary.segments > 1 else ""
    line = Text(printable(summary.state) + error, _STATE_STYLES.get(summary.state, ""))
    return line.append(f"  {steps}{again}" if summary.steps else "", "not bold default")


def _model_line(summary: Summary) -> Text:
    optimizer = " and ".join(summary.optimizers)
    words = [
        summary.model,
        f"{amount(summary.parameters)} parameters" if summary.parameters is not None else "",
        f"{optimizer} with {summary.scheduler}" if optimizer and summary.scheduler else optimizer,
        *(f"{name} {version}" for name, version in summary.versions.items() if name == "torch"),
    ]
    return Text(printable(", ".join(filter(None, words))) or "unknown: run.json is missing or damaged")


def _course_line(course: Course, clipped: float | None) -> Text:
    line = Text.assemble(_value(course.first), " → ", _value(course.last), "  ", (sparkline(course.values, 24), "cyan"))
    line.append(f"  lowest {number(course.lowest)} at step {course.lowest_step}" if clipped is None else "", "dim")
    return line.append(f"  clipped in {share(clipped)} of the steps" if clipped is not None else "", "dim")


def _value(value: float) -> tuple[str, str]:
    return number(value), "bold" if math.isfinite(value) else "bold red"


def _recorded_line(summary: Summary) -> Text:
    line = Text(f"{summary.records:,} steps")
    line.append(f", {summary.dropped:,} records dropped", _bad_if(summary.dropped > 0))
    return line.append(f", {summary.unreadable_bytes:,} bytes unreadable", _bad_if(summary.unreadable_bytes > 0))


# The layers of a role -----------------------------------------------------------------------------------------


def _render_role(role: Role, most: int) -> list[RenderableType]:
    shown, rest = role.layers[:most], role.layers[most:]
    parts: list[RenderableType] = [role_heading(role), _indented(layer_table(shown))]
    if rest:
        parts.append(Text(f" {_about_the_rest(rest)}", "dim"))
    return parts


def _indented(renderable: RenderableType) -> Padding:
    return Padding(renderable, (0, 0, 0, 1))


def role_heading(role: Role) -> Text:
    line = Text.assemble(
        (printable(role.role), "bold"), f"  measured in {_count(role.steps, 'steps')}, last at {role.last_step:,}: "
    )
    for place, siblings in enumerate(role.siblings):
        line.append("; " if place else "").append(_count(siblings.count, siblings.kind))
        if siblings.spread > 1:
            line.append(f", norms {times(siblings.spread)} apart", "yellow" if siblings.spread > _WIDE_SPREAD else "")
    zero = sum(layer.norm == 0 for layer in role.layers)
    line.append(f"; {zero} exactly zero" if zero else "", "" if role.role == "weight" else "yellow")
    bad = sum(layer.nonfinite > 0 for layer in role.layers)
    return line.append(f"; {bad} not finite" if bad else "; all finite", _bad_if(bad > 0))


def _count(count: int, kind: str) -> str:
    one = {"matrices": "matrix", "biases": "bias", "vectors": "vector", "layers": "layer", "steps": "step"}
    return f"{count:,} {one[kind] if count == 1 else kind}"


def _about_the_rest(rest: Sequence[Layer]) -> str:
    more = f"… and {len(rest):,} more layer{'' if len(rest) == 1 else 's'}"
    bad = sum(layer.nonfinite > 0 for layer in rest)
    far = sum(layer.is_far for layer in rest if not layer.nonfinite)
    kinds = [f"{bad:,} of them not finite"] if bad else []
    kinds += [f"{far:,} of them more than {FAR:g}× from the median"] if far else []
    return f"{', '.join([more, *kinds]) if kinds else f'{more} within {FAR:g}× of the median'}: --all shows them"


def layer_table(layers: Sequence[Layer]) -> RenderableType:
    columns: list[Column[Layer]] = [
        Column("layer", 0, lambda a: _name(a.layer, _style(a)), right=False),
        Column("norm", 1, lambda a: _plain(number(a.norm), _style(a))),
        Column("vs siblings", 2, lambda a: _plain(times(a.siblings), _style(a))),
        Column("change", 4, lambda a: _plain(times(a.change))),
        Column("trend", 7, lambda a: _plain(sparkline(_log(a.norms), 12), "cyan"), right=False),
        Column("median", 6, lambda a: _plain(number(a.median_norm))),
        Column("rms", 8, lambda a: _plain(number(a.rms))),
        Column("min", 9, lambda a: _plain(number(a.min))),
        Column("max", 9, lambda a: _plain(number(a.max))),
        Column("zeros", 5, lambda a: _plain(share(a.zero_share), "yellow" if a.zero_share > 0.5 else "")),
    ]
    if any(layer.nonfinite for layer in layers):
        columns.append(Column("non-finite", 3, lambda a: _plain(_nonfinite(a), _bad_if(a.nonfinite > 0))))
    return FittingTable(columns, layers)


def _nonfinite(layer: Layer) -> str:
    return "0" if not layer.nonfinite else f"{amount(layer.nonfinite)} since {layer.nonfinite_since}"


def _style(layer: Layer) -> str:
    return "bold red" if layer.nonfinite else "yellow" if layer.is_far else ""


def _log(norms: Floats) -> Floats:
    """Norms on a log scale; one of zero is drawn as low as the lowest other."""
    positive = norms[(norms > 0) & np.isfinite(norms)]
    return np.log(np.where(norms == 0, positive.min() if len(positive) else 1.0, norms))


def sparkline(values: Floats, cells: int) -> str:
    """The course of a series in one line of bars, from its lowest value to its highest; × where it is not finite."""
    pieces = [piece for piece in np.array_split(values, min(cells, max(len(values), 1))) if len(piece)]
    finite = [float(np.mean(piece)) if np.isfinite(piece).all() else math.nan for piece in pieces]
    known = [value for value in finite if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    bars = "▁▂▃▄▅▆▇█"
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join("×" if math.isnan(value) else bars[round((value - low) * scale)] for value in finite)
