"""What every backend must give: rows and histograms as plain float64 arithmetic gives them, for any tensor.

`complaints` compares measured rows with numpy's; `CASES` are the tensors that a training can hand over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from holter.statistics.blocks import LARGE_BLOCK, SMALL_BLOCK, SMALL_MODEL
from holter.statistics.histogram import FINITE, Histograms
from holter.statistics.rows import COLUMNS, Rows

EXACT = ("count", "zeros", "nans", "infs_positive", "infs_negative", "min", "max")
POWERS = {"sum": 1, "sum_abs": 1, "sum_squares": 2, "sum_fourths": 4}
SIZES = (1, 2, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, 9000)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)


def numbers_in(tensor: Tensor) -> np.ndarray:
    """The values of a tensor, one float64 each; a complex number counts as its two parts."""
    dense = tensor.detach()
    dense = dense.to_dense() if dense.layout is not torch.strided else dense
    dense = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    return dense.to(torch.float64).resolve_neg().contiguous().numpy().reshape(-1)


def expected_row(tensor: Tensor) -> dict[str, float]:
    values = numbers_in(tensor)
    finite = values[np.isfinite(values)]
    return {
        "count": values.size,
        "zeros": int((values == 0).sum()),
        "nans": int(np.isnan(values).sum()),
        "infs_positive": int((values == np.inf).sum()),
        "infs_negative": int((values == -np.inf).sum()),
        "sum": finite.sum(),
        "sum_abs": np.abs(finite).sum(),
        "sum_squares": (finite**2).sum(),
        "sum_fourths": (finite**4).sum(),
        "min": finite.min(initial=np.inf),
        "max": finite.max(initial=-np.inf),
    }


def complaints(tensors: Sequence[Tensor], rows: Rows) -> list[str]:
    """Where these rows are not those of these tensors."""
    found = []
    for place, tensor in enumerate(tensors):
        row, expected = dict(zip(COLUMNS, rows.values[place], strict=True)), expected_row(tensor)
        scale = np.abs(np.where(np.isfinite(numbers_in(tensor)), numbers_in(tensor), 0))
        about = f"{tensor.dtype} {tuple(tensor.shape)}"
        found += [
            f"{name} of {about} is {row[name]}, not {expected[name]}" for name in EXACT if row[name] != expected[name]
        ]
        for name, power in POWERS.items():
            if not abs(row[name] - expected[name]) <= 1e-6 * (scale**power).sum():
                found.append(f"{name} of {about} is {row[name]}, not {expected[name]}")
        if rows.histograms is not None:
            truth, counts = Histograms.of([numbers_in(tensor)]).dense()[0], rows.histograms.dense()[place]
            if not np.array_equal(counts[FINITE], truth[FINITE]) or counts.sum() != truth.sum():
                found.append(f"the histogram of {about} is another")
    return found


def a_generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=a_generator(seed))


def with_zeros(tensor: Tensor) -> Tensor:
    return torch.where(tensor.abs() > 0.4, tensor, 0.0)


def mixed(size: int) -> Tensor:
    values = normal(size)
    values[::7], values[1::11], values[2::13], values[3::17] = torch.nan, torch.inf, -torch.inf, 0.0
    return values


def uncoalesced(dtype: torch.dtype = torch.float32) -> Tensor:
    places = torch.tensor([[3, 0, 3, 7, 1], [1, 2, 1, 0, 0]])
    infinite = 0.5 if dtype.is_complex else torch.inf  # torch's own to_dense() makes NaN of a complex infinity
    values = torch.tensor([1.5, -2.0, 4.0, 0.0, infinite]).to(dtype)
    with torch.sparse.check_sparse_tensor_invariants():  # torch 2.11 warns where it is asked for by an argument
        return torch.sparse_coo_tensor(places, values, (9, 4))


def strided_cases() -> Iterator[Tensor]:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, *FLOAT8):
        yield with_zeros(normal(300, 7)).to(dtype)
    for dtype in (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64):
        yield torch.arange(700).remainder(97).to(dtype)
    yield torch.tensor([2**30 + 1, -(2**40) - 3, 0, 5])  # integers that float32 would round
    yield torch.arange(100) % 3 == 0
    for dtype in (torch.complex64, torch.complex128):
        yield torch.complex(normal(90), with_zeros(normal(90, seed=1))).to(dtype)
    yield torch.complex(normal(90), normal(90, seed=1)).conj()
    yield torch.complex(normal(90), normal(90, seed=1)).conj().imag  # a view with the sign still to be taken
    yield from (torch.zeros(0), torch.zeros(3, 0, 2, dtype=torch.float16), torch.tensor(-2.5), torch.tensor(torch.nan))
    yield normal(1, 5).expand(400, 5)
    yield from (normal(50, 60).T, normal(40, 40)[::3, 1::2], normal(2, 3, 4, 5).to(memory_format=torch.channels_last))
    yield normal(300, 301).T
    for size in (5000, 70_000):
        yield torch.full((size,), 1.1)  # rounding errors all point the same way
        yield -torch.full((size,), 3.3).half()


def extreme_cases() -> Iterator[Tensor]:
    for size in (70, 700, 5000, 70_001):
        for scale in (1e38, 1e20, 1e-20, 1e-30, 1e-38):
            yield normal(size).clamp(-3, 3) * scale
        yield torch.arange(size).remainder(50).to(torch.int32).view(torch.float32)  # denormals
        yield from (torch.full((size,), torch.nan), torch.full((size,), torch.inf), torch.full((size,), -torch.inf))
        yield from (mixed(size), mixed(size).double(), mixed(size).half(), mixed(size).bfloat16())
        yield from (torch.zeros(size), -torch.zeros(size), normal(size).double() * 1e60)
        yield torch.cat([normal(size) * 1e-25, normal(size) * 1e25])
        for power in (-34, -24, 15, 16, 24):  # the borders of what is summed without care
            yield torch.full((size,), 2.0**power)
        yield torch.tensor([3.4e38, -3.4e38, 0.0, 1e-45]).repeat(size)


def sparse_cases() -> Iterator[Tensor]:
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64):
        yield uncoalesced(dtype)
    yield uncoalesced().coalesce()
    yield torch.sparse_coo_tensor(torch.tensor([[4, 1]]), normal(2, 3), (6, 3), check_invariants=True)
    yield torch.sparse_coo_tensor(size=(5, 2), check_invariants=True)
    yield torch.sparse_coo_tensor(size=(0, 2), check_invariants=True)
    table = torch.where(normal(8, 1, seed=3) > 0, with_zeros(normal(8, 6)), 0.0)
    yield from (table.to_sparse_csr(), table.to_sparse_csc(), table.to_sparse_bsr((2, 3)), (table + 0j).to_sparse_csr())


def sized_cases() -> Iterator[Tensor]:
    for size in SIZES:
        yield with_zeros(normal(size, seed=size))
        yield normal(size, seed=size).double() - 2  # negative throughout: padding must not become the maximum
        yield -normal(size, seed=size).abs().half() - 1
    for size in (
        SMALL_BLOCK - 1,
        SMALL_BLOCK,
        SMALL_BLOCK + 1,
        SMALL_MODEL,
        SMALL_MODEL + 1,
        SMALL_MODEL + LARGE_BLOCK,
    ):
        yield normal(size, seed=size) + 3
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        yield with_zeros(normal(70_001)).to(dtype)
        yield with_zeros(normal(LARGE_BLOCK + 5001)).to(dtype)
        yield normal(LARGE_BLOCK // 4).to(dtype) * 1e-20


CASES = {"strided": strided_cases, "extreme": extreme_cases, "sparse": sparse_cases, "sized": sized_cases}
