"""P14: forked and spawned workers; P15: however a process ends, promptly and truthfully."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import holter

ROOT = Path(__file__).parents[1]


def _start(run: Path | str, ending: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.training_script", str(run), ending]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def _train(run: Path | str, ending: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    process = _start(run, ending)
    output, errors = process.communicate(timeout=110)
    return process.returncode, output, errors


def _train_with_and_without(run: Path, ending: str) -> list[tuple[int, str, str]]:
    processes = [_start(run, ending), _start("none", ending)]
    told = [process.communicate(timeout=110) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, told, strict=True)]


@pytest.mark.parametrize(
    ("ending", "state", "error"),
    [
        ("close", "finished", ""),
        ("normal", "ended", ""),
        ("exit 3", "ended", ""),
        ("exception", "failed", "RuntimeError"),
        ("with, exception", "failed", "RuntimeError"),
        ("SIGINT", "interrupted", ""),
        ("raw fork", "ended", ""),
    ],
)
def test_a_run_tells_truthfully_how_it_ended(tmp_path: Path, ending: str, state: str, error: str) -> None:
    """P15: exit code and traceback are those of the same program without a monitor; every step is there."""
    watched, plain = _train_with_and_without(tmp_path / "run", ending)
    assert watched == plain
    stored = holter.open_run(tmp_path / "run")
    assert stored.ending is not None
    assert (stored.state, stored.ending.error) == (state, error)
    assert stored.history.steps.tolist() == list(range(20))
    assert len(stored.history.scalar("loss")[1]) == 20
    kept = b"".join(file.read_bytes() for file in (tmp_path / "run").iterdir())
    assert b"the loss is not what it was" not in kept


def test_a_terminated_process_dies_at_once_and_counts_as_crashed(tmp_path: Path) -> None:
    """P15: no signal handler of ours stands in the way; what was flushed is there; a stale heartbeat is a crash."""
    watched, plain = _train_with_and_without(tmp_path / "run", "SIGTERM")
    assert watched == plain and watched[0] == -15
    stored = holter.open_run(tmp_path / "run")
    assert stored.history.steps.tolist() == list(range(20))
    assert stored.state == "running", "nobody can know yet"
    long_ago = time.time() - 3600
    os.utime(tmp_path / "run" / "rank-0.journal", (long_ago, long_ago))
    assert holter.open_run(tmp_path / "run").state == "crashed"


def test_a_black_holed_sink_does_not_keep_a_process_alive(tmp_path: Path) -> None:
    """P15: close() within 2 seconds, and the process ends although the sink hangs for ever."""
    code, output, errors = _train(tmp_path / "run", "black hole")
    assert code == 0, errors
    seconds = re.search(r"closed after ([\d.]+)", output)
    assert seconds is not None and float(seconds[1]) <= 2.0
    assert holter.open_run(tmp_path / "run").state == "finished"


def _children_wrote_nothing(run: Path) -> bool:
    stored = holter.open_run(run)
    files = sorted(file.name for file in run.iterdir())
    return "from_a_child" not in stored.history.scalars and files == ["rank-0.journal", "run.json"]


@pytest.mark.parametrize("start", ["fork", "forkserver", "spawn"])
def test_loader_workers_neither_hang_nor_write(tmp_path: Path, start: str) -> None:
    """P14: workers that collect garbage, and forked ones that call the inherited monitor: nothing of it is kept."""
    code, _, errors = _train(tmp_path / "run", start)
    assert code == 0, errors
    stored = holter.open_run(tmp_path / "run")
    assert stored.state == "ended" and stored.unreadable_bytes == 0
    assert stored.history.steps.tolist() == list(range(16))
    assert _children_wrote_nothing(tmp_path / "run")


def test_a_child_that_writes_would_be_seen(tmp_path: Path) -> None:
    """P14, planted fault: forked workers that go past the check for the process and write."""
    code, _, errors = _train(tmp_path / "run", "fork, and write")
    assert code == 0, errors
    assert not _children_wrote_nothing(tmp_path / "run")


def test_records_of_a_model_that_is_gone_still_reach_the_file(tmp_path: Path) -> None:
    """P15: the model dies with its function while a slow disk still has much to do; the exit waits for it."""
    script = f"""
import time, torch, holter
from holter.journal import Journal
honest = Journal.append
Journal.append = lambda self, entry: (time.sleep(0.01), honest(self, entry))[1]
def train():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    holter.watch(model, optimizer, run={str(tmp_path / "run")!r})
    for _ in range(50):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
train()
"""
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)
    stored = holter.open_run(tmp_path / "run")
    assert len(stored.history) == 50 and stored.state == "ended"
