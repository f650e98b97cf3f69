"""Hostile requests and hostile names: nothing outside of the directory is opened, nothing breaks, names stay names.

A gate returns its faults; it is held to the real server, and to servers with a planted fault.
"""

from __future__ import annotations

import ast
import os
import random
import re
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest

from holter.codec import _pack
from holter.frames import write_frame, write_header
from tests.dashboards import Served, served, strict, wait_for, write_run
from tests.hostile_names import hostile_names

# Notes every path that the server opens, lists or starts, by its own report, in a file that was opened before.
AUDIT = """
fd = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(event, words):
    if event in {events!r}:
        os.write(fd, (event + "\\t" + repr(words[0]) + "\\n").encode("utf-8", "backslashreplace"))
sys.addaudithook(note)
"""
NOTED = (
    *("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink"),
    *("os.chmod", "os.truncate", "shutil.rmtree", "subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"),
)
NAN = float("nan")
SECRET = "the-content-of-a-file-outside"
TARGETS = (
    "etc/passwd",
    "secret.txt",
    "outside/secret.txt",
    "proc/self/environ",
    "proc/self/mem",
    "windows/win.ini",
    "root/.ssh/id_rsa",
)
DOTS = (
    *(
        "../",
        "..%2f",
        "%2e%2e/",
        "%2e%2e%2f",
        "..%5c",
        "..\\",
        "%252e%252e%252f",
        "....//",
        "..;/",
        "%c0%ae%c0%ae/",
        "..%00/",
    ),
    *(
        "/",
        "//",
        "/./",
        "%2f",
        "\\\\",
        "file:///",
        "..%c0%af",
        "%uff0e%uff0e/",
        ".%2e/",
        "..%0d%0a/",
        "~/",
        "%e2%80%ae../",
    ),
)
PREFIXES = (
    *(
        "/",
        "/static/",
        "/run/",
        "/api/run/",
        "/api/",
        "/compare/",
        "//",
        "/static//",
        "/static/%2e/",
        "/run/good/",
        "/api/run/good/",
    ),
    *("/api/run/good/layer?layer=", "/api/run/good/zoom?from=0&to=9&map=", "/api/run/good?map=", "/api/layers?search="),
    *(
        "/api/compare?run=good&run=",
        "/?token=",
        "/run/good/..",
        "/api/run/good/map?map=",
        "/static/plotly.min.js/",
        "/?",
    ),
)
SUFFIXES = (
    "",
    "%00",
    "%00.js",
    "?",
    "#",
    "/",
    "/.",
    ";.js",
    ".js",
    "%20",
    "%0a",
    "?a=b&a=c",
    "/events",
    "/layer",
    "%ff",
)
ODD_LINES = (
    *(
        b"GET / HTTP/9.9",
        b"GET /",
        b"",
        b"\x00\x01\x02",
        b"GET  /  HTTP/1.1",
        b"GET / HTTP/1.1 extra",
        b"get / http/1.1",
    ),
    *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"PRI * HTTP/2.0", b"GET http://evil.example/ HTTP/1.1"),
    *(b"GET * HTTP/1.1", b"OPTIONS * HTTP/1.1", b"CONNECT evil.example:443 HTTP/1.1", b"GET ?token=x HTTP/1.1"),
    *(b"GET / HTTP/1.0", b"GET /\xff\xfe HTTP/1.1", b"GET /%zz HTTP/1.1", b"GET /" + b"a" * 70000 + b" HTTP/1.1"),
    *(b"GET /" + b"%00" * 1000 + b" HTTP/1.1", b"GET /api/run/good/events HTTP/1.0"),
)
SOCKET = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13"
ODD_HEADERS = (
    *(b"Content-Length: -1", b"Content-Length: 99999999999999999999", b"Transfer-Encoding: chunked", SOCKET),
    *(b"Transfer-Encoding: gzip, chunked", b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"Upgrade: h2c"),
    *(b"Range: bytes=0-18446744073709551615", b"If-None-Match: " + b"x" * 9000, b"Cookie: " + b"a=b;" * 2000),
    *(b"Cookie: =;=;;\x01", b"Authorization: Bearer", b"Accept-Encoding: gzip;q=x, \xff", b"Expect: 100-continue"),
    *(b"Host: evil.example", b" folded: x", b"No colon", b": empty", b"X: \x00", b"X" * 70000 + b": y"),
    *(b"Last-Event-ID: \xff\xff", b"Accept: */*;" * 500),
)
NAMES = hostile_names(200)


def hostile_path(dice: random.Random) -> str:
    """A request target that tries to lead somewhere else."""
    kind = dice.random()
    if kind < 0.75:
        way = dice.choice(DOTS) * dice.randint(1, 9)
        found = dice.choice(PREFIXES) + way + dice.choice(TARGETS) + dice.choice(("", dice.choice(SUFFIXES)))
    elif kind < 0.9:
        found = dice.choice(PREFIXES) + quote(dice.choice(NAMES)[:300].encode("utf-8", "replace"), safe="")
    else:
        found = "/" + "".join(chr(dice.randint(33, 126)) for _ in range(dice.randint(1, 60)))
    return re.sub(r"[\x00-\x20\x7f-\uffff]", "", found) or "/"


