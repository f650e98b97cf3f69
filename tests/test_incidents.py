"""Incidents and the doctor: one finding an incident, the order rule, rules that fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import UNKNOWN
from holter.diagnosis.incidents import LASTING, Incidents
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.record import Record


def suspicion(cause: str, since: int, score: float = 0.8, kind: Kind = Kind.PATTERN, where: str = "lr") -> Suspicion:
    return Suspicion(cause, where, since, score, kind)


def told(*lines: list[Suspicion]) -> Incidents:
    """What the rules say, every list twice, as at two steps."""
    incidents = Incidents()
    for step, line in enumerate(lines):
        incidents.add(line, 100 + 2 * step)
        incidents.add(line, 101 + 2 * step)
    return incidents


def causes(incidents: Incidents) -> list[tuple[str, tuple[str, ...]]]:
    return [(finding.cause, finding.alternatives) for finding in incidents.findings]


def test_of_two_the_earlier_one_leads() -> None:
    assert causes(told([suspicion("later", 90), suspicion("earlier", 80)])) == [("earlier", ("later",))]


def test_of_those_that_began_together_the_nearer_to_the_cause_leads() -> None:
    both = [suspicion("pattern", 90, 0.95), suspicion("fact", 92, 0.7, Kind.FACT)]
    assert causes(told(both)) == [("fact", ("pattern",))]


def test_an_end_state_is_explained_by_what_came_before_it_or_with_it() -> None:
    state = suspicion("state", 91, 0.99, Kind.STATE, "layer")
    assert causes(told([state, suspicion("pattern", 60)])) == [("pattern", ("state",))]
    assert causes(told([state, suspicion("pattern", 93)])) == [("pattern", ("state",))]
    assert causes(told([state])) == [("state", ())]


def test_what_began_well_after_an_end_state_does_not_explain_it() -> None:
    both = [suspicion("state", 0, 0.8, Kind.STATE, "layer"), suspicion("pattern", 40, 0.9)]
    assert causes(told(both)) == [("state", ("pattern",))]


def test_what_comes_later_revises_the_incident_and_makes_no_second_one() -> None:
    incidents = told([suspicion("first guess", 95)], [suspicion("first guess", 95), suspicion("cause", 88)])
    (finding,) = incidents.findings
    assert (finding.cause, finding.alternatives) == ("cause", ("first guess",))
    assert finding.since == 88 and finding.step == 103, "known since its cause is"


def test_what_has_not_been_said_for_a_while_tells_when_it_was_last_seen() -> None:
    incidents = told([suspicion("cause", 95)])
    assert [finding.until for finding in incidents.findings] == [None]
    incidents.add([], 101 + LASTING)
    assert [finding.until for finding in incidents.findings] == [None]
    incidents.add([], 102 + LASTING)
    assert [finding.until for finding in incidents.findings] == [101]


def test_a_weak_suspicion_is_an_alternative_only() -> None:
    assert causes(told([suspicion("weak", 80, 0.3)])) == []
    assert causes(told([suspicion("weak", 80, 0.3), suspicion("strong", 90)])) == [("strong", ("weak",))]


def test_what_is_no_fact_must_be_said_twice() -> None:
    incidents = Incidents()
    incidents.add([suspicion("pattern", 90)], 100)
    incidents.add([], 101)
    incidents.add([suspicion("fact", 90, kind=Kind.FACT)], 102)
    assert causes(incidents) == [("fact", ())]


def test_incidents_far_apart_are_two() -> None:
    incidents = Incidents()
    for step in (100, 101):
        incidents.add([suspicion("first", 90)], step)
    for step in (300, 301):
        incidents.add([suspicion("second", 101 + LASTING + 100)], step)
    assert [finding.cause for finding in incidents.findings] == ["first", "second"]


def test_the_machine_has_incidents_of_its_own() -> None:
    both = [suspicion("slow loader", 80, where="performance"), suspicion("jump", 90)]
    assert {cause for cause, _ in causes(told(both))} == {"slow loader", "jump"}


def test_confidence_falls_with_a_rival() -> None:
    alone = told([suspicion("one", 80)]).findings[0].confidence
    rivalled = told([suspicion("one", 80), suspicion("two", 85)]).findings[0].confidence
    assert 0 < rivalled < alone == pytest.approx(0.8)


def test_a_rule_that_raises_is_switched_off_and_told_and_the_rest_go_on() -> None:
    """P1: of the diagnosis."""
    calls = []

    def broken(case: Case) -> Iterator[Suspicion]:
        calls.append(case.step)
        raise RuntimeError("no")
        yield  # a generator, as rules are

    def sound(case: Case) -> Iterator[Suspicion]:
        yield suspicion("found", 3, kind=Kind.FACT)

    doctor = Doctor({}, rules=(broken, sound))
    for step in range(20):
        doctor.take(Record(step, 0.0, {"loss": 1.0}))
    doctor.finish()
    assert [finding.cause for finding in doctor.findings] == ["found", "monitor-degraded"]
    assert len(calls) == 1 and doctor.findings[1].evidence == {"rule": "broken", "error": "RuntimeError"}


def test_a_doctor_sees_the_last_step_too() -> None:
    seen = []

    def rule(case: Case) -> Iterator[Suspicion]:
        seen.append(case.step)
        return iter(())

    doctor = Doctor({}, rules=(rule,))
    for step in range(3):
        doctor.take(Record(step, 0.0))
    doctor.finish()
    assert seen == [0, 1, 2]


def test_a_trouble_that_lasts_does_not_hide_one_that_begins_much_later() -> None:
    """The first is said again at every step; the second is another incident, and as severe as it is."""
    lasting = suspicion("minor", 0)
    incidents = told(*[[lasting] for _ in range(4)])
    critical = Suspicion("nan-in-data", "data", 560, 0.95, Kind.FACT, severity="critical")
    incidents.add([lasting, critical], 562)
    incidents.add([lasting, critical], 563)
    assert [(one.cause, one.severity) for one in incidents.findings] == [
        ("minor", "warning"),
        ("nan-in-data", "critical"),
    ]


def test_an_incident_is_as_severe_as_the_worst_that_is_sure_in_it() -> None:
    worse = Suspicion("labels-corrupt", "data", 96, 0.9, severity="critical")
    incidents = told([suspicion("lead", 95), worse], [suspicion("lead", 95), worse])
    (finding,) = incidents.findings
    assert finding.severity == "critical"


@pytest.mark.parametrize(("before", "leads"), [("bf16-update-lost", False), ("lr-too-high", True)])
def test_a_loss_that_is_lost_does_not_come_of_what_only_slows_learning(before: str, leads: bool) -> None:
    lost = Suspicion(UNKNOWN, "loss", 240, 0.55, Kind.STATE, severity="critical")
    incidents = told(*([[suspicion(before, 90, 0.9)]] * 75), [suspicion(before, 90, 0.9), lost])
    assert [found.cause for found in incidents.findings] == ([before] if leads else [before, UNKNOWN])
    assert incidents.findings[0].severity == ("critical" if leads else "warning")
