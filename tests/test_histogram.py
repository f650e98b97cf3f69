"""The histogram: fixed buckets, exact merging, quantiles within 12.5 %. Truth: numpy's own and torch's casts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from holter.statistics import histogram as module
from holter.statistics.histogram import FINITE, HALF, LOWER, SIZE, UPPER, Histogram, Histograms, bucket_of
from holter.statistics.measure import measure_rows

TINY, STEP = 2.0**-126, 2.0**-128  # below TINY the buckets are linear, each STEP wide
QUANTILES = np.array([0.0, 0.001, 0.01, 0.05, 0.25, 0.3333, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0])
anything = arrays.arrays(np.float32, st.integers(0, 200), elements=st.floats(width=32))


def bucket_by_arithmetic(value: float) -> int:
    """The bucket of a float32 from its logarithm, without looking at a bit."""
    magnitude = abs(float(value))
    if magnitude < TINY:
        within = int(magnitude / STEP)
    else:
        fraction, exponent = np.frexp(magnitude)  # magnitude = fraction * 2**exponent, fraction in [0.5, 1)
        within = 4 * (int(exponent) + 126) + int((2 * fraction - 1) * 4)
    return within + (HALF if within and np.signbit(value) else 0)  # what is next to zero has no sign


def test_a_bucket_is_sign_exponent_and_two_bits_of_the_fraction() -> None:
    """Against logarithms: every bucket's edges, the floats next to them, and random ones."""
    rng = np.random.default_rng(0)
    edges = np.concatenate([LOWER[FINITE], UPPER[FINITE]])
    edges = edges[np.abs(edges) < 2.0**128].astype(np.float32)
    random = (rng.normal(size=5000) * 10.0 ** rng.integers(-45, 38, size=5000)).astype(np.float32)
    values = np.concatenate([edges, np.nextafter(edges, np.float32(0)), np.nextafter(edges, np.float32(1)), random])
    values = values[np.isfinite(values)]
    assert bucket_of(values).tolist() == [bucket_by_arithmetic(value) for value in values]


def test_buckets_meet_without_gap_or_overlap() -> None:
    """From the most negative number to the most positive, every edge belongs to two buckets."""
    order = np.argsort(LOWER[FINITE], kind="stable")
    lower, upper = LOWER[FINITE][order], UPPER[FINITE][order]
    assert (lower < upper).all() and np.array_equal(lower[1:], upper[:-1])
    assert (lower[0], upper[-1]) == (-(2.0**128), 2.0**128)
    magnitude = np.abs(np.stack([lower, upper]))
    near, far = magnitude.min(0), magnitude.max(0)
    assert (far <= 1.25 * near)[near >= TINY].all()


def counted(dense: torch.Tensor | np.ndarray) -> np.ndarray:
    return np.asarray(dense)[0]


@pytest.mark.parametrize("size", [50, 3000, 300_000])
def test_torch_counts_the_same_buckets_as_numpy_for_any_bits(size: int) -> None:
    """P11: random bit patterns: NaNs with any payload, infinities, denormals and -0.0 among them."""
    bits = np.random.default_rng(size).integers(0, 2**32, size=size, dtype=np.uint32)
    bits[:6] = [0x7F80_0001, 0xFFC1_2345, 0x8000_0000, 0xFF80_0000, 0x7F80_0000, 0x0040_0001]
    single = bits.view(np.float32)
    truth = np.bincount(bits >> 21, minlength=SIZE)
    truth[0], truth[HALF] = truth[0] + truth[HALF], 0  # what is next to zero has no sign
    rows = measure_rows([torch.from_numpy(single)], histograms=True)
    assert rows.histograms is not None
    assert np.array_equal(counted(rows.histograms.dense()), truth)
    assert np.array_equal(counted(Histograms.of([single]).dense()), truth)
    flushed = np.where(np.abs(single) < TINY, np.float32(0), single)  # the planted twin: denormals flushed
    assert not np.array_equal(counted(Histograms.of([flushed]).dense()), truth)


