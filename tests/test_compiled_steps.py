"""Dynamo leaves Holter's hooks alone: where a step is compiled it captures what it captures of a bare training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import holter

STEPS = 4
Captured = dict[str, int]


def trained(kind: str, watched: bool) -> tuple[list[Tensor], Captured, holter.Monitor | None]:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(16, 8)
    options: dict[str, Any] = {"run": False, "machine": False, "diagnose": False, "budget": None}
    if kind == "model in place":  # of torch's own classes: torch compiles it only if it bears hooks
        model.compile(backend="eager")
    monitor = holter.watch(model, optimizer, **options) if watched else None
    step: Callable[[], Any] = optimizer.step

    def whole() -> None:
        model(inputs).square().mean().backward()
        step()
        optimizer.zero_grad()

    if kind == "whole step":
        whole = torch.compile(whole, backend="eager")
    elif kind == "optimizer":
        step = torch.compile(optimizer.step, backend="eager")
    for _ in range(STEPS):
        whole()
    if monitor is not None:
        monitor.close()
    return [weight.detach() for weight in model.parameters()], dict(counters["stats"]), monitor


@pytest.mark.filterwarnings("ignore")  # Dynamo warns of much
@pytest.mark.parametrize("kind", ["optimizer", "whole step", "model in place"])
def test_a_compiled_step_is_traced_as_if_nobody_watched(kind: str) -> None:
    weights, captured, _ = trained(kind, watched=False)
    again, captured_again, monitor = trained(kind, watched=True)
    assert all(map(torch.equal, weights, again))
    assert (captured.get("calls_captured", 0) > 0) == (kind != "model in place") and captured_again == captured
    assert monitor is not None and monitor.step == STEPS and not monitor.findings
    steps, _, norms = monitor.history.series("gradient", "norm")
    assert steps.tolist() == list(range(STEPS)) and (norms > 0).all()


def test_a_step_that_raised_is_forgotten_by_the_next() -> None:
    """The frame of a step is found through Dynamo's wrappers: one that raised is off the stack."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def refuse() -> float:
        raise ValueError

    with holter.watch(model, optimizer, run=False, machine=False, diagnose=False) as monitor:
        for closure in (refuse, None, refuse, None):
            model(torch.ones(1, 2)).sum().backward()
            if closure is None:
                optimizer.step()
                continue
            with pytest.raises(ValueError):
                optimizer.step(closure)
        assert monitor.step == 2 and not monitor.findings
