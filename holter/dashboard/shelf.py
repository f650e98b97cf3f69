"""The runs under a directory: which there are, and what their ends say. One damaged run never hides another.

Names that come from outside are looked up among these; none is ever joined to a path.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from holter.glance import MOST_INFO, Glance, glance
from holter.journal_parts import read_beginning
from holter.record import Record
from holter.run import STALE_SECONDS, Run
from holter.words import printable

_FRESH = 0.4  # seconds for which a list is not made again
_PATIENCE = 3.0  # seconds that a list waits for runs that are read
_READERS = 4  # threads that read them
_SLOW = "it takes long to read"
_FIRST_FRAMES = 32  # of a journal in which its first records stand: a table of layers for each role before them
_DEEPEST = 3  # directories below the root
_MOST_DIRECTORIES = 20_000
_MOST_NAMES = 500_000  # of layers that are kept in mind for the search
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_ERROR = "[Errno"  # how the words of an OSError begin
_GONE = (errno.ENOENT, errno.ENOTDIR)
_PARTS = re.compile(r"run\.json|rank-\d+(\.\d+)?\.journal")

Signature = tuple[tuple[str, int, int], ...]  # of each file of a run its name, size and time of change


@dataclass(frozen=True)
class Listed:
    """A run as the list has it. `id` is its name where that can stand in an address as it is.

    `blocked` says why it cannot be looked at just now; the rest is then as it was.
    """

    id: str
    name: str
    path: Path
    glance: Glance
    signature: Signature
    blocked: str = ""

    @property
    def extent(self) -> tuple[tuple[str, int], ...]:
        """What was written, without the times: a sign of life changes nothing."""
        return tuple((name, size) for name, size, _ in self.signature)


def id_of(name: str) -> str:
    """
    >>> id_of("2026-11-15_09-30-12-heron"), id_of("a b")
    ('2026-11-15_09-30-12-heron', '~c8687a08aa5d6ed2')
    """
    return name if _PLAIN.fullmatch(name) else f"~{hashlib.sha256(os.fsencode(name)).hexdigest()[:16]}"


class Shelf:
    """Safe for several threads. No lock is held while a run is read: who asks for another does not wait for that."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self._looking = threading.Lock()  # for the list: one looks, the others wait for what it saw
        self._walking = threading.Lock()  # which runs there are is found out by one, too
        self._lock = threading.Lock()  # what is known; held for moments
        self._found: dict[str, tuple[_Found, int]] = {}
        self._walked_at = self._looked_at = float("-inf")
        self._runs: dict[str, Listed] = {}
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="holter-glance")
        self._reading: dict[str, Future[Listed]] = {}
        self._layers: dict[str, tuple[Signature, tuple[str, ...]]] = {}
        self._tables: dict[tuple[str, ...], tuple[str, ...]] = {}  # runs of one model share one

    def runs(self) -> dict[str, Listed]:
        """By id, the newest first. A run that takes long to read is listed as it was, until that is done."""
        with self._looking:
            if time.monotonic() - self._looked_at > _FRESH:
                self._look()
                self._looked_at = time.monotonic()
            return self._runs

    @property
    def latest(self) -> dict[str, Listed]:
        """As they were when somebody last asked."""
        return self._runs

    def find(self, asked: str) -> Listed | None:
        """By id. A new run is found within moments: names that nobody has must not make anyone look at the disk."""
        known = self._runs.get(asked)
        if known is not None:
            return known
        found, depth = self._walk().get(asked, (None, 0))
        if found is None or not _may_be_listed(found, depth):
            return None
        read = _read(found)
        with self._lock:
            if asked not in self._runs:
                self._runs = {asked: read, **self._runs}
        return read

    def look_again(self, listed: Listed) -> Listed:
        """How this one is now."""
        found = _look_at(listed.path, self.root).run
        now = _emptied(listed) if found is None else _as_it_was(found, listed) or _read(found)
        if now is not listed:
            with self._lock:
                if listed.id in self._runs:
                    self._runs[listed.id] = now
        return now

    def layers(self, listed: Listed) -> tuple[str, ...]:
        """The names of its layers: those of run.json, and those that the first records have."""
        kept = self._layers.get(listed.id)
        if kept is not None and kept[0] == listed.signature:
            return kept[1]
        names = _layers_of(listed)
        with self._lock:
            names = self._tables.setdefault(names, names)
            self._layers[listed.id] = listed.signature, names
            if sum(map(len, self._tables)) > _MOST_NAMES:
                self._tables, self._layers = {}, {}
        return names

    def _walk(self) -> dict[str, tuple[_Found, int]]:
        """What there is by now, by id, each with how deep it lies. None of it is read."""
        with self._walking:
            if time.monotonic() - self._walked_at > _FRESH:
                self._found = {id_of(found.name): (found, depth) for found, depth in _walk(self.root)}
                self._walked_at = time.monotonic()
            return self._found

    def _look(self) -> None:
        before, within = self._runs, _by_directory(self._runs.values())
        listed: list[Listed] = []
        changed: dict[str, _Found] = {}
        for run, (found, depth) in self._walk().items():
            kept = [_blocked(one, found.blocked) for one in within.get(found.path, ())] if found.blocked else []
            same = _as_it_was(found, before[run]) if run in before else None
            if kept:
                listed += kept
            elif same is not None:
                listed.append(same)
            elif _may_be_listed(found, depth):
                changed[run] = found
        listed += self._read_all(changed, before)
        listed.sort(key=lambda one: one.glance.created or 0.0, reverse=True)
        with self._lock:
            self._runs = {one.id: one for one in listed}

    def _read_all(self, changed: Mapping[str, _Found], before: Mapping[str, Listed]) -> Iterator[Listed]:
        """These runs, read now. One that takes long is as it was before, and waited for once only."""
        fresh = {run: self._readers.submit(_read, found) for run, found in changed.items() if run not in self._reading}
        self._reading.update(fresh)
        wait(fresh.values(), timeout=_PATIENCE)
        for run, found in changed.items():
            yield self._reading[run].result() if self._reading[run].done() else _being_read(found, before.get(run))
        self._reading = {run: reading for run, reading in self._reading.items() if not reading.done()}


