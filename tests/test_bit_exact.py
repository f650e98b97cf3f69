"""P2: a training with a monitor is the same training, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import holter
from holter.collector import Collector
from holter.measuring import Measuring
from tests.models import MODELS, Training, differences, make

STEPS = 200


def _train(name: str, seed: int, watched: bool, steps: int = STEPS) -> tuple[Training, Any]:
    training = make(name, seed)
    if watched:
        # Everything at every step: what is not measured cannot disturb.
        training.monitor = holter.watch(
            training.model,
            training.optimizer,
            run=False,
            weights=1,
            histograms=1,
            budget=None,
            scaler=training.scaler,
        )
    for _ in range(steps):
        training.step()
    if training.monitor is not None:
        training.monitor.close()
    return training, training.monitor


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_watched_training_is_bit_equal_to_an_unwatched_one(name: str, seed: int) -> None:
    """P2: losses, weights, buffers, optimizer state and random state, hundreds of steps."""
    plain, _ = _train(name, seed, watched=False)
    watched, monitor = _train(name, seed, watched=True)
    assert differences(plain, watched) == []
    assert len(monitor.history) == STEPS
    assert [finding for finding in monitor.findings if finding.where == "monitor"] == []


def test_the_comparison_sees_a_monitor_that_draws_one_random_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2, planted fault: one torch.rand in the hot path."""
    honest = Collector.read_weights

    def draws(self: Collector) -> None:
        torch.rand(1)
        honest(self)

    monkeypatch.setattr(Collector, "read_weights", draws)
    plain, _ = _train("mlp", 0, watched=False, steps=5)
    watched, _ = _train("mlp", 0, watched=True, steps=5)
    assert "random state" in differences(plain, watched)


def test_the_comparison_sees_a_gradient_changed_in_its_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2, planted fault: a monitor that touches what it measures."""
    honest = Measuring.measure

    def touches(self: Measuring, kind: str, names: list[str], tensors: list[torch.Tensor], every: int) -> Any:
        rows = honest(self, kind, names, tensors, every)
        if kind.startswith("gradient"):
            for tensor in tensors:
                tensor.mul_(1 + 2**-23)
        return rows

    monkeypatch.setattr(Measuring, "measure", touches)
    plain, _ = _train("mlp", 0, watched=False, steps=5)
    watched, _ = _train("mlp", 0, watched=True, steps=5)
    assert "0.weight" in differences(plain, watched)
