"""Contenders that take turns, and clocks for what runs on a device beside the host."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from benchmarks.figures import turn_order

Taken = TypeVar("Taken")
_CACHE_BYTES = 256 << 20  # several times the L2 of any GPU
_MOST_HEAD_START_MS = 20.0


@dataclass
class Turns(Generic[Taken]):
    """What everyone's turns gave, by round, and how those who failed did."""

    taken: dict[str, dict[int, Taken]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def take_turns(
    contenders: Mapping[str, Callable[[], Taken]], rounds: int, plan: Mapping[str, frozenset[int]] | None = None
) -> Turns[Taken]:
    """Round by round, each in its turn; one that raises is out, and the others go on. `plan`: who sits out when."""
    turns: Turns[Taken] = Turns({name: {} for name in contenders})
    names = list(contenders)
    for number in range(rounds):
        for place in turn_order(len(names), number):
            name = names[place]
            if name in turns.failed or (plan is not None and number not in plan[name]):
                continue
            try:
                turns.taken[name][number] = contenders[name]()
            except Exception as error:
                turns.failed[name] = told(name, error)
    return turns


def told(name: str, error: Exception) -> str:
    """The failure in a line, printed at once: a long run should not hide it until its end."""
    lines = str(error).splitlines() or [""]
    words = f"{type(error).__name__}: {lines[0]}"
    print(f"  {name} failed: {words}", flush=True)
    return words


@dataclass(frozen=True)
class Timing:
    """Milliseconds of one call that began on an idle device."""

    wall_ms: float  # until the device has finished too
    host_ms: float  # until the call returned
    device_ms: float | None  # between events around it, so with the gaps in which the device waits for the host
    queued_ms: float | None  # between events of a second call, made while the device was still busy: no gaps


class Clock:
    """Times calls on a device. Caches are cold: gradients of a real step have been pushed out of them, too."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        if self.is_cuda:
            self._cold = torch.empty(_CACHE_BYTES, dtype=torch.uint8, device=device)
            self._cycles_per_ms = self._calibrate()

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, call: Callable[[], object]) -> float:
        self.synchronize()
        began = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - began

    def time(self, call: Callable[[], object], prepare: Callable[[], object], *, again_queued: bool = True) -> Timing:
        self._make_ready(prepare)
        events = self._events()
        began = time.perf_counter()
        if events:
            events[0].record()
        call()
        if events:
            events[1].record()
        returned = time.perf_counter()
        self.synchronize()
        ended = time.perf_counter()
        host = 1e3 * (returned - began)
        return Timing(
            wall_ms=1e3 * (ended - began),
            host_ms=host,
            device_ms=events[0].elapsed_time(events[1]) if events else None,
            queued_ms=self._queued(call, prepare, host) if events and again_queued else None,
        )

    def _queued(self, call: Callable[[], object], prepare: Callable[[], object], host_ms: float) -> float:
        """The device sleeps while the host queues the whole call; one that waits for the device gains nothing."""
        self._make_ready(prepare)
        begin, end = self._events()
        torch.cuda._sleep(int(self._cycles_per_ms * min(1.5 * host_ms + 0.5, _MOST_HEAD_START_MS)))
        begin.record()
        call()
        end.record()
        self.synchronize()
        return float(begin.elapsed_time(end))

    def _make_ready(self, prepare: Callable[[], object]) -> None:
        prepare()
        if self.is_cuda:
            self._cold.zero_()
        self.synchronize()

    def _events(self) -> list[torch.cuda.Event]:
        return [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self.is_cuda else []

    def _calibrate(self) -> float:
        cycles = 20_000_000
        torch.cuda._sleep(cycles)  # brings the clock of the device up
        begin, end = self._events()
        begin.record()
        torch.cuda._sleep(cycles)
        end.record()
        self.synchronize()
        return cycles / float(begin.elapsed_time(end))


def copy_bandwidth(device: torch.device) -> float:
    """GB/s read and written together by a copy within the device's memory: what a pass over tensors can reach."""
    size = 2 << 30 if device.type == "cuda" else 64 << 20
    source = torch.full((size,), 7, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    if device.type != "cuda":
        seconds = sorted(Clock(device).seconds(lambda: target.copy_(source)) for _ in range(10))[5]
        return 2 * size / seconds / 1e9
    events = [torch.cuda.Event(enable_timing=True) for _ in range(22)]
    for event in events:
        event.record()
        target.copy_(source)
    torch.cuda.synchronize(device)
    times = sorted(float(begin.elapsed_time(end)) for begin, end in itertools.pairwise(events[1:]))
    return 2 * size / (1e-3 * times[len(times) // 2]) / 1e9
