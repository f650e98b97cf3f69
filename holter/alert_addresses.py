"""Where an alert may go, and how it gets there: by apprise, unlogged, and not to servers inside a network (P23, P24).

A web address must be public and https, and nobody may redirect. What a name stands for is looked at when a connection
is made, and that connection goes to the very address that was looked at: what a name says may change any time. Who
means a server of their own says so: `Alert(url, private=True)`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import ipaddress
import logging
import re
import socket
import threading
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from holter.alert_words import Message

PATIENCE_SECONDS = 30.0  # for an answer: one who is only slow would get the message again otherwise
_LOUD = ("apprise", "requests", "urllib3")  # loggers that are told addresses
_WEBHOOKS = ("json", "xml", "form")  # as apprise calls them, an "s" behind them for https
_MAIL = ("mailto", "mailtos")
_WAY_OUT = "Alert(url, private=True) allows it"

# What is not for everyone, from the registries of IANA. Python's `is_global` admits multicast and NAT64.
_NOT_PUBLIC = [
    ipaddress.ip_network(one)
    for one in (
        *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
        *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24"),
        *("203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
        *("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20"),
    )
]
_PUBLIC_IPV6 = ipaddress.IPv6Network("2000::/3")
_IPV4_INSIDE = [ipaddress.IPv6Network("::ffff:0:0/96"), ipaddress.IPv6Network("64:ff9b::/96")]  # mapped; NAT64


class NotTaken(Exception):
    """Why, as far as it can be said without the address."""


class PrivateAddress(Exception):
    """A name turned out to stand for a server inside a network."""


def sender(apprise: Any, url: str, name: str, private: bool) -> Callable[[Message], bool]:
    """Sends a message there and says whether it was taken; raises NotTaken and PrivateAddress. ValueError where apprise
    can make nothing of the address, or nothing may be sent there."""
    # Sent from the thread that asks: a pool of apprise's own would keep the process from ending while a server hangs.
    asset = apprise.AppriseAsset(app_id="Holter", async_mode=False, service_timeout=0, storage_mode="memory")
    service = service_of(apprise, url, asset)
    if service is None:
        raise ValueError(
            f"{name}: apprise can make nothing of this address, which is not shown as it may hold a token. "
            "https://appriseit.com/services/ says how those of each service are written"
        )
    if not private and (trouble := _trouble(service)):
        raise ValueError(f"{name}: {trouble}")
    service.optional = False  # an address may say that its failures do not count: here they do
    service.redirects = False  # who redirects a message would hand on its token
    service.socket_read_timeout = max(PATIENCE_SECONDS, service.socket_read_timeout)
    service.socket_connect_timeout = max(PATIENCE_SECONDS, service.socket_connect_timeout)  # of mail: for all answers
    if service.schema in _MAIL:  # seconds that apprise waits between two: Holter has a limit of its own
        service.request_rate_per_sec = 0
    with quiet():
        box = apprise.Apprise(service, asset=asset)
    is_free = private or service.schema in _MAIL

    def send(message: Message) -> bool:
        with quiet() as hushed, contextlib.nullcontext() if is_free else _only_public():
            said = {"title": message.title, "body": message.text, "notify_type": message.kind}
            was_sent = bool(box.notify(**said, body_format="text"))
        if not was_sent and hushed.why:
            raise NotTaken(hushed.why)
        return was_sent

    return send


def service_of(apprise: Any, url: str, asset: Any) -> Any:
    """None where there is none, for whatever reason: an error's words may hold the address."""
    with quiet(), contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports what python has deprecated, which may be an error here
        found = apprise.Apprise.instantiate(url, asset=asset)  # knows the https:// addresses of Slack and others
        webhook = _webhook(url) if found is None else None
        return apprise.Apprise.instantiate(webhook, asset=asset) if webhook is not None else found
    return None


def _webhook(url: str) -> dict[str, Any] | None:
    """An http:// or https:// address in apprise's words: a POST of JSON to all of it, query included."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return {
        "schema": "jsons" if parts.scheme == "https" else "json",
        "secure": parts.scheme == "https",
        "host": f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname,
        "port": parts.port,
        "user": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
        "fullpath": parts.path,
        "params": parse_qs(parts.query, keep_blank_values=True),
    }


# Who may be reached ---------------------------------------------------------------------------------------------------


def is_public(address: str) -> bool:
    """Of an IP address.

    >>> is_public("8.8.8.8"), is_public("169.254.169.254"), is_public("64:ff9b::10.0.0.1"), is_public("224.0.0.1")
    (True, False, False, False)
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if any(ip in network for network in _IPV4_INSIDE):
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip not in _PUBLIC_IPV6:
            return False
    return not any(ip in network for network in _NOT_PUBLIC)


