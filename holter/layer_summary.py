"""The layers of a role in numbers that a person compares: each with its siblings and with its own past. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from holter.history import History
from holter.signs.sign import last_histograms
from holter.statistics.shape import shape_of

ORDER = ("gradient", "update", "weight", "momentum", "second_moment", "activation", "attention", "batch")
IN_DEPTH = ("activation", "attention", "batch")  # roles whose layers are read from the input to the output
FAR = 10.0  # a layer this many times above or below the median of its siblings is far from it
# What tells the layers of a role from each other; for all other roles it is the norm.
_MEASURES = {
    "update": "ratio",
    "second_moment": "rms_ratio",
    "activation": "rms",
    "attention": "max_logit",
    "batch": "rms",
}
_STATISTICS = ("count", "norm", "mean", "std", "rms", "min", "max", "zero_share", "nonfinite")

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer in one role: as it was last measured, and how its measure got there."""

    layer: str
    kind: str  # matrices, biases, vectors or layers: those it is compared with
    step: int  # of the last measurement
    looks: int  # how often it was measured
    value: float  # of the role's measure, as the five that follow
    siblings: float  # over the siblings' median
    change: float  # over the first
    median: float  # over the run
    lowest: float
    highest: float
    norm: float
    mean: float
    std: float
    rms: float
    min: float
    max: float
    zero_share: float
    nonfinite: int  # NaN and Inf values seen over the run
    nonfinite_since: int | None  # the step of the first
    extras: Mapping[str, float]  # what else the role knows of it, as last measured
    shape: str | None  # of its newest histogram
    values: Floats = field(repr=False, compare=False)

    @property
    def distance(self) -> float:
        """From the siblings' median in powers of ten; infinite for a measure of zero."""
        if self.siblings == 0:
            return math.inf
        return abs(math.log10(self.siblings)) if 0 < self.siblings < math.inf else 0.0

    @property
    def is_far(self) -> bool:
        return self.distance > math.log10(FAR)

    def extra(self, name: str) -> float:
        return self.extras.get(name, math.nan)


@dataclass(frozen=True)
class Siblings:
    """Layers of one role and kind, which can be compared: a bias is no measure of a matrix.

    Weights of two and more dimensions are matrices, others biases or vectors (the gains of norms); where shapes are
    not known, all are layers.
    """

    kind: str
    count: int
    median: float
    spread: float  # the largest over the smallest that is not zero


@dataclass(frozen=True)
class Role:
    """The layers of one role, the worst first (non-finite ones, then those farthest from their siblings), or from the
    input to the output."""

    role: str
    measure: str  # a statistic or an extra
    in_depth: bool
    steps: int  # at which it was measured
    last_step: int
    siblings: tuple[Siblings, ...]
    layers: tuple[Layer, ...]


def summarise_roles(history: History, layers: Iterable[Mapping[str, Any]]) -> tuple[Role, ...]:
    kinds = _kinds(layers)
    ordered = sorted(history.roles, key=lambda role: ORDER.index(role) if role in ORDER else len(ORDER))
    return tuple(_role(history, role, kinds) for role in ordered)


def _role(history: History, role: str, kinds: Mapping[str, str]) -> Role:
    measure = _MEASURES.get(role, "norm")
    measure = measure if measure in (*history.extras(role), *_STATISTICS) else "norm"
    steps = history.series(role, "norm")[0]
    all_rows = _rows_of(history, role, measure)
    groups: dict[str, list[_Rows]] = {}
    for rows in all_rows:
        groups.setdefault(kinds.get(rows.layer, "layers"), []).append(rows)
    siblings = {kind: _siblings(kind, [rows.last for rows in group]) for kind, group in groups.items()}
    zero_is_odd = role != "weight"  # zero is what biases begin with
    shapes = {layer: shape_of(histogram).kind for layer, (_, histogram) in last_histograms(history, role).items()}
    layers = [
        _layer(rows, siblings[kinds.get(rows.layer, "layers")], zero_is_odd, shapes.get(rows.layer))
        for rows in all_rows
    ]
    if role not in IN_DEPTH:
        layers.sort(key=lambda layer: (layer.nonfinite == 0, -layer.distance))
    return Role(role, measure, role in IN_DEPTH, len(steps), int(steps[-1]), tuple(siblings.values()), tuple(layers))


