"""All cases of the clinic."""

from __future__ import annotations

from functools import cache

from holter.clinic.case import Case
from holter.clinic.controls import CONTROLS
from holter.clinic.faults import data, growth, initial, layer, loop, loss, lr, optimizer, performance, precision
from holter.clinic.plan import cases_of, control_cases

ILLNESSES = (
    *lr.ILLNESSES,
    *optimizer.ILLNESSES,
    *loop.ILLNESSES,
    *loss.ILLNESSES,
    *initial.ILLNESSES,
    *layer.ILLNESSES,
    *growth.ILLNESSES,
    *data.ILLNESSES,
    *precision.ILLNESSES,
    *performance.ILLNESSES,
)


@cache
def all_cases() -> tuple[Case, ...]:
    return (*cases_of(ILLNESSES), *control_cases(CONTROLS))
