"""A comparison for the terminal. Names come from disks and models, and may hold anything: all pass `printable`."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holter.comparison.comparing import Comparison, Pair
from holter.comparison.setup import Difference
from holter.comparison.words import (
    change,
    evidence_sentences,
    finding_words,
    judged_until,
    parting_sentences,
    stayed_words,
    table_rows,
)
from holter.report.verdict import first_sentence
from holter.tables import shorten
from holter.words import printable

_STYLES = {
    "worked": "bold green",
    "better": "bold green",
    "same": "green",
    "no difference": "green",
    "worked in part": "bold yellow",
    "did not work": "bold red",
    "worse": "bold red",
    "unknown": "yellow",
}
_SIDE_BY_SIDE = 5  # runs in one table
_NAME_CELLS = 28
_CHARACTERS = 800  # of a line


def render_comparison(comparison: Comparison) -> RenderableType:
    """The verdicts, the numbers side by side, then each pair."""
    parts: list[RenderableType] = []
    for side in comparison.sides:
        for note in side.notes:
            parts.append(Text(_safe(f"{side.name}: {note}"), "yellow"))
    reference = comparison.sides[0].name
    parts += [Text()] if parts else []
    for pair in comparison.pairs:
        parts += [_heading(reference, pair), Text(_safe(pair.verdict.sentence), _STYLES[pair.verdict.state])]
        parts += [Text(), _about(pair, comparison), Text()]
    return Group(*parts, *_tables(comparison))


def _safe(text: str) -> str:
    """Nothing invisible, and no name that fills screens."""
    return printable(text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]} …")


def _heading(reference: str, pair: Pair) -> Text:
    return Text(f"{_name(reference)} → {_name(pair.name)}", "bold")


def _name(text: str) -> str:
    return shorten(_safe(text), 2 * _NAME_CELLS)


def _about(pair: Pair, comparison: Comparison) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, line in _lines(pair, comparison):
        grid.add_row(title, line)
    return grid


def _lines(pair: Pair, comparison: Comparison) -> Iterator[tuple[str, RenderableType]]:
    title = "parting"
    for sentence in parting_sentences(pair.partings, comparison.by):
        yield title, Text(_safe(sentence))
        title = ""
    if until := judged_until(pair, comparison):
        yield "", Text(until)
    title = "set up"
    for difference in pair.setup:
        yield title, _difference(difference)
        title = ""
    if not pair.setup:
        yield title, Text("alike, as far as it was recorded")
    yield from _findings(pair)
    title = "evidence"
    for sentence in evidence_sentences(pair):
        yield title, Text(_safe(sentence))
        title = ""
    title = "regression"
    for reason in pair.verdict.regressions:
        yield title, Text(_safe(reason), "red")
        title = ""


def _difference(found: Difference) -> Text:
    since = f"  since step {found.since:,}" if found.since is not None else ""
    if found.reference == "–" or found.other == "–":
        only = found.other if found.reference == "–" else found.reference
        return Text.assemble((_safe(found.what), "bold"), f"  {_safe(only)}", (since, "dim"))
    words = f"  {_safe(found.reference)} → {_safe(found.other)}"
    return Text.assemble((_safe(found.what), "bold"), words, (since, "dim"))


def _findings(pair: Pair) -> Iterator[tuple[str, RenderableType]]:
    changes, title = pair.changes, "findings"
    lines = [("gone", finding_words(one), "green", "") for one in changes.went]
    lines += [("new", finding_words(one), "red", first_sentence(one.advice)) for one in changes.came]
    lines += [("still", stayed_words(*both), "yellow", "") for both in changes.stayed]
    for mark, words, style, advice in lines:
        yield title, Text.assemble((f"{mark:<6}", style), _safe(words))
        if advice:
            yield "", Padding(Text(_safe(advice), "dim"), (0, 0, 0, 6))
        title = ""
    if not lines:
        yield title, Text("none in either")


def _tables(comparison: Comparison) -> Iterator[RenderableType]:
    """Numbers down, runs across, a few at a time."""
    rows, names = table_rows(comparison), [side.name for side in comparison.sides]
    is_pair = len(names) == 2
    for start in range(0, len(names), _SIDE_BY_SIDE):
        part = slice(start, start + _SIDE_BY_SIDE)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        table.add_column("")
        for name in names[part]:
            table.add_column(Text(shorten(_safe(name), _NAME_CELLS)), overflow="fold")
        if is_pair:
            table.add_column("change", style="dim", no_wrap=True)
        for row in rows:
            cells = [Text(_safe(text)) for text in row.texts[part]]
            table.add_row(Text(_safe(row.name), "dim"), *cells, *([Text(change(row))] if is_pair else []))
        yield table
