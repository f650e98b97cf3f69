"""A run at a glance: what a list of runs shows. Reads only the ends of journals, so a thousand runs are no work.

However large the files of a run are, a glance reads a bounded part of them: other runs wait for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from holter.codec import HEADER_LENGTH, is_table, read_words
from holter.frames import BEGIN, LENGTH, length_of
from holter.integrity import Integrity, integrity_of
from holter.journal import JournalReader, reserved_ending
from holter.journal_parts import read_end
from holter.record import Ending
from holter.run import STALE_SECONDS, Run, list_runs

_ENTRIES = 64  # how far back a loss is looked for
_SAID = ("record", "problem", "ending")  # kinds of entries
_MOST_BYTES = 512 << 20  # of journals that are looked through for damage: about two seconds
_END_BYTES = 32 << 20  # of the journals of a run that are looked through for its last entries: 0.1 s
_JOURNAL_BYTES = 1 << 20  # that any journal counts for: to open many takes time, too
_SMALL, _FEW = 1 << 20, 32  # bytes of journals, and journals, that are all read where their ends say nothing: 0.1 s
_MOST_WORDS = 4 << 20  # bytes of an entry's words, parsed in 0.1 s in which no other thread runs
_MOST_RESERVED = 64 << 10  # bytes; the room for an ending has a thousand
MOST_INFO = 4 << 20  # bytes of run.json: that of 20,000 layers, parsed in 0.1 s in which no other thread runs
_NOTHING: Mapping[str, Any] = {"kind": "nothing"}


@dataclass(frozen=True)
class Glance:
    """`trouble` says what kept all of it from being read; the rest is then what could be."""

    path: Path
    state: str = "unreadable"
    steps: int | None = None
    loss: float | None = None
    model: str | None = None
    parameters: int | None = None
    created: float | None = None
    size: int | None = None
    trouble: str = ""


def glance_at_runs(directory: str | os.PathLike[str]) -> list[Glance]:
    """The runs right under a directory, newest first; what is wrong with one stays with it."""
    return [glance(run) for run in list_runs(directory)]


def check_for_damage(glances: Sequence[Glance], most_bytes: int = _MOST_BYTES) -> tuple[list[Glance], int]:
    """Return the glances with what is damaged in their runs, and how many were left out.

    All of a journal has to be read for that: the newest runs come first, up to so many bytes in all.
    """
    found, left, left_out = [], most_bytes, 0
    for one in glances:
        if one.state != "unreadable" and one.size is not None:
            if one.size > left:
                left_out += 1
            else:
                left -= one.size
                one = _with_damage(one)
        found.append(one)
    return found, left_out


def _with_damage(seen: Glance) -> Glance:
    try:
        found = _surveyed(seen.path)
    except (OSError, ValueError) as error:
        return replace(seen, trouble=_joined(seen.trouble, str(error) or type(error).__name__))
    if found.is_unreadable:
        return replace(seen, state="unreadable", trouble=_joined(seen.trouble, found.sentence))
    return replace(seen, trouble=_joined(seen.trouble, found.words if found.severity else ""))


def _surveyed(path: Path) -> Integrity:
    readers = [JournalReader(journal) for journal in Run(path).own_journals]
    for reader in readers:
        reader.survey()
    return integrity_of(readers)


def glance(run: Run) -> Glance:
    seen: dict[str, Any] = {"path": run.path}
    try:
        for look in (_described, _sized, _recorded):
            found = look(run)
            trouble = _joined(seen.get("trouble", ""), found.get("trouble", ""))
            seen.update(found, trouble=trouble)
    except (OSError, ValueError, KeyError, TypeError) as error:
        seen["trouble"] = str(error) or type(error).__name__
    return Glance(**seen)


def _described(run: Run) -> dict[str, Any]:
    path = run.path / "run.json"
    if path.is_file() and path.stat().st_size > MOST_INFO:
        run = run.anew()
        run.most_info = MOST_INFO
    info = run.info
    model, parameters = info.get("model"), info.get("parameters")
    return {
        "created": run.created,
        "model": model if isinstance(model, str) else None,
        "parameters": parameters if isinstance(parameters, int) else None,
        "trouble": "" if info else "run.json is missing or damaged",
    }


def _sized(run: Run) -> dict[str, Any]:
    return {"size": sum(entry.stat().st_size for entry in os.scandir(run.path) if entry.is_file())}


def _recorded(run: Run) -> dict[str, Any]:
    """State, steps and loss, from the newest journals of the lowest rank."""
    journals = run.journals
    mine = [path for rank, path in journals if rank == journals[0][0]]
    if not mine:
        return {"state": "empty", "steps": 0}
    sizes = [path.stat().st_size for path in mine]
    newest = _newest_first(mine[-1], _END_BYTES)
    last = next(newest, _NOTHING)
    older = _older_entries(mine[:-1], sizes[:-1], _END_BYTES - max(sizes[-1], _JOURNAL_BYTES))
    words = islice(chain([last], newest, older), _ENTRIES)
    said = next((one for one in words if one["kind"] in _SAID), None)
    if said is None and len(mine) <= _FEW and sum(sizes) <= _SMALL:
        if run.state == "unreadable":
            return {"state": "unreadable", "trouble": run.integrity.sentence}
    elif said is None and last is _NOTHING:  # whether all is like that, the diagnosis says
        trouble = f"nothing can be read in the last {_END_BYTES >> 20} MiB of its journals"
        return {"state": _state(last, mine[-1])[0], "trouble": trouble}
    state, dropped = _state(last, mine[-1])
    lost = f"{dropped:,} records were lost as it was written" if dropped else ""
    return {"state": state, "trouble": lost, **_progress(chain([said or last], words))}


def _joined(*troubles: str) -> str:
    return ". ".join(filter(None, troubles))


def _older_entries(journals: Sequence[Path], sizes: Sequence[int], left: int) -> Iterator[Mapping[str, Any]]:
    """The last entries of journals, the newest first, from so many bytes of all together."""
    for path, size in zip(reversed(journals), reversed(sizes), strict=True):
        if left <= 0:
            return
        yield from _newest_first(path, left)
        left -= max(size, _JOURNAL_BYTES)


def _newest_first(journal: Path, most: int) -> Iterator[Mapping[str, Any]]:
    return map(_words_of, read_end(journal, most))


def _words_of(blob: bytes) -> Mapping[str, Any]:
    if is_table(blob) or int.from_bytes(blob[:HEADER_LENGTH], "little") > _MOST_WORDS:
        return {"kind": "layers"}  # or of a kind that no training writes: neither says how a run stands
    return read_words(blob)


def _state(last: Mapping[str, Any], journal: Path) -> tuple[str, int]:
    """As `Run.state` says it, and how many records never reached the file; an ending is the last entry."""
    if last["kind"] == "ending":
        return str(last["state"]), int(last.get("dropped") or 0)
    if (ending := _reserved_in(journal)) is not None:
        return ending.state, ending.dropped
    return "running" if time.time() - journal.stat().st_mtime < STALE_SECONDS else "crashed", 0


def _reserved_in(journal: Path) -> Ending | None:
    with journal.open("rb", buffering=0) as file:
        length = length_of(os.pread(file.fileno(), LENGTH, BEGIN))
    return reserved_ending(journal) if length <= _MOST_RESERVED else None


def _progress(words: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    """Steps done and the last loss, which may stand a few records back. What comes late may be of any step."""
    seen: dict[str, Any] = {}
    for entry in words:
        if entry["kind"] == "record" and not entry["late"]:
            seen.setdefault("steps", entry["step"] + 1)
        if entry["kind"] == "record" and "loss" in entry["scalars"]:
            seen.setdefault("loss", entry["scalars"]["loss"])
        if len(seen) == 2:
            break
    return {"steps": 0, **seen}
