"""watch(): a monitor for one training, as the user asked for it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from holter.alerts import Alert
from holter.monitor import Monitor
from holter.random_state import random_state_kept
from holter.selection import Asked
from holter.settings import Settings, check_sinks, make_alerts
from holter.sinks import Sink


@random_state_kept()
def watch(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    run: str | os.PathLike[str] | bool | None = None,
    layers: Asked | None = None,
    every: int = 1,
    weights: int | None = 100,
    updates: int | None = 10,
    optimizer_state: int | None = 10,
    activations: int | None = 100,
    histograms: int | Mapping[str, int | None] | None = 100,
    stages: bool = True,
    machine: bool = True,
    scaler: Any | None = None,
    scheduler: Any | None = None,
    total_steps: int | None = None,
    budget: float | None = 0.01,
    sinks: Sequence[Sink | str] = (),
    alerts: Sequence[str | Alert] = (),
    diagnose: bool = True,
    stop_on: str | None = None,
    patience: int | None = None,
) -> Monitor:
    """Records every training step of this model from now on, in the directory `run` (False: in memory).

    Gradients are measured every `every` steps, the others every so many, None for never, within `budget`: the share of
    the time that monitoring may take (None: no limit, 0: scalars only). `layers` selects by patterns ("h.*.attn.*") or
    a function of name and parameter or module. `scaler` shows skipped steps, `scheduler` and `total_steps` the plan.
    `sinks` get records and findings, `alerts` ("slack://...", see `Alert`) findings, from rank 0. `diagnose` finds what
    is wrong; `stop_on` "critical" or "warning" makes `Monitor.log` raise; for `patience` see `Monitor.should_stop`.

    >>> import holter, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with holter.watch(model, optimizer, run=False) as monitor:
    ...     model(torch.ones(4, 2)).sum().backward()
    ...     optimizer.step()
    >>> len(monitor.history)
    1
    """
    paces = every, weights, updates, optimizer_state, activations, histograms
    settings = Settings(*paces, budget, total_steps, layers, stages, machine, diagnose, stop_on, patience)
    shown = [*check_sinks(sinks), *make_alerts(alerts, settings)]
    return Monitor(model, optimizer, settings, run=run, scaler=scaler, scheduler=scheduler, sinks=shown)
