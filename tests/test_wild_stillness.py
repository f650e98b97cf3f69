"""A training in which no weight ever moves, since every gradient is gone by the time the optimizer looks for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import odd_trainings as wild
from tests.odd_trainings import Training, alarms


def course(
    step: Callable[[torch.optim.Optimizer, torch.Tensor], None], margin: float | None = None, **options: float
) -> Training:
    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model = wild.mlp(8, 32, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, **options)  # type: ignore[arg-type]

        def steps() -> Iterator[wild.Logged]:
            while True:
                x = torch.randn(32, 8)
                y = x[:, :4].argmax(1)
                loss = F.cross_entropy(model(x), y)
                if margin is not None:
                    loss = F.relu(loss - margin)
                step(optimizer, loss)
                yield {"loss": loss, "inputs": x, "targets": y}

        return model, optimizer, steps()

    return begin


def cleared_too_soon(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.zero_grad()
    optimizer.step()


def zeroed_too_soon(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    loss.backward()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


def by_hand(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    """Random search: weights move, and no gradient is ever asked for."""
    optimizer.step()
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))


def rightly(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize(("step", "steps"), [(cleared_too_soon, 110), (zeroed_too_soon, 40)])
def test_gradients_that_are_cleared_before_the_step_are_named(
    step: Callable[[torch.optim.Optimizer, torch.Tensor], None], steps: int
) -> None:
    found = [one for one in wild.findings(course(step), steps) if one.severity == "critical"]
    assert [(one.cause, one.where, one.since, one.until) for one in found] == [("graph-detached", "loop", 0, None)]
    assert "zero_grad()" in found[0].advice


@pytest.mark.parametrize(
    ("training", "steps"),
    [(course(rightly), 40), (course(by_hand), 110), (course(rightly, margin=100.0), 40)],
    ids=["gradients that are there", "weights that move without", "a loss of zero, which asks for nothing"],
)
def test_what_moves_or_need_not_is_left_alone(training: Training, steps: int) -> None:
    assert "graph-detached" not in alarms(training, steps)
