"""The order of events: at the steps at which the doctor saw them, however long the run, and only signs of health."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holter.dashboard.wire import Answer, from_line, to_line
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.events import Event
from holter.diagnosis.finding import Finding
from holter.journal import Journal
from holter.record import Record
from holter.report import onsets
from holter.report.digest import Digest
from holter.report.onsets import Onsets, onsets_of
from holter.report.reading import Follower
from holter.report.told import order_of_events, told_findings
from holter.report.view import run_view
from holter.run import journal_path

JUMP, STEPS = 2001, 3000


def records(jump: int = JUMP, steps: int = STEPS) -> Iterator[Record]:
    """The rate jumps, the gradient grows at the next step, and the loss one step later. Every 24th batch is short."""
    random = np.random.default_rng(0)
    for step in range(steps):
        noise = math.exp(0.05 * random.normal())
        scalars = {
            "loss": noise * (8.0 if step >= jump + 2 else 1.0),
            "gradient_norm": noise * (20.0 if step >= jump + 1 else 1.0),
            "learning_rate": 0.5 if step >= jump else 0.01,
            "batch/size": 16.0 if step % 24 == 23 else 64.0,
            "time/data": 1e-3 * (5.0 if step % 24 == 23 else 1.0),
            "step_time": 1e-2 * (9.0 if step >= jump + 3 else 1.0),
        }
        yield Record(step, 0.0, scalars)


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "long"
    path.mkdir()
    journal = Journal(journal_path(path, 0, 0))
    for record in records():
        journal.append(record)
    journal.close()
    return path


def test_events_of_a_long_run_stand_at_their_own_steps_a_cause_before_what_comes_of_it(long: Path) -> None:
    """P19: a chart of it has a point for every dozens of steps."""
    follower = Follower(long, buckets=64, examine=True)
    follower.read_on()
    examined = follower.examined()
    assert [(one.cause, one.since) for one in examined.findings if one.where != "performance"] == [("lr-jump", JUMP)]
    assert follower.digest.scalars["loss"].steps[1] > 1
    told = [(event["step"], event["what"]) for event in run_view(follower, examined)["events"]]
    assert [one for one in told if not one[1].endswith("known")][:4] == [
        (JUMP, "learning rate is set to 50× what it was"),
        (JUMP, "jump of the learning rate begins"),
        (JUMP + 1, "gradient norm leaves its usual range"),
        (JUMP + 2, "loss leaves its usual range"),
    ]
    assert not [what for _, what in told if what.startswith(("batch", "time", "step time"))]


def test_they_are_the_same_on_the_other_side_of_the_wire(long: Path) -> None:
    """P20"""
    follower = Follower(long, buckets=64, examine=True)
    follower.read_on()
    examined = follower.examined()
    back = from_line(to_line(Answer(examined, "finished", STEPS, (), True))).examined
    assert back.onsets == examined.onsets and len(back.onsets) >= 3
    assert order_of_events(back.findings, back.onsets) == order_of_events(examined.findings, examined.onsets)


def test_charts_of_a_finding_show_the_machine_only_where_it_is_about_that() -> None:
    digest = Digest()
    for step in range(100):
        more = 4.0 if step >= 50 else 1.0
        digest.take(Record(step, 0.0, {"loss": 1.0, "batch/size": more, "step_time": more, "time/data": more}))
    shown = {}
    for where in ("data", "performance"):
        (told,) = told_findings([Finding("cause", where, 50, 55)], digest)
        shown[where] = {chart["title"] for chart in told["charts"]}
    assert shown == {"data": {"loss"}, "performance": {"loss", "batch/size", "step time"}}


def event(series: str, since: int, layer: str | None = None, *, values: int = 4, factor: float = 3.0) -> Event:
    return Event(series, layer, since, None, values, 1, factor, factor)


def test_what_belongs_to_a_finding_is_of_its_layer_its_kind_and_its_time() -> None:
    known = [
        event("loss", 52),
        event("loss", 60),  # again
        event("gradient/norm", 50, "a.0.weight"),
        event("gradient/norm", 50, "a.01.weight"),  # another layer
        event("batch/std", 50, "inputs"),
        event("step_time", 51),
        event("gradient_norm", 51, values=1),  # one odd value
        event("gradient_norm", 49),  # before
    ]
    finding = Finding("dead-relu", "layer", 50, 55, layer="a.0")
    assert [(one.series, one.since) for one in onsets_of(finding, known)] == [
        ("batch/std", 50),
        ("gradient/norm", 50),
        ("loss", 52),
    ]
    assert [one.series for one in onsets_of(Finding("throughput-drop", "performance", 50, 55), known)] == ["step_time"]
    assert onsets_of(Finding("monitor-degraded", "monitor", 50, 50), known) == []


def test_a_schedule_that_changes_all_the_time_sets_nothing_anew() -> None:
    seen = Onsets()
    rates = [0.0, *(0.001 * 2**step for step in range(12)), 2.0, 2.0, 2.0, 0.2, 0.2]
    for step, rate in enumerate(rates):
        seen.see(Record(step, 0.0, {"learning_rate": rate}))
    found = seen.about([Finding("lr-jump", "lr", 0, 1)])
    assert [(one.series, one.since, one.direction) for one in found] == [("learning_rate", 16, -1)]


def test_what_is_kept_is_bounded_and_what_is_near_a_finding_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    class Noisy:
        """A doctor with something new at every step."""

        findings: tuple[Finding, ...] = ()

        past: tuple[Event, ...] = ()

        def all(self) -> list[Event]:
            return [event("loss", self.findings[0].step)]

        events = property(lambda self: self)

    monkeypatch.setattr(onsets, "_MOST", 64)
    seen, doctor = Onsets(), Noisy()
    for step in range(1000):
        doctor.findings = (Finding("lr-jump", "lr", 100, step),)
        seen.take(doctor)  # type: ignore[arg-type]
    assert len(seen._events) <= 64 and [one.since for one in seen.about(doctor.findings)] == [100]


def test_what_was_over_long_before_a_finding_is_known_is_kept() -> None:
    """A doctor forgets it in the meantime."""
    doctor, seen = Doctor({}, rules=()), Onsets()
    for step in range(1000):
        loss = math.exp(0.01 * (step % 7)) * (9.0 if 100 <= step < 110 else 1.0)
        doctor.take(Record(step, 0.0, {"loss": loss}))
        seen.take(doctor)
    assert not doctor.events.all()
    assert [(one.series, one.since) for one in seen.about([Finding("overfitting", "data", 95, 999)])] == [("loss", 100)]


def test_what_began_after_a_checkpoint_that_was_loaded_is_gone() -> None:
    seen = Onsets()
    for one in records(60, 80):
        seen.see(one)
    finding = Finding("lr-jump", "lr", 60, 61)
    assert len(seen.about([finding])) == 1
    seen.rewind(50)
    assert seen.about([finding]) == ()
