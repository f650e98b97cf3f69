"""What a stalled disk costs a training step (P16): python -m benchmarks.stall [--steps N]

The same small training with a healthy writer and with one whose every write hangs, with watch() as it comes and with
rows at every step. Shown is what Holter takes of the training thread in a step; it must not grow with the stall. A run
spends a second in advance to see its beginning well: --skip leaves those steps out, and 0 leaves none. The promise is
p99.9 <= 1 ms for watch() as it comes.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

import holter
from benchmarks.watched import thread_seconds
from holter.journal import Journal

SKIP = 6000  # steps in which the advance of a run is spent: what follows is how it goes on


def own_milliseconds(steps: int, run: Path, budget: float | None, skip: int = SKIP) -> tuple[np.ndarray, int]:
    """Holter's part of every step on the training thread, and how many records were dropped."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = holter.watch(model, optimizer, run=run, budget=budget)
    taken = []
    for _ in range(skip + steps):
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        before = thread_seconds(monitor)
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
        taken.append(thread_seconds(monitor) - before)
    dropped = monitor.dropped
    monitor.close()
    return 1e3 * np.array(taken[skip:]), dropped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--skip", type=int, default=SKIP, help=f"steps before those (default {SKIP})")
    arguments = parser.parse_args()
    gate = threading.Event()
    with tempfile.TemporaryDirectory() as directory:
        for name, append, budget in (
            ("as it comes, healthy disk", Journal.append, 0.01),
            ("as it comes, stalled disk", lambda *_: gate.wait(), 0.01),
            ("rows every step, healthy disk", Journal.append, None),
            ("rows every step, stalled disk", lambda *_: gate.wait(), None),
        ):
            with mock.patch.object(Journal, "append", append):
                taken, dropped = own_milliseconds(arguments.steps, Path(directory) / name, budget, arguments.skip)
            p50, p99, p999 = np.quantile(taken, [0.5, 0.99, 0.999])
            print(f"{name}: p50 {p50:.3f} ms, p99 {p99:.3f} ms, p99.9 {p999:.3f} ms, {dropped:,} records dropped")
    gate.set()


if __name__ == "__main__":
    main()
