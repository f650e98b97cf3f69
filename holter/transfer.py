"""The only place that moves results to the host: asynchronously, into pinned memory, read when they have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Parcel:
    """Small result tensors on their way to the host. The sender must not write to them any more.

    On the CPU they have arrived already. On CUDA the copies are queued behind the work that makes the results, and
    an event says when they are there; nobody waits for it.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._host: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []
        for tensor in tensors:
            self._host.append(_start_copy(tensor.detach()))
        for device in {tensor.device for tensor in tensors if tensor.device.type == "cuda"}:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._events.append(event)

    def has_arrived(self) -> bool:
        return all(event.query() for event in self._events)

    def arrays(self) -> list[npt.NDArray[Any]]:
        """The results as numpy arrays, in their order; only after `has_arrived`."""
        return [np.asarray(tensor.numpy()) for tensor in self._host]


def _start_copy(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    if tensor.device.type != "cuda":
        return tensor.cpu()  # devices without pinned memory and events
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
