"""A run at a glance: what a list of runs shows. Reads only the ends of journals, so a thousand runs are no work."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from holter.codec import read_words
from holter.integrity import integrity_of
from holter.journal import JournalReader, read_backwards, reserved_ending
from holter.run import STALE_SECONDS, Run, list_runs

_ENTRIES = 64  # how far back a loss is looked for
_SAID = ("record", "problem", "ending")  # kinds of entries
_MOST_BYTES = 512 << 20  # of journals that are looked through for damage: about two seconds
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
                one = replace(one, trouble=_joined(one.trouble, _damage_of(one.path)))
        found.append(one)
    return found, left_out


def _damage_of(path: Path) -> str:
    readers = [JournalReader(journal) for journal in Run(path).own_journals]
    try:
        for reader in readers:
            reader.survey()
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__
    found = integrity_of(readers)
    return found.words if found.severity else ""


def glance(run: Run) -> Glance:
    seen: dict[str, Any] = {"path": run.path}
    try:
        for look in (_described, _sized, _recorded):
            seen.update(look(run))
    except (OSError, ValueError, KeyError, TypeError) as error:
        seen["trouble"] = str(error) or type(error).__name__
    return Glance(**seen)


def _described(run: Run) -> dict[str, Any]:
    model, parameters = run.info.get("model"), run.info.get("parameters")
    return {
        "created": run.created,
        "model": model if isinstance(model, str) else None,
        "parameters": parameters if isinstance(parameters, int) else None,
        "trouble": "" if run.info else "run.json is missing or damaged",
    }


def _sized(run: Run) -> dict[str, Any]:
    return {"size": sum(entry.stat().st_size for entry in os.scandir(run.path) if entry.is_file())}


def _recorded(run: Run) -> dict[str, Any]:
    """State, steps and loss, from the newest journals of the lowest rank."""
    journals = run.journals
    mine = [path for rank, path in journals if rank == journals[0][0]]
    if not mine:
        return {"state": "empty", "steps": 0}
    newest = _newest_first(mine[-1])
    last = next(newest, _NOTHING)
    words = islice(chain([last], newest, *map(_newest_first, reversed(mine[:-1]))), _ENTRIES)
    said = next((one for one in words if one["kind"] in _SAID), None)
    if said is None and run.state == "unreadable":
        return {"state": "unreadable", "trouble": _joined(_described(run)["trouble"], run.integrity.sentence)}
    return {"state": _state(last, mine[-1]), **_progress(chain([said or last], words))}


def _joined(*troubles: str) -> str:
    return ". ".join(filter(None, troubles))


def _newest_first(journal: Path) -> Iterator[Mapping[str, Any]]:
    return map(read_words, read_backwards(journal))


def _state(last: Mapping[str, Any], journal: Path) -> str:
    """As `Run.state` says it: an ending is the last entry of its journal."""
    if last["kind"] == "ending":
        return str(last["state"])
    if (ending := reserved_ending(journal)) is not None:
        return ending.state
    return "running" if time.time() - journal.stat().st_mtime < STALE_SECONDS else "crashed"


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
