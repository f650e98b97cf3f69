"""The journals of a run as they grow: the line of training that survived, each entry once.

Where a resume repeats steps, or a file was replaced, everything is read again: what a reader knows then is what it
would know of the stored run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

from holter.history import ends_of_segments
from holter.integrity import Gaps, Integrity, integrity_of
from holter.journal import JournalReader
from holter.record import Ending, Entry, Record
from holter.run import STALE_SECONDS, Run, is_run


class Tail:
    """Of the lowest rank, in a directory that may not be there yet. `begin` is called whenever all that was read so far
    is to be forgotten, and once at the beginning."""

    def __init__(self, path: Path, begin: Callable[[], None]) -> None:
        self.path, self._begin = path, begin
        self.run = Run(path)
        self._start_over()

    def _start_over(self) -> None:
        self.run = self.run.anew()
        self._info_state: object = None  # of run.json when it was last read
        self._readers: dict[Path, JournalReader] = {}
        self._opened: set[Path] = set()  # those of them that have been read from
        self._first: dict[Path, int] = {}  # steps; of the journals that have a record
        self._seekers: dict[Path, JournalReader] = {}  # of the journals in which none was found yet
        self._taken: dict[Path, int] = {}  # the last step that was taken from each
        self._last_taken = -1  # from any
        self._starts: dict[Path, int] = {}  # how often each had been read from its start when something was taken
        self._endings: dict[Path, Ending] = {}
        self._gaps = Gaps()
        self._begin()

    @property
    def is_there(self) -> bool:
        """Whether there is a journal."""
        return bool(self._readers)

    @property
    def ending(self) -> Ending | None:
        newest = self._newest()
        return self._endings.get(newest) if newest is not None else None

    @property
    def integrity(self) -> Integrity:
        """As `Run.integrity` has it, of what was read so far."""
        return integrity_of([self._readers[path] for path in self._opened], self._gaps.count, self._gaps.ranges)

    @property
    def bytes_unread(self) -> int:
        """What is still to be read, all of the journals that were not opened yet among it; or unreadable."""
        torn = sum(self._readers[path].unreadable_bytes for path in self._opened)
        return torn + sum(_size(path) for path in self.run.own_journals if path not in self._opened)

    @property
    def bytes_there(self) -> int:
        return sum(_size(path) for path in self.run.own_journals)

    def state(self, now: float) -> str:
        """As `Run.state` says it, and waiting for one that is not there. `now` in seconds since 1970."""
        if not is_run(self.path):
            return "waiting"
        newest = next(reversed(self.run.own_journals), None)
        if newest is None:
            return "empty"
        if (ending := self.ending) is not None:
            return ending.state
        if self.integrity.is_unreadable:
            return "unreadable"
        return "running" if now - _changed(newest) < STALE_SECONDS else "crashed"

    def read(self) -> Iterator[Entry]:
        """What is new. May be left at any entry, and goes on with the next."""
        while not (yield from self._read_once()):
            pass

    def _read_once(self) -> Generator[Entry, None, bool]:
        """Returns whether that is all: not where it began anew."""
        if not is_run(self.path):
            if self._readers:  # it was taken away
                self._start_over()
            return True
        self._look_for_journals()
        ends = self._ends()
        for path, reader in list(self._readers.items()):
            until = ends[path]
            for entry in reader.read():
                self._opened.add(path)
                if self._starts.setdefault(path, reader.starts) != reader.starts:  # another file took its place
                    self._start_over()
                    return False
                if self._counts(entry, path, until):
                    yield entry
            self._opened.add(path)
        return True

    def _counts(self, entry: Entry, path: Path, until: float) -> bool:
        if isinstance(entry, Ending):
            self._endings[path] = entry
        elif isinstance(entry, Record):
            self._endings.pop(path, None)
            if entry.step >= until or (entry.late and entry.step > self._last_taken):
                return False  # late for a step of a line that ended, where it was still written after the resume
            if not entry.late:
                self._gaps.put(entry.step)
                self._taken[path] = max(entry.step, self._taken.get(path, -1))
                self._last_taken = max(self._last_taken, entry.step)
        return True

    def _look_for_journals(self) -> None:
        paths = self.run.own_journals
        if not self._readers.keys() <= set(paths):
            self._start_over()
        if len(paths) > len(self._readers) or not self.run.info:
            self._read_info_again()
        for path in paths:
            self._readers.setdefault(path, JournalReader(path))
            if path not in self._first and path != paths[0]:  # the first succeeds none: nobody asks where it starts
                self._look_for_first(path)
        ends = self._ends()
        if any(taken >= ends[path] for path, taken in self._taken.items()):  # a resume, from before that
            self._start_over()
            self._look_for_journals()

    def _read_info_again(self) -> None:
        """Unless run.json is as it was: to parse a large one takes seconds, and one that says nothing goes on to."""
        state = _changed(self.path / "run.json"), _size(self.path / "run.json")
        if state != self._info_state:
            self.run, self._info_state = self.run.anew(), state

    def _look_for_first(self, path: Path) -> None:
        """Goes on where the last look ended: else a journal without a record would be read again at every look."""
        seeker = self._seekers.pop(path, None) or JournalReader(path)
        for entry in seeker.read():
            if isinstance(entry, Record) and not entry.late:
                self._first[path] = entry.step
                return
        self._seekers[path] = seeker

    def _ends(self) -> dict[Path, float]:
        """The step before which each journal counts: each is a segment of its own."""
        paths = list(self._readers)
        ends = ends_of_segments({at: self._first.get(path, math.inf) for at, path in enumerate(paths)})
        return {path: ends[at] for at, path in enumerate(paths)}

    def _newest(self) -> Path | None:
        return next(reversed(self._readers), None)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _changed(path: Path) -> float:
    """When, in seconds since 1970."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