def test_torch_and_numpy_agree_on_float64_beyond_the_range_of_float32() -> None:
    """Too large for float32 is not infinite: both count it in the last finite bucket."""
    bits = np.random.default_rng(1).integers(0, 2**64, size=20_000, dtype=np.uint64)
    double = np.append(bits.view(np.float64), [1e300, -1e300, 1e39, np.inf, -np.inf, np.nan, 1e-320, -0.0])
    rows = measure_rows([torch.from_numpy(double)], histograms=True)
    assert rows.histograms is not None
    by_torch, by_numpy = counted(rows.histograms.dense()), counted(Histograms.of([double]).dense())
    assert np.array_equal(by_torch[FINITE], by_numpy[FINITE])
    assert by_torch[FINITE].sum() == np.isfinite(double).sum()
    assert bucket_of([1e300, -1e300]).tolist() == bucket_of([3.4e38, -3.4e38]).tolist()


@settings(max_examples=150, deadline=None)
@given(values=anything, places=st.lists(st.integers(0, 200), max_size=5))
def test_merged_shards_are_exactly_the_whole(values: np.ndarray, places: list[int]) -> None:
    """P10: any cut, empty shards too, in any order."""
    whole = Histograms.of([values]).dense()
    shards = [Histograms.of([shard]) for shard in np.split(values, sorted(min(p, len(values)) for p in places))]
    assert np.array_equal(Histograms.merge(shards).dense(), whole)
    assert np.array_equal(Histograms.merge(shards[::-1]).dense(), whole)
    many = Histograms.from_dense(np.concatenate([shard.dense() for shard in shards]))
    assert np.array_equal(many.total().dense(), whole)
    if len(values):  # the planted twin: a shard is left out
        filled = next(place for place, shard in enumerate(shards) if shard[0].count)
        without = [shard for place, shard in enumerate(shards) if place != filled]
        assert not without or not np.array_equal(Histograms.merge(without).dense(), whole)


def test_histograms_with_ranges_of_their_own_do_not_merge_exactly() -> None:
    """The planted twin of fixed buckets: numpy's ten bins a shard, added up, are not those of the whole."""
    values = np.random.default_rng(3).standard_cauchy(size=1000)
    added = np.histogram(values[:500])[0] + np.histogram(values[500:])[0]
    assert not np.array_equal(added, np.histogram(values)[0])


