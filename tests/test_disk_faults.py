"""P13: a failing disk does not touch the training, nor what was written before; recording resumes when it can."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import holter
from holter.cli import main
from holter.draft import Draft
from holter.glance import glance
from holter.journal import Journal
from holter.record import Ending, Problem, Record
from holter.run import journal_path
from holter.tail import Tail
from tests.models import Training, differences, make

STEPS = 60


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holter.writer._FIRST_PAUSE", 0.002)
    monkeypatch.setattr("holter.writer._LONGEST_PAUSE", 0.01)


@pytest.fixture(scope="module")
def unwatched() -> Training:
    training = make("mlp")
    for _ in range(STEPS):
        training.step()
    return training


def _start(path: Path) -> Training:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=path, budget=None, histograms=1)
    return training


def _go(training: Training, steps: int) -> None:
    for _ in range(steps):
        training.step()


def _journal(training: Training) -> Journal:
    journal: Journal = training.monitor._writer._journal
    return journal


def _warnings(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.levelno >= logging.WARNING and record.name == "holter" for record in caplog.records)


@contextlib.contextmanager
def _tmpfs(path: Path, size: str = "1m") -> Iterator[Path]:
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system takes root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_file_system_is_waited_for(
    tmp_path: Path, unwatched: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """P13: 1 MB tmpfs, filled by someone else, and freed again: nothing is lost."""
    with _tmpfs(tmp_path / "disk") as disk:
        training = _start(disk / "run")
        _go(training, 10)
        assert training.monitor.flush(10)
        filler = disk / "filler"
        with contextlib.suppress(OSError), filler.open("wb") as file:
            while True:
                file.write(b"\0" * 4096)
                file.flush()
        _go(training, 20)
        assert not training.monitor.flush(0.2)
        assert training.monitor.state == "degraded"
        assert holter.open_run(disk / "run").history.steps.tolist()[:10] == list(range(10))
        filler.unlink()
        _go(training, 30)
        training.monitor.close()
        assert differences(unwatched, training) == []
        assert holter.open_run(disk / "run").history.steps.tolist() == list(range(STEPS))
        assert holter.open_run(disk / "run").state == "finished"
    assert _warnings(caplog) == 1


def _posted(training: Training, monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """What is given to the queue from now on, to be a record each."""
    background, found = training.monitor._writer._background, list[Draft]()
    real = background.post

    def post(task: Any, size: int = 0) -> bool:
        found.extend(one for one in getattr(task, "args", ()) if isinstance(one, Draft))
        return bool(real(task, size))

    monkeypatch.setattr(background, "post", post)
    return found


def _ended_on_a_full_disk(run: Path, training: Training, posted: list[Draft]) -> None:
    """What is owed where the disk was full until the end: counted, told, ended, closed."""
    monitor, stored = training.monitor, holter.open_run(run)
    kept = stored.history.steps.tolist()
    assert kept == list(range(len(kept))) and 0 < len(kept) < monitor.step
    assert 0 < monitor.dropped == len(posted) - len(stored.records) == stored.ending.dropped
    assert stored.state == "finished" == glance(stored).state
    assert glance(stored).trouble == f"{monitor.dropped} records were lost as it was written"
    assert not stored.unreadable_bytes and not stored.damage
    (problem,) = stored.problems
    assert f"{monitor.dropped} records were lost" in problem.what and "No space left" in problem.what
    assert [finding.cause for finding in monitor.findings].count("monitor-degraded") == 1
    assert "monitor-degraded" in [finding.cause for finding in stored.findings]
    open_here = [os.path.realpath(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    assert not [path for path in open_here if path.startswith(str(run))]


def test_a_file_system_that_is_full_until_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P13, P15, P17: 64 KB, and 90 steps that need more: what is lost is counted, and how it ended is on the disk."""
    monkeypatch.setattr("holter.monitor._CLOSE_SECONDS", 0.5)
    with _tmpfs(tmp_path / "disk", "64k") as disk:
        training = _start(disk / "run")
        posted = _posted(training, monkeypatch)
        _go(training, 90)
        training.monitor.close()
        _ended_on_a_full_disk(disk / "run", training, posted)
        assert _warnings(caplog) == 1
        before = set((disk / "run").iterdir())
        answer = CliRunner().invoke(main, ["report", str(disk / "run")])
        assert answer.exit_code == 1 and "cannot write" in answer.output
        assert set((disk / "run").iterdir()) == before  # no page, and none that is empty


def test_a_file_system_that_is_full_when_a_segment_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P13, P15, P17: there is no room for another file; how it ended stands in the one before."""
    monkeypatch.setattr("holter.monitor._CLOSE_SECONDS", 0.5)
    with _tmpfs(tmp_path / "disk", "256k") as disk:
        training = _start(disk / "run")
        posted = _posted(training, monkeypatch)
        _go(training, 10)
        assert training.monitor.flush(10)
        with (disk / "filler").open("wb", buffering=0) as file:
            for size in (4096, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size))
        training.monitor.load_state_dict({"step": 5})
        _go(training, 20)
        training.monitor.close()
        _ended_on_a_full_disk(disk / "run", training, posted)
        assert _warnings(caplog) == 1


def test_a_segment_that_begins_where_the_directory_was_deleted_gets_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = _start(tmp_path / "run")
    _go(training, 10)
    assert training.monitor.flush(10)
    shutil.rmtree(tmp_path / "run")
    training.monitor.load_state_dict({"step": 5})
    _go(training, 20)
    training.monitor.close()
    assert holter.open_run(tmp_path / "run").history.steps.tolist() == list(range(5, 25))


@pytest.mark.parametrize("taken", [0, 1, 200, 400])
def test_a_write_that_is_cut_short_until_the_end(
    taken: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P13, P15, P17: a disk that takes so many bytes more, and then parts and nothing: whatever fits, all is told."""
    monkeypatch.setattr("holter.monitor._CLOSE_SECONDS", 0.5)
    training = _start(tmp_path / "run")
    posted = _posted(training, monkeypatch)
    _go(training, 10)
    assert training.monitor.flush(10)
    file, left, real = _journal(training)._file, [taken], os.write

    def full(to: int, data: bytes) -> int:
        if to != file:
            return real(to, data)
        written = real(to, data[: left[0]]) if left[0] else 0
        left[0] -= written if written == len(data) else 0
        if not written:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written

    monkeypatch.setattr(os, "write", full)
    _go(training, 20)
    training.monitor.close()
    monkeypatch.undo()
    _ended_on_a_full_disk(tmp_path / "run", training, posted)
    assert _warnings(caplog) == 1


