"""A fixed strided sample of tensors: a few thousand numbers of each, side by side in one line on their device.

The same places every time, so that two samples of a tensor can be compared number by number, without a copy of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from holter.statistics.device_rows import is_dense, sent

MOST = 4096  # numbers of a tensor


def stride_of(shape: Sequence[int]) -> int:
    """Every so many elements are taken: a number that has no factor in common with the shape, so that no row, column
    or head is missed."""
    size = math.prod(shape)
    stride = max(1, -(-size // MOST))
    while math.gcd(stride, size) > 1:
        stride += 1
    return stride


class Sampler:
    """Takes samples of tensors of these shapes, all on one device."""

    def __init__(self, shapes: Sequence[Sequence[int]], device: torch.device) -> None:
        self.shapes = tuple(tuple(shape) for shape in shapes)
        self.sizes = tuple(math.prod(shape) for shape in shapes)
        self.strides = [stride_of(shape) if math.prod(shape) > MOST else 1 for shape in shapes]
        self.counts = [-(-size // stride) for size, stride in zip(self.sizes, self.strides, strict=True)]
        self._lengths = sent(self.counts, device)

    def take(self, tensors: Sequence[Tensor]) -> Tensor:
        """Their samples in a line, float32; float64 where there is a float64 among them."""
        with torch.no_grad():
            pieces = [_line(tensor)[::stride] for tensor, stride in zip(tensors, self.strides, strict=True)]
            wide = any(piece.dtype is torch.float64 for piece in pieces)
            return torch.cat([piece.to(torch.float64 if wide else torch.float32) for piece in pieces])

    def sums(self, *lines: Tensor) -> Tensor:
        """The sum over each tensor's sample of each of these lines, float64 [tensors, lines]."""
        stacked = torch.stack([line.double() for line in lines], dim=1)
        return torch.segment_reduce(stacked, "sum", lengths=self._lengths, unsafe=True)

    def split(self, line: Tensor) -> tuple[Tensor, ...]:
        """The sample of each tensor, as views of the line."""
        return tuple(line.split(self.counts))


def _line(tensor: Tensor) -> Tensor:
    """Its elements in the order of its memory, where that needs no copy."""
    plain = tensor.detach()
    return plain.as_strided((plain.numel(),), (1,)) if is_dense(plain) else plain.reshape(-1)
