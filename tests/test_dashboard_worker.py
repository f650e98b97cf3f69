"""The diagnosis beside the dashboard: a process of its own that ends with the server, and begins again when it dies."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from holter.dashboard import examinations as examinations_file
from holter.dashboard import process
from holter.dashboard.examinations import Examination, Examinations
from holter.dashboard.shelf import Listed, Shelf
from holter.dashboard.wire import Answer, from_line, to_line
from holter.diagnosis.convergence import Forecast, Outlook
from holter.diagnosis.finding import Finding
from holter.diagnosis.health import Check
from holter.journal import Journal
from holter.report.examining import Examined
from holter.run import journal_path
from holter.signs import Sign
from tests.dashboards import Served, record, served, wait_for, write_run

NAN, INF = math.nan, math.inf
# A worker that dies of every run that is called poison.
POISONED = process._PROGRAM.replace(
    "main()",
    "import os, holter.dashboard.worker as w; answer = w.Practice.answer\n"
    "w.Practice.answer = lambda self, path: os._exit(1) if 'poison' in path else answer(self, path)\n"
    "main()",
)


def listed(server: Served) -> dict[str, Any]:
    return {run["name"]: run for run in server.get("/api/runs")["runs"]}


def children(server: Served) -> list[psutil.Process]:
    return list(psutil.Process(server.process.pid).children())


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
    planted = f"from holter.dashboard import process; process._PROGRAM = {POISONED!r}"
    with served(tmp_path, planted) as server:
        wait_for(lambda: listed(server)["other"]["verdict"])
        runs = listed(server)
        assert "the diagnosis ended" in runs["poison"]["trouble"] and runs["poison"]["verdict"] is None
        assert "diagnosis ended" in server.get("/api/run/poison")["verdict"]["sentence"]


def grown(run: Listed) -> Listed:
    """The same run with more in it, a while after it was last asked about."""
    name, size, changed = run.signature[0]
    return replace(run, signature=((name, size + 1, changed), *run.signature[1:]))


def test_a_run_that_kills_the_worker_twice_is_not_asked_about_again_however_it_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P18"""
    monkeypatch.setattr(process, "_PROGRAM", POISONED)
    monkeypatch.setattr(examinations_file, "_AGAIN", -1.0)
    monkeypatch.setattr(examinations_file, "_REST", 0.0)
    write_run(tmp_path / "poison", steps=1)
    (run,) = Shelf(tmp_path).runs().values()

    async def asked() -> int:
        examinations, times = Examinations(), 0
        examinations.attend()
        while examinations.next([run]) is not None and times < 9:
            await examinations.examine(run)
            times += 1
        assert examinations.next([grown(run)]) is None
        assert "the diagnosis ended" in examinations.known[run.id].trouble
        await examinations.stop()
        return times

    assert asyncio.run(asked()) == 2


def test_a_worker_that_died_once_is_asked_about_the_same_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have been killed for want of memory: no fault of the run's."""
    monkeypatch.setattr(examinations_file, "_AGAIN", -1.0)
    monkeypatch.setattr(examinations_file, "_REST", 0.0)
    write_run(tmp_path / "poison", steps=30)
    (run,) = Shelf(tmp_path).runs().values()

    async def asked() -> Examination:
        examinations = Examinations()
        examinations.attend()
        with monkeypatch.context() as planted:
            planted.setattr(process, "_PROGRAM", POISONED)
            await examinations.examine(run)
        assert examinations.known[run.id].trouble and examinations.next([run]) == run
        await examinations.examine(run)
        await examinations.stop()
        return examinations.known[run.id]

    examined = asyncio.run(asked())
    assert examined.verdict is not None and examined.trouble == ""


