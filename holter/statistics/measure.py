"""Measuring rows with plain torch, on any device and of any dtype, in as few passes and calls as it allows.

Tensors are copied, block by block, into one small workspace, all tensors of a block side by side, so that a
reduction is one call for many tensors and works within the cache. A chunk gives a partial row; the partial rows of
a tensor are merged in float64. Nothing here waits for the device except `measure_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from holter.statistics import histogram
from holter.statistics.blocks import BLOCK, Block, Make, plan_blocks
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, MAX, MIN, Rows

_REMEMBERED_PLANS = 8  # lists whose make keeps changing must not make the cache grow
# What float32 cannot hold exactly gets a workspace of float64: integers above 2^24 are not to be rounded.
_WIDE = (torch.float64, torch.int32, torch.int64, torch.uint32, torch.uint64)
_RUN = 256  # fourth powers are summed over runs of at most this many: torch sums them one after the other


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Rows still on their device: values [n, len(COLUMNS)]; histograms int64 [n, SIZE] or None."""

    values: Tensor
    histograms: Tensor | None = None


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
    """Measures lists of tensors again and again; keeps plan and workspace for lists of the same make."""

    def __init__(self) -> None:
        self._plans: dict[object, _Plan] = {}

    def measure(self, tensors: Sequence[Tensor], *, histograms: bool = False) -> DeviceRows:
        """One row a tensor, in their order; all of them on one device."""
        with torch.no_grad():
            parts = [_as_numbers(tensor) for tensor in tensors]
            dense = [part for part, _ in parts]
            rows = self._plan_for(dense).measure(dense, histograms)
            _add_implicit_zeros(rows, [zeros for _, zeros in parts])
        return rows

    def _plan_for(self, tensors: list[Tensor]) -> _Plan:
        device = tensors[0].device if tensors else torch.device("cpu")
        makes = tuple((tensor.numel(), tensor.dtype in _WIDE) for tensor in tensors)
        plan = self._plans.get((makes, device))
        if plan is None:
            if len(self._plans) >= _REMEMBERED_PLANS:
                self._plans.clear()
            plan = self._plans[makes, device] = _Plan([Make(*make) for make in makes], device)
        return plan


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
        plain, implicit = (
            torch.view_as_real(plain.resolve_conj()),
            2 * implicit,
        )  # a number counts as its two parts
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


class _Plan:
    """What depends only on the sizes of the tensors, made once: float32 and float64 work are planned apart."""

    def __init__(self, makes: list[Make], device: torch.device) -> None:
        self._device = device
        self._tensors = len(makes)
        # MPS has no float64; merged sums are then as exact as float32 is.
        self._accumulator = torch.float32 if device.type == "mps" else torch.float64
        blocks = plan_blocks(makes)
        halves = ([block for block in blocks if block.wide is wide] for wide in (False, True))
        self._groups = [_Group(half, device) for half in halves if half]

    def measure(self, tensors: list[Tensor], histograms: bool) -> DeviceRows:
        rows = torch.zeros(self._tensors, len(COLUMNS), dtype=self._accumulator, device=self._device)
        rows[:, MIN], rows[:, MAX] = torch.inf, -torch.inf
        counts = None
        if histograms:
            counts = torch.zeros(self._tensors, histogram.SIZE, dtype=torch.int64, device=self._device)
        flat = [tensor.reshape(-1) for tensor in tensors]
        for group in self._groups:
            group.measure(flat, rows, counts)
        return DeviceRows(rows, counts)


