"""Localhost is hostile: who may ask the dashboard, under which address and how. Over real sockets, byte by byte.

A gate is a function that returns its faults. It is held to the real server, and to one whose guard sleeps.
"""

from __future__ import annotations

import itertools
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from holter.dashboard.guard import Door
from holter.dashboard.serve import Address, check, door_of, listen
from tests.dashboards import Served, served, write_run

SECRET = "a-run-that-nobody-else-may-see"
GOOD_HOSTS = ("127.0.0.1:{port}", "localhost:{port}", "[::1]:{port}", "LocalHost:{port}")
BAD_HOSTS = (
    *("evil.example", "evil.example:{port}", "127.0.0.1", "localhost", "127.0.0.1:1", "localhost:{port}1", "[::1]"),
    *("127.0.0.1:{port}.evil.example", "127.0.0.1.evil.example:{port}", "localhost.evil.example:{port}", ""),
    *("evil.example#127.0.0.1:{port}", "user@127.0.0.1:{port}", "127.0.0.1:{port}/", "127.0.0.1:{port}:{port}"),
    *("0.0.0.0:{port}", "127.0.0.2:{port}", "2130706433:{port}", "0x7f000001:{port}", "[::]:{port}", "::1:{port}"),
    *("169.254.169.254:{port}", "127.0.0.1:0{port}", "localhost.:{port}", "127.0.0.1 :{port}", "*:{port}", "null"),
)
BAD_ORIGINS = (
    *("null", "http://evil.example", "https://evil.example:{port}", "http://127.0.0.1", "http://localhost:1"),
    *("https://127.0.0.1:{port}", "http://127.0.0.1:{port}.evil.example", "http://evil.example:{port}", "127.0.0.1"),
    *("file://", "chrome-extension://abcdef", "http://user@127.0.0.1:{port}", "http://127.0.0.1:{port}/x", "http://"),
    *("127.0.0.1:{port}", "ws://127.0.0.1:{port}", "http://localhost:{port},http://evil.example", "about:blank", " "),
)
VERBS = ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND", "LOCK", "get", "FOO", "GETT")
PATHS = ("/", "/api/runs", f"/api/run/{SECRET}", f"/run/{SECRET}", "/compare", "/static/plotly.min.js", "/nothing")
SITES = ("cross-site", "same-site", "sideways")


class Case(NamedTuple):
    why: str
    expected: tuple[int, ...]
    path: str = "/api/runs"
    verb: str = "GET"
    host: str | None = "127.0.0.1:{port}"
    headers: tuple[str, ...] = ()
    credential: str = "Authorization: Bearer {token}"


def request(case: Case, server: Served) -> bytes:
    lines = [f"{case.verb} {case.path} HTTP/1.1", *([f"Host: {case.host}"] if case.host is not None else [])]
    lines += [*case.headers, *([case.credential] if case.credential else []), "Connection: close"]
    key = Door(server.token, server.port).key
    text = "\r\n".join([*lines, "", ""]).replace("{port}", str(server.port))
    return text.replace("{token}", server.token).replace("{key}", key).encode()


def faults(server: Served, cases: Sequence[Case]) -> list[str]:
    """Cases that were not answered as they should be, or that gave away the name of a run."""
    found = []
    for case in cases:
        answer = server.raw(request(case, server))
        status = int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0
        if status not in case.expected:
            found.append(f"{case.why}: {status}, not {case.expected}")
        if status >= 300 and SECRET.encode() in answer:
            found.append(f"{case.why}: {status}, and yet it told")
    return found


def host_cases() -> Iterator[Case]:
    for host, path in itertools.product(BAD_HOSTS, PATHS):
        yield Case(f"Host {host!r} for {path}", (421, 400), path, host=host)
    for host in GOOD_HOSTS:
        yield Case(f"Host {host!r}", (200,), host=host)
    yield Case("no Host", (421, 400), host=None)
    yield Case("two Hosts", (421, 400), headers=("Host: evil.example",))
    yield Case(
        "another Host behind a proxy's header",
        (421,),
        host="evil.example",
        headers=("X-Forwarded-Host: localhost:{port}",),
    )
    yield Case(
        "a proxy's header changes nothing",
        (200,),
        headers=("X-Forwarded-Host: evil.example", "X-Forwarded-For: 8.8.8.8"),
    )


def origin_cases() -> Iterator[Case]:
    for origin, verb in itertools.product(BAD_ORIGINS, ("GET", "HEAD", "POST", "OPTIONS")):
        yield Case(f"{verb} from {origin!r}", (403, 405), verb=verb, headers=(f"Origin: {origin}",))
    for origin in BAD_ORIGINS:
        yield Case(f"GET from {origin!r}", (403,), headers=(f"Origin: {origin}",))
    for origin in ("http://127.0.0.1:{port}", "http://localhost:{port}", "http://[::1]:{port}"):
        yield Case(f"GET from {origin}", (200,), headers=(f"Origin: {origin}",))
    both = ("Origin: http://127.0.0.1:{port}", "Origin: http://evil.example")
    yield Case("two Origins", (403,), headers=both)


