"""Steps that a CUDA graph replays: no hook runs in a replay, so it is reported by `CUDAGraph.replay` itself.

torch's class carries wrappers from the moment a watched step is captured until the last monitor that saw one is closed.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from holter.listener import Listener

Method = Callable[..., None]
Stepping = weakref.WeakKeyDictionary[Optimizer, None]  # in the order of their steps, which a WeakSet would not keep

_seeing: weakref.WeakSet[Replays] = weakref.WeakSet()
_changing = threading.RLock()  # the garbage collector may run while it is held, and close another monitor
_replaced: list[tuple[str, Method, Method]] = []  # methods of torch's class: name, torch's own, ours


def is_captured() -> bool:
    """Return whether what this thread does on its device becomes part of a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


class Replays:
    """The CUDA graphs in which one monitor's optimizers step."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._captured = Stepping()  # since the last capture ended
        self._graphs: weakref.WeakKeyDictionary[Any, Stepping] = weakref.WeakKeyDictionary()

    def capture(self, optimizer: Optimizer) -> None:
        """Note that this optimizer's step becomes part of the graph that is being captured."""
        self._captured[optimizer] = None
        with _changing:
            _seeing.add(self)
            if not _replaced:
                _wrap("capture_end", _around_capture_end)
                _wrap("replay", _around_replay)

    def end_capture(self, graph: Any) -> None:
        """Note that what was captured belongs to this graph; it may have been captured before."""
        self._graphs.pop(graph, None)
        if self._captured:
            self._graphs[graph], self._captured = self._captured, Stepping()

    def give_up_capture(self) -> None:
        """What was captured since the last one is part of no graph."""
        self._captured = Stepping()

    def stepped_by(self, graph: Any) -> list[Optimizer]:
        return list(self._graphs.get(graph, ()))

    def before(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:  # as with a closure, the gradients come in the step
            self._listener.before_step(optimizer, has_closure=True)

    def after(self, optimizers: Sequence[Optimizer]) -> None:
        for optimizer in optimizers:
            self._listener.after_step(optimizer, "replay")

    def raised(self) -> None:
        """A replay that was begun did not end."""
        self._listener.step_raised()

    def detach(self) -> None:
        """Report nothing any more. Where somebody else has wrapped the methods by now, ours stay and do nothing."""
        with _changing:
            _seeing.discard(self)
            if _seeing:
                return
            for name, inner, outer in _replaced:
                if getattr(torch.cuda.CUDAGraph, name) is outer:
                    setattr(torch.cuda.CUDAGraph, name, inner)
            _replaced.clear()


def _wrap(name: str, make: Callable[[Method], Method]) -> None:
    inner = getattr(torch.cuda.CUDAGraph, name)
    outer = functools.wraps(inner)(make(inner))
    setattr(torch.cuda.CUDAGraph, name, outer)
    _replaced.append((name, inner, outer))


def _those_that_see() -> list[Replays]:
    with _changing:  # another thread may begin to capture meanwhile
        return list(_seeing)


def _around_capture_end(inner: Method) -> Method:
    def capture_end(graph: Any) -> None:
        try:
            inner(graph)
        except BaseException:
            for replays in _those_that_see():
                replays.give_up_capture()
            raise
        for replays in _those_that_see():
            replays.end_capture(graph)

    return capture_end


def _around_replay(inner: Method) -> Method:
    def replay(graph: Any) -> None:
        concerned = [(one, found) for one in _those_that_see() if (found := one.stepped_by(graph))]
        for one, optimizers in concerned:
            one.before(optimizers)
        try:
            inner(graph)
        except BaseException:
            for one, _ in concerned:
                one.raised()
            raise
        for one, optimizers in concerned:
            one.after(optimizers)

    return replay
