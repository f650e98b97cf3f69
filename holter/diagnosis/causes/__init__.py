"""The causes, a file a family: functions from a case to suspicions."""

from __future__ import annotations

from holter.diagnosis.causes import depth, growth, loop, optimizers, rates, units, wiring
from holter.diagnosis.suspicion import Rule

RULES: tuple[Rule, ...] = (
    *rates.RULES,
    *optimizers.RULES,
    *loop.RULES,
    *depth.RULES,
    *units.RULES,
    *wiring.RULES,
    *growth.RULES,
)
