"""The runs that somebody looks at, open and followed. A few at a time; what nobody has asked for longest is closed."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anyio
from anyio import to_thread

from holter.dashboard.bodies import Body, json_body
from holter.dashboard.shelf import Listed
from holter.glance import MOST_INFO
from holter.report.buckets import buckets_for
from holter.report.reading import Follower
from holter.run import Run

_OPEN = 6  # runs: a long one of many layers takes tens of megabytes
_SLICE, _SHORT = 0.5, 0.1  # seconds to read on in a long run: for those who follow it, and for one who waits
_SMALL = 48 << 20  # bytes of journals, all of which is read before the page is shown; of a longer run a sample
# Seconds that a page waits for that, and those after which it lets others read: twelve runs that take long are opened
# in one go by whoever restores his browser's tabs, and a short run must not wait until all of them are read.
_FIRST, _TURN = 4.0, 0.2
_CROWD, _MOMENT = 4, 0.5  # so many who wait for one run are content with what was so for so many seconds
_BODIES = 8  # answers of one run that are kept
_BUCKETS = 400  # columns of a strip chart, and up to twice as many: what a screen shows
_LAYER = 150  # bytes of run.json for each layer, at least
_CELLS = 400_000  # of one of a large model: there are a dozen, in memory
_LONG = 0.5  # seconds after which work keeps no thread from others any more
_MOST_THREADS = 32
_IDLE = 600.0  # seconds after which a run that nobody asked for is closed


_Result = TypeVar("_Result")


@dataclass(frozen=True)
class _Made:
    body: Body
    version: int
    at: float  # on the monotonic clock


class Open:
    """One run. Whoever holds the lock may use the follower; those who wait hold no thread."""

    def __init__(self, listed: Listed) -> None:
        self.lock = anyio.Lock()
        self.asked_at = time.monotonic()
        self._path = listed.path
        self._follower: Follower | None = None
        self._read: object = None  # the signature of what was read
        self._is_shown = False
        self._bodies: OrderedDict[Hashable, _Made] = OrderedDict()

    @property
    def version(self) -> int:
        """Grows when there is something new to see; a sample stays as it is until all is read."""
        follower = self._follower
        return -1 if follower is None else 0 if follower.is_sample else follower.version

    @property
    def is_complete(self) -> bool:
        return self._follower is not None and self._follower.is_complete

    def catch_up(self, listed: Listed, seconds: float = _SLICE) -> Follower:
        """Blocking. Reads on for so long. A first look takes all of a short run, in several turns; a sample of a long
        one, which is read in slices from then on."""
        if self._follower is None:
            self._follower = _follower_of(self._path)
            if sum(size for name, size in listed.extent if name != "run.json") > _SMALL:
                self._follower.look()
            else:
                self._follower.read_on(min(seconds, _TURN))
        elif self._read != listed.signature or not self._follower.is_complete:
            self._follower.read_on(seconds)
        self._read = listed.signature
        return self._follower

    @property
    def is_shown(self) -> bool:
        """Whether the first look is over."""
        return self._is_shown or self.is_complete or (self._follower is not None and self._follower.is_sample)

    def body(self, key: Hashable, make: Callable[[Follower], Any]) -> Body:
        """Blocking. What `make` says of the run as JSON, once for all who ask the same of the same state."""
        assert self._follower is not None
        self._is_shown = True
        made = self._bodies.get(key)
        if made is None or made.version != self.version:
            made = _Made(json_body(make(self._follower)), self.version, time.monotonic())
            self._bodies[key] = made
            while len(self._bodies) > _BODIES:
                self._bodies.popitem(last=False)
        return made.body

    def recent(self, key: Hashable) -> Body | None:
        """What was answered to the same question a moment ago; for a crowd that asks of a run that trains."""
        made = self._bodies.get(key)
        return made.body if made is not None and time.monotonic() - made.at < _MOMENT else None


class Desk:
    """Work on a run is done in one of a few threads. What takes long there does not count among them after a while, so
    that runs that take forever leave threads for the others."""

    def __init__(self, threads: int = 4) -> None:
        self._open: OrderedDict[str, Open] = OrderedDict()
        self._busy = anyio.CapacityLimiter(threads)
        self._threads = anyio.CapacityLimiter(_MOST_THREADS)

    async def ask(self, listed: Listed, key: Hashable, make: Callable[[Follower], Any]) -> Body:
        """An answer about a run as it is now. ValueError and OSError where it cannot be read."""
        one = self._take(listed)
        if one.lock.statistics().tasks_waiting >= _CROWD and (recent := one.recent(key)) is not None:
            return recent
        async with one.lock:
            if one.lock.statistics().tasks_waiting >= _CROWD and (recent := one.recent(key)) is not None:
                return recent
            until = time.monotonic() + _FIRST
            while not one.is_shown and time.monotonic() < until:
                await self.in_thread(one.catch_up, listed, _TURN)
            return await self.in_thread(_asked, one, listed, key, make)

    async def read_on(self, listed: Listed) -> Open:
        """Reads what is new of a run, or more of a long one; for those who follow it."""
        one = self._take(listed)
        async with one.lock:
            await self.in_thread(one.catch_up, listed)
        return one

    async def in_thread(self, work: Callable[..., _Result], *words: Any) -> _Result:
        place = object()
        await self._busy.acquire_on_behalf_of(place)
        too_long = asyncio.get_running_loop().call_later(_LONG, self._leave, place)
        try:
            return await to_thread.run_sync(work, *words, limiter=self._threads)
        finally:
            too_long.cancel()
            self._leave(place)

    def _leave(self, place: object) -> None:
        if place in self._busy.statistics().borrowers:
            self._busy.release_on_behalf_of(place)

    def tidy(self) -> None:
        """Closes what nobody has asked for in a while."""
        now = time.monotonic()
        for run in [run for run, one in self._open.items() if now - one.asked_at > _IDLE]:
            self._open.pop(run)

    def _take(self, listed: Listed) -> Open:
        one = self._open.pop(listed.id, None) or Open(listed)
        self._open[listed.id] = one
        one.asked_at = time.monotonic()
        while len(self._open) > _OPEN:
            self._open.popitem(last=False)
        return one


def _follower_of(path: Path) -> Follower:
    """Its page shows nothing of the layers in run.json. Those of a large one are not read, which would hold the GIL for
    seconds: how many there are is told by its size."""
    run = Run(path)
    run.most_info = MOST_INFO
    layers = len(run.layers) or _size(path / "run.json") // _LAYER
    follower = Follower(path, buckets=buckets_for(layers, _CELLS, _BUCKETS))
    follower.run.most_info = MOST_INFO
    return follower


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _asked(one: Open, listed: Listed, key: Hashable, make: Callable[[Follower], Any]) -> Body:
    one.catch_up(listed, _SHORT)
    return one.body(key, make)
