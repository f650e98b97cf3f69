"""The dashboard of a directory of runs: its list, a run's page, what happens while a run trains. Over a real server."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest

import holter
from holter.dashboard.desk import Desk
from holter.dashboard.shelf import Shelf
from holter.frames import BEGIN
from holter.journal import Journal
from holter.record import Ending
from holter.report.verdict import verdict_of
from holter.run import journal_path, open_run
from tests.dashboards import Served, record, served, strict, wait_for, write_run

NAN, INF = math.nan, math.inf
HOLTER = Path(holter.__file__).parent
REPORT, COMPARISON, DASHBOARD = (HOLTER / part / "page" for part in ("report", "comparison", "dashboard"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs in every state, the damaged ones among them."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "done", steps=40, created=1.79e9 + 50)
    write_run(root / "failed", state="failed", created=1.79e9 + 40)
    write_run(root / "running", state="running", created=1.79e9 + 30)
    crashed = write_run(root / "crashed", state="running", created=1.79e9 + 20)
    os.utime(crashed / "rank-0.journal", (1.79e9, 1.79e9))
    write_run(root / "project" / "deep", created=1.79e9 + 10)
    (root / "described").mkdir()
    (root / "described" / "run.json").write_text('{"model": "Nothing yet"}')
    for name, words, journal in (("garbage", "{", b"garbage" * 99), ("empty", "{}", b""), ("zeros", "[]", bytes(4096))):
        (root / name).mkdir()
        (root / name / "run.json").write_text(words)
        (root / name / "rank-0.journal").write_bytes(journal)
    newer = root / "newer"
    write_run(newer)
    whole = (newer / "rank-0.journal").read_bytes()
    header = whole[:6] + b"\xff\x00" + whole[8 : BEGIN - 4]
    (newer / "rank-0.journal").write_bytes(header + struct.pack("<I", zlib.crc32(header)) + whole[BEGIN:])
    torn = write_run(root / "torn", steps=20)
    (torn / "rank-0.journal").write_bytes((torn / "rank-0.journal").read_bytes()[:-100])
    flipped = write_run(root / "flipped", steps=40) / "rank-0.journal"
    damaged = bytearray(flipped.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    flipped.write_bytes(damaged)
    (root / "no run at all").mkdir()
    outside = tmp_path_factory.mktemp("outside")
    write_run(outside / "secret")
    (root / "way-out").symlink_to(outside / "secret")
    (root / "files-out").mkdir()
    (root / "files-out" / "run.json").symlink_to(outside / "secret" / "run.json")
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    with served(root) as server:
        yield server


def listed(server: Served) -> dict[str, Any]:
    return {run["name"]: run for run in server.get("/api/runs")["runs"]}


# The list ------------------------------------------------------------------------------------------------------------


def test_every_run_is_listed_with_its_state_whatever_is_wrong_with_others(server: Served) -> None:
    """P18: one damaged run never hides another."""
    runs = listed(server)
    states = {name: runs[name]["state"] for name in ("done", "failed", "crashed", "project/deep", "described")}
    assert states == {
        "done": "finished",
        "failed": "failed",
        "crashed": "crashed",
        "project/deep": "finished",
        "described": "empty",
    }
    assert {"garbage", "empty", "zeros", "newer", "torn"} < runs.keys()
    assert "no run at all" not in runs
    assert [runs[name]["steps"] for name in ("done", "torn")] == [40, 20]
    assert list(runs).index("done") < list(runs).index("failed") < list(runs).index("crashed")


def test_what_is_wrong_with_a_damaged_run_stands_in_the_list(server: Served) -> None:
    runs = listed(server)
    assert "run.json" in runs["garbage"]["trouble"]
    assert "upgrade" in runs["newer"]["trouble"]
    assert "leads out" in runs["way-out"]["trouble"] and "lead out" in runs["files-out"]["trouble"]
    assert runs["done"]["trouble"] == ""


def test_a_run_that_can_be_read_in_part_is_told_in_the_list(server: Served, root: Path) -> None:
    """Its last entries are whole, so that a look at the end of it shows nothing; the examination does."""
    runs = wait_for(lambda: (found := listed(server))["flipped"]["verdict"] and found["torn"]["verdict"] and found)
    read = len(open_run(root / "flipped").history)
    assert read == 39 and runs["flipped"]["steps"] == 40
    assert "1 frame damaged" in runs["flipped"]["trouble"] and "The rest was read" in runs["flipped"]["trouble"]
    assert runs["torn"]["state"] == "running" and runs["torn"]["trouble"] == "", "it may be in the midst of a write"


def test_the_styles_of_one_page_do_not_change_what_another_has() -> None:
    """The page of a run has all three: a class that two of them describe looks like neither."""
    sheets = [
        re.sub(r"/\*.*?\*/", "", (pages / name).read_text(encoding="utf-8"), flags=re.DOTALL)
        for pages, name in ((REPORT, "style.css"), (COMPARISON, "compare.css"), (DASHBOARD, "dashboard.css"))
    ]
    described = [set(re.findall(r"(?:^|[},])\s*(\.[\w-]+)\s*(?=[,{])", sheet)) for sheet in sheets]
    assert all(classes for classes in described)
    for one, other in itertools.combinations(described, 2):
        assert not one & other


def test_every_listed_run_has_a_page_that_says_what_is_there(server: Served) -> None:
    for name, run in listed(server).items():
        answer = server.client.get(f"/api/run/{run['id']}")
        said = strict(answer.text)
        assert answer.status_code == 200 or (answer.status_code == 422 and said["error"]), name
        assert server.client.get(f"/run/{run['id']}").status_code == 200
    torn = server.get("/api/run/torn")
    assert torn["run"]["steps"] == 20 and torn["run"]["unreadable_bytes"] > 0 and torn["notes"]


def test_a_link_out_of_the_directory_is_not_followed(server: Served) -> None:
    """P20"""
    assert server.client.get("/api/run/way-out").status_code == 422
    assert server.client.get("/api/run/files-out").status_code == 422
    assert "Small" not in server.client.get("/api/run/way-out").text


def test_verdicts_and_spark_lines_come_from_the_diagnosis_in_the_background(server: Served, root: Path) -> None:
    """The verdict is that of the same run read by itself."""

    def examined() -> dict[str, Any] | None:
        runs = listed(server)
        known = [run for run in runs.values() if run["name"] in ("done", "failed", "torn", "crashed")]
        return runs if all(run["verdict"] for run in known) else None

    runs = wait_for(examined)
    for name in ("done", "failed", "torn", "crashed"):
        run = open_run(root / name)
        expected = verdict_of(run.findings, run.state, len(run.history))
        assert runs[name]["verdict"]["sentence"] == expected.sentence
        assert runs[name]["findings"] == len(run.findings)
    losses = open_run(root / "done").history.scalar("loss")[1]
    assert runs["done"]["spark"][0] == pytest.approx(losses[0], rel=1e-3)
    assert runs["done"]["spark"][-1] == pytest.approx(losses[-1], rel=1e-3)


def test_runs_are_found_by_their_layers(server: Served, root: Path) -> None:
    write_run(root / "attentive", layers=("h.0.attention.query.weight", "h.0.mlp.weight"), steps=2)
    found = wait_for(lambda: server.get("/api/layers?search=Attention%20query")["runs"])
    assert [(run["name"], run["layers"], run["count"]) for run in found] == [
        ("attentive", ["h.0.attention.query.weight"], 1)
    ]
    assert server.get("/api/layers?search=no-such-layer")["runs"] == []


def test_a_run_that_is_new_is_found_and_one_that_is_gone_is_not_listed(server: Served, root: Path) -> None:
    path = write_run(root / "fleeting", steps=1)
    wait_for(lambda: server.client.get("/api/run/fleeting").status_code == 200)
    for file in path.iterdir():
        file.unlink()
    path.rmdir()
    wait_for(lambda: "fleeting" not in listed(server))
    assert server.client.get("/api/run/fleeting").status_code in (404, 422)


def test_a_run_directory_itself_can_be_served(root: Path) -> None:
    with served(root / "done") as alone:
        assert list(listed(alone)) == ["done"]
        assert alone.get("/api/run/done")["run"]["steps"] == 40


# A run ---------------------------------------------------------------------------------------------------------------


def test_what_is_not_a_number_is_null(tmp_path: Path) -> None:
    """P19: strict JSON with NaN everywhere."""
    path = write_run(tmp_path / "nan", steps=0, state="running", total_steps=NAN)
    journal = Journal(journal_path(path, 0, 1))
    for step in range(30):
        journal.append(
            record(step, loss=NAN, gradient_norm=INF, **{"accuracy": -INF, "val_loss": NAN, "time/data": NAN})
        )
    journal.append(Ending(NAN, "finished"))
    journal.close()
    with served(tmp_path) as server:
        listing = wait_for(lambda: next((run for run in server.get("/api/runs")["runs"] if run["verdict"]), None))
        view = server.get("/api/run/nan")
    assert listing["loss"] is None and set(listing["spark"]) <= {None}
    assert set(view["scalars"]["loss"]["values"]) == {None}


def test_a_layer_has_the_series_of_the_history(server: Served, root: Path) -> None:
    history = open_run(root / "done").history
    detail = server.get("/api/run/done/layer?layer=last.weight")
    (norm,) = [one for one in detail["series"] if one["id"] == "gradient/norm"]
    steps, layers, values = history.series("gradient", "norm")
    assert norm["steps"] == steps.tolist()
    np.testing.assert_allclose(norm["values"], values[:, layers.index("last.weight")], rtol=1e-5)
    assert server.get("/api/run/done/layer?layer=none")["series"] == []


def test_only_the_maps_that_are_asked_for_are_sent_and_the_others_are_named(server: Served) -> None:
    view = server.get("/api/run/done?map=gradient/norm")
    assert [one["id"] for one in view["maps"]] == ["gradient/norm"]
    others = [one["id"] for one in view["more_maps"]]
    assert "weight/norm" in others
    assert server.get("/api/run/done/map?map=weight/norm")["id"] == "weight/norm"
    assert server.get("/api/run/done/map?map=none") is None


def test_some_steps_can_be_looked_at_closely(server: Served) -> None:
    close = server.get("/api/run/done/zoom?map=gradient/norm&from=10&to=19")
    assert close["steps"] == list(range(10, 20))
    assert close["values"]["shape"] == "2, 10"
    for asked in (
        "",
        "from=1",
        "from=5&to=4",
        "from=-1&to=2",
        "from=a&to=b",
        f"from=0&to={'9' * 40}",
        "from=1e3&to=2e3",
    ):
        assert server.client.get(f"/api/run/done/zoom?map=gradient/norm&{asked}").status_code == 400


def test_what_is_not_there_is_told(server: Served) -> None:
    for path in (
        "/api/run/none",
        "/api/run/none/layer",
        "/api/run/none/events",
        "/nothing",
        "/api",
        "/run/",
        "/static/none.js",
    ):
        assert server.client.get(path).status_code == 404, path


def test_files_are_kept_by_the_browser_as_long_as_they_are_the_same(server: Served) -> None:
    answer = server.client.get("/static/plotly.min.js")
    assert answer.headers["content-encoding"] == "gzip" and len(answer.content) > 1_000_000
    again = server.client.get("/static/plotly.min.js", headers={"If-None-Match": answer.headers["etag"]})
    assert again.status_code == 304 and not again.content
    plain = server.client.get("/static/dom.js", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.headers["content-type"].startswith("text/javascript")


# While it trains -----------------------------------------------------------------------------------------------------


def news(server: Served, run: str) -> Iterator[dict[str, Any]]:
    """The events of a run, as they come."""
    with server.client.stream("GET", f"/api/run/{run}/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        for line in stream.iter_lines():
            if line.startswith("data: "):
                yield strict(line.removeprefix("data: "))


def test_a_live_run_tells_of_every_step_and_of_its_end(tmp_path: Path) -> None:
    path = write_run(tmp_path / "live", steps=0, state="running")
    journal = Journal(journal_path(path, 0, 1))
    journal.append(record(0))
    with served(tmp_path) as server:
        events = news(server, "live")
        assert next(one for one in events if one["steps"] == 1)["state"] == "running"
        for step in range(1, 4):
            journal.append(record(step))
            told = next(one for one in events if one["steps"] == step + 1)
            view = server.get("/api/run/live?map=gradient/norm")
            assert told["state"] == "running" and view["run"]["last_step"] == step
        journal.append(Ending(1.79e9, "finished"))
        journal.close()
        assert next(one for one in events if one["state"] == "finished")
        wait_for(lambda: server.get("/api/run/live")["verdict"]["sentence"] != "Not examined yet.")
        events.close()


def test_a_file_that_is_cut_or_replaced_is_read_anew(tmp_path: Path) -> None:
    """P18: readers cope with growing, truncated, replaced files."""
    path = write_run(tmp_path / "run", steps=9)
    file = path / "rank-0.journal"
    with served(tmp_path) as server:
        assert server.get("/api/run/run")["run"]["steps"] == 9
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        assert 0 < wait_for(lambda: server.get("/api/run/run")["run"]["steps"] % 9) < 9
        file.unlink()
        write_run(path, steps=4)
        wait_for(lambda: server.get("/api/run/run")["run"]["steps"] == 4)


def test_a_stream_ends_when_its_reader_leaves(server: Served) -> None:
    process = psutil.Process(server.process.pid)

    def is_connected(port: int) -> bool:
        found = [one for one in process.net_connections("tcp") if one.raddr and one.raddr.port == port]
        return any(one.status == psutil.CONN_ESTABLISHED for one in found)

    with server.client.stream("GET", "/api/run/running/events") as stream:
        lines = stream.iter_lines()  # kept: without a reader the stream is closed
        next(lines)
        port = stream.extensions["network_stream"].get_extra_info("client_addr")[1]
        wait_for(lambda: is_connected(port))
    wait_for(lambda: not is_connected(port))
    assert server.client.head("/api/run/running/events").status_code == 200


def test_the_server_ends_at_once_although_someone_listens(root: Path) -> None:
    with served(root) as server:
        events = news(server, "running")
        next(events)
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.process.wait(15) == 0
        with pytest.raises((StopIteration, httpx.RemoteProtocolError)):
            while True:
                next(events)


# Bounds --------------------------------------------------------------------------------------------------------------


def test_few_runs_are_open_at_a_time(tmp_path: Path) -> None:
    import anyio

    for number in range(12):
        write_run(tmp_path / f"run-{number}", steps=3)
    shelf, desk = Shelf(tmp_path), Desk()

    async def look() -> list[int]:
        counts = []
        for run in shelf.runs().values():
            await desk.ask(run, "steps", lambda follower: follower.digest.count)
            counts.append(len(desk._open))
        return counts

    counts = anyio.run(look)
    assert len(counts) == 12 and max(counts) <= 6


def test_a_running_run_without_a_sign_of_life_becomes_a_crashed_one(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", state="running")
    shelf = Shelf(tmp_path)
    before = shelf.find("run")
    assert before is not None and before.glance.state == "running"
    os.utime(path / "rank-0.journal", (time.time() - 60, time.time() - 60))
    assert shelf.look_again(before).glance.state == "crashed"


def test_what_is_missing_is_told_in_one_line(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['{}'] = None\n"
        "from pathlib import Path; from holter.dashboard.serve import Address, serve\n"
        "try: serve(Path(sys.argv[1]), Address(port=0))\n"
        "except ValueError as error: print(error)\n"
    )
    for package in ("uvicorn", "starlette"):
        words = [sys.executable, "-c", program.format(package), str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=110)
        assert "pip install 'holter[serve]'" in done.stdout and done.stdout.count("\n") == 1, done.stderr
    words = [sys.executable, "-c", program.format("none"), str(tmp_path / "none")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=110)
    assert "is not a directory" in done.stdout and done.stdout.count("\n") == 1


def test_the_words_of_the_list_are_strict_json(server: Served) -> None:
    text = server.client.get("/api/runs").text
    assert text.isascii() and json.loads(text)["directory"]
