"""E24, E31: the checklist of a healthy run, on hand-made histories whose answers are known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from holter.diagnosis.health import Check, check_health
from holter.diagnosis.thresholds import Thresholds
from holter.history import History
from holter.record import LayerRows, Record
from holter.statistics.measure import measure_rows
from holter.statistics.rows import Rows

LAYERS = [
    {"name": "a.weight", "shape": [10, 10]},
    {"name": "b.weight", "shape": [10, 10]},
    {"name": "c", "shape": [10]},
]


def history(**changes: Any) -> History:
    """A healthy one but for what is changed: series by name, or gradients as [layers, n] and ratios [layers]."""
    steps = 100
    random = np.random.default_rng(0)
    series = {
        "loss": 2.0 / (1 + 0.05 * np.arange(steps)),
        "gradient_norm": np.full(steps, 1.0),
        "step_time": np.full(steps, 0.1),
        "machine/process_memory": np.full(steps, 1e9),
    }
    series |= {name: values for name, values in changes.items() if name in series}
    series["machine/process_memory"] = changes.get("memory", series["machine/process_memory"])
    gradients = changes.get("gradients", random.normal(size=(3, 5000)))
    ratios = np.asarray(changes.get("ratios", [3e-3, 4e-3, 2e-3]))
    measured = measure_rows([torch.from_numpy(line) for line in gradients], histograms=True)
    names = ("a.weight", "b.weight", "c")
    records = []
    for step in range(steps):
        rows = {"gradient": LayerRows(names, Rows(measured.values, measured.histograms if step % 50 == 0 else None))}
        if step % 10 == 0:
            rows["update"] = LayerRows(names, Rows(measured.values), {"ratio": ratios})
        records.append(Record(step, float(step), {name: float(values[step]) for name, values in series.items()}, rows))
    return History(records)


def check(name: str, **changes: Any) -> Check:
    (found,) = [line for line in check_health(history(**changes), LAYERS) if name in line.name]
    return found


def test_a_healthy_run_passes_every_line() -> None:
    checks = check_health(history(), LAYERS)
    assert [line.state for line in checks] == ["passed"] * 9, checks


RISING = 1.0 + 0.1 * np.arange(100)
SPIKED = np.where(np.arange(100) == 60, 50.0, 2.0 / (1 + 0.05 * np.arange(100)))
BROKEN = np.where(np.arange(100) == 60, np.nan, 1.0)
NORMAL = np.random.default_rng(1).normal(size=(3, 5000))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("loss", {"loss": RISING}),
        ("loss", {"loss": SPIKED}),
        ("loss", {"loss": BROKEN}),
        ("gradient norm", {"gradient_norm": np.full(100, 50.0)}),
        ("gradient norm", {"gradient_norm": np.full(100, 1e-3)}),
        ("gradient norm", {"gradient_norm": np.where(np.arange(100) < 50, 1.0, np.nan)}),
        ("phase", {"ratios": [3e-5, 4e-5, 2e-5]}),
        ("out of all bounds", {"ratios": [3e-3, 0.3, 2e-3]}),
        ("out of all bounds", {"ratios": [3e-3, 1e-9, 2e-3]}),
        ("bell", {"gradients": np.ones((3, 5000))}),
        ("bell", {"gradients": np.full((3, 5000), np.nan)}),
        ("100 times", {"gradients": NORMAL * np.array([[1.0], [1e-3], [1.0]])}),
        ("throughput", {"step_time": np.where(np.arange(100) < 50, 0.1, 0.2)}),
        ("memory", {"memory": 1e9 * (1 + 0.02 * np.arange(100))}),
    ],
)
def test_each_line_fails_where_it_should(name: str, changes: dict[str, Any]) -> None:
    assert check(name, **changes).state == "failed"


def test_an_update_that_is_no_number_does_not_hide_the_one_before() -> None:
    """A training that has gone to NaN has no ratios any more: the last ones that it had are judged."""
    records = [Record(step, 0.0, rows={"update": _ratios(np.array([3e-3, 4e3, 2e-3]))}) for step in range(30)]
    broken = History([*records, Record(30, 0.0, rows={"update": _ratios(np.full(3, np.nan))})])
    (found,) = [line for line in check_health(broken, LAYERS) if "out of all bounds" in line.name]
    assert found.state == "failed" and "b.weight" in found.text
    empty = History([Record(step, 0.0, rows={"update": _ratios(np.full(3, np.nan))}) for step in range(30)])
    (found,) = [line for line in check_health(empty, LAYERS) if "out of all bounds" in line.name]
    assert found.state == "not observed"


def _ratios(values: np.ndarray) -> LayerRows:
    return LayerRows(("a.weight", "b.weight", "c"), measure_rows([torch.ones(4)] * 3), {"ratio": values})


def test_steps_that_became_quicker_are_no_trouble() -> None:
    assert check("throughput", step_time=np.where(np.arange(100) < 50, 0.2, 0.1)).state == "passed"


def test_layers_of_another_kind_are_not_compared() -> None:
    """A bias is no measure of a matrix."""
    assert check("100 times", gradients=NORMAL * np.array([[1.0], [1.0], [1e-4]])).state == "passed"


def test_what_was_not_recorded_is_not_judged() -> None:
    checks = check_health(History([Record(step, 0.0) for step in range(30)]), ())
    assert {line.state for line in checks} == {"not observed"} and all(np.isnan(line.value) for line in checks)


def test_a_rate_of_zero_is_no_update_to_judge() -> None:
    """As at the first step of a warm-up."""
    assert check("phase", ratios=[0.0, 0.0, 0.0]).state == "not observed"


@pytest.mark.parametrize(
    ("limit", "scalars"),
    [
        ("exploding_norm", {"gradient_norm": 500.0}),
        ("least_norm", {"gradient_norm": 1e-5}),
        ("loss_noise", {}),
    ],
)
def test_an_outer_limit_that_is_crossed_fails_its_line(limit: str, scalars: dict[str, float]) -> None:
    records = []
    for step in range(60):
        loss = 1.0 if limit != "loss_noise" else (100.0 if step == 55 else 0.01)
        records.append(Record(step, 0.0, {"loss": loss - 0.001 * step, "gradient_norm": 1.0, **scalars}))
    line = next(one for one in check_health(History(records)) if "outer limits" in one.name)
    assert line.state == "failed" and limit in line.text
    relaxed = Thresholds(exploding_norm=1e6, least_norm=1e-9, loss_noise=1e6)
    again = next(one for one in check_health(History(records), (), relaxed) if "outer limits" in one.name)
    assert again.state == "passed"
