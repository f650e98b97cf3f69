"""What Holter takes of the training thread where a model has very many small parameters."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holter
from benchmarks.figures import Spread, spread
from benchmarks.models import Branches
from benchmarks.turns import told
from benchmarks.watched import EVERY_STEP, thread_seconds

VARIANTS: dict[str, dict[str, Any]] = {"watch()": {}, "watch(every=1, budget=None)": EVERY_STEP}
_WARM_UP = 2  # steps that are not counted: the first one measures weights and histograms and builds tables


@dataclass(frozen=True)
class PythonCost:
    device: str
    variant: str
    parameters: int
    first_step_ms: float | None = None
    own_ms: Spread | None = None  # an ordinary step, whose gradients were not measured, on the training thread
    measured_own_ms: Spread | None = None  # the same, of steps whose gradients were measured
    step_ms: Spread | None = None  # the whole step, Holter's part in it
    rows_share: float | None = None  # of the steps whose gradients were measured
    monitor_cost: float | None = None
    dropped: int | None = None
    error: str | None = None


def measure(variant: str, device: torch.device, parameters: int, steps: int) -> PythonCost:
    try:
        return _measure(variant, device, parameters, steps)
    except Exception as error:
        return PythonCost(device.type, variant, parameters, error=told(f"{variant} on {device.type}", error))


def _measure(variant: str, device: torch.device, parameters: int, steps: int) -> PythonCost:
    model = Branches(parameters).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)
    with ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        monitor = stack.enter_context(holter.watch(model, optimizer, run=run, **VARIANTS[variant]))
        own = _own_milliseconds(model, optimizer, monitor, _WARM_UP + steps)
        monitor.flush(30.0)
        measured = {int(step) for step in monitor.history.series("gradient", "norm")[0]}
        whole = 1e3 * np.asarray(monitor.history.scalar("step_time")[1])
        counted = range(_WARM_UP, _WARM_UP + steps)
        return PythonCost(
            device=device.type,
            variant=variant,
            parameters=sum(1 for _ in model.parameters()),
            first_step_ms=own[0],
            own_ms=spread(own[step] for step in counted if step not in measured),
            measured_own_ms=spread(own[step] for step in counted if step in measured),
            step_ms=spread(whole[_WARM_UP:]),
            rows_share=sum(step in measured for step in counted) / steps,
            monitor_cost=monitor.cost,
            dropped=monitor.dropped,
        )


def _own_milliseconds(
    model: Branches, optimizer: torch.optim.Optimizer, monitor: holter.Monitor, steps: int
) -> list[float]:
    x = torch.randn(8, 4, device=next(model.parameters()).device)
    own = []
    for _ in range(steps):
        before = thread_seconds(monitor)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
        own.append(1e3 * (thread_seconds(monitor) - before))
    return own