def test_what_is_said_where_a_full_disk_left_no_room_is_heard_by_those_who_follow(tmp_path: Path) -> None:
    """P15: in place of a frame that they have read before; with a name that is too long for it cut off."""
    journal = Journal(journal_path(tmp_path, 0, 0))
    journal.append(Record(0, 1.0))
    tail, run = Tail(tmp_path, lambda: None), holter.open_run(tmp_path)
    assert len(list(tail.read())) == 1 and tail.ending is None and run.ending is None
    ending = Ending(2.0, "failed", "E" * 5000, dropped=7)
    journal.end_in_place(Problem(0, 1.0, "write", "no space"), ending)
    journal.close()
    run.refresh()
    assert [type(entry) for entry in tail.read()] == [Ending] and list(tail.read()) == []
    assert tail.ending == run.ending == replace(ending, error="") and run.state == "failed"


def test_a_device_that_is_always_full_drops_and_counts(
    tmp_path: Path, unwatched: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """P13: /dev/full in place of the file; the queue is bounded, what it cannot hold is counted, then it resumes."""
    training = _start(tmp_path / "run")
    _go(training, 10)
    assert training.monitor.flush(10)
    training.monitor._writer._background._most_items = 30
    file = _journal(training)._file
    kept, full = os.dup(file), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file)
    _go(training, 30)
    dropped = training.monitor.dropped
    assert dropped > 0 and training.monitor.state == "degraded"
    os.dup2(kept, file)
    os.close(kept)
    os.close(full)
    assert training.monitor.flush(10)
    _go(training, 20)
    training.monitor.close()
    assert differences(unwatched, training) == []
    history = holter.open_run(tmp_path / "run").history
    assert set(range(10)) | set(range(40, STEPS)) <= set(history.steps.tolist())
    assert history.scalar("dropped")[1][-1] == dropped
    assert _warnings(caplog) == 1


def test_a_file_size_limit_cuts_a_write_short_and_nothing_is_torn(tmp_path: Path, unwatched: Training) -> None:
    """P13: RLIMIT_FSIZE lets a part of a write through and raises nothing."""
    training = _start(tmp_path / "run")
    _go(training, 10)
    assert training.monitor.flush(10)
    size = (tmp_path / "run" / "rank-0.journal").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        _go(training, 20)
        assert not training.monitor.flush(0.2)
        stored = holter.open_run(tmp_path / "run")
        assert stored.history.steps.tolist() == list(range(10)) and stored.unreadable_bytes == 0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _go(training, 30)
    training.monitor.close()
    assert differences(unwatched, training) == []
    assert holter.open_run(tmp_path / "run").history.steps.tolist() == list(range(STEPS))


def test_an_unchecked_short_write_loses_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P13, planted fault: the result of write() ignored, as a buffered writer might."""

    def unchecked(self: Journal, data: bytes) -> None:
        os.write(self._file, data)
        self._end = os.fstat(self._file).st_size

    monkeypatch.setattr(Journal, "_write", unchecked)
    training = _start(tmp_path / "run")
    _go(training, 10)
    training.monitor.flush(10)
    size = (tmp_path / "run" / "rank-0.journal").stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))
    try:
        _go(training, 1)
        training.monitor.flush(0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _go(training, 5)
    training.monitor.close()
    stored = holter.open_run(tmp_path / "run")
    assert stored.history.steps.tolist() != list(range(16)) and stored.unreadable_bytes


def test_a_directory_deleted_under_a_run_is_made_anew(
    tmp_path: Path, unwatched: Training, caplog: pytest.LogCaptureFixture
) -> None:
    """P13: what comes after the deletion is recorded; a file without a name would take it all in silence."""
    training = _start(tmp_path / "run")
    _go(training, 30)
    assert training.monitor.flush(10)
    shutil.rmtree(tmp_path / "run")
    _go(training, 30)
    training.monitor.close()
    assert differences(unwatched, training) == []
    stored = holter.open_run(tmp_path / "run")
    assert stored.history.steps.tolist() == list(range(30, STEPS))
    assert stored.info["model"] == "Sequential" and stored.state == "finished"
    assert _warnings(caplog) == 1


def test_a_read_only_file_system_is_refused_before_training(tmp_path: Path) -> None:
    """P13, bad input: a clear error that names the way out."""
    with _tmpfs(tmp_path / "disk") as disk:
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        training = make("mlp")
        with pytest.raises(ValueError, match=r"cannot write .* Read-only file system.*run="):
            holter.watch(training.model, training.optimizer, run=disk / "run")


@pytest.mark.parametrize("place", ["a file", "below a file", "no name"])
def test_a_directory_that_cannot_be_written_is_refused_before_training(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    path: Any = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "run", "no name": "x" * 300}[place]
    training = make("mlp")
    with pytest.raises(ValueError, match=r"cannot write the run to .*run=False"):
        holter.watch(training.model, training.optimizer, run=path)
