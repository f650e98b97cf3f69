"""The tables of the zoo, in Markdown: for the terminal and for docs/zoo.md. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from zoo.judging import TOLERANCE, Planted, Row, incidents, share_named

LEAST_NAMED = 0.8  # of planted faults
_LOSSES = ("first loss", "last loss")

_INTRO = """# The zoo

Trainings through packages that Holter's authors did not write, made by `make zoo`. Each is trained twice with one seed,
bare and watched with the default options, in processes of its own. All are meant to be healthy: a warning is a false
alarm. Into some of them faults are then planted, which Holter is to name.
"""
_HEALTHY = """## Healthy trainings

A training passes if every column is right.

| column | what it says | right if |
|---|---|---|
| training | package/what is trained | |
| attached | by which call Holter was attached | any |
| steps | training steps; if they differ: by its author, by torch's own hooks, by Holter | one number |
| weights | every parameter and buffer after the last step, bit by bit, beside those of the bare run | equal |
| norm error | the largest relative difference of a gradient norm to torch's in float64 | {tolerance:.0e} or less |
| norms in | the share of steps in which a norm was recorded: the budget decides | more than none |
| first loss, last loss | the means of the first and of the last tenth, as Holter recorded them; - where none was | |
| findings | what Holter found wrong, **bold**: a false alarm; notes are of no concern | none, or notes |
| slowdown | seconds watched over seconds bare, after the first step; once, on a busy machine: a hint | |
"""
_PLANTED = """## Planted faults

Each fault is planted as people make it through that package. Holter's answer is its first warning or critical finding.

| column | what it says |
|---|---|
| training, fault | what was planted, and into which training |
| right answers | the causes that are right |
| Holter's answer | the cause that it found, and where; - where it found nothing |
| named | whether that cause is right |
| among three | whether it, or one of the first two alternatives beside it, is right |
| place | whether the layer is right too, where the fault is in one |
"""


def document(rows: Sequence[Row], planted: Sequence[Planted]) -> str:
    healthy = _HEALTHY.format(tolerance=TOLERANCE)
    parts = [_INTRO, "\n".join(f"- {line}" for line in _counts(rows, planted)), "", healthy, healthy_table(rows)]
    if planted:
        parts += [_PLANTED, planted_table(planted)]
    return "\n".join(parts)


def failures(rows: Sequence[Row], planted: Sequence[Planted]) -> list[str]:
    """Return what makes the command fail, in sentences."""
    found = [f"{row.name}: {fault}" for row in rows for fault in row.faults]
    found += [f"{one.name} with {one.fault}: {one.error}" for one in planted if one.error]
    if planted and not share_named(planted) >= LEAST_NAMED:
        found.append(f"{_percent(share_named(planted))} of the planted faults are named, less than {LEAST_NAMED:.0%}")
    return found


def summary(rows: Sequence[Row], planted: Sequence[Planted]) -> str:
    return f"{'; '.join(_counts(rows, planted))}."


def _counts(rows: Sequence[Row], planted: Sequence[Planted]) -> list[str]:
    """What came of it, in few numbers."""
    passed, alarms = sum(not row.faults for row in rows), sum(len(incidents(row.findings)) for row in rows)
    found = [
        f"{passed} of {len(rows)} trainings pass",
        f"{sum(row.is_equal for row in rows)} of {len(rows)} bit-equal to the bare run",
        f"norms of {sum(row.norm_error <= TOLERANCE for row in rows)} of {len(rows)} within {TOLERANCE:.0e} of torch's",
        f"{alarms} false alarm{'s' * (alarms != 1)}",
    ]
    if planted:
        named, among = sum(one.is_named for one in planted), sum(one.is_among_three for one in planted)
        missed = sum(one.answer is None for one in planted)
        found.append(
            f"{named} of {len(planted)} planted faults named, {among} among three answers, {missed} not noticed"
        )
    return found


def healthy_table(rows: Iterable[Row]) -> str:
    head = ("training", "attached", "steps", "weights", "norm error", "norms in", *_LOSSES, "findings", "slowdown")
    return _table(head, [_healthy_line(row) for row in rows])


def _healthy_line(row: Row) -> tuple[str, ...]:
    if row.recorded == row.counted == 0:
        return (row.name, *["-"] * 7, _cell("; ".join(row.faults)), "-")
    same = row.recorded == row.counted == row.steps
    steps = str(row.steps) if same else f"{row.steps}, {row.counted}, {row.recorded}"
    words = [f"**{one.severity}: {one.cause}**" for one in incidents(row.findings)]
    notes = len(row.findings) - len(words)
    words += [f"{notes} note{'s' * (notes > 1)}"] * (notes > 0)
    losses = ["-" if math.isnan(loss) else f"{loss:.3g}" for loss in row.losses]
    weights = "equal" if row.is_equal else "**differ**"
    error = "-" if math.isnan(row.norm_error) else f"{row.norm_error:.0e}"
    findings, slowdown = _cell(", ".join(words) or "none"), "-" if math.isnan(row.slowdown) else f"{row.slowdown:.2f}"
    return (row.name, row.attached, steps, weights, error, _percent(row.measured), *losses, findings, slowdown)


def planted_table(planted: Iterable[Planted]) -> str:
    head = ("training", "fault", "right answers", "Holter's answer", "named", "among three", "place")
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
