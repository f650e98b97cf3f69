"""A fixed strided sample of tensors: a few thousand numbers of each, side by side in one line on their device.

The same places every time, so that two samples of a tensor can be compared number by number, without a copy of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holter.statistics.device_rows import is_dense, sent

MOST = 4096  # numbers of a tensor


def stride_of(size: int) -> int:
    """Every so many elements are taken. Odd, so that in a matrix whose width is a power of two no column is missed."""
    stride = -(-size // MOST)
    return stride if stride % 2 else stride + 1


class Sampler:
    """Takes samples of tensors of these sizes, all on one device."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self.sizes = tuple(sizes)
        self.strides = [stride_of(size) if size else 1 for size in sizes]
        self.counts = [-(-size // stride) for size, stride in zip(sizes, self.strides, strict=True)]
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
