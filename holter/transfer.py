"""The only place that moves results to the host: asynchronously, into pinned memory, read when they have arrived."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Arrived = npt.NDArray[Any] | Exception  # what has come of a tensor, or why nothing has

_FEW = 256  # bytes
_OF_NUMPY = {
    *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}


class Parcel:
    """Small result tensors on their way to the host. The sender must not write to them any more.

    On the CPU they have arrived already. On CUDA a stream of its own copies them when the work that makes them is
    done, so that training does not queue behind the copies; a few numbers go on the training's own, for a change of
    streams takes the host longer than they take the device. The last of them is a flag: whoever looks for the others
    looks at that, and makes no call to CUDA, which might fall into the capture of a graph by the training thread.
    A tensor that cannot be sent or read costs only itself: its error stands in its place.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._host: list[Tensor | Exception] = []
        self._flags: list[npt.NDArray[np.uint8]] = []
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        for tensor in tensors:
            try:
                if tensor.is_cuda:
                    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
                    by_device.setdefault(tensor.device, []).append((host, tensor.detach()))
                else:
                    host = tensor.detach().cpu()  # other devices have no pinned memory and events
            except Exception as error:  # such as a tensor that holds no values
                self._host.append(error)
            else:
                self._host.append(host)
        for device, pairs in by_device.items():
            flag = torch.zeros(1, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._flags.append(flag.numpy())
            _send(device, [*pairs, (flag, _raised(device))])

    def has_arrived(self) -> bool:
        return all(flag[0] for flag in self._flags)

    def arrays(self) -> list[Arrived]:
        """The results as numpy arrays, in their order; only after `has_arrived`."""
        return [_read(host) for host in self._host]


def _read(host: Tensor | Exception) -> Arrived:
    """As numpy holds it. It has no bfloat16 and no float8: these become wider here, off the training thread."""
    if isinstance(host, Exception):
        return host
    try:
        if host.dtype not in _OF_NUMPY:
            host = host.to(torch.complex64 if host.is_complex() else torch.float64)
        return np.asarray(host.resolve_conj().resolve_neg().numpy())
    except Exception as error:
        return error


def _send(device: torch.device, pairs: list[tuple[Tensor, Tensor]]) -> None:
    if sum(host.nbytes for host, _ in pairs) <= _FEW:
        for host, tensor in pairs:
            host.copy_(tensor, non_blocking=True)
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for host, tensor in pairs:
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # its memory is not given away before the copy is done


@cache
def _raised(device: torch.device) -> Tensor:
    return torch.ones(1, dtype=torch.uint8, device=device)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class DeviceTimer:
    """How long a stretch of work takes on its device; known when the device has done it.

    Only for the training thread: it asks CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began, self._ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    @classmethod
    def start(cls, device: torch.device) -> DeviceTimer | None:
        """None on the CPU, where the caller's own clock tells."""
        if device.type != "cuda":
            return None
        timer = cls(device)
        timer._began.record(torch.cuda.current_stream(device))
        return timer

    def stop(self) -> DeviceTimer:
        self._ended.record(torch.cuda.current_stream(self._device))
        return self

    def has_begun(self) -> bool:
        """Whether the device has come to this stretch."""
        return bool(self._began.query())

    def seconds(self) -> float | None:
        """None while the device is at it."""
        return 1e-3 * self._began.elapsed_time(self._ended) if self._ended.query() else None
