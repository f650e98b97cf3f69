"""The dtype of activations is recorded: what a rule about precision goes by, under autocast and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import holter
from holter.diagnosis.chart import Chart, Moment
from holter.history import dtypes_in
from holter.record import ACTIVATION_DTYPES
from tests.armed import outputs_of
from tests.test_execution import notes


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.act, self.out = nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.act(self.norm(self.inp(x).float()))) * self.scale  # type: ignore[no-any-return]


def train(model: nn.Module, dtypes: list[torch.dtype | None], x: torch.Tensor | None = None) -> holter.Monitor:
    """A step for each of these dtypes of autocast."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = holter.watch(model, optimizer, run=False, budget=None, activations=1, machine=False)
    for dtype in dtypes:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            output = model(torch.randn(5, 4) if x is None else x)
        output.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return monitor


def chart_of(monitor: holter.Monitor) -> Chart:
    chart = Chart({})
    for record in monitor.history.records:
        chart.add(Moment(record.step, notes=dict(record.notes)))
    return chart


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_every_layer_has_the_dtype_in_which_it_ran(dtype: torch.dtype | None) -> None:
    chart = chart_of(train(Net(), [dtype]))
    reduced = str(dtype or torch.float32).removeprefix("torch.")
    expected = {"inp": reduced, "norm": "float32", "act": "float32", "out": reduced}
    assert {layer: chart.activation_dtype(layer) for layer in expected} == expected
    assert {name: chart.activation_dtype(f"{name}.weight") for name in ("inp", "norm", "out")} == {
        name: expected[name] for name in ("inp", "norm", "out")
    }
    assert chart.activation_dtype("scale") is None and chart.activation_dtype("elsewhere.weight") is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_model_of_one_dtype_computes_in_it(dtype: torch.dtype) -> None:
    model, x = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3)).to(dtype), torch.randn(5, 4, dtype=dtype)
    chart = chart_of(train(model, [None], x=x))
    assert {chart.activation_dtype(name) for name in ("0", "1", "1.weight")} == {str(dtype).removeprefix("torch.")}


def test_a_model_that_is_one_layer_has_its_own() -> None:
    assert chart_of(train(nn.Linear(4, 3), [torch.bfloat16])).activation_dtype("weight") == "bfloat16"


def test_a_parameter_without_a_call_of_its_own_is_of_the_layer_around_it() -> None:
    """The output projection of torch's attention is a module that is never called."""
    model = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    with outputs_of(model) as kept:
        chart = chart_of(train(model, [torch.bfloat16], x=torch.randn(2, 5, 4)))
    assert "self_attn" in kept and "self_attn.out_proj" not in kept
    assert chart.activation_dtype("self_attn.out_proj.weight") == chart.activation_dtype("self_attn") == "bfloat16"


def test_it_is_noted_once_and_again_when_it_changes() -> None:
    monitor = train(Net(), [None, None, torch.bfloat16, torch.bfloat16, None])
    assert list(notes(monitor, ACTIVATION_DTYPES)) == [0, 2, 4]
    assert chart_of(monitor).activation_dtype("out") == "float32"


def test_it_is_noted_again_after_a_resume_and_read_back_from_disk(tmp_path: Path) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = holter.watch(model, optimizer, run=tmp_path / "run", budget=None, activations=1, machine=False)
    for resumes in (False, True, False):
        if resumes:
            monitor.load_state_dict(monitor.state_dict())
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.randn(5, 4)).float().square().mean().backward()
        optimizer.step()
    monitor.close()
    records = holter.open_run(tmp_path / "run").history.records
    told = {record.step: record.notes[ACTIVATION_DTYPES] for record in records if ACTIVATION_DTYPES in record.notes}
    assert list(told) == [0, 1] and dtypes_in(told[1])["inp"] == "bfloat16"


@pytest.mark.parametrize("note", [None, "", "[", "[" * 100_000, "[1]", '{"a": 1}', "7", json.dumps({"a": None})])
def test_a_note_that_says_something_else_says_nothing(note: str | None) -> None:
    assert dtypes_in(note) == {}
