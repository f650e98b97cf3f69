"""What the pictures of a run have in common: a head with the verdict, type, colours, findings at their onset.

Drawn with matplotlib, without pyplot's global state. Every word in them may come from someone's model, so each goes
through `readable`, and none is read as a formula.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holter.words import number, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

INK, FAINT, BAND, ALARM, VIOLET = "#22303c", "#8795a1", "#f3f6f8", "#b3261e", "#5b2a86"
LINES = ("#1f5fa8", "#dd8a3c", "#5b2a86", "#3a9b8f", "#93a1ae", "#c4569b")  # told apart by the colour-blind too
SEVERITY_COLOURS = {"critical": ALARM, "warning": "#c26a12", "info": FAINT}
RANGE = (1e-200, 1e200)  # beyond, matplotlib's logarithmic axes overflow

WIDTH = 10.0  # inches
MOST_NAMES = 60
_LANES, _LANE = 3, 0.17  # lines of labels above the axes, and the height of one in inches
_CHARACTER = 0.067  # inches of a label's letter, with a little to spare
_MOST_MARKS = 40
_SIGNS = "–…×·≥≤"  # beyond Latin-1, and in every font
_RENDERED = {"parse_math": False}  # a name may hold a dollar sign


class Mark(NamedTuple):
    """A finding on a chart."""

    since: float
    until: float | None
    label: str
    layer: str
    colour: str


class Page(NamedTuple):
    """What every picture of a run says besides its own chart."""

    run: str
    verdict: str
    colour: str
    marks: tuple[Mark, ...]


def readable(text: object, most: int = 52) -> str:
    r"""Only characters that any font has, and the middle left out of what is too long.

    >>> readable("é \u05d0 $x$ \0"), readable("a" * 70, 11)
    ('é \\u05d0 $x$ \\x00', 'aaaa...aaaa')
    """
    text = str(text)
    if len(text) > 4 * most:  # the rest would be cut anyway
        text = f"{text[: 2 * most]}{text[-2 * most :]}"
    plain = "".join(c if c < "\u0100" or c in _SIGNS else ascii(c)[1:-1] for c in printable(text))
    half = (most - 3) // 2
    return plain if len(plain) <= most else f"{plain[:half]}...{plain[-half:]}"


def page_of(view: Mapping[str, Any]) -> Page:
    verdict, run = _mapping(view.get("verdict")), _mapping(view.get("run"))
    colour = LINES[0] if verdict.get("state") == "healthy" else _severity_colour(verdict.get("severity"))
    findings = view.get("findings")
    marks = [_mark(one) for one in findings if isinstance(one, Mapping)] if isinstance(findings, list) else []
    kept = tuple(mark for mark in marks if mark is not None)[:_MOST_MARKS]
    return Page(readable(run.get("name", ""), 60), readable(verdict.get("sentence", ""), 400), colour, kept)


def _mark(finding: Mapping[str, Any]) -> Mark | None:
    """None of what failed of Holter's own: it says nothing of the curves."""
    since, until = finding.get("since"), finding.get("until")
    if not isinstance(since, int) or abs(since) > 1e15 or finding.get("where") == "monitor":
        return None
    layer = finding.get("layer")
    place = f" · {readable(layer, 24)}" if isinstance(layer, str) else ""
    title = finding.get("title") or str(finding.get("cause", "")).replace("-", " ")
    over = float(until) if isinstance(until, int) and since <= until < 1e15 else None
    colour = _severity_colour(finding.get("severity"))
    return Mark(float(since), over, f"{readable(title, 32)}{place}", layer if isinstance(layer, str) else "", colour)


def _severity_colour(severity: object) -> str:
    return SEVERITY_COLOURS.get(severity, FAINT) if isinstance(severity, str) else FAINT


def _mapping(found: object) -> Mapping[str, Any]:
    return found if isinstance(found, Mapping) else {}


def new_figure(title: str, page: Page, height: float, *, has_steps: bool = True) -> Figure:
    """A figure with its head; `height` is what is left for the chart, in inches. Over steps, findings have labels."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    lines = textwrap.wrap(page.verdict, 136, max_lines=3, placeholder=" …")
    head = 0.5 + 0.18 * len(lines) + _LANE * min(_LANES, len(page.marks)) * has_steps
    whole = head + height
    layout = ConstrainedLayoutEngine(rect=(0.0, 0.0, 1.0, height / whole), w_pad=0.08, h_pad=0.06)
    figure = Figure(figsize=(WIDTH, whole), dpi=150, facecolor="white", layout=layout)
    top = 1 - 0.14 / whole
    words: dict[str, Any] = {"va": "top", **_RENDERED}
    figure.text(0.008, top, title, fontsize=14, fontweight="bold", color=INK, **words)
    figure.text(0.992, top, page.run, fontsize=9, color=FAINT, ha="right", **words)
    for place, line in enumerate(lines):
        figure.text(0.022, 1 - (0.44 + 0.18 * place) / whole, line, fontsize=9, color=INK, **words)
    if lines:
        figure.text(0.008, 1 - 0.44 / whole, "●", fontsize=9, color=page.colour, **words)
    return figure


def dress(axes: Axes, label: str = "") -> None:
    axes.tick_params(axis="both", which="both", length=0, labelsize=8, labelcolor=FAINT)
    axes.set_ylabel(label, color=FAINT, fontsize=9)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def legend(columns: int) -> dict[str, Any]:
    """Below the chart: above it stand the findings."""
    look = {"frameon": False, "fontsize": 8, "labelcolor": INK, "handlelength": 1.6}
    return {"loc": "outside lower left", "ncols": min(columns, 4), **look}


def number_axis(axis: Any) -> None:
    """Plain numbers rather than powers; what lies between two decades is not named."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axis.set_minor_formatter(NullFormatter())