def statuses(connection: socket.socket, count: int) -> list[int]:
    """Of so many answers on one connection; fewer where it was closed."""
    connection.settimeout(60)
    seen = b""
    while len(found := re.findall(rb"HTTP/1\.1 (\d{3}) [A-Z]", seen)) < count:
        try:
            part = connection.recv(1 << 18)
        except ConnectionError:  # closed while more was on its way to the server; answers may be lost with it
            part = b""
        if not part:
            break
        seen += part
    return [int(status) for status in found]


def ask_in_turn(server: Served, dice: random.Random, count: int) -> Iterator[tuple[str, int]]:
    """Hostile targets with a good token, many on one connection; HEAD, so that only the heads come back.

    Where one has closed the connection, the first without an answer is asked for by itself: it may be that one.
    """
    while count > 0:
        batch = [hostile_path(dice) for _ in range(min(count, 50))]
        found = ask_at_once(server, batch)
        if len(found) < len(batch):
            found += ask_at_once(server, [batch[len(found)]]) or [0]
        yield from zip(batch, found, strict=False)
        count -= len(found)


def ask_at_once(server: Served, batch: list[str]) -> list[int]:
    head = f"Host: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {server.token}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        with suppress(ConnectionError):
            connection.sendall("".join(f"HEAD {path} HTTP/1.1\r\n{head}" for path in batch).encode("ascii"))
        return statuses(connection, len(batch))


def ask_malformed(server: Served, dice: random.Random, count: int) -> Iterator[tuple[str, int]]:
    """Requests that are none, each on a connection of its own; no answer at all counts as 400."""
    good = [f"Host: 127.0.0.1:{server.port}".encode(), f"Authorization: Bearer {server.token}".encode()]
    for _ in range(count):
        line = dice.choice(ODD_LINES) if dice.random() < 0.5 else b"GET /api/runs HTTP/1.1"
        odd = [dice.choice(ODD_HEADERS) for _ in range(dice.randint(0, 2))]
        data = b"\r\n".join([line, *good, *odd, b"Connection: close", b"", b""])
        data = (
            data
            if dice.random() < 0.8
            else data[: dice.randint(0, len(data))] + bytes(dice.randbytes(dice.randint(0, 40)))
        )
        try:
            answer = server.raw(data, is_all=True)
        except ConnectionError:
            answer = b""
        found = re.match(rb"HTTP/1\.1 (\d{3})", answer)
        yield repr(data[:80]), int(found[1]) if found else 400


def outside(log: Path, root: Path, since: int = 0) -> list[str]:
    """What the server opened that is not in its directory."""
    found = []
    for line in log.read_text("utf-8").splitlines()[since:]:
        event, _, path = line.partition("\t")
        opened = ast.literal_eval(path)
        if not isinstance(opened, str | bytes) or not Path(os.path.realpath(os.fsdecode(opened))).is_relative_to(root):
            found.append(f"{event} {path}")
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run, beside files that nobody may see."""
    place = tmp_path_factory.mktemp("hostile")
    write_run(place / "runs" / "good", steps=5)
    (place / "outside").mkdir()
    (place / "secret.txt").write_text(SECRET)
    (place / "outside" / "secret.txt").write_text(SECRET)
    return place


def faults(place: Path, requests: int, before: str = "") -> list[str]:
    """Answers of 500 and above, and what was opened outside of the root, after so many hostile requests."""
    log = place / f"opened-{os.urandom(4).hex()}.txt"
    dice = random.Random(4658)
    found = []
    with served(place / "runs", AUDIT.format(log=str(log), events=NOTED) + before) as server:
        # What loads when it is first needed is loaded, and what is examined is examined.
        wait_for(lambda: server.get("/api/runs")["runs"][0]["verdict"])
        for path in (
            "/",
            "/api/run/good",
            "/api/run/good/layer?layer=x",
            "/api/run/good/zoom?map=x&from=0&to=1",
            "/static/x",
        ):
            server.client.get(path)
        server.client.get("/api/compare?run=good&run=good")
        since = len(log.read_text("utf-8").splitlines())
        malformed = requests // 20
        for asked in (ask_in_turn(server, dice, requests - malformed), ask_malformed(server, dice, malformed)):
            found += [f"{status} for {what}" for what, status in asked if not 200 <= status < 500]
        assert server.get("/api/runs")["runs"][0]["name"] == "good"  # and it still serves
        found += outside(log, place / "runs", since)
    return found


def test_20_000_hostile_requests_open_nothing_outside_and_break_nothing(place: Path) -> None:
    """P20"""
    assert faults(place, 20_000) == []


@pytest.mark.gauntlet
def test_a_million_hostile_requests_open_nothing_outside_and_break_nothing(place: Path) -> None:
    """P20"""
    assert faults(place, 1_000_000) == []


JOINED = """
import holter.dashboard.app as app
from starlette.routing import Route
from starlette.responses import Response
old = app.Dashboard.__init__
def init(self, root, is_closing):
    old(self, root, is_closing)
    async def static(request):
        path = root / request.path_params["file"].replace(chr(0), "")
        if path.is_file(): open(path).close()
        return Response()
    self.app.router.routes.insert(0, Route("/static/{file:path}", static))