@dataclass(frozen=True)
class _Found:
    """`trouble` is for good, `blocked` may be over the next time."""

    name: str
    path: Path
    signature: Signature = ()
    trouble: str = ""
    blocked: str = ""


@dataclass(frozen=True)
class _Seen:
    """A directory: the run that it is, or else the directories in it."""

    run: _Found | None = None
    directories: tuple[Path, ...] = ()


def _by_directory(runs: Iterable[Listed]) -> dict[Path, list[Listed]]:
    """Those that each directory holds or is: a search for every directory that cannot be read would take too long.

    A mark that a directory could not be read is no run.
    """
    found: dict[Path, list[Listed]] = {}
    for run in runs:
        for path in (run.path, *run.path.parents) if run.signature else ():
            found.setdefault(path, []).append(run)
    return found


def _may_be_listed(found: _Found, depth: int) -> bool:
    """Deeper, nothing says of what cannot be looked into that it is a run."""
    return depth <= 1 or not (found.trouble or found.blocked)


def _as_it_was(found: _Found, before: Listed) -> Listed | None:
    """None where it has to be read again."""
    if found.blocked:
        return _blocked(before, found.blocked)
    return before if before.signature == found.signature and not _is_outdated(before) else None


def _read(found: _Found) -> Listed:
    return Listed(id_of(found.name), printable(found.name), found.path, _glance(found), found.signature)


def _being_read(found: _Found, before: Listed | None) -> Listed:
    if before is not None:
        return _blocked(before, _SLOW)
    unknown = Glance(found.path, state="unknown")
    return Listed(id_of(found.name), printable(found.name), found.path, unknown, found.signature, _SLOW)


