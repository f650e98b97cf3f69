"""Overfitting that goes on is told as it stands, however long ago the validation loss was lowest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from holter.diagnosis.causes import targets
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding
from holter.record import Record
from holter.series import Series

Course = Callable[[int], float]


def falling(step: int) -> float:
    return 2.0 * 0.998**step


def findings(validation: Course, training: Course = falling, *, steps: int, every: int = 20) -> tuple[Finding, ...]:
    random = np.random.default_rng(0)
    doctor = Doctor({}, targets.RULES)
    for step in range(steps):
        scalars = {"loss": training(step) * (1 + 0.02 * random.normal())}
        if step % every == every - 1:
            scalars["val_loss"] = validation(step) * (1 + 0.005 * random.normal())
        doctor.take(Record(step, 0.0, scalars))
    doctor.finish()
    assert not [one for one in doctor.findings if one.where == "monitor"], doctor.findings
    return doctor.findings


def turning(step: int) -> float:
    """Lowest at step 399, where it is 0.5; twice that at step 2,400."""
    return 0.5 + (0.002 * (399 - step) if step < 399 else 0.00025 * (step - 399))


def test_a_rise_that_goes_on_is_told_as_it_stands() -> None:
    """By then a chart has long forgotten what the training lost at the turn."""
    (found,) = findings(turning, steps=2400)
    assert found.cause == "overfitting" and found.until is None and abs(found.since - 399) <= 40
    assert found.evidence["lowest"] == pytest.approx(0.5, rel=0.03)
    assert found.evidence["now"] == pytest.approx(1.0, rel=0.03)
    assert found.evidence["training_then"] == pytest.approx(falling(399), rel=0.1)
    assert "has risen by 9" in found.advice or "has risen by 10" in found.advice


def test_the_lowest_is_the_very_lowest_whose_checkpoint_is_to_be_kept() -> None:
    """A lucky value between others is no turn, but no checkpoint is better."""
    (found,) = findings(lambda step: 0.45 if step == 499 else turning(step), steps=1600)
    assert found.since == 499 and "lowest at step 499 (0.4" in found.advice


def test_validations_far_apart_are_enough() -> None:
    """Those of an epoch: three of them are more steps than a chart keeps."""
    (found,) = findings(turning, steps=3000, every=400)
    assert found.cause == "overfitting" and found.since == 399


def recovering(level: float) -> Course:
    """The loss is so low again for a while, and nothing is said; then it rises for good."""
    return lambda step: level if 900 <= step < 1500 else turning(step)


def test_what_comes_back_is_the_same_incident_again() -> None:
    (early,) = findings(recovering(0.53), steps=1500)
    (late,) = findings(recovering(0.53), steps=2400)
    assert early.until is not None and late.until is None
    assert early.step == late.step and late.evidence["now"] == pytest.approx(1.0, rel=0.03)


def test_a_rise_from_a_new_lowest_is_an_incident_of_its_own() -> None:
    first, second = findings(recovering(0.4), steps=2400)
    assert first.until is not None and 900 <= second.since < 1500 and second.until is None
    assert second.evidence["lowest"] == pytest.approx(0.4, rel=0.03)


@pytest.mark.parametrize("every", [2, 3])
def test_the_lowest_of_very_many_validations_is_remembered(every: int) -> None:
    (found,) = findings(turning, steps=2400, every=every)
    assert abs(found.since - 399) <= 60 and found.evidence["lowest"] == pytest.approx(0.5, rel=0.03)


def test_a_training_that_was_thrown_back_has_learnt_nothing_by_heart() -> None:
    """Both losses jump, and stay: long after, the training loss is still above what it was at the lowest."""

    def thrown_back(step: int) -> float:
        return falling(step) if step < 600 else 1.4

    found = findings(lambda step: 0.5 + 0.5 * thrown_back(step), thrown_back, steps=1800)
    assert "overfitting" not in [one.cause for one in found]


def test_looks_after_a_checkpoint_that_was_loaded_are_no_longer_counted() -> None:
    looks, series, training = targets._Looks(), Series(("val_loss",)), Series(("loss",))
    for step in (10, 20, 30, 40, 20, 30):
        training.add(step, 1.0)
        series.add(step, float(step))
        looks.take(series, training)
    assert [look.step for look in looks.found] == [10, 20, 30]