def step_axis(axes: Axes, first: float, last: float, label: bool = True) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    room = max(last - first, 1.0) * 0.004
    axes.set_xlim(first - room, last + room)
    axes.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    if label:
        axes.set_xlabel("step", color=FAINT, fontsize=9)


def name_layers(axes: Axes, layers: Sequence[str], marks: Sequence[Mark]) -> None:
    """The names beside the rows, thinned out where they would overlap; one with a finding keeps its name."""
    colours = {row: mark.colour for mark in reversed(marks) for row in rows_of(mark, layers)}
    special = np.isin(np.arange(len(layers)), list(colours))
    written = rows_to_name(special)
    axes.set_yticks(written, [readable(layers[row], 40) for row in written], family="monospace")
    for row, label in zip(written, axes.get_yticklabels(), strict=True):
        label.set(fontsize=8, color=colours.get(row, INK), **_RENDERED)


def rows_of(mark: Mark, layers: Sequence[str]) -> list[int]:
    """The layer itself and what is in it: a finding names a module, a row may be its weight."""
    if not mark.layer:
        return []
    return [row for row, name in enumerate(layers) if name == mark.layer or name.startswith(f"{mark.layer}.")]


def rows_to_name(special: Bools, most: int = MOST_NAMES) -> list[int]:
    """Rows whose names can stand without overlap: those that stand out first, then evenly spread ones."""
    apart = max(1.0, len(special) / most)
    chosen: list[int] = []
    for row in [*np.flatnonzero(special), *range(len(special))]:
        if all(abs(row - other) >= apart for other in chosen):
            chosen.append(int(row))
    return sorted(chosen)


def mark_findings(figure: Figure, panels: Sequence[Axes], page: Page) -> None:
    """A line at every onset through all panels, with a label above the first one as far as there is room.

    Called last: where the labels can stand is known once everything else has its place.
    """
    from matplotlib.patheffects import withStroke

    first, last = panels[0].get_xlim()
    inside = [mark for mark in page.marks if first <= mark.since <= last]
    for mark in inside:
        for axes in panels:
            halo = [withStroke(linewidth=2.6, foreground="white", alpha=0.85)]
            axes.axvline(mark.since, color=mark.colour, linewidth=1.1, linestyle=(0, (4, 2)), path_effects=halo)
    settle(figure)
    box = panels[0].get_position()
    width, height = box.width * WIDTH, box.height * figure.get_figheight()
    lanes: list[list[tuple[float, float]]] = [[] for _ in range(_LANES)]
    for mark in inside:
        at = (mark.since - first) / (last - first) * width
        room = len(mark.label) * _CHARACTER + 0.1
        left = at if at + room <= width + 0.4 else at - room
        lane = next((i for i, taken in enumerate(lanes) if _is_free(taken, left, left + room)), None)
        if lane is not None:
            lanes[lane].append((left, left + room))
            _write_mark(
                panels[0], mark, at / width, 1 + (0.06 + _LANE * lane) / height, "left" if left == at else "right"
            )


def settle(figure: Figure) -> None:
    """Lays the figure out once and for all: it takes longer than drawing does."""
    engine = figure.get_layout_engine()
    if engine is not None:
        engine.execute(figure)
    figure.set_layout_engine("none")


def _is_free(taken: Sequence[tuple[float, float]], left: float, right: float) -> bool:
    return all(right < other_left or left > other_right for other_left, other_right in taken)


def _write_mark(axes: Axes, mark: Mark, x: float, y: float, side: str) -> None:
    words: dict[str, Any] = {"fontsize": 8, "color": mark.colour, "ha": side, "annotation_clip": False, **_RENDERED}
    offset = (3 if side == "left" else -3), 0
    text = axes.annotate(mark.label, (x, y), offset, "axes fraction", textcoords="offset points", **words)
    text.set_in_layout(False)
    (stem,) = axes.plot([x, x], [1, y], transform=axes.transAxes, color=mark.colour, lw=0.8, clip_on=False)
    stem.set_in_layout(False)
