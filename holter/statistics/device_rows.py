"""Rows that are still on their device, as the backends make them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

WITHOUT_FLOAT64 = frozenset({"mps"})  # kinds of devices


@dataclass(frozen=True, eq=False)
class DeviceRows:
    """Rows still on their device: values [n, len(COLUMNS)]; histograms, integers [n, SIZE], or None."""

    values: Tensor
    histograms: Tensor | None = None


class Backend(Protocol):
    """Measures strided real tensors of one device, again and again."""

    def measure(self, tensors: Sequence[Tensor], histograms: bool) -> DeviceRows: ...


def select_rows(rows: DeviceRows, places: list[int]) -> DeviceRows:
    """Some of the rows, still on their device."""
    chosen = sent(places, rows.values.device)
    return DeviceRows(rows.values[chosen], rows.histograms[chosen] if rows.histograms is not None else None)


def widest(device: torch.device) -> torch.dtype:
    """In which sums are merged there: float64, or float32 where there is none."""
    return torch.float32 if device.type in WITHOUT_FLOAT64 else torch.float64


def sent(numbers: list[int], device: torch.device) -> Tensor:
    """A table on its device, sent without waiting for what the device is doing."""
    table = torch.tensor(numbers, dtype=torch.int64, device="cpu")  # whatever torch.set_default_device says
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)


def is_dense(tensor: Tensor) -> bool:
    """Whether its elements fill one stretch of memory, in whatever order: rows do not ask for it."""
    if tensor.is_contiguous():
        return True
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != reach:
                return False
            reach *= size
    return True


def current_device(device: torch.device) -> torch.cuda.device | torch.no_grad:
    """Triton launches on the current device, whatever device its arguments are on."""
    return torch.cuda.device(device) if device.type == "cuda" else torch.no_grad()
