"""Clients that keep the dashboard waiting: half of a request, an answer that nobody takes. Over real sockets."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from holter.dashboard.connections import limits_for
from holter.journal import Journal
from holter.run import journal_path
from tests.dashboards import Served, record, served, strict, wait_for, write_run

resource = pytest.importorskip("resource", reason="Windows has no limit of descriptors")
HALF = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: "
FEW = 300  # descriptors of the server
FEW_DESCRIPTORS = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW}, {FEW}))"
WAITING = """
from holter.dashboard import connections
from dataclasses import replace
limits_for = connections.limits_for
connections.limits_for = lambda count: replace(limits_for(count), head_seconds={0}, stall_seconds={0})
"""
IMPATIENT, PATIENT = WAITING.format(0.5), WAITING.format(1e6)
ASK = "GET /static/plotly.min.js HTTP/1.1\r\nHost: 127.0.0.1:{0.port}\r\nAuthorization: Bearer {0.token}\r\n\r\n"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "done", steps=5)
    write_run(tmp_path / "live", steps=1, state="running")
    return tmp_path


def connect(server: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def is_closed(connection: socket.socket) -> bool:
    """Waits until the server closes it, or says something."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def takes_a_byte(connection: socket.socket) -> bool:
    """Few enough of them are sent that no head is too long."""
    try:
        connection.sendall(b"x")
    except ConnectionError:
        return False
    return True


@contextmanager
def half_sent(server: Served, count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as opened:
        found = []
        for _ in range(count):
            connection = opened.enter_context(connect(server))
            connection.sendall(HALF)
            found.append(connection)
        yield found


@contextmanager
def followed(server: Served, run: str) -> Iterator[Iterator[dict[str, Any]]]:
    with server.client.stream("GET", f"/api/run/{run}/events") as stream:
        lines = stream.iter_lines()
        yield (strict(line.removeprefix("data: ")) for line in lines if line.startswith("data: "))


def as_many_as_may_be(wanted: int) -> int:
    """Half-sent requests that this process can keep open besides its own files."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return wanted if allowed == resource.RLIM_INFINITY else min(wanted, allowed - 200)


def test_thousands_of_half_sent_requests_keep_nobody_out(runs: Path) -> None:
    """P19: with more of them than the server may have descriptors, others are answered, runs are read and examined,
    and who followed one before follows it on."""
    journal = Journal(journal_path(runs / "live", 0, 1))
    journal.append(record(1))
    with served(runs, FEW_DESCRIPTORS + PATIENT) as server, followed(server, "live") as news:
        assert next(news)["steps"] == 2
        with half_sent(server, as_many_as_may_be(3000)):
            for path in ("/", "/api/runs", "/api/run/done", "/static/plotly.min.js") * 5:
                assert server.client.get(path).status_code == 200
            wait_for(lambda: all(run["verdict"] for run in server.get("/api/runs")["runs"]))
            assert psutil.Process(server.process.pid).num_fds() < FEW
            journal.append(record(2))
            assert next(one for one in news if one.get("steps") == 3)
    journal.close()


def test_the_one_that_has_waited_longest_is_closed_for_the_next(runs: Path) -> None:
    with served(runs, FEW_DESCRIPTORS + PATIENT) as server:
        most = limits_for(FEW).most
        with half_sent(server, 1) as first, half_sent(server, most - 1) as others, half_sent(server, 1) as last:
            assert is_closed(first[0])
            wait_for(lambda: psutil.Process(server.process.pid).num_fds() < FEW)
            for connection in (others[-1], last[0]):
                connection.sendall(b"x\r\n\r\n")
                assert connection.recv(12) == b"HTTP/1.1 421"


def test_who_is_being_answered_is_not_closed_for_strangers(runs: Path) -> None:
    """P19: however slowly it reads, and however many they are."""
    with served(runs, FEW_DESCRIPTORS + PATIENT) as server, socket.socket() as slow:
        wanted = server.client.get("/static/plotly.min.js").content
        slow.settimeout(60)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port))
        slow.sendall(ASK.format(server).encode())
        with slow.makefile("rb") as answer:
            assert answer.readline() == b"HTTP/1.1 200 OK\r\n"
            with half_sent(server, 2 * limits_for(FEW).most) as strangers:
                assert is_closed(strangers[0])
                assert len(wanted) > 10**6 and b"".join(iter(answer.readline, b"\r\n")).isascii()
                assert answer.read(len(wanted)) == wanted


@pytest.mark.parametrize("sent", [b"", b"G", HALF, b"GET / HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"])
def test_a_request_that_does_not_end_is_given_up(runs: Path, sent: bytes) -> None:
    """Also where a byte comes now and then, and where it is only the body that does not end."""
    with served(runs, IMPATIENT) as server, connect(server) as silent, connect(server) as slow:
        silent.sendall(sent)
        slow.sendall(sent)
        assert sent.endswith(b"\r\n\r\n") or is_closed(silent)
        wait_for(lambda: not takes_a_byte(slow))
        assert server.client.get("/api/runs").status_code == 200


def test_the_next_request_on_a_connection_has_an_end_as_well(runs: Path) -> None:
    with served(runs, IMPATIENT) as server, connect(server) as kept:
        kept.sendall(HALF + b"x\r\n\r\n" + HALF)
        assert kept.recv(12) == b"HTTP/1.1 421"
        wait_for(lambda: not takes_a_byte(kept))


def test_who_takes_nothing_of_an_answer_is_given_up_and_who_follows_a_run_is_not(runs: Path) -> None:
    journal = Journal(journal_path(runs / "live", 0, 1))
    journal.append(record(1))
    with served(runs, IMPATIENT) as server, followed(server, "live") as news, socket.socket() as deaf:
        assert next(news)["steps"] == 2
        process = psutil.Process(server.process.pid)
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", server.port))
        port = deaf.getsockname()[1]
        deaf.sendall(ASK.format(server).encode() * 8)
        wait_for(lambda: port in {one.raddr.port for one in process.net_connections("tcp") if one.raddr})
        wait_for(lambda: port not in {one.raddr.port for one in process.net_connections("tcp") if one.raddr})
        journal.append(record(2))
        assert next(one for one in news if one.get("steps") == 3)
    journal.close()


def test_the_server_asks_for_all_the_descriptors_it_may_have(runs: Path) -> None:
    before = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 600))"
    with served(runs, before) as server:
        assert psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE) == (600, 600)