def _emptied(listed: Listed) -> Listed:
    return replace(listed, glance=Glance(listed.path, trouble="its files are gone"), signature=(), blocked="")


def _blocked(listed: Listed, why: str) -> Listed:
    return listed if listed.blocked == why else replace(listed, blocked=why)


def _is_outdated(listed: Listed) -> bool:
    """Whether it may be another although its files are as they were: it could not be read, which may be over, or has
    given no sign of life for so long that it is not running any more."""
    if listed.blocked or listed.glance.trouble.startswith(_ERROR):
        return True
    newest = max((changed for _, _, changed in listed.signature), default=0)
    return listed.glance.state == "running" and time.time() - newest / 1e9 >= STALE_SECONDS


def _glance(found: _Found) -> Glance:
    if found.trouble or found.blocked:
        return Glance(found.path, trouble=found.trouble or found.blocked)
    try:
        return glance(Run(found.path))
    except Exception as error:  # whatever is wrong with this one, the others are listed
        return Glance(found.path, trouble=f"{type(error).__name__}: {error}")


def _walk(root: Path) -> Iterator[tuple[_Found, int]]:
    """The runs at or below the root, each with how deep it lies. What is inside of a run is its own."""
    count = 0
    waiting = [(root, 0)]
    while waiting and count < _MOST_DIRECTORIES:
        directory, depth = waiting.pop()
        count += 1
        seen = _look_at(directory, root)
        if seen.run is not None:
            yield seen.run, depth
        elif depth < _DEEPEST:
            waiting += [(path, depth + 1) for path in seen.directories]


def _look_at(directory: Path, root: Path) -> _Seen:
    name = directory.relative_to(root).as_posix() if directory != root else root.name
    try:
        if directory.is_symlink() and not _is_inside(directory, root):
            trouble = "a link that leads out of the directory that is served: not followed"
            return _Seen(_Found(name, directory, trouble=trouble))
        with os.scandir(directory) as found:
            entries = list(found)
        parts = [entry for entry in entries if _PARTS.fullmatch(entry.name)]
        if any(part.is_symlink() and not _is_inside(Path(part.path), root) for part in parts):
            trouble = "its files are links that lead out of the directory that is served"
            return _Seen(_Found(name, directory, trouble=trouble))
        stats = sorted((part.name, part.stat()) for part in parts if part.is_file())
    except OSError as error:
        why = error.strerror or type(error).__name__
        if error.errno in _GONE:
            return _Seen(_Found(name, directory, trouble=f"it is gone ({why})"))
        return _Seen(_Found(name, directory, blocked=f"cannot be read just now ({why})"))
    signature = tuple((part, stat.st_size, stat.st_mtime_ns) for part, stat in stats)
    if signature:
        return _Seen(_Found(name, directory, signature))
    return _Seen(directories=tuple(Path(one.path) for one in entries if _is_directory(one)))


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir() and not entry.name.startswith(".")
    except OSError:  # a link to itself: it must not hide the others
        return False


def _is_inside(path: Path, root: Path) -> bool:
    try:
        return Path(os.path.realpath(path)).is_relative_to(root)
    except (OSError, ValueError):
        return False


def _layers_of(listed: Listed) -> tuple[str, ...]:
    if not listed.signature:
        return ()
    run = Run(listed.path)
    run.most_info = MOST_INFO  # a larger one holds the GIL for seconds: the first records have the names, too
    names = [layer.get("name") for layer in run.layers if isinstance(layer, dict)]
    found = dict.fromkeys(name for name in names if isinstance(name, str))
    try:
        for journal in run.own_journals[:1]:
            for entry in islice(read_beginning(journal, _FIRST_FRAMES), 3):
                if isinstance(entry, Record):
                    found.update(dict.fromkeys(name for rows in entry.rows.values() for name in rows.layers))
    except (OSError, ValueError):  # what is wrong with the run stands in the list
        return tuple(found)
    return tuple(found)
