"""Measuring rows by Triton: one launch for all tensors of a list, and clipping by their norm in the same pass.

Where the tensors lie and how they are cut into chunks stands in tables on the device, made once and made again only
when tensors move or change. Nothing here waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from holter.statistics import histogram, triton_kernels
from holter.statistics.device_rows import DeviceRows, current_device, is_dense, sent
from holter.statistics.rows import COLUMNS
from holter.statistics.triton_sketch import TritonFolder

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # in the order of the kernels' kinds
_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
_DTYPE = attrgetter("dtype")
# What float32 cannot hold exactly is measured in float64, the rest of the other dtypes in float32.
_WIDE = (torch.int32, torch.int64, torch.uint32, torch.uint64)
_ALIGNMENT = 16  # bytes, of the widest load
_REMEMBERED_TABLES = 256  # a list an activation and some more; lists that keep changing must not make it grow
_STRIDE = 16  # columns of a partial row in memory, as in the kernels


@dataclass(frozen=True)
class Shape:
    """How the kernels cut their work: a tile is lines x width elements, a chunk so many tiles."""

    lines: int = 16
    width: int = 1024
    tiles: int = 4
    warps: int = 4
    # Buckets are counted by programs of their own, several a chunk.
    parts: int = 8
    counted: int = 512
    counting_warps: int = 4
    sample: int = 8  # of large tensors one block in so many is counted; 1 counts all

    @property
    def chunk(self) -> int:
        return self.lines * self.width * self.tiles


class TritonRows:
    """Measures lists of tensors again and again, and clips them by the norm that was found."""

    def __init__(self, shape: Shape | None = None) -> None:
        self._shape = shape or Shape()
        self._tables: dict[object, _Tables] = {}
        self._folder = TritonFolder()

    def measure(self, tensors: Sequence[Tensor], histograms: bool) -> DeviceRows:
        """One row a tensor, in their order. Their values may be read until the device has done it."""
        flat = tensors if _are_readable(tensors) else [_readable(tensor) for tensor in tensors]
        return self._tables_for(flat).measure(histograms)

    def can_clip(self, tensors: Sequence[Tensor]) -> bool:
        """Whether all of these can be scaled where they lie; in float64 a norm in float32 would not do."""
        kinds = {(type(tensor), tensor.dtype, tensor.device, tensor.layout) for tensor in tensors}
        return (
            len({device for _, _, device, _ in kinds}) == 1
            and all(
                kind is Tensor and dtype in DTYPES[:3] and layout is torch.strided for kind, dtype, _, layout in kinds
            )
            and all(is_dense(tensor) and not tensor.is_neg() for tensor in tensors)
        )

    def measure_and_clip(
        self, tensors: Sequence[Tensor], max_norm: float, histograms: bool
    ) -> tuple[DeviceRows, Tensor]:
        """The rows of these tensors, which are then scaled down to this norm, and the norm, in the dtype of torch's."""
        tables = self._tables_for(tensors)
        rows = tables.measure(histograms)
        norm, coefficient = tables.norm(rows, max_norm)
        norm = norm.to(functools.reduce(torch.promote_types, {tensor.dtype for tensor in tensors}))
        for tensor in tensors:  # autograd must know that they are written to
            torch.autograd.graph.increment_version(tensor)
        tables.scale(coefficient)  # last: whatever fails before has changed nothing
        return rows, norm

    def fold(self, lines: Sequence[Tensor]) -> Tensor:
        """The sketches of tensors of one dimension, one after the other."""
        return self._folder.fold(lines)

    def prepare(self, dtypes: set[torch.dtype], device: torch.device) -> None:
        """Has everything compiled that tensors of these dtypes will need."""
        tensors = [torch.zeros(16, dtype=dtype, device=device) for dtype in dtypes if dtype in _CODES]
        if tensors:
            self.measure_and_clip(tensors, 1.0, histograms=True)
            self.fold(tensors)

    def _tables_for(self, tensors: Sequence[Tensor]) -> _Tables:
        sizes = list(map(Tensor.numel, tensors))
        dtypes = list(map(_DTYPE, tensors))
        addresses = list(map(Tensor.data_ptr, tensors))
        device = tensors[0].device if tensors else torch.device("cpu")
        heads = [-address % _ALIGNMENT for address in addresses]  # bytes before the first boundary
        key = (*sizes, *dtypes, *heads, device)
        tables = self._tables.pop(key, None) or _Tables(sizes, dtypes, heads, device, self._shape)
        if len(self._tables) >= _REMEMBERED_TABLES:
            del self._tables[next(iter(self._tables))]  # the one not used for the longest time
        self._tables[key] = tables
        tables.move_to(addresses)
        return tables


