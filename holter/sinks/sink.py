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


@runtime_checkable
class TellsEnding(Protocol):
    """A sink may also show how the training ended: it is told before `close`, by the state of the run."""

    def will_end(self, state: str) -> None: ...