def _kinds(layers: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    shapes = {str(layer.get("name")): layer.get("shape") for layer in layers if isinstance(layer, dict)}
    known = {name: len(shape) for name, shape in shapes.items() if isinstance(shape, list)}
    return {name: _kind(name, dimensions) for name, dimensions in known.items()}


def _kind(name: str, dimensions: int) -> str:
    if dimensions > 1:
        return "matrices"
    return "biases" if name.endswith("bias") else "vectors"


def _siblings(kind: str, values: list[float]) -> Siblings:
    usual = [value for value in values if 0 < value < math.inf]
    if not usual:
        return Siblings(kind, len(values), math.nan, math.nan)
    return Siblings(kind, len(values), float(np.median(usual)), _ratio(max(usual), min(usual)))


@dataclass(frozen=True, slots=True)
class _Table:
    """All layers of a role at all steps: [s] and [s, n] each."""

    steps: Integers
    measure: Floats
    statistics: Mapping[str, Floats]
    extras: Mapping[str, Floats]


@dataclass(frozen=True, slots=True)
class _Rows:
    """One layer at the steps at which it was measured: [s] each, taken from the table when they are asked for."""

    layer: str
    place: int
    table: _Table

    @property
    def seen(self) -> Flags:
        return ~np.isnan(self.table.statistics["count"][:, self.place])

    @property
    def last(self) -> float:
        return float(self.table.measure[self.seen, self.place][-1])


def _rows_of(history: History, role: str, measure: str) -> list[_Rows]:
    """In the order of the model; a layer may come late, or go."""
    steps, names, _ = history.series(role, "count")
    statistics = {name: history.series(role, name)[2] for name in _STATISTICS}
    extras = {name: history.series(role, name)[2] for name in history.extras(role)}
    # A tensor without one finite value has no norm; the sum over no values would say 0.
    is_empty = (statistics["nonfinite"] > 0) & np.isnan(statistics["rms"])
    statistics["norm"] = np.where(is_empty, np.nan, statistics["norm"])
    values = {**statistics, **extras}[measure]
    values = np.where(np.isinf(values), np.nan, values)  # a ratio to weights that are zero
    measured: Flags = np.asarray((~np.isnan(statistics["count"])).any(axis=0))
    table = _Table(steps, values, statistics, extras)
    return [
        _Rows(name, place, table)
        for place, (name, is_measured) in enumerate(zip(names, measured.tolist(), strict=True))
        if is_measured
    ]


def _layer(rows: _Rows, siblings: Siblings, zero_is_odd: bool, shape: str | None) -> Layer:
    table, place, seen = rows.table, rows.place, rows.seen
    steps, values = table.steps[seen], table.measure[seen, place]
    statistics = {name: column[seen, place] for name, column in table.statistics.items()}
    known = values[np.isfinite(values)]
    bad = steps[statistics["nonfinite"] > 0]
    last = {name: float(column[-1]) for name, column in statistics.items()}
    return Layer(
        layer=rows.layer,
        kind=siblings.kind,
        step=int(steps[-1]),
        looks=len(steps),
        value=float(values[-1]),
        siblings=_ratio(values[-1], siblings.median) if values[-1] or zero_is_odd else math.nan,
        change=_ratio(values[-1], values[0]),
        median=float(np.median(known)) if len(known) else math.nan,
        lowest=float(known.min()) if len(known) else math.nan,
        highest=float(known.max()) if len(known) else math.nan,
        **{name: last[name] for name in ("norm", "mean", "std", "rms", "min", "max", "zero_share")},
        nonfinite=int(statistics["nonfinite"].sum()),
        nonfinite_since=int(bad[0]) if len(bad) else None,
        extras={name: _last_known(column[seen, place]) for name, column in table.extras.items()},
        shape=shape,
        values=values,
    )


def _last_known(values: Floats) -> float:
    """Some is not known at every look: which units stay dead takes several."""
    known = values[~np.isnan(values)]
    return float(known[-1]) if len(known) else math.nan


def _ratio(value: float, reference: float) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.float64(value) / np.float64(reference))
