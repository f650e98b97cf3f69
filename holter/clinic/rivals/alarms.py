"""What every rival needs: from alarms at single steps to incidents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from holter.diagnosis.finding import Finding
from holter.history import History

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

GAP = 10  # steps without an alarm after which the next is another incident
UNNAMED = "unnamed"  # the cause where a rule names none


def told(steps: Integers, alarms: Flags, cause: str, where: str, layer: str | None = None) -> Iterator[Finding]:
    """An incident for every stretch of alarms."""
    last = None
    for step in steps[alarms].tolist():
        if last is None or step - last > GAP:
            yield Finding(cause, where, since=step, step=step, layer=layer)
        last = step


def told_of_layers(
    steps: Integers, layers: tuple[str, ...], alarms: Flags, cause: str, where: str = "layer"
) -> Iterator[Finding]:
    """The same of a matrix [steps, layers]: all layers together are one incident, named after the first of them."""
    any_layer: Flags = np.any(alarms, axis=1, keepdims=False)
    for finding in told(steps, any_layer, cause, where):
        place = int(np.argmax(alarms[int(np.searchsorted(steps, finding.since))]))
        yield Finding(cause, where, since=finding.since, step=finding.step, layer=layers[place])


def series(history: History, role: str, statistic: str) -> tuple[Integers, tuple[str, ...], Floats]:
    """Empty where the role was never measured."""
    if role not in history.roles:
        return np.empty(0, np.int64), (), np.empty((0, 0))
    return history.series(role, statistic)


def in_order(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.step))