def _trouble(service: Any) -> str | None:
    """Why nothing may be sent there, as far as the address says: names are looked up when there is something to send.
    Mail goes where mail servers are, which may be inside."""
    if service.schema in _MAIL:
        return None
    if service.schema in _WEBHOOKS:
        return (
            f"a message for the web goes by https (https:// or {service.schema}s://). For a server of yours, {_WAY_OUT}"
        )
    if _is_inside(str(service.host or ""), service.schema.removesuffix("s") in _WEBHOOKS):
        return f"this address is inside a network, and alerts go to public ones. For a server of yours, {_WAY_OUT}"
    return None


def _is_inside(host: str, is_webhook: bool) -> bool:
    host = host.strip("[]").rstrip(".").lower()
    if host in ("localhost", "localhost.localdomain") or host.endswith(".localhost"):
        return True
    with contextlib.suppress(ValueError):
        return not is_public(host)
    if is_webhook:  # 2130706433 and 0x7f.1 are numbers of hosts too; elsewhere they may be someone's token
        with contextlib.suppress(OSError):
            return not is_public(socket.inet_ntoa(socket.inet_aton(host)))
    return False


class _Guard(threading.local):
    """Of this thread: whether its connections are looked at, and whether one was refused."""

    is_on = has_refused = False


_guard = _Guard()


@contextlib.contextmanager
def _only_public() -> Iterator[None]:
    """Where this thread connects within, by the library that all of apprise's web services use, is public."""
    _look_at_connections()
    _guard.is_on, _guard.has_refused = True, False
    try:
        yield
        if _guard.has_refused:
            raise PrivateAddress
    finally:
        _guard.is_on = False


@functools.cache
def _look_at_connections() -> None:
    """Once in a process. urllib3 offers no other place to see an address before it is connected to, and apprise none to
    give it a session of one's own; connections of other threads go on as they were."""
    connection: Any = importlib.import_module("urllib3.util.connection")
    connect: Callable[..., socket.socket] = connection.create_connection

    @functools.wraps(connect)
    def create_connection(address: tuple[str, int], *args: Any, **more: Any) -> socket.socket:
        host, port = address
        if not _guard.is_on or host.strip("[]").lower() in _proxies():
            return connect(address, *args, **more)
        error: OSError = OSError("nobody is there")
        for peer in _public_peers(host, port):
            try:
                return connect((peer, port), *args, **more)
            except OSError as failure:
                error = failure
        raise error

    connection.create_connection = create_connection


def _public_peers(host: str, port: int) -> list[str]:
    found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    peers = [str(address[0]) for *_, address in found]
    if not all(map(is_public, peers)):
        _guard.has_refused = True
        raise OSError("this address is inside a network")
    return peers


def _proxies() -> set[str | None]:
    """Hosts that the user lets pass on what goes out; these are inside, and know where they may connect to."""
    known = urllib.request.getproxies().values()
    return {urlsplit(one if "://" in one else f"//{one}").hostname for one in known}


# Silence ------------------------------------------------------------------------------------------------------------


class _Hush(logging.Filter):
    """Keeps back what this thread logs; others may use apprise or requests too, and go on as they were."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()
        self.why = ""  # what was kept back says that something failed

    def filter(self, record: logging.LogRecord) -> bool:
        if threading.get_ident() != self._thread:
            return True
        if record.name.startswith("apprise") and record.levelno >= logging.WARNING:
            self.why = _why(record.getMessage()) or self.why
        return False


def _why(words: str) -> str:
    """What of them cannot be an address: a number, or that there was no answer.

    >>> _why("Failed to send JSON POST notification: Server Error, error=503."), _why("A Connection error occurred")
    ('it answered 503', 'no connection, or no answer')
    """
    if answer := re.search(r"\berror=(\d{3})\b", words):
        return f"it answered {answer[1]}"
    return "no connection, or no answer" if "connection error" in words.lower() else ""


_hushing = threading.Lock()


@contextlib.contextmanager
def quiet() -> Iterator[_Hush]:
    """At the level DEBUG apprise and urllib3 log whole addresses (P24)."""
    hush = _Hush()
    known = list(logging.root.manager.loggerDict.items())
    loud = [one for name, one in known if name.split(".")[0] in _LOUD and isinstance(one, logging.Logger)]
    with _hushing:  # a new list each time: another thread may be going through the old one
        for logger in loud:
            logger.filters = [*logger.filters, hush]
    try:
        yield hush
    finally:
        with _hushing:
            for logger in loud:
                logger.filters = [one for one in logger.filters if one is not hush]
