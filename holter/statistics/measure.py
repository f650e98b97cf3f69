"""Measuring any tensors: what they are as plain numbers, and the backend that measures those on their device.

Nothing here waits for the device except `measure_rows` (and sparse tensors on CUDA, which must be coalesced).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from holter.statistics.device_rows import Backend, DeviceRows
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows
from holter.statistics.torch_rows import TorchRows


def measure_rows(tensors: Sequence[Tensor], *, histograms: bool = False) -> Rows:
    """Rows of these tensors on the host. Waits for the device: for direct use, not for the training thread."""
    rows = Measurer().measure(tensors, histograms=histograms)
    dense = rows.histograms
    return Rows(
        rows.values.cpu().double().numpy(),
        Histograms.from_dense(dense.cpu().numpy()) if dense is not None else None,
    )


def unmeasurable(tensor: Tensor) -> str | None:
    """Why this tensor cannot be measured, or None where it can."""
    if tensor.device.type == "meta":
        return "it is on the meta device and holds no values"
    if tensor.is_nested:
        return "nested tensors are not supported"
    if tensor.is_quantized:
        return "quantized tensors are not supported"
    if tensor.is_mkldnn or not _is_readable(tensor.dtype, tensor.device.type):
        return f"{tensor.layout} tensors of {tensor.dtype} are not supported"
    return None


@cache
def _is_readable(dtype: torch.dtype, device: str) -> bool:
    """Whether torch can turn this dtype into numbers: it cannot for packed 4-bit floats and raw bits."""
    try:
        torch.empty(1, dtype=dtype, device=device).to(torch.complex64 if dtype.is_complex else torch.float32)
    except (NotImplementedError, RuntimeError):
        return False
    return True


class Measurer:
    """Measures lists of tensors again and again; its backends keep what lists of the same make have in common."""

    def __init__(self) -> None:
        self._torch: Backend = TorchRows()

    def measure(self, tensors: Sequence[Tensor], *, histograms: bool = False) -> DeviceRows:
        """One row a tensor, in their order; all of them on one device."""
        with torch.no_grad():
            parts = [_as_numbers(tensor) for tensor in tensors]
            rows = self._torch.measure([part for part, _ in parts], histograms)
            _add_implicit_zeros(rows, [zeros for _, zeros in parts])
        return rows


def _as_numbers(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor as strided real numbers, and how many zeros its sparse form leaves out."""
    plain = tensor.detach()
    if hasattr(plain, "to_local"):  # a DTensor: this process's shard
        plain = plain.to_local()
    implicit = 0
    if plain.layout is not torch.strided:
        sparse = plain if plain.layout is torch.sparse_coo else plain.to_sparse_coo()
        values = sparse.coalesce().values()
        implicit, plain = plain.numel() - values.numel(), values
    if plain.is_complex():
        plain = torch.view_as_real(plain.resolve_conj())  # a number counts as its two parts
        implicit *= 2
    return plain, implicit


def _add_implicit_zeros(rows: DeviceRows, implicit: list[int]) -> None:
    if not any(implicit):
        return
    extra = torch.tensor(implicit, dtype=rows.values.dtype, device=rows.values.device)
    column = dict(zip(COLUMNS, rows.values.unbind(1), strict=True))
    column["count"] += extra
    column["zeros"] += extra
    column["min"].copy_(torch.where(extra > 0, column["min"].clamp(max=0), column["min"]))
    column["max"].copy_(torch.where(extra > 0, column["max"].clamp(min=0), column["max"]))
    if rows.histograms is not None:
        rows.histograms[:, 0] += extra.long()
