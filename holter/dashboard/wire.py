"""What was examined, as words between the diagnosis and the server: JSON, since data is never code. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holter.diagnosis.convergence import Forecast, Outlook
from holter.diagnosis.events import Event
from holter.diagnosis.finding import Finding
from holter.diagnosis.health import Check
from holter.report.examining import Examined
from holter.signs import Sign


@dataclass(frozen=True)
class Answer:
    """What the diagnosis says of a run by now. `spark` is its loss in a few points, the oldest first."""

    examined: Examined
    state: str
    steps: int
    spark: tuple[float, ...]
    is_complete: bool
    damage: str = ""  # what of it cannot be read, in a sentence
    damage_severity: str = ""  # how serious that is; empty for an end that is torn as by a kill


def to_line(answer: Answer) -> str:
    """On one line. NaN stays NaN: both ends are Python."""
    return json.dumps(asdict(answer), default=_plain)


def from_line(line: str | bytes) -> Answer:
    """ValueError where it is no answer."""
    try:
        words = json.loads(line)
        found = words.pop("examined")
        return Answer(examined=_examined(found), **{**words, "spark": tuple(words["spark"])})
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an answer of the diagnosis: {error!r}") from error


def _plain(value: Any) -> Any:
    """A number of numpy's, or whatever else a rule took for evidence."""
    return value.item() if hasattr(value, "item") else str(value)


def _examined(words: Mapping[str, Any]) -> Examined:
    outlook = words["outlook"]
    if outlook is not None:
        forecast = Forecast(**outlook["forecast"]) if outlook["forecast"] is not None else None
        outlook = Outlook(outlook["is_flat"], forecast)
    return Examined(
        findings=tuple(Finding(**{**one, "alternatives": tuple(one["alternatives"])}) for one in words["findings"]),
        health=tuple(Check(**one) for one in words["health"]),
        outlook=outlook,
        signs=tuple(Sign(**{**one, "layers": tuple(one["layers"])}) for one in words["signs"]),
        sampled=words["sampled"],
        onsets=tuple(Event(**one) for one in words["onsets"]),
    )