def verb_cases() -> Iterator[Case]:
    for verb, path in itertools.product(VERBS, PATHS):
        yield Case(f"{verb} {path}", (405, 400), path, verb=verb)
    for path in ("/", "/api/runs", f"/api/run/{SECRET}", f"/api/run/{SECRET}/events", "/static/plotly.min.js"):
        yield Case(f"HEAD {path}", (200,), path, verb="HEAD")


def token_cases() -> Iterator[Case]:
    wrong = (
        "",
        "x",
        "{token}x",
        "x{token}",
        "{token} {token}",
        "é" * 20,
        "Bearer",
        "{key}",
        "null",
        "*",
        "%00",
        "a" * 9000,
    )
    for token, path in itertools.product(wrong, PATHS):
        yield Case(f"bearer {token[:20]!r} for {path}", (401,), path, credential=f"Authorization: Bearer {token}")
    for path in PATHS:
        yield Case(f"no token for {path}", (401,), path, credential="")
        yield Case(f"cookie for {path}", (200, 404), path, credential="Cookie: other=1; holter-{port}={key}; x=y")
    for cookie in (
        "holter-{port}={token}",
        "holter-1={key}",
        "holter={key}",
        "holter-{port}={key}x",
        "{key}",
        "=;;=",
        "holter-{port}=",
    ):
        yield Case(f"cookie {cookie}", (401,), credential=f"Cookie: {cookie}")
    yield Case("cookies of others before ours", (200,), credential='Cookie: a="{\\"b\\":1}; @=(; holter-{port}={key}')
    yield Case("basic", (401,), credential="Authorization: Basic {token}")
    yield Case("bearer in small letters", (200,), credential="authorization: bearer {token}")
    for path in (
        "/api/runs?token={token}",
        "/static/dom.js?token={token}",
        "/?token=",
        "/?token=wrong",
        "/?Token={token}",
    ):
        yield Case(f"token in {path}", (401,), path, credential="")
    for path in ("/?token={token}", "/?x=1&token={token}"):
        yield Case(f"token in {path}", (303,), path, credential="")
    yield Case("a wrong token although the cookie is right", (401,), "/?token=wrong")


def browser_cases() -> Iterator[Case]:
    """What a browser says of a request that another site caused."""
    visit = ("Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document")
    for site, path in itertools.product(SITES, PATHS):
        yield Case(f"{site} fetch of {path}", (403,), path, headers=(f"Sec-Fetch-Site: {site}", "Sec-Fetch-Mode: cors"))
        yield Case(f"{site} visit to {path}", (403,), path, headers=(f"Sec-Fetch-Site: {site}", *visit))
    for site in ("cross-site", "same-site"):
        link = "/?token={token}"
        yield Case(
            f"{site} click on the link", (200,), link, headers=(f"Sec-Fetch-Site: {site}", *visit), credential=""
        )
        for kind in ("iframe", "image", "script", "empty", "object"):
            inside = (f"Sec-Fetch-Site: {site}", "Sec-Fetch-Mode: navigate", f"Sec-Fetch-Dest: {kind}")
            yield Case(f"{site} {kind} of the link", (403,), link, headers=inside, credential="")
    for site in ("none", "same-origin"):
        yield Case(f"{site} fetch", (200,), headers=(f"Sec-Fetch-Site: {site}", "Sec-Fetch-Mode: cors"))


CASES = tuple(itertools.chain(host_cases(), origin_cases(), verb_cases(), token_cases(), browser_cases()))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("guarded")
    write_run(root / SECRET, steps=3)
    return root


@pytest.fixture(scope="module")
def server(runs: Path) -> Iterator[Served]:
    with served(runs) as server:
        yield server


def test_every_case_of_host_origin_verb_and_token_is_answered_as_it_should_be(server: Served) -> None:
    """P21"""
    assert len(CASES) >= 300
    assert faults(server, CASES) == []


@pytest.mark.parametrize(
    "asleep",
    [
        "guard.refused = lambda door, scope: None",
        "guard.Door.is_ours = lambda self, host: True",
        "guard.Door.is_own = lambda self, origin: True",
        "guard.Door.knows = lambda self, headers: True",
        "guard._VERBS = ('GET', 'HEAD', 'POST', 'PUT', 'DELETE')",
        "guard._opens_the_link = lambda scope: True",
    ],
)
def test_a_guard_that_sleeps_is_noticed(runs: Path, asleep: str) -> None:
    """P21: the planted faults."""
    with served(runs, f"from holter.dashboard import guard\n{asleep}") as sleeping:
        assert faults(sleeping, CASES)