def _are_readable(tensors: Sequence[Tensor]) -> bool:
    """Whether all can be read as they lie, as gradients mostly can: asked in a go, which every step's thread feels."""
    return (
        all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and _CODES.keys() >= set(map(_DTYPE, tensors))
    )


def _readable(tensor: Tensor) -> Tensor:
    """The tensor itself where its memory can be read from end to end in a dtype of the kernels, else a copy."""
    if tensor.dtype not in _CODES:
        tensor = tensor.to(torch.float64 if tensor.dtype in _WIDE else torch.float32)
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor if is_dense(tensor) else tensor.contiguous()


class _Tables:
    """Where the tensors of one make lie and which chunks they have, on the device."""

    def __init__(
        self, sizes: list[int], dtypes: list[torch.dtype], heads: list[int], device: torch.device, shape: Shape
    ) -> None:
        self._shape, self._device, self._tensors = shape, device, len(sizes)
        starts, lengths, tensor_of, first = [], [], [], [0]
        for tensor, (size, dtype, head) in enumerate(zip(sizes, dtypes, heads, strict=True)):
            for start, stop in cut(size, head // dtype.itemsize, shape.chunk):
                starts.append(start)
                lengths.append(stop - start)
                tensor_of.append(tensor)
            first.append(len(starts))
        codes = [_CODES[dtype] for dtype in dtypes]
        self._kinds = sum(1 << code for code in set(codes))
        # A bucket of a tensor this large might not fit into 32 bits.
        self._count_dtype = torch.int64 if any(size >= 2**31 for size in sizes) else torch.int32
        self._chunks = len(starts)
        self._first, self._starts = sent(first, device), sent(starts, device)
        self._codes, self._tensor_of, self._lengths = (
            sent(table, device).int() for table in (codes, tensor_of, lengths)
        )
        self._addresses: list[int] = []
        self._address_table = torch.empty(0)

    def move_to(self, addresses: list[int]) -> None:
        if addresses != self._addresses:
            self._addresses = addresses
            if len(addresses) == 1:  # an activation, each time elsewhere: one number needs no memory of the host's
                self._address_table = torch.full((1,), addresses[0], dtype=torch.int64, device=self._device)
            else:
                self._address_table = sent(addresses, self._device)

    def measure(self, histograms: bool) -> DeviceRows:
        rows = torch.empty(self._tensors, len(COLUMNS), dtype=torch.float64, device=self._device)
        partials = torch.empty(self._chunks, _STRIDE, dtype=torch.float64, device=self._device)
        counts, shape = None, self._shape
        if histograms:
            counts = torch.zeros(self._tensors, histogram.SIZE, dtype=self._count_dtype, device=self._device)
        with current_device(self._device):
            if self._chunks:
                triton_kernels.measure_chunks[(self._chunks,)](
                    *self._chunk_tables(), partials,
                    KINDS=self._kinds, LINES=shape.lines, WIDTH=shape.width, TILES=shape.tiles, num_warps=shape.warps,
                )  # fmt: skip
            if self._tensors:
                triton_kernels.add_chunks[(self._tensors,)](partials, self._first, rows, BLOCK=256, num_warps=8)
            if self._chunks and counts is not None:
                triton_kernels.count_chunks[(self._chunks, shape.parts)](
                    *self._chunk_tables(), partials, self._first, counts,
                    KINDS=self._kinds, WHOLE=shape.chunk, PARTS=shape.parts, BLOCK=shape.counted,
                    SAMPLE=shape.sample, num_warps=shape.counting_warps,
                )  # fmt: skip
        return DeviceRows(rows, counts)

    def norm(self, rows: DeviceRows, max_norm: float) -> tuple[Tensor, Tensor]:
        """The norm of all, and the factor that brings it to `max_norm`."""
        norm, coefficient = torch.empty(2, dtype=torch.float32, device=self._device).unbind()
        with current_device(self._device):
            triton_kernels.total_norm[(1,)](rows.values, self._tensors, float(max_norm), norm, coefficient, BLOCK=256)
        return norm, coefficient

    def scale(self, coefficient: Tensor) -> None:
        """Multiplies all by the factor, where that is below 1."""
        with current_device(self._device):
            if self._chunks:
                triton_kernels.scale_chunks[(self._chunks,)](
                    *self._chunk_tables(), coefficient, KINDS=self._kinds, BLOCK=1024
                )

    def _chunk_tables(self) -> tuple[Tensor, ...]:
        return self._address_table, self._codes, self._tensor_of, self._starts, self._lengths


def cut(size: int, head: int, chunk: int) -> list[tuple[int, int]]:
    """The chunks of a tensor as (start, stop): after what lies before the first boundary, each starts on one."""
    head = min(head, size)
    pieces = [(0, head)] if head else []
    return pieces + [(start, min(start + chunk, size)) for start in range(head, size, chunk)]
