"""The main charts of a run as PNG files, from the JSON of its page; drawn with matplotlib where it is installed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from holter.record import is_validation
from holter.report.picture import (
    ALARM,
    BAND,
    FAINT,
    INK,
    LINES,
    RANGE,
    VIOLET,
    Page,
    dress,
    legend,
    mark_findings,
    name_layers,
    new_figure,
    number_axis,
    page_of,
    readable,
    step_axis,
)
from holter.report.picture_data import Series, comparable, entries, floats, read_map, read_series, strings, title_of
from holter.report.strip_picture import draw_strip
from holter.words import duration, stage_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = npt.NDArray[np.float64]

_DECADES = 2.0  # what spans more is drawn on a logarithmic scale
_STAGES = ("data", "forward", "backward", "optimizer", "other")
_CLIPPED = {"gradient_norm_clipped": "after clipping", "clip_max_norm": "largest that clipping allows"}
_SPEEDS = {"samples_per_second": "samples a second", "tokens_per_second": "tokens a second"}
_MEMORY = {
    "machine/gpu_memory": "GPU, allocated",
    "machine/gpu_memory_peak": "GPU, peak",
    "machine/gpu_memory_reserved": "GPU, reserved",
    "machine/gpu_memory_total": "GPU, all there is",
    "machine/process_memory": "process",
    "machine/process_memory_peak": "process, peak",
}
_FLOWS = {"gradient": "gradient-flow", "activation": "activations"}
_DASHES = ("-", (0, (5, 1.5)), (0, (2, 1)), "-.", ":", (0, (5, 1, 1, 1, 1, 1)))  # two that are equal are both seen
_MARKERS = ("o", "s", "D", "^", "v", "P")
_BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "frameon": False}


Curves = Sequence[tuple[str, Series]]


def write_pngs(view: Mapping[str, Any], directory: Path) -> list[Path]:
    """Writes what there is data for and returns the files: strip-<role>-<statistic>.png, loss.png, norms.png,
    rate.png, gradient-flow.png, activations.png, machine.png. What the view lacks, or holds damaged, has no file."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("holter report --png needs matplotlib: pip install 'holter[report]'") from error
    directory.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    taken: Counter[str] = Counter()
    for name, figure in _figures(view, page_of(view)):
        taken[name.lower()] += 1  # two names may differ only in what no file's name can hold
        again = taken[name.lower()]
        path = directory / (f"{name}-{again}.png" if again > 1 else f"{name}.png")
        figure.savefig(path)
        written.append(path)
    return written


def _figures(view: Mapping[str, Any], page: Page) -> Iterator[tuple[str, Figure]]:
    for found in entries(view, "maps"):
        chart = read_map(found)
        if chart is not None:
            yield f"strip-{_slug(found.get('role'))}-{_slug(found.get('statistic'))}", draw_strip(chart, page)
    scalars = view.get("scalars")
    scalars = scalars if isinstance(scalars, Mapping) else {}
    for name, title, names in (
        ("loss", "Loss", _losses(scalars)),
        ("norms", "Gradient norm of all layers together", _norms(scalars)),
        ("rate", "Learning rate", _rates(scalars)),
    ):
        curves = _curves(scalars, names)
        if curves:
            yield name, draw_lines(title, curves, page)
    for found in entries(view, "flow"):
        name = _FLOWS.get(str(found.get("id")), "")
        figure = _flow(found, page) if name else None
        if figure is not None:
            yield name, figure
    figure = _machine(scalars, page)
    if figure is not None:
        yield "machine", figure


