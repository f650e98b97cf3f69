"""What one look at all gradients of a model costs, by every contender in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.figures import Ratio, Spread, evenly, ratio_of_medians, rounds_within, spread
from benchmarks.models import SHAPES
from benchmarks.observers import MOMENTS, OBSERVERS, REFERENCE, Call, Given, LeftOut, Observer
from benchmarks.turns import Clock, Timing, Turns, copy_bandwidth, take_turns, told

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_CLOCKS = ("wall_ms", "host_ms", "device_ms", "queued_ms")


@dataclass(frozen=True)
class Cost:
    """Of one contender; milliseconds as benchmarks.turns.Timing says, ratios against torch's clip."""

    contender: str
    wall_ms: Spread | None
    host_ms: Spread | None
    device_ms: Spread | None
    queued_ms: Spread | None
    wall_ratio: Ratio | None
    queued_ratio: Ratio | None
    error: str | None = None


@dataclass(frozen=True)
class Observation:
    model: str
    dtype: str
    tensors: int
    elements: int
    bytes: int
    copy_gb_per_s: float  # read and written
    moments_gb_per_s: float | None  # gradients read by Holter's moments, by queued_ms (by the wall clock on a CPU)
    moments_share_of_copy: float | None
    costs: list[Cost]
    left_out: dict[str, str]


@dataclass(frozen=True)
class Plan:
    rounds: int = 50
    limit_seconds: float = 2.0  # that a contender may take of a model, in all its turns
    warm_ups: int = 2


def observe(model: str, dtype: str, device: torch.device, plan: Plan) -> Observation:
    given = Given(SHAPES[model](), DTYPES[dtype], device)
    clock = Clock(device)
    bandwidth = copy_bandwidth(device)
    with ExitStack() as stack:
        calls, left_out, failed = _build(OBSERVERS, given, stack)
        turns = _all_turns(calls, given, clock, plan)
    return _summarise(model, dtype, given, bandwidth, turns.taken, left_out, {**failed, **turns.failed})


def _build(
    observers: Sequence[Observer], given: Given, stack: ExitStack
) -> tuple[dict[Observer, Call], dict[str, str], dict[str, str]]:
    calls: dict[Observer, Call] = {}
    left_out: dict[str, str] = {}
    failed: dict[str, str] = {}
    for observer in observers:
        try:
            calls[observer] = observer.build(given, stack)
        except LeftOut as reason:
            left_out[observer.name] = str(reason)
            print(f"  {observer.name} left out: {reason}", flush=True)
        except Exception as error:
            failed[observer.name] = told(observer.name, error)
    return calls, left_out, failed


def _all_turns(calls: Mapping[Observer, Call], given: Given, clock: Clock, plan: Plan) -> Turns[Timing]:
    """Warmed up one after the other, which says how many turns each can afford; then in turns."""
    timed: dict[str, Callable[[], Timing]] = {}
    attends: dict[str, frozenset[int]] = {}
    failed: dict[str, str] = {}
    for observer, call in calls.items():
        timed[observer.name] = partial(clock.time, call, given.restore, again_queued=not observer.is_very_slow)
        turns = 1
        try:
            if not observer.is_very_slow:
                for _ in range(plan.warm_ups):
                    clock.seconds(call)
                turns = rounds_within(
                    clock.seconds(call) * (2 if clock.is_cuda else 1), plan.limit_seconds, plan.rounds
                )
        except Exception as error:
            failed[observer.name] = told(observer.name, error)
            del timed[observer.name]
        attends[observer.name] = evenly(turns, plan.rounds)
    found = take_turns(timed, plan.rounds, attends)
    found.failed.update(failed)
    return found


def _summarise(
    model: str,
    dtype: str,
    given: Given,
    bandwidth: float,
    taken: Mapping[str, Mapping[int, Timing]],
    left_out: dict[str, str],
    failed: Mapping[str, str],
) -> Observation:
    series = {name: {clock: _series(timings, clock) for clock in _CLOCKS} for name, timings in taken.items()}
    names = [observer.name for observer in OBSERVERS if observer.name not in left_out]
    costs = [cost_of(name, series.get(name, {}), series.get(REFERENCE, {}), failed.get(name)) for name in names]
    moments = next(cost for cost in costs if cost.contender == MOMENTS)
    time = moments.queued_ms or moments.wall_ms
    speed = given.bytes / time.median / 1e6 if time else None
    return Observation(
        model=model,
        dtype=dtype,
        tensors=len(given.gradients),
        elements=given.elements,
        bytes=given.bytes,
        copy_gb_per_s=bandwidth,
        moments_gb_per_s=speed,
        moments_share_of_copy=speed / bandwidth if speed else None,
        costs=costs,
        left_out=left_out,
    )


def _series(timings: Mapping[int, Timing], clock: str) -> dict[int, float]:
    values = {number: getattr(timing, clock) for number, timing in timings.items()}
    return {number: value for number, value in values.items() if value is not None}


def cost_of(
    name: str,
    series: Mapping[str, Mapping[int, float]],
    reference: Mapping[str, Mapping[int, float]],
    error: str | None,
) -> Cost:
    """`series` and `reference`: clock -> round -> milliseconds."""
    wall, host, device, queued = (spread(series.get(clock, {}).values()) for clock in _CLOCKS)
    ratios = [ratio_of_medians(series.get(clock, {}), reference.get(clock, {})) for clock in ("wall_ms", "queued_ms")]
    return Cost(name, wall, host, device, queued, ratios[0], ratios[1], error)
