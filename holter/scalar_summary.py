"""The scalars of a run in numbers that a person compares: loss, rates, time, speed, memory. Pure, numpy only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from holter.history import History

STAGES = ("data", "forward", "backward", "optimizer", "other")

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Course:
    """How one scalar went, from its first value to its last."""

    first: float
    last: float
    lowest: float
    lowest_step: int
    highest: float
    median: float
    values: Floats = field(repr=False, compare=False)


@dataclass(frozen=True)
class Scalars:
    """What `holter show` says of a run besides its layers. What was not recorded is None or empty."""

    seconds: float  # spent in steps; pauses between segments do not count
    monitor_cost: float | None  # the share of the time that monitoring took
    clipped_share: float | None  # of the steps
    skipped_share: float | None  # the steps that at least one optimizer skipped
    partly_skipped_share: float | None  # those of them that another optimizer took
    loss: Course | None
    validation: Mapping[str, Course]  # by the name that it was logged under
    gradient_norm: Course | None
    learning_rates: tuple[Course, ...]  # of each group of parameters
    weight_decays: tuple[float, ...]  # the same, as last set
    optimizer_step: int | None  # as the optimizer counts
    loss_scale: Course | None
    step_time: Course | None
    stages: Mapping[str, float]  # shares of the step time, as far as they were observed
    speeds: Mapping[str, Course]  # samples and tokens a second
    batch_size: Course | None
    batches_repeated: int  # steps whose batch had been seen before
    log_sum_exp: Course | None  # of the model's logits
    machine: Mapping[str, float]  # shares on average, all else as last seen


def summarise_scalars(history: History) -> Scalars:
    skipped = history.scalar("skipped")[1]
    return Scalars(
        seconds=float(np.nansum(history.scalar("step_time")[1])),
        monitor_cost=_monitor_cost(history),
        clipped_share=_clipped_share(history),
        skipped_share=_share_of(skipped),
        partly_skipped_share=_share_of((skipped > 0) & (skipped < 1)),
        loss=_course(*history.scalar("loss")),
        validation=_courses(history, history.validation),
        gradient_norm=_course(*_gradient_norms(history)),
        learning_rates=tuple(_courses(history, _groups(history, "learning_rate")).values()),
        weight_decays=tuple(course.last for course in _courses(history, _groups(history, "weight_decay")).values()),
        optimizer_step=_last_whole(history, "optimizer_step"),
        loss_scale=_course(*history.scalar("loss_scale")),
        step_time=_course(*history.scalar("step_time")),
        stages=_stages(history),
        speeds=_courses(history, ["samples_per_second", "tokens_per_second"]),
        batch_size=_course(*history.scalar("batch/size")),
        batches_repeated=int((history.scalar("batch/repeated")[1] > 0).sum()),
        log_sum_exp=_course(*history.scalar("logit_log_sum_exp")),
        machine=_machine(history),
    )


def _course(steps: Integers, values: Floats) -> Course | None:
    if not len(values):
        return None
    known = values[np.isfinite(values)]
    if not len(known):
        return Course(float(values[0]), float(values[-1]), math.nan, int(steps[0]), math.nan, math.nan, values)
    best = int(np.where(np.isfinite(values), values, np.inf).argmin())
    return Course(
        first=float(values[0]),
        last=float(values[-1]),
        lowest=float(known.min()),
        lowest_step=int(steps[best]),
        highest=float(known.max()),
        median=float(np.median(known)),
        values=values,
    )


def _courses(history: History, names: Sequence[str]) -> dict[str, Course]:
    found = {name: _course(*history.scalar(name)) for name in names}
    return {name: course for name, course in found.items() if course is not None}


def _groups(history: History, name: str) -> list[str]:
    """The scalar of every group of parameters: the first has no number."""
    return sorted(
        (found for found in history.scalars if found == name or found.startswith(f"{name}/")),
        key=lambda found: (len(found), found),
    )


def _last_whole(history: History, name: str) -> int | None:
    values = history.scalar(name)[1]
    return int(values[-1]) if len(values) and np.isfinite(values[-1]) else None


def _monitor_cost(history: History) -> float | None:
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


def _share_of(flags: Floats | Flags) -> float | None:
    return float((flags > 0).mean()) if len(flags) else None


def _gradient_norms(history: History) -> tuple[Integers, Floats]:
    """Steps and norms; NaN where not every value was finite, though the record holds the norm of those that were."""
    found = [(r.step, r.scalars) for r in history.records if "gradient_norm" in r.scalars]
    norms = [s["gradient_norm"] if not s.get("gradient_nonfinite") else math.nan for _, s in found]
    return np.array([step for step, _ in found], dtype=np.int64), np.array(norms, dtype=np.float64)


def _stages(history: History) -> dict[str, float]:
    spent = {stage: float(np.nansum(history.scalar(f"time/{stage}")[1])) for stage in STAGES}
    observed = [stage for stage in STAGES if f"time/{stage}" in history.scalars]
    whole = sum(spent.values())
    return {stage: spent[stage] / whole for stage in observed} if whole > 0 else {}


def _machine(history: History) -> dict[str, float]:
    found = {}
    for name in history.scalars:
        kind = name.removeprefix("machine/")
        values = history.scalar(name)[1] if kind != name else np.zeros(0)
        known = values[np.isfinite(values)]
        if len(known):
            found[kind] = float(known.mean() if kind.endswith(("_share", "_utilisation")) else known[-1])
    return found
