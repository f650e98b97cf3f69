"""Measuring rows with plain torch, on any device, of any dtype and whatever the values.

Tensors are copied, block by block, into one small workspace, all tensors of a block side by side, so that a
reduction is one call for many tensors. Non-finite values are set aside and each chunk is scaled, so that no sum can
overflow or vanish. A chunk gives a partial row; the partial rows of a tensor are merged in float64. Nothing here
waits for the device. On the CPU, which may be asked, this care is kept for the tensors that need it: `cpu_rows`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holter.statistics import histogram
from holter.statistics.blocks import Block, Make, block_size, plan_blocks
from holter.statistics.cpu_rows import CpuRows, is_wide
from holter.statistics.device_rows import DeviceRows, sent, widest
from holter.statistics.rows import COLUMNS, MAX, MIN

_REMEMBERED_PLANS = 8  # lists whose make keeps changing must not make the cache grow


class TorchRows:
    """Measures lists of tensors again and again, on whatever device they are."""

    def __init__(self) -> None:
        self._anywhere = CarefulRows()
        self._on_cpu = CpuRows(careful=self._anywhere)

    def measure(self, tensors: Sequence[Tensor], histograms: bool) -> DeviceRows:
        on_cpu = not tensors or tensors[0].is_cpu
        return (self._on_cpu if on_cpu else self._anywhere).measure(tensors, histograms)


class CarefulRows:
    """Measures lists of tensors of any device; keeps plan and workspace for lists of the same make."""

    def __init__(self) -> None:
        self._plans: dict[object, _Plan] = {}

    def measure(self, tensors: Sequence[Tensor], histograms: bool) -> DeviceRows:
        return self._plan_for(tensors).measure(tensors, histograms)

    def _plan_for(self, tensors: Sequence[Tensor]) -> _Plan:
        device = tensors[0].device if tensors else torch.device("cpu")
        makes = tuple((tensor.numel(), is_wide(tensor.dtype)) for tensor in tensors)
        plan = self._plans.get((makes, device))
        if plan is None:
            if len(self._plans) >= _REMEMBERED_PLANS:
                self._plans.clear()
            plan = self._plans[makes, device] = _Plan([Make(*make) for make in makes], device)
        return plan


class _Plan:
    """What depends only on the sizes of the tensors, made once: float32 and float64 work are planned apart."""

    def __init__(self, makes: list[Make], device: torch.device) -> None:
        self._device = device
        self._tensors = len(makes)
        self._accumulator = widest(device)
        blocks = plan_blocks(makes, block_size(sum(make.size for make in makes), device.type == "cpu"))
        halves = ([block for block in blocks if block.wide is wide] for wide in (False, True))
        self._groups = [_Group(half, device) for half in halves if half]

    def measure(self, tensors: Sequence[Tensor], histograms: bool) -> DeviceRows:
        rows = torch.zeros(self._tensors, len(COLUMNS), dtype=self._accumulator, device=self._device)
        rows[:, MIN], rows[:, MAX] = torch.inf, -torch.inf
        counts = None
        if histograms:
            counts = torch.zeros(self._tensors, histogram.SIZE, dtype=torch.int64, device=self._device)
        flat = [tensor.reshape(-1) for tensor in tensors]
        for group in self._groups:
            group.measure(flat, rows, counts)
        if counts is not None:  # minus zero, and what is next to it, has no sign
            counts[:, 0] += counts[:, histogram.HALF]
            counts[:, histogram.HALF] = 0
        return DeviceRows(rows, counts)


class _Found:
    """What was found in every chunk, and the workspace in which it is looked for."""

    NAMES = ("nonzero", "total", "absolute", "squares", "fourths", "scale", "low", "high")

    def __init__(self, block: int, chunks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.work, self.scratch = (torch.empty(block, dtype=dtype, device=device) for _ in range(2))
        self.lanes = torch.ones(len(self.NAMES), chunks, dtype=dtype, device=device)
        self.nonfinite = torch.zeros(3, chunks, dtype=dtype, device=device)  # NaN, +Inf, -Inf


class _Group:
    """Blocks of one workspace dtype."""

    def __init__(self, blocks: list[Block], device: torch.device) -> None:
        chunks_of: dict[int, int] = {}  # tensor -> chunks, in the order of the chunks
        for tensor in (tensor for block in blocks for tensor in block.tensor_of_chunk):
            chunks_of[tensor] = chunks_of.get(tensor, 0) + 1
        dtype = torch.float64 if blocks[0].wide else torch.float32
        size = max(len(block.valid) * block.width for block in blocks)
        self._found = _Found(size, sum(chunks_of.values()), dtype, device)
        self._blocks: list[_PlacedBlock] = []
        place = 0
        for block in blocks:
            self._blocks.append(_PlacedBlock(block, self._found, place))
            place += len(block.valid)
        self._valid = torch.cat([block.valid for block in self._blocks])
        self._order = sent(list(chunks_of), device)
        self._lengths = sent(list(chunks_of.values()), device)

    def measure(self, flat: list[Tensor], rows: Tensor, counts: Tensor | None) -> None:
        """Writes the rows of this group's tensors into `rows`, and adds to the histograms where they are wanted."""
        self._found.nonfinite.zero_()
        for block in self._blocks:
            block.measure(flat, counts)
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
        nonzero, total, absolute, squares, fourths, scale, low, high = self._found.lanes.to(accumulator)
        nonfinite = self._found.nonfinite.to(accumulator)
        valid = self._valid.to(accumulator)
        zeros = valid - nonzero - nonfinite.sum(0)
        unit = scale.reciprocal()
        moments = [total * unit, absolute * unit, squares * unit**2, fourths * unit**4]
        sums = torch.stack([valid, zeros, *nonfinite, *moments], dim=1)
        return sums, low[:, None], high[:, None]


