"""What is told in several places of one run is told in words that agree, or that say what differs."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import holter
from holter.run import open_run
from holter.words import share
from tests.test_cli import call

STEPS = 40


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training in bfloat16 whose rate is too low for it."""
    path = tmp_path_factory.mktemp("half") / "run"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)
    with holter.watch(model, optimizer, run=path, budget=None) as monitor:
        for _ in range(STEPS):
            x = torch.randn(64, 32).bfloat16()
            loss = nn.functional.cross_entropy(model(x).float(), x[:, :8].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
    return path


def test_each_share_of_unchanged_weights_says_of_what_it_is(half: Path) -> None:
    """The finding: of all weights, at a step that it names. The signs: the median over the run, by layer."""
    history = open_run(half).history
    steps, layers, unchanged = history.series("update", "unchanged")
    (found,) = [one for one in open_run(half).findings if one.cause == "bf16-update-lost"]
    told = re.search(
        r"^(.*) of all half-precision weights that had a gradient kept their bits at step (\d+)", found.advice
    )
    assert told, found.advice
    sizes = np.array([32 * 64, 64, 64 * 8, 8])[
        [("0.weight", "0.bias", "2.weight", "2.bias").index(one) for one in layers]
    ]
    at = unchanged[steps.tolist().index(int(told[2]))]
    assert abs(float(at @ sizes / sizes.sum()) - float(told[1].removesuffix(" %")) / 100) < 0.02
    shown = " ".join(call("show", half).output.split())
    medians = np.median(unchanged, axis=0)
    lowest = share(float(medians[[layer.endswith("weight") for layer in layers]].min()))
    assert re.search(
        r"in the median [\d.]+ to [\d.]+ %, by layer, of the weights with a gradient keep their bits", shown
    )
    assert f"in the median {lowest.removesuffix(' %')}" in shown


def test_the_time_after_the_forward_is_not_called_backward_alone(half: Path) -> None:
    """It holds the loss, and whatever else there is up to the optimizer's step."""
    for command in (("show",), ("top", "--once")):
        told = re.findall(r"(?:\w+ and )?backward", " ".join(call(*command, half).output.split()))
        assert told == ["loss and backward"], command
