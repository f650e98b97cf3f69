"""Rows merge: shards add up to the whole, and what people read is derived from that. Truth: numpy on the values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from holter.statistics.histogram import FINITE, Histograms
from holter.statistics.measure import measure_rows
from holter.statistics.rows import COLUMNS, MAX, MIN, STATISTICS, Rows, derive, merge

SUMS = ("sum", "sum_abs", "sum_squares", "sum_fourths")
any_values = arrays.arrays(np.float64, st.integers(0, 300), elements=st.floats(width=32))
cuts = st.lists(st.floats(0, 1), max_size=6)


def row_of(values: np.ndarray) -> Rows:
    """The rows of one tensor, by definition."""
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    finite = x[np.isfinite(x)]
    counts = [x.size, (x == 0).sum(), np.isnan(x).sum(), (x == np.inf).sum(), (x == -np.inf).sum()]
    sums = [finite.sum(), np.abs(finite).sum(), (finite**2).sum(), (finite**4).sum()]
    extremes = [finite.min(initial=np.inf), finite.max(initial=-np.inf)]
    return Rows(np.array([[*counts, *sums, *extremes]], dtype=np.float64), Histograms.of([x]))


def measured_row(values: np.ndarray) -> Rows:
    return measure_rows([torch.from_numpy(values.copy())], histograms=True)


def side_by_side(rows: Sequence[Rows]) -> Rows:
    dense = [row.histograms.dense() for row in rows if row.histograms is not None]
    return Rows(np.concatenate([row.values for row in rows]), Histograms.from_dense(np.concatenate(dense)))


def shards_of(values: np.ndarray, places: list[float]) -> list[np.ndarray]:
    return np.split(values, sorted(int(place * len(values)) for place in places))


def same(found: Rows, expected: Rows, values: np.ndarray) -> bool:
    """Counts, extremes and histograms exactly; sums within 1e-12 of the sum of |terms|."""
    size = np.abs(values[np.isfinite(values)])
    for name in COLUMNS:
        one, other = found.column(name)[0], expected.column(name)[0]
        power = {"sum_squares": 2, "sum_fourths": 4}.get(name, 1)
        allowed = 1e-12 * (size**power).sum() if name in SUMS else 0.0
        if one != other and not abs(one - other) <= allowed:
            return False
    assert found.histograms is not None and expected.histograms is not None
    return np.array_equal(found.histograms.dense(), expected.histograms.dense())


@pytest.mark.parametrize("measure", [row_of, measured_row], ids=["by definition", "by torch"])
@settings(max_examples=150, deadline=None)
@given(values=any_values, places=cuts)
def test_merged_shards_equal_the_whole(
    measure: Callable[[np.ndarray], Rows], values: np.ndarray, places: list[float]
) -> None:
    """P10: uneven and empty shards too; counts and histograms exactly, sums to 1e-12."""
    shards = [measure(shard) for shard in shards_of(values, places)]
    assert same(merge(shards), row_of(values), values)
    assert same(side_by_side(shards).total(), row_of(values), values)


@pytest.mark.parametrize(
    "fault",
    [
        lambda parts: parts[0],  # the reduction is skipped
        lambda parts: Rows(np.sum([part.values for part in parts], axis=0), parts[0].histograms),  # extremes added
        lambda parts: Rows(np.mean([part.values for part in parts], axis=0), merge(parts).histograms),
        lambda parts: Rows(merge(parts).values, parts[-1].histograms),
        lambda parts: merge([*parts, parts[0]]),  # one shard twice
    ],
)
def test_a_merge_that_is_wrong_is_not_taken_for_the_whole(fault: Callable[[list[Rows]], Rows]) -> None:
    """P10: the planted twins."""
    values = np.random.default_rng(0).normal(size=90)
    shards = [row_of(shard) for shard in np.split(values, [30, 50])]
    assert same(merge(shards), row_of(values), values)
    assert not same(fault(shards), row_of(values), values)


def test_merging_keeps_tensors_apart_and_order_does_not_matter() -> None:
    """Row i of every part is a shard of tensor i."""
    rng = np.random.default_rng(1)
    tensors = [rng.normal(size=40), rng.normal(size=8) * 1e20, np.zeros(12), np.array([np.nan, 1.0, np.inf, -2.0])]
    parts = [side_by_side([row_of(np.array_split(tensor, 3)[k]) for tensor in tensors]) for k in range(3)]
    for merged in (merge(parts), merge(parts[::-1]), merge([merge(parts[:2]), parts[2]])):
        for place, tensor in enumerate(tensors):
            assert merged.histograms is not None
            one = Rows(merged.values[[place]], Histograms.from_dense(merged.histograms.dense()[[place]]))
            assert same(one, row_of(tensor), tensor)


def test_histograms_are_merged_only_where_every_part_has_them() -> None:
    """Half a histogram would be taken for a whole one."""
    whole, bare = row_of(np.ones(3)), Rows(row_of(np.ones(3)).values)
    assert merge([whole, bare]).histograms is None
    assert merge([whole, whole]).histograms is not None


def test_no_rows_still_have_a_total_and_a_scale() -> None:
    """A role without layers: the merge identity, not an error, and no histogram gets lost."""
    none = Rows(np.zeros((0, len(COLUMNS))), Histograms.of([]))
    total = none.total()
    assert total.column("count").tolist() == [0] and total.histograms is not None
    assert (total.values[0, MIN], total.values[0, MAX]) == (np.inf, -np.inf)
    assert none.scaled(2.0).histograms is not None and len(none.scaled(2.0)) == 0


def unscaled(rows: Rows, factor: float) -> Rows:
    """The planted fault: squares and fourth powers scaled like sums."""
    values = rows.values.copy()
    values[:, [COLUMNS.index(name) for name in (*SUMS, "min", "max")]] *= factor
    return Rows(values, rows.histograms)


@settings(max_examples=100, deadline=None)
@given(values=arrays.arrays(np.float64, 50, elements=st.floats(-1e6, 1e6, width=32)), power=st.integers(-20, 20))
def test_scaled_rows_are_those_of_scaled_tensors(values: np.ndarray, power: int) -> None:
    """What a loss scaler multiplied can be divided out of the rows: exactly, as its factors are powers of two."""
    normal_values = np.where(np.abs(values) < 1e-20, 0.0, values)  # below, buckets are linear
    normal_values = np.append(normal_values, [np.nan, np.inf, -np.inf, -0.0])
    scaled = row_of(normal_values).scaled(2.0**power)
    assert same(scaled, row_of(normal_values * 2.0**power), normal_values * 2.0**power)
    if power and np.any(np.isfinite(normal_values) & (normal_values != 0)):
        assert not same(unscaled(row_of(normal_values), 2.0**power), scaled, normal_values * 2.0**power)


def test_rows_of_no_finite_value_scale_and_merge_to_themselves() -> None:
    """The infinite merge identity survives both."""
    empty = row_of(np.array([np.nan]))
    for rows in (empty.scaled(0.25), merge([empty, empty])):
        assert (rows.values[0, MIN], rows.values[0, MAX]) == (np.inf, -np.inf)
        assert np.isnan(rows.derive("min")[0]) and np.isnan(rows.derive("abs_max")[0])


TRUTH: dict[str, Callable[[np.ndarray], float]] = {
    "norm": lambda x: float(np.linalg.norm(x)),
    "mean": lambda x: float(x.mean()),
    "std": lambda x: float(x.std()),
    "rms": lambda x: float(np.sqrt((x**2).mean())),
    "abs_mean": lambda x: float(np.abs(x).mean()),
    "min": lambda x: float(x.min()),
    "max": lambda x: float(x.max()),
    "abs_max": lambda x: float(np.abs(x).max()),
    "kurtosis": lambda x: float((x**4).mean() / (x**2).mean() ** 2),
    "zero_share": lambda x: float((x == 0).sum() / (x.size + 3)),
    "nonfinite": lambda x: 3.0,
    "count": lambda x: float(x.size + 3),
}


@pytest.mark.parametrize("statistic", [name for name in STATISTICS if name != "full_norm"])
@pytest.mark.parametrize("scale", [1.0, 1e20, 1e-30])
def test_every_statistic_is_the_one_it_is_called(statistic: str, scale: float) -> None:
    """B4, E1: derived from merged rows, equal to numpy's on the values; one shard alone must not pass for all."""
    values = np.sort(np.random.default_rng(2).normal(1.0, 2.0, size=999)) * scale
    values[::10] = 0
    shards = [row_of(part) for part in np.array_split(np.append(values, [np.nan, np.inf, -np.inf]), 4)]
    expected = pytest.approx(TRUTH[statistic](values), rel=1e-9, abs=0)
    assert merge(shards).derive(statistic)[0] == expected
    assert shards[1].derive(statistic)[0] != expected


