"""P13: a failing disk does not touch the training, nor what was written before; recording resumes when it can."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holter
from holter.journal import Journal
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
    assert holter.open_run(tmp_path / "run").history.steps.tolist() == list(range(10))


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
