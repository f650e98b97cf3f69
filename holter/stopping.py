"""When a training should end early: on a finding, where the user asked for it, or as validation no longer improves."""

from __future__ import annotations

import math
from collections.abc import Iterable

from holter.diagnosis.finding import SEVERITIES, Finding
from holter.record import Record, is_validation


class TrainingStopped(Exception):
    """Raised by `Monitor.log` where `watch(stop_on=...)` asked for it; `finding` is what it found."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding)
        self.finding = finding

    def __str__(self) -> str:
        return str(self.finding)


def is_severe(finding: Finding, least: str) -> bool:
    """Whether it is about the training, and as severe as this or more. What fails of Holter's own stops nobody, and
    neither does a machine that others make slow."""
    return finding.where not in ("monitor", "performance") and SEVERITIES.index(finding.severity) >= SEVERITIES.index(
        least
    )


class StopOn:
    """Raises where a finding is as severe as the user said: once for each, for one who catches it has decided."""

    def __init__(self, least: str | None) -> None:
        self.least = least
        self._raised: set[tuple[int, str]] = set()

    def check(self, findings: Iterable[Finding]) -> None:
        for finding in findings if self.least is not None else ():
            incident = finding.step, finding.cause
            if incident not in self._raised and is_severe(finding, str(self.least)):
                self._raised.add(incident)
                raise TrainingStopped(finding)


class Patience:
    """Whether the validation loss has not fallen for so many steps; the first such value to come is the one watched.

    >>> patience = Patience(100)
    >>> for step, loss in ((0, 2.0), (50, 1.0), (100, 1.1), (149, 1.2)):
    ...     patience.see(Record(step, 0.0, {"val_loss": loss}))
    >>> patience.is_over
    False
    >>> patience.see(Record(150, 0.0, {"val_loss": 1.0}))
    >>> patience.is_over
    True
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._name: str | None = None
        self._best = math.inf
        self._best_step: int | None = None
        self.is_over = False

    def see(self, record: Record) -> None:
        if self._name is None:
            self._name = next((name for name in record.scalars if "loss" in name and is_validation(name)), None)
        value = record.scalars.get(self._name) if self._name is not None else None
        if value is None:
            return
        if self._best_step is None or record.step < self._best_step:  # back at a checkpoint: what came after is undone
            self._best, self._best_step = math.inf, record.step
        if value < self._best:  # NaN is no progress
            self._best, self._best_step = value, record.step
        self.is_over = record.step - self._best_step >= self._steps
