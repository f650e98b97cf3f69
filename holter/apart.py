"""Torch's arithmetic off the training thread, in a thread that ends with it.

Threads that torch computes with (OpenMP's) belong to the thread that asked for them, and stay as long as that does.
While there are more of them than processors, those of the training go to sleep after every operation in place of
waiting for the next: steps of some milliseconds on all processors of a machine took half as long again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_Made = TypeVar("_Made")
_here = threading.local()


def apart(work: Callable[[], _Made]) -> _Made:
    """What `work` makes, or raises; it is waited for."""
    made: Future[tuple[_Made, float]] = Future()
    thread = threading.Thread(target=_do, args=(work, made), name="holter-apart", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends, and begins no thread any more
        return work()
    try:
        result, seconds = made.result()
    finally:
        thread.join()  # so that torch's threads are gone, too
        del made  # it would keep an error, whose traceback keeps this frame, which keeps it
    _here.seconds = seconds_apart() + seconds
    return result


def _do(work: Callable[[], _Made], made: Future[tuple[_Made, float]]) -> None:
    try:
        made.set_result((work(), time.thread_time()))
    except BaseException as error:
        made.set_exception(error)


def seconds_apart() -> float:
    """Processor time of all that the calling thread had done apart."""
    return float(getattr(_here, "seconds", 0.0))
