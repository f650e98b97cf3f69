"""A run in numbers that a person compares: loss, time, and every layer against its siblings. Pure, numpy only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from holter.history import History
from holter.record import Problem
from holter.run import Run

ORDER = ("gradient", "update", "weight", "activation")  # of the roles; others follow as they came
FAR = 10.0  # a layer this many times above or below the median of its siblings is far from it

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Course:
    """How one scalar went, from its first value to its last."""

    first: float
    last: float
    lowest: float
    lowest_step: int
    values: Floats = field(repr=False, compare=False)


@dataclass(frozen=True)
class Layer:
    """One layer in one role: as it was last measured, and how it got there."""

    layer: str
    kind: str  # matrices, biases, vectors or layers: those it is compared with
    step: int  # of the last measurement
    norm: float
    siblings: float  # norm over the siblings' median norm
    change: float  # last norm over the first
    median_norm: float  # over the run, as the two that follow
    lowest_norm: float
    highest_norm: float
    rms: float
    min: float
    max: float
    zero_share: float
    nonfinite: int  # NaN and Inf values seen over the run
    nonfinite_since: int | None  # the step of the first
    norms: Floats = field(repr=False, compare=False)

    @property
    def distance(self) -> float:
        """From the siblings' median in powers of ten; infinite for a norm of zero."""
        if self.siblings == 0:
            return math.inf
        return abs(math.log10(self.siblings)) if self.siblings > 0 else 0.0

    @property
    def is_far(self) -> bool:
        return self.distance > math.log10(FAR)


@dataclass(frozen=True)
class Siblings:
    """Layers of one role and kind, whose norms can be compared: a bias is no measure of a matrix.

    Weights of two and more dimensions are matrices, others biases or vectors (the gains of norms); where shapes are
    not known, all are layers.
    """

    kind: str
    count: int
    median_norm: float
    spread: float  # the largest norm over the smallest that is not zero


@dataclass(frozen=True)
class Role:
    """The layers of one role, the worst first: non-finite ones, then those farthest from their siblings."""

    role: str
    steps: int  # at which it was measured
    last_step: int
    siblings: tuple[Siblings, ...]
    layers: tuple[Layer, ...]


@dataclass(frozen=True)
class Summary:
    """What `holter show` shows. Missing words are empty, missing numbers None."""

    path: str
    state: str
    error: str
    model: str
    parameters: int | None
    optimizers: tuple[str, ...]
    scheduler: str
    versions: Mapping[str, str]
    created: float
    seconds: float
    steps: int
    segments: int
    records: int
    dropped: int
    unreadable_bytes: int
    monitor_cost: float | None
    clipped_share: float | None
    loss: Course | None
    gradient_norm: Course | None
    problems: tuple[Problem, ...]
    roles: tuple[Role, ...]


