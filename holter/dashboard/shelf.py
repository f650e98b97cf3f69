"""The runs under a directory: which there are, and what their ends say. One damaged run never hides another.

Names that come from outside are looked up among these; none is ever joined to a path.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from holter.glance import Glance, glance
from holter.journal import JournalReader
from holter.record import Record
from holter.run import STALE_SECONDS, Run
from holter.words import printable

_FRESH = 0.4  # seconds for which a list is not made again
_DEEPEST = 3  # directories below the root
_MOST_DIRECTORIES = 20_000
_MOST_NAMES = 500_000  # of layers that are kept in mind for the search
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")
_PARTS = re.compile(r"run\.json|rank-\d+(\.\d+)?\.journal")

Signature = tuple[tuple[str, int, int], ...]  # of each file of a run its name, size and time of change


@dataclass(frozen=True)
class Listed:
    """A run as the list has it. `id` is its name where that can stand in an address as it is."""

    id: str
    name: str
    path: Path
    glance: Glance
    signature: Signature

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
    """Safe for several threads: one looks, the others wait for what it saw."""

    def __init__(self, root: Path) -> None:
        self.root = Path(os.path.realpath(root))
        self._lock = threading.Lock()
        self._runs: dict[str, Listed] = {}
        self._looked_at = float("-inf")
        self.version = 0  # grows when anything changed
        self._layers: dict[str, tuple[Signature, tuple[str, ...]]] = {}
        self._tables: dict[tuple[str, ...], tuple[str, ...]] = {}  # runs of one model share one

    def runs(self) -> dict[str, Listed]:
        """By id, the newest first."""
        with self._lock:
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
        with self._lock:
            known = self._runs.get(asked)
            if known is not None:
                return known
        return self.runs().get(asked)

    def look_again(self, listed: Listed) -> Listed:
        """How this one is now."""
        found = _found(listed.path, self.root)
        now = self._listed(found, listed) if found is not None else listed
        if now is not listed:
            with self._lock:
                if listed.id in self._runs:
                    self._runs[listed.id] = now
                    self.version += 1
        return now

    def layers(self, listed: Listed) -> tuple[str, ...]:
        """The names of its layers: those of run.json, and those that the first records have."""
        kept = self._layers.get(listed.id)
        if kept is not None and kept[0][:1] == listed.signature[:1]:
            return kept[1]
        names = _layers_of(listed)
        with self._lock:
            names = self._tables.setdefault(names, names)
            self._layers[listed.id] = listed.signature, names
            if sum(map(len, self._tables)) > _MOST_NAMES:
                self._tables, self._layers = {}, {}
        return names

    def _look(self) -> None:
        before = self._runs
        listed = [self._listed(found, before.get(id_of(found.name))) for found in _walk(self.root)]
        listed.sort(key=lambda one: one.glance.created or 0.0, reverse=True)
        self._runs = {one.id: one for one in listed}
        if list(self._runs.values()) != list(before.values()):
            self.version += 1

    def _listed(self, found: _Found, before: Listed | None) -> Listed:
        if before is not None and before.signature == found.signature and not _grew_stale(before):
            return before
        return Listed(id_of(found.name), printable(found.name), found.path, _glance(found), found.signature)


@dataclass(frozen=True)
class _Found:
    name: str
    path: Path
    signature: Signature
    trouble: str = ""


def _grew_stale(listed: Listed) -> bool:
    """Whether a run has given no sign of life for so long that it is not running any more."""
    newest = max((changed for _, _, changed in listed.signature), default=0)
    return listed.glance.state == "running" and time.time() - newest / 1e9 >= STALE_SECONDS


def _glance(found: _Found) -> Glance:
    if found.trouble:
        return Glance(found.path, trouble=found.trouble)
    try:
        return glance(Run(found.path))
    except Exception as error:  # whatever is wrong with this one, the others are listed
        return Glance(found.path, trouble=f"{type(error).__name__}: {error}")


def _walk(root: Path) -> Iterator[_Found]:
    """The runs at or below the root. What is inside of a run is its own."""
    seen = 0
    waiting = [(root, 0)]
    while waiting and seen < _MOST_DIRECTORIES:
        directory, depth = waiting.pop()
        seen += 1
        found = _found(directory, root)
        if found is not None and found.trouble and depth > 1:
            continue  # nothing says that it is a run
        if found is not None:
            yield found
        elif depth < _DEEPEST:
            waiting += [(path, depth + 1) for path in _directories(directory)]


def _directories(directory: Path) -> list[Path]:
    try:
        with os.scandir(directory) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:
        return []


def _found(directory: Path, root: Path) -> _Found | None:
    """The run that a directory is; None where it is none."""
    name = directory.relative_to(root).as_posix() if directory != root else root.name
    if directory.is_symlink() and not _is_inside(directory, root):
        return _Found(name, directory, (), "a link that leads out of the directory that is served: not followed")
    try:
        with os.scandir(directory) as entries:
            parts = [entry for entry in entries if _PARTS.fullmatch(entry.name)]
        if any(part.is_symlink() and not _is_inside(Path(part.path), root) for part in parts):
            return _Found(name, directory, (), "its files are links that lead out of the directory that is served")
        stats = sorted((part.name, part.stat()) for part in parts if part.is_file())
    except OSError as error:
        return _Found(name, directory, (), error.strerror or type(error).__name__)
    signature = tuple((part, stat.st_size, stat.st_mtime_ns) for part, stat in stats)
    return _Found(name, directory, signature) if signature else None


def _is_inside(path: Path, root: Path) -> bool:
    try:
        return Path(os.path.realpath(path)).is_relative_to(root)
    except (OSError, ValueError):
        return False


def _layers_of(listed: Listed) -> tuple[str, ...]:
    if not listed.signature:
        return ()
    run = Run(listed.path)
    names = [layer.get("name") for layer in run.layers if isinstance(layer, dict)]
    found = dict.fromkeys(name for name in names if isinstance(name, str))
    try:
        for journal in run.own_journals[:1]:
            for entry in islice(JournalReader(journal).read(), 3):
                if isinstance(entry, Record):
                    found.update(dict.fromkeys(name for rows in entry.rows.values() for name in rows.layers))
    except (OSError, ValueError):  # what is wrong with the run stands in the list
        return tuple(found)
    return tuple(found)