def test_statistics_are_of_the_finite_values_and_say_how_many_are_not() -> None:
    """D6: a NaN is counted, not averaged in."""
    values = np.array([1.0, np.nan, 3.0, np.inf, -np.inf, 0.0])
    rows = row_of(values)
    assert rows.derive("nonfinite").tolist() == [3] and rows.derive("count").tolist() == [6]
    assert rows.derive("mean")[0] == pytest.approx(4 / 3) and rows.derive("norm")[0] == pytest.approx(np.sqrt(10))
    assert rows.derive("zero_share")[0] == pytest.approx(1 / 6)


def test_the_full_norm_hides_nothing() -> None:
    """B3: as torch gives it, NaN or infinite where a value is."""
    for values in ([3.0, 4.0], [3.0, np.inf], [np.nan, 1.0], [-np.inf, np.nan]):
        torchs = torch.linalg.vector_norm(torch.tensor(values)).item()
        assert row_of(np.array(values)).derive("full_norm")[0] == pytest.approx(torchs, nan_ok=True)


def test_an_empty_tensor_has_a_norm_of_zero_and_no_mean() -> None:
    """B2: nothing to add up is 0, nothing to average is NaN, and neither warns."""
    rows = row_of(np.zeros(0))
    assert rows.derive("norm").tolist() == [0.0]
    assert all(
        np.isnan(rows.derive(name)[0]) for name in ("mean", "std", "rms", "min", "max", "kurtosis", "zero_share")
    )


