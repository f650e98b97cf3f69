"""Torch's arithmetic off the training thread: no thread of torch's outlives it, and its time is counted."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from holter.apart import apart, seconds_apart
from holter.background import Background


def test_what_is_made_comes_back_and_what_is_raised_is_raised() -> None:
    assert apart(lambda: threading.current_thread().name) == "holter-apart"
    for error in (ValueError("no"), SystemExit(3)):

        def fail(error: BaseException = error) -> None:
            raise error

        with pytest.raises(type(error)):
            apart(fail)


def test_its_processor_time_counts_for_the_thread_that_waited() -> None:
    def busy() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    before = seconds_apart()
    worker: Background[None] = Background(lambda _: apart(busy), lambda error: None, name="waits")
    worker.post(None)
    assert worker.flush(60)
    assert worker.close(60) == 0 and worker.seconds >= 0.05
    assert seconds_apart() == before, "another thread's"


def test_where_no_thread_can_be_begun_it_is_done_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the interpreter ends."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert apart(lambda: threading.current_thread() is threading.main_thread())


TRAINING = """
import os, sys, time, torch, holter
from torch import nn
torch.set_num_threads(2)
def threads():
    return len(os.listdir("/proc/self/task"))
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
def step():
    optimizer.zero_grad()
    model(torch.randn(128, 256)).square().mean().backward()
    optimizer.step()
step()
before = threads()
monitor = holter.watch(model, optimizer, run=sys.argv[1], budget=None, activations=1, optimizer_state=1, machine=False)
begun = threads()
for _ in range(5):
    step()
assert monitor.flush(60)
record = list(holter.open_run(sys.argv[1]).records)[-1]
assert {"activation", "second_moment"} <= set(record.rows)
until = time.monotonic() + 20
while threads() > begun and time.monotonic() < until:  # they go a moment after what they were there for
    time.sleep(0.05)
print(before, begun, threads())
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux lists them")
def test_measuring_leaves_no_thread_of_torchs_behind(tmp_path: Path) -> None:
    """Those of the training would sleep after every operation as long as it is there."""
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(tmp_path / "run")], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    before, begun, after = map(int, done.stdout.split())
    assert before < begun == after
