"""Work off the training thread: a bounded queue and one thread. Posting never blocks, and drops are counted."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

Item = TypeVar("Item")

MOST_ITEMS = 4096
MOST_BYTES = 64 << 20
_PACE_SECONDS = 0.005  # between two looks at the queue
_HURRIED_SECONDS = 0.002  # between two tries while someone waits for the end
_LAST_SECONDS = 0.2  # before the end, in which nothing is waited for any more
_AWAKE_SECONDS = 0.01  # without an item, after which the thread sleeps until it is woken


class Soon(float):
    """Seconds after which to try again at the latest: when something else is posted is a good moment, too."""


class Background(Generic[Item]):
    """Calls `work(item)` for every posted item, in order, on a thread of its own.

    `work` returns None when the item is done, or the seconds after which to try it again; it should not raise, and
    where it does, `failed` is told and the item is given up. `begin` is called first of all on the thread, `idle` now
    and then while there is no work, `end` last of all: what was not done by then stays in the queue.
    A forked child inherits the object but not the thread: there, posting and closing do nothing.
    """

    def __init__(
        self,
        work: Callable[[Item], float | None],
        failed: Callable[[BaseException], None],
        *,
        name: str,
        begin: Callable[[], None] | None = None,
        idle: Callable[[], None] | None = None,
        end: Callable[[], None] | None = None,
        idle_seconds: float = 5.0,
        pace_seconds: float = _PACE_SECONDS,
        awake_seconds: float = _AWAKE_SECONDS,
        gather_seconds: float = 0.0,
        most_items: int = MOST_ITEMS,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._work, self._failed, self._begin, self._end = work, failed, begin, end
        self._idle, self._idle_seconds = idle, idle_seconds
        self._pace_seconds, self._awake_seconds = pace_seconds, awake_seconds
        self._gather_seconds = gather_seconds  # between waking and the first item, for what comes right after that
        self._most_items, self._most_bytes = most_items, most_bytes
        self._queue: deque[tuple[Item, int]] = deque()
        self._bytes = 0
        self._closing = False
        self._asleep = False
        self._is_busy = True  # whether items come one soon after the other
        self._flushes = 0  # that are being waited for
        self._deadline = float("inf")
        self._process = os.getpid()
        # Held by itself, not by way of the Condition: that has its `__enter__` in Python, and a Ctrl-C which comes
        # within it would leave the lock held for ever.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.dropped = 0  # items that found the queue full, or whose work failed
        self.seconds = 0.0  # processor time that the thread has used
        # A daemon: a hanging disk or sink must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        return len(self._queue)

    def post(self, item: Item, size: int = 0) -> bool:
        """Queues an item of about this many bytes; False where it had to be dropped."""
        if os.getpid() != self._process:
            return False
        with self._lock:
            # What is larger than the bound must get through some time: it may be the first, and then does not count.
            first = self._queue[0][1] if self._queue else size
            waiting = self._bytes + size - (first if first > self._most_bytes else 0)
            if self._closing or len(self._queue) >= self._most_items or waiting > self._most_bytes:
                self.dropped += 1
                return False
            self._queue.append((item, size))
            self._bytes += size
            if self._asleep:
                self._changed.notify_all()
        return True

    @property
    def waiting(self) -> list[Item]:
        """What is queued, the item that is being worked on among it."""
        with self._lock:
            return [item for item, _ in self._queue]

    def clear(self) -> int:
        """Forgets what is queued, but for what is being worked on; returns how many items that were."""
        if os.getpid() != self._process:
            return 0
        with self._lock:
            forgotten = max(0, len(self._queue) - 1)
            for _ in range(forgotten):
                self._bytes -= self._queue.pop()[1]
        return forgotten

    def flush(self, seconds: float) -> bool:
        """Waits until everything posted so far is done, at most this long; says whether it is."""
        if os.getpid() != self._process or threading.current_thread() is self._thread:
            return False
        with self._lock:
            self._flushes += 1
            try:
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._queue or not self._thread.is_alive(), seconds)
            finally:  # also where the user does not want to wait
                self._flushes -= 1
            return not self._queue

    def close(self, seconds: float) -> int:
        """Finishes what is queued, at most this long, and ends the thread. Returns how many items were left undone."""
        if os.getpid() != self._process:
            return 0
        self.stop(seconds)
        self.wait(seconds)
        return len(self._queue)

    def wait(self, seconds: float) -> None:
        """Waits for the thread to end, at most this long."""
        if os.getpid() == self._process and threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def stop(self, seconds: float) -> None:
        """Like close, without waiting for it."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closing = True
            self._deadline = time.monotonic() + seconds
            self._changed.notify_all()

    def _run(self) -> None:
        if self._begin is not None:
            self._quietly(self._begin)
        self._work_off()
        if self._end is not None:
            try:
                self._end()
            except Exception as error:
                self._quietly(partial(self._failed, error))

    def _work_off(self) -> None:
        while self._wait_for_item():
            again = self._do(self._queue[0][0])
            self.seconds = time.thread_time()
            with self._lock:
                if again is None:
                    _, size = self._queue.popleft()
                    self._bytes -= size
                    self._changed.notify_all()
                elif self._rest(again):
                    continue
                elif isinstance(again, Soon):  # what it waits for does not come in time: what comes after it may
                    self.dropped += 1
                    self._bytes -= self._queue.popleft()[1]
                else:
                    return

    def _rest(self, again: float) -> bool:
        """Waits before another try; False where there is no time for one."""
        if isinstance(again, Soon) and (self._closing or self._flushes):
            again = Soon(min(again, _HURRIED_SECONDS))
        if time.monotonic() + again > self._deadline - (_LAST_SECONDS if isinstance(again, Soon) else 0.0):
            return False
        if isinstance(again, Soon):
            self._asleep = True  # so that a post wakes this thread
            self._changed.wait(again)
            self._asleep = False
        else:  # one who begins to wait, or the end, is worth a try at once; later tries wait as they asked
            was_closing, flushes = self._closing, self._flushes
            self._changed.wait_for(lambda: (self._closing and not was_closing) or self._flushes > flushes, again)
        return True

    def _wait_for_item(self) -> bool:
        """True when there is an item to work on, False when all is done and the thread may end.

        While items keep coming the thread looks for them at its own pace: to be woken for each would cost the
        poster a switch of threads. Where the last one took long to come it sleeps at once: to look in vain costs, too.
        """
        began = time.monotonic()
        awake_until = began + self._awake_seconds if self._is_busy else began
        while True:
            slept = False
            with self._lock:
                if not self._queue and not self._closing:
                    slept = self._asleep = time.monotonic() >= awake_until
                    self._changed.wait(self._idle_seconds if slept else self._pace_seconds)
                    self._asleep = False
                if self._queue:
                    self._is_busy = time.monotonic() - began <= self._awake_seconds
                    if slept and self._gather_seconds and not (self._flushes or self._closing):
                        self._changed.wait(self._gather_seconds)
                    return time.monotonic() < self._deadline
                if self._closing:
                    return False
            if slept and self._idle:  # outside the lock: it may touch a disk that hangs
                self._quietly(self._give_sign_of_life)

    def _do(self, item: Item) -> float | None:
        try:
            return self._work(item)
        except (Exception, SystemExit) as error:  # a sink that calls sys.exit() would end this thread without a word
            self.dropped += 1
            self._quietly(partial(self._failed, error))
            return None

    def _give_sign_of_life(self) -> None:
        assert self._idle is not None
        try:
            self._idle()
        except Exception as error:  # a sign of life that cannot be given is told like work that failed
            self._failed(error)

    def _quietly(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._last_resort = error  # the very telling of a failure failed: kept for a debugger, nothing more to do
