"""The guard around everything that a training thread calls."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from holter.replays import is_captured

Method = TypeVar("Method", bound=Callable[..., Any])
Result = TypeVar("Result")


def attempt(
    monitor: Any, purpose: str, piece: Callable[..., Result], *args: Any, charged: bool = True, **kwargs: Any
) -> Result | None:
    """Runs a piece of a Monitor's work: our own failure is kept as a problem and never reaches the training.

    What failed, is closed, was inherited by a forked worker or would become part of a CUDA graph returns None: the
    graph's replays are seen by themselves. The time it takes is `charged` to the budget. A piece of a piece is only
    contained: the rest is asked and timed once, for all of them together.
    """
    thread = threading.get_ident()
    if monitor._working_thread == thread:
        try:
            return piece(*args, **kwargs)
        except Exception as error:
            monitor._problems.add(purpose, error)
            return None
    if monitor._closed or os.getpid() != monitor._process:
        return None
    try:
        if is_captured():
            return None
        started, monitor._working_thread = time.perf_counter(), thread
        try:
            return piece(*args, **kwargs)
        finally:
            monitor._working_thread = None
            monitor._spending.note(time.perf_counter() - started, charged)
    except Exception as error:
        monitor._problems.add(purpose, error)
        return None


def contained(purpose: str, charged: bool = True) -> Callable[[Method], Method]:
    """For methods of a Monitor that are one such piece."""

    def wrap(method: Method) -> Method:
        @functools.wraps(method)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            return attempt(self, purpose, method, self, *args, charged=charged, **kwargs)

        return cast(Method, guarded)

    return wrap
