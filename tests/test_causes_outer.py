"""The outer limits: what no rule explains is told all the same, and only then."""

from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from holter.cli import main
from holter.diagnosis.causes import RULES, optimizers, outer
from holter.diagnosis.chart import Chart, Moment
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding
from holter.diagnosis.thresholds import Thresholds, listed
from holter.record import Record
from tests.odd_histories import rows_of

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


@pytest.mark.parametrize(("pace", "told"), [(1, ""), (7, "it was not measured"), (0, "it was not logged")])
def test_a_batch_that_nobody_looked_at_is_told_where_the_loss_is_lost(pace: int, told: str) -> None:
    doctor, random = Doctor({}), np.random.default_rng(0)
    for step in range(STEPS):
        rows = rows_of({"inputs": random.standard_normal(8)})
        loss = float("nan") if step >= ONSET else 2.0 + 0.05 * float(random.standard_normal())
        is_seen = pace and step % pace == 0
        doctor.take(Record(step, float(step), {"loss": loss}, {"batch": rows} if is_seen else {}))
    doctor.finish()
    (found,) = doctor.findings
    assert found.cause == "unknown"
    assert (f"The batch of step {ONSET} may have held NaN" in found.advice) == bool(told) and told in found.advice


@pytest.mark.parametrize("seen", [0, 1])
def test_a_later_micro_batch_that_nobody_looked_at_is_told_too(seen: int) -> None:
    doctor = Doctor({})
    for step, loss in enumerate(losses(1.0)):
        scalars = {"loss": loss if step < ONSET else float("nan")}
        scalars |= {"batch/nonfinite": 0.0} if seen or step < ONSET else {}
        doctor.take(Record(step, float(step), scalars, {"batch": rows_of({"inputs": [1.0, float(step)]})}))
    doctor.finish()
    (found,) = doctor.findings
    assert (f"A later micro-batch of step {ONSET} may have held NaN" in found.advice) == (not seen)


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


@pytest.mark.parametrize(("back", "severity"), [(1.0, "info"), (6.0, "warning")])
def test_a_loss_that_comes_back_to_where_it_was_is_a_note(back: float, severity: str) -> None:
    """As of a codebook: it climbs for a while, and falls below where it had begun to climb."""
    hump = np.concatenate(
        [np.full(40, 1.0), np.geomspace(5.0, 15.0, 8), np.full(16, 15.0), np.geomspace(15.0, back, 30)]
    )
    values = np.concatenate([hump, np.full(60, back)]) * (1 + 0.01 * np.sin(np.arange(154)))
    (found,) = findings([float(value) for value in values], outer.RULES)
    assert (found.cause, found.severity) == ("unknown", severity)


# Norms that leap ------------------------------------------------------------------------------------------------------


def unclipped(usual: tuple[float, float], leap: float, lost: float, has_loss: bool = True) -> list[str]:
    """Causes named where losses fall from 2.3 to the first number while norms go from 0.3 to the second; from step 100
    on every 30th norm is so many times the usual one, and the loss lies so much higher for the eight steps after it."""
    doctor, random = Doctor({}, [optimizers.no_clip]), np.random.default_rng(0)
    for step in range(240):
        part, since = min(1.0, step / 60), (step - 100) % 30 if step >= 100 else 99
        loss = 2.3 * (usual[0] / 2.3) ** part * (1 + 0.02 * random.standard_normal()) + (lost if 0 < since < 9 else 0)
        norm = 0.3 * (usual[1] / 0.3) ** part * (1 + 0.1 * random.random()) * (leap if since == 0 else 1)
        doctor.take(Record(step, float(step), {"gradient_norm": norm} | ({"loss": loss} if has_loss else {})))
    doctor.finish()
    return [one.cause for one in doctor.findings]


def test_norms_that_leap_are_the_clips_where_the_loss_gives_back_what_it_had_gained() -> None:
    assert unclipped((0.8, 0.3), leap=40.0, lost=0.7) == ["clipping-missing"]
    assert unclipped((0.8, 0.3), leap=40.0, lost=0.0) == [], "the loss does not mind"
    assert unclipped((6e-4, 3e-3), leap=200.0, lost=0.03) == [], "nearly all is learnt, and stays so"


def test_norms_that_leap_without_a_loss_are_measured_by_the_first_ones() -> None:
    assert unclipped((0.8, 0.3), leap=40.0, lost=0.0, has_loss=False) == ["clipping-missing"]
    assert unclipped((0.8, 3e-3), leap=200.0, lost=0.0, has_loss=False) == []


@pytest.mark.parametrize(
    ("lost", "lasts", "norm_after", "named"),
    [
        (1.5, 120, 1.0, True),  # nothing is left of what was learnt, and gradients are as long as before
        (1.5, 10, 1.0, True),
        (0.7, 120, 1.0, False),  # one such step is not enough where half is left
        (1.5, 120, 30.0, False),  # gradients stay long: it runs away
        (1.5, 120, 1e-3, False),  # or die
    ],
)
def test_one_norm_that_leaps_is_the_clips_where_it_alone_undoes_the_training(
    lost: float, lasts: int, norm_after: float, named: bool
) -> None:
    doctor, random = Doctor({}, [optimizers.no_clip]), np.random.default_rng(0)
    for step in range(240):
        part = min(1.0, step / 60)
        loss = 2.3 * (0.8 / 2.3) ** part * (1 + 0.02 * random.standard_normal()) + (
            lost if 0 < step - 120 <= lasts else 0
        )
        norm = 0.5 * (1 + 0.1 * random.random()) * (60.0 if step == 120 else norm_after if step > 120 else 1.0)
        doctor.take(Record(step, float(step), {"gradient_norm": norm, "loss": loss}))
    doctor.finish()
    assert [(one.cause, one.since) for one in doctor.findings] == ([("clipping-missing", 120)] if named else [])


def test_how_much_of_its_gain_a_loss_gives_back() -> None:
    chart = Chart({})
    for step, loss in enumerate([2.0] * 5 + [1.0] * 20 + [1.5] * 8):
        chart.add(Moment(step, scalars={"loss": loss}))
    assert optimizers.given_back(chart, 24) == pytest.approx(0.5)
    assert np.isnan(optimizers.given_back(chart, 30)), "that is too early to say"
