"""E24, E31: the checklist of a healthy run, on hand-made histories whose answers are known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holter
from holter.diagnosis.finding import Finding
from holter.diagnosis.health import Check, check_health
from holter.diagnosis.thresholds import Thresholds
from holter.history import History
from holter.record import LayerRows, Record
from holter.report.reading import Follower
from holter.statistics.measure import measure_rows
from holter.statistics.rows import Rows
from tests.test_cli import call, parse

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


def test_to_come_back_from_a_rise_is_no_fall() -> None:
    """A rate that is too high: up at once, and back to where a network that knows nothing is."""
    noise = 0.05 * np.random.default_rng(2).normal(size=200)
    dead = np.where(np.arange(200) < 16, 4.0, 2.4) + noise
    dead[:4] = 2.3
    (line,) = [one for one in check_health(_losses(dead)) if "loss falls" in one.name]
    assert line.state == "failed" and line.text.startswith("2.3 → 2.4")
    learning = np.where(np.arange(200) < 16, dead, 1.5 + noise)  # one that rose first, and then learned
    (line,) = [one for one in check_health(_losses(learning)) if "loss falls" in one.name]
    assert line.state == "passed"


def test_a_low_loss_at_the_first_steps_is_no_measure_where_losses_swing() -> None:
    """Batches of one or two: what looks like a rise is noise."""
    swinging = np.random.default_rng(3).gamma(2.0, 0.5, size=400) * np.where(np.arange(400) < 60, 2.0, 1.0)
    swinging[:3] = 0.1
    (line,) = [one for one in check_health(_losses(swinging)) if "loss falls" in one.name]
    assert line.state == "passed"


SUMMED = 90.0 * (1 - 0.005 * np.arange(100))  # over a batch of 64
LIKELIHOOD = 0.4 - 0.02 * np.arange(100) + 0.3 * np.random.default_rng(4).normal(size=100)  # narrower and narrower


@pytest.mark.parametrize(
    ("loss", "norm", "state"),
    [
        (SUMMED, 60.0, "passed"),
        (20 * SUMMED, 1200.0, "passed"),
        (SUMMED, 9e3, "failed"),
        (LIKELIHOOD, 30.0, "passed"),
        (LIKELIHOOD - 100, 30.0, "passed"),
        (LIKELIHOOD, np.geomspace(1, 1e4, 100), "failed"),  # of any sign: norms that run away do so
        (np.geomspace(2.3, 1e6, 100), 1e6, "failed"),  # a loss that ran away is no measure for its gradients
        (2.0 / (1 + 0.05 * np.arange(100)), 150.0, "failed"),
    ],
)
def test_norms_are_judged_by_the_size_of_their_loss(loss: np.ndarray, norm: Any, state: str) -> None:
    """A loss may be a sum, need not begin at ln(classes), and may be negative."""
    changes = {"loss": loss, "gradient_norm": np.broadcast_to(norm, 100)}
    assert check("norm is between", **changes).state == check("outer limits", **changes).state == state


@pytest.mark.parametrize("cause", ["lr-too-high", "lr-jump"])
def test_no_line_passes_a_rate_that_is_found_fault_with(cause: str) -> None:
    finding = Finding(cause, "lr", 7, 20, severity="critical")
    names = ("phase", "out of all bounds")
    lines = [one for one in check_health(history(), LAYERS, findings=[finding]) if any(n in one.name for n in names)]
    assert [one.state for one in lines] == ["failed"] * 2 and all(
        f"yet {cause} since step 7" in one.text for one in lines
    )
    for other in (replace(finding, until=40), replace(finding, severity="info"), Finding("dead-relu", "layer", 7, 20)):
        assert {one.state for one in check_health(history(), LAYERS, findings=[other])} == {"passed"}


def test_all_that_show_the_health_of_a_run_show_the_same(tmp_path: Path) -> None:
    """P32: diagnose and report, of a training whose rate is far too high."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3.0)
    with holter.watch(model, optimizer, run=tmp_path, budget=None) as monitor:
        for _ in range(40):
            x = torch.randn(64, 8)
            loss = torch.nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
    follower = Follower(tmp_path, examine=True)
    follower.read_on()
    said = {one["name"]: one for one in parse(call("diagnose", tmp_path, "--json"))["health"]}
    (line,) = [one for one in follower.examined().health if "phase" in one.name]
    assert said[line.name]["state"] == line.state == "failed"
    assert said[line.name]["text"] == line.text and "lr-too-high" in line.text


def _losses(values: np.ndarray) -> History:
    return History([Record(step, 0.0, {"loss": value}) for step, value in enumerate(values.tolist())])


@pytest.mark.parametrize("name", ["norm is between", "phase", "bell", "out of all bounds", "outer limits"])
def test_what_is_not_finite_any_more_does_not_pass(name: str) -> None:
    """The histograms, the updates and the norms that are finite are all from before."""
    line = next(one for one in check_health(_broken(since=93), LAYERS) if name in one.name)
    assert line.state == "failed" and "not finite since step " in line.text
    assert next(one for one in check_health(_broken(since=200), LAYERS) if name in one.name).state == "passed"


@pytest.mark.parametrize("name", ["norm is between", "bell", "outer limits"])
def test_a_single_step_that_overflowed_is_no_illness(name: str) -> None:
    """A loss scale is tried, and lowered where it is too large; the run may end there."""
    found = check_health(_broken(since=99, loss=0.5, ratio=3e-3), LAYERS)
    assert next(one for one in found if name in one.name).state == "passed"


