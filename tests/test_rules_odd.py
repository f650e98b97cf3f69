"""No rule raises, whatever is recorded: a monitor that is degraded says so because of itself, never of the data."""

from __future__ import annotations

import numpy as np
import pytest

from holter.diagnosis.causes import RULES
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.suspicion import Case
from holter.record import Record
from tests.odd_histories import EXTRAS, ODD, SCALARS, Oddity, rows_of

KINDS = {
    "usual": Oddity(1),
    "constant": Oddity(2, constant=True, missing=0.0),
    "a single step": Oddity(3, steps=1, missing=0.0),
    "two steps": Oddity(4, steps=2, missing=0.0),
    "mostly odd": Oddity(5, wild=0.6),
    "all odd": Oddity(6, wild=1.0, missing=0.0, steps=40),
    "mostly missing": Oddity(7, missing=0.7),
    "one layer": Oddity(8, layers=1),
    "no layer": Oddity(9, layers=0),
    "resumed and with gaps": Oddity(10, jumps=True),
    "no scalars": Oddity(11, scalars=()),
    "no roles": Oddity(12, roles=()),
    "long": Oddity(13, steps=560, layers=1, wild=0.01, missing=0.01),
}


def failures(oddity: Oddity) -> list[str]:
    """What every rule raises when it is asked at each of these steps."""
    doctor = Doctor(oddity.info())
    found: list[str] = []
    for record in oddity.records():
        doctor.take(record)
        for rule in RULES:
            try:
                with np.errstate(all="ignore"):
                    list(rule(Case(doctor.chart, doctor.events)))
            except Exception as error:
                found.append(f"{rule.__module__}.{rule.__name__} at {record.step}: {error!r}")  # type: ignore[attr-defined]
    doctor.finish()
    degraded = [str(dict(one.evidence)) for one in doctor.findings if one.cause == "monitor-degraded"]
    return found[:3] + degraded


@pytest.mark.parametrize("kind", KINDS)
def test_no_rule_raises(kind: str) -> None:
    assert failures(KINDS[kind]) == []


@pytest.mark.parametrize("role", EXTRAS)
def test_nor_where_one_role_is_alone(role: str) -> None:
    assert failures(Oddity(3, roles=(role,), steps=30)) == []


def test_nor_of_losses_that_are_always_the_same_odd_number() -> None:
    for odd in ODD:
        doctor = Doctor({})
        for step in range(40):
            doctor.take(Record(step, float(step), dict.fromkeys(SCALARS, odd)))
        doctor.finish()
        assert not any(found.cause == "monitor-degraded" for found in doctor.findings)


def test_nor_of_tensors_without_values() -> None:
    doctor = Doctor({"layers": [{"name": "a.weight", "shape": [0, 3]}]})
    for step in range(40):
        empty = {role: rows_of({"a.weight": []}) for role in EXTRAS}
        doctor.take(Record(step, float(step), {"loss": 1.0}, empty))
    doctor.finish()
    assert not any(found.cause == "monitor-degraded" for found in doctor.findings)
