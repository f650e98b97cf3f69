"""The tables of the zoo, in Markdown: for the terminal and for docs/zoo.md. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from zoo.judging import TOLERANCE, Planted, Row, incidents, share_named

LEAST_NAMED = 0.8  # of planted faults

_INTRO = """# The zoo

Made by `make zoo`: {count} trainings through packages that Holter's authors did not write. Each is trained twice with
one seed, bare and watched with the default options, in processes of its own. All are meant to be healthy: a warning
is a false alarm.

- Steps: one number where its author, torch's own hooks and Holter count the same; else all three.
- Weights: whether every parameter and buffer has the same bits as in the bare run.
- Norms: the largest relative difference to torch's in float64, and the share of steps in which one was recorded (the
  budget decides).
- Loss: the means of the first and of the last tenth, as Holter recorded it.
- Slowdown: watched over bare, from the end of the first step to that of the last: one reading. Trainings of seconds
  show what Holter spends in advance.
"""
_PLANTED = """Each fault is planted as people make it through that package. The answer is the first warning or critical
finding. Named: its cause is right; of three: its cause or one of its first two alternatives is.
"""


def document(rows: Sequence[Row], planted: Sequence[Planted]) -> str:
    parts = [_INTRO.format(count=len(rows)), healthy_table(rows), summary(rows, planted) + "\n"]
    if planted:
        parts += ["## Planted faults\n", _PLANTED, planted_table(planted)]
    return "\n".join(parts)


def failures(rows: Sequence[Row], planted: Sequence[Planted]) -> list[str]:
    """Return what makes the command fail, in sentences."""
    found = [f"{row.name}: {fault}" for row in rows for fault in row.faults]
    found += [f"{one.name} with {one.fault}: {one.error}" for one in planted if one.error]
    if planted and not share_named(planted) >= LEAST_NAMED:
        found.append(f"{_percent(share_named(planted))} of the planted faults are named, less than {LEAST_NAMED:.0%}")
    return found


def summary(rows: Sequence[Row], planted: Sequence[Planted]) -> str:
    healthy, equal = sum(not row.faults for row in rows), sum(row.is_equal for row in rows)
    exact = sum(row.norm_error <= TOLERANCE for row in rows)
    words = f"{healthy} of {len(rows)} trainings pass; {equal} bit-equal; norms of {exact} within {TOLERANCE:.0e}"
    if planted:
        among = sum(one.is_among_three for one in planted)
        seen = sum(one.answer is not None for one in planted)
        words += f"; of {len(planted)} planted faults {seen} are noticed, {sum(one.is_named for one in planted)} named"
        words += f", {among} of three"
    return f"{words}."


def healthy_table(rows: Iterable[Row]) -> str:
    head = ("training", "steps", "weights", "norms", "loss", "findings", "slowdown")
    return _table(head, [_healthy_line(row) for row in rows])


def _healthy_line(row: Row) -> tuple[str, ...]:
    if row.recorded == row.counted == 0:
        return (row.name, "-", "-", "-", "-", _cell("; ".join(row.faults)), "-")
    same = row.recorded == row.counted == row.steps
    steps = str(row.steps) if same else f"{row.steps}, {row.counted}, {row.recorded}"
    norms = f"{row.norm_error:.0e} in {_percent(row.measured)}"
    words = [f"**{one.severity}: {one.cause}**" for one in incidents(row.findings)]
    notes = len(row.findings) - len(words)
    words += [f"{notes} notes"] * (notes > 0)
    loss = "-" if math.isnan(row.losses[0]) else f"{row.losses[0]:.3g} to {row.losses[1]:.3g}"
    weights = "equal" if row.is_equal else "**differ**"
    return (row.name, steps, weights, norms, loss, _cell(", ".join(words) or "none"), _times(row.slowdown))


def planted_table(planted: Iterable[Planted]) -> str:
    head = ("training", "fault", "right", "answer", "named", "of three", "place")
    lines = []
    for one in planted:
        answer = "-" if one.answer is None else f"{one.answer.cause} in {one.answer.layer or one.answer.where}"
        marks = ["yes" if mark else "**no**" for mark in (one.is_named, one.is_among_three, one.is_placed)]
        lines.append((one.name, one.fault, ", ".join(one.causes), _cell(one.error or answer), *marks))
    return _table(head, lines)


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *rows, ""])


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.0f} %"


def _times(ratio: float) -> str:
    return "-" if math.isnan(ratio) else f"{ratio:.2f}"