def summarise(run: Run) -> Summary:
    history = run.history.latest()
    ending, text = run.ending, _text_of(run.info)
    parameters, optimizers, versions = (run.info.get(name) for name in ("parameters", "optimizers", "versions"))
    return Summary(
        path=str(run.path),
        state=run.state,
        error=ending.error if ending is not None else "",
        model=text("model"),
        parameters=parameters if isinstance(parameters, int) else None,
        optimizers=tuple(map(str, optimizers)) if isinstance(optimizers, list) else (),
        scheduler=text("scheduler"),
        versions={str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
        created=run.created,
        seconds=_seconds(history),
        steps=len(history),
        segments=len(set(run.history.segments.tolist())),
        records=len(run.history),
        dropped=max(ending.dropped if ending is not None else 0, _last_whole(history, "dropped")),
        unreadable_bytes=run.unreadable_bytes,
        monitor_cost=_monitor_cost(history),
        clipped_share=_clipped_share(history),
        loss=_course(*history.scalar("loss")),
        gradient_norm=_course(*_gradient_norms(history)),
        problems=tuple(run.problems),
        roles=tuple(_role(history, role, _kinds(run.layers)) for role in _ordered(history.roles)),
    )


def as_json(value: Any) -> Any:
    """A summary as plain JSON values: NaN and infinities become null, whole series are left out."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        parts = {part.name: getattr(value, part.name) for part in fields(value)}
        return {name: as_json(part) for name, part in parts.items() if not isinstance(part, np.ndarray)}
    return value


# Scalars ------------------------------------------------------------------------------------------------------


def _text_of(info: Mapping[str, Any]) -> Any:
    return lambda name: info[name] if isinstance(info.get(name), str) else ""


def _seconds(history: History) -> float:
    """Time spent in steps; pauses between segments do not count."""
    return float(np.nansum(history.scalar("step_time")[1]))


def _last_whole(history: History, name: str) -> int:
    values = history.scalar(name)[1]
    return int(values[-1]) if len(values) and np.isfinite(values[-1]) else 0


def _monitor_cost(history: History) -> float | None:
    """The share of the time that monitoring took, over all steps."""
    _, times = history.scalar("step_time")
    _, costs = history.scalar("monitor_cost")
    if len(times) != len(costs) or not times.sum() > 0:
        return None
    return float(costs @ times / times.sum())


def _clipped_share(history: History) -> float | None:
    """The share of steps whose gradient was longer than its limit; None where nothing was clipped."""
    limited = [r.scalars for r in history.records if "clip_max_norm" in r.scalars and "clip_norm" in r.scalars]
    if not limited:
        return None
    return sum(not s["clip_norm"] <= s["clip_max_norm"] for s in limited) / len(limited)


def _gradient_norms(history: History) -> tuple[Integers, Floats]:
    """Steps and norms; NaN where not every value was finite, though the record holds the norm of those that were."""
    found = [(r.step, r.scalars) for r in history.records if "gradient_norm" in r.scalars]
    norms = [s["gradient_norm"] if not s.get("gradient_nonfinite") else math.nan for _, s in found]
    return np.array([step for step, _ in found], dtype=np.int64), np.array(norms, dtype=np.float64)


def _course(steps: Integers, values: Floats) -> Course | None:
    if not len(values):
        return None
    known = np.where(np.isfinite(values), values, np.inf)
    best = int(known.argmin())
    lowest = float(values[best]) if np.isfinite(values[best]) else math.nan
    return Course(float(values[0]), float(values[-1]), lowest, int(steps[best]), values)


# Rows ---------------------------------------------------------------------------------------------------------

_SHOWN = ("count", "norm", "rms", "min", "max", "zero_share", "nonfinite")


@dataclass(frozen=True)
class _Rows:
    """One layer at the steps at which it was measured: [s] each."""

    layer: str
    steps: Integers
    norms: Floats
    statistics: Mapping[str, Floats]


def _ordered(roles: Iterable[str]) -> list[str]:
    return sorted(roles, key=lambda role: ORDER.index(role) if role in ORDER else len(ORDER))


def _role(history: History, role: str, kinds: Mapping[str, str]) -> Role:
    steps = history.series(role, "norm")[0]
    found: dict[str, list[_Rows]] = {}
    for rows in _rows_of(history, role):
        found.setdefault(kinds.get(rows.layer, "layers"), []).append(rows)
    siblings = {kind: _siblings(kind, [rows.norms[-1] for rows in group]) for kind, group in found.items()}
    zero_is_odd = role != "weight"  # zero is what biases begin with
    layers = [_layer(rows, siblings[kind], zero_is_odd) for kind, group in found.items() for rows in group]
    layers.sort(key=lambda layer: (layer.nonfinite == 0, -layer.distance))
    return Role(role, len(steps), int(steps[-1]), tuple(siblings.values()), tuple(layers))


def _kinds(layers: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    shapes = {str(layer.get("name")): layer.get("shape") for layer in layers if isinstance(layer, dict)}
    known = {name: len(shape) for name, shape in shapes.items() if isinstance(shape, list)}
    return {name: _kind(name, dimensions) for name, dimensions in known.items()}


def _kind(name: str, dimensions: int) -> str:
    if dimensions > 1:
        return "matrices"
    return "biases" if name.endswith("bias") else "vectors"


def _siblings(kind: str, norms: list[float]) -> Siblings:
    usual = [norm for norm in norms if 0 < norm < math.inf]
    if not usual:
        return Siblings(kind, len(norms), math.nan, math.nan)
    return Siblings(kind, len(norms), float(np.median(usual)), _ratio(max(usual), min(usual)))


def _rows_of(history: History, role: str) -> list[_Rows]:
    """In the order of the model; a layer may come late, or go."""
    steps, names, _ = history.series(role, "count")
    series = {name: history.series(role, name)[2] for name in _SHOWN}
    # A tensor without one finite value has no norm; the sum over no values would say 0.
    norms = np.where((series["nonfinite"] > 0) & np.isnan(series["rms"]), np.nan, series["norm"])
    measured = ~np.isnan(series["count"])
    return [
        _Rows(name, steps[seen], norms[seen, i], {key: values[seen, i] for key, values in series.items()})
        for i, (name, seen) in enumerate(zip(names, measured.T, strict=True))
        if seen.any()
    ]


def _layer(rows: _Rows, siblings: Siblings, zero_is_odd: bool) -> Layer:
    norms, statistics = rows.norms, rows.statistics
    known = norms[np.isfinite(norms)]
    bad = rows.steps[statistics["nonfinite"] > 0]
    return Layer(
        layer=rows.layer,
        kind=siblings.kind,
        step=int(rows.steps[-1]),
        norm=float(norms[-1]),
        siblings=_ratio(norms[-1], siblings.median_norm) if norms[-1] or zero_is_odd else math.nan,
        change=_ratio(norms[-1], norms[0]),
        median_norm=float(np.median(known)) if len(known) else math.nan,
        lowest_norm=float(known.min()) if len(known) else math.nan,
        highest_norm=float(known.max()) if len(known) else math.nan,
        rms=float(statistics["rms"][-1]),
        min=float(statistics["min"][-1]),
        max=float(statistics["max"][-1]),
        zero_share=float(statistics["zero_share"][-1]),
        nonfinite=int(statistics["nonfinite"].sum()),
        nonfinite_since=int(bad[0]) if len(bad) else None,
        norms=norms,
    )


def _ratio(value: float, reference: float) -> float:
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.float64(value) / np.float64(reference))
