"""A training in a process of its own, for tests that end it: python training_script.py RUN|none ENDING."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import warnings

import torch

import holter
from holter.record import Record
from tests.models import mlp


class BlackHole:
    """A sink that never comes back."""

    def write(self, record: object) -> None:
        threading.Event().wait()

    def alert(self, finding: object) -> None:
        threading.Event().wait()

    def close(self) -> None:
        threading.Event().wait()


class Items(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Its workers do all they can to disturb a monitor that they inherited."""

    def __init__(self, ending: str) -> None:
        self.ending = ending

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.ending == "fork" and MONITOR is not None:
            MONITOR.log(from_a_child=1.0)
            MONITOR.flush()
            MONITOR.close()
        if self.ending == "fork, and write" and MONITOR is not None:
            MONITOR._writer._close_journal()
            MONITOR._writer._append(Record(0, 0.0, {"from_a_child": 1.0}))
        if index % 8 == 0:  # a look through all of torch's objects is long
            gc.collect()
        return torch.full((12,), float(index))


MONITOR: holter.Monitor | None = None


def main(run: str, ending: str) -> None:
    global MONITOR
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is born with it ignored
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sinks = [BlackHole()] if ending == "black hole" else []
    if run != "none":
        MONITOR = holter.watch(model, optimizer, run=run, sinks=sinks, budget=None)
    loader: object = [torch.randn(4, 12) for _ in range(20)]
    if ending.startswith(("fork", "spawn")):
        start = ending.partition(",")[0]
        loader = torch.utils.data.DataLoader(Items(ending), batch_size=4, num_workers=2, multiprocessing_context=start)
    for batch in loader:  # type: ignore[attr-defined]
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if MONITOR is not None:
            MONITOR.log(loss=loss)
    end(ending)


def end(ending: str) -> None:
    if ending == "exception":
        raise RuntimeError("the loss is not what it was")
    if ending == "with, exception":
        with MONITOR or contextlib.nullcontext():
            raise RuntimeError("the loss is not what it was")
    if ending == "exit 3":
        sys.exit(3)
    if ending == "close" and MONITOR is not None:
        MONITOR.close()
    if ending == "black hole" and MONITOR is not None:
        started = time.monotonic()
        MONITOR.close()
        print(f"closed after {time.monotonic() - started:.3f}")
    if ending == "raw fork":
        warnings.simplefilter("ignore")  # Python 3.12+ warns of every fork with threads around
        if os.fork() == 0:
            sys.exit(0)  # runs the inherited exit handlers
        os.wait()
    if ending in ("SIGINT", "SIGTERM"):
        if MONITOR is not None:
            MONITOR.flush()
        print("ready", flush=True)
        os.kill(os.getpid(), getattr(signal, ending))
        time.sleep(30)


if __name__ == "__main__":
    main(*sys.argv[1:])