class _Group:
    """Blocks of one workspace dtype: the workspace, and for every chunk of every block what was found in it."""

    def __init__(self, blocks: list[Block], device: torch.device) -> None:
        dtype = torch.float64 if blocks[0].wide else torch.float32
        self._work, self._scratch = (torch.empty(BLOCK, dtype=dtype, device=device) for _ in range(2))
        self._blocks, chunks = [], 0
        chunks_of: dict[int, int] = {}  # tensor -> chunks, in the order of the chunks
        for block in blocks:
            self._blocks.append(_PlacedBlock(block, device, slice(chunks, chunks + len(block.valid))))
            chunks += len(block.valid)
            for tensor in block.tensor_of_chunk:
                chunks_of[tensor] = chunks_of.get(tensor, 0) + 1
        self._found = torch.empty(len(_FOUND), chunks, dtype=dtype, device=device)
        self._nonfinite = torch.zeros(3, chunks, dtype=dtype, device=device)
        self._valid = torch.cat([block.valid for block in self._blocks])
        self._order = _sent(list(chunks_of), device)
        self._lengths = _sent(list(chunks_of.values()), device)

    def measure(self, flat: list[Tensor], rows: Tensor, counts: Tensor | None) -> None:
        """Writes the rows of this group's tensors into `rows`, and adds to the histograms where they are wanted."""
        self._nonfinite.zero_()
        for block in self._blocks:
            block.measure(flat, self._work, self._scratch, self._found, self._nonfinite, counts)
        # One segment a tensor, summed chunk by chunk: always in the same order, so always the same bits.
        sums, low, high = self._partial_rows(rows.dtype)
        rows[self._order] = torch.cat(
            [
                torch.segment_reduce(part, how, lengths=self._lengths, unsafe=True)
                for part, how in ((sums, "sum"), (low, "min"), (high, "max"))
            ],
            dim=1,
        )

    def _partial_rows(self, accumulator: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Per chunk: the summed columns [chunks, 9], min and max [chunks, 1]; the scale is taken out again."""
        nonzero, total, absolute, squares, fourths, scale, low, high = self._found.to(accumulator)
        nonfinite = self._nonfinite.to(accumulator)
        valid = self._valid.to(accumulator)
        zeros = valid - nonzero - nonfinite.sum(0)
        unit = scale.reciprocal()
        moments = [total * unit, absolute * unit, squares * unit**2, fourths * unit**4]
        sums = torch.stack([valid, zeros, *nonfinite, *moments], dim=1)
        return sums, low[:, None], high[:, None]


_FOUND = ("nonzero", "total", "absolute", "squares", "fourths", "scale", "low", "high")


class _PlacedBlock:
    """A block on its device, with the index tensors that its reductions need; `place` is where its chunks report."""

    def __init__(self, block: Block, device: torch.device, place: slice) -> None:
        self._place = place
        self._pieces = block.pieces
        self._shape = (len(block.valid), block.width)
        self.valid = _sent(block.valid, device)
        tails = [chunk for chunk, valid in enumerate(block.valid) if valid < block.width]  # they end in padding
        self._tails = _sent(tails, device)
        self._padding = torch.arange(block.width, device=device) >= self.valid[self._tails, None]  # [tails, width]
        self._tensor_of_chunk = _sent(block.tensor_of_chunk, device)
        self._tensors = slice(min(block.tensor_of_chunk), max(block.tensor_of_chunk) + 1)

    def measure(
        self,
        flat: list[Tensor],
        work: Tensor,
        scratch: Tensor,
        found: Tensor,
        nonfinite: Tensor,
        counts: Tensor | None,
    ) -> None:
        size = self._shape[0] * self._shape[1]
        work, scratch = work[:size].view(self._shape), scratch[:size].view(self._shape)
        nonzero, total, absolute, squares, fourths, scale, low, high = found[:, self._place]
        self._fill(work, flat)
        if counts is not None:
            self._count_buckets(work, counts)
        self._extremes(work, low, high, nonfinite[:, self._place])
        # Scaled by a power of two so that the largest value of a chunk lies in [1, 2): neither squares nor fourth
        # powers can leave the range of float32, and no bit is lost.
        _scale_for(torch.maximum(high, -low), scale)
        torch.mul(work, scale[:, None], out=scratch)
        torch.sum(scratch, 1, out=total)
        torch.sum(scratch.abs_(), 1, out=absolute)
        torch.sum(scratch.square_(), 1, out=squares)
        runs = scratch.view(len(scratch), -1, min(_RUN, self._shape[1]))
        torch.sum(torch.linalg.vector_norm(runs, dim=2).square_(), 1, out=fourths)  # no other call is as fast
        torch.sum(work.sign_().abs_(), 1, out=nonzero)  # non-finite values are zero by now

    def _fill(self, work: Tensor, flat: list[Tensor]) -> None:
        if len(self._tails):
            work.index_fill_(0, self._tails, 0)
        line, start, targets, sources = work.view(-1), 0, [], []
        for tensor, first, last in self._pieces:
            size = last - first
            targets.append(line[start : start + size])
            source = flat[tensor]
            sources.append(source if source.numel() == size else source[first:last])
            start += -(-size // self._shape[1]) * self._shape[1]
        torch._foreach_copy_(targets, sources)

    def _extremes(self, work: Tensor, low: Tensor, high: Tensor, nonfinite: Tensor) -> None:
        """The least and greatest finite value of each chunk; counts NaN, +Inf and -Inf, and sets them to zero."""
        torch.amin(work, 1, out=low)
        torch.amax(work, 1, out=high)
        if work.device.type == "cpu" and bool((high - low).isfinite().all()):
            # All finite, as nearly always. To ask is free on the CPU; elsewhere it would be a wait.
            if len(self._tails):
                tails = work[self._tails]
                low[self._tails] = tails.masked_fill(self._padding, torch.inf).amin(1)
                high[self._tails] = tails.masked_fill_(self._padding, -torch.inf).amax(1)
            return
        kinds = work.isnan(), work == torch.inf, work == -torch.inf
        for count, kind in zip(nonfinite, kinds, strict=True):
            torch.sum(kind, 1, dtype=count.dtype, out=count)
        bad = kinds[0] | kinds[1] | kinds[2]
        unknown = bad.index_put((self._tails,), bad[self._tails] | self._padding)
        torch.amin(work.masked_fill(unknown, torch.inf), 1, out=low)
        torch.amax(work.masked_fill(unknown, -torch.inf), 1, out=high)
        work.masked_fill_(bad, 0)

    def _count_buckets(self, work: Tensor, counts: Tensor) -> None:
        single = work
        if work.dtype is torch.float64:  # too large for float32 is not infinite: the last finite bucket takes it
            limit = torch.finfo(torch.float32).max
            single = torch.where(work.isinf(), work, work.clamp(-limit, limit)).float()
        bucket = (single.view(torch.int32) >> histogram.SHIFT) & (histogram.SIZE - 1)
        mine = counts[self._tensors]
        bucket += ((self._tensor_of_chunk - self._tensors.start) * histogram.SIZE).int()[:, None]
        mine += _count(bucket.view(-1), mine.numel()).view_as(mine)
        padding = self._shape[1] - self.valid
        counts[:, 0].index_add_(0, self._tensor_of_chunk, padding, alpha=-1)  # padding is no value


def _sent(numbers: list[int], device: torch.device) -> Tensor:
    """A table on its device, sent without waiting for what the device is doing."""
    table = torch.tensor(numbers, dtype=torch.int64)
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def _count(places: Tensor, size: int) -> Tensor:
    if places.device.type == "cpu":
        return torch.bincount(places, minlength=size)
    counts = torch.zeros(size, dtype=torch.int64, device=places.device)
    one = torch.ones(1, dtype=torch.int64, device=places.device)
    return counts.scatter_add_(0, places.long(), one.expand_as(places))  # bincount would wait for the device


def _scale_for(largest: Tensor, scale: Tensor) -> None:
    """Sets scale to 2^-e for a largest value in [2^e, 2^(e+1)), straight from the exponent bits of float32."""
    if largest.dtype is torch.float64:
        scale.fill_(1.0)  # its own range is wide enough
        return
    exponent = largest.clamp_(min=0).view(torch.int32) >> 23  # a chunk with no finite value has -inf here
    torch.bitwise_left_shift((254 - exponent).clamp_(1, 254), 23, out=scale.view(torch.int32))
