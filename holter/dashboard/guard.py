"""Who may ask: address, verb, origin and token of every request, and the headers of every answer.

Any page that a browser has open can send requests to 127.0.0.1, and any name can be made to point there. So Host must
be one of our own names, Origin our own where there is one, and the token known. One ASGI middleware around everything.
"""

from __future__ import annotations

import hashlib
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LEAST_TOKEN = 16  # characters of one that a person chose
_VERBS = ("GET", "HEAD")
# The hash is that of nothing: plotly makes an empty style element and fills it by rules.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='",
        "img-src 'self' data:",
        "connect-src 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "form-action 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Door:
    """Under which names and port the dashboard is reached, and what opens it.

    `any_address` is for a server that listens on all addresses of a machine: an address in Host is then one of them,
    since nothing but a name can be made to point elsewhere.
    """

    token: str
    port: int
    names: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")
    others: tuple[str, ...] = ()  # NAME:PORT as a tunnel or a proxy shows it
    any_address: bool = False

    @property
    def cookie(self) -> str:
        """Its name. Cookies are shared by the ports of a machine, so the port is part of it."""
        return f"holter-{self.port}"

    @property
    def key(self) -> str:
        """What the cookie holds: not the token, which other ports of this machine must not learn."""
        return hashlib.sha256(f"holter cookie {self.token}".encode("utf-8", "surrogateescape")).hexdigest()

    def is_ours(self, host: str) -> bool:
        """Whether a Host header is this server."""
        host = host.lower()
        if host in self.others:
            return True
        name, colon, port = host.rpartition(":")
        if not colon or host.endswith("]"):
            name, port = host, "80"  # browsers leave out a port that goes without saying
        if port != str(self.port):
            return False
        return name in self.names or (self.any_address and _is_address(name))

    def is_own(self, origin: str) -> bool:
        """Whether an Origin is this server; only one before us may speak https."""
        scheme, _, host = origin.lower().partition("://")
        return scheme in ("http", "https") and self.is_ours(host) and (scheme == "http" or host in self.others)

    def is_open_to(self, token: str) -> bool:
        return _same(token, self.token)

    def knows(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """By the cookie that the first visit set, or by `Authorization: Bearer`."""
        found = list(headers)
        bearer = [value for name, value in found if name == b"authorization"]
        if bearer:
            kind, _, token = bearer[0].decode("latin-1").partition(" ")
            return len(bearer) == 1 and kind.lower() == "bearer" and _same(token.strip(), self.token)
        return any(_same(key, self.key) for key in _cookies(found, self.cookie))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _same(given: str, expected: str) -> bool:
    """Takes as long for a near miss as for a far one."""
    return secrets.compare_digest(given.encode("utf-8", "replace"), expected.encode("utf-8", "replace"))


def _cookies(headers: Iterable[tuple[bytes, bytes]], wanted: str) -> list[str]:
    """Split by hand: a cookie of another server on this machine may hold anything, and must not hide ours."""
    crumbs = (crumb for name, value in headers if name == b"cookie" for crumb in value.decode("latin-1").split(";"))
    pairs = (crumb.strip().partition("=") for crumb in crumbs)
    return [value for name, _, value in pairs if name == wanted]


@dataclass(frozen=True)
class Refusal:
    status: int
    words: str
    headers: tuple[tuple[str, str], ...] = ()


class Guard:
    """Lets through to `app` what may pass and answers the rest itself."""

    def __init__(self, app: App, door: Door) -> None:
        self._app, self._door = app, door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, _with_headers(send))
        else:  # a WebSocket: nothing here speaks it
            await send({"type": "websocket.close", "code": 1008})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = refused(self._door, scope)
        token = _token_in(scope)
        if refusal is not None:
            await _answer(send, scope, refusal.status, refusal.words, refusal.headers)
        elif token is not None and self._door.is_open_to(token):
            await self._welcome(scope, send)
        elif token is None and self._door.knows(scope["headers"]):
            await self._app(scope, receive, send)
        else:
            await _answer(send, scope, 401, _NO_TOKEN, (("www-authenticate", "Bearer"),))

    async def _welcome(self, scope: Scope, send: Send) -> None:
        """The first visit: a cookie from now on, and an address without the token."""
        door = self._door
        cookie = "set-cookie", f"{door.cookie}={door.key}; Path=/; HttpOnly; SameSite=Strict"
        if _fetch(scope, "site") in ("cross-site", "same-site"):
            # A redirect still counts as the other site's, and such a cookie would not be sent along. What this page
            # asks for is its own.
            kind = "content-type", "text/html; charset=utf-8"
            await _answer(send, scope, 200, _MOVE_ON, (cookie, kind))
        else:
            await _answer(send, scope, 303, "", (cookie, ("location", "/")))


_MOVE_ON = '<!doctype html><title>Holter</title><meta http-equiv="refresh" content="0;url=/">'
_NO_TOKEN = "This needs the token: open the address that `holter serve` printed.\n"
_NOT_OURS = (
    "This dashboard is not known under this address. Open it as `holter serve` printed it; through a tunnel use the "
    "same port on both sides, or start it with --allow NAME:PORT.\n"
)


def refused(door: Door, scope: Scope) -> Refusal | None:
    """Why a request may not pass, whatever token it has; None where it may."""
    headers = scope["headers"]
    hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
    if len(hosts) != 1 or not door.is_ours(hosts[0]):
        return Refusal(421, _NOT_OURS)
    for origin in (value.decode("latin-1") for name, value in headers if name == b"origin"):
        if not door.is_own(origin):
            return Refusal(403, "Other sites may not ask this dashboard.\n")
    if scope["method"] not in _VERBS:
        return Refusal(405, "This dashboard only shows: GET and HEAD.\n", (("allow", ", ".join(_VERBS)),))
    site = _fetch(scope, "site")
    if site not in ("", "none", "same-origin") and not _opens_the_link(scope):
        return Refusal(403, "Other sites may not ask this dashboard. Open it in a tab of its own.\n")
    return None


def _opens_the_link(scope: Scope) -> bool:
    """A click on the printed address, as in a notebook's terminal; not a frame, an image or a script."""
    is_visit = _fetch(scope, "mode") == "navigate" and _fetch(scope, "dest") == "document"
    return is_visit and _token_in(scope) is not None


def _token_in(scope: Scope) -> str | None:
    """Only the front page takes one in its address: it leads on at once."""
    if scope["path"] != "/":
        return None
    asked = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    return next((value for name, value in asked if name == "token"), None)


def _fetch(scope: Scope, what: str) -> str:
    """What the browser says of the request in Sec-Fetch-Site, -Mode, -Dest; empty where it says nothing."""
    name = f"sec-fetch-{what}".encode()
    return next((value.decode("latin-1").lower() for key, value in scope["headers"] if key == name), "")


def _with_headers(send: Send) -> Send:
    """Adds what every answer says; an answer's own words on the same subject stand."""

    async def send_with(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            given = [(name.lower(), value) for name, value in message.get("headers", ())]
            names = {name for name, _ in given}
            ours = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            message["headers"] = [*given, *((name, value) for name, value in ours if name not in names)]
        await send(message)

    return send_with


async def _answer(send: Send, scope: Scope, status: int, words: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
    body = words.encode()
    all_headers = {"content-type": "text/plain; charset=utf-8", "content-length": str(len(body)), **dict(headers)}
    encoded = [(name.encode(), value.encode("latin-1")) for name, value in all_headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})