def test_the_first_visit_sets_a_strict_cookie_and_leads_to_an_address_without_the_token(server: Served) -> None:
    """P21"""
    answer = server.raw(request(Case("", (), "/?token={token}", credential=""), server)).decode()
    cookie = re.search(r"(?im)^set-cookie: (.*)\r$", answer)
    assert cookie and cookie[1].startswith(f"holter-{server.port}=")
    assert {part.strip() for part in cookie[1].split(";")[1:]} == {"Path=/", "HttpOnly", "SameSite=Strict"}
    assert server.token not in answer
    assert re.search(r"(?im)^location: /\r$", answer)


def test_a_click_on_the_link_in_another_site_gets_a_page_that_goes_on_by_itself(server: Served) -> None:
    """P21: a redirect would count as the other site's, and the strict cookie would stay behind."""
    headers = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document")
    answer = server.raw(request(Case("", (), "/?token={token}", headers=headers, credential=""), server)).decode()
    assert "set-cookie" in answer.lower() and 'content="0;url=/"' in answer and server.token not in answer


@pytest.mark.parametrize("path", [*PATHS, f"/api/run/{SECRET}/events", "/?token=wrong"])
@pytest.mark.parametrize("is_known", [True, False])
def test_every_answer_has_the_headers_that_keep_others_out(server: Served, path: str, is_known: bool) -> None:
    """P21, P22: a refusal as well."""
    headers = {} if is_known else {"Authorization": "Bearer wrong"}
    answer = server.client.head(path, headers=headers)
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert (
        answer.headers["cross-origin-opener-policy"] == answer.headers["cross-origin-resource-policy"] == "same-origin"
    )
    assert "access-control-allow-origin" not in answer.headers and "server" not in answer.headers
    if "/api/run/" in path or not is_known:
        assert answer.headers["cache-control"] == "no-store"


def test_it_listens_on_this_machine_alone(server: Served) -> None:
    """P21: bound to 127.0.0.1, so that another address of this very machine is refused."""
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", server.port), timeout=5):
        pass


def test_each_server_has_a_token_of_its_own(server: Served, runs: Path) -> None:
    with served(runs) as other:
        assert len(server.token) >= 43 and server.token != other.token


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "10.0.0.1", "example.org", "", "fe80::1", "8.8.8.8"])
@pytest.mark.parametrize("token", ["", "short", "fifteen-letters"])
def test_other_addresses_without_a_token_refuse_to_start(host: str, token: str) -> None:
    """P21"""
    with pytest.raises(ValueError, match=r"HOLTER_TOKEN or --token-file|too short"):
        check(Address(host=host, token=token))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.53"])
def test_loopback_needs_none(host: str) -> None:
    check(Address(host=host))


def test_where_it_listens_everywhere_addresses_are_known_and_names_are_not() -> None:
    """P21: an address cannot be pointed elsewhere, a name can."""
    with listen("0.0.0.0", 0) as listening:
        door = door_of(Address(host="0.0.0.0", token="t" * 16, allowed=("Box.example:80",)), listening)
    assert all(door.is_ours(f"{host}:{door.port}") for host in ("192.168.1.7", "localhost", "[fe80::1]", "127.0.0.1"))
    assert door.is_ours("box.example:80") and door.is_own("https://box.example:80")
    refused = ("evil.example", "192.168.1.7.evil.example", "1.2.3", "localhost.evil.example")
    assert not any(door.is_ours(f"{host}:{door.port}") for host in refused)
    assert not door.is_ours("192.168.1.7:1") and not door.is_ours("box.example")


def test_port_80_goes_without_saying() -> None:
    door = Door("t" * 16, 80)
    assert door.is_ours("localhost") and door.is_own("http://[::1]") and not door.is_ours("localhost:4658")


def test_a_port_that_is_taken_is_told_in_one_line_with_the_way_out(server: Served, runs: Path) -> None:
    with pytest.raises(ValueError, match=r"taken.*--port") as told:
        listen("127.0.0.1", server.port)
    assert "\n" not in str(told.value)


def test_the_token_is_in_no_log(runs: Path) -> None:
    """P21, P24: what the server prints besides its own address."""
    program = (
        "import sys, threading, urllib.request, urllib.error, os, signal, re\n"
        "from pathlib import Path\n"
        "from holter.dashboard.serve import Address, serve\n"
        "def ask(line):\n"
        "    found = re.search(r'http://\\S+', line)\n"
        "    if not found: return\n"
        "    def visit():\n"
        "        for tail in ('', 'x', '&a=%00'):\n"
        "            try: urllib.request.urlopen(found[0] + tail)\n"
        "            except urllib.error.HTTPError: pass\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "    threading.Thread(target=visit).start()\n"
        "serve(Path(sys.argv[1]), Address(port=0, token='canary-canary-canary'), echo=ask)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(runs)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "canary" not in done.stdout + done.stderr
