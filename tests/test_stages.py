"""Stages: a slow stage shows its share. The truth on the CPU is a stopwatch around the planted sleeps."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holter.stages import STAGES, Stages, batches

SLEEP, SLOW = 0.004, 0.03
POINTS = 0.05


class Stopwatch:
    """Sleeps where it is told, and knows how long that was."""

    def __init__(self, slow: str) -> None:
        self._slow = slow
        self.slept: dict[str, float] = {}

    def sleep(self, stage: str) -> None:
        began = time.perf_counter()
        time.sleep(SLOW if stage == self._slow else SLEEP)
        self.slept[stage] = self.slept.get(stage, 0.0) + time.perf_counter() - began


class Sleepy(nn.Module):
    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self.linear, self.watch = nn.Linear(4, 4), watch

    def forward(self, inputs: Tensor) -> Tensor:
        self.watch.sleep("forward")
        outputs: Tensor = self.linear(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: self.watch.sleep("backward"))
        return outputs


class SleepySGD(torch.optim.SGD):
    watch: Stopwatch

    def step(self, closure: Any = None) -> Any:
        self.watch.sleep("optimizer")
        return super().step(closure)


def attach(stages: Stages, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """As the capture does: training forwards only, and the optimizers' own hooks."""
    model.register_forward_pre_hook(lambda *_: stages.forward_began() if model.training else None)
    model.register_forward_hook(lambda *_: stages.forward_ended() if model.training else None)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda *_: stages.step_began())
        optimizer.register_step_post_hook(lambda *_: stages.step_ended())


def train(
    slow: str, *, stages: Stages | None = None, accumulate: int = 1, evaluate: bool = False, steps: int = 7
) -> dict[str, float]:
    """How far each stage's share is from the truth: medians over steps of the difference, in parts of the whole."""
    watch, stages = Stopwatch(slow), stages or Stages()
    model = Sleepy(watch)
    optimizer = SleepySGD(model.parameters(), lr=0.1)
    optimizer.watch = watch
    attach(stages, model, optimizer)
    differences: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "whole")}

    def loader() -> Iterator[Tensor]:
        for _ in range(steps * accumulate):
            watch.sleep("data")
            yield torch.ones(2, 4)

    began = time.perf_counter()
    for place, inputs in enumerate(batches(loader(), stages), 1):
        model(inputs).sum().backward()
        if place % accumulate:
            continue
        optimizer.step()
        if evaluate:
            model.eval()
            forward, watch.slept["forward"] = watch.slept["forward"], 0.0
            model(inputs)
            watch.slept["other"], watch.slept["forward"] = watch.slept["forward"], forward
            model.train()
        found, now = stages.finish().seconds(), time.perf_counter()
        for stage in STAGES:
            truth = watch.slept.get(stage, 0.0) / (now - began)
            differences[stage].append(found.get(stage, 0.0) / found["whole"] - truth)
        differences["whole"].append(found["whole"] / (now - began) - 1.0)
        assert sum(found[stage] for stage in STAGES if stage in found) == pytest.approx(found["whole"])
        began, watch.slept = now, {}
    return {stage: statistics.median(found) for stage, found in differences.items()}


def worst(differences: dict[str, float]) -> float:
    return max(map(abs, differences.values()))


@pytest.mark.parametrize("slow", ["data", "forward", "backward", "optimizer"])
def test_a_slow_stage_shows_its_share(slow: str) -> None:
    assert worst(train(slow)) < POINTS


@pytest.mark.parametrize("slow", ["data", "forward", "backward", "optimizer"])
def test_the_shares_are_true_under_accumulation(slow: str) -> None:
    assert worst(train(slow, accumulate=3, steps=5)) < POINTS


def test_evaluation_is_no_forward() -> None:
    assert worst(train("forward", evaluate=True)) < POINTS


class Deaf(Stages):
    """Planted faults: a stage that is never told."""

    def __init__(self, to: str) -> None:
        super().__init__()
        for name in {"data": ["waited"], "forward": ["forward_began"], "backward": ["forward_ended"]}.get(to, [to]):
            setattr(self, name, lambda *_: None)


@pytest.mark.parametrize(
    ("slow", "deaf"),
    [("data", "data"), ("forward", "forward"), ("backward", "backward"), ("optimizer", "step_began")],
)
def test_a_stage_that_is_not_told_fails_the_gate(slow: str, deaf: str) -> None:
    assert worst(train(slow, stages=Deaf(deaf))) > POINTS


def test_an_evaluation_that_is_told_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sleepy, "training", property(lambda self: True, lambda self, value: None), raising=False)
    assert worst(train("forward", evaluate=True)) > POINTS


def cost(tell: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(200):
        tell()
    return (time.perf_counter() - began) / 200


def test_telling_a_step_is_cheap() -> None:
    """P6 allows 1 ms of Python a step for everything; seven moments and their sum are to be a tenth of it."""
    stages = Stages()

    def tell() -> None:
        stages.wait_began()
        stages.waited(0.0)
        stages.forward_began()
        stages.forward_ended()
        stages.step_began()
        stages.step_ended()
        stages.finish().seconds()

    assert min(cost(tell) for _ in range(5)) < 1e-4