def test_derive_takes_any_leading_shape() -> None:
    """A history derives all steps and layers at once."""
    rng = np.random.default_rng(3)
    stack = np.stack([[row_of(rng.normal(size=5)).values[0] for _ in range(4)] for _ in range(3)])
    for name in STATISTICS:
        assert derive(stack, name).shape == (3, 4)
        assert derive(stack, name)[2, 1] == derive(stack[2, 1], name)


def test_what_cannot_be_a_row_is_refused_with_the_way_out() -> None:
    """Errors name what was found and what there is."""
    with pytest.raises(ValueError, match=r"need 11 columns.*got shape \(2, 3\)"):
        Rows(np.zeros((2, 3)))
    with pytest.raises(ValueError, match="unknown statistic 'median'; there are norm, full_norm, mean"):
        row_of(np.ones(2)).derive("median")
    with pytest.raises(ValueError, match="at least one part"):
        merge([])


def test_the_histogram_of_a_row_counts_what_its_columns_count() -> None:
    """Two ways to count the same values."""
    values = np.random.default_rng(4).normal(size=500)
    values[:40], values[40:60], values[60:90] = np.nan, np.inf, 0.0
    rows = measured_row(values)
    assert rows.histograms is not None
    dense = rows.histograms.dense()[0]
    assert dense.sum() == rows.column("count")[0] and dense[0] == rows.column("zeros")[0]
    assert dense[~FINITE].sum() == rows.derive("nonfinite")[0] == 60
