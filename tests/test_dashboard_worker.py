"""The diagnosis beside the dashboard: a process of its own that ends with the server, and begins again when it dies."""

from __future__ import annotations

import math
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from holter.dashboard.examinations import Examination, Examinations
from holter.dashboard.shelf import Shelf
from holter.dashboard.wire import Answer, from_line, to_line
from holter.diagnosis.convergence import Forecast, Outlook
from holter.diagnosis.finding import Finding
from holter.diagnosis.health import Check
from holter.report.examining import Examined
from holter.signs import Sign
from tests.dashboards import Served, served, wait_for, write_run

NAN, INF = math.nan, math.inf


def listed(server: Served) -> dict[str, Any]:
    return {run["name"]: run for run in server.get("/api/runs")["runs"]}


def children(server: Served) -> list[psutil.Process]:
    return psutil.Process(server.process.pid).children()


def test_a_worker_that_dies_is_started_again(tmp_path: Path) -> None:
    write_run(tmp_path / "first")
    with served(tmp_path) as server:
        wait_for(lambda: listed(server)["first"]["verdict"])
        (worker,) = children(server)
        worker.kill()
        write_run(tmp_path / "second")
        wait_for(lambda: listed(server).get("second", {}).get("verdict"))
        assert [one.pid for one in children(server)] != [worker.pid]


def test_a_run_that_kills_the_worker_is_left_alone_and_the_others_are_examined(tmp_path: Path) -> None:
    """P18"""
    write_run(tmp_path / "poison", created=1.79e9 + 99)
    write_run(tmp_path / "other")
    poison = (
        "from holter.dashboard import process\n"
        "process._PROGRAM = process._PROGRAM.replace('main()', '''import os, holter.dashboard.worker as w\n"
        "answer = w.Practice.answer\n"
        "w.Practice.answer = lambda self, path: os._exit(1) if 'poison' in path else answer(self, path)\n"
        "main()''')"
    )
    with served(tmp_path, poison) as server:
        wait_for(lambda: listed(server)["other"]["verdict"])
        runs = listed(server)
        assert "the diagnosis ended" in runs["poison"]["trouble"] and runs["poison"]["verdict"] is None
        assert "diagnosis ended" in server.get("/api/run/poison")["verdict"]["sentence"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_worker_ends_with_the_server_however_that_ends(tmp_path: Path, how: signal.Signals) -> None:
    write_run(tmp_path / "run")
    with served(tmp_path) as server:
        wait_for(lambda: listed(server)["run"]["verdict"])
        (worker,) = children(server)
        server.process.send_signal(how)
        server.process.wait(20)
        worker.wait(20)
        assert not worker.is_running()


def test_nothing_is_examined_while_nobody_looks(tmp_path: Path) -> None:
    write_run(tmp_path / "older", steps=1)
    write_run(tmp_path / "newer", steps=1, created=1.8e9)
    runs = list(Shelf(tmp_path).runs().values())
    examinations = Examinations()
    assert examinations.next(runs) is None
    examinations.attend()
    found = examinations.next(runs)
    assert found is not None and found.name == "newer"
    examinations.attend("older")
    found = examinations.next(runs)
    assert found is not None and found.name == "older"


def test_what_was_begun_is_examined_to_its_end_before_another_begins(tmp_path: Path) -> None:
    """The worker keeps few runs open: taken by turns, many long ones would begin again and again."""
    for number in range(6):
        write_run(tmp_path / f"run-{number}", steps=1)
    runs = list(Shelf(tmp_path).runs().values())
    examinations = Examinations()
    examinations.attend()
    first = examinations.next(runs)
    assert first is not None
    asked = Examination(first.extent, first.glance.state, at=time.monotonic(), is_partial=True)
    examinations.known[first.id] = asked
    assert examinations.next(runs) == first
    examinations.known[first.id] = replace(asked, is_partial=False)
    following = examinations.next(runs)
    assert following is not None and following.id != first.id


def test_what_was_examined_survives_the_way_between_the_processes() -> None:
    finding = Finding(
        "lr-jump", "lr", 3, 5, "critical", "a.b", 0.5, {"x": 1.5, "n": np.int64(2), "y": INF}, "Do.", ("b",), 9
    )
    examined = Examined(
        (finding,),
        (Check("loss", "passed", NAN, "fine"),),
        Outlook(True, Forecast(9, 1.0, 0.5, 1.5)),
        (Sign("kind", "text", ("a", "b"), 3, 1.0, "info"),),
        0.5,
    )
    back = from_line(to_line(Answer(examined, "running", 7, (1.0, NAN), False)))
    assert back.examined.findings == (finding,) and back.examined.outlook == examined.outlook
    assert back.examined.signs == examined.signs and math.isnan(back.examined.health[0].value)
    assert (back.state, back.steps, back.spark[0], back.is_complete) == ("running", 7, 1.0, False)
    for line in ("", "{}", "[]", '{"examined": {}}', "NaN"):
        with pytest.raises(ValueError):
            from_line(line)
