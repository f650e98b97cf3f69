"""What a stalled disk costs a training step (P16): python -m benchmarks.stall [--seconds 60]

The same small training with a healthy writer and with one whose every write hangs, from the first step on, with watch()
as it comes and with rows at every step. Shown is what Holter takes of the training thread in a step; it must not grow
with the stall. The promise is p99.9 <= 1 ms of the steps of a stall of 60 s, for watch() as it comes.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import nn

import holter
from benchmarks.watched import thread_seconds
from holter.journal import Journal


def own_milliseconds(seconds: float, run: Path, budget: float | None) -> tuple[np.ndarray, int]:
    """Holter's part of every step on the training thread, and how many records were dropped."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = holter.watch(model, optimizer, run=run, budget=budget)
    taken = []
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        loss = model(torch.randn(32, 64)).square().mean()
        loss.backward()
        before = thread_seconds(monitor)
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
        taken.append(thread_seconds(monitor) - before)
    dropped = monitor.dropped
    monitor.close()
    return 1e3 * np.array(taken), dropped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each of the four trainings (default 60)")
    seconds = parser.parse_args().seconds
    gate = threading.Event()
    with tempfile.TemporaryDirectory() as directory:
        for name, append, budget in (
            ("as it comes, healthy disk", Journal.append, 0.01),
            ("as it comes, stalled disk", lambda *_: gate.wait(), 0.01),
            ("rows every step, healthy disk", Journal.append, None),
            ("rows every step, stalled disk", lambda *_: gate.wait(), None),
        ):
            with mock.patch.object(Journal, "append", append):
                taken, dropped = own_milliseconds(seconds, Path(directory) / name, budget)
            p50, p99, p999 = np.quantile(taken, [0.5, 0.99, 0.999])
            times = f"p50 {p50:.3f} ms, p99 {p99:.3f} ms, p99.9 {p999:.3f} ms"
            print(f"{name}: {len(taken):,} steps, {times}, {dropped:,} records dropped", flush=True)
    gate.set()


if __name__ == "__main__":
    main()
