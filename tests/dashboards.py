"""For tests of the dashboard: runs written by hand in no time, and a real server in a process of its own."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from holter.journal import Journal
from holter.record import Ending, LayerRows, Record
from holter.run import journal_path, write_info
from holter.statistics.rows import COLUMNS, Rows

# Serves the directory that it is given, on a free port, until its standard input ends.
SERVE = """
import sys, os, threading, signal
from pathlib import Path
from holter.dashboard.serve import Address, serve
{before}
def wait():
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=wait, daemon=True).start()
serve(Path(sys.argv[1]), Address(port=0), echo=lambda line: print(line, flush=True))
"""


def rows(layers: Sequence[str], value: float = 1.0) -> LayerRows:
    """Layers of a thousand elements, all of them `value`."""
    sums = {"sum": value, "sum_abs": abs(value), "sum_squares": value**2, "sum_fourths": value**4}
    known = {"count": 1000.0, "min": value, "max": value, **{name: 1000 * one for name, one in sums.items()}}
    values = np.tile([known.get(name, 0.0) for name in COLUMNS], (len(layers), 1))
    return LayerRows(tuple(layers), Rows(values))


def record(step: int, layers: Sequence[str] = ("first.weight", "last.weight"), **scalars: float) -> Record:
    falling = 1.0 / (1 + step)
    return Record(
        step=step,
        time=1.79e9 + step,
        scalars={"loss": 0.5 + 2 * falling, "learning_rate": 1e-3, "gradient_norm": 1 + falling, **scalars},
        rows={"gradient": rows(layers, 0.01 + falling), "weight": rows(layers, 1.0)},
    )


def write_run(
    path: Path,
    *,
    steps: int = 30,
    layers: Sequence[str] = ("first.weight", "last.weight"),
    state: str = "finished",
    created: float = 1.79e9,
    **info: Any,
) -> Path:
    """A run on disk. One that is not to be finished is left without an ending."""
    path.mkdir(parents=True, exist_ok=True)
    described = [{"name": name, "shape": [10, 100], "dtype": "float32"} for name in layers]
    write_info(path, {"model": "Small", "parameters": 2000, "layers": described, "created": created, **info})
    journal = Journal(journal_path(path, 0, 0))
    for step in range(steps):
        journal.append(record(step, layers))
    if state != "running":
        journal.append(Ending(1.79e9 + steps, state))
    journal.close()
    return path


@dataclass
class Served:
    """A server that runs. `client` has its token."""

    process: subprocess.Popen[str]
    port: int
    token: str
    said: str
    client: httpx.Client = field(init=False)

    def __post_init__(self) -> None:
        # Each on a connection of its own: one that is kept may be closed by the server just when it is used again.
        self.client = httpx.Client(
            base_url=self.address,
            headers={"Authorization": f"Bearer {self.token}"},
            timeout=110,
            trust_env=False,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        """The JSON at an address; strict, and not an error."""
        answer = self.client.get(path)
        assert answer.status_code == 200, (path, answer.status_code, answer.text[:300])
        return strict(answer.text)

    def raw(self, data: bytes, *, is_all: bool = False) -> bytes:
        """What the server says to these bytes, until it closes the connection. `is_all`: no more will come."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(data)
            if is_all:
                connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))


def strict(text: str) -> Any:
    """JSON as browsers read it: no NaN, no Infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


@contextmanager
def served(root: Path, before: str = "", **environment: str) -> Iterator[Served]:
    """The dashboard of a directory in a process of its own; `before` is run there first."""
    program = [sys.executable, "-c", SERVE.replace("{before}", before), str(root)]
    env = {**os.environ, **environment, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None and process.stdin is not None
    try:
        said = ""
        for line in process.stdout:
            said += line
            if "Ctrl-C" in line:
                break
        found = re.search(r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)", said)
        assert found, f"no address in {said!r}"
        server = Served(process, int(found[1]), found[2], said)
        with server.client:
            yield server
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.stdout.close()
            process.wait()


def wait_for(what: Any, seconds: float = 60.0) -> Any:
    """The first true answer of `what()`; fails after so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := what():
            return found
        time.sleep(0.05)
    raise AssertionError(f"still waiting after {seconds} s")


def many_runs(root: Path, count: int) -> None:
    """Finished runs, a second apart, as quickly as files can be copied."""
    template = write_run(root / "run-0", steps=20)
    journal, info = (template / "rank-0.journal").read_bytes(), json.loads((template / "run.json").read_text())
    for number in range(1, count):
        path = root / f"run-{number}"
        path.mkdir()
        (path / "rank-0.journal").write_bytes(journal)
        (path / "run.json").write_text(json.dumps({**info, "created": 1.79e9 + number}))


def many_series(path: Path, count: int) -> Path:
    """A run whose layers have so many series together."""
    layers = [f"blocks.{number // 12}.part{number % 12}.weight" for number in range(-(-count // 4))]
    path.mkdir()
    described = [{"name": name, "shape": [10, 100], "dtype": "float32"} for name in layers]
    write_info(path, {"model": "Wide", "layers": described, "created": 1.8e9})
    journal = Journal(journal_path(path, 0, 0))
    for step in range(20):
        journal.append(record(step, layers))
    journal.append(Ending(1.8e9, "finished"))
    journal.close()
    return path
