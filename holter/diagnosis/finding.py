"""Finding: one incident of a training, with its cause, place, onset, evidence and advice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holter.record import Problem

SEVERITIES = ("info", "warning", "critical")
UNKNOWN = "unknown"  # a cause: something is wrong that fits none of those known
PLACES = ("layer", "lr", "optimizer", "loop", "data", "loss", "precision", "performance", "monitor")


@dataclass(frozen=True)
class Finding:
    """What is wrong. `since` is the step of its onset, `step` the one at which it was known; `until` the last at which
    it was seen, where that is a while ago: it is over, or has become usual."""

    cause: str
    where: str
    since: int
    step: int
    severity: str = "warning"
    layer: str | None = None
    confidence: float = 1.0
    evidence: Mapping[str, object] = field(default_factory=dict)
    advice: str = ""
    alternatives: tuple[str, ...] = ()
    until: int | None = None

    def __post_init__(self) -> None:
        if self.where not in PLACES:
            raise ValueError(f"where is one of {', '.join(PLACES)}, got {self.where!r}")
        if self.severity not in SEVERITIES:
            raise ValueError(f"severity is one of {', '.join(SEVERITIES)}, got {self.severity!r}")

    @property
    def further_evidence(self) -> Mapping[str, object]:
        """The evidence that the advice does not say already, for all that show both."""
        return {} if self.evidence.keys() == {"where", "what"} else self.evidence

    def __str__(self) -> str:
        place = self.layer or self.where
        return f"{self.severity}: {self.cause} in {place} since step {self.since}. {self.advice}"

    def _repr_html_(self) -> str:
        from holter.notebook import finding_html  # only notebooks need it

        return finding_html(self)


def from_problem(problem: Problem) -> Finding:
    """A contained failure of Holter's own, told like any other finding."""
    return Finding(
        cause="monitor-degraded",
        where="monitor",
        since=problem.step,
        step=problem.step,
        evidence={"where": problem.where, "what": problem.what},
        advice=f"Training is untouched, but Holter could not {problem.where}: {problem.what}",
    )
