"""Writes that fail: the file ends after the last whole entry, and the same entry can be tried again."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holter.journal import Journal, JournalReader
from holter.record import Ending
from tests.test_codec import fingerprints
from tests.test_journal import read, some_entries


class Disk:
    """Stands in for os.write: takes a part of what it is given, or nothing, as often as it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failures: list[float | int] = []  # a share of the bytes to take, or an errno
        self._write = os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, file: int, data: bytes) -> int:
        if not self.failures:
            return self._write(file, data)
        failure = self.failures.pop(0)
        if isinstance(failure, int):
            raise OSError(failure, os.strerror(failure))
        return self._write(file, data[: int(len(data) * failure)])


def keeps_its_promise(journal_class: type[Journal], path: Path, disk: Disk) -> bool:
    """Every entry is tried until it does not raise; then the file must hold each of them, once, in order."""
    journal, reader, seen = journal_class(path), JournalReader(path), []
    for place, entry in enumerate(some_entries(12)):
        size = path.stat().st_size
        disk.failures = [[], [0.5], [0.0, 0.99], [errno.ENOSPC], [0.3, errno.EIO, 0.7]][place % 5]
        for _ in range(5):
            try:
                journal.append(entry)
                break
            except OSError:
                assert path.stat().st_size == size  # undone at once: a reader need not wait for the next write
                seen += reader.read()
    seen += reader.read()
    journal.close()
    truth = fingerprints(some_entries(12))
    return fingerprints(read(path)) == truth and fingerprints(seen) == truth


class Unchecked(Journal):
    """The planted twin: what os.write returns is not looked at."""

    def _write(self, data: bytes) -> None:
        os.write(self._file, data)


def test_a_write_cut_short_is_undone_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P13: a full disk takes a part and raises nothing; ENOSPC and EIO; the same entry goes through later."""
    disk = Disk(monkeypatch)
    assert keeps_its_promise(Journal, tmp_path / "good", disk)
    assert not keeps_its_promise(Unchecked, tmp_path / "bad", disk)


LIMITED = """
import resource, signal, sys
from pathlib import Path
from tests.test_journal import Journal, some_entries
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal, failed = Journal(Path(sys.argv[1])), 0
for place, entry in enumerate(some_entries(12)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000 + 100 * place, resource.RLIM_INFINITY))
    try:
        journal.append(entry)
    except OSError:
        failed += 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        journal.append(entry)
print(failed)
"""


def test_a_file_that_may_not_grow_keeps_what_it_has_and_goes_on_later(tmp_path: Path) -> None:
    """P13: the kernel's own short write, at the limit of a file's size; the same entries once the limit is lifted."""
    command = [sys.executable, "-c", LIMITED, str(tmp_path / "rank-0.journal")]
    failed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent.parent)
    assert int(failed.stdout) > 3
    assert fingerprints(read(tmp_path / "rank-0.journal")) == fingerprints(some_entries(12))


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    """P18: a second journal at the same place is refused, and the first is as it was."""
    first = Journal(tmp_path / "rank-0.journal")
    first.append(Ending(1.0, "finished"))
    with pytest.raises(FileExistsError):
        Journal(tmp_path / "rank-0.journal")
    first.close()
    assert read(tmp_path / "rank-0.journal") == [Ending(1.0, "finished")]


def test_a_journal_that_was_deleted_says_so(tmp_path: Path) -> None:
    """P13: writing on into a file that nobody can open any more would lose every step without a word."""
    journal = Journal(tmp_path / "rank-0.journal")
    journal.append(Ending(1.0, "finished"))
    (tmp_path / "rank-0.journal").unlink()
    with pytest.raises(FileNotFoundError, match="deleted"):
        journal.append(Ending(2.0, "finished"))
    journal.close()


def test_a_journal_without_room_for_its_header_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P13: so that the same place can be tried again."""
    disk = Disk(monkeypatch)
    disk.failures = [0.5]
    with pytest.raises(OSError, match="only a part was written"):
        Journal(tmp_path / "rank-0.journal")
    assert list(tmp_path.iterdir()) == []
    Journal(tmp_path / "rank-0.journal").close()


def test_an_undoing_that_fails_too_is_made_up_for_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P13: a disk that neither takes the entry nor its undoing: readers stop before it, the next write clears it."""
    entries, path = some_entries(4), tmp_path / "rank-0.journal"
    journal, disk, real = Journal(path), Disk(monkeypatch), os.ftruncate
    journal.append(entries[0])

    def fail(file: int, size: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "ftruncate", fail)
    for _ in range(2):  # the second try cannot even clear the way
        disk.failures = [0.6]
        with pytest.raises(OSError):
            journal.append(entries[1])
        assert fingerprints(read(path)) == fingerprints(entries[:1])
    monkeypatch.setattr(os, "ftruncate", real)
    disk.failures = []
    for entry in entries[1:]:
        journal.append(entry)
    journal.close()
    assert fingerprints(read(path)) == fingerprints(entries)
