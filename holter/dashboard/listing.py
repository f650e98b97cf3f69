"""The list of runs as the JSON that the front page shows, and the search by layer. Pure but for what a shelf reads."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from holter.dashboard.bodies import Body, body, json_body, strict_json
from holter.dashboard.examinations import Examination
from holter.dashboard.shelf import Listed, Shelf
from holter.words import printable

_MOST_FOUND = 12  # layers of a run that a search names
_LONGEST, _STATE = 300, 40  # characters of a layer's name, and of a state


class Lister:
    """Makes the list. Of a thousand runs few change between two looks: the words of the others are kept."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._lines: dict[str, tuple[Listed, Examination | None, str]] = {}
        self._made: tuple[list[str], Body] | None = None

    def body(self, known: Mapping[str, Examination], trouble: str = "") -> Body:
        """Blocking, and for one at a time. `trouble` is about the whole list."""
        runs = self._shelf.runs()
        self._lines = {one.id: self._line(one, known.get(one.id)) for one in runs.values()}
        head = strict_json({"directory": printable(str(self._shelf.root)), "trouble": printable(trouble)})
        words = [head, *(line for _, _, line in self._lines.values())]
        if self._made is None or self._made[0] != words:
            text = f'{head[:-1]},"runs":[{",".join(words[1:])}]}}'
            self._made = words, body(text.encode("ascii"), "application/json")
        return self._made[1]

    def _line(self, listed: Listed, examination: Examination | None) -> tuple[Listed, Examination | None, str]:
        kept = self._lines.get(listed.id)
        if kept is not None and kept[0] is listed and kept[1] is examination:
            return kept
        return listed, examination, strict_json(_line(listed, examination))


def _line(listed: Listed, examination: Examination | None) -> dict[str, Any]:
    seen = listed.glance
    answered = examination.answer if examination else None
    verdict = examination.verdict if examination else None
    troubles = (seen.trouble, "" if seen.state == "unreadable" else _trouble(examination))
    # That nothing at all can be read is not found out at a glance.
    is_read = answered is not None and examination is not None and examination.extent == listed.extent
    state = "unreadable" if is_read and answered and answered.state == "unreadable" else seen.state
    return {
        "id": listed.id,
        "name": listed.name,
        "state": printable(state[:_STATE]),
        "steps": seen.steps,
        "loss": seen.loss,
        "is_lost": seen.loss is not None and not math.isfinite(seen.loss),
        "model": printable(seen.model) if seen.model else None,
        "parameters": seen.parameters,
        "created": seen.created,
        "size": seen.size,
        "trouble": printable(listed.blocked or ". ".join(filter(None, troubles))),
        "is_lost_mostly": seen.state == "unreadable" or bool(answered and answered.damage_severity == "critical"),
        "verdict": asdict(verdict) if verdict else None,
        "findings": len(answered.examined.findings) if answered else 0,
        "spark": [float(f"{value:.4g}") for value in answered.spark] if answered else [],
    }


def _trouble(examination: Examination | None) -> str:
    """A torn end is told by the state, and what stands twice or elsewhere by the page of the run: nothing is lost."""
    if examination is None:
        return ""
    answered = examination.answer
    if examination.trouble or answered is None:
        return examination.trouble
    if answered.damage_severity in ("warning", "critical") and answered.state != "running":
        return answered.damage
    return ""


def layers_found(shelf: Shelf, runs: dict[str, Listed], terms: list[str]) -> Body:
    found = []
    kept: dict[int, tuple[tuple[str, ...], list[str]]] = {}  # runs of one model share a table of names
    for listed in runs.values():
        names = shelf.layers(listed)
        if id(names) not in kept:
            kept[id(names)] = names, [name for name in names if all(term in name.lower() for term in terms)]
        matches = kept[id(names)][1]
        if matches:
            shown = [printable(name[:_LONGEST]) for name in matches[:_MOST_FOUND]]
            found.append({"id": listed.id, "name": listed.name, "count": len(matches), "layers": shown})
    return json_body({"runs": found})
