"""The causes, a file a family: functions from a case to suspicions."""

from __future__ import annotations

from holter.diagnosis.causes import (
    data,
    depth,
    divergence,
    growth,
    loop,
    losses,
    optimizers,
    outer,
    performance,
    precision,
    rates,
    targets,
    units,
    unwritten,
    wiring,
)
from holter.diagnosis.suspicion import Rule

RULES: tuple[Rule, ...] = (
    *rates.RULES,
    *optimizers.RULES,
    *loop.RULES,
    *divergence.RULES,
    *depth.RULES,
    *units.RULES,
    *wiring.RULES,
    *unwritten.RULES,
    *growth.RULES,
    *data.RULES,
    *targets.RULES,
    *losses.RULES,
    *precision.RULES,
    *performance.RULES,
    *outer.RULES,
)
