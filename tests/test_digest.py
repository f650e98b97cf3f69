"""A run of any length in bounded memory: what is kept of its series, and that nothing that matters is lost."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from holter.history import History
from holter.record import EXECUTION_ORDER, LayerRows, Record
from holter.report.buckets import Buckets, telling
from holter.report.digest import Digest
from holter.report.drawing import strip_map
from holter.report.view import monitor_cost
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows


def _rows(norms: list[float], layers: tuple[str, ...], nans: float = 0.0) -> LayerRows:
    values = np.zeros((len(layers), len(COLUMNS)))
    values[:, COLUMNS.index("count")] = 10
    values[:, COLUMNS.index("sum_squares")] = np.square(norms)
    values[0, COLUMNS.index("nans")] = nans
    return LayerRows(layers, Rows(values, Histograms.of([np.full(10, norm) for norm in norms])))


def _record(step: int, norm: float = 1.0, loss: float = 2.0, **more: object) -> Record:
    return Record(step, 0.0, {"loss": loss}, {"gradient": _rows([norm, 2 * norm], ("a", "b"))}, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("steps", [1, 7, 16, 17, 1000, 12345])
def test_extremes_are_those_of_all_steps_of_a_bucket_whatever_the_length(steps: int) -> None:
    values = np.random.default_rng(steps).normal(size=(steps, 3)).astype(np.float32)
    found = Buckets(8, layers=3)
    for step, line in enumerate(values):
        found.put(step, line.astype(np.float64))

    assert len(found.steps) <= 16 and found.span * 16 >= steps
    for place, first in enumerate(found.steps):
        stretch = values[first : first + found.span]
        np.testing.assert_array_equal(found.low[place], stretch.min(axis=0))
        np.testing.assert_array_equal(found.high[place], stretch.max(axis=0))
        np.testing.assert_array_equal(found.last[place], stretch[-1])


@pytest.mark.parametrize("seed", range(30))
def test_whatever_comes_in_whatever_order_buckets_hold_what_plain_numpy_says(seed: int) -> None:
    """Steps that are skipped, repeated or far off, layers that come later, values that are not numbers, and
    checkpoints that are gone back to at the beginning of a bucket."""
    random = np.random.default_rng(seed)
    wanted = int(random.integers(1, 30))
    found, layers, step = Buckets(wanted, layers=1), 1, 0
    seen: list[tuple[int, np.ndarray]] = []  # in the order of coming
    for _ in range(int(random.integers(1, 120))):
        kind = random.integers(0, 12)
        step += int(random.integers(0, 40)) if kind == 0 else int(kind > 1)
        if kind == 2 and layers < 4:
            layers += 1
            found.grow(layers)
        if kind == 3:
            step = step // found.span * found.span
            found.rewind(step)
            seen = [one for one in seen if one[0] < step]
        values = random.choice([1.0, -2.0, 0.0, np.nan, np.inf, 1e300], size=layers) * random.normal(size=layers)
        places = np.flatnonzero(random.random(layers) < 0.7)
        line = np.full(4, np.nan)
        line[places] = values[places]
        seen.append((step, line))
        found.put(step, values[places], places)

    with np.errstate(over="ignore"):
        table = np.stack([line for _, line in seen]).astype(np.float32)[:, :layers]
    rows = np.array([when for when, _ in seen]) // found.span
    assert found.span & (found.span - 1) == 0 and len(found.steps) <= 2 * wanted
    assert found.steps.tolist() == (np.unique(rows) * found.span).tolist()
    for place, row in enumerate(np.unique(rows)):
        for layer in range(layers):
            column = table[rows == row, layer]
            known = column[~np.isnan(column)]
            expected = (known.min(), known.max(), known[-1]) if len(known) else (np.nan,) * 3
            actual = (found.low[place, layer], found.high[place, layer], found.last[place, layer])
            np.testing.assert_array_equal(actual, expected)


def test_a_short_run_of_many_layers_takes_little_memory() -> None:
    """Also one that is long before its first value; of a long run as much as ever."""
    few, late, many = Buckets(800, layers=1000), Buckets(800), Buckets(800)
    for step in range(10):
        few.put(step, np.ones(1000))
    late.put(10**6, np.ones(1))
    for step in range(5000):
        many.put(step, np.ones(1))

    assert few._arrays.nbytes == 3 * 16 * 1000 * 4
    assert late.steps.tolist() == [10**6 // late.span * late.span] and late._arrays.shape[1] <= 1600
    assert many._arrays.shape == (3, 1600, 1)


def test_one_bad_step_of_a_long_run_still_shows() -> None:
    found = Buckets(8)
    for step in range(10_000):
        found.put(step, np.array([1e-9 if step == 4321 else 1.0]))

    shown = telling(found)[:, 0]
    assert np.flatnonzero(shown < 1e-6).tolist() == [4321 // found.span]


def test_a_layer_that_was_not_measured_is_unknown_and_not_zero() -> None:
    found = Buckets(8, layers=2)
    found.put(0, np.array([1.0]), np.array([1]))
    found.put(1, np.array([np.nan, 3.0]))

    assert np.isnan(found.last[:, 0]).all() and found.last[:, 1].tolist() == [1.0, 3.0]


def test_short_runs_are_kept_as_they_are() -> None:
    records = [_record(step, norm=1.0 + step, loss=5.0 / (1 + step)) for step in range(50)]
    digest, history = Digest(), History(records)
    for record in records:
        digest.take(record)

    steps, losses = history.scalar("loss")
    assert digest.scalars["loss"].steps.tolist() == steps.tolist()
    np.testing.assert_allclose(digest.scalars["loss"].last[:, 0], losses, rtol=1e-6)
    strip = digest.strips["gradient", "norm"]
    np.testing.assert_allclose(strip.buckets.last, history.series("gradient", "norm")[2], rtol=1e-6)
    assert digest.count == 50 and digest.last_step == 49


def test_a_norm_with_nan_values_is_shown_as_not_finite() -> None:
    digest = Digest()
    digest.take(Record(0, 0.0, {}, {"gradient": _rows([1.0, 1.0], ("a", "b"), nans=3.0)}))

    assert digest.strips["gradient", "norm"].buckets.high.tolist() == [[np.inf, 1.0]]


def test_steps_that_are_repeated_after_a_checkpoint_replace_those_before() -> None:
    digest = Digest()
    for step in range(20):
        digest.take(_record(step, loss=1.0))
    for step in range(10, 15):
        digest.take(_record(step, loss=2.0, segment=1))

    losses = digest.scalars["loss"]
    assert losses.steps.tolist() == list(range(15))
    assert losses.last[:, 0].tolist() == [1.0] * 10 + [2.0] * 5
    assert digest.count == 15 and digest.segments == {0, 1}


def test_layers_that_come_late_get_a_row_and_the_order_is_that_of_execution() -> None:
    digest = Digest()
    digest.take(Record(0, 0.0, {}, {"gradient": _rows([1.0], ("b",))}))
    notes = {EXECUTION_ORDER: '["a", "b"]'}
    digest.take(Record(1, 0.0, {}, {"gradient": _rows([2.0, 1.0], ("a", "b"))}, notes))

    strip = digest.strips["gradient", "norm"]
    assert digest.in_depth(strip.layers) == ("a", "b")
    assert np.isnan(strip.buckets.last[0, strip.layers["a"]]) and strip.buckets.last[1, strip.layers["a"]] == 2.0


def test_histograms_of_a_long_run_are_thinned_out_evenly() -> None:
    digest = Digest()
    for step in range(1000):
        digest.take(_record(step))

    steps = [step for step, _, _ in digest.snapshots["gradient"].taken]
    assert 32 <= len(steps) <= 64 and steps[0] == 0 and steps[-1] > 950
    assert len(set(np.diff(steps))) == 1


def test_a_loss_that_is_not_finite_stays_seen() -> None:
    digest = Digest()
    for step in range(10):
        digest.take(_record(step, loss=float("nan") if step >= 5 else 1.0))

    assert np.isinf(digest.scalars["loss"].last[5:, 0]).all() and (digest.scalars["loss"].last[:5, 0] == 1).all()


def test_shares_of_the_time_are_of_all_steps_and_not_of_those_that_are_drawn() -> None:
    digest = Digest(2)
    for step in range(100):
        scalars = {"step_time": 1.0 + step, "monitor_cost": 1 / (1.0 + step), "time/forward": 0.5}
        digest.take(Record(step, 0.0, scalars))

    assert digest.sums == {"step_time": 5050.0, "monitor": pytest.approx(100.0), "time/forward": 50.0}
    assert monitor_cost(digest) == pytest.approx(100 / 5050)


def test_a_stretch_in_which_nothing_was_measured_is_not_painted() -> None:
    digest = Digest()
    for step in [*range(50), *range(90, 100)]:
        digest.take(_record(step))
    drawn = strip_map(digest, digest.strips["gradient", "norm"])

    values = np.frombuffer(base64.b64decode(drawn["values"]["bdata"]), "<f4").reshape(2, -1)
    assert drawn["steps"] == [*range(51), 89, *range(90, 100)]
    assert np.flatnonzero(np.isnan(values[0])).tolist() == [50, 51]