class _PlacedBlock:
    """A block on its device; everything it needs in each measurement is laid out beforehand."""

    def __init__(self, block: Block, found: _Found, place: int) -> None:
        device = found.work.device
        shape = (len(block.valid), block.width)
        mine = slice(place, place + len(block.valid))
        self._work, self._scratch = (
            buffer[: shape[0] * shape[1]].view(shape) for buffer in (found.work, found.scratch)
        )
        self._found = found.lanes[:, mine].unbind()
        self._nonfinite = found.nonfinite[:, mine]
        self.valid = sent(block.valid, device)
        tails = [chunk for chunk, valid in enumerate(block.valid) if valid < block.width]  # they end in padding
        self._tails = sent(tails, device)
        self._padding = torch.arange(block.width, device=device) >= self.valid[self._tails, None]  # [tails, width]
        self._tensor_of_chunk = sent(block.tensor_of_chunk, device)
        self._tensors = slice(min(block.tensor_of_chunk), max(block.tensor_of_chunk) + 1)
        self._pieces = block.pieces
        self._targets = []
        line, start = self._work.view(-1), 0
        for _, first, last in block.pieces:
            self._targets.append(line[start : start + last - first])
            start += -(-(last - first) // block.width) * block.width

    def measure(self, flat: list[Tensor], counts: Tensor | None) -> None:
        work, scratch = self._work, self._scratch
        nonzero, total, absolute, squares, fourths, scale, low, high = self._found
        self._copy(flat)
        if counts is not None:
            self._count_buckets(counts)
        self._set_nonfinite_aside(low, high)
        torch.sum(torch.sign(work, out=scratch).abs_(), 1, out=nonzero)
        _scale_for(torch.maximum(high, -low), scale)
        torch.sum(work.mul_(scale[:, None]), 1, out=total)
        torch.sum(work.abs_(), 1, out=absolute)
        torch.sum(work.square_(), 1, out=squares)
        torch.sum(work.square_(), 1, out=fourths)

    def _copy(self, flat: list[Tensor]) -> None:
        """The block's values into the workspace, [chunks, width]."""
        if len(self._tails):
            self._work.index_fill_(0, self._tails, 0)
        sources = []
        for tensor, first, last in self._pieces:
            source = flat[tensor]
            sources.append(source if source.numel() == last - first else source[first:last])
        torch._foreach_copy_(self._targets, sources)

    def _set_nonfinite_aside(self, low: Tensor, high: Tensor) -> None:
        """Counts NaN, +Inf and -Inf and sets them to zero; extremes are those of the finite values."""
        work = self._work
        kinds = work.isnan(), work == torch.inf, work == -torch.inf
        for count, kind in zip(self._nonfinite, kinds, strict=True):
            torch.sum(kind, 1, dtype=count.dtype, out=count)
        bad = kinds[0] | kinds[1] | kinds[2]
        unknown = bad.index_put((self._tails,), bad[self._tails] | self._padding)
        torch.amin(work.masked_fill(unknown, torch.inf), 1, out=low)
        torch.amax(work.masked_fill(unknown, -torch.inf), 1, out=high)
        work.masked_fill_(bad, 0)

    def _count_buckets(self, counts: Tensor) -> None:
        work = single = self._work
        if work.dtype is torch.float64:  # too large for float32 is not infinite: the last finite bucket takes it
            limit = torch.finfo(torch.float32).max
            single = torch.where(work.isinf(), work, work.clamp(-limit, limit)).float()
        bucket = (single.view(torch.int32) >> histogram.SHIFT) & (histogram.SIZE - 1)
        mine = counts[self._tensors]
        bucket += ((self._tensor_of_chunk - self._tensors.start) * histogram.SIZE).int()[:, None]
        mine += _count(bucket.view(-1), mine.numel()).view_as(mine)
        padding = work.shape[1] - self.valid
        counts[:, 0].index_add_(0, self._tensor_of_chunk, padding, alpha=-1)  # padding is no value


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
