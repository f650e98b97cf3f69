"""For tests of alerts: real servers, one for the web and one for mail, that do as they are told, and fixtures of them.

A test file that wants these has the line `mail, web = post_offices.mail, post_offices.web`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator
from email import message_from_bytes, policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holter
from holter import alerts
from holter.alerts import Alert, Alerts
from holter.diagnosis.finding import Finding
from holter.problems import Complaint
from tests.models import Training, make

PATIENCE = 30.0  # seconds that a test waits for what is bound to come
SLOW_SECONDS = 0.5  # before a slow server answers: longer than the patience that a test leaves to apprise
TAKES, FAILS, DIES, HANGS, SLOW = 200, 500, 0, -1, -2  # what a server does with a request


class Script:
    """What to do with each request, the last for all that follow."""

    def __init__(self) -> None:
        self.got: queue.Queue[Any] = queue.Queue()  # what it took
        self.script, self.requests = [TAKES], 0
        self.asked, self.gate = threading.Event(), threading.Event()  # a request came; those that hang may end

    def next(self) -> int:
        does = self.script[min(self.requests, len(self.script) - 1)]
        self.requests += 1
        return does

    def take(self) -> Any:
        return self.got.get(timeout=PATIENCE)


class WebServer(Script, ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        Script.__init__(self)
        self.connections = 0
        ThreadingHTTPServer.__init__(self, ("127.0.0.1", 0), _Answer)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def url(self, rest: str = "", scheme: str = "json", user: str = "", host: str = "127.0.0.1") -> str:
        return f"{scheme}://{user}{host}:{self.server_port}{rest}"

    def alert(self, rest: str = "", least: str = "warning", **more: str) -> Alert:
        return Alert(self.url(rest, **more), least, private=True)

    def verify_request(self, *_: Any) -> bool:
        self.connections += 1
        return True

    def handle_error(self, *_: Any) -> None:
        """One who hangs up is no matter."""


class _Answer(BaseHTTPRequestHandler):
    server: WebServer

    def do_POST(self) -> None:
        does = self.server.next()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.set()
        if does == HANGS:
            self.server.gate.wait(PATIENCE)
        elif does == DIES:
            self.wfile.write(b"HTTP/")
        else:
            time.sleep(SLOW_SECONDS if does == SLOW else 0.0)
            self.send_response(TAKES if does == SLOW else does)
            if 300 <= does < 400:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
        if does in (TAKES, SLOW):
            self.server.got.put(SimpleNamespace(path=self.path, headers=dict(self.headers), **body))

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def web_server() -> Iterator[WebServer]:
    server = WebServer()
    yield server
    server.gate.set()
    server.shutdown()
    server.server_close()


class MailServer(Script):
    """Handles what aiosmtpd is sent."""

    def __init__(self) -> None:
        super().__init__()
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = int(free.getsockname()[1])

    def url(self, user: str = "", name: str = "me") -> str:
        people = f"from={name}@here.example&to={name}@there.example"
        return f"mailto://{user}127.0.0.1:{self.port}?{people}&mode=insecure"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
        does = self.next()
        self.asked.set()
        if does == HANGS:
            await asyncio.get_running_loop().run_in_executor(None, self.gate.wait, PATIENCE)
        elif does == DIES:
            server.transport.abort()
        elif does == SLOW:
            await asyncio.sleep(SLOW_SECONDS)
        if does not in (TAKES, SLOW):
            return "451 Not now"
        self.got.put((envelope.rcpt_tos, message_from_bytes(envelope.content, policy=policy.default)))
        return "250 OK"


@contextlib.contextmanager
def mail_server() -> Iterator[MailServer]:
    from aiosmtpd.controller import Controller
    from aiosmtpd.smtp import AuthResult

    server = MailServer()
    controller = Controller(
        server,
        "127.0.0.1",
        server.port,
        authenticator=lambda *_: AuthResult(success=True),
        auth_require_tls=False,
    )
    controller.start()
    yield server
    server.gate.set()
    controller.stop()


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    """And alerts that are soon tried again."""
    monkeypatch.setattr(alerts, "PAUSES", (0.01, 0.02, 0.03))
    with web_server() as server:
        yield server


@pytest.fixture
def mail(monkeypatch: pytest.MonkeyPatch) -> Iterator[MailServer]:
    monkeypatch.setattr(alerts, "PAUSES", (0.01, 0.02, 0.03))
    with mail_server() as server:
        yield server


class Told:
    """Alerts and what they say of their deliveries."""

    def __init__(self, *addresses: str | Alert) -> None:
        self.notes: queue.Queue[str] = queue.Queue()
        self.failed: queue.Queue[str] = queue.Queue()
        self.sink = Alerts(addresses)
        self.sink.begin(Path("runs/heron"), self.notes.put, self._failed)

    def _failed(self, where: str, error: BaseException) -> None:
        assert where == "send an alert" and isinstance(error, Complaint)
        self.failed.put(str(error))


def all_of(got: queue.Queue[Any]) -> list[Any]:
    return [got.get_nowait() for _ in range(got.qsize())]


def deliveries(run: holter.Run) -> list[str]:
    return [record.notes["alerts"] for record in run.records if "alerts" in record.notes]


def count(words: str) -> int:
    """How many findings a title or a note is about."""
    more = re.search(r"([\d,]+) more findings", words)
    return int(more[1].replace(",", "")) if more else 1


def finding_at(step: int, severity: str = "warning", **more: Any) -> Finding:
    return Finding(**{"cause": "lr-jump", "where": "lr", "since": step, "step": step, "severity": severity, **more})


def watched(run: Path, *addresses: str | Alert) -> Training:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=run, alerts=addresses)
    return training


def unwatched(steps: int) -> Training:
    training = make("mlp")
    for _ in range(steps):
        training.step()
    return training


def refusing_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