def test_deaths_before_an_answer_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P18: a worker that is killed now and then does not leave a run alone for good."""
    monkeypatch.setattr(examinations_file, "_AGAIN", -1.0)
    monkeypatch.setattr(examinations_file, "_REST", 0.0)
    write_run(tmp_path / "poison", steps=30)
    (run,) = Shelf(tmp_path).runs().values()

    async def asked() -> None:
        examinations = Examinations()
        examinations.attend()
        for _ in range(3):
            with monkeypatch.context() as planted:
                planted.setattr(process, "_PROGRAM", POISONED)
                await examinations.examine(run)
            assert examinations.known[run.id].trouble and examinations.next([run]) == run
            await examinations.examine(run)
            assert examinations.known[run.id].verdict is not None
            await examinations.stop()

    asyncio.run(asked())


def test_where_no_worker_can_be_started_it_is_left_for_a_while_and_said_only_while_a_run_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_PROGRAM", "import os; os._exit(1)")
    monkeypatch.setattr(examinations_file, "_REFUSED", 1e6)
    write_run(tmp_path / "run", steps=1)
    (run,) = Shelf(tmp_path).runs().values()

    async def asked() -> None:
        examinations = Examinations()
        examinations.attend()
        await examinations.examine(run)
        assert examinations.next([run]) is None and "cannot be started" in examinations.trouble
        assert examinations.next([]) is None and examinations.trouble == "", "the run is gone"
        await examinations.stop()

    asyncio.run(asked())


@pytest.mark.parametrize("program", ["import os; os._exit(1)", "print('hello')"])
def test_a_worker_that_cannot_be_started_is_no_fault_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setattr(process, "_PROGRAM", program)
    monkeypatch.setattr(examinations_file, "_REFUSED", 0.0)
    write_run(tmp_path / "run", steps=1)
    (run,) = Shelf(tmp_path).runs().values()

    async def asked() -> None:
        examinations = Examinations()
        examinations.attend()
        for _ in range(5):
            assert examinations.next([run]) == run
            await examinations.examine(run)
            assert "cannot be started" in examinations.trouble and run.id not in examinations.known
        monkeypatch.undo()
        await examinations.examine(run)
        assert examinations.known[run.id].verdict and not examinations.trouble
        await examinations.stop()

    asyncio.run(asked())


@pytest.mark.parametrize("ticks", range(5))
def test_to_be_cancelled_in_the_moment_of_an_answer_is_not_forgotten(ticks: int) -> None:
    """The loop that asks would go on for ever, and a Ctrl-C with it."""

    async def cancelled() -> bool:
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def work() -> bytes:
            return await answer

        task = asyncio.create_task(process.Process()._in_time(work(), process.Died))
        for _ in range(3):
            await asyncio.sleep(0)
        answer.set_result(b"said")
        for _ in range(ticks):
            await asyncio.sleep(0)
        was_over = not task.cancel()
        await asyncio.wait([task])
        return was_over or task.cancelled()

    assert asyncio.run(cancelled())


def test_a_worker_that_says_nothing_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_PROGRAM", "print('ready', flush=True); import time; time.sleep(600)")

    async def asked() -> None:
        one = process.Process(patience=5.0)
        with pytest.raises(process.Died, match="5 s"):
            await one.ask({"examine": "run"})
        assert one._process is None

    asyncio.run(asked())


def test_without_descriptors_for_a_worker_the_list_says_so_and_goes_on_when_there_are(tmp_path: Path) -> None:
    """The limit is lowered to what the server has open, and raised again."""
    write_run(tmp_path / "run", steps=30)
    with served(tmp_path, "from holter.dashboard import examinations; examinations._REFUSED = 0.1") as server:
        server_process = psutil.Process(server.process.pid)
        _, hard = server_process.rlimit(psutil.RLIMIT_NOFILE)
        server_process.rlimit(psutil.RLIMIT_NOFILE, (server_process.num_fds() + 2, hard))
        listing = wait_for(lambda: (found := server.get("/api/runs"))["trouble"] and found)
        assert "Too many open files" in listing["trouble"] and [run["name"] for run in listing["runs"]] == ["run"]
        server_process.rlimit(psutil.RLIMIT_NOFILE, (hard, hard))
        wait_for(lambda: listed(server)["run"]["verdict"])
        assert wait_for(lambda: (found := server.get("/api/runs"))["trouble"] == "" and found)["runs"]


def test_a_run_that_has_grown_is_examined_again(tmp_path: Path) -> None:
    """While it trains: what the diagnosis read ends where the run does by then."""
    path = write_run(tmp_path / "run", steps=30, state="running")
    file = journal_path(path, 0, 1)

    def examined(until: object) -> dict[str, Any] | None:
        os.utime(path / "rank-0.journal" if not file.exists() else file)  # a sign of life
        run: dict[str, Any] = listed(server)["run"]
        return run if run["spark"] and run["spark"][-1] == until else None

    with served(tmp_path) as server:
        wait_for(lambda: examined(pytest.approx(record(29).scalars["loss"], rel=1e-3)))
        journal = Journal(file)
        for step in range(30, 40):
            journal.append(record(step, loss=NAN))
        journal.close()
        run = wait_for(lambda: examined(None))
        assert run["state"] == "running" and run["steps"] == 40
        assert run["is_lost"] and run["loss"] is None


def test_a_comparison_is_kept_until_one_of_the_runs_has_grown(tmp_path: Path) -> None:
    write_run(tmp_path / "first", steps=30)
    path = write_run(tmp_path / "second", steps=30, state="running")
    asked = "/api/compare?run=first&run=second"
    with served(tmp_path) as server:
        before = server.get(asked)
        assert server.get(asked) == before
        journal = Journal(journal_path(path, 0, 1))
        for step in range(30, 45):
            journal.append(record(step))
        journal.close()
        assert server.get(asked) != before


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
