"""A run at a glance: what a list of runs shows. Reads only the ends of journals, so a thousand runs are no work."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

from holter.codec import read_words
from holter.journal import read_backwards, reserved_ending
from holter.run import STALE_SECONDS, Run, list_runs

_ENTRIES = 64  # how far back a loss is looked for
_NOTHING: Mapping[str, Any] = {"kind": "nothing"}


@dataclass(frozen=True)
class Glance:
    """`trouble` says what kept it from being read; the rest is then what could be."""

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
    words = chain([last], newest, *map(_newest_first, reversed(mine[:-1])))
    return {"state": _state(last, mine[-1]), **_progress(islice(words, _ENTRIES))}


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
    """Steps done and the last loss, which may stand a few records back."""
    steps = 0
    for entry in words:
        if entry["kind"] == "record":
            steps = steps or entry["step"] + 1
            if "loss" in entry["scalars"]:
                return {"steps": steps, "loss": entry["scalars"]["loss"]}
    return {"steps": steps}
