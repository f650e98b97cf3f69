"""What a file of trainings holds, asked in a process of its own: python -m zoo.listing MODULE OUT

A package that is missing or broken then fails alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from zoo.training import Fault


@dataclass(frozen=True)
class Listed:
    """A training without its code; with an `error` in its place where the file could not be imported."""

    name: str
    steps: int = 0
    faults: Mapping[str, Fault] = field(default_factory=dict)
    error: str = ""


def read(text: str) -> list[Listed]:
    return [
        Listed(name, steps, {fault: Fault(tuple(causes), layer) for fault, (causes, layer) in faults.items()})
        for name, steps, faults in json.loads(text)
    ]


def main() -> None:
    from zoo.trainings import load
    from zoo.vision import make_torchvision_importable

    make_torchvision_importable()
    module, out = sys.argv[1:]
    found = [
        (one.name, one.steps, {fault: (truth.causes, truth.layer) for fault, truth in one.faults.items()})
        for one in load(module)
    ]
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
