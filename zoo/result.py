"""Result: what a worker saw of one training, as it travels between processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


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
