"""Sketches: tensors folded into a few thousand numbers each, so that two states of a tensor can be told apart.

Every element is given a random sign and added to one of WIDTH sums, always the same. Folding is linear: the
difference of two sketches is the sketch of the difference, and the squares of its sums add up to those of the tensor's
elements, however these are distributed, with a relative error of sqrt(2 / WIDTH): 0.6 % of the norm. A sample of as
many elements would be as good for a bell shape only; a few large values, or rows that alone change, would escape it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

WIDTH = 16_384  # sums of a sketch; a tensor of fewer elements is its own sketch, unfolded
_LINES = 4
_CHUNK = _LINES * WIDTH  # elements that are folded at once, and stay in the cache
_SHIFTS = 8192
_NUMPY = (torch.float32, torch.float64)  # that numpy reads as they lie

Floats = npt.NDArray[np.floating]


def width_of(size: int) -> int:
    """Numbers in the sketch of a tensor of this size."""
    return min(size, WIDTH)


def fold_on_host(lines: Sequence[Tensor]) -> Tensor:
    """The sketches of tensors of one dimension on the CPU, one after the other, float64."""
    sketches = np.zeros(sum(width_of(len(line)) for line in lines))
    start = 0
    for line in lines:
        stop = start + width_of(len(line))
        _fold(line, sketches[start:stop])
        start = stop
    return torch.from_numpy(sketches)


def _fold(line: Tensor, sums: npt.NDArray[np.float64]) -> None:
    size = len(line)
    if size <= WIDTH:
        sums[:] = (line if line.dtype in _NUMPY else line.double()).numpy()
        return
    working = torch.float64 if line.dtype is torch.float64 else torch.float32
    signs, more_signs = _signs(working)
    work = np.empty(_CHUNK, signs.dtype)
    for chunk, (shift, other_shift) in enumerate(_shifts(-(-size // _CHUNK))):
        values = line[chunk * _CHUNK : (chunk + 1) * _CHUNK].to(working).numpy()
        found = work[: len(values)]
        np.multiply(values, signs[shift : shift + len(values)], out=found)
        np.multiply(found, more_signs[other_shift : other_shift + len(values)], out=found)
        work[len(values) :] = 0
        # In float64, without loss: what a step changes may be as small as the last bit of a weight.
        sums += np.add.reduce(work.reshape(_LINES, WIDTH), axis=0, dtype=np.float64)


@functools.cache
def _signs(dtype: torch.dtype) -> tuple[Floats, Floats]:
    """Two tables whose product is the sign: each chunk takes them from other places, so that the signs of two chunks
    have nothing in common, as those of one table would have where the two places lie near each other."""
    random = np.random.default_rng(20_111)
    kind = np.float64 if dtype is torch.float64 else np.float32
    first, second = random.choice(np.array([-1, 1], kind), (2, _CHUNK + _SHIFTS))
    return first, second


def _shifts(chunks: int) -> list[list[int]]:
    """Where the signs of each chunk begin in the two tables; the same every time."""
    found: list[list[int]] = np.random.default_rng(40_009).integers(0, _SHIFTS, (chunks, 2)).tolist()
    return found
