"""Measuring rows on the CPU, in few passes over memory and few calls: numpy for most, torch for what needs threads.

Long tensors are read where they lie, chunk by chunk. Short ones, and what is left of the long ones, are packed side
by side. Each chunk and each piece gives one column of partial results; a tensor's columns are merged in float64.
The sums are plain: tensors in which they cannot be trusted are known by their extremes, and summed again, scaled, or
measured again with care where a value is not finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from holter.statistics import histogram
from holter.statistics.blocks import SMALL_BLOCK, SMALL_MODEL, Make, Pack, Stretch, plan_layout
from holter.statistics.device_rows import Backend, DeviceRows
from holter.statistics.rows import COLUMNS, MAX, MIN

Floats = npt.NDArray[np.floating]
Integers = npt.NDArray[np.int64]
Source = Floats | Tensor  # the values of a tensor in a line: an array, or a tensor that must be converted

_COUNT = COLUMNS.index("count")
_REMEMBERED_PLANS = 8  # lists whose make keeps changing must not make the cache grow
# What float32 cannot hold exactly gets a workspace of float64: integers above 2^24 are not to be rounded.
_WIDE = (torch.float64, torch.int32, torch.int64, torch.uint32, torch.uint64)
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64}  # the working dtypes, read as they lie
# Largest values of a tensor whose fourth powers neither overflow nor lose digits. float64 is taken as it comes.
_SOUND = {torch.float32: (2.0**-24, 2.0**24), torch.float64: (0.0, torch.finfo(torch.float64).max)}
# What is found of each chunk or piece, as far as it is summed over a tensor; its extremes follow.
_SUMMED = ("zeros", "sum", "sum_abs", "sum_squares", "sum_fourths")
_SUMMED_COLUMNS = [COLUMNS.index(name) for name in _SUMMED]


def is_wide(dtype: torch.dtype) -> bool:
    return dtype in _WIDE


class CpuRows:
    """Measures lists of tensors again and again; keeps plan and workspace for lists of the same make."""

    def __init__(self, careful: Backend) -> None:
        self._careful = careful
        self._plans: dict[object, _Plan] = {}

    def measure(self, tensors: Sequence[Tensor], histograms: bool) -> DeviceRows:
        plan = self._plan_for(tensors)
        flat = [_flat(tensor) for tensor in tensors]
        with np.errstate(all="ignore"):  # what overflows is measured again
            rows, counts = plan.measure(flat, histograms)
            largest = np.maximum(rows[:, MAX], -rows[:, MIN])
            if not plan.is_sound(largest).all():
                plan.sum_again(flat, rows, largest)
                self._measure_with_care(tensors, rows, ~np.isfinite(largest) & (rows[:, _COUNT] > 0))
        return DeviceRows(torch.from_numpy(rows), None if counts is None else torch.from_numpy(counts))

    def _measure_with_care(self, tensors: Sequence[Tensor], rows: Floats, chosen: npt.NDArray[np.bool_]) -> None:
        places = np.flatnonzero(chosen).tolist()
        if places:
            rows[places] = self._careful.measure([tensors[place] for place in places], False).values.numpy()

    def _plan_for(self, tensors: Sequence[Tensor]) -> _Plan:
        makes = tuple([(tensor.numel(), tensor.dtype) for tensor in tensors])
        plan = self._plans.get(makes)
        if plan is None:
            if len(self._plans) >= _REMEMBERED_PLANS:
                self._plans.clear()
            plan = self._plans[makes] = _Plan([Make(size, is_wide(dtype)) for size, dtype in makes])
        return plan


class _Plan:
    """What depends only on the sizes of the tensors, made once: float32 and float64 work are planned apart."""

    def __init__(self, makes: list[Make]) -> None:
        self._blank = np.zeros((len(makes), len(COLUMNS)))
        self._blank[:, _COUNT] = [make.size for make in makes]
        self._blank[:, MIN], self._blank[:, MAX] = np.inf, -np.inf
        dtypes = [torch.float64 if make.wide else torch.float32 for make in makes]
        self._least, self._most = np.array([_SOUND[dtype] for dtype in dtypes]).reshape(-1, 2).T
        in_parallel = sum(make.size for make in makes) > SMALL_MODEL
        self._groups: list[_Group] = []
        for dtype in _SOUND:
            sizes = [(tensor, make.size) for tensor, make in enumerate(makes) if make.size and dtypes[tensor] is dtype]
            if sizes:
                self._groups.append(_Group(sizes, in_parallel, dtype))

    def measure(self, flat: list[Source], histograms: bool) -> tuple[Floats, Integers | None]:
        rows = self._blank.copy()
        counts = np.zeros((len(flat), histogram.SIZE), dtype=np.int64) if histograms else None
        for group in self._groups:
            group.measure(flat, rows, counts)
        if counts is not None:  # minus zero, and what is next to it, has no sign
            counts[:, 0] += counts[:, histogram.HALF]
            counts[:, histogram.HALF] = 0
        return rows, counts

    def is_sound(self, largest: Floats) -> npt.NDArray[np.bool_]:
        """Per tensor, whether its plain sums can be trusted: all finite, and fourth powers within the dtype's range."""
        return ((largest >= self._least) & (largest <= self._most)) | (largest <= 0)

    def sum_again(self, flat: list[Source], rows: Floats, largest: Floats) -> None:
        """Corrects the sums of unsound tensors of finite values: they are scaled until the largest is about 1."""
        chosen = ~self.is_sound(largest) & np.isfinite(largest)
        if chosen.any():
            exponents = np.clip(np.frexp(largest)[1], -126, 126)  # so far float32 holds the scales without loss
            scales = np.where(chosen, np.ldexp(1.0, -exponents), 1.0)
            for group in self._groups:
                group.sum_again(flat, rows, scales)


