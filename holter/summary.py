"""A run in numbers that a person compares: what is odd about it, loss, time, layers. Pure, numpy only."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from holter.history import History
from holter.integrity import Integrity
from holter.layer_summary import Role, summarise_roles
from holter.record import Problem
from holter.run import Run
from holter.scalar_summary import Scalars, summarise_scalars
from holter.signs import Sign, signs_of


@dataclass(frozen=True)
class Summary:
    """What `holter show` shows. Missing words are empty, missing numbers None."""

    path: str
    state: str
    error: str
    model: str
    parameters: int | None
    optimizers: tuple[str, ...]
    scheduler: str
    versions: Mapping[str, str]
    created: float
    steps: int
    segments: int
    records: int
    dropped: int
    unreadable_bytes: int
    integrity: Integrity
    signs: tuple[Sign, ...]
    scalars: Scalars
    problems: tuple[Problem, ...]
    roles: tuple[Role, ...]
    activations: str = ""  # how they were last seen where no forward of the training showed them; or why they were not
    optimizer_settings: str = ""  # of which optimizers they were recorded, where not of all


def summarise(run: Run) -> Summary:
    history = run.history.latest()
    ending, text = run.ending, _text_of(run.info)
    parameters, optimizers, versions = (run.info.get(name) for name in ("parameters", "optimizers", "versions"))
    return Summary(
        path=str(run.path),
        state=run.state,
        error=ending.error if ending is not None else "",
        model=text("model"),
        parameters=parameters if isinstance(parameters, int) else None,
        optimizers=tuple(map(str, optimizers)) if isinstance(optimizers, list) else (),
        scheduler=text("scheduler"),
        versions={str(k): str(v) for k, v in versions.items()} if isinstance(versions, dict) else {},
        created=run.created,
        steps=len(history),
        segments=len(set(run.history.segments.tolist())),
        records=len(run.history),
        dropped=max(ending.dropped if ending is not None else 0, _dropped(history)),
        unreadable_bytes=run.unreadable_bytes,
        integrity=run.integrity,
        signs=signs_of(history, run.layers),
        scalars=summarise_scalars(history),
        problems=tuple(run.problems),
        roles=summarise_roles(history, run.layers),
        activations=history.activations_note,
        optimizer_settings=history.settings_note,
    )


def _text_of(info: Mapping[str, Any]) -> Any:
    return lambda name: info[name] if isinstance(info.get(name), str) else ""


def _dropped(history: History) -> int:
    values = history.scalar("dropped")[1]
    return int(values[-1]) if len(values) and np.isfinite(values[-1]) else 0


def as_json(value: Any) -> Any:
    """A summary as plain JSON values: NaN and infinities become null, whole series are left out."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple | list):
        return [as_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): as_json(item) for name, item in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        parts = {part.name: getattr(value, part.name) for part in fields(value)}
        return {name: as_json(part) for name, part in parts.items() if not isinstance(part, np.ndarray)}
    return value
