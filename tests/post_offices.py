"""Real servers for alerts: one for the web that does as it is told, and one for mail."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterator
from email import message_from_bytes, policy
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

PATIENCE = 30.0  # seconds that a test waits for what is bound to come
TAKES, FAILS, DIES, HANGS = 200, 500, 0, -1  # what a server does with a request


class WebServer(ThreadingHTTPServer):
    """Keeps what it took in `got`; does with each request what `script` says, the last for all that follow."""

    daemon_threads = True

    def __init__(self) -> None:
        self.got: queue.Queue[SimpleNamespace] = queue.Queue()
        self.script, self.requests = [TAKES], 0
        self.asked, self.gate = threading.Event(), threading.Event()  # a request came; those that hang may end
        super().__init__(("127.0.0.1", 0), _Answer)
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def url(self, rest: str = "", scheme: str = "json", user: str = "") -> str:
        return f"{scheme}://{user}127.0.0.1:{self.server_port}{rest}"

    def take(self) -> SimpleNamespace:
        return self.got.get(timeout=PATIENCE)

    def handle_error(self, *_: Any) -> None:
        """One who hangs up is no matter."""


class _Answer(BaseHTTPRequestHandler):
    server: WebServer

    def do_POST(self) -> None:
        does = self.server.script[min(self.server.requests, len(self.server.script) - 1)]
        self.server.requests += 1
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.set()
        if does == HANGS:
            self.server.gate.wait(PATIENCE)
        elif does == DIES:
            self.wfile.write(b"HTTP/")
        else:
            self.send_response(does)
            self.end_headers()
        if does == TAKES:
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


@contextlib.contextmanager
def mail_server() -> Iterator[SimpleNamespace]:
    from aiosmtpd.controller import Controller
    from aiosmtpd.smtp import AuthResult

    got: queue.Queue[Any] = queue.Queue()

    class Keep:
        async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:
            got.put((envelope.rcpt_tos, message_from_bytes(envelope.content, policy=policy.default)))
            return "250 OK"

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    controller = Controller(
        Keep(),
        "127.0.0.1",
        port,
        authenticator=lambda *_: AuthResult(success=True),
        auth_require_tls=False,
    )
    controller.start()
    yield SimpleNamespace(port=port, got=got)
    controller.stop()


def refusing_port() -> int:
    """A port at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])
