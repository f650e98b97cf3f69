"""How many connections a server has, and how long one may keep it waiting.

uvicorn waits for ever for a request that never ends. Half of a request each, sent without any token, would take all
descriptors of the process: nobody could connect, no run could be read.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from uvicorn.protocols.http.h11_impl import H11Protocol

_MOST = 1000
_OWN = 100  # descriptors for files, pipes and the loop itself
_UNLIMITED = 10_240  # descriptors to ask for where there is no limit: what macOS has at most


@dataclass(frozen=True)
class Limits:
    """`most` connections; so many seconds for the head of a request, and for a client that takes nothing of its answer.

    `backlog` is how many are taken in one go. Those come before any other is closed, and some rounds overlap.
    """

    most: int = _MOST
    backlog: int = 128
    head_seconds: float = 10.0
    stall_seconds: float = 30.0


def limits_for(descriptors: int) -> Limits:
    """
    >>> limits_for(1024).most, limits_for(1024).backlog
    (462, 115)
    """
    most = max(8, min(_MOST, (descriptors - _OWN) // 2))
    return Limits(most, min(128, most // 4))


def raise_descriptors() -> int:
    """Asks for all the descriptors that this process may have, and says how many that is."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return _UNLIMITED
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = hard if hard != resource.RLIM_INFINITY else max(soft, _UNLIMITED)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


class Room:
    """The connections of one server that keep it waiting, the longest first."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.waiting: OrderedDict[Connection, asyncio.TimerHandle] = OrderedDict()

    def wait(self, one: Connection, seconds: float, then: Callable[[], None]) -> None:
        self.leave(one)
        self.waiting[one] = one.loop.call_later(seconds, then)

    def leave(self, one: Connection) -> None:
        timer = self.waiting.pop(one, None)
        if timer is not None:
            timer.cancel()


class Connection(H11Protocol):
    """One that is closed where its request does not come to an end, or its answer is not taken.

    Where there are too many, the one that has waited longest is closed for the new one. One that has an answer, or has
    not taken all of it yet, is closed only where all have: strangers, too, can ask and take nothing.
    """

    room: Room
    _left = 0  # bytes of its answers that the client had not taken at the last look

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._settle()
        if len(self.connections) > self.room.limits.most:
            self._longest_waiting().give_up()

    def _longest_waiting(self) -> Connection:
        others = [one for one in self.room.waiting if one is not self]
        return next((one for one in others if not one._is_served), others[0] if others else self)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answered:
            self._settle()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._settle()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._settle()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.room.leave(self)

    @property
    def _is_answered(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_served(self) -> bool:
        return self._is_answered or self.transport.get_write_buffer_size() > 0

    def _settle(self) -> None:
        """Waits for the head of the next request, where nothing is being answered and all that was said is taken.

        uvicorn limits only the time between two requests: that timer ends at the first byte of the next one.
        """
        if self.flow.write_paused:
            return  # it is watched since then
        if self._is_answered:
            self.room.leave(self)
        elif self._is_served:
            self._watch()
        else:
            self.room.wait(self, self.room.limits.head_seconds, self.give_up)

    def _watch(self) -> None:
        self._left = self.transport.get_write_buffer_size()
        self.room.wait(self, self.room.limits.stall_seconds, self._look)

    def _look(self) -> None:
        """A client that is slow has time; one that takes nothing has not."""
        before, self._left = self._left, self.transport.get_write_buffer_size()
        if not self._left:
            self._settle()
        elif self._left < before:
            self.room.wait(self, self.room.limits.stall_seconds, self._look)
        else:
            self.give_up()

    def give_up(self) -> None:
        """At once: whoever keeps us waiting may not take a farewell either."""
        self.room.leave(self)
        self.connections.discard(self)  # as good as gone: no other must be closed for it as well
        self.transport.abort()


def limited(limits: Limits) -> type[Connection]:
    """The protocol of one server."""

    class Limited(Connection):
        room = Room(limits)

    return Limited
