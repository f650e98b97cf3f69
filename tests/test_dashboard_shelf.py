"""The runs under a directory as the dashboard finds them: which are listed, and what happens where one is not read."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holter import glance
from holter.dashboard import shelf as shelf_file
from holter.dashboard.shelf import Shelf
from holter.run import write_info
from tests.dashboards import many_runs, served, wait_for, write_run


@pytest.fixture(autouse=True)
def always_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf_file, "_FRESH", -1.0)


def names(shelf: Shelf) -> set[str]:
    return {run.name for run in shelf.runs().values()}


def failing_at(paths: set[Path], number: int) -> Callable[..., Any]:
    """As a disk or a network file system does it: these directories cannot be listed, the others can."""
    real = os.scandir

    def scandir(directory: Any = ".") -> Any:
        if Path(directory) in paths:
            raise OSError(number, os.strerror(number), str(directory))
        return real(directory)

    return scandir


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE])
@pytest.mark.parametrize("where", ["", "project", "project/one"])
def test_a_directory_that_cannot_be_read_for_a_moment_hides_no_run(
    tmp_path: Path, where: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P18: what was known stays, with words about it, until it is over."""
    for run in ("project/one", "project/two", "three"):
        write_run(tmp_path / run, steps=4)
    shelf = Shelf(tmp_path)
    before = shelf.runs()
    with monkeypatch.context() as trouble:
        trouble.setattr(os, "scandir", failing_at({tmp_path / where}, number))
        during = shelf.runs()
        hidden = {run.name for run in during.values() if run.blocked}
        assert hidden == {run for run in ("project/one", "project/two", "three") if run.startswith(where)}
        assert [run.id for run in during.values()] == [run.id for run in before.values()]
        assert all(os.strerror(number) in run.blocked for run in during.values() if run.name in hidden)
        assert {(run.glance.steps, run.glance.state) for run in during.values()} == {(4, "finished")}
    after = shelf.runs()
    assert [run.blocked for run in after.values()] == ["", "", ""]
    shutil.rmtree(tmp_path / "project")
    assert names(shelf) == {"three"}


def test_one_that_is_looked_at_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "run", steps=4)
    shelf = Shelf(tmp_path)
    run = shelf.find("run")
    assert run is not None
    with monkeypatch.context() as trouble:
        trouble.setattr(os, "scandir", failing_at({path}, errno.EIO))
        run = shelf.look_again(run)
        assert "Input/output" in run.blocked and run.glance.steps == 4 and run.signature
    run = shelf.look_again(run)
    assert not run.blocked
    shutil.rmtree(path)
    assert not shelf.look_again(run).signature


def test_a_journal_that_could_not_be_opened_is_read_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although it has not changed since."""

    def fails(path: Path, most: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    write_run(tmp_path / "run", steps=4)
    shelf = Shelf(tmp_path)
    with monkeypatch.context() as trouble:
        trouble.setattr(glance, "read_end", fails)
        assert "Input/output" in shelf.runs()["run"].glance.trouble
    assert not shelf.runs()["run"].glance.trouble and shelf.runs()["run"].glance.steps == 4


def test_what_was_never_read_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path / "other")
    (tmp_path / "closed").mkdir()
    shelf = Shelf(tmp_path)
    with monkeypatch.context() as trouble:
        trouble.setattr(os, "scandir", failing_at({tmp_path / "closed"}, errno.EACCES))
        runs = {run.name: run for run in shelf.runs().values()}
        assert runs.keys() == {"other", "closed"} and "Permission denied" in runs["closed"].glance.trouble
    assert names(shelf) == {"other"}


def test_many_directories_that_cannot_be_read_cost_no_search_among_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P19: twice as many of both take twice the work, not four times."""

    def calls(count: int) -> int:
        root, seen = tmp_path / f"of-{count}", 0
        many_runs(root, count)
        closed = [root / f"closed-{number}" for number in range(count)]
        for path in closed:
            path.mkdir()
        shelf = Shelf(root)
        shelf.runs()

        def one_more(frame: object, event: str, called: object) -> None:
            nonlocal seen
            seen += event == "call"

        with monkeypatch.context() as trouble:
            trouble.setattr(os, "scandir", failing_at(set(closed), errno.EACCES))
            shelf.runs()
            sys.setprofile(one_more)
            try:
                assert len(shelf.runs()) == 2 * count
            finally:
                sys.setprofile(None)
        return seen

    assert calls(120) < 3 * calls(60)


