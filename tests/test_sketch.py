"""Sketches: the norm of a change, of whatever shape it is, against float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from holter.statistics import sketch
from holter.statistics.measure import Measurer
from holter.statistics.sketch import WIDTH, fold_on_host

SIZE = 40 * WIDTH + 12_345
RANDOM = np.random.default_rng(5)


def outer(rows: int) -> np.ndarray:
    """Of rank one and of one sign: every row is like every other."""
    return np.outer(RANDOM.random(SIZE // rows), RANDOM.random(rows)).ravel()


CHANGES: dict[str, Callable[[], np.ndarray]] = {
    "bell": lambda: RANDOM.normal(size=SIZE),
    "constant": lambda: np.ones(SIZE),
    "heavy tails": lambda: RANDOM.standard_t(2.1, size=SIZE),
    "one value": lambda: np.eye(1, SIZE, 77_777)[0],
    "a few rows": lambda: np.repeat(RANDOM.random(SIZE // 100) < 0.01, 100).astype(float),
    "rank one of width 1024": lambda: outer(1024),
    "rank one of width 768": lambda: outer(768),
    "period of a sketch": lambda: np.resize(RANDOM.normal(size=WIDTH), SIZE),
    "signs": lambda: np.sign(RANDOM.normal(size=SIZE)),
}


def found_norm(change: np.ndarray, *, dtype: torch.dtype = torch.float32, rate: float = 1e-4) -> tuple[float, float]:
    """Of the change as two sketches tell it, and as it really is."""
    weights = torch.from_numpy(0.02 * np.random.default_rng(1).normal(size=len(change))).to(dtype)
    after = (weights.double() - rate * torch.from_numpy(change)).to(dtype)
    folded = fold_on_host([after]) - fold_on_host([weights])
    return folded.norm().item(), (after.double() - weights.double()).norm().item()


@pytest.mark.parametrize("name", CHANGES)
def test_the_norm_of_a_change_is_found_whatever_its_distribution(name: str) -> None:
    found, exact = found_norm(CHANGES[name]())
    assert found == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_change_of_the_last_bits_is_found(dtype: torch.dtype) -> None:
    """A sum in float32 would drown it: the weights are a million times as large."""
    rate = {torch.float64: 1e-14, torch.float32: 1e-8}.get(dtype, 1e-4)
    found, exact = found_norm(CHANGES["bell"](), dtype=dtype, rate=rate)
    assert exact > 0 and found == pytest.approx(exact, rel=0.03)


def test_the_error_is_that_of_the_theory() -> None:
    """A relative spread of sqrt(1 / (2 WIDTH)): were the signs of a tensor alike in places, it would be larger."""
    for change in (CHANGES["constant"](), CHANGES["bell"]()):
        line = torch.from_numpy(change)
        errors = []
        for seed in range(24):
            flips = torch.from_numpy(np.random.default_rng(seed).permutation(len(line) // 512))
            mixed = line[: len(flips) * 512].view(-1, 512)[flips].flatten()
            errors.append(fold_on_host([mixed]).norm().item() / mixed.norm().item() - 1)
        assert np.sqrt(np.mean(np.square(errors))) < 2 * np.sqrt(1 / (2 * WIDTH))


def test_short_tensors_are_their_own_sketch() -> None:
    tensors = [torch.randn(WIDTH), torch.randn(3), torch.empty(0), torch.randn(WIDTH + 1)]
    folded = fold_on_host(tensors)
    assert len(folded) == WIDTH + 3 + 0 + WIDTH
    assert torch.equal(folded[: WIDTH + 3], torch.cat(tensors[:2]).double())


def test_the_same_bits_every_time_and_no_change_is_zero() -> None:
    line = torch.randn(SIZE)
    assert torch.equal(fold_on_host([line]), fold_on_host([line.clone()]))


def test_what_is_not_finite_does_not_pass_for_a_number() -> None:
    line = torch.randn(SIZE)
    line[5] = torch.nan
    assert not torch.isfinite(fold_on_host([line])).all()


def test_one_table_of_signs_would_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: signs that are the same in every chunk add up where a change repeats itself."""
    monkeypatch.setattr(sketch, "_shifts", lambda chunks: [[0, 0]] * chunks)
    found, exact = found_norm(np.ones(SIZE))
    assert abs(found / exact - 1) > 0.03


def test_a_device_without_a_kernel_has_no_sketch() -> None:
    line: Tensor = torch.empty(10, device="meta")
    assert Measurer().fold([line]) is None


def test_the_kernels_fold_like_any_other() -> None:
    """By Triton's interpreter where there is no GPU: other signs than the host's, the same norms."""
    pytest.importorskip("triton")
    from holter.statistics.triton_sketch import TritonFolder

    device = "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator().manual_seed(3)
    lines = [
        torch.randn(100, generator=random),
        torch.randn(WIDTH, generator=random).bfloat16(),
        torch.empty(0),
        torch.randn(20_000, generator=random, dtype=torch.float64),
        torch.ones(66 * WIDTH + 5),
        torch.randn(3 * WIDTH, generator=random).half(),
        torch.arange(10),
    ]
    folder = TritonFolder()
    folded = folder.fold([line.to(device) for line in lines]).cpu()
    assert torch.equal(folded, folder.fold([line.to(device) for line in lines]).cpu())
    widths = [min(len(line), WIDTH) for line in lines]
    for line, found in zip(lines, folded.split(widths), strict=True):
        if len(line) <= WIDTH:
            assert torch.equal(found, line.double())
        else:
            assert found.norm().item() == pytest.approx(line.double().norm().item(), rel=0.03)
