"""E16: time in collectives is what DDP's reducer and a clock of our own say, on the step that it belongs to."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn

import holter
from holter.collectives import CollectiveClock
from holter.run import Run

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="needs torch.distributed"
)


@pytest.fixture
def ddp(tmp_path: Path) -> Iterator[Any]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield nn.parallel.DistributedDataParallel(nn.Linear(50, 50))
    # gloo's thread needs the interpreter to let go of the last reduction. Whoever destroys the group before that holds
    # the interpreter and waits for that thread: both for ever.
    time.sleep(0.1)
    distributed.destroy_process_group()


def run_backward(model: nn.Module) -> None:
    model(torch.ones(2, 50)).sum().backward()


def test_every_observed_iteration_is_told_once_and_on_its_own_step(ddp: Any) -> None:
    clock, told, ends = CollectiveClock(ddp), {}, []
    for step in range(14):
        run_backward(ddp)
        ends.append(time.time_ns())
        found = clock.look(step)
        if found is not None:
            assert found.step not in told
            truth = ddp._get_ddp_logging_data()
            told[found.step] = truth["backward_comm_time_start"], truth["backward_comm_time_end"]
            assert found.scalars["machine/collective_time"] == pytest.approx(1e-9 * truth["backward_comm_time"])
            assert 0 <= found.scalars["machine/collective_exposed"] <= found.scalars["machine/collective_time"]
    assert list(told) == list(range(10))  # DDP takes the times of its first ten
    assert all(([0, *ends])[step] < began <= ended < ends[step] for step, (began, ended) in told.items())


def test_of_several_backwards_of_a_step_the_one_before_the_last_is_told(ddp: Any) -> None:
    """Accumulation that reduces every micro-batch: what is known when a step ends was reduced within it."""
    clock, steps = CollectiveClock(ddp), []
    for step in range(4):
        for _ in range(2):
            run_backward(ddp)
        found = clock.look(step)
        assert found is not None
        steps.append(found.step)
    assert steps == [0, 1, 2, 3]


def test_micro_batches_that_are_not_reduced_have_no_time(ddp: Any) -> None:
    clock, steps = CollectiveClock(ddp), []
    for step in range(5):
        for is_last in (False, True):
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                run_backward(ddp)
        found = clock.look(step)
        steps.append(found.step if found is not None else None)
    assert steps == [None, 0, 1, 2, 3]


def test_what_was_reduced_before_the_watch_or_on_another_line_is_not_told(ddp: Any) -> None:
    for _ in range(2):
        run_backward(ddp)
    clock = CollectiveClock(ddp)
    assert clock.look(0) is None
    run_backward(ddp)
    assert clock.look(1) is None  # the times that are known now are still of a backward before the watch
    run_backward(ddp)
    found = clock.look(2)
    assert found is not None and found.step == 1
    clock.restart()
    run_backward(ddp)
    assert clock.look(0) is None


def test_anything_but_a_ddp_is_not_observed(ddp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        run_backward(ddp)
        assert CollectiveClock(ddp.module).look(0) is None
    assert CollectiveClock(nn.Linear(2, 2)).look(0) is None  # garbage by now
    clock = CollectiveClock(ddp)
    run_backward(ddp)
    monkeypatch.setattr(ddp, "_get_ddp_logging_data", lambda: {"renamed": 1})
    assert clock.look(0) is None


def test_nothing_is_observed_without_a_process_group() -> None:
    assert CollectiveClock(nn.Linear(2, 2)).look(0) is None


# Two processes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """The run of a training by two processes, and what each of them has printed."""
    run = tmp_path_factory.mktemp("ddp") / "run"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.ddp_script", str(rank), str(run)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=100) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    return run, [json.loads(output) for output, _ in told]


@pytest.mark.parametrize("rank", [0, 1])
def test_time_in_collectives_lies_between_the_reduction_and_the_backward(
    rank: int, trained: tuple[Path, list[Any]]
) -> None:
    """E16: a clock around the reduction sees less than the reducer does, one around the backward more."""
    run, told = trained
    history = Run(run, rank).history
    steps, seconds = history.scalar("machine/collective_time")
    assert steps.tolist() == list(range(9))  # the tenth would be known in an eleventh forward
    inner, outer = (np.array([told[rank]["seen"][step][what] for step in steps]) for what in ("reduction", "backward"))
    assert (inner <= seconds).all() and (seconds <= outer).all()
    exposed = history.scalar("machine/collective_exposed")[1]
    assert (exposed >= 0).all() and (exposed <= seconds).all()


def test_times_on_the_wrong_step_would_be_found(trained: tuple[Path, list[Any]]) -> None:
    """Planted fault: told one step late, as the reducer itself tells them."""
    run, told = trained
    outside = []
    for rank in range(2):
        seconds = Run(run, rank).history.scalar("machine/collective_time")[1][:-1]
        seen = [told[rank]["seen"][step] for step in range(1, 9)]
        outside += [not s["reduction"] <= t <= s["backward"] for s, t in zip(seen, seconds, strict=True)]
    assert any(outside)


def test_the_process_that_waits_for_the_other_has_the_longer_collectives(trained: tuple[Path, list[Any]]) -> None:
    run, _ = trained
    waiting, awaited = (np.median(Run(run, rank).history.scalar("machine/collective_time")[1]) for rank in range(2))
    assert waiting > awaited


def test_watching_leaves_both_processes_with_the_same_weights(trained: tuple[Path, list[Any]]) -> None:
    """P8: both come to their end, and a monitor on each has not disturbed what they reduce."""
    run, told = trained
    assert told[0]["weights"] == told[1]["weights"]
    for rank in range(2):
        stored = Run(run, rank)
        assert stored.state == "finished" and stored.problems == [] and len(stored.history) == 10
        assert stored.history.scalar("loss")[1].tolist() == pytest.approx([s["loss"] for s in told[rank]["seen"]])


def test_a_training_that_is_not_distributed_has_no_collectives() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with holter.watch(model, optimizer, run=False) as monitor:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert not [name for name in monitor.history.scalars if "collective" in name]
