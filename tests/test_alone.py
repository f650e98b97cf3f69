"""The thread that makes records computes alone, and nobody else notices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads as Linux lists them")

TRAINING = """
import os, sys, threading, torch, holter
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
assert {"activation", "second_moment"} <= set(list(holter.open_run(sys.argv[1]).records)[-1].rows)
print(before, begun, threads())
"""

THREADS = """
import threading, torch
from holter.alone import compute_alone
torch.set_num_threads(2)
said = []
def alone():
    compute_alone()
    said.append(torch.get_num_threads())
for work in (alone, lambda: said.append(torch.get_num_threads())):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
print(*said, torch.get_num_threads())
"""


def numbers(program: str, *arguments: str) -> list[int]:
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.split()]


def test_measuring_begins_no_thread_of_torchs(tmp_path: Path) -> None:
    """Those of the training would sleep after every operation as long as it is there."""
    before, begun, after = numbers(TRAINING, str(tmp_path / "run"))
    assert before < begun == after


def test_no_other_thread_computes_alone() -> None:
    """P2: neither the training's, nor one that is begun later."""
    assert numbers(THREADS) == [1, 2, 2]