def test_a_list_with_a_directory_that_cannot_be_read_says_so(tmp_path: Path) -> None:
    """P18: over a real server."""
    root, flag = tmp_path / "runs", tmp_path / "broken"
    write_run(root / "project" / "run", steps=4)
    broken = (
        "import errno; scandir = os.scandir\n"
        "def broken(path='.'):\n"
        f"    if os.path.exists({str(flag)!r}) and str(path).endswith('project'):\n"
        "        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))\n"
        "    return scandir(path)\n"
        "os.scandir = broken\n"
    )
    with served(root, broken) as server:
        assert server.get("/api/runs")["runs"][0]["trouble"] == ""
        flag.touch()
        (run,) = wait_for(lambda: [run for run in server.get("/api/runs")["runs"] if run["trouble"]])
        assert run["steps"] == 4 and os.strerror(errno.ESTALE) in run["trouble"]
        flag.unlink()
        wait_for(lambda: [run for run in server.get("/api/runs")["runs"] if not run["trouble"]])


def test_hidden_directories_and_those_too_deep_are_not_searched(tmp_path: Path) -> None:
    for run in (".git/run", ".cache", "project/.trash/run", "a/b/c", "a/b/d/too-deep", "seen"):
        write_run(tmp_path / run, steps=1)
    assert names(Shelf(tmp_path)) == {"a/b/c", "seen"}


def test_what_lies_inside_of_a_run_is_its_own(tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=1)
    write_run(tmp_path / "run" / "copy", steps=1)
    assert names(Shelf(tmp_path)) == {"run"}


def test_a_link_to_itself_hides_no_run(tmp_path: Path) -> None:
    """P18"""
    write_run(tmp_path / "run", steps=1)
    (tmp_path / "loop").symlink_to("loop")
    assert "run" in names(Shelf(tmp_path))


def test_the_layers_of_a_run_that_was_replaced_are_the_new_ones(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", layers=("old.weight",), steps=3)
    shelf = Shelf(tmp_path)
    assert shelf.layers(shelf.runs()["run"]) == ("old.weight",)
    shutil.rmtree(path)
    write_run(path, layers=("new.weight",), steps=3)
    assert shelf.layers(shelf.runs()["run"]) == ("new.weight",)


def test_the_layers_of_a_training_that_was_resumed_with_others_are_found(tmp_path: Path) -> None:
    """Only run.json is another: the journals of before are as they were."""
    path = write_run(tmp_path / "run", layers=("old.weight",), steps=3)
    shelf = Shelf(tmp_path)
    assert shelf.layers(shelf.runs()["run"]) == ("old.weight",)
    write_info(path, {"layers": [{"name": "old.weight"}, {"name": "new.weight"}]})
    assert shelf.layers(shelf.runs()["run"]) == ("old.weight", "new.weight")


def test_layers_that_come_with_the_first_records_are_found(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", layers=("a.weight",), steps=0, state="running")
    shelf = Shelf(tmp_path)
    assert shelf.layers(shelf.runs()["run"]) == ("a.weight",)
    journal = (write_run(tmp_path / "other", layers=("a", "a.weight"), steps=1) / "rank-0.journal").read_bytes()
    (path / "rank-0.journal").write_bytes(journal)
    assert set(shelf.layers(shelf.runs()["run"])) == {"a", "a.weight"}
