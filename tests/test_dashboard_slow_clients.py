"""Clients that read slowly, of a server in this process: real sockets, and time that goes on when the test says so."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn

from holter.dashboard.connections import Connection, Limits, Room, limited
from holter.dashboard.serve import listen

HEAD, STALL = 1.0, 2.0
ASK = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
MARK = b"\xff"  # what an answer consists of, and no head has
LARGE = 8 * 2**20
PIECE = 192 * 1024  # what a slow client takes between two looks, of far less than the megabytes a system may hold


class ByHand(Room):
    """Waits for ever, unless somebody says that it is time."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.due: dict[Connection, tuple[float, Callable[[], None]]] = {}

    def wait(self, one: Connection, seconds: float, then: Callable[[], None]) -> None:
        super().wait(one, 1e6, then)
        self.due[one] = seconds, then


@dataclass
class Server:
    room: ByHand
    place: tuple[str, int]
    made: list[Connection]  # in the order in which they came

    async def connect(self) -> tuple[socket.socket, Connection]:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        client.setblocking(False)
        count = len(self.made)
        await asyncio.get_running_loop().sock_connect(client, self.place)
        await until(lambda: len(self.made) > count)
        return client, self.made[-1]


async def until(what: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    while not what():
        assert asyncio.get_running_loop().time() < deadline, "still waiting"
        await asyncio.sleep(0.001)


def left(connection: Connection) -> int:
    return connection.transport.get_write_buffer_size()


async def taken(client: socket.socket, most: int) -> int:
    """How much of its answer a client takes; less than `most` where that was all."""
    count, loop = 0, asyncio.get_running_loop()
    while count < most:
        try:
            data = await asyncio.wait_for(loop.sock_recv(client, 16 * 1024), 60)
        except ConnectionError:
            return count
        if not data:
            return count
        count += data.count(MARK)
    return count


@asynccontextmanager
async def answering(app: Callable[..., Awaitable[None]], most: int = 100) -> AsyncIterator[Server]:
    made: list[Connection] = []

    class Watched(limited(Limits(most=most, head_seconds=HEAD, stall_seconds=STALL))):  # type: ignore[misc]
        def connection_made(self, transport: asyncio.Transport) -> None:
            made.append(self)
            super().connection_made(transport)

    Watched.room = ByHand(Watched.room.limits)
    config = uvicorn.Config(app, http=Watched, lifespan="off", log_config=None, timeout_keep_alive=10**6)
    config.load()
    state = uvicorn.server.ServerState()
    listening = listen("127.0.0.1", 0)
    server = await asyncio.get_running_loop().create_server(lambda: Watched(config, state, {}), sock=listening)
    try:
        yield Server(Watched.room, listening.getsockname(), made)
    finally:
        server.close()
        for connection in made:
            connection.transport.abort()
        await until(lambda: not state.connections)


async def large(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % LARGE)]})
    await send({"type": "http.response.body", "body": MARK * LARGE})


def test_a_client_that_reads_slowly_and_steadily_gets_all_of_its_answer() -> None:
    """P19: each time that the server looks, the client has taken a little."""

    async def read() -> None:
        async with answering(large) as server:
            client, connection = await server.connect()
            with client:
                client.send(ASK)
                await until(lambda: left(connection) > 0)
                count = looks = 0
                while before := left(connection):
                    seconds, look = waited_for = server.room.due[connection]
                    count += await taken(client, PIECE)
                    await until(lambda before=before: left(connection) < before)  # type: ignore[misc]
                    assert seconds == STALL
                    if server.room.due[connection] is waited_for:  # it has not begun to wait anew
                        look()
                        looks += 1
                assert count + await taken(client, LARGE - count) == LARGE and looks > 20

    asyncio.run(read())


def test_one_that_takes_nothing_between_two_looks_is_given_up() -> None:
    async def read() -> None:
        async with answering(large) as server:
            client, connection = await server.connect()
            with client:
                client.send(ASK)
                await until(lambda: left(connection) > 0)
                server.room.due[connection][1]()
                assert await taken(client, LARGE) < LARGE and connection not in server.room.waiting

    asyncio.run(read())


def test_the_last_bytes_of_a_short_answer_have_as_much_time() -> None:
    """Too few for the server to stop writing, and more than the system takes."""
    sent = 0

    async def read() -> None:
        async def until_some_are_left(scope: Any, receive: Any, send: Any) -> None:
            nonlocal sent
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while not left(server.made[0]):
                await send({"type": "http.response.body", "body": MARK * 8192, "more_body": True})
                sent += 8192
            await send({"type": "http.response.body", "body": b""})

        async with answering(until_some_are_left) as server:
            client, connection = await server.connect()
            with client:
                client.send(ASK)
                await until(lambda: connection.cycle is not None and connection.cycle.response_complete)
                before = left(connection)
                seconds, look = server.room.due[connection]
                assert before > 0 and not connection.flow.write_paused and seconds == STALL
                count = await taken(client, PIECE)
                await until(lambda: left(connection) < before)
                look()
                assert count + await taken(client, sent - count) == sent
                await until(lambda: not left(connection))
                server.room.due[connection][1]()
                assert server.room.due[connection][0] == HEAD, "now the next request is waited for"

    asyncio.run(read())


def test_where_none_takes_its_answer_the_one_that_has_waited_longest_is_closed() -> None:
    """P19: nobody is kept out by strangers who ask again and again and take nothing."""

    async def read() -> None:
        async with answering(large, most=3) as server:
            deaf = [await server.connect() for _ in range(2)]
            for client, connection in deaf:
                client.send(ASK)
                await until(lambda connection=connection: left(connection) > 0)  # type: ignore[misc]
            idle, _ = await server.connect()
            late, connection = await server.connect()
            late.send(ASK)
            await until(lambda: left(connection) > 0)
            with idle, late, deaf[0][0] as first, deaf[1][0] as second:
                assert await taken(idle, 1) == 0, "it was closed before them"
                last, _ = await server.connect()
                with last:
                    last.send(ASK)
                    assert await taken(last, LARGE) == LARGE and await taken(first, LARGE) < LARGE
                assert [await taken(second, LARGE), await taken(late, LARGE)] == [LARGE, LARGE]

    asyncio.run(read())


def test_one_that_is_given_up_counts_no_more() -> None:
    """Before its socket is closed: another must not be closed for it as well."""

    async def close() -> None:
        async with answering(large) as server:
            client, connection = await server.connect()
            with client:
                assert connection in connection.connections
                connection.give_up()
                assert connection not in connection.connections

    asyncio.run(close())
