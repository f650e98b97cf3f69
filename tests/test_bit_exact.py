"""P2: a training with a monitor is the same training, to the bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
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


SEEDED = """
import random, sys
import numpy as np, torch
{planted}
def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
random.seed(0), np.random.seed(0), torch.manual_seed(0)
before = states()
{entry}
sys.exit("the random state was changed" if states() != before else 0)
"""
STEP = "model(torch.ones(2, 2)).sum().backward(); optimizer.step(); monitor.log(loss=1.0, inputs=torch.ones(2, 2))"
WATCHED = f"""
import holter
monitor = holter.watch(model, optimizer, run={{run!r}}, sinks={{sinks!r}})
for _ in range(3):
    {STEP}
monitor.history, monitor.findings, monitor._repr_html_(), list(monitor.batches([1], progress=True))
monitor.close()
"""
ENTRIES = {
    "watch": (WATCHED, ()),
    "sinks": (WATCHED, ("console", "tensorboard")),
    "integrations": ("import holter.integrations.transformers, holter.integrations.accelerate", ()),
    "fine_tune": ("import holter; holter.fine_tune, holter.compare, holter.plot_gradient_flow", ()),
}


def leaves_random_states(entry: str, tmp_path: Path, planted: str = "") -> bool:
    """Whether a fresh process has the same random numbers to come: in this one all packages are loaded already."""
    words, sinks = ENTRIES[entry]
    script = SEEDED.format(planted=planted, entry=words.format(run=str(tmp_path / "run"), sinks=sinks))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode in (0, 1) and "Traceback" not in done.stderr, done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_is_loaded_draws_no_random_number_of_the_users(entry: str, tmp_path: Path) -> None:
    """P2: rich draws one as it is loaded."""
    assert leaves_random_states(entry, tmp_path)


def test_a_package_that_draws_as_it_is_loaded_is_found(tmp_path: Path) -> None:
    """P2, planted fault: states that are not put back."""
    planted = "import holter.random_state as own; own.random.setstate = lambda state: None"
    assert not leaves_random_states("watch", tmp_path, planted)
