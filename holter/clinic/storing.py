"""Cases as run directories: trained where they are missing or were made by other code, and found again."""

from __future__ import annotations

import importlib
import json
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

from holter.clinic.case import Case
from holter.clinic.processes import Done, in_processes
from holter.clinic.training import train
from holter.clinic.version import code_version

PLACE = Path("runs/clinic")
_MARK = "case.json"


def select(cases: Iterable[Case], only: str | None, split: str) -> list[Case]:
    """Those of a half, or of "all", whose id fits a pattern; with a sick case its twin. ValueError where none does."""
    of_half = [case for case in cases if split in ("all", case.split)]
    if only is None:
        return of_half
    pattern = only if any(sign in only for sign in "*?[") else f"*{only}*"
    chosen = {case.id for case in of_half if fnmatch(case.id, pattern)}
    chosen |= {case.twin for case in of_half if case.id in chosen and case.twin is not None}
    if not chosen:
        half = "" if split == "all" else f" of the {split} half"
        raise ValueError(f"no case{half} fits {only!r}: `holter clinic show` lists them")
    return [case for case in of_half if case.id in chosen]


def directory_of(case: Case, root: Path) -> Path:
    return root / case.id


def is_stored(case: Case, root: Path) -> bool:
    """Whether the case is there, whole, whatever code it was made by."""
    return (directory_of(case, root) / _MARK).is_file()


def is_current(case: Case, root: Path) -> bool:
    try:
        mark = json.loads((directory_of(case, root) / _MARK).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(mark, dict) and mark.get("version") == code_version()


def store_all(cases: Sequence[Case], root: Path, jobs: int) -> Iterator[Done[Case, float]]:
    """Trains them in processes; the result is the seconds that it took."""
    importlib.import_module("torch._dynamo")  # a second's work at the first step of any optimizer: once for all
    code_version()  # once, before the processes are forked: what is edited meanwhile was not what trained
    # The longest first, so that no process is left alone with one at the end.
    by_length = sorted(cases, key=_effort, reverse=True)
    yield from in_processes(lambda case: store(case, root), by_length, jobs)


def store(case: Case, root: Path) -> float:
    """Trains one case into its directory; what was there before is gone."""
    directory, started = directory_of(case, root), time.perf_counter()
    shutil.rmtree(directory, ignore_errors=True)
    monitor = train(case, directory)
    if not monitor.flush():
        raise RuntimeError("the run could not be written in time")
    seconds = time.perf_counter() - started
    mark = {"case": case.id, "version": code_version(), "seconds": round(seconds, 3)}
    # Last, and only here: a case that was interrupted has no mark.
    (directory / _MARK).write_text(json.dumps(mark) + "\n")
    return seconds


def _effort(case: Case) -> int:
    heavy = {"transformer": 4, "patches": 5, "tied": 4, "massive": 4, "convnet": 2}
    return heavy.get(case.architecture, 1) * case.recipe.steps * case.recipe.accumulate
