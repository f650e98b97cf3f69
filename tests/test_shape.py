"""Shapes: generated data of a known kind, over seeds, sizes and scales, must be recognised from the histogram."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from holter.statistics import shape as module
from holter.statistics.histogram import Histograms
from holter.statistics.shape import MEANINGS, Shape, shape_of

Array = npt.NDArray[np.float64]
Maker = Callable[[np.random.Generator, int], Array]
SIZES, SCALES, SEEDS = (500, 4_000, 200_000), (1e-8, 3e-4, 1.0, 1e3), 8


def mixture(*centres: float) -> Maker:
    return lambda rng, n: rng.normal(size=n) + rng.choice(centres, size=n)


MAKERS: dict[str, tuple[str, Maker]] = {
    "normal": ("bell", lambda rng, n: rng.normal(size=n)),
    "uniform": ("bell", lambda rng, n: rng.uniform(-1, 1, n)),
    "laplace": ("bell", lambda rng, n: rng.laplace(size=n)),
    "slightly off": ("bell", lambda rng, n: 0.5 + rng.normal(size=n)),
    "student t(2)": ("heavy-tailed", lambda rng, n: rng.standard_t(2, n)),
    "cauchy": ("heavy-tailed", lambda rng, n: rng.standard_cauchy(n)),
    "constant": ("collapsed", lambda rng, n: np.full(n, rng.normal())),
    "nearly constant": ("collapsed", lambda rng, n: rng.choice([-1, 1]) * (1 + 1e-3 * rng.normal(size=n))),
    "normal + 2": ("shifted", lambda rng, n: 2 + rng.normal(size=n)),
    "normal - 5": ("shifted", lambda rng, n: -5 + rng.normal(size=n)),
    "normal + 10": ("shifted", lambda rng, n: 10 + rng.normal(size=n)),
    "half-normal": ("shifted", lambda rng, n: np.abs(rng.normal(size=n))),
    "exponential": ("shifted", lambda rng, n: -rng.exponential(size=n)),
    "two normals": ("several-peaks", mixture(-2.5, 2.5)),
    "two normals, uneven": ("several-peaks", mixture(-3, -3, 3)),
    "two normals, one side": ("several-peaks", mixture(4, 12)),
    "three normals": ("several-peaks", mixture(-6, 0, 6)),
    "60 % zeros": ("spike-at-zero", lambda rng, n: np.where(rng.random(n) < 0.6, 0, rng.normal(size=n))),
    "after ReLU": ("spike-at-zero", lambda rng, n: np.maximum(rng.normal(size=n) - 0.25, 0)),
}


def shape(values: npt.ArrayLike) -> Shape:
    return shape_of(Histograms.of([values])[0])


def accuracy(name: str, sizes: tuple[int, ...] = SIZES, seeds: int = SEEDS) -> float:
    kind, make = MAKERS[name]
    hits = []
    for n, scale in itertools.product(sizes, SCALES):
        for seed in range(seeds if n < 100_000 else 2):
            hits.append(shape(make(np.random.default_rng([seed, n]), n) * scale).kind == kind)
    return float(np.mean(hits))


@pytest.mark.parametrize("name", MAKERS)
def test_each_kind_is_recognised_over_seeds_sizes_and_scales(name: str) -> None:
    assert accuracy(name) >= 0.95


def test_a_normal_is_never_anything_but_a_bell() -> None:
    assert accuracy("normal") == accuracy("normal", sizes=(500, 1000), seeds=200) == 1.0


@pytest.mark.parametrize(
    ("name", "gate", "value"),
    [
        ("nearly constant", "COLLAPSED_SHARE", 2.0),
        ("normal + 10", "COLLAPSED_SHARE", 0.5),
        ("60 % zeros", "SPIKE_SHARE", 2.0),
        ("normal", "SPIKE_SHARE", 0.0),
        ("student t(2)", "HEAVY_TAIL", 20.0),
        ("normal", "HEAVY_TAIL", 0.9),
        ("half-normal", "ONE_SIDED_SHARE", 1.1),
        ("slightly off", "ONE_SIDED_SHARE", 0.6),
        ("two normals", "VALLEY", 0.0),
        ("three normals", "PEAK_SHARE", 0.6),
        ("two normals", "NOISE", 1e3),
        ("two normals", "MOST_BINS", 1),
    ],
)
def test_a_planted_threshold_is_seen(name: str, gate: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, gate, value)
    assert accuracy(name, sizes=(500, 4_000)) < 0.95


def test_peaks_without_a_test_for_noise_or_a_division_by_width_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "NOISE", 1e-9)
        patch.setattr(module, "VALLEY", 1.0)
        assert accuracy("uniform", sizes=(500,)) < 0.95
    plain = module._count_peaks
    monkeypatch.setattr(module, "_count_peaks", lambda counts, widths: plain(counts, np.ones_like(widths)))
    assert min(accuracy(name, sizes=(4_000, 200_000)) for name in ("normal", "uniform", "half-normal")) < 0.95


@pytest.mark.parametrize("name", MAKERS)
def test_a_power_of_two_changes_nothing_but_the_scale(name: str) -> None:
    values = MAKERS[name][1](np.random.default_rng(3), 3_000).astype(np.float32).astype(np.float64)
    one = shape(values)
    for exponent in (-60, -7, 1, 40):
        other, factor = shape(values * 2.0**exponent), 2.0**exponent
        scaled = {key: getattr(one, key) * factor for key in ("lower_quartile", "median", "upper_quartile")}
        assert vars(other) == vars(one) | scaled


@pytest.mark.parametrize("name", MAKERS)
def test_the_mirror_image_has_the_same_kind(name: str) -> None:
    values = MAKERS[name][1](np.random.default_rng(4), 3_000)
    assert (shape(-values).kind, shape(-values).peaks) == (shape(values).kind, shape(values).peaks)


def test_the_evidence_is_near_numpys() -> None:
    values = 3 + np.random.default_rng(0).normal(size=100_000)
    found = shape(np.concatenate([values, np.zeros(1_000), [np.nan, np.inf]]))
    truth = np.quantile(values, [0.25, 0.5, 0.75])
    np.testing.assert_allclose([found.lower_quartile, found.median, found.upper_quartile], truth, rtol=0.05)
    assert found.count == 101_000 and found.zero_share == 1_000 / 101_000
    assert found.one_sided == max((values > 0).mean(), (values < 0).mean())
    assert found.tail_ratio == pytest.approx(1, abs=0.15) and found.peaks == 1


@pytest.mark.parametrize(("centres", "peaks"), [((0,), 1), ((-3, 3), 2), ((-6, 0, 6), 3), ((-14, -5, 0, 5, 14), 5)])
def test_peaks_are_counted(centres: tuple[float, ...], peaks: int) -> None:
    found = [shape(mixture(*centres)(np.random.default_rng(seed), 20_000)).peaks for seed in range(20)]
    assert found == [peaks] * 20


def test_a_few_outliers_are_no_peak() -> None:
    rng = np.random.default_rng(0)
    found = shape(np.concatenate([rng.normal(size=10_000), 50 + rng.normal(size=200)]))
    assert (found.kind, found.peaks) == ("heavy-tailed", 1)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([], "empty"),
        ([np.nan, np.inf, -np.inf], "empty"),
        ([0.0] * 9, "collapsed"),
        ([1e-45] * 9, "collapsed"),  # below 2**-128: as good as zero
        ([-0.3] * 9 + [np.nan], "collapsed"),
        ([-1.0] * 50 + [1.0] * 50, "several-peaks"),
        ([0.0] * 999 + [1.0], "spike-at-zero"),
        ([3.4e38, -3.4e38, 1e-38, -1e-38], "bell"),
    ],
)
def test_corners(values: list[float], kind: str) -> None:
    assert shape(np.array(values, np.float64)).kind == kind


def test_what_stands_beside_a_spike_at_zero_is_told() -> None:
    rng = np.random.default_rng(0)
    assert shape(np.maximum(rng.normal(size=5_000), 0)).without_zeros == "shifted"
    assert shape(np.concatenate([np.zeros(5_000), rng.standard_t(2, 5_000)])).without_zeros == "heavy-tailed"


@pytest.mark.parametrize("size", [16, 40, 100])
def test_small_tensors_are_not_accused(size: int) -> None:
    rng = np.random.default_rng(0)
    assert np.mean([shape(rng.normal(size=size)).kind == "bell" for _ in range(500)]) > 0.99


def test_every_kind_has_a_meaning_of_one_sentence() -> None:
    assert {kind for kind, _ in MAKERS.values()} | {"empty"} == set(MEANINGS)
    assert shape([0.0]).meaning == MEANINGS["collapsed"]
    assert all(text.endswith(".") and text.count(". ") == 0 for text in MEANINGS.values())
