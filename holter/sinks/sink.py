"""The contract of a sink."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from holter.diagnosis.finding import Finding
from holter.record import Record


@runtime_checkable
class Sink(Protocol):
    """Takes what a training shows. Called off the training thread, one call at a time."""

    def write(self, record: Record) -> None: ...

    def alert(self, finding: Finding) -> None: ...

    def close(self) -> None: ...
