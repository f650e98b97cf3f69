"""A sink with a thread of its own: whoever writes to it goes on at once, whatever it does.

A sink that hangs is cut off: what waits for it is forgotten, and it gets nothing more, for it may hold a lock that the
next call would wait for too. One that raises is cut off as well. Both are reported once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from holter import background
from holter.diagnosis.finding import Finding
from holter.problems import Complaint
from holter.record import Record, size_of
from holter.sinks.sink import Sink

HANGS_AFTER_SECONDS = 30.0
MOST_RECORDS = 2048
CLOSE_SECONDS = 1.0

Task = Callable[[], None]
Report = Callable[[Sink, Exception], None]


class Background:
    """Sends to `sink`; `failed` is told once, when it is cut off or records are left out."""

    def __init__(self, sink: Sink, failed: Report, hangs_after: float = HANGS_AFTER_SECONDS) -> None:
        self.sink, self._failed, self._hangs_after = sink, failed, hangs_after
        self.is_cut_off = False
        self._is_late = False
        self._began: float | None = None  # by the clock: the call that goes on
        self._queue: background.Background[Task] = background.Background(
            self._call, self._cut_off, name=f"holter-{type(sink).__name__.lower()}", most_items=MOST_RECORDS
        )

    @property
    def seconds(self) -> float:
        """Processor time that it has taken."""
        return self._queue.seconds

    def write(self, record: Record) -> None:
        if self._is_open() and not self._queue.post(partial(self.sink.write, record), size_of(record)):
            self._tell_late()

    def alert(self, finding: Finding) -> None:
        if self._is_open() and not self._queue.post(partial(self.sink.alert, finding)):
            self._tell_late()

    def flush(self, seconds: float) -> bool:
        return self.is_cut_off or self._queue.flush(seconds)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """What waits is written, and the sink closed, at most this long."""
        self.stop(seconds)
        self.wait(seconds)

    def wait(self, seconds: float) -> None:
        """For what `stop` left to do."""
        self._queue.wait(seconds)

    def stop(self, seconds: float = CLOSE_SECONDS) -> None:
        """Like close, without waiting for it."""
        if not self.is_cut_off:
            self._queue.post(self.sink.close)
        self._queue.stop(seconds)

    def _is_open(self) -> bool:
        began = self._began
        if not self.is_cut_off and began is not None and time.monotonic() - began > self._hangs_after:
            self._cut_off(Complaint(f"it has not answered for {self._hangs_after:.0f} s"))
        return not self.is_cut_off

    def _call(self, task: Task) -> None:
        if self.is_cut_off:
            return
        self._began = time.monotonic()
        try:
            task()
        finally:
            self._began = None

    def _cut_off(self, error: BaseException) -> None:
        if not self.is_cut_off:
            self.is_cut_off = True
            self._queue.clear()
            self._failed(self.sink, error if isinstance(error, Exception) else Complaint(type(error).__name__))

    def _tell_late(self) -> None:
        if not self._is_late:
            self._is_late = True
            self._failed(self.sink, Complaint("it is too slow, and some records are left out"))
