"""Panels: what a sink shows of a record. Thousands of them freeze a dashboard, so by default it is the numbers of the
whole training and a few layers; all layers stay in the journal.

The few are those farthest from their siblings when gradients are first seen, and then whatever layer a finding names,
until four times as many are shown. Who is chosen stays chosen, and nobody joins for a norm that jumps: a curve that
comes and goes tells nothing, and whether a layer has become worse is what the diagnosis finds out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from holter.diagnosis.finding import Finding
from holter.record import LayerRows, Record
from holter.series import logs, overall_median
from holter.statistics.histogram import Histogram

FEW = 8
MOST_TIMES = 4  # as many layers as were asked for are shown at most, whatever is found
QUANTILES = {"min": 0.0, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "max": 1.0}
# Of each role: how its tags begin, and what is shown besides the extras.
_TAGS = {"gradient": "gradients", "weight": "weights", "update": "updates", "activation": "activations"}
_STATISTICS = {
    "gradient": ("norm", "mean", "std"),
    "weight": ("norm", "mean", "std"),
    "update": ("update_norm",),
    "activation": ("rms", "mean", "std", "abs_max"),
    "batch": ("mean", "std", "abs_max"),
    "momentum": ("norm",),
    "second_moment": ("norm",),
}
_OTHER_NAMES = {"update_norm": "norm"}  # E2
_MEANINGLESS = ("hash",)  # as a curve
_WHOLE = ("batch", "histogram")  # roles whose "layers" are few, and no layers of the model
_RANKED = "gradient"  # the role by which the first few are chosen


@dataclass(frozen=True)
class Panel:
    """One step, by tags such as gradients/blocks.0.up.weight/norm and gradients_hist/blocks.0.up.weight."""

    step: int
    time: float
    scalars: Mapping[str, float] = field(default_factory=dict)
    histograms: Mapping[str, Histogram] = field(default_factory=dict)


class Panels:
    """`layers`: how many of them at first, or "all"; with those of findings there are at most four times as many.

    `every`: of so many steps one has layers, the first that has any of that role; all have their scalars.
    """

    def __init__(self, layers: int | str = FEW, every: int = 1) -> None:
        if layers != "all" and (not isinstance(layers, int) or isinstance(layers, bool) or layers < 0):
            raise ValueError(f'layers={layers!r}: give how many layers to show, such as {FEW}, or "all"')
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ValueError(f"every={every!r}: give a number of steps, 1 for all of them")
        self._few, self._every = layers if isinstance(layers, int) else None, every  # None: all
        self._is_chosen = False
        self._chosen: set[str] = set()
        self._owners: set[str] = set()  # the modules of those chosen
        self._shown_at: dict[str, int] = {}

    def of(self, record: Record) -> Panel:
        scalars: dict[str, float] = dict(record.scalars)
        histograms: dict[str, Histogram] = {}
        if _RANKED in record.rows:
            self._choose(record.rows[_RANKED])
        for role, rows in record.rows.items():
            # Each has turns of its own: what is measured rarely must not wait for what is there at every step.
            has_numbers = self._is_turn(role, record.step)
            has_histograms = rows.rows.histograms is not None and self._is_turn(f"{role}_hist", record.step)
            if has_numbers or has_histograms:
                places = [place for place, name in enumerate(rows.layers) if self._shows(role, name)]
                scalars.update(_numbers(role, rows, places) if has_numbers else ())
                histograms.update(_histograms(role, rows, places) if has_histograms else ())
        return Panel(record.step, record.time, scalars, histograms)

    def note(self, finding: Finding) -> None:
        """The layer of a finding is shown from now on, while there is room; a module with all its parameters."""
        if finding.layer is not None:
            self._add(finding.layer)

    def _is_turn(self, of: str, step: int) -> bool:
        """Whether this is another turn than the last, or what is left of it; steps may be missing, or come again."""
        last = self._shown_at.get(of)
        if last is not None and last != step and last // self._every == step // self._every:
            return False
        self._shown_at[of] = step
        return True

    def _choose(self, rows: LayerRows) -> None:
        if self._few is None or self._is_chosen:
            return
        self._is_chosen = True
        sizes = logs(rows.rows.derive("norm"))
        with np.errstate(invalid="ignore"):
            away = np.abs(sizes - overall_median(sizes[np.isfinite(sizes)]))
        for place in np.argsort(-np.nan_to_num(away, nan=np.inf), kind="stable")[: self._few].tolist():
            self._add(rows.layers[place])

    def _add(self, layer: str) -> None:
        if self._few is not None and len(self._chosen) < MOST_TIMES * max(self._few, 1):
            self._chosen.add(layer)
            self._owners.add(layer.rpartition(".")[0])

    def _shows(self, role: str, name: str) -> bool:
        if self._few is None or role in _WHOLE or name in self._chosen:
            return True
        # A module goes with its parameters, and they with it.
        return name in self._owners or name.rpartition(".")[0] in self._chosen


def tag(role: str, layer: str, statistic: str) -> str:
    """
    >>> tag("gradient", "head.weight", "norm"), tag("batch", "inputs", "mean")
    ('gradients/head.weight/norm', 'batch/inputs/mean')
    """
    return f"{_TAGS.get(role, role)}/{layer}/{statistic}"


def histogram_tag(role: str, layer: str) -> str:
    """
    >>> histogram_tag("gradient", "head.weight"), histogram_tag("histogram", "gradients/histogram")
    ('gradients_hist/head.weight', 'gradients/histogram')
    """
    return layer if role == "histogram" else f"{_TAGS.get(role, role)}_hist/{layer}"


def _numbers(role: str, rows: LayerRows, places: list[int]) -> Iterator[tuple[str, float]]:
    if role == "histogram":  # a tracker's: only its shape was asked for
        return
    columns = {name: rows.rows.derive(_OTHER_NAMES.get(name, name)) for name in _STATISTICS.get(role, ())}
    columns.update((name, values) for name, values in rows.extras.items() if name not in _MEANINGLESS)
    for statistic, values in columns.items():
        for place in places:
            if not np.isnan(values[place]):  # not measured
                yield tag(role, rows.layers[place], statistic), float(values[place])


def _histograms(role: str, rows: LayerRows, places: list[int]) -> Iterator[tuple[str, Histogram]]:
    if rows.rows.histograms is None:
        return
    for place in places:
        histogram = rows.rows.histograms[place]
        if histogram.count:
            yield histogram_tag(role, rows.layers[place]), histogram


def quantiles(histogram: Histogram) -> dict[str, float]:
    """E3: min, p25, p50, p75, p95, p99, max; empty where no value is finite."""
    found = histogram.quantile(np.array(list(QUANTILES.values())))
    return {} if np.isnan(found).any() else dict(zip(QUANTILES, found.tolist(), strict=True))


def joined(histogram: Histogram, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Counts and edges, neighbours joined until there are no more buckets than a tool takes."""
    counts, edges = histogram.edges()
    while len(counts) > most:
        counts = np.add.reduceat(counts, np.arange(0, len(counts), 2))
        edges = np.append(edges[:-1:2], edges[-1])
    return counts, edges
