"""The order in which modules run: that of their calls, whatever the order in which they were registered."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holter
from holter.execution import ASSUMED, in_order
from holter.history import History
from holter.record import EXECUTION_ORDER, LayerRows, Record
from holter.statistics.rows import COLUMNS, Rows
from tests.models import Training, make, mlp

ROOT = Path(__file__).parents[1]


class Backwards(nn.Module):
    """Registers its output first and its input last; one layer is used twice, one never."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 3)
        self.idle = nn.Linear(2, 2)
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.inp = nn.Linear(4, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in (*reversed(self.body), self.body[2]):
            x = block(x)
        return self.head(x) * self.scale  # type: ignore[no-any-return]


RUNS = ["", "inp", "body.2", "body.2.0", "body.2.1", "body.1", "body.1.0", "body.1.1"]
RUNS += ["body.0", "body.0.0", "body.0.1", "head"]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor | None = None) -> None:
    model(torch.randn(5, 4) if x is None else x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def watched(model: nn.Module, x: Tensor | None = None, steps: int = 1, **more: Any) -> holter.Monitor:
    optimizer = sgd(model)
    monitor = holter.watch(model, optimizer, run=False, budget=None, **more)
    for _ in range(steps):
        step(model, optimizer, x)
    return monitor


def order_of(depth: Any) -> list[str]:
    return sorted(depth, key=depth.__getitem__)


def notes(monitor: holter.Monitor, name: str = EXECUTION_ORDER) -> dict[int, str]:
    return {record.step: record.notes[name] for record in monitor.history.records if name in record.notes}


# What runs when -------------------------------------------------------------------------------------------------


def test_modules_come_in_the_order_of_their_first_call() -> None:
    depth = watched(Backwards()).history.depth
    assert [name for name in order_of(depth) if not name.endswith(("weight", "bias", "scale"))] == RUNS
    assert sorted(depth.values()) == list(range(len(depth)))


def test_registration_order_would_be_found() -> None:
    """Planted fault: what torch lists."""
    assert [name for name, _ in Backwards().named_modules() if name in RUNS] != RUNS


def test_parameters_come_with_their_module_and_the_layers_of_a_history_in_that_order() -> None:
    monitor = watched(Backwards(), weights=1)
    expected = ["inp", "body.2.0", "body.1.0", "body.0.0", "head"]
    assert monitor.history.layers("gradient") == (
        *("scale",),
        *(f"{name}.{kind}" for name in expected for kind in ("weight", "bias")),
    )
    _, layers, norms = monitor.history.series("weight", "norm")
    assert norms[0, layers.index("scale")] == 1.0  # columns follow their names
    assert [layer for layer in monitor.history.layers("activation") if layer in RUNS] == [
        name for name in RUNS if name in monitor.history.layers("activation")
    ]


def test_what_was_not_seen_to_run_follows_its_neighbour_and_is_told() -> None:
    monitor = watched(Backwards())
    order = order_of(monitor.history.depth)
    assert order[order.index("head.bias") + 1 :] == ["idle.weight", "idle.bias"]
    assert notes(monitor, ASSUMED) == {0: "2 parameters, whose modules were not seen to run, follow their neighbours"}


def test_torchs_attention_whose_projection_is_never_called_stays_in_its_block() -> None:
    training = make("transformer+dropout")
    training.monitor = holter.watch(training.model, training.optimizer, run=False, budget=None)
    training.step()
    layers = [name for name in order_of(training.monitor.history.depth) if name.endswith("weight")]
    block = ["self_attn.in_proj_weight", "self_attn.out_proj.weight", "norm1.weight", "linear1.weight"]
    block += ["linear2.weight", "norm2.weight"]  # the first norm runs before the feed-forward part
    assert layers == [*(f"body.layers.{place}.{name}" for place in range(2) for name in block), "out.weight"]


class Tied(nn.Module):
    """The weight of the embedding is registered, and named, as that of the output."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)
        self.middle = nn.Linear(4, 4)
        self.wte = nn.Embedding(9, 4)
        self.wte.weight = self.head.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.wte(x)))  # type: ignore[no-any-return]


def test_a_tied_parameter_is_where_it_is_used_first(tmp_path: Path) -> None:
    model = Tied()
    optimizer = sgd(model)
    with holter.watch(model, optimizer, run=tmp_path / "run") as monitor:
        step(model, optimizer, torch.arange(9))
    assert order_of(monitor.history.depth) == [
        *("", "wte", "head.weight", "middle", "middle.weight", "middle.bias", "head")
    ]
    tied = {layer["name"]: layer.get("tied_to") for layer in holter.open_run(tmp_path / "run").layers}
    assert tied == {"head.weight": ["wte.weight"], "middle.weight": None, "middle.bias": None}


def test_a_model_of_one_layer_and_one_that_holds_itself() -> None:
    assert order_of(watched(nn.Linear(4, 2)).history.depth) == ["", "weight", "bias"]
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].parent = model
    assert order_of(watched(model).history.depth) == ["", "0", "0.weight", "0.bias"]


def test_in_order_is_pure() -> None:
    assert in_order(mlp(), ["", "3", "0"]) == (["", "3", "3.weight", "3.bias", "0", "0.weight", "0.bias"], 0)
    assert in_order(mlp(), ["", "3"]) == (["0.weight", "0.bias", "", "3", "3.weight", "3.bias"], 2)


# Once, and again when the model changes ---------------------------------------------------------------------------


def test_it_is_told_once_with_the_first_step_and_seen_in_all_of_its_forwards() -> None:
    class Turns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.calls = nn.Linear(4, 4), nn.Linear(4, 4), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return (self.second if self.calls % 2 else self.first)(x)  # type: ignore[no-any-return]

    model = Turns()
    optimizer = sgd(model)
    monitor = holter.watch(model, optimizer, run=False)
    model(torch.randn(5, 4)).sum().backward()  # a micro-batch
    for _ in range(3):
        step(model, optimizer)
    assert list(notes(monitor)) == [0] and notes(monitor, ASSUMED) == {}
    assert [name for name in order_of(monitor.history.depth) if "." not in name] == ["", "second", "first"]


def test_evaluation_before_the_first_step_is_not_looked_at() -> None:
    model = Backwards()
    optimizer = sgd(model)
    monitor = holter.watch(model, optimizer, run=False)
    with torch.no_grad():
        model.idle(torch.ones(1, 2))
        model(torch.randn(5, 4))
    step(model, optimizer)
    assert "idle" not in monitor.history.depth and "inp" in monitor.history.depth


def test_a_model_that_changes_is_looked_at_again() -> None:
    """P26: and one whose parameters are only replaced, under the same names, is not."""
    model = mlp()
    optimizer = sgd(model)
    monitor = holter.watch(model, optimizer, run=False, budget=None)
    x = torch.randn(5, 12)
    for _ in range(2):
        step(model, optimizer, x)
    model.append(nn.Linear(4, 4))
    optimizer.add_param_group({"params": model[-1].parameters()})
    for _ in range(3):
        step(model, optimizer, x)
    model[-1].weight = nn.Parameter(torch.eye(4))
    for _ in range(2):
        step(model, optimizer, x)
    assert list(notes(monitor)) == [0, 3]
    assert order_of(monitor.history.depth)[-3:] == ["4", "4.weight", "4.bias"]


def test_a_new_segment_tells_it_again(tmp_path: Path) -> None:
    """So that the line that survived knows it, also where all that came before was taken back."""
    model = Backwards()
    optimizer = sgd(model)
    with holter.watch(model, optimizer, run=tmp_path / "run") as monitor:
        step(model, optimizer)
        monitor.load_state_dict({"step": 0})
        step(model, optimizer)
    run = holter.open_run(tmp_path / "run")
    assert run.history.latest().depth == run.depth and len(run.depth) > len(RUNS)


def test_a_step_that_raised_leaves_no_hooks_and_the_next_one_is_looked_at() -> None:
    model = Backwards()
    optimizer = sgd(model)
    monitor = holter.watch(model, optimizer, run=False)
    with pytest.raises(RuntimeError):
        model(torch.randn(5, 3))
    step(model, optimizer)
    assert [name for name in order_of(monitor.history.depth) if name in RUNS] == RUNS


# What is kept -----------------------------------------------------------------------------------------------------


def test_it_survives_a_kill(tmp_path: Path) -> None:
    """P12: it is in the record of the first step, not in a file that is written at the end."""
    script = f"""
import os, signal, torch, holter
from tests.test_execution import Backwards, sgd, step
model = Backwards()
optimizer = sgd(model)
monitor = holter.watch(model, optimizer, run={str(tmp_path / "run")!r})
step(model, optimizer)
monitor.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=100)
    assert done.returncode == -signal.SIGKILL and os.listdir(tmp_path / "run")
    assert [name for name in order_of(holter.open_run(tmp_path / "run").depth) if name in RUNS] == RUNS


