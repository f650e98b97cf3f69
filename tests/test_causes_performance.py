"""Causes in performance, from records with known times; and one loader that is really slow."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import holter
from holter.diagnosis.causes import performance
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding
from holter.record import Record
from tests.patients import examine

AT = 80


def findings(scalars: Callable[[int, np.random.Generator], dict[str, float]], steps: int = 240) -> tuple[Finding, ...]:
    random = np.random.default_rng(0)
    doctor = Doctor({}, performance.RULES)
    for step in range(steps):
        doctor.take(Record(step, float(step), scalars(step, random)))
    doctor.finish()
    return doctor.findings


def times(random: np.random.Generator, data: float = 0.002, backward: float = 0.05) -> dict[str, float]:
    """Seconds of a step, with a tenth of noise and a slow one now and then."""
    parts = {"data": data, "forward": 0.02, "backward": backward, "optimizer": 0.005, "other": 0.003}
    noise = 1 + 0.1 * random.standard_normal() ** 2 + 3 * (random.random() < 0.03)
    found = {f"time/{name}": noise * seconds for name, seconds in parts.items()}
    return {**found, "step_time": sum(found.values()), "batch/size": 32.0}


def the_one(found: tuple[Finding, ...]) -> Finding:
    assert len(found) == 1, found
    assert found[0].where == "performance" and found[0].severity == "warning" and "It worked" in found[0].advice
    return found[0]


def test_a_loader_that_becomes_slow() -> None:
    found = the_one(findings(lambda step, random: times(random, data=0.3 if step >= AT else 0.002)))
    assert found.cause == "data-loading-bound" and abs(found.since - AT) <= 1
    assert "79 % of each step" in found.advice and "num_workers=4" in found.advice


def test_a_loader_that_was_always_slow() -> None:
    found = the_one(findings(lambda step, random: times(random, data=0.2), steps=40))
    assert (found.cause, found.since) == ("data-loading-bound", 0)


def test_a_real_loader_that_is_slow(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loader() -> Iterator[torch.Tensor]:
        for _ in range(40):
            time.sleep(0.05)
            yield torch.randn(8, 4)

    with holter.watch(model, optimizer, run=tmp_path / "run") as monitor:
        for x in monitor.batches(loader()):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = examine(tmp_path / "run", performance.RULES)
    assert [finding.cause for finding in found] == ["data-loading-bound"]


def test_steps_that_have_become_slow() -> None:
    found = the_one(findings(lambda step, random: times(random, backward=0.2 if step >= AT else 0.05)))
    assert found.cause == "throughput-drop" and abs(found.since - AT) <= 1
    assert found.evidence["stage"] == "backward"


def memory(step: int, grown: float) -> dict[str, float]:
    return {"machine/process_memory": 1e9 + grown} if step % 10 == 0 else {}


def test_memory_that_grows() -> None:
    found = the_one(findings(lambda step, random: {**times(random), **memory(step, 4e6 * max(0, step - AT))}))
    assert found.cause == "memory-growth" and abs(found.since - AT) <= 20
    assert "loss.detach()" in found.advice


def in_use(step: int, resident: float, free: float) -> dict[str, float]:
    found = memory(step, resident)
    return {**found, "machine/process_memory_free": free} if found else {}


def test_memory_in_use_that_grows() -> None:
    """The allocator keeps some that was freed, and the rest is kept by the training: four looks show it."""
    found = the_one(findings(lambda step, random: in_use(step, 8e6 * max(0, step - 60), 1e8), steps=140))
    assert found.cause == "memory-growth" and abs(found.since - 60) <= 20


def test_memory_that_grows_for_a_few_looks_is_no_growth_where_what_is_free_is_not_known() -> None:
    assert not findings(lambda step, random: memory(step, 8e6 * max(0, step - 60)), steps=140)


def crowded(step: int, random: np.random.Generator, waits: float) -> dict[str, float]:
    """Other processes come, or the disk is slow: steps take four times as long either way."""
    is_slow = step >= AT
    machine = {"machine/cpu_share": 0.2 if is_slow else 0.8, "machine/cpu_wait": waits if is_slow else 0.05}
    return {**times(random, backward=0.3 if is_slow else 0.05), **(machine if step % 10 == 0 else {})}


def test_steps_that_wait_for_a_processor_are_a_note() -> None:
    (found,) = findings(lambda step, random: crowded(step, random, waits=0.7))
    assert (found.cause, found.severity) == ("throughput-drop", "info") and abs(found.since - AT) <= 1
    assert "waits for a processor" in found.advice


def test_steps_that_wait_for_something_else_are_a_warning() -> None:
    found = findings(lambda step, random: crowded(step, random, waits=0.06))
    assert the_one(tuple(found)).cause == "throughput-drop"


def test_a_backward_pass_that_goes_back_ever_farther() -> None:
    found = the_one(findings(lambda step, random: times(random, backward=0.05 + 0.004 * step)))
    assert found.cause == "memory-growth" and found.since <= 10


def settles(step: int) -> float:
    """A cache that is filled."""
    return 4e8 * (1 - np.exp(-step / 40))


CONTROLS: dict[str, Callable[[int, np.random.Generator], dict[str, float]]] = {
    "even": lambda step, random: {**times(random), **memory(step, 1e6 * random.standard_normal())},
    "a cache that is filled": lambda step, random: {**times(random), **memory(step, settles(step))},
    "freed, and not given back": lambda step, random: in_use(step, 3e6 * step, 3e6 * step + 2e7 * random.random()),
    "one jump of memory": lambda step, random: {**times(random), **memory(step, 5e8 * (step > AT))},
    "larger batches": lambda step, random: {
        **times(random, backward=0.05 * (1 + step // 60)),
        "batch/size": 32.0 * (1 + step // 60),
    },
    "slow for a moment": lambda step, random: times(random, backward=0.3 if 100 <= step < 108 else 0.05),
    "slow now and then": lambda step, random: times(random, backward=0.3 if random.random() < 0.3 else 0.05),
    "validation in between": lambda step, random: times(random, backward=2.0 if step % 20 == 0 else 0.05),
    "another process": lambda step, random: times(
        random, backward=0.05 * (1 + 5 * (step >= AT) * random.random() ** 2)
    ),
    "no times at all": lambda step, random: {"loss": 1.0},
}


@pytest.mark.parametrize("name", CONTROLS)
def test_what_is_no_trouble(name: str) -> None:
    assert not findings(CONTROLS[name])
