"""The strip chart as inline SVG: layers down, steps across, colour the log of a statistic, findings where they began.

For notebooks: no script, no package beside numpy, readable on light and dark (text has the colour of the page), and
small whatever the size of the run. The cells are a PNG of at most _ROWS x _COLUMNS within the SVG. Pure.
"""

from __future__ import annotations

import base64
import html
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from holter.diagnosis.finding import Finding
from holter.report.verdict import ranked
from holter.tables import shorten
from holter.words import number, printable

Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

_ROWS, _COLUMNS = 160, 240  # cells at most
_NAMES, _NAME_CHARACTERS = 24, 34  # layers that are named
_MARKS = 6  # findings that are drawn
_LEFT, _WIDTH, _RIGHT = 220, 560, 20
_HEAD, _LINE, _HEIGHT = 22, 13, 280  # heights of the title, of a line of text, and of many layers
_VIRIDIS = ("440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
_SHADES = 200
_ABSENT, _ZERO, _BROKEN = _SHADES, _SHADES + 1, _SHADES + 2  # places in the palette after the shades
_ZERO_COLOUR, _BROKEN_COLOUR = "8a8a8a", "d81b60"


@dataclass(frozen=True)
class Strip:
    """`values` as measured, [layers, steps]: NaN where not measured, infinite where it was not finite."""

    layers: Sequence[str]
    steps: Sequence[int]
    values: Floats
    until: int = 0  # the last step, where that is later than the last of `steps`

    @property
    def span(self) -> tuple[int, int]:
        return int(self.steps[0]), max(int(self.steps[-1]), self.until)


def strip_svg(strip: Strip, findings: Sequence[Finding] = (), title: str = "") -> str:
    """An `<svg>` element; empty where there is nothing to draw."""
    if not len(strip.layers) or not len(strip.steps):
        return ""
    groups = np.array_split(np.arange(len(strip.layers)), min(len(strip.layers), _ROWS))
    cells = _cells(strip, [group.tolist() for group in groups])
    low, high = _range(cells)
    marked = sorted(ranked(findings)[:_MARKS], key=lambda one: one.since)
    row = min(max(_HEIGHT / len(groups), 2.0), 18.0)
    top, height = _HEAD + _LINE * len(marked), row * len(groups)
    whole = top + height + 2.6 * _LINE
    parts = [
        _text(_LEFT, 14, title, "start", bold=True),
        f'<image x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{height:.1f}" preserveAspectRatio="none" '
        f'style="image-rendering:pixelated" href="{_png(_shades(cells, low, high))}"/>',
        *_names(strip.layers, groups, top, row),
        *_hovers(strip, groups, top, row),
        *_axis(*strip.span, top + height),
        *_legend(cells, low, high, top + height),
        *(part for i, one in enumerate(marked) for part in _mark(one, strip, groups, _HEAD + i * _LINE, top, row)),
    ]
    box = f"0 0 {_LEFT + _WIDTH + _RIGHT} {whole:.0f}"
    style = "max-width:860px;width:100%;height:auto;font:11px sans-serif;color:inherit"
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" role="img" style="{style}">{"".join(parts)}</svg>'


# Cells ----------------------------------------------------------------------------------------------------------


def _cells(strip: Strip, groups: Sequence[Sequence[int]]) -> Floats:
    """[groups, columns]: equal stretches of steps; in each the largest of what was measured in it, or before it."""
    steps = np.asarray(strip.steps, dtype=np.int64)
    first, last = strip.span
    columns = min(last - first + 1, _COLUMNS)
    place = (steps - first) * columns // (last - first + 1)
    merged = np.stack([np.fmax.reduce(strip.values[group], axis=0) for group in groups])
    cells = np.full((len(groups), columns), np.nan)
    for column, values in zip(place, merged.T, strict=True):
        cells[:, column] = np.fmax(cells[:, column], values)
    for column in range(1, columns):  # not every step is measured; what was last known stands until the next
        if np.isnan(cells[:, column]).all():
            cells[:, column] = cells[:, column - 1]
    return cells


def _range(cells: Floats) -> tuple[float, float]:
    """Logarithms of the values that have the first and the last shade; a few that are far out do not pale the rest."""
    known = cells[np.isfinite(cells) & (cells > 0)]
    if not len(known):
        return 0.0, 1.0
    low, high = np.percentile(np.log10(known), (1, 99))
    return float(low), float(max(high, low + 0.1))


def _shades(cells: Floats, low: float, high: float) -> Bytes:
    with np.errstate(all="ignore"):
        scaled = (np.log10(np.abs(cells)) - low) / (high - low)
    shades = np.clip(np.nan_to_num(scaled, posinf=1.0, neginf=0.0) * (_SHADES - 1), 0, _SHADES - 1).astype(np.uint8)
    shades[cells == 0] = _ZERO
    shades[np.isinf(cells)] = _BROKEN
    shades[np.isnan(cells)] = _ABSENT
    return shades


def _palette() -> Bytes:
    anchors = np.array([list(bytes.fromhex(colour)) for colour in _VIRIDIS], dtype=np.float64)
    places = np.linspace(0, len(anchors) - 1, _SHADES)
    shades = np.stack([np.interp(places, np.arange(len(anchors)), anchors[:, i]) for i in range(3)], axis=1)
    others = [list(bytes.fromhex(colour)) for colour in ("808080", _ZERO_COLOUR, _BROKEN_COLOUR)]
    return np.concatenate([shades, others]).round().astype(np.uint8)


def _png(shades: Bytes) -> str:
    """As a data URI: a palette image, transparent where nothing was measured."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width = shades.shape
    alpha = bytes([255] * _SHADES + [0])
    lines = b"".join(b"\0" + line.tobytes() for line in shades)  # each begins with its filter: none
    parts = [
        b"\x89PNG\r\n\x1a\n",
        chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        chunk(b"PLTE", _palette().tobytes()),
        chunk(b"tRNS", alpha),
        chunk(b"IDAT", zlib.compress(lines, 9)),
        chunk(b"IEND", b""),
    ]
    return "data:image/png;base64," + base64.b64encode(b"".join(parts)).decode("ascii")


# Around them ----------------------------------------------------------------------------------------------------


def _text(x: float, y: float, text: str, anchor: str, *, bold: bool = False, faint: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    opacity = ' opacity="0.75"' if faint else ""
    said = html.escape(shorten(printable(text), 90))
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="currentColor"{weight}{opacity}>{said}</text>'


def _names(layers: Sequence[str], groups: Sequence[npt.NDArray[np.int64]], top: float, row: float) -> Iterator[str]:
    """As many as can be read, evenly."""
    every = max(-(-len(groups) // _NAMES), int(np.ceil(12 / row)))
    for place in range(0, len(groups), every):
        name = shorten(printable(layers[int(groups[place][0])]), _NAME_CHARACTERS)
        yield _text(_LEFT - 6, top + row * (place + 0.5) + 4, name, "end")


def _hovers(strip: Strip, groups: Sequence[npt.NDArray[np.int64]], top: float, row: float) -> Iterator[str]:
    """What a pointer over a row is told: the layer, and from what to what it went."""
    yield '<g fill="none" pointer-events="all">'
    for place, group in enumerate(groups):
        more = f" and {len(group) - 1:,} more" if len(group) > 1 else ""
        name = shorten(printable(strip.layers[int(group[0])]), 2 * _NAME_CHARACTERS)
        told = html.escape(f"{name}{more}: {_course(np.fmax.reduce(strip.values[group], axis=0), strip.steps)}")
        box = f'x="{_LEFT}" y="{top + row * place:.1f}" width="{_WIDTH}" height="{row:.1f}"'
        yield f"<rect {box}><title>{told}</title></rect>"
    yield "</g>"


def _course(values: Floats, steps: Sequence[int]) -> str:
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return "not measured"
    ends = dict.fromkeys((int(known[0]), int(known[-1])))
    told = [number(float(values[end])) if np.isfinite(values[end]) else "not finite" for end in ends]
    return " → ".join(f"{value} at step {steps[end]:,}" for value, end in zip(told, ends, strict=True))


def _axis(first: int, last: int, bottom: float) -> Iterator[str]:
    yield _text(_LEFT, bottom + _LINE, f"step {first:,}", "start", faint=True)
    if last > first:
        yield _text(_LEFT + _WIDTH, bottom + _LINE, f"step {last:,}", "end", faint=True)


def _legend(cells: Floats, low: float, high: float, bottom: float) -> Iterator[str]:
    """From the first shade to the last, and what has none."""
    y, x, cell = bottom + 1.5 * _LINE, _LEFT + 60.0, 1.0
    ramp = np.linspace(0, _SHADES - 1, 100).astype(np.uint8)[None, :]
    yield _text(x - 6, y + 10, number(10.0**low), "end", faint=True)
    yield f'<image x="{x}" y="{y}" width="{100 * cell}" height="10" preserveAspectRatio="none" href="{_png(ramp)}"/>'
    yield _text(x + 106, y + 10, number(10.0**high), "start", faint=True)
    x += 190
    kinds = ((cells == 0).any(), _ZERO_COLOUR, "zero"), (np.isinf(cells).any(), _BROKEN_COLOUR, "not finite")
    for is_there, colour, words in kinds:
        if is_there:
            yield f'<rect x="{x}" y="{y}" width="10" height="10" fill="#{colour}"/>'
            yield _text(x + 15, y + 10, words, "start", faint=True)
            x += 70


def _mark(
    finding: Finding,
    strip: Strip,
    groups: Sequence[npt.NDArray[np.int64]],
    y: float,
    top: float,
    row: float,
) -> Iterator[str]:
    """A line at its onset with its name, and a ring at its layer."""
    first, last = strip.span
    across = min(max((finding.since - first) / (last - first + 1), 0.0), 1.0)
    x, bottom = _LEFT + across * _WIDTH, top + row * len(groups)
    anchor, gap = ("start", 4) if across < 0.6 else ("end", -4)
    yield _text(x + gap, y + 10, f"{finding.cause} since {finding.since:,}", anchor)
    # Dark within light, so that it is seen on every shade and on every page.
    for colour, width in (("#ffffff", 2.5), ("#111111", 1.2)):
        yield f'<path d="M{x:.1f} {y + 1:.1f}V{bottom:.1f}" stroke="{colour}" stroke-width="{width}" fill="none"/>'
    place = _row_of(finding.layer, strip.layers, groups)
    if place is not None:
        middle = top + row * (place + 0.5)
        for colour, width in (("#ffffff", 4), ("#111111", 2)):
            yield f'<circle cx="{x:.1f}" cy="{middle:.1f}" r="5" fill="none" stroke="{colour}" stroke-width="{width}"/>'


def _row_of(layer: str | None, layers: Sequence[str], groups: Sequence[npt.NDArray[np.int64]]) -> int | None:
    """Of the layer, or of the first parameter of the module that is called so."""
    if not layer:
        return None
    found = next((i for i, name in enumerate(layers) if name == layer or name.startswith(f"{layer}.")), None)
    return next((row for row, group in enumerate(groups) if found in group), None) if found is not None else None
