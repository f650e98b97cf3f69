"""A run: a directory with what is being trained (run.json) and a journal for every process and segment.

    runs/2026-11-15_09-30-12-heron/
      run.json           layers, shapes, versions; no environment, no command line
      rank-0.journal     the first segment of process 0
      rank-0.1.journal   its second, after a resume

No lock and no shared index: one writer a file, so damage to one run or file never hides another.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

from holter.codec import is_record, read_json
from holter.damage import Damage
from holter.diagnosis.finding import Finding, from_problem
from holter.history import History
from holter.integrity import Integrity, gaps_in, integrity_of
from holter.journal import JournalReader, read_backwards
from holter.record import FORMAT, Ending, Problem, Record

STALE_SECONDS = 30.0  # a live run touches its journal every few seconds
_FAR_FUTURE = 1e11  # seconds since 1970; what lies beyond is damage
_INFO = "run.json"
_MOST_INFO = 32 << 20  # bytes; that of 10,000 layers has two million. Of a larger one the ends are read
_INFO_END = 64 << 10  # bytes
# Problems that are kept of a run. A monitor writes 100 different ones at most (problems.MOST), so only a journal that
# something else wrote has more. Each is a finding, which takes 30 times its bytes in the file.
_MOST_PROBLEMS = 1000
_JOURNAL = re.compile(r"rank-(\d+)(?:\.(\d+))?\.journal")
_WORDS = (
    *("heron", "otter", "maple", "cedar", "comet", "amber", "delta", "ember", "falcon", "garnet", "harbor"),
    *("indigo", "juniper", "koala", "lotus", "meadow", "nectar", "opal", "pebble", "quartz", "raven", "saffron"),
    *("thistle", "umber", "violet", "willow", "yarrow", "zephyr", "bramble", "coral", "dune", "fern"),
)


def create_directory(run: str | os.PathLike[str] | None) -> Path:
    """The directory of a new or resumed run; `runs/<date-time-word>` where none is named."""
    if run is not None:
        directory = Path(run)
        directory.mkdir(parents=True, exist_ok=True)
        return directory
    while True:
        # Not the random module's shared state: it belongs to the training.
        word = random.SystemRandom().choice(_WORDS)
        directory = Path("runs") / f"{time.strftime('%Y-%m-%d_%H-%M-%S')}-{word}"
        directory.parent.mkdir(exist_ok=True)
        try:
            directory.mkdir()
        except FileExistsError:
            continue
        return directory


def write_info(directory: Path, info: Mapping[str, Any]) -> None:
    """Writes run.json whole or not at all. A resumed run keeps the time of its first start."""
    path = directory / _INFO
    first = {name: value for name, value in _read_info(path).items() if name == "created"}
    info = {"format": FORMAT, **info, **first}
    draft = path.with_name(f"{_INFO}.{secrets.token_hex(8)}")  # two machines may have the same process number
    try:
        draft.write_text(json.dumps(info, indent=1) + "\n")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def _read_info(path: Path, most: int = _MOST_INFO) -> Mapping[str, Any]:
    try:
        # A pipe in its place must not be waited for.
        with open(path, "rb", buffering=0, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            text = file.read(found.st_size) if found.st_size <= most else _ends_of(file)
            info = read_json(text.decode()) if stat.S_ISREG(found.st_mode) else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return info if isinstance(info, dict) else {}


def _ends_of(file: FileIO) -> bytes:
    """What run.json says before its layers, and of the versions, which come last."""
    head, layers, _ = file.read(_INFO_END).partition(b'"layers"')
    file.seek(-_INFO_END, os.SEEK_END)
    _, versions, tail = file.read(_INFO_END).rpartition(b'"versions"')
    return head.rstrip().rstrip(b",") + (b"," + versions + tail if versions else b"}") if layers else b""


def journal_path(directory: Path, rank: int, segment: int) -> Path:
    return directory / (f"rank-{rank}.journal" if segment == 0 else f"rank-{rank}.{segment}.journal")


def next_segment(directory: Path, rank: int) -> int:
    """One more than any segment that this rank has a journal of."""
    taken = [found.segment for found in _journals(directory) if found.rank == rank]
    return max(taken, default=-1) + 1


_LAST = 64  # entries; tables of layers may come after the records that they are for


def has_records(directory: Path, rank: int) -> bool:
    """Whether this rank has taken steps there, by the last entries of its journals."""
    lasts = (itertools.islice(read_backwards(one.path), _LAST) for one in _journals(directory) if one.rank == rank)
    try:
        return any(is_record(blob) for blobs in lasts for blob in blobs)
    except (OSError, ValueError):  # what cannot be read is not known
        return False


@dataclass(frozen=True)
class _JournalFile:
    rank: int
    segment: int
    path: Path


def _journals(directory: Path) -> list[_JournalFile]:
    found = []
    for path in directory.iterdir():
        if (match := _JOURNAL.fullmatch(path.name)) and path.is_file():
            found.append(_JournalFile(int(match[1]), int(match[2] or 0), path))
    return sorted(found, key=lambda file: (file.rank, file.segment))


def is_run(directory: Path) -> bool:
    return directory.is_dir() and ((directory / _INFO).is_file() or bool(_journals(directory)))


def open_run(path: str | os.PathLike[str]) -> Run:
    """A stored or live run, by its directory or by its name under runs/.

    ValueError where there is none, or where a newer Holter wrote it.
    """
    run = Run(find_run(path))
    run.refresh()
    return run


def find_run(path: str | os.PathLike[str]) -> Path:
    """The directory of a run, by its own name or by that under runs/. ValueError where there is none."""
    directory = Path(path)
    if not directory.exists() and len(directory.parts) == 1 and is_run(Path("runs") / directory):
        directory = Path("runs") / directory  # a name as `holter runs` lists it
    if not directory.exists():
        raise ValueError(f"no run at {directory}: there is no such directory (`holter runs` lists the runs)")
    if not is_run(directory):
        raise ValueError(
            f"{directory} is not a run: it has neither {_INFO} nor a journal. "
            "Name a directory that holter.watch() made, such as runs/<name> (`holter runs` lists them)"
        )
    return directory


def diagnose(run: Run | str | os.PathLike[str]) -> tuple[Finding, ...]:
    """What is wrong with a run, or with the run in a directory; as `run.findings`."""
    return (run if isinstance(run, Run) else open_run(run)).findings


def list_runs(directory: str | os.PathLike[str] = "runs") -> list[Run]:
    """The runs right under a directory, newest first; a damaged one is listed like any other."""
    root = Path(directory)
    if not root.is_dir():
        return []
    runs = [Run(path) for path in root.iterdir() if _may_be_run(path)]
    return sorted(runs, key=lambda run: run.created, reverse=True)


def _may_be_run(path: Path) -> bool:
    try:
        return is_run(path)
    except OSError:  # one that may not be looked into does not hide the others
        return False


class _Part:
    """What was read of one journal; forgotten when the file turns out to be another one."""

    def __init__(self, path: Path) -> None:
        self.reader = JournalReader(path)
        self._forget()

    def _forget(self) -> None:
        self.starts = self.reader.starts
        self.records: list[Record] = []
        self.problems: list[Problem] = []
        self.more_problems = 0  # beyond those that are kept
        self.ending: Ending | None = None

    def read_on(self) -> list[Record]:
        """Reads what is new and returns the records among it."""
        before = len(self.records)
        for entry in self.reader.read():
            if self.starts != self.reader.starts:
                self._forget()
                before = 0
            if isinstance(entry, Record):
                self.records.append(entry)
            elif isinstance(entry, Ending):
                self.ending = entry
            elif len(self.problems) < _MOST_PROBLEMS:
                self.problems.append(entry)
            else:
                self.more_problems += 1
        if self.starts != self.reader.starts:  # nothing in the other file can be read
            self._forget()
        return self.records[before:]


class Run:
    """A run directory, read. `refresh()` reads on where the files have grown. Of a run.json of more than `most_info`
    bytes all but the layers is read: while it is parsed, no other thread runs."""

    most_info = _MOST_INFO

    def __init__(self, path: Path, rank: int | None = None) -> None:
        self.path = path
        self._asked_rank = rank
        self._parts: dict[Path, _Part] = {}
        self._history = History()
        self._extent: dict[Path, tuple[int, int]] = {}  # of the parts when the history was made
        self._read = False

    def anew(self) -> Run:
        """Return the same run, of which nothing was read yet."""
        run = Run(self.path, self._asked_rank)
        run.most_info = self.most_info
        return run

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self.state}, {len(self.history.latest())} steps>"

    def _repr_html_(self) -> str:
        from holter.notebook import run_html  # only notebooks need it

        return run_html(self)

    @property
    def name(self) -> str:
        return self.path.name

    @cached_property
    def info(self) -> Mapping[str, Any]:
        """What run.json says of the training; empty where it is missing or damaged."""
        return _read_info(self.path / _INFO, self.most_info)

    @property
    def created(self) -> float:
        """Seconds since 1970."""
        created = self.info.get("created")
        if isinstance(created, (int, float)) and 0 <= created < _FAR_FUTURE:
            return float(created)
        return self.path.stat().st_mtime

    @property
    def journals(self) -> list[tuple[int, Path]]:
        """Rank and path of every journal, by rank and segment: for reading a run piece by piece."""
        return [(file.rank, file.path) for file in _journals(self.path)]

    @property
    def layers(self) -> tuple[Mapping[str, Any], ...]:
        """The model's parameters as they were at the start: name, shape, dtype, part, whether it is trained and
        selected, and what other names a tied one has."""
        layers = self.info.get("layers")
        return tuple(layer for layer in layers if isinstance(layer, dict)) if isinstance(layers, list) else ()

    @property
    def depth(self) -> Mapping[str, int]:
        """The place of each module and parameter in the order in which they run; empty where it is not known."""
        return self.history.depth

    @property
    def history(self) -> History:
        """Everything that was recorded, in the order of writing: the lowest rank's, where there are several."""
        self._ensure_read()
        extent = {path: (part.starts, len(part.records)) for path, part in self._parts.items()}
        if extent != self._extent:
            self._extent, self._history = extent, History(self.records)
        return self._history

    @property
    def records(self) -> list[Record]:
        self._ensure_read()
        return [record for part in self._parts.values() for record in part.records]

    @property
    def problems(self) -> list[Problem]:
        """What failed of Holter's own. If there are too many to show, the last one says how many more there are."""
        self._ensure_read()
        found = [problem for part in self._parts.values() for problem in part.problems]
        left_out = len(found[_MOST_PROBLEMS:]) + sum(part.more_problems for part in self._parts.values())
        if not left_out:
            return found
        where, what = f"show {left_out:,} more of its problems", f"a run shows the first {_MOST_PROBLEMS:,}"
        return [*found[:_MOST_PROBLEMS], replace(found[_MOST_PROBLEMS - 1], where=where, what=what)]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong with the training (of a resumed one with the line that survived), and what failed of Holter's
        own or was damaged since."""
        from holter.diagnosis.doctor import diagnose  # to list a thousand runs it is not needed

        return (
            *diagnose(self.history.latest().records, self.info),
            *map(from_problem, self.problems),
            *self.integrity.findings,
        )

    @property
    def state(self) -> str:
        """running, finished, failed, stopped (by a finding), interrupted, ended (nobody said how), crashed (no sign of
        life), empty (no journal) or unreadable (nothing in them can be read)."""
        ending, newest = self.ending, self._newest_journal()
        if newest is None:
            return "empty"
        if ending is not None:
            return ending.state
        if integrity_of(self._readers).is_unreadable:
            return "unreadable"
        return "running" if time.time() - newest.stat().st_mtime < STALE_SECONDS else "crashed"

    @property
    def ending(self) -> Ending | None:
        self._ensure_read()
        newest = self._newest_journal()
        part = self._parts.get(newest) if newest is not None else None
        return part.ending if part is not None else None

    @property
    def unreadable_bytes(self) -> int:
        """Bytes of journals that no reader can use: damaged, or at the end, torn by a crash."""
        self._ensure_read()
        return sum(part.reader.unreadable_bytes for part in self._parts.values())

    @property
    def damage(self) -> Damage:
        """Frames of the journals that are damaged, missing, repeated or moved. A torn end is not among them."""
        self._ensure_read()
        return sum((part.reader.damage for part in self._parts.values()), Damage())

    @property
    def integrity(self) -> Integrity:
        """How much of the journals can be read: what is damaged, which steps are missing, how serious that is."""
        self._ensure_read()
        steps = self.history.latest().steps.tolist()
        return integrity_of(self._readers, len(steps), gaps_in(steps))

    @property
    def _readers(self) -> list[JournalReader]:
        return [part.reader for part in self._parts.values()]

    def refresh(self) -> list[Record]:
        """Reads what was appended since the last time and returns the new records."""
        self._parts = {path: self._parts.get(path) or _Part(path) for path in self.own_journals}
        self._read = True
        return [record for part in self._parts.values() for record in part.read_on()]

    def tail(self, poll_seconds: float = 0.5) -> Iterator[Record]:
        """Records as they come, from the first on, until the run is over."""
        seen: dict[tuple[Path, int], int] = {}
        while True:
            self.refresh()
            for path, part in self._parts.items():
                key = path, part.starts
                fresh = part.records[seen.get(key, 0) :]
                seen[key] = seen.get(key, 0) + len(fresh)
                yield from fresh
            if self.state != "running":
                return
            time.sleep(poll_seconds)

    @property
    def own_journals(self) -> list[Path]:
        """The journals of the rank that is read, segment by segment."""
        files = _journals(self.path)
        rank = min((file.rank for file in files), default=0) if self._asked_rank is None else self._asked_rank
        return [file.path for file in files if file.rank == rank]

    def _newest_journal(self) -> Path | None:
        mine = self.own_journals
        return mine[-1] if mine else None

    def _ensure_read(self) -> None:
        if not self._read:
            self.refresh()
