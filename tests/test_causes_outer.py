"""The outer limits: what no rule explains is told all the same, and only then."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from holter.cli import main
from holter.diagnosis.causes import RULES, outer
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding
from holter.diagnosis.thresholds import Thresholds, listed
from holter.record import Record

STEPS, ONSET = 120, 60


def findings(losses: list[float], rules: object = RULES, limits: Thresholds | None = None) -> tuple[Finding, ...]:
    doctor = Doctor({}, rules, limits)  # type: ignore[arg-type]
    for step, loss in enumerate(losses):
        doctor.take(Record(step, float(step), {"loss": loss, "gradient_norm": 1.0 + 0.1 * np.sin(step)}))
    doctor.finish()
    return doctor.findings


def losses(factor: float) -> list[float]:
    random = np.random.default_rng(0)
    usual = 2.0 + 0.05 * random.standard_normal(STEPS)
    usual[ONSET:] *= factor
    return [float(loss) for loss in usual]


def test_a_loss_far_above_itself_is_unknown_where_nothing_explains_it() -> None:
    (found,) = findings(losses(37.0))
    assert (found.cause, found.since, found.severity) == ("unknown", ONSET, "warning")
    assert "step 60" in found.advice and found.evidence["times"] == pytest.approx(37, rel=0.1)


def test_what_stays_within_the_limits_is_left_alone() -> None:
    assert findings(losses(5.3)) == ()
    assert findings(losses(5.3), limits=Thresholds(loss_spike=4.0))[0].cause == "unknown"


def test_a_loss_that_is_lost_for_good_is_critical_and_a_single_one_is_nothing() -> None:
    lost = losses(1.0)
    lost[ONSET:] = [float("nan")] * (STEPS - ONSET)
    (found,) = findings(lost)
    assert (found.cause, found.since, found.severity) == ("unknown", ONSET, "critical")
    once = losses(1.0)
    once[ONSET] = float("inf")
    assert findings(once, outer.RULES) == ()


def test_a_known_cause_stands_before_the_unknown_and_does_not_name_it() -> None:
    doctor = Doctor({})
    for step, loss in enumerate(losses(37.0)):
        rate = 0.1 if step < ONSET else 10.0
        doctor.take(Record(step, float(step), {"loss": loss, "learning_rate": rate, "gradient_norm": 1.0}))
    doctor.finish()
    (found,) = doctor.findings
    assert found.cause == "lr-jump" and "unknown" not in found.alternatives


def test_the_command_shows_every_limit() -> None:
    printed = CliRunner().invoke(main, ["thresholds"]).output
    told = json.loads(CliRunner().invoke(main, ["thresholds", "--json"]).output)
    names = [name for name, *_ in listed(Thresholds())]
    assert len(names) >= 20 and all(name in printed for name in names)
    assert {line["name"]: line["value"] for line in told}["critical_norm"] == 1000.0
    assert all(line["means"] and line["requirement"] for line in told)


def test_a_norm_far_above_itself_is_told_only_beyond_the_critical_one() -> None:
    def found(size: float) -> list[tuple[str, str]]:
        doctor = Doctor({}, outer.RULES)
        for step in range(STEPS):
            norm = (1.0 if step < ONSET else size) * (1 + 0.05 * np.sin(step))
            doctor.take(Record(step, float(step), {"loss": 2.0, "gradient_norm": norm}))
        doctor.finish()
        return [(one.cause, str(one.evidence["series"])) for one in doctor.findings]

    assert found(5000.0) == [("unknown", "gradient_norm")]
    assert found(50.0) == [], "the loss does not mind"


def test_a_loss_that_crosses_zero_has_not_grown() -> None:
    """Of a critic or a likelihood: on a log scale twelve positive losses after negative ones would be endless."""
    values = [-1.0 + 0.01 * np.sin(step) if step < ONSET else 1.0 for step in range(STEPS)]
    assert findings([float(value) for value in values]) == ()