class _Group:
    """The tensors of one working dtype."""

    def __init__(self, sizes: list[tuple[int, int]], in_parallel: bool, dtype: torch.dtype) -> None:
        stretches, packs = plan_layout(sizes, in_parallel)
        parts: list[Stretch | Pack] = [*stretches, *packs]
        owners = np.array([tensor for part in parts for tensor in part.owners])
        self._found: Floats = np.zeros((len(_SUMMED) + 2, len(owners)), dtype=_NUMPY[dtype])
        self._tensors = np.array([tensor for tensor, _ in sizes])
        self._order = np.argsort(owners, kind="stable")  # brings the columns of a tensor together
        self._starts = np.searchsorted(owners[self._order], self._tensors)
        space = _Workspace(max([stretch.size for stretch in stretches], default=0), dtype)
        self._parts: list[_PlacedStretch | _PlacedPack] = []
        start = 0
        for part in parts:
            found = self._found[:, start : start + len(part.owners)]
            start += len(part.owners)
            if isinstance(part, Stretch):
                self._parts.append(_PlacedStretch(part, space, found))
            else:
                self._parts.append(_PlacedPack(part, dtype, found))

    def measure(self, flat: list[Source], rows: Floats, counts: Integers | None) -> None:
        """Writes the rows of this group's tensors, and adds to their histograms where they are wanted."""
        for part in self._parts:
            part.measure(flat, counts)
        found = self._found.take(self._order, axis=1).astype(np.float64)
        summed, low, high = found[: len(_SUMMED)], found[-2], found[-1]
        rows[self._tensors[:, None], _SUMMED_COLUMNS] = np.add.reduceat(summed, self._starts, axis=1).T
        rows[self._tensors, MIN] = np.minimum.reduceat(low, self._starts)
        rows[self._tensors, MAX] = np.maximum.reduceat(high, self._starts)

    def sum_again(self, flat: list[Source], rows: Floats, scales: Floats) -> None:
        """Writes the sums of the tensors with a scale other than 1, which is taken out again."""
        for part in self._parts:
            if (scales[part.owners] != 1).any():
                part.measure(flat, None, scales)
        found = self._found.take(self._order, axis=1).astype(np.float64)
        sums = np.add.reduceat(found[1 : len(_SUMMED)], self._starts, axis=1)
        unit = 1 / scales[self._tensors]
        chosen = unit != 1
        sums *= np.stack([unit, unit, unit**2, unit**4])
        rows[self._tensors[chosen, None], _SUMMED_COLUMNS[1:]] = sums[:, chosen].T


