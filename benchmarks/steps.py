"""What watching adds to real training steps: every variant trains a copy of its own, in short blocks by turns."""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.figures import Ratio, Spread, ratio_of_means, ratio_of_medians, ratio_of_tails, spread
from benchmarks.models import Trainable, trainable
from benchmarks.turns import Turns, take_turns, told
from benchmarks.waits import Memory, Waits, measure_memory, measure_waits
from benchmarks.watched import CLIP, NOTHING, VARIANTS, Training, leave_idle_time_out


@dataclass(frozen=True)
class Block:
    """Some steps in a row, with the device idle before and after."""

    wall_ms: float  # of a step, on average
    device_ms: list[float]  # of each step, between events; by the host's clock where there is no such device


@dataclass(frozen=True)
class StepCost:
    variant: str
    step_ms: Spread | None  # of single steps, by events on the device
    wall_ms: Spread | None  # of the blocks' steps, by the clock
    to_nothing: Ratio | None  # of median wall_ms
    to_clip: Ratio | None
    p99_to_nothing: Ratio | None  # of step_ms
    mean_to_nothing: Ratio | None  # of mean wall_ms: the rare steps with histograms count
    monitor_cost: float | None  # what the monitor believes that it took, as a share of its training time
    rows_share: float | None  # of the steps whose gradients were measured
    dropped: int | None  # records
    findings: list[str] | None
    error: str | None = None


@dataclass(frozen=True)
class TrainingCosts:
    model: str
    description: str
    parameters: int
    batch: int
    length: int
    steps: int  # that each variant was timed for
    costs: list[StepCost]
    waits: Waits | None  # None where there is no device to wait for
    memory: Memory | None


@dataclass(frozen=True)
class Plan:
    blocks: int = 60  # of fewer than 300 steps a p99 is one single step
    steps: int = 5
    warm_ups: int = 3
    variants: Sequence[str] = ()  # of them all
    batch: int | None = None
    length: int | None = None


def train(model: str, device: torch.device, plan: Plan) -> TrainingCosts | None:
    trained = trainable(model, device, plan.batch, plan.length)
    if trained is None:
        print(f"  {model} is not trained: its copies would not fit", flush=True)
        return None
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trainings, failed = _make(trained, device, directory, plan, stack)
        gc.collect()
        gc.freeze()  # the collector would walk through all copies of the model; a training has one
        contenders = {name: partial(take_block, training, device, plan.steps) for name, training in trainings.items()}
        turns = take_turns(contenders, plan.blocks)
        turns.failed.update(failed)
        costs = _summarise(turns, trainings)
        parameters = sum(parameter.numel() for parameter in trained.build().parameters())
        on_cuda = device.type == "cuda"
        gc.unfreeze()
        waits = measure_waits(trainings, plan.steps) if on_cuda else None
    del trainings, contenders  # the memory of one copy is measured with no other around
    memory = measure_memory(trained, device) if on_cuda else None
    steps = plan.blocks * plan.steps
    description = trained.description
    return TrainingCosts(model, description, parameters, trained.batch, trained.length, steps, costs, waits, memory)


def _make(
    trained: Trainable, device: torch.device, directory: Path, plan: Plan, stack: ExitStack
) -> tuple[dict[str, Training], dict[str, str]]:
    trainings: dict[str, Training] = {}
    failed: dict[str, str] = {}
    for place, (name, variant) in enumerate(VARIANTS.items()):
        if plan.variants and name not in plan.variants:
            continue
        try:
            training = Training(variant, trained, device, directory / str(place), stack)
            for _ in range(plan.warm_ups):
                training.step()
            trainings[name] = training
        except Exception as error:
            failed[name] = told(name, error)
    return trainings, failed


def take_block(training: Training, device: torch.device, steps: int) -> Block:
    """Steps in a row without a wait in between, as a training takes them."""
    on_cuda = device.type == "cuda"
    if on_cuda:
        torch.cuda.synchronize(device)
    if training.monitor is not None:
        leave_idle_time_out(training.monitor)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)] if on_cuda else []
    marks = [time.perf_counter()]
    if events:
        events[0].record()
    for number in range(steps):
        training.step()
        marks.append(time.perf_counter())
        if events:
            events[number + 1].record()
    if on_cuda:
        torch.cuda.synchronize(device)
    wall = 1e3 * (time.perf_counter() - marks[0]) / steps
    if events:
        return Block(wall, [float(a.elapsed_time(b)) for a, b in itertools.pairwise(events)])
    return Block(wall, [1e3 * (b - a) for a, b in itertools.pairwise(marks)])


def _summarise(turns: Turns[Block], trainings: Mapping[str, Training]) -> list[StepCost]:
    walls = {name: {number: block.wall_ms for number, block in blocks.items()} for name, blocks in turns.taken.items()}
    nothing, clip = walls.get(NOTHING, {}), walls.get(CLIP, {})
    costs = []
    for name in (name for name in VARIANTS if name in turns.taken or name in turns.failed):
        wall, blocks = walls.get(name, {}), turns.taken.get(name, {})
        own = _own_account(trainings[name]) if name in trainings else (None, None, None, None)
        costs.append(
            StepCost(
                name,
                spread(step for block in blocks.values() for step in block.device_ms),
                spread(wall.values()),
                ratio_of_medians(wall, nothing),
                ratio_of_medians(wall, clip),
                ratio_of_tails(_single_steps(blocks), _single_steps(turns.taken.get(NOTHING, {}))),
                ratio_of_means(wall, nothing),
                *own,
                error=turns.failed.get(name),
            )
        )
    return costs


def _single_steps(blocks: Mapping[int, Block]) -> dict[int, list[float]]:
    return {number: block.device_ms for number, block in blocks.items()}


def _own_account(training: Training) -> tuple[float | None, float | None, int | None, list[str] | None]:
    monitor = training.monitor
    if monitor is None:
        return None, None, None, None
    monitor.flush(10.0)
    measured = len(monitor.history.series("gradient", "norm")[0])
    findings = [finding.advice for finding in monitor.findings]
    return monitor.cost, measured / max(monitor.step, 1), monitor.dropped, findings
