"""The strip chart of a training: layers down, steps across, colour the statistic, findings framed from their onset."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holter.report.picture import (
    ALARM,
    FAINT,
    RANGE,
    Page,
    dress,
    legend,
    mark_findings,
    name_layers,
    new_figure,
    number_axis,
    rows_of,
    step_axis,
)
from holter.report.picture_data import Map

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

_ZERO = "#d5dce2"  # no colour of the scale, like that of what is not finite
_MOST_COLUMNS = 1000  # about the pixels that the chart has across


def draw_strip(chart: Map, page: Page) -> Figure:
    """Layers down, steps across, colour the statistic; findings framed from their onset on."""
    from matplotlib.colors import ListedColormap

    chart = _merge_columns(chart)
    figure = new_figure(chart.title, page, 0.7 + 0.16 * min(max(len(chart.layers), 12), 62))
    axes = figure.add_subplot()
    edges = _edges(chart.steps)
    rows = np.arange(len(chart.layers) + 1) - 0.5
    axes.set_facecolor("white")
    special = _special(chart)
    for where, colour, _ in (one for one in special if one[0].any()):
        flat = np.ma.masked_where(~where, np.zeros(where.shape))
        axes.pcolormesh(edges, rows, flat, cmap=ListedColormap([colour]))
    shown = np.ma.masked_where(np.any([where for where, _, _ in special], axis=0), chart.values)
    if shown.count():
        norm, colours, extend = _scale(chart, shown.compressed())
        mesh = axes.pcolormesh(edges, rows, shown, norm=norm, cmap=colours)
        bar = figure.colorbar(mesh, ax=axes, pad=0.01, fraction=0.03, aspect=28, extend=extend)
        bar.outline.set_visible(False)
        bar.ax.tick_params(which="both", length=0, labelsize=8, labelcolor=FAINT)
        number_axis(bar.ax.yaxis)
    dress(axes)
    axes.set_ylim(len(chart.layers) - 0.5, -0.5)
    step_axis(axes, edges[0], edges[-1])
    name_layers(axes, chart.layers, page.marks)
    _explain(figure, [(word, colour) for where, colour, word in special if where.any()])
    _frame_layers(axes, chart, page)
    mark_findings(figure, [axes], page)
    return figure


def _is_logarithmic(chart: Map) -> bool:
    """What can be negative has no logarithm, whatever the view says."""
    return chart.log and not bool((chart.values < 0).any())


def _special(chart: Map) -> list[tuple[Bools, str, str]]:
    """What has no place on the scale: where it is, its colour and its word."""
    zero = (chart.values == 0) & _is_logarithmic(chart)
    return [
        (zero, _ZERO, "zero"),
        (np.isinf(chart.values), ALARM, "not finite"),
        (np.isnan(chart.values), "white", "not measured"),
    ]


def _scale(chart: Map, values: Floats) -> tuple[Any, str, str]:
    """A rare extreme takes the colour of the end of the scale rather than the colours of all others."""
    from matplotlib.colors import LogNorm, Normalize

    if not _is_logarithmic(chart):
        most = max(float(np.abs(values).max()), 1.0)  # a share of few percent is not the end of the scale
        has_negative = bool((values < 0).any())
        return Normalize(-most if has_negative else 0.0, most), "PuOr" if has_negative else "viridis", "neither"
    values = np.clip(values, *RANGE)
    low, high = np.quantile(values, [0.005, 0.995], method="nearest")
    middle, half = np.sqrt(low) * np.sqrt(high), max(np.sqrt(high) / np.sqrt(low), np.sqrt(10.0))
    low, high = middle / half, middle * half  # a decade at least: noise is no drama
    ends = values.min() < low, values.max() > high
    extend = {(True, True): "both", (True, False): "min", (False, True): "max"}.get(ends, "neither")
    return LogNorm(low, high), "viridis", extend


def _edges(steps: Floats) -> Floats:
    """A column reaches to the next one; the last is as wide as they usually are."""
    return np.append(steps, steps[-1] + (float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0))


def _merge_columns(chart: Map) -> Map:
    """No more columns than pixels; of those merged, what is farthest from what the layer usually has."""
    several = -(-len(chart.steps) // _MOST_COLUMNS)
    if several == 1:
        return chart
    lacking = -len(chart.steps) % several
    padded = np.pad(chart.values, ((0, 0), (0, lacking)), constant_values=np.nan)
    with np.errstate(all="ignore"):
        sizes = np.log(np.abs(padded))
        known = np.ma.masked_invalid(sizes)
        usual = np.ma.median(known, axis=1).filled(0.0)[:, None]  # type: ignore[no-untyped-call]
        off = np.nan_to_num(np.abs(sizes - usual), nan=-1.0, posinf=np.inf)
    off[padded == 0] = 1e300  # rarer than any number, but not than what is not finite
    groups = padded.reshape(len(chart.layers), -1, several)
    chosen = off.reshape(groups.shape).argmax(axis=2)
    values = np.take_along_axis(groups, chosen[..., None], axis=2)[..., 0]
    return chart._replace(steps=chart.steps[::several], values=values)


def _frame_layers(axes: Axes, chart: Map, page: Page) -> None:
    from matplotlib.patches import Rectangle

    last, room = _edges(chart.steps)[-1], len(chart.layers) / 250  # around the rows: a thin one stays visible
    for mark in page.marks:
        rows = np.array(rows_of(mark, chart.layers), dtype=np.int64)
        width = (last if mark.until is None else mark.until) - mark.since
        for together in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
            if not len(together) or mark.since >= last:
                continue
            corner, height = (mark.since, together[0] - 0.5 - room), len(together) + 2 * room
            for edge, thick in (("white", 3.0), (mark.colour, 1.6)):
                axes.add_patch(Rectangle(corner, width, height, fill=False, edgecolor=edge, linewidth=thick, zorder=4))


def _explain(figure: Figure, colours: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    if colours:
        patches = [Patch(facecolor=colour, edgecolor=FAINT, linewidth=0.5, label=word) for word, colour in colours]
        figure.legend(handles=patches, **legend(len(patches)))