app.Dashboard.__init__ = init
"""
RAISING = """
import holter.dashboard.app as app
app.layers_found = lambda shelf, runs, terms: 1 / (0 if any("." in term for term in terms) else 1)
"""


@pytest.mark.parametrize(("planted", "seen"), [(JOINED, "open "), (RAISING, "500 for")])
def test_a_planted_fault_is_noticed(place: Path, planted: str, seen: str) -> None:
    """P20: names that are joined to a path, and an address that raises; the twins of the test above."""
    assert any(fault.startswith(seen) for fault in faults(place, 2_000, planted))


def test_no_hostile_target_is_answered_with_what_lies_outside(place: Path) -> None:
    """P20: bodies too."""
    dice = random.Random(1)
    with served(place / "runs") as server:
        for _ in range(300):
            target = hostile_path(dice)
            head = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {server.token}\r\n"
            if "/events" not in target:
                answer = server.raw(f"{head}Connection: close\r\n\r\n".encode())
                assert SECRET.encode() not in answer and b"root:" not in answer


# Runs that were written to do harm ---------------------------------------------------------------------------------


def crafted(path: Path, blobs: list[bytes], info: str = "{}") -> None:
    """A run whose frames are whole and whose content is not."""
    path.mkdir()
    (path / "run.json").write_text(info)
    (path / "rank-0.journal").write_bytes(
        write_header(7) + b"".join(write_frame(blob, 7, number) for number, blob in enumerate(blobs))
    )


def entry(**words: object) -> bytes:
    said = {"kind": "record", "step": 0, "time": 0.0, "segment": 0, "late": False, "notes": {}, "roles": [], **words}
    return _pack({"scalars": ["loss"], **said}, {"scalars": np.ones(1)})


def rowed(step: int, value: float) -> bytes:
    roles = [{"role": role, "layers": 0, "columns": ["count", "sum_squares"]} for role in ("gradient", "", "x" * 999)]
    words = {"kind": "record", "step": step, "time": 0.0, "segment": 0, "late": False, "notes": {}, "scalars": []}
    arrays = {f"{place}.values": np.full((2, 2), value) for place in range(3)}
    return _pack({**words, "roles": roles}, {"scalars": np.zeros(0), **arrays})


def test_runs_that_were_written_to_do_harm_break_nothing(tmp_path: Path) -> None:
    """P18, P20: every answer is strict JSON and none is a failure of the server's."""
    twice = _pack({"kind": "layers", "number": 0, "layers": ["a", "a"]}, {})
    crafted(tmp_path / "negative", [entry(step=-5), entry(step=-1)])
    crafted(tmp_path / "huge", [*(entry(step=step) for step in range(30)), entry(step=2**63 - 1), entry(step=3)])
    crafted(tmp_path / "time", [entry(time=NAN), entry(step=1, time=1e300)])
    crafted(tmp_path / "segments", [entry(step=step, segment=step % 3 * -(2**60)) for step in range(30)])
    crafted(tmp_path / "order", [entry(step=step, notes={"execution_order": "[" * 9999}) for step in range(30)])
    crafted(tmp_path / "nan", [twice, *(rowed(step, NAN) for step in range(25))])
    crafted(tmp_path / "large", [twice, *(rowed(step, -1e308) for step in range(25))])
    crafted(
        tmp_path / "end",
        [_pack({"kind": "ending", "time": 0.0, "state": "<b>" * 999, "error": "x", "dropped": -1}, {})],
    )
    crafted(
        tmp_path / "layers",
        [entry()],
        '{"layers": [1, null, {"name": 3}], "created": -1, "model": 5, "total_steps": -5}',
    )
    crafted(
        tmp_path / "numbers", [entry()], '{"created": 1e400, "parameters": 1e400, "layers": {}, "versions": {"a": [1]}}'
    )
    with served(tmp_path) as server:
        runs = wait_for(lambda: examined(server.get("/api/runs")["runs"]))
        assert len(runs) == 10
        for run in (run["id"] for run in runs):
            for what in ("", "/layer?layer=a", "/map?map=gradient/norm", "/zoom?map=gradient/norm&from=0&to=99"):
                answer = server.client.get(f"/api/run/{run}{what}")
                assert answer.status_code in (200, 422), (run, what, answer.text[:300])
                strict(answer.text)
        assert server.client.get("/api/layers?search=a").status_code == 200


def examined(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return runs if all(run["verdict"] or run["trouble"] for run in runs) else []
