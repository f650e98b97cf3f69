"""Batches of tensors, drawn from torch's global generator."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def draw_batches(*tensors: Tensor, size: int, steps: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield `steps` batches, in a new order for each pass over the data."""
    taken = 0
    while True:
        order = torch.randperm(len(tensors[0]))
        for start in range(0, len(order) - size + 1, size):
            if taken == steps:
                return
            taken += 1
            yield tuple(tensor[order[start : start + size]] for tensor in tensors)
