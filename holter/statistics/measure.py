"""Measuring any tensors: what they are as plain numbers, and the backend that measures those on their device.

Nothing here waits for the device except `measure_rows` (and sparse tensors on CUDA, which must be coalesced).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from holter.statistics.device_rows import Backend, DeviceRows
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows
from holter.statistics.sketch import fold_on_host
from holter.statistics.torch_rows import TorchRows

if TYPE_CHECKING:
    from holter.statistics.triton_rows import TritonRows


def measure_rows(tensors: Sequence[Tensor], *, histograms: bool = False) -> Rows:
    """Rows of these tensors on the host. Waits for the device: for direct use, not for the training thread."""
    rows = Measurer(sample=1).measure(tensors, histograms=histograms)
    dense = rows.histograms
    return Rows(
        rows.values.cpu().double().numpy(),
        Histograms.from_dense(dense.cpu().numpy()) if dense is not None else None,
    )


def are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether these are plain tensors of one device, all of which can be measured."""
    kinds = {(type(tensor), tensor.dtype, tensor.layout, tensor.device, tensor.is_nested) for tensor in tensors}
    return len({device for _, _, _, device, _ in kinds}) == 1 and all(
        kind in _ORDINARY and _refusal(dtype, layout, device.type, nested) is None
        for kind, dtype, layout, device, nested in kinds
    )


def unmeasurable(tensor: Tensor) -> str | None:
    """Why this tensor cannot be measured, or None where it can."""
    return _refusal(tensor.dtype, tensor.layout, tensor.device.type, tensor.is_nested)


@cache  # a training asks it of every tensor, and there are few kinds
def _refusal(dtype: torch.dtype, layout: torch.layout, device: str, is_nested: bool) -> str | None:
    if device == "meta":
        return "it is on the meta device and holds no values"
    if is_nested:
        return "nested tensors are not supported"
    if dtype in _QUANTIZED:
        return "quantized tensors are not supported"
    if layout is torch._mkldnn or not _is_readable(dtype, device):  # type: ignore[attr-defined]
        return f"{layout} tensors of {dtype} are not supported"
    return None


_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def _is_readable(dtype: torch.dtype, device: str) -> bool:
    """Whether torch can turn this dtype into numbers: it cannot for packed 4-bit floats and raw bits."""
    try:
        torch.empty(1, dtype=dtype, device=device).to(torch.complex64 if dtype.is_complex else torch.float32)
    except (NotImplementedError, RuntimeError):
        return False
    return True


class Measurer:
    """Measures lists of tensors again and again; its backends keep what lists of the same make have in common.

    On CUDA the kernels of Triton do it in one launch, where there are any; everywhere else, and whenever they fail,
    plain torch does. Of large tensors on CUDA one block in `sample` has its buckets counted; 1 counts all.
    """

    def __init__(self, tell: Callable[[BaseException], None] | None = None, *, sample: int = 8) -> None:
        self._torch: Backend = TorchRows()
        self._tell, self._sample = tell, sample
        self._fused: TritonRows | None = None
        self._may_fuse = True

    def measure(self, tensors: Sequence[Tensor], *, histograms: bool = False) -> DeviceRows:
        """One row a tensor, in their order; all of them on one device."""
        with torch.inference_mode(False), torch.no_grad():  # what is kept must be usable outside of the user's mode
            plain, implicit = _as_numbers(tensors)
            rows = self._measure_fused(plain, histograms) if plain and plain[0].is_cuda else None
            if rows is None:
                rows = self._torch.measure(plain, histograms)
            if implicit is not None:
                _add_implicit_zeros(rows, implicit)
        return rows

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Compiles what tensors like these will need, before the training starts."""
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            fused = self._fused_backend()
            if fused is not None:
                try:
                    fused.prepare({tensor.dtype for tensor in tensors if tensor.device == device}, device)
                except Exception as error:
                    self._do_without(error)

    def can_clip(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `measure_and_clip` can take these."""
        fused = self._fused_backend() if tensors and tensors[0].is_cuda else None
        return fused is not None and fused.can_clip(tensors)

    def measure_and_clip(
        self, tensors: Sequence[Tensor], max_norm: float, *, histograms: bool = False
    ) -> tuple[DeviceRows, Tensor] | None:
        """The rows of these tensors, which are then scaled down to this norm, and the norm they had; None where the
        kernels failed, and nothing is changed."""
        fused = self._fused_backend()
        assert fused is not None
        try:
            with torch.inference_mode(False), torch.no_grad():
                return fused.measure_and_clip(tensors, max_norm, histograms)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            self._do_without(error)
            return None

    def fold(self, lines: Sequence[Tensor]) -> Tensor | None:
        """The sketches of these tensors of one dimension, one after the other; None where there is nothing to make
        them: elsewhere than on the CPU and on CUDA."""
        device = lines[0].device.type
        if device == "cpu":
            return fold_on_host(lines)
        fused = self._fused_backend() if device == "cuda" else None
        if fused is None:
            return None
        try:
            return fused.fold(lines)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            self._do_without(error)
            return None

    def _measure_fused(self, tensors: list[Tensor], histograms: bool) -> DeviceRows | None:
        fused = self._fused_backend()
        if fused is None:
            return None
        try:
            return fused.measure(tensors, histograms)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # no C compiler, an unknown chip: Triton finds out when it is first used
            self._do_without(error)
            return None

    def _fused_backend(self) -> TritonRows | None:
        if self._fused is None and self._may_fuse:
            try:
                from holter.statistics.triton_rows import Shape, TritonRows

                self._fused = TritonRows(Shape(sample=self._sample))
            except ImportError:  # as on Windows: nothing is wrong, it only takes longer
                self._may_fuse = False
        return self._fused

    def _do_without(self, error: Exception) -> None:
        self._fused, self._may_fuse = None, False
        if self._tell is not None:
            self._tell(error)


def _as_numbers(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[int] | None]:
    """The tensors as strided real numbers, and how many zeros their sparse forms leave out, if any do."""
    kinds = {(type(tensor), tensor.dtype, tensor.layout, tensor.requires_grad) for tensor in tensors}
    if all(
        kind is Tensor and not dtype.is_complex and layout is torch.strided and not graph
        for kind, dtype, layout, graph in kinds
    ):
        return list(tensors), None
    parts = [numbers_in(tensor) for tensor in tensors]
    implicit = [zeros for _, zeros in parts]
    return [numbers for numbers, _ in parts], implicit if any(implicit) else None


_ORDINARY = (Tensor, torch.nn.Parameter)


def numbers_in(tensor: Tensor) -> tuple[Tensor, int]:
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
    extra = torch.tensor(implicit, dtype=rows.values.dtype, device=rows.values.device)
    column = dict(zip(COLUMNS, rows.values.unbind(1), strict=True))
    column["count"] += extra
    column["zeros"] += extra
    column["min"].copy_(torch.where(extra > 0, column["min"].clamp(max=0), column["min"]))
    column["max"].copy_(torch.where(extra > 0, column["max"].clamp(min=0), column["max"]))
    if rows.histograms is not None:
        rows.histograms[:, 0] += extra.long()
