"""Pictures of norms, drawn with matplotlib where it is installed. No torch, and none of pyplot's global state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from holter.report.picture import rows_to_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import nn

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]

FAR = 100.0  # times from the median: such a layer says so, and its name is always written
MOST_NAMES = 64  # more would overlap

# From far below the median, by way of near it, to far above.
_COLOURS = ("#5b2a86", "#4a6fb5", "#93a1ae", "#dd8a3c", "#b3261e")
_LEFT, _RIGHT = 0.012, 0.988  # across the axes
_RANGE = (1e-200, 1e200)  # beyond, matplotlib's logarithmic axes overflow
_INK, _FAINT, _BAND, _ALARM = "#22303c", "#8795a1", "#f3f6f8", "#b3261e"


@overload
def plot_gradient_flow(model_or_norms: nn.Module | Mapping[str, float], path: None = None) -> Figure: ...
@overload
def plot_gradient_flow(model_or_norms: nn.Module | Mapping[str, float], path: str | Path) -> Path: ...
def plot_gradient_flow(
    model_or_norms: nn.Module | Mapping[str, float], path: str | Path | None = None
) -> Figure | Path:
    """Draws the gradient norm of every layer, the first on top, on a logarithmic scale about their median.

    A layer 100 times off the median stands out and says so; one whose gradient is zero or not finite is marked.
    With a path the picture is written there, a PNG unless its suffix says otherwise; without one the Figure is
    returned.

    >>> figure = plot_gradient_flow({"embed.weight": 1e-4, "layer.weight": 0.9, "head.weight": 1.2})
    """
    if isinstance(model_or_norms, Mapping):
        norms = model_or_norms
    else:
        import holter  # by the front door: measuring needs torch, drawing does not

        norms = holter.compute_gradient_norms(model_or_norms)
    figure = _draw(list(norms), np.array(list(norms.values()), dtype=np.float64))
    if path is None:
        return figure
    target = Path(path) if Path(path).suffix else Path(f"{path}.png")
    figure.savefig(target)
    return target


def _draw(names: list[str], norms: Floats) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plot_gradient_flow needs matplotlib: pip install 'holter[report]'") from error
    height = 1.4 + 0.24 * min(max(len(names), 4), MOST_NAMES)
    figure = Figure(figsize=(10, height), dpi=150, facecolor="white", layout="constrained")
    axes = figure.add_subplot()
    measured = np.isfinite(norms) & (norms > 0)
    median = float(np.median(norms[measured])) if measured.any() else np.nan
    with np.errstate(all="ignore"):
        decades = np.log10(norms) - np.log10(median)  # -inf for zero
    special = ~measured | (np.abs(decades) >= np.log10(FAR) - 1e-6)  # a rounded hundred is a hundred
    written = rows_to_name(special, MOST_NAMES)
    if measured.any():
        _draw_layers(axes, norms, decades, np.flatnonzero(measured), median)
    _mark_edges(axes, norms)
    for row in written:
        if special[row]:
            _write_beside(axes, row, norms[row], decades[row])
    _dress(axes, [_readable(names[row]) for row in written], written, len(names))
    _head(axes, _summary(len(norms), int(special.sum()), median))
    return figure


def _draw_layers(axes: Axes, norms: Floats, decades: Floats, rows: Rows, median: float) -> None:
    """A stem from the median to the norm, with a head: what is off the median sticks out to its side."""
    from matplotlib.colors import LinearSegmentedColormap

    values, median = np.clip(norms[rows], *_RANGE), float(np.clip(median, *_RANGE))
    colour_of = LinearSegmentedColormap.from_list("flow", _COLOURS)
    colours = [colour_of(0.5 + place) for place in np.clip(decades[rows] / 4, -0.5, 0.5)]
    crowded = len(norms) > MOST_NAMES
    axes.set_xscale("log")
    axes.set_xlim(min(values.min(), median / FAR) / 10, max(values.max(), median * FAR) * 10)
    axes.axvspan(median / FAR, median * FAR, color=_BAND, zorder=0)
    axes.axvline(median, color=_FAINT, linewidth=1, zorder=1)
    axes.hlines(rows, median, values, colors=colours, linewidth=1.2 if crowded else 4, alpha=0.7, zorder=2)
    axes.scatter(values, rows, c=colours, s=10 if crowded else 42, linewidth=0, zorder=3)


def _mark_edges(axes: Axes, norms: Floats) -> None:
    """What has no place on the scale: zeros stand at the left edge, what is not finite at the right."""
    marks: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "linestyle": "", "clip_on": False}
    zeros, nonfinite = np.flatnonzero(norms == 0), np.flatnonzero(~np.isfinite(norms))
    axes.plot(np.full(len(zeros), _LEFT), zeros, marker="o", mfc="white", mec=_COLOURS[0], ms=5, **marks)
    axes.plot(np.full(len(nonfinite), _RIGHT), nonfinite, marker="X", mfc=_ALARM, mec="white", ms=7, **marks)


def _write_beside(axes: Axes, row: int, norm: float, decades: float) -> None:
    edge = axes.get_yaxis_transform()  # x from 0 to 1 across the axes, y in rows
    words: dict[str, Any] = {"va": "center", "fontsize": 8, "annotation_clip": False, "textcoords": "offset points"}
    left, right = ((-8, 0), words | {"ha": "right"}), ((8, 0), words)
    if norm == 0:
        axes.annotate("zero", (_LEFT, row), right[0], xycoords=edge, color=_COLOURS[0], **right[1])
    elif not np.isfinite(norm):
        word = "NaN" if np.isnan(norm) else "infinite"
        axes.annotate(word, (_RIGHT, row), left[0], xycoords=edge, color=_ALARM, **left[1])
    else:
        word, (offset, options) = ("below", left) if decades < 0 else ("above", right)
        place = float(np.clip(norm, *_RANGE)), row
        axes.annotate(f"{_times(abs(decades))} {word}", place, offset, color=_INK, **options)


def _dress(axes: Axes, labels: list[str], rows: list[int], n_layers: int) -> None:
    axes.set_ylim(max(n_layers, 1) - 0.3, -0.7)
    axes.set_yticks(rows, labels, fontsize=8, family="monospace", color=_INK)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)  # a name may hold a dollar sign
    axes.tick_params(axis="both", which="both", length=0)
    axes.tick_params(axis="x", labelsize=8, labelcolor=_FAINT)
    axes.set_xlabel(f"gradient norm (shaded: within {FAR:g}× of the median)", color=_FAINT, fontsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    if axes.get_xscale() == "linear":  # nothing could be drawn to scale
        axes.set_xticks([])
        axes.set_xlabel("")


def _head(axes: Axes, summary: str) -> None:
    axes.set_title("Gradient flow\n", loc="left", fontsize=14, fontweight="bold", color=_INK)
    axes.annotate(summary, (0, 1), (0, 8), xycoords="axes fraction", textcoords="offset points", color=_FAINT)


def _summary(n_layers: int, n_special: int, median: float) -> str:
    if not n_layers:
        return "no gradients: call backward() first"
    parts = ["1 layer" if n_layers == 1 else f"{n_layers} layers"]
    if np.isfinite(median):
        parts.append(f"median {median:.3g}")
    parts.append({0: "none stands out", 1: "1 stands out"}.get(n_special, f"{n_special} stand out"))
    return "   ·   ".join(parts)


def _times(decades: float) -> str:
    return f"{10**decades:,.0f}×" if decades < 6 else f"1e{decades:.0f}×"


def _readable(name: str, most: int = 52) -> str:
    """Plain characters only, so that any font has them, and the middle left out of what is too long."""
    plain = name.encode("ascii", "backslashreplace").decode()
    plain = "".join(character if character.isprintable() else "?" for character in plain)
    return plain if len(plain) <= most else f"{plain[: most // 2 - 1]}...{plain[-most // 2 + 2 :]}"
