"""A killed process loses nothing that was acknowledged, and leaves nothing that cannot be read.

Processes are forked from one that has imported what they need, so that two hundred kills take seconds. A child
acknowledges a step by writing its number to a pipe, right after the call returned that promises it is in the file.
"""

from __future__ import annotations

import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from holter.journal import Journal, JournalReader
from holter.record import Entry, LayerRows, Record
from holter.run import open_run
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows

Acknowledge = Callable[[int], None]


# What the children do ---------------------------------------------------------------------------------------------


def loss_of(step: int) -> float:
    return 1.0 / (1 + step)


@cache
def sixty_rows() -> list[LayerRows]:
    """Of layers that change now and then, so that new tables of names are written."""
    rng, found = np.random.default_rng(0), []
    for step in range(60):
        layers = tuple(f"layer.{i}" for i in range(20 + step // 30))
        histograms = Histograms.of([rng.normal(size=30) for _ in layers]) if step % 10 == 0 else None
        found.append(LayerRows(layers, Rows(rng.normal(size=(len(layers), len(COLUMNS))), histograms)))
    return found


def write_journal(directory: Path, acknowledge: Acknowledge, journal_class: type[Journal] = Journal) -> None:
    journal, rows = journal_class(directory / "rank-0.journal"), sixty_rows()
    for step in range(100_000):
        journal.append(Record(step, float(step), {"loss": loss_of(step)}, {"gradient": rows[step % 60]}))
        acknowledge(step)


class Buffered(Journal):
    """The planted fault: 32 KiB of user-space buffer, as open() gives."""

    def _write(self, data: bytes) -> None:
        if not hasattr(self, "_buffer"):
            self._buffer = open(self._file, "wb", buffering=32 << 10)  # noqa: SIM115
        self._buffer.write(data)


def write_buffered(directory: Path, acknowledge: Acknowledge) -> None:
    write_journal(directory, acknowledge, Buffered)


def train(directory: Path, acknowledge: Acknowledge) -> None:
    """A real training; a step is acknowledged when flush() says that it is in the file."""
    import torch

    import holter

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters())
    monitor = holter.watch(model, optimizer, run=directory, budget=None, histograms=5, weights=3)
    for step in range(100_000):
        model(torch.ones(4, 8)).square().mean().backward()
        monitor.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss_of(step))
        if monitor.flush(seconds=30.0):
            acknowledge(step)


WORK = {"journal": write_journal, "buffered": write_buffered, "training": train}


# The server that forks and kills them -----------------------------------------------------------------------------


def kill_one(work: Callable[[Path, Acknowledge], None], directory: Path, seconds: float) -> int:
    """Lets a child work for about this long after its first step, kills it, returns its last acknowledged step."""
    directory.mkdir()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work(directory, lambda step: os.write(writing, struct.pack("<q", step)) and None)
        finally:
            os._exit(1)
    os.close(writing)
    acknowledged = os.read(reading, 8)  # waits for the first one
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while more := os.read(reading, 1 << 16):
        acknowledged += more
    os.close(reading)
    if not os.WIFSIGNALED(status) or not acknowledged:
        raise RuntimeError(f"the child ended by itself: {status}")
    return int(struct.unpack_from("<q", acknowledged, len(acknowledged) - 8)[0])


def serve(kind: str, root: str, kills: str, longest: str) -> None:
    if kind == "training":
        import torch._dynamo  # noqa: F401  # an optimizer imports it at its first step; here once for all children

        import holter.monitor  # noqa: F401
    sixty_rows()  # made before the forks
    rng = random.Random(kind)
    for trial in range(int(kills)):
        acknowledged = kill_one(WORK[kind], Path(root) / f"run-{trial}", rng.uniform(0, float(longest)))
        print(acknowledged, flush=True)


# The promise ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    acknowledged: int  # the last step that was promised
    steps: list[int]  # that are in the file, in its order
    losses: dict[int, float]

    @property
    def lost(self) -> int:
        """How many steps were promised and are not there, or not with their loss."""
        there = {step for step in self.steps if self.losses.get(step) == loss_of(step)}
        return sum(step not in there for step in range(self.acknowledged + 1))


def killed(kind: str, root: Path, kills: int, longest_seconds: float) -> list[Outcome]:
    command = [sys.executable, "-m", "tests.test_crash", kind, str(root), str(kills), str(longest_seconds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False)
    assert done.returncode == 0, done.stderr
    outcomes = []
    for trial, line in enumerate(done.stdout.splitlines()):
        history = open_run(root / f"run-{trial}").history
        losses = dict(zip(*(array.tolist() for array in history.scalar("loss")), strict=True))
        outcomes.append(Outcome(int(line), history.steps.tolist(), losses))
    assert len(outcomes) == kills
    return outcomes


def broken(outcomes: list[Outcome]) -> list[str]:
    """Where the promise does not hold: a step lost, or steps that are not 0, 1, 2, ... as they were taken."""
    lost = [f"{outcome.lost} of {outcome.acknowledged + 1} steps lost" for outcome in outcomes if outcome.lost]
    return lost + [str(o.steps) for o in outcomes if o.steps != list(range(len(o.steps)))]


def test_no_acknowledged_step_is_lost_in_two_hundred_kills(tmp_path: Path) -> None:
    """P12: 200 SIGKILLs of a process that writes a journal: 0 acknowledged lost, 0 unreadable."""
    outcomes = killed("journal", tmp_path, kills=200, longest_seconds=0.03)
    assert broken(outcomes) == []
    assert len({outcome.acknowledged for outcome in outcomes}) > 20  # they did die at different steps


def test_what_is_left_of_a_killed_writer_is_exactly_what_it_wrote(tmp_path: Path) -> None:
    """P12: not only the steps: every number of every record."""
    killed("journal", tmp_path, kills=3, longest_seconds=0.05)
    for trial in range(3):
        entries: list[Entry] = list(JournalReader(tmp_path / f"run-{trial}" / "rank-0.journal").read())
        for step, entry in enumerate(entries):
            assert isinstance(entry, Record)
            found, truth = entry.rows["gradient"], sixty_rows()[step % 60]
            assert found.layers == truth.layers and np.array_equal(found.rows.values, truth.rows.values)


def test_a_buffer_of_32_kib_loses_steps(tmp_path: Path) -> None:
    """P12: the planted fault: the same check finds the loss in nearly every kill."""
    outcomes = killed("buffered", tmp_path, kills=20, longest_seconds=0.03)
    assert len(broken(outcomes)) > 10


def test_a_killed_training_keeps_every_flushed_step(tmp_path: Path) -> None:
    """P12: 12 kills of a watched training, values logged after the step included."""
    outcomes = killed("training", tmp_path, kills=12, longest_seconds=0.2)
    assert broken(outcomes) == []
    assert all(open_run(path).state == "running" for path in tmp_path.iterdir())  # for as long as it is fresh


@pytest.mark.gauntlet
def test_no_flushed_step_of_two_hundred_killed_trainings_is_lost(tmp_path: Path) -> None:
    """P12: 200 SIGKILLs of a watched training: 0 acknowledged lost, 0 unreadable."""
    assert broken(killed("training", tmp_path, kills=200, longest_seconds=0.5)) == []


if __name__ == "__main__":
    serve(*sys.argv[1:])