def _slug(name: object) -> str:
    """Part of a file's name: no separators, nothing hidden."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", str(name)[:200])[:48].strip("-") or "unnamed"


def _curves(scalars: Mapping[str, Any], names: Mapping[str, str]) -> list[tuple[str, Series]]:
    read = [(label, read_series(scalars.get(name))) for name, label in names.items()]
    return [(label, series) for label, series in read if series is not None]


def _losses(scalars: Mapping[str, Any]) -> dict[str, str]:
    names = sorted((name for name in scalars if "loss" in name.lower()), key=lambda name: name != "loss")
    return {name: readable(f"{name} (validation)" if is_validation(name) else name) for name in names[: len(LINES)]}


def _norms(scalars: Mapping[str, Any]) -> dict[str, str]:
    is_clipped = "gradient_norm_clipped" in scalars
    return {"gradient_norm": "before clipping", **_CLIPPED} if is_clipped else {"gradient_norm": "gradient norm"}


def _rates(scalars: Mapping[str, Any]) -> dict[str, str]:
    names = [name for name in scalars if name == "learning_rate" or name.startswith("learning_rate/")]
    return {name: readable(name).replace("_", " ") for name in names[: len(LINES)]}


# Lines over the steps.


def draw_lines(title: str, curves: Curves, page: Page) -> Figure:
    figure = new_figure(title, page, 3.6)
    axes = figure.add_subplot()
    _plot(axes, curves)
    dress(axes)
    _legend_of(figure, [axes])
    _span(figure, [axes], curves, page)
    return figure


def _plot(axes: Axes, curves: Curves) -> None:
    """Each with the band of its extremes. What has no place on the scale stands at its edges."""
    from matplotlib.ticker import LogLocator

    everything = np.concatenate([np.concatenate([s.values, s.low, s.high]) for _, s in curves])
    known = everything[np.isfinite(everything)]
    above = np.log10(known[known > 0])
    decades = float(np.ptp(above)) if len(above) and not (known < 0).any() else 0.0
    log = decades >= _DECADES
    if log:
        axes.set_yscale("log")
        if decades < 3:
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    number_axis(axes.yaxis)
    axes.grid(axis="y", color=BAND, linewidth=1)
    for (label, series), colour, dashes in zip(curves, LINES, _DASHES, strict=False):
        values, low, high = (_placeable(of, log) for of in (series.values, series.low, series.high))
        few = len(series.steps) <= 100
        axes.fill_between(series.steps, low, high, color=colour, alpha=0.22, linewidth=0)
        axes.plot(
            series.steps,
            values,
            color=colour,
            lw=1.4,
            ls=dashes if few else "-",
            marker="o" if few else "",
            ms=3,
            label=label,
        )
        _mark_edge(axes, series.steps[~np.isfinite(series.values)], 0.985, "X", ALARM, "not finite")
        if log:
            _mark_edge(axes, series.steps[series.values == 0], 0.015, "o", VIOLET, "zero")


def _placeable(values: Floats, log: bool) -> Floats:
    clipped = np.clip(values, -RANGE[1], RANGE[1])
    return np.where(clipped > 0, np.maximum(clipped, RANGE[0]), np.nan) if log else clipped


def _mark_edge(axes: Axes, steps: Floats, height: float, marker: str, colour: str, word: str) -> None:
    if not len(steps):
        return
    every = -(-len(steps) // 80)  # more would be a bar
    look: dict[str, Any] = {"marker": marker, "mfc": colour, "mec": "white", "mew": 0.5, "ms": 6, "ls": ""}
    shown = steps[::every]
    edge = axes.get_xaxis_transform()
    axes.plot(shown, np.full(len(shown), height), transform=edge, clip_on=False, label=word, **look)


def _legend_of(figure: Figure, panels: Sequence[Axes]) -> None:
    found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    texts = figure.legend(found.values(), found.keys(), **legend(len(found))).get_texts()
    for text in texts:
        text.set_parse_math(False)


def _span(figure: Figure, panels: Sequence[Axes], curves: Curves, page: Page) -> None:
    first, last = min(s.steps[0] for _, s in curves), max(s.steps[-1] for _, s in curves)
    for axes in panels:
        step_axis(axes, first, last, label=axes is panels[-1])
    mark_findings(figure, panels, page)


# By depth.


def _flow(found: Mapping[str, Any], page: Page) -> Figure | None:
    layers = strings(found.get("layers"))
    read = [(one, floats(one.get("values"))) for one in entries(found, "curves")]
    kept = [(_name_of(one), values) for one, values in read if values is not None and len(values) == len(layers)]
    if not any(np.isfinite(values).any() for _, values in kept):
        return None
    places = comparable(layers)
    curves = [(label, values[places]) for label, values in kept[: len(_MARKERS)]]
    title = title_of(found) + (", of weights without norms and biases" if len(places) < len(layers) else "")
    return draw_flow(title, [layers[place] for place in places], curves, page)


def _name_of(curve: Mapping[str, Any]) -> str:
    step = curve.get("step")
    return readable(curve.get("name", ""), 30) + (f" (step {step:,})" if isinstance(step, int) else "")


def draw_flow(title: str, layers: Sequence[str], curves: Sequence[tuple[str, Floats]], page: Page) -> Figure:
    """A curve for each moment, the first layer on top: what vanishes or explodes with depth leans to a side."""
    from matplotlib import colormaps

    figure = new_figure(title, page, 0.9 + 0.16 * min(max(len(layers), 14), 62), has_steps=False)
    axes = figure.add_subplot()
    known = np.concatenate([values for _, values in curves])
    known = known[np.isfinite(known)]
    log = bool((known > 0).any()) and not (known < 0).any()
    if log:
        axes.set_xscale("log")
    rows = np.arange(len(layers))
    for place, (label, values) in enumerate(curves):
        colour = colormaps["viridis"](0.85 - 0.8 * place / max(len(curves) - 1, 1))  # the later, the darker
        look: dict[str, Any] = {
            "color": colour,
            "ms": 4 if len(layers) <= 64 else 2,
            "lw": 1.3 if len(layers) <= 64 else 0.8,
        }
        label = label if np.isfinite(values).any() else f"{label}: nothing finite"
        axes.plot(_placeable(values, log), rows, label=label, marker=_MARKERS[place], **look)
        if log:
            _mark_side(axes, rows[values == 0])
    dress(axes)
    number_axis(axes.xaxis)
    axes.grid(axis="x", color=BAND, linewidth=1)
    axes.set_ylim(len(layers) - 0.3, -0.7)
    name_layers(axes, layers, page.marks)
    _legend_of(figure, [axes])
    return figure


def _mark_side(axes: Axes, rows: npt.NDArray[np.int64]) -> None:
    look: dict[str, Any] = {"marker": "o", "mfc": "white", "mec": VIOLET, "ms": 5, "ls": ""}
    if len(rows):
        edge = axes.get_yaxis_transform()
        axes.plot(np.full(len(rows), 0.012), rows, transform=edge, clip_on=False, label="zero", **look)


# The machine.


def _machine(scalars: Mapping[str, Any], page: Page) -> Figure | None:
    stages = _curves(scalars, {f"time/{stage}": stage_name(stage) for stage in _STAGES})
    memory = [(label, _in_gibibytes(series)) for label, series in _curves(scalars, _MEMORY)]
    panels = [
        (words, draw, curves)
        for words, draw, curves in (
            ("milliseconds a step", _stack, stages or _curves(scalars, {"step_time": "step"})),
            ("throughput", _plot, _curves(scalars, _SPEEDS)),
            ("memory, GiB", _plot, memory),
        )
        if curves
    ]
    if not panels:
        return None
    figure = new_figure("Machine", page, 0.8 + 1.9 * len(panels))
    drawn = list(np.atleast_1d(figure.subplots(len(panels))))
    for axes, (words, draw, curves) in zip(drawn, panels, strict=True):
        draw(axes, curves)
        dress(axes, words)
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, labelcolor=INK, handlelength=1.2, **_BESIDE)
    _span(figure, drawn, [curve for _, _, curves in panels for curve in curves], page)
    return figure


def _in_gibibytes(series: Series) -> Series:
    return Series(series.steps, *(values / 2**30 for values in series[1:]))


def _stack(axes: Axes, curves: Curves) -> None:
    """Where the time of a step goes; a few slow steps do not squeeze the others."""
    steps = max((series.steps for _, series in curves), key=len)
    parts = [np.interp(steps, s.steps, np.nan_to_num(np.clip(1000 * s.values, 0, 1e12))) for _, s in curves]
    axes.stackplot(steps, *parts, labels=[label for label, _ in curves], colors=LINES, linewidth=0)
    total = np.sum(parts, axis=0)
    usual, most = float(np.quantile(total, 0.95)), float(total.max())
    axes.set_ylim(0, 1.3 * usual if most > 2 * usual > 0 else (1.05 * most or 1.0))
    if most > 2 * usual > 0:
        words = f"the slowest: {duration(most / 1000)}"
        axes.text(0.995, 0.97, words, transform=axes.transAxes, ha="right", va="top", fontsize=8, color=FAINT)
    number_axis(axes.yaxis)
