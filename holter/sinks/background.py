"""A sink with a thread of its own: whoever writes to it goes on at once, whatever it does.

One that raises or hangs is cut off, and reported once: what waits for it is forgotten. One that raised is still closed,
so that what it wrote is whole; one that hangs gets nothing more, for it may hold a lock that any call would wait for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from holter import background
from holter.diagnosis.finding import Finding
from holter.problems import Complaint
from holter.record import Record, size_of
from holter.sinks.sink import Sink, TellsEnding

HANGS_AFTER_SECONDS = 30.0
MOST_RECORDS = 2048
CLOSE_SECONDS = 1.0
_LAST_WORDS = 0.5  # of the time to close in: then what still waits is left out, and the sink closed

_GRACE_SECONDS = 5.0  # for close(), where a write took longer than it had: nobody waits for that any more

Task = Callable[[], None]
Report = Callable[[Sink, Exception], None]


class Background:
    """Sends to `sink`; `failed` is told, once for each reason, when it is cut off or something is left out."""

    def __init__(self, sink: Sink, failed: Report, hangs_after: float = HANGS_AFTER_SECONDS) -> None:
        self.sink, self._failed, self._hangs_after = sink, failed, hangs_after
        self.is_cut_off = False
        self._is_closing = self._is_late = False
        self._closes_at = float("inf")  # by the clock: from then on only close() is called
        self._left_out = 0
        self._state: str | None = None
        self._began: float | None = None  # by the clock: the call that goes on
        self._process = os.getpid()
        self._queue: background.Background[Task] = background.Background(
            self._call, self._cut_off, name=f"holter-{type(sink).__name__.lower()}", most_items=MOST_RECORDS
        )

    @property
    def seconds(self) -> float:
        """Processor time that it has taken."""
        return self._queue.seconds

    def write(self, record: Record) -> None:
        if self._is_open() and not self._queue.post(partial(self.sink.write, record), size_of(record)):
            self._tell_late("records are left out")

    def alert(self, finding: Finding) -> None:
        if self._is_open() and not self._queue.post(partial(self.sink.alert, finding)):
            self._tell_late("records and findings are left out")

    def flush(self, seconds: float) -> bool:
        return self.is_cut_off or self._queue.flush(seconds)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """What waits is written, and the sink closed, at most this long."""
        self.stop(seconds)
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """For what `stop` left to do."""
        self._queue.wait(seconds)

    def stop(self, seconds: float = CLOSE_SECONDS, state: str | None = None) -> None:
        """Like close, without waiting for it. A second call may give it less time. `state`: how the training ended."""
        self._state = self._state or state
        self._closes_at = min(self._closes_at, time.monotonic() + _LAST_WORDS * seconds)
        if not self._is_closing and not self._hangs():
            self._is_closing = True
            if not self._queue.post(self._close):  # it is full
                self._left_out += self._queue.clear()
                self._queue.post(self._close)
        self._queue.stop(seconds + _GRACE_SECONDS)

    def give_up(self) -> None:
        """The end, after which nothing can be told any more: what it has not written by now is told to be missing.

        A close() that goes on is no failure: tools that upload take their time.
        """
        unwritten = max(0, len(self._queue) - self._is_closing)
        if unwritten:
            self._cut_off(
                Complaint(f"it was not done when the training ended: {unwritten:,} records or findings are left out")
            )

    def _is_open(self) -> bool:
        if not self.is_cut_off and self._hangs():
            self._cut_off(Complaint(f"it has not answered for {self._hangs_after:.0f} s"))
            self._queue.clear()
        return not self.is_cut_off and not self._is_closing and os.getpid() == self._process

    def _hangs(self) -> bool:
        began = self._began
        return began is not None and time.monotonic() - began > self._hangs_after

    def _call(self, task: Task) -> None:
        is_last = task == self._close
        if self.is_cut_off and not is_last:
            return
        if not is_last and time.monotonic() > self._closes_at:
            self._left_out += 1
            return
        self._timed(task)

    def _close(self) -> None:
        if self._left_out and not self.is_cut_off:
            self._failed(self.sink, Complaint(f"it is too slow: {self._left_out:,} records or findings are left out"))
        try:
            if self._state is not None and isinstance(self.sink, TellsEnding):
                self.sink.will_end(self._state)
        finally:
            self.sink.close()

    def _timed(self, task: Task) -> None:
        self._began = time.monotonic()
        try:
            task()
        finally:
            self._began = None

    def _cut_off(self, error: BaseException) -> None:
        if not self.is_cut_off:
            self.is_cut_off = True
            self._failed(self.sink, error if isinstance(error, Exception) else Complaint(type(error).__name__))

    def _tell_late(self, what: str) -> None:
        if not self._is_late:
            self._is_late = True
            self._failed(self.sink, Complaint(f"it is too slow, and {what}"))