def misjudged(values: np.ndarray, quantile: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """The quantiles that are off by more than 12.5 % (below TINY: by more than a bucket)."""
    finite = values[np.isfinite(values)].astype(np.float64)
    truth = np.quantile(finite, QUANTILES, method="inverted_cdf")
    allowed = np.where(np.abs(truth) < TINY, STEP, 0.125 * np.abs(truth) * (1 + 1e-6))
    return QUANTILES[~(np.abs(quantile(values, QUANTILES) - truth) <= allowed)]


def by_holter(values: np.ndarray, q: np.ndarray) -> np.ndarray:
    return Histograms.of([values])[0].quantile(q)


def by_linear_bins(values: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The planted twin: 512 equal bins from minimum to maximum."""
    counts, edges = np.histogram(values, bins=512)
    return ((edges[:-1] + edges[1:]) / 2)[np.searchsorted(np.cumsum(counts), np.ceil(q * len(values)).clip(1))]


def by_near_edges(values: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The planted twin: the edge of the bucket instead of its middle."""
    middles = by_holter(values, q)
    return np.where(middles > 0, LOWER[bucket_of(middles)], UPPER[bucket_of(middles)])


def kinds_of_data() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {
        "normal": rng.normal(size=20_000),
        "Cauchy": rng.standard_cauchy(size=20_000),
        "lognormal": rng.lognormal(sigma=5, size=20_000),
        "bimodal": np.concatenate([rng.normal(-4, 0.1, 9000), rng.normal(1e-3, 1e-4, 11_000)]),
        "negative": -rng.lognormal(sigma=2, size=5000),
        "constant": np.full(1000, 0.3),
        "negative constant": np.full(7, -1e-20),
        "all zero": np.zeros(500),
        "mostly zero": np.where(rng.random(5000) < 0.9, 0.0, rng.normal(size=5000)),
        "huge": rng.normal(size=5000) * 1e37,
        "tiny": rng.normal(size=5000) * 1e-37,
        "with NaN and Inf": np.concatenate([rng.normal(size=900), np.full(50, np.nan), np.full(50, -np.inf)]),
        "single": np.array([2.5]),
    }


@pytest.mark.parametrize("kind", kinds_of_data())
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_quantile_is_within_an_eighth_of_numpys(kind: str, dtype: type) -> None:
    """E3, E5: p0 to p100 of every kind of data."""
    assert misjudged(kinds_of_data()[kind].astype(dtype), by_holter).size == 0


@settings(max_examples=200, deadline=None)
@given(
    values=arrays.arrays(
        np.float32, st.integers(1, 120), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)
    )
)
@example(values=np.array([1e-45, -1e-45, 0.0, -0.0], dtype=np.float32))
def test_any_quantile_of_any_values_is_within_an_eighth(values: np.ndarray) -> None:
    """E3: found by hypothesis."""
    assert misjudged(values, by_holter).size == 0


@pytest.mark.parametrize(
    ("twin", "kind"), [(by_linear_bins, "Cauchy"), (by_linear_bins, "lognormal"), (by_near_edges, "normal")]
)
def test_a_coarser_histogram_misjudges_quantiles(
    twin: Callable[[np.ndarray, np.ndarray], np.ndarray], kind: str
) -> None:
    """The planted twins of the tests above."""
    assert misjudged(kinds_of_data()[kind], twin).size


def test_quantiles_of_nothing_are_nan_and_wrong_ones_refused() -> None:
    """No finite value, no quantile; outside [0, 1] is a mistake."""
    for values in ([], [np.nan, np.inf]):
        assert np.isnan(Histograms.of([values])[0].quantile(QUANTILES)).all()
    with pytest.raises(ValueError, match=r"lies in \[0, 1\], got 95"):
        Histograms.of([[1.0]])[0].quantile(95)


@settings(max_examples=150, deadline=None)
@given(values=anything)
def test_edges_ascend_and_their_counts_are_the_finite_values(values: np.ndarray) -> None:
    """C12, C13: what TensorBoard and W&B take as an ordinary histogram."""
    counts, edges = Histograms.of([values])[0].edges()
    assert counts.sum() == np.isfinite(values).sum()
    assert len(edges) == (len(counts) + 1 if len(counts) else 0)
    assert (np.diff(edges) > 0).all() and (counts >= 0).all()


@pytest.mark.parametrize("kind", ["normal", "Cauchy", "lognormal", "bimodal", "mostly zero", "huge", "negative"])
def test_numpy_counts_the_same_between_these_edges(kind: str) -> None:
    """The counts belong to the edges, gaps included."""
    values = kinds_of_data()[kind].astype(np.float32).astype(np.float64)
    counts, edges = Histograms.of([values])[0].edges()
    assert np.array_equal(counts, np.histogram(values, edges)[0])
    assert not np.array_equal(counts, np.histogram(values * 1.3, edges)[0])


CASTS = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}


def share_by_casting(values: np.ndarray, number_format: str) -> float:
    seen = torch.from_numpy(values)
    seen = seen[seen.isfinite() & (seen.abs() >= STEP)]
    return float((seen.to(CASTS[number_format]).float() == 0).double().mean())


def spread_about(centre: float) -> np.ndarray:
    rng = np.random.default_rng(11)
    values = (centre * rng.lognormal(sigma=4, size=20_000) * rng.choice([-1, 1], 20_000)).astype(np.float32)
    values[:700], values[700:720], values[720] = 0.0, np.nan, np.inf
    return values


@pytest.mark.parametrize("number_format", CASTS)
@pytest.mark.parametrize("centre", [1e-8, 1e-5, 1e-3, 1.0])
def test_the_flushed_share_is_what_a_cast_flushes(number_format: str, centre: float) -> None:
    """D6: read off the buckets, equal to casting every value: the thresholds are edges of buckets."""
    values = spread_about(centre)
    found = Histograms.of([values])[0].flushed_share(number_format)
    assert found == pytest.approx(share_by_casting(values, number_format), abs=1e-12)


