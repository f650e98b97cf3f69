"""Chart and events: records put together to steps, and which series left its baseline, when and how far."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from holter.diagnosis.chart import Chart, Moment, Moments
from holter.diagnosis.events import Events
from holter.record import EXECUTION_ORDER, LayerRows, Record
from holter.statistics.rows import COLUMNS, Rows

INFO = {"layers": [{"name": "a.weight", "shape": [4, 4], "dtype": "float32", "part": "ffn"}, {"name": "a.bias"}]}


def rows(**norms: float) -> LayerRows:
    """Of layers of a hundred numbers with these norms; names with underscores for dots."""
    values = np.zeros((len(norms), len(COLUMNS)))
    values[:, COLUMNS.index("count")] = 100
    values[:, COLUMNS.index("sum_squares")] = np.square(list(norms.values()))
    return LayerRows(tuple(name.replace("_", ".") for name in norms), Rows(values))


def record(step: int, scalars: Mapping[str, float] | None = None, late: bool = False, **norms: float) -> Record:
    return Record(step, float(step), scalars or {}, {"gradient": rows(**norms)} if norms else {}, late=late)


def fed(records: list[Record]) -> tuple[Chart, Events]:
    chart, events, moments = Chart(INFO), Events(), Moments()
    for one in records:
        for moment in moments.add(one):
            chart.add(moment)
            events.add(moment)
    for moment in moments.finish():
        chart.add(moment)
        events.add(moment)
    return chart, events


def noisy(level: float, seed: int, steps: int = 120) -> np.ndarray:
    return level * np.exp(0.05 * np.random.default_rng(seed).normal(size=steps))


def test_what_was_logged_later_belongs_to_its_step() -> None:
    chart, _ = fed(
        [record(0, a_weight=1.0), record(0, {"loss": 5.0}, late=True), record(1, {"loss": 4.0}, a_weight=2.0)]
    )
    assert chart.scalar("loss").steps.tolist() == [0, 1] and chart.scalar("loss").values[:, 0].tolist() == [5.0, 4.0]
    assert chart.table("gradient", "norm").values[:, 0].tolist() == [1.0, 2.0]


def test_a_layer_that_comes_later_is_not_known_before() -> None:
    chart, _ = fed([record(0, a_weight=1.0), record(1, b_weight=3.0, a_weight=2.0)])
    series = chart.table("gradient", "norm")
    assert series.names == ("a.weight", "b.weight")
    np.testing.assert_array_equal(series.values, [[1.0, np.nan], [2.0, 3.0]])


def test_the_order_of_execution_is_that_of_the_record() -> None:
    told = Record(0, 0.0, notes={EXECUTION_ORDER: '["a.bias", "a.weight"]'})
    chart, _ = fed([told])
    assert chart.parameters == ("a.bias", "a.weight")
    assert chart.is_matrix("a.weight") and chart.part("a.weight") == "ffn" and not chart.is_matrix("a.bias")


def test_a_resume_is_noted() -> None:
    chart, _ = fed([record(0), record(1), Record(5, 0.0, segment=1)])
    assert chart.resumed == [5]


def test_quiet_series_have_no_events() -> None:
    losses, norms = noisy(2.0, 1), noisy(1.0, 2)
    _, events = fed([record(step, {"loss": losses[step]}, a_weight=norms[step]) for step in range(120)])
    assert events.all() == [] and events.last_outside == -1


def test_a_departure_has_its_onset_direction_and_size() -> None:
    losses, norms, others = noisy(2.0, 1), noisy(1.0, 2), noisy(1.0, 3)
    norms[80:] *= 10
    losses[85:] *= 0.1
    lines = [record(s, {"loss": losses[s]}, a_weight=norms[s], b_weight=others[s]) for s in range(100)]
    _, events = fed(lines)
    (norm,), (loss,) = events.of("gradient/norm"), events.of("loss")
    assert (norm.layer, norm.since, norm.direction, norm.until) == ("a.weight", 80, 1, None)
    assert norm.factor == pytest.approx(10, rel=0.3) and norm.values == 20 and norm.is_sustained
    assert (loss.layer, loss.since, loss.direction) == (None, 85, -1) and loss.factor == pytest.approx(0.1, rel=0.3)
    assert [event.series for event in events.all()] == ["gradient/norm", "loss"]
    assert events.of("loss", direction=1) == [] and events.all(since=81) == [loss]


def test_a_single_spike_ends() -> None:
    losses = noisy(2.0, 1)
    losses[60] *= 20
    _, events = fed([record(step, {"loss": losses[step]}) for step in range(120)])
    (spike,) = events.of("loss")
    assert (spike.since, spike.until, spike.values) == (60, 61, 1) and not spike.is_sustained


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_loss_that_is_no_number_is_an_event_at_once(value: float) -> None:
    _, events = fed([record(step, {"loss": 2.0 if step < 5 else value}) for step in range(10)])
    (event,) = events.of("loss")
    assert (event.since, event.direction, event.factor) == (5, 1, np.inf)


def test_a_series_that_hardly_moves_needs_more_than_a_hair() -> None:
    """A constant series has no spread at all; a change of a few percent is no event."""
    losses = np.full(120, 2.0)
    losses[60:] *= 1.2
    _, events = fed([record(step, {"loss": losses[step]}) for step in range(120)])
    assert events.all() == []


def test_old_events_are_forgotten() -> None:
    """A run of any length holds a bounded number of them."""
    losses = noisy(2.0, 1, 3000)
    losses[50::60] *= 20
    _, events = fed([record(step, {"loss": losses[step]}) for step in range(3000)])
    assert 3 <= len(events.all()) <= 9


def test_steps_that_are_judged_together_are_judged_as_one_by_one() -> None:
    """Departures of layers, of which the scalars show nothing, and steps at which other layers are measured."""
    random = np.random.default_rng(9)
    together, alone = Events(), Events()
    for step in range(600):
        norms = {f"layer_{place}": float(np.exp(0.1 * random.normal())) for place in range(20)}
        norms["layer_3"] *= 30 if 301 <= step < 330 or step in (97, 402, 403) else 1
        norms["layer_7"] = norms["layer_7"] if step % 50 else np.nan
        if step % 10 == 0:
            norms["rare"] = 100.0 if step == 500 else 1.0
        moment = Moment(step, scalars={"loss": float(np.exp(0.05 * random.normal()))}, rows={"gradient": rows(**norms)})
        together.add(moment)
        alone.add(moment)
        alone.settle()
        alone._room = 1
    assert together.all() == alone.all() and len(alone.all()) >= 3
    assert together.last_outside == alone.last_outside
