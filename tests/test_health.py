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
        ("loss", {"loss": 2.303 - 1e-4 * np.arange(100)}),  # by less than a percent: it stands still
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


def test_an_embedding_is_not_held_against_the_layers_of_a_stack() -> None:
    """Layers whose names differ by numbers alone are of a kind; among them a vanished one still fails the line."""
    names = ("wte.weight", "h.0.weight", "h.1.weight", "h.2.weight")
    listed = [{"name": name, "shape": [10, 10]} for name in names]

    def line(*sizes: float) -> Check:
        measured = measure_rows([size * torch.ones(100) for size in sizes])
        records = [Record(step, 0.0, {}, {"gradient": LayerRows(names, measured)}) for step in range(5)]
        return next(one for one in check_health(History(records), listed) if "100 times" in one.name)

    assert line(1000.0, 1.0, 2.0, 3.0).state == "passed" and "3× apart" in line(1000.0, 1.0, 2.0, 3.0).text
    vanished = line(1.0, 1.0, 1.0, 1e-3)
    assert vanished.state == "failed" and "h.2.weight" in vanished.text


def test_updates_near_their_band_are_right_and_far_from_it_are_not() -> None:
    assert check("phase", ratios=[0.03, 0.02, 0.04]).state == "passed"
    assert "near the usual 0.001 to 0.01" in check("phase", ratios=[0.03, 0.02, 0.04]).text
    assert check("phase", ratios=[5e-5, 4e-5, 6e-5]).state == "failed"
    assert "far from the usual" in check("phase", ratios=[0.5, 0.4, 0.6]).text


def test_the_end_of_a_schedule_is_judged_by_the_later_half_of_its_phase() -> None:
    """At the very end the rate is next to nothing, as it should be."""
    rates = np.append(np.linspace(5e-3, 1e-3, 19), 1e-7)
    records = [Record(step, 0.0, {}, {"update": _ratios(np.full(3, rate))}) for step, rate in enumerate(rates)]
    line = next(one for one in check_health(History(records), LAYERS) if "phase" in one.name)
    assert line.state == "passed" and 1e-3 < line.value < 5e-3


def test_a_bias_that_begins_at_zero_is_no_update_alert() -> None:
    assert check("out of all bounds", ratios=[3e-3, 4e-3, 30.0]).state == "passed"


def test_few_values_have_no_shape() -> None:
    """The bias of a single output is one value: a bell is not to be expected of it."""
    names = ("a.weight", "b.bias")
    measured = measure_rows([torch.randn(5000), torch.ones(1)], histograms=True)
    records = [Record(step, 0.0, {}, {"gradient": LayerRows(names, measured)}) for step in range(5)]
    line = next(one for one in check_health(History(records)) if "bell" in one.name)
    assert line.state == "passed" and line.text == "0 of 1 layers are not"


def test_a_throughput_that_swings_is_steady_and_one_that_has_fallen_is_not() -> None:
    """Other work on a machine comes and goes. Batches that grow make longer steps, not slower ones."""
    swinging = np.where(np.arange(100) // 10 % 2 == 0, 0.1, 0.2)
    swinging[50:] = np.where(np.arange(50) // 10 % 3 == 0, 0.1, 0.2)
    assert check("throughput", step_time=swinging).state == "passed"
    fallen = check("throughput", step_time=np.where(np.arange(100) < 50, 0.1, 0.12))
    assert fallen.state == "failed" and "0.83×" in fallen.text
    longer = np.where(np.arange(100) < 50, 0.1, 0.2)
    records = [Record(i, 0.0, {"step_time": t, "samples_per_second": 640.0}) for i, t in enumerate(longer.tolist())]
    assert next(one for one in check_health(History(records)) if "throughput" in one.name).state == "passed"


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
