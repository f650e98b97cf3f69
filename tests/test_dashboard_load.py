"""The dashboard under load: a hundred clients at once, a thousand runs, ten thousand series; every answer is right.

How long it takes is measured by `python -m benchmarks.dashboard`; here is only what must be so however long it takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.dashboards import Served, many_runs, many_series, served, strict

CLIENTS, RUNS, SERIES = 100, 1000, 10_000


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("many")
    many_runs(root, RUNS - 1)
    many_series(root / "wide", SERIES)
    with served(root) as server:
        yield server


async def at_once(server: Served, paths: list[str], clients: int) -> list[list[httpx.Response]]:
    """What each of so many clients gets at these addresses, each in its own order."""

    async def one(number: int) -> list[httpx.Response]:
        turned = paths[number % len(paths) :] + paths[: number % len(paths)]
        async with httpx.AsyncClient(
            base_url=server.address, headers=server.client.headers, timeout=100, trust_env=False
        ) as client:
            return [await client.get(path) for path in turned]

    return await asyncio.gather(*(one(number) for number in range(clients)))


def test_a_hundred_clients_at_once_get_whole_answers(server: Served) -> None:
    """P19: 0 errors, strict JSON."""
    paths = [
        "/",
        "/api/runs",
        "/api/run/run-7",
        "/api/run/run-8?map=gradient/norm",
        "/api/layers?search=first",
        "/run/wide",
    ]
    answers = [answer for one in asyncio.run(at_once(server, paths, CLIENTS)) for answer in one]
    assert len(answers) == CLIENTS * len(paths)
    assert {answer.status_code for answer in answers} == {200}
    for answer in answers:
        if answer.headers["content-type"] == "application/json":
            check(answer.url.path, strict(answer.text))


def check(path: str, said: Any) -> None:
    """Each answer belongs to its question."""
    if path == "/api/runs":
        assert len(said["runs"]) == RUNS
    elif path.startswith("/api/run/"):
        assert said["run"]["name"] == path.removeprefix("/api/run/") and said["run"]["steps"] == 20
    else:
        assert len(said["runs"]) == RUNS - 1


def test_a_thousand_runs_are_listed_the_newest_first(server: Served) -> None:
    """P19"""
    runs = server.get("/api/runs")["runs"]
    assert len(runs) == RUNS == len({run["id"] for run in runs})
    assert [run["created"] for run in runs] == sorted((run["created"] for run in runs), reverse=True)
    assert {run["steps"] for run in runs if run["name"] != "wide"} == {20}


def test_ten_thousand_series_are_listed_and_each_can_be_opened(server: Served) -> None:
    """P19"""
    view = server.get("/api/run/wide?map=gradient/norm")
    shown = sum(len(one["layers"]) for one in view["maps"])
    more = [server.get(f"/api/run/wide/map?map={one['id']}") for one in view["more_maps"]]
    assert shown + sum(len(one["layers"]) for one in more) >= SERIES
    layer = view["maps"][0]["layers"][-1]
    detail = server.get(f"/api/run/wide/layer?layer={layer}")
    assert {one["id"] for one in detail["series"]} >= {"gradient/norm", "weight/norm"}
    found = server.get(f"/api/layers?search={layer}")["runs"]
    assert [run["name"] for run in found] == ["wide"]


def test_many_who_follow_one_run_all_hear_of_it(server: Served) -> None:
    """P19: each stream is told, and each ends when its reader leaves."""

    async def first(client: httpx.AsyncClient) -> Any:
        async with client.stream("GET", "/api/run/run-3/events") as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: "):
                    return strict(line.removeprefix("data: "))
        return None

    async def all_of_them() -> list[Any]:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(
            base_url=server.address, headers=server.client.headers, timeout=100, limits=limits, trust_env=False
        ) as client:
            return await asyncio.gather(*(first(client) for _ in range(CLIENTS)))

    told = asyncio.run(all_of_them())
    assert len(told) == CLIENTS and {one["steps"] for one in told} == {20}


def test_what_was_opened_is_forgotten_again(server: Served, tmp_path: Path) -> None:
    """A visit to fifty runs leaves no more open than a visit to a few."""
    import psutil

    process = psutil.Process(server.process.pid)
    for number in range(50):
        server.get(f"/api/run/run-{number}")
    assert len([file for file in process.open_files() if file.path.endswith(".journal")]) == 0