class _Workspace:
    """For stretches: what is made of their values, and the buckets of these."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.work, self.buckets = (torch.empty(size, dtype=kind, device="cpu") for kind in (dtype, torch.int32))


class _PlacedStretch:
    """Whole chunks of one tensor; `found` [lanes, chunks] takes what is found of each.

    The fields that end in `here` are numpy's, of the same memory as torch's; chunks are [chunks, 1, n] there, so
    that a batched product with [n, 1] or [chunks, n, 1] is a dot product for each.
    """

    def __init__(self, stretch: Stretch, space: _Workspace, found: Floats) -> None:
        self._tensor, self._start, self._stop = stretch.piece
        self._in_parallel = stretch.in_parallel
        self.owners = [self._tensor]
        self._line, self._buckets = space.work[: stretch.size], space.buckets[: stretch.size]
        self._found, self._found_here = torch.from_numpy(found).unbind(), list(found[:, :, None, None])
        self._at_once = stretch.size if stretch.in_parallel else SMALL_BLOCK  # then torch, too, stays on this thread
        self._targets = self._line.split(self._at_once)
        self._work = self._line.view(-1, stretch.chunk)
        self._work_here = self._work.numpy()[:, None, :]
        self._ones_here = np.ones((stretch.chunk, 1), self._work_here.dtype)

    def measure(self, flat: list[Source], counts: Integers | None, scales: Floats | None = None) -> None:
        values = self._values(flat[self._tensor])
        if scales is not None:
            values = np.multiply(values, float(scales[self._tensor]), out=self._line.numpy())
        if counts is not None:
            _put_buckets(values, self._buckets.numpy())
            for buckets in self._buckets.split(self._at_once):
                counts[self._tensor] += torch.bincount(buckets, minlength=histogram.SIZE).numpy()
        if self._in_parallel:
            self._measure_in_parallel(torch.from_numpy(values).view_as(self._work))
        else:
            self._measure_here(values.reshape(self._work_here.shape))

    def _values(self, source: Source) -> Floats:
        """The tensor itself where it can be read as it lies, else a copy in the workspace."""
        piece = source[self._start : self._stop]
        if not isinstance(piece, Tensor):
            return piece
        torch._foreach_copy_(self._targets, piece.split(self._at_once))
        return self._line.numpy()

    def _measure_here(self, values: Floats) -> None:
        """With numpy: it stays on this thread, and its dot product sums powers without writing them first."""
        zeros, total, absolute, squares, fourths, low, high = self._found_here
        work, ones = self._work_here, self._ones_here
        low.fill(np.minimum.reduce(values, axis=None))
        high.fill(np.maximum.reduce(values, axis=None))
        np.matmul(values, ones, out=total)
        np.abs(values, out=work)
        np.matmul(work, ones, out=absolute)
        has_zeros = not np.minimum.reduce(work, axis=None) > 0
        zeros[0] = np.count_nonzero(work == 0) if has_zeros else 0
        np.multiply(work, work, out=work)
        np.matmul(work, ones, out=squares)
        np.matmul(work, work.transpose(0, 2, 1), out=fourths)

    def _measure_in_parallel(self, values: Tensor) -> None:
        """With torch, on all of its threads."""
        zeros, total, absolute, squares, fourths, low, high = self._found
        work = self._work
        torch.amin(values, 1, out=low)
        torch.amax(values, 1, out=high)
        torch.sum(values, 1, out=total)
        torch.sum(torch.abs(values, out=work), 1, out=absolute)
        has_zeros = not float(work.amin()) > 0
        zeros[0] = int(np.count_nonzero((work == 0).numpy())) if has_zeros else 0
        torch.sum(work.square_(), 1, out=squares)
        torch.sum(work.square_(), 1, out=fourths)


class _PlacedPack:
    """Pieces of several tensors, copied side by side; `found` [lanes, pieces] takes what is found of each."""

    def __init__(self, pack: Pack, dtype: torch.dtype, found: Floats) -> None:
        self._dtype = dtype
        self._pieces = pack.pieces
        lengths = [piece.stop - piece.start for piece in pack.pieces]
        self._lengths, self._starts = lengths, np.cumsum([0, *lengths[:-1]])
        self._powers = np.empty((4, sum(lengths)), found.dtype)  # x, |x|, x^2 and x^4
        self._zeros, self._sums, self._low, self._high = found[0], found[1:5], found[5], found[6]
        self.owners = pack.owners
        self._first_bucket = np.repeat(np.arange(len(lengths), dtype=np.int32) * histogram.SIZE, lengths)
        self._buckets = np.empty(sum(lengths), np.int32)

    def measure(self, flat: list[Source], counts: Integers | None, scales: Floats | None = None) -> None:
        values, absolute, squares, fourths = self._powers
        np.concatenate([self._values(flat[tensor], start, stop) for tensor, start, stop in self._pieces], out=values)
        if scales is not None:
            values *= np.repeat(scales[self.owners], self._lengths)
        np.abs(values, out=absolute)
        np.multiply(absolute, absolute, out=squares)
        np.multiply(squares, squares, out=fourths)
        np.add.reduceat(self._powers, self._starts, axis=1, out=self._sums)
        np.minimum.reduceat(values, self._starts, out=self._low)
        np.maximum.reduceat(values, self._starts, out=self._high)
        has_zeros = not np.minimum.reduce(absolute) > 0
        self._zeros[:] = np.add.reduceat(values == 0, self._starts, dtype=np.int64) if has_zeros else 0
        if counts is not None:
            _put_buckets(values, self._buckets)
            self._buckets += self._first_bucket
            size = len(self.owners) * histogram.SIZE  # so many that torch would clear them with all of its threads
            counts[self.owners] += np.bincount(self._buckets, minlength=size).reshape(-1, histogram.SIZE)

    def _values(self, source: Source, start: int, stop: int) -> Floats:
        piece = source[start:stop]
        if not isinstance(piece, Tensor):
            return piece
        return torch.empty(len(piece), dtype=self._dtype, device="cpu").copy_(piece).numpy()


def _flat(tensor: Tensor) -> Source:
    """In the order of its memory: rows do not depend on the order, and so a transposed tensor needs no copy."""
    is_array = tensor.dtype in _NUMPY and type(tensor) is Tensor and not tensor.is_neg()  # a subclass may hold none
    return tensor.numpy().ravel("K") if is_array else tensor.reshape(-1)


def _put_buckets(values: Floats, out: npt.NDArray[np.int32]) -> None:
    if values.dtype == np.float32:
        np.right_shift(values.view(np.uint32), histogram.SHIFT, out=out.view(np.uint32))
    else:
        out[:] = histogram.bucket_of(values)
