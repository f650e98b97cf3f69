"""Starts the dashboard: an address, a token, a server until Ctrl-C."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import secrets
import socket
import sys
import webbrowser
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from holter.dashboard.guard import LEAST_TOKEN, Door
from holter.dashboard.token import private_page
from holter.run import is_run
from holter.words import printable

if TYPE_CHECKING:
    import uvicorn

PORT = 4658  # H O L T on the keys of a telephone
_QUEUE = 1024  # connections that wait to be taken
# Bytes that the system takes of an answer. It takes no more until a third of that is read: with the megabytes that it
# would have, a slow client would seem to read nothing for minutes.
_AHEAD = 128 * 1024
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_MISSING = "holter serve needs starlette, uvicorn and plotly: pip install 'holter[serve]'"


@dataclass(frozen=True)
class Address:
    """Where to listen. An empty token is made up, where only this machine can reach it."""

    host: str = "127.0.0.1"
    port: int = PORT
    token: str = ""
    allowed: tuple[str, ...] = ()  # further NAME:PORT under which it is reached


def serve(
    directory: Path,
    address: Address | None = None,
    *,
    echo: Callable[[str], None] = lambda line: None,
    open_browser: bool = False,
) -> None:
    """Serves the runs under a directory until it is interrupted. ValueError says what to change before it starts."""
    address = address or Address()
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory: name one that holds runs, or make a first with `holter demo`"
        )
    check(address)
    with ExitStack() as until_the_end:
        listening = until_the_end.enter_context(listen(address.host, address.port))
        door = door_of(address, listening)
        server = make_server(directory, door)
        url = f"http://{_in_url(address.host)}:{door.port}/?token={quote(door.token, safe='')}"
        shown = "the run" if is_run(directory) else "the runs in"
        echo(f"Holter shows {shown} {printable(str(directory))} at\n\n    {url}\n")
        if not is_loopback(address.host):
            echo("What is sent is not encrypted: over a network that others share, use a tunnel (ssh -L).")
        echo("Ctrl-C ends it.")
        if open_browser:
            webbrowser.open(until_the_end.enter_context(private_page(url)))
        with suppress(KeyboardInterrupt):  # uvicorn ends in order, and then raises it again
            server.run(sockets=[listening])


def make_server(directory: Path, door: Door) -> uvicorn.Server:
    """ValueError where a package is missing."""
    try:
        import uvicorn

        from holter.dashboard.app import create_app
        from holter.dashboard.connections import limited, limits_for, raise_descriptors
    except ImportError as error:
        raise ValueError(f"{_MISSING} ({error})") from error
    _quiet_logs()
    server: uvicorn.Server

    def is_closing() -> bool:
        return server.should_exit

    limits = limits_for(raise_descriptors())
    config = uvicorn.Config(
        create_app(directory, door, is_closing),
        loop="asyncio",  # wherever it runs, it is what was tested
        http=limited(limits),
        backlog=limits.backlog,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="error",  # requests that are none are no news
        access_log=False,  # the first address that is asked for holds the token
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=3,
    )
    server = uvicorn.Server(config)
    return server


def check(address: Address) -> None:
    """ValueError where it would be open to others without a secret that only its user knows."""
    if address.token and len(address.token) < LEAST_TOKEN:
        raise ValueError(f"the token is too short to be one: {LEAST_TOKEN} characters at least, such as {_example()}")
    if not is_loopback(address.host) and not address.token:
        raise ValueError(
            f"{address.host} can be reached from outside of this machine: set a token of your own with HOLTER_TOKEN or "
            f"--token-file, such as {_example()}, or leave --host out and use a tunnel (ssh -L {PORT}:localhost:{PORT})"
        )


def _example() -> str:
    return secrets.token_urlsafe(24)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class _Listening(socket.socket):
    """asyncio takes as many connections in one go as may wait to be taken. Here few are taken, and many may wait."""

    def listen(self, backlog: int = _QUEUE) -> None:
        super().listen(max(backlog, _QUEUE))


def listen(host: str, port: int) -> socket.socket:
    """ValueError where nobody may listen there, or somebody does."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{host!r} is not an address of this machine: {error}") from error
    listening = _Listening(family, kind, protocol)
    try:
        if os.name == "posix":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _AHEAD)  # each connection has it from here
        listening.bind(place)
        listening.listen()
    except OSError as error:
        listening.close()
        raise ValueError(_why(error, host, port)) from error
    return listening


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is taken, perhaps by another `holter serve`: choose one with --port, or --port 0 for any"
    if error.errno == errno.EACCES:
        return f"port {port} may not be used: choose one above 1023 with --port, or --port 0 for any"
    return f"cannot listen on {host} port {port}: {error.strerror or error}. Choose others with --host and --port"


def door_of(address: Address, listening: socket.socket) -> Door:
    """The names under which browsers reach it. A name that anyone can point here is none of them."""
    bound = ipaddress.ip_address(listening.getsockname()[0].partition("%")[0])
    own = {_in_url(address.host).lower(), _in_url(str(bound))}
    if bound.is_unspecified:
        own.add(socket.gethostname().lower())
    return Door(
        token=address.token or secrets.token_urlsafe(32),
        port=listening.getsockname()[1],
        names=tuple(dict.fromkeys((*_LOOPBACK, *sorted(own)))),
        others=tuple(name.lower() for name in address.allowed),
        any_address=bound.is_unspecified,
    )


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _quiet_logs() -> None:
    """Only what went wrong, in a line. Nothing that was asked for is in it."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
