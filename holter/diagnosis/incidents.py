"""Incidents: suspicions that belong together, and which of them leads. One incident is one finding.

The order rule: an end state is explained by whatever went before it; of the others the earliest leads, and of those
that began together the one whose evidence is nearest to the cause.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holter.diagnosis.finding import UNKNOWN, Finding
from holter.diagnosis.suspicion import Kind, Suspicion

TOGETHER = 3  # steps within which two beginnings cannot be told apart
LASTING = 60  # steps after its last sign within which what begins belongs to an incident
ENOUGH = 0.5  # the score that makes a finding
APART = ("performance",)  # places whose troubles have nothing to do with those of the model


class Incident:
    """Suspicions by cause, as they were last held."""

    def __init__(self, first: Suspicion, step: int) -> None:
        self.known, self.last = step, step
        self._held: dict[str, Suspicion] = {first.cause: first}

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
        self.last = step

    def takes(self, suspicion: Suspicion) -> bool:
        if suspicion.cause in self._held:
            return suspicion.began <= self.last + LASTING
        if self.is_apart or suspicion.where in APART:
            return False
        return self.since - LASTING <= suspicion.began <= self.last + LASTING

    @property
    def ranked(self) -> list[Suspicion]:
        """The leading one first."""
        enough = [one for one in self._held.values() if one.score >= ENOUGH]
        others = sorted((one for one in self._held.values() if one.score < ENOUGH), key=lambda one: -one.score)
        ranked: list[Suspicion] = []
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
        return ranked + others

    @property
    def lead(self) -> Suspicion:
        return self.ranked[0]

    def finding(self) -> Finding:
        lead, *others = self.ranked
        others = [one for one in others if one.cause != UNKNOWN]
        rival = max((one.score for one in others if one.kind >= lead.kind), default=0.0)
        advice = f"{lead.advice} {lead.check}".strip()
        return Finding(
            cause=lead.cause,
            where=lead.where,
            since=min(lead.since, self.known),
            step=self.known,
            severity=lead.severity,
            layer=lead.layer,
            confidence=round(float(lead.score) / (1 + 0.5 * rival), 2),
            evidence=dict(lead.evidence),
            advice=advice,
            alternatives=tuple(one.cause for one in others),
        )


class Incidents:
    """Of one training, in the order in which they became known."""

    def __init__(self) -> None:
        self._incidents: list[Incident] = []
        self._heard: set[str] = set()  # causes suspected when the rules were last asked

    def add(self, suspicions: Iterable[Suspicion], step: int) -> None:
        """What the rules say at this step. What is no fact must be said twice: a first value may mislead."""
        said = sorted(suspicions, key=lambda one: (one.score < ENOUGH, -one.kind, one.since))
        for suspicion in said:
            incident = next((one for one in reversed(self._incidents) if one.takes(suspicion)), None)
            is_sure = suspicion.kind is Kind.FACT or suspicion.cause in self._heard
            if incident is not None:
                if is_sure:
                    incident.add(suspicion, step)
            elif suspicion.score >= ENOUGH and is_sure:
                self._incidents.append(Incident(suspicion, step))
        self._heard = {suspicion.cause for suspicion in said}

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(incident.finding() for incident in self._incidents)
