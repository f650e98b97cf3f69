"""How quick the dashboard is under load: python -m benchmarks.dashboard [--clients 100] [--runs 1000] [--seconds 20]

A real server with runs on disk, one of them live at ten steps a second. Clients are sockets that ask as the pages do:
the list again and again, a run, one of its layers; each pauses between two questions as a page does. Then the same
without pauses. `closed loop` is bounded by the clients' own work in the same two cores. The live part measures the time
from a record's write to the event that tells of it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil

from holter.journal import Journal
from holter.run import journal_path
from tests.dashboards import Served, many_runs, many_series, record, served, wait_for, write_run

PAUSE = 1.0  # seconds; the pages ask less often
Ask = Callable[[str], Awaitable[tuple[int, int]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--series", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        many_runs(root, words.runs - 2)
        many_series(root / "wide", words.series)
        write_run(root / "live", steps=0, state="running", created=1.81e9)
        with served(root) as server:
            lists(server, words.runs, words.series)
            with training(root / "live"):
                live(server)
                for name, pause in (("clients as pages are", PAUSE), ("closed loop", 0.0)):
                    print(f"{name:24}", asyncio.run(load(server, words.clients, pause, words.seconds)))
            memory = psutil.Process(server.process.pid).memory_info().rss
            print(f"memory of the server     {memory / 2**20:.0f} MiB")


def lists(server: Served, runs: int, series: int) -> None:
    print(f"{runs} runs, first list     {timed(server, '/api/runs'):.3f} s")
    time.sleep(1)
    print(f"{runs} runs, again          {timed(server, '/api/runs'):.3f} s")
    print(f"{series} series, first      {timed(server, '/api/run/wide?map=gradient/norm'):.3f} s")
    print(f"{series} series, again      {timed(server, '/api/run/wide?map=gradient/norm'):.3f} s")
    print(f"search by layer, first   {timed(server, '/api/layers?search=part7'):.3f} s")
    print(f"search by layer, again   {timed(server, '/api/layers?search=part7'):.3f} s")


def timed(server: Served, path: str) -> float:
    began = time.perf_counter()
    server.client.get(path).raise_for_status()
    return time.perf_counter() - began


class training:
    """Writes ten steps a second into a run, and remembers when."""

    written: dict[int, float]

    def __init__(self, path: Path) -> None:
        self._journal = Journal(journal_path(path, 0, 1))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._train)
        training.written = {}

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._journal.close()

    def _train(self) -> None:
        step = 0
        while not self._stop.wait(0.1):
            self._journal.append(record(step))
            training.written[step] = time.perf_counter()
            step += 1


def live(server: Served, events: int = 10) -> None:
    delays: list[float] = []
    wait_for(lambda: training.written)
    with server.client.stream("GET", "/api/run/live/events") as stream:
        last = None
        for line in stream.iter_lines():
            if line.startswith("data: "):
                steps = json.loads(line[6:])["steps"]
                if last is not None and steps > last:
                    # The oldest step that this event is the first to tell of.
                    delays.append(time.perf_counter() - training.written[last])
                last = steps
            if len(delays) >= events:
                break
    print(f"from a step to its event median {np.median(delays):.2f} s, longest {max(delays):.2f} s")


async def load(server: Served, clients: int, pause: float, seconds: float) -> str:
    """Latencies of all clients together."""
    taken: list[float] = []
    wrong: list[int] = []
    until = time.perf_counter() + seconds
    paths = ["/api/runs", "/api/run/{run}?map=gradient/norm", "/api/runs", "/api/run/{run}/layer?layer=first.weight"]

    async def one(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.sleep(pause * number / clients)
        turn = number
        while time.perf_counter() < until:
            path = paths[turn % len(paths)].format(run="live" if number % 2 else f"run-{number % 5}")
            began = time.perf_counter()
            status = await ask(server, reader, writer, path)
            taken.append(time.perf_counter() - began)
            wrong.extend([status] if status != 200 else [])
            turn += 1
            await asyncio.sleep(pause)
        writer.close()

    await asyncio.gather(*(one(number) for number in range(clients)))
    p50, p95, p99 = (1000 * np.percentile(taken, share) for share in (50, 95, 99))
    return (
        f"{clients} clients, {len(taken) / seconds:.0f} answers a second, {len(wrong)} errors, "
        f"median {p50:.0f} ms, p95 {p95:.0f} ms, p99 {p99:.0f} ms"
    )


async def ask(server: Served, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str) -> int:
    head = f"Host: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {server.token}\r\nAccept-Encoding: gzip\r\n\r\n"
    writer.write(f"GET {path} HTTP/1.1\r\n{head}".encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", answer)
    await reader.readexactly(int(length[1]) if length else 0)
    return int(answer.split(b" ", 2)[1])


if __name__ == "__main__":
    main()