def _rows(*layers: str) -> LayerRows:
    return LayerRows(layers, Rows(np.zeros((len(layers), len(COLUMNS)))))


@pytest.mark.parametrize("note", [None, "not observed: the model is compiled", "[1, 2]", "{}", "[" * 100_000, "[]"])
def test_runs_that_do_not_know_it_have_no_depth_and_keep_the_order_of_first_sight(note: str | None) -> None:
    """Runs of before it was recorded, and damaged ones."""
    told = {} if note is None else {EXECUTION_ORDER: note}
    records = [Record(0, 0.0, rows={"gradient": _rows("b", "a")}, notes=told), Record(1, 0.0)]
    history = History([*records, Record(2, 0.0, rows={"gradient": _rows("c", "a")})])
    assert history.depth == {} and history.layers("gradient") == ("b", "a", "c")


def test_layers_that_the_order_does_not_name_stay_behind_the_one_they_followed() -> None:
    order = Record(0, 0.0, rows={"gradient": _rows("x", "b", "y", "a")}, notes={EXECUTION_ORDER: '["a", "b"]'})
    assert History([order]).layers("gradient") == ("x", "a", "b", "y")


def test_the_order_that_was_seen_last_counts() -> None:
    records = [Record(n, 0.0, notes={EXECUTION_ORDER: text}) for n, text in enumerate(['["a"]', '["b", "a"]'])]
    assert History([*records, Record(2, 0.0)]).depth == {"b": 0, "a": 1}


def test_a_training_of_the_promise_tests_knows_its_depth(tmp_path: Path) -> None:
    training: Training = make("cnn+bn")
    with holter.watch(training.model, training.optimizer, run=tmp_path / "run") as training.monitor:
        training.step()
        live = training.monitor.history.depth
    run = holter.open_run(tmp_path / "run")
    assert run.depth == live and [layer["name"] for layer in run.layers] == [
        n for n in order_of(live) if ".w" in n or ".b" in n
    ]
