"""Tables for the terminal: columns that fit its width, names that are cut, series drawn in a few cells."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from holter.words import printable

Floats = npt.NDArray[np.float64]
Line = TypeVar("Line")

_GAP = 2  # cells between columns
_NAME_CELLS = 44  # a name may take
_FOLDED_CELLS = 24  # that a text needs which may be broken


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


def name_cell(text: str, style: str = "") -> Text:
    return Text(shorten(printable(text), _NAME_CELLS), style)


def sparkline(values: Floats, cells: int) -> str:
    """The course of a series in one line of bars, from its lowest value to its highest; × where it is not finite."""
    pieces = [piece for piece in np.array_split(values, min(cells, max(len(values), 1))) if len(piece)]
    finite = [float(np.mean(piece)) if np.isfinite(piece).all() else math.nan for piece in pieces]
    known = [value for value in finite if math.isfinite(value)]
    low, high = (min(known), max(known)) if known else (0.0, 0.0)
    bars = "▁▂▃▄▅▆▇█"
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join("×" if math.isnan(value) else bars[round((value - low) * scale)] for value in finite)


def logarithms(values: Floats) -> Floats:
    """On a log scale; a value of zero is drawn as low as the lowest other."""
    positive = values[(values > 0) & np.isfinite(values)]
    with np.errstate(invalid="ignore"):
        return np.log(np.where(values == 0, positive.min() if len(positive) else 1.0, values))


def bar(share: float, cells: int) -> str:
    """A horizontal bar over this share of the cells; never quite empty where there is something.

    >>> bar(0.5, 4), bar(0.0, 4), bar(float("nan"), 4)
    ('██', '▏', '')
    """
    if math.isnan(share):
        return ""
    eighths = max(1, round(8 * cells * min(max(share, 0.0), 1.0)))
    return "█" * (eighths // 8) + "▏▎▍▌▋▊▉"[eighths % 8 - 1 : eighths % 8]
