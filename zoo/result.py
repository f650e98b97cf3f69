"""Result: what a worker saw of one training, as it travels between processes; and what a file of trainings holds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zoo.training import Fault


@dataclass(frozen=True)
class Told:
    """A finding of Holter's. `live`: it was said while the training ran; else by the diagnosis of the stored run."""

    cause: str
    where: str
    severity: str
    layer: str | None
    since: int
    alternatives: tuple[str, ...] = ()
    advice: str = ""
    evidence: str = ""
    live: bool = False


@dataclass(frozen=True)
class Seen:
    """One watched model. In the bare run steps and norms are torch's, in the watched one Holter's; by step."""

    steps: int
    norms: Mapping[int, float] = field(default_factory=dict)
    clipped: Mapping[int, float] = field(default_factory=dict)
    losses: tuple[float, ...] = ()
    findings: tuple[Told, ...] = ()
    own: tuple[str, ...] = ()  # what Holter says of itself, and what it did not observe
    dropped: int = 0
    state: str = ""
    attached: str = ""  # what was called to watch; empty where nothing was recorded


@dataclass(frozen=True)
class Result:
    """`error` is the traceback where the training raised or the worker died. `hashes` are of weights and buffers."""

    error: str = ""
    seen: tuple[Seen, ...] = ()
    hashes: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def write(result: Result, path: Path) -> None:
    path.write_text(json.dumps(asdict(result), indent=1))


def read(path: Path) -> Result:
    found = json.loads(path.read_text())
    return Result(found["error"], tuple(map(_seen, found["seen"])), found["hashes"], found["seconds"])


def _seen(found: dict[str, Any]) -> Seen:
    told = tuple(Told(**{**one, "alternatives": tuple(one["alternatives"])}) for one in found["findings"])
    by_step = {name: {int(step): value for step, value in found[name].items()} for name in ("norms", "clipped")}
    lists = {"losses": tuple(found["losses"]), "own": tuple(found["own"])}
    return Seen(**{**found, **by_step, **lists, "findings": told})


@dataclass(frozen=True)
class Listed:
    """A training without its code. With an `error`: a file that could not be imported."""

    name: str
    steps: int = 0
    faults: Mapping[str, Fault] = field(default_factory=dict)
    error: str = ""


def write_listed(listed: Iterable[Listed], path: Path) -> None:
    path.write_text(json.dumps([asdict(one) for one in listed]))


def read_listed(path: Path) -> list[Listed]:
    return [Listed(**{**one, "faults": _faults(one["faults"])}) for one in json.loads(path.read_text())]


def _faults(found: Mapping[str, Any]) -> dict[str, Fault]:
    return {name: Fault(tuple(truth["causes"]), truth["layer"]) for name, truth in found.items()}


def result_file(name: str, fault: str | None, is_watched: bool) -> str:
    words = [name, *([fault] if fault else []), "watched" if is_watched else "bare"]
    return "-".join(words).replace("/", ".").replace(" ", "-") + ".json"