@pytest.mark.parametrize("number_format", [name for name in CASTS if name != "bfloat16"])
def test_a_threshold_that_is_off_by_a_bit_is_noticed(number_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """D6: the planted twin: what is below the smallest number, instead of half of it, taken for flushed."""
    values = spread_about(1e-5)
    monkeypatch.setitem(module.SMALLEST, number_format, 2 * module.SMALLEST[number_format])
    found = Histograms.of([values])[0].flushed_share(number_format)
    assert found != pytest.approx(share_by_casting(values, number_format), abs=1e-12)


def test_a_flushed_share_needs_values_and_a_known_format() -> None:
    """All zero: nothing to flush. An unknown format names the known ones."""
    assert Histograms.of([np.zeros(9)])[0].flushed_share("float16") == 0.0
    assert Histograms.of([np.full(9, 2.0**-26)])[0].flushed_share("float16") == 1.0
    with pytest.raises(ValueError, match=r"unknown format 'int8'; there are float16, bfloat16"):
        Histograms.of([[1.0]])[0].flushed_share("int8")


@settings(max_examples=100, deadline=None)
@given(
    places=st.lists(st.tuples(st.integers(0, 4), st.integers(0, SIZE - 1), st.integers(1, 2**40)), max_size=30),
)
def test_only_occupied_buckets_are_kept_and_all_of_them(places: list[tuple[int, int, int]]) -> None:
    """from_dense and dense are inverse, tensors without a value included."""
    dense = np.zeros((5, SIZE), dtype=np.int64)
    for tensor, bucket, count in places:
        dense[tensor, bucket] = count
    sparse = Histograms.from_dense(dense)
    assert np.array_equal(sparse.dense(), dense)
    assert len(sparse) == 5 and len(sparse.buckets) == (dense > 0).sum()
    for tensor in range(-5, 5):
        assert sparse[tensor].count == dense[tensor].sum()
        assert np.array_equal(sparse[tensor].buckets, np.flatnonzero(dense[tensor]))
    for beyond in (5, -6):
        with pytest.raises(IndexError):
            sparse[beyond]


@settings(max_examples=100, deadline=None)
@given(
    values=arrays.arrays(np.float32, st.integers(0, 60), elements=st.floats(-(2.0**50), 2.0**50, width=32)),
    power=st.integers(-60, 60),
)
def test_scaling_by_a_power_of_two_is_exact(values: np.ndarray, power: int) -> None:
    """As long as no value leaves the normal range; zeros, NaN and Inf stay where they are."""
    values = np.where(np.abs(values) < 1e-18, np.copysign(np.float32(0), values), values)
    values = np.concatenate([values, np.array([np.nan, np.inf, -np.inf, 0.0, -0.0], dtype=np.float32)])
    scaled = Histograms.of([values]).scaled(2.0**power)
    assert np.array_equal(scaled.dense(), Histograms.of([values * np.float32(2.0**power)]).dense())


def test_scaling_by_any_factor_keeps_quantiles_within_a_bucket() -> None:
    """A factor that is no power of two moves whole buckets: half of one is lost, and no value."""
    values = np.random.default_rng(5).normal(size=5000)
    for factor in (0.3, 1 / 1000, 777.0):
        scaled = Histograms.of([values]).scaled(factor)[0]
        truth = np.quantile(values * factor, QUANTILES, method="inverted_cdf")
        assert scaled.count == 5000
        assert (np.abs(scaled.quantile(QUANTILES) - truth) <= 0.3 * np.abs(truth)).all()


def test_scaling_out_of_range_neither_loses_nor_invents_infinities() -> None:
    """Too large stays finite, too small becomes zero, and the count stays."""
    scaled = Histograms.of([np.array([1e30, -1e30, 1e-30, np.inf])])
    large, small = scaled.scaled(2.0**100)[0], scaled.scaled(2.0**-100)[0]
    assert large.count == small.count == 4
    assert FINITE[large.buckets].sum() == 3  # one bucket for each finite value
    assert float(small.quantile(0.5)) == 0.0


def test_an_empty_histogram_is_a_histogram() -> None:
    """A tensor without elements."""
    empty = Histograms.of([[]])[0]
    assert isinstance(empty, Histogram) and empty.count == 0 and empty.edges()[0].size == 0
    assert len(Histograms.of([])) == 0 and len(Histograms.of([]).dense()) == 0