def test_a_training_that_ended_at_its_first_loss_of_nan_is_beyond_the_limits() -> None:
    line = next(one for one in check_health(_broken(since=99, ratio=3e-3), LAYERS) if "outer limits" in one.name)
    assert line.state == "failed" and line.text == "loss: not finite since step 99"


def _broken(since: int, loss: float = np.nan, ratio: float = np.nan) -> History:
    """A healthy one up to a step; from there on gradients that are not finite, and such losses and ratios."""
    names = ("a.weight", "b.weight", "c")
    bad = LayerRows(names, measure_rows([torch.full((5000,), torch.nan)] * 3))
    records = []
    for record in history().records:
        if record.step >= since:
            scalars = {**record.scalars, "loss": loss, "gradient_norm": np.inf}
            rows = {"gradient": bad} | ({"update": _ratios(np.full(3, ratio))} if record.step % 5 == 0 else {})
            record = Record(record.step, record.time, scalars, rows)
        records.append(record)
    return History(records)


@pytest.mark.parametrize("name", ["phase", "bell", "out of all bounds"])
def test_what_was_last_measured_long_ago_is_not_judged(name: str) -> None:
    healthy = history().records
    later = [Record(step, 0.0, healthy[-1].scalars) for step in range(100, 250)]
    line = next(one for one in check_health(History([*healthy, *later]), LAYERS) if name in one.name)
    assert line.state == "not observed" and "last" in line.text
    soon = next(one for one in check_health(History([*healthy, *later[:10]]), LAYERS) if name in one.name)
    assert soon.state == "passed"


@pytest.mark.parametrize("name", ["phase", "out of all bounds"])
def test_matrices_that_stand_still_while_biases_move_fail(name: str) -> None:
    """A dead network: updates were measured, and are nothing."""
    line = check(name, ratios=[0.0, 0.0, 0.3])
    assert line.state == "failed" and line.text.startswith("exactly 0 of late in all 2 matrices")
    adapter = check(name, ratios=[0.0, np.nan, 0.3])  # at its first step: to a matrix of zeros there is no ratio
    assert adapter.state != "failed"


def test_updates_above_their_band_are_not_near_it_where_the_loss_has_risen() -> None:
    above, below = [0.03, 0.02, 0.04], [5e-4, 4e-4, 6e-4]
    line = check("phase", ratios=above, loss=RISING)
    assert line.state == "failed" and "the loss is above where it began" in line.text
    assert check("phase", ratios=above, loss=np.full(100, 2.3)).state == "passed", "one that stands still has not"
    assert check("phase", ratios=below, loss=RISING).state == "passed", "they were not what did it"
    assert check("phase", ratios=[3e-3, 4e-3, 2e-3], loss=RISING).state == "passed"


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
    """And the line does not call them steady, beside a figure that says otherwise."""
    line = check("throughput", step_time=np.where(np.arange(100) < 50, 0.2, 0.1))
    assert line.state == "passed" and "2×" in line.text
    assert "steady" not in line.name and "%" not in line.name


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


@pytest.mark.parametrize(("small", "told"), [(1, ": h.0"), (2, ": 2 layers, first h.0")])
def test_a_layer_beyond_its_limit_is_named_and_several_are_counted(small: int, told: str) -> None:
    measured = measure_rows([(1e-9 if place < small else 1.0) * torch.ones(4) for place in range(3)])
    rows = LayerRows(("h.0", "h.1", "h.2"), measured)
    history = History([Record(step, 0.0, {"loss": 1.0}, {"gradient": rows}) for step in range(30)])
    (line,) = [one for one in check_health(history, ()) if "outer limits" in one.name]
    assert line.state == "failed" and f"vanishing_norm{told}" in line.text


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
    steady = check("throughput", step_time=swinging)
    assert steady.state == "passed" and "no slower now than parts of it were" in steady.text
    fallen = check("throughput", step_time=np.where(np.arange(100) < 50, 0.1, 0.12))
    assert fallen.state == "failed" and "0.83×" in fallen.text and "stays below all of it" in fallen.text
    longer = np.where(np.arange(100) < 50, 0.1, 0.2)
    records = [Record(i, 0.0, {"step_time": t, "samples_per_second": 640.0}) for i, t in enumerate(longer.tolist())]
    assert next(one for one in check_health(History(records)) if "throughput" in one.name).state == "passed"


def test_what_was_not_recorded_is_not_judged() -> None:
    checks = check_health(History([Record(step, 0.0) for step in range(30)]), ())
    assert {line.state for line in checks} == {"not observed"} and all(np.isnan(line.value) for line in checks)


def test_a_rate_of_zero_is_no_update_to_judge() -> None:
    """As at the first step of a warm-up."""
    line = check("phase", ratios=[0.0, 0.0, 0.0])
    assert line.state == "not observed" and line.text == "no update above 0 was measured of late"


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


def test_a_bias_that_a_norm_takes_away_vanishes_without_harm(tmp_path: Path) -> None:
    """Its gradient is zero but for rounding; that of a layer whose weight vanishes with it is beyond the limit."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 4)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with holter.watch(model, optimizer, run=tmp_path / "run", budget=None) as monitor:
        for _ in range(40):
            x = torch.randn(32, 8)
            loss = torch.nn.functional.cross_entropy(model(x), x[:, :4].argmax(1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
    run = holter.open_run(tmp_path / "run")
    norms = dict(zip(run.history.layers("gradient"), run.history.series("gradient", "norm")[2][-1], strict=True))
    assert 0 < norms["0.bias"] < 1e-7 < norms["0.weight"]
    (line,) = [one for one in check_health(run.history, run.info["layers"]) if "outer limits" in one.name]
    assert line.state == "passed", line.text
