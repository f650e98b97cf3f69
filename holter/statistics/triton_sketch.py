"""Sketches by Triton: two launches fold all tensors of a list, whatever their number, size and dtype.

All in float64: what a step changes may be as small as the last bit of a weight, and the same bits come out every time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holter.statistics import sketch_kernels
from holter.statistics.device_rows import current_device, sent
from holter.statistics.sketch import WIDTH, width_of

CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float64: 3}
_LINES = 64  # of a stretch: few enough that a large tensor keeps the whole device busy
_BLOCK = 1024


class TritonFolder:
    """Folds lists of tensors; keeps the tables of the last list, which is made anew when tensors change or move."""

    def __init__(self) -> None:
        self._key: object = None
        self._tables: _Tables | None = None

    def fold(self, lines: Sequence[Tensor]) -> Tensor:
        """The sketches of tensors of one dimension, one after the other, float64."""
        lines = [line if line.dtype in CODES else line.float() for line in lines]
        makes = tuple([(line.numel(), line.dtype, line.device) for line in lines])
        if self._tables is None or makes != self._key:
            self._key, self._tables = makes, _Tables(lines)
        return self._tables.fold(lines)


class _Tables:
    """Where the sketches of the tensors go, and which stretches they have."""

    def __init__(self, lines: Sequence[Tensor]) -> None:
        self._device = lines[0].device
        sizes = [line.numel() for line in lines]
        tensor_of, first_line, first = [], [], [0]
        for tensor, size in enumerate(sizes):
            starts = range(0, -(-size // WIDTH), _LINES)
            tensor_of += [tensor] * len(starts)
            first_line += list(starts)
            first.append(len(tensor_of))
        places = [0]
        for size in sizes:
            places.append(places[-1] + width_of(size))
        self._stretches, self._total = len(tensor_of), places[-1]
        self._kinds = sum(1 << code for code in {CODES[line.dtype] for line in lines})
        self._sizes, self._codes, self._tensor_of, self._first_line, self._first, self._places = (
            sent(table, self._device)
            for table in (sizes, [CODES[line.dtype] for line in lines], tensor_of, first_line, first, places)
        )
        self._addresses: list[int] = []
        self._address_table = torch.empty(0)

    def fold(self, lines: Sequence[Tensor]) -> Tensor:
        addresses = [line.data_ptr() for line in lines]
        if addresses != self._addresses:
            self._addresses, self._address_table = addresses, sent(addresses, self._device)
        sketches = torch.empty(self._total, dtype=torch.float64, device=self._device)
        if not self._stretches:
            return sketches
        partials = torch.empty(self._stretches, WIDTH, dtype=torch.float64, device=self._device)
        blocks = WIDTH // _BLOCK
        with current_device(self._device):
            sketch_kernels.fold_stretches[(self._stretches, blocks)](
                self._address_table, self._codes, self._sizes, self._tensor_of, self._first_line, partials,
                KINDS=self._kinds, LINES=_LINES, BLOCK=_BLOCK,
            )  # fmt: skip
            sketch_kernels.add_stretches[(len(lines), blocks)](
                partials, self._first, self._places, sketches, BLOCK=_BLOCK
            )
        return sketches
