"""Series and baselines: what is kept, what is usual, what is outside; against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest

from holter.series import (
    OPENING,
    RECENT,
    Baseline,
    Series,
    known_median,
    logs,
    median,
    overall_median,
    slope,
    slopes,
    spread,
)

RANDOM = np.random.default_rng(3)


def test_a_series_keeps_its_opening_and_its_recent_past() -> None:
    series = Series(("a", "b"))
    values = RANDOM.normal(size=(3 * RECENT + 7, 2))
    for step, line in enumerate(values):
        series.add(10 * step, line)
    assert len(series) == RECENT and series.seen == len(values)
    np.testing.assert_array_equal(series.values, values[-RECENT:])
    np.testing.assert_array_equal(series.steps, 10 * np.arange(len(values))[-RECENT:])
    np.testing.assert_array_equal(series.opening, values[:OPENING])
    np.testing.assert_array_equal(series.since(series.steps[-3]), values[-3:])
    np.testing.assert_array_equal(series.before(series.steps[-3], 4), values[-7:-3])


@pytest.mark.parametrize("together", [1, 5, 100, RECENT])
def test_many_steps_at_once_are_as_one_after_the_other(together: int) -> None:
    values = RANDOM.normal(size=(4 * RECENT + 13, 2))
    steps = 3 * np.arange(len(values))
    single, several = Series(("a", "b")), Series(("a", "b"))
    for start in range(0, len(values), together):
        part = slice(start, start + together)
        several.extend(steps[part], values[part])
        for step, line in zip(steps[part], values[part], strict=True):
            single.add(int(step), line)
        for name in ("steps", "values", "opening", "opening_steps"):
            np.testing.assert_array_equal(getattr(several, name), getattr(single, name))
        assert several.seen == single.seen and len(several) == len(single)


def test_what_waits_is_counted_before_anybody_looks() -> None:
    series = Series(("a",))
    series.add(4, np.array([1.0]))
    assert len(series) == series.seen == 1
    wider = series.renamed(("b", "a"))
    assert wider.values[0, 1] == 1.0 and wider.opening_steps.tolist() == [4]


def test_a_series_among_others_keeps_its_values() -> None:
    series = Series(("a", "b"))
    series.add(0, np.array([1.0, 2.0]))
    wider = series.renamed(("new", "b", "a"))
    wider.add(1, np.array([3.0, 4.0, 5.0]))
    np.testing.assert_array_equal(wider.values, [[np.nan, 2.0, 1.0], [3.0, 4.0, 5.0]])
    np.testing.assert_array_equal(wider.opening, wider.values)


def test_the_median_is_that_of_numpy() -> None:
    values = RANDOM.normal(size=(31, 40))
    values[RANDOM.random(values.shape) < 0.4] = np.nan
    values[:, 3] = np.nan
    values[1:, 4] = np.nan
    expected = [np.nanmedian(column) if not np.isnan(column).all() else np.nan for column in values.T]
    np.testing.assert_allclose(median(values), expected)
    assert np.isnan(median(values[:0])).all() and len(median(values[:0])) == 40


@pytest.mark.parametrize("shape", [(1,), (2,), (31,), (40, 1)])
def test_the_overall_median_is_that_of_numpy(shape: tuple[int, ...]) -> None:
    values = RANDOM.normal(size=shape)
    assert overall_median(values) == np.median(values) == known_median(values)
    values.flat[0] = np.inf
    assert overall_median(values) == np.median(values)
    values.flat[0] = np.nan
    assert np.isnan(overall_median(values))
    assert np.isnan(known_median(values)) if values.size == 1 else known_median(values) == np.nanmedian(values)
    assert np.isnan(overall_median(values[:0]))


def test_the_spread_of_a_bell_is_its_deviation() -> None:
    assert spread(RANDOM.normal(scale=3.0, size=(20_000, 1)))[0] == pytest.approx(3.0, rel=0.03)


def test_the_slope_is_that_of_a_line() -> None:
    steps = np.array([0, 3, 4, 9, 12])
    values = 2.0 - 0.5 * steps
    assert slope(steps, values) == pytest.approx(-0.5)
    values[2] = np.nan
    assert slope(steps, values) == pytest.approx(-0.5)
    assert np.isnan(slope(steps[:2], values[:2]))


def test_slopes_are_those_of_numpys_lines() -> None:
    steps = np.sort(RANDOM.choice(900, 30, replace=False))
    values = RANDOM.normal(size=(30, 6)) + 1e9 * np.arange(6)
    values[RANDOM.random(values.shape) < 0.2] = np.nan
    values[:28, 5] = np.inf
    for place, found in enumerate(slopes(steps, values)[:5].tolist()):
        known = np.isfinite(values[:, place])
        expected = np.polyfit(steps[known] - steps[known].mean(), values[known, place] - 1e9 * place, 1)[0]
        assert found == pytest.approx(expected, rel=1e-4)
    assert np.isnan(slopes(steps, values)[5]), "of two finite values nothing is said"
    assert slopes(steps, np.full((30, 1), 7e9))[0] == 0


def outside(values: np.ndarray, limit: float = 6.0) -> np.ndarray:
    """At which steps each of the series [n, k] was outside."""
    baseline = Baseline(values.shape[1])
    return np.array([np.abs(baseline.add(line, limit)) > limit for line in values])


def test_noise_stays_inside_and_a_jump_does_not() -> None:
    values = RANDOM.normal(scale=0.1, size=(400, 50))
    assert outside(values).mean() < 1e-4
    values[200:] += 1.5
    found = outside(values)
    assert found[:200].mean() < 1e-4 and found[200:205].all()


def test_a_drift_is_followed() -> None:
    """A series that falls by a factor of a thousand over a training is no departure."""
    values = RANDOM.normal(scale=0.1, size=(1000, 50)) - 3 * np.linspace(0, 1, 1000)[:, None]
    assert outside(values).mean() < 1e-3


def test_single_outliers_do_not_widen_the_band() -> None:
    values = RANDOM.normal(scale=0.05, size=(400, 1))
    values[20::10] += 2.0
    found = outside(values)[:, 0]
    assert found[60::10].all() and found.sum() <= len(values[20::10]) + 2


def test_a_new_level_becomes_the_usual_one() -> None:
    values = RANDOM.normal(scale=0.1, size=(400, 1))
    values[100:] += 2.0
    found = outside(values)[:, 0]
    assert found[100:140].all() and not found[-200:].any()


def test_nothing_is_judged_before_something_is_usual() -> None:
    values = 10 * RANDOM.normal(size=(Baseline.LEAST, 20))
    assert not outside(values).any()


def test_what_is_not_measured_changes_nothing_and_what_is_no_number_is_outside() -> None:
    baseline = Baseline(2)
    for _ in range(40):
        baseline.add(RANDOM.normal(scale=0.1, size=2))
    level, count = baseline.level.copy(), baseline.count.copy()
    assert np.isnan(baseline.add(np.array([np.nan, np.nan]))).all()
    np.testing.assert_array_equal(baseline.count, count)
    assert np.isinf(baseline.add(np.array([np.inf, 0.0]))[0])
    assert baseline.level[0] == pytest.approx(level[0], abs=0.1)


def test_series_that_come_later_get_a_baseline_of_their_own() -> None:
    grown, alone = Baseline(1), Baseline(1)
    for value in RANDOM.normal(size=(30, 1)):
        grown.add(value)
        alone.add(value)
    grown.grow(2)
    np.testing.assert_array_equal(grown.level[0], alone.level[0])
    assert not np.abs(grown.add(np.array([0.0, 5.0, np.nan]))[1:2]).any()


def test_sizes_on_a_log_scale() -> None:
    np.testing.assert_allclose(logs(np.array([100.0, 0.0, np.inf])), [2.0, -30.0, np.inf])
    assert np.isnan(logs(np.array([np.nan]))).all()
