"""Incidents: suspicions that belong together, and which of them leads. One incident is one finding.

The order rule: an end state is explained by whatever went before it; of the others the earliest leads, and of those
that began together the one whose evidence is nearest to the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from holter.diagnosis.finding import SEVERITIES, UNKNOWN, Finding
from holter.diagnosis.suspicion import Kind, Suspicion

TOGETHER = 3  # steps within which two beginnings cannot be told apart
LASTING = 60  # steps after its last sign within which what begins belongs to an incident
ENOUGH = 0.5  # the score that makes a finding
MOST = 200  # incidents of one training: who has not looked by then is not helped by more
APART = ("performance",)  # places whose troubles have nothing to do with those of the model
# By these a training learns less or nothing: a loss that runs away does not come of them.
STILL = ("bf16-update-lost", "clipping-too-tight", "layer-frozen", "lr-too-low", "weight-not-written")


def _is_lost(suspicion: Suspicion) -> bool:
    return suspicion.cause == UNKNOWN and suspicion.severity == "critical"


class Incident:
    """Suspicions by cause, as they were last held."""

    def __init__(self, first: Suspicion, step: int) -> None:
        self.last, self.said = first.began, step  # what began last in it; and when it was last said
        self._held: dict[str, Suspicion] = {first.cause: first}
        self._known_at: dict[str, int] = {first.cause: step}

    @property
    def since(self) -> int:
        return min(suspicion.since for suspicion in self._held.values())

    @property
    def is_apart(self) -> bool:
        return self.lead.where in APART

    def add(self, suspicion: Suspicion, step: int) -> None:
        """A suspicion that grows replaces what it was; one that fades stays as it was at its strongest."""
        held = self._held.get(suspicion.cause)
        if held is None or suspicion.score >= held.score:
            # What was recorded once does not begin again: a broken example comes back with every epoch.
            is_again = held is not None and held.kind is Kind.FACT and suspicion.since > held.since
            self._held[suspicion.cause] = replace(suspicion, since=held.since) if is_again and held else suspicion
        if suspicion.score >= ENOUGH:
            self._known_at.setdefault(suspicion.cause, step)
        self.last, self.said = max(self.last, suspicion.began), step

    def takes(self, suspicion: Suspicion) -> bool:
        lasts_until = self.said + LASTING
        if suspicion.cause in self._held:
            return suspicion.since <= lasts_until
        if _is_lost(suspicion) and all(cause in STILL for cause in self._held):
            return False
        if self.is_apart or suspicion.where in APART or suspicion.began < self.since - LASTING:
            return False
        if suspicion.began <= self.last + LASTING:
            return True
        # While a trouble lasts, what follows is its consequence; but not what was recorded, or is worse.
        is_no_worse = SEVERITIES.index(suspicion.severity) <= SEVERITIES.index(self.severity)
        follows = suspicion.kind is Kind.STATE or (suspicion.kind is Kind.PATTERN and is_no_worse)
        return follows and suspicion.began <= lasts_until

    @property
    def ranked(self) -> list[Suspicion]:
        """The leading one first; a note leads nothing that is worse."""
        sure = [one for one in self._held.values() if one.score >= ENOUGH]
        worse, notes = ([one for one in sure if (one.severity == "info") is is_note] for is_note in (False, True))
        others = sorted((one for one in self._held.values() if one.score < ENOUGH), key=lambda one: -one.score)
        return self._in_order(worse) + self._in_order(notes) + others

    def _in_order(self, sure: list[Suspicion]) -> list[Suspicion]:
        enough, ranked = list(sure), []
        while enough:
            causes = [one for one in enough if one.kind is not Kind.STATE] or enough
            earliest = min(one.began for one in causes)
            # What began well after an end state does not explain it.
            causes = [one for one in enough if one in causes or one.began < earliest - TOGETHER]
            earliest = min(one.began for one in causes)
            together = [one for one in causes if one.began <= earliest + TOGETHER]
            best = max(together, key=lambda one: (one.kind, one.score))
            ranked.append(best)
            enough.remove(best)
        return ranked

    @property
    def lead(self) -> Suspicion:
        return self.ranked[0]

    @property
    def severity(self) -> str:
        """Of the worst that is sure in it."""
        sure = [one.severity for one in self._held.values() if one.score >= ENOUGH]
        return max(sure, key=SEVERITIES.index, default="info")

    def finding(self, step: int, is_over: Callable[[Suspicion, int], bool]) -> Finding:
        """As it stands at this step. That nobody says it any more is no proof that it is over."""
        lead, *others = self.ranked
        others = [one for one in others if one.cause != UNKNOWN]
        known = max(self._known_at.get(lead.cause, 0), min(self._known_at.values()))
        rival = max((one.score for one in others if one.kind >= lead.kind), default=0.0)
        advice = f"{lead.advice} {lead.check}".strip()
        return Finding(
            cause=lead.cause,
            where=lead.where,
            since=min(lead.since, known),
            step=known,
            severity=self.severity,
            layer=lead.layer,
            confidence=round(float(lead.score) / (1 + 0.5 * rival), 2),
            evidence=dict(lead.evidence),
            advice=advice,
            alternatives=tuple(one.cause for one in others),
            until=self.said if step - self.said > LASTING and is_over(lead, self.said) else None,
        )


class Incidents:
    """Of one training, in the order in which they became known. `is_over` is asked of what leads an incident, and of
    the step at which it was last said, once that is a while ago."""

    def __init__(self, is_over: Callable[[Suspicion, int], bool] = lambda lead, said: True) -> None:
        self._is_over = is_over
        self._incidents: list[Incident] = []
        self._step = 0
        self.is_unsure = False  # whether something was said for the first time: the next step will tell
        self._heard: set[str] = set()  # causes suspected when the rules were last asked

    def add(self, suspicions: Iterable[Suspicion], step: int) -> None:
        """What the rules say at this step. What is no fact must be said twice: a first value may mislead."""
        self._step = step
        said = sorted(suspicions, key=lambda one: (one.score < ENOUGH, -one.kind, one.since))
        for suspicion in said:
            incident = next((one for one in reversed(self._incidents) if one.takes(suspicion)), None)
            is_sure = suspicion.kind is Kind.FACT or suspicion.cause in self._heard
            if incident is not None:
                if is_sure:
                    incident.add(suspicion, step)
            elif suspicion.score >= ENOUGH and is_sure and len(self._incidents) < MOST:
                self._incidents.append(Incident(suspicion, step))
        self.is_unsure = any(one.score >= ENOUGH and one.cause not in self._heard for one in said)
        self._heard = {suspicion.cause for suspicion in said}

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(incident.finding(self._step, self._is_over) for incident in self._incidents)
