"""A fixed strided sample of tensors: a few thousand numbers of each, side by side in one line on their device.

The same places every time, so that two samples of a tensor can be compared number by number, without a copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from holter.statistics.device_rows import is_dense, sent, widest
from holter.statistics.measure import numbers_in

MOST = 4096  # numbers of a tensor
_PIECE = 128


def stride_of(size: int) -> int:
    """Every so many elements are taken: a number that has no factor in common with the size, so that no row, column
    or head is missed."""
    if size <= MOST:
        return 1
    stride = -(-size // MOST)
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


class Segments:
    """Stretches of a line, one a tensor, over which is summed."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self.counts = list(counts)
        self._on_host = device.type == "cpu"
        self._lengths, self._total = sent(self.counts, device), sum(self.counts)
        # A device sums each stretch with one thread: short pieces first, and then the pieces of each stretch.
        whole = [divmod(count, _PIECE) for count in self.counts]
        pieces = [length for many, rest in whole for length in (*[_PIECE] * many, *([rest] if rest else []))]
        self._pieces = sent(pieces, device)
        self._pieces_of = sent([many + (rest > 0) for many, rest in whole], device)
        self._filled = np.flatnonzero(self.counts)  # reduceat has no sum over nothing
        self._starts = np.cumsum([0, *self.counts])[self._filled]

    def dots(self, *pairs: tuple[Tensor | None, Tensor | None]) -> Tensor:
        """The sum of the products of each pair of lines, [tensors, pairs]; NaN where a line is missing."""
        if self._on_host:
            return torch.from_numpy(self._dots_on_host(pairs))
        line = next(line for pair in pairs for line in pair if line is not None)
        nothing = torch.full_like(line, torch.nan, dtype=widest(line.device))
        products = [nothing if a is None or b is None else a.to(nothing.dtype) * b for a, b in pairs]
        pieces = torch.segment_reduce(torch.stack(products, dim=1), "sum", lengths=self._pieces, unsafe=True)
        return torch.segment_reduce(pieces, "sum", lengths=self._pieces_of, unsafe=True)

    def spread(self, values: Tensor) -> Tensor:
        """A line of the values, one a tensor: each as often as its stretch is long."""
        return torch.repeat_interleave(values, self._lengths, output_size=self._total)  # a known size needs no wait

    def _dots_on_host(self, pairs: Sequence[tuple[Tensor | None, Tensor | None]]) -> np.ndarray:
        """With numpy, whose calls take a tenth of the time of torch's: for small models they are all the time."""
        sums = np.zeros((len(self.counts), len(pairs)))
        for place, (first, second) in enumerate(pairs):
            if first is None or second is None:
                sums[:, place] = np.nan
            elif len(self._filled):
                product = np.multiply(first.numpy(), second.numpy(), dtype=np.float64)
                sums[self._filled, place] = np.add.reduceat(product, self._starts)
        return sums


class Sampler:
    """Takes samples of tensors of these sizes, all on one device."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes, self.device = tuple(sizes), device
        self.strides = [stride_of(size) for size in sizes]
        self._on_host = device.type == "cpu"
        self.segments = Segments([-(-n // stride) for n, stride in zip(self.sizes, self.strides, strict=True)], device)

    def take(self, lines: Sequence[Tensor]) -> Tensor:
        """Samples of tensors `in_line`, one after the other: float32, or float64 where there is one among them."""
        dtypes = {line.dtype for line in lines}
        if self._on_host and dtypes == {torch.float32}:  # numpy's calls are the shorter ones
            parts = [line.numpy()[::stride] for line, stride in zip(lines, self.strides, strict=True)]
            return torch.from_numpy(np.concatenate(parts))
        working = torch.float64 if torch.float64 in dtypes else torch.float32
        return torch.cat([line[::stride].to(working) for line, stride in zip(lines, self.strides, strict=True)])

    def split(self, line: Tensor) -> tuple[Tensor, ...]:
        """The sample of each tensor, as views of the line."""
        return tuple(line.split(self.segments.counts))


def in_line(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The elements of each in the order of its memory, where that needs no copy."""
    plain = [numbers_in(tensor)[0] for tensor in tensors]
    return [line.as_strided((line.numel(),), (1,)) if is_dense(line) else line.reshape(-1) for line in plain]
