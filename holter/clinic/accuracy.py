"""The score as tables: for the terminal, and as Markdown for docs/accuracy.md."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.table import Table

from holter.clinic.score import NOTHING, Outcome, Score, by_cause, confusion, incidents, score

_INTRO = """# Accuracy

Made by `holter clinic score --split {split} --into docs/accuracy.md`: {sick} sick trainings and {steps:,} steps of
healthy ones (the twins of the sick, and {controls} kinds of training that only look frightening). Every cause of the
catalogue is a real training with a fault at a known step and place, on several architectures and optimizers
(`holter clinic show`). Development and held-out cases differ in seeds, widths, depths, batch sizes, rates and onsets.

An *incident* is a finding of severity warning or critical. Recall: sick runs with an incident at or after the onset of
the fault. Precision: incidents that are about a real fault. Top 1, top 3: the first such incident names the cause, or
has it among its first two alternatives. Location: it names the place, and the layer where there is one. Onset error,
delay (of faults that show at once) and lead (of slow faults: before the loss is worse than the twin's) are medians, in
steps. The rules of others are re-implemented from their published thresholds; `unnamed` is a rule that names no cause.

What flatters: every step was measured (`budget=None`), losses, inputs and targets were logged, the plan was known, and
the trainings have a few hundred steps. The first incident of a sick run counts for precision whatever it names, and
what was missed has no delay; the lead of a slow fault that never hurt the loss is the rest of the run.
"""


@dataclass(frozen=True)
class Sheet:
    """A table before it is drawn: the first column is words, the others numbers."""

    title: str
    head: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


def sheets(outcomes: Mapping[str, Sequence[Outcome]]) -> list[Sheet]:
    """All of what is to be told; the first judge in detail, the others beside it."""
    first = next(iter(outcomes.values()))
    return [_judges(outcomes), _causes(first), _confusions(first), _false(first)]


def _judges(outcomes: Mapping[str, Sequence[Outcome]]) -> Sheet:
    head = (
        "",
        *("recall", "precision", "top 1", "top 3", "location", "onset error", "delay", "lead"),
        *("false / 1,000", "silent controls"),
    )
    return Sheet("All judges", head, tuple((name, *_figures(score(found))) for name, found in outcomes.items()))


def _figures(of: Score) -> tuple[str, ...]:
    shares = (of.recall, of.precision, of.top1, of.top3, of.location)
    steps = (of.onset_error, of.delay, of.lead)
    return (
        *map(_share, shares),
        *map(_number, steps),
        _number(of.false_per_thousand, 2),
        f"{of.silent_controls}/{of.controls}",
    )


def _causes(outcomes: Sequence[Outcome]) -> Sheet:
    head = ("cause", "runs", "recall", "top 1", "top 3", "location", "onset error", "delay", "lead")
    lines = [
        (
            cause,
            str(of.sick),
            *map(_share, (of.recall, of.top1, of.top3, of.location)),
            *map(_number, (of.onset_error, of.delay, of.lead)),
        )
        for cause, of in by_cause(outcomes).items()
    ]
    return Sheet("By cause", head, tuple(lines))


def _confusions(outcomes: Sequence[Outcome]) -> Sheet:
    """The matrix without its diagonal and its zeros, which are nearly all of it."""
    wrong = [(true, told, count) for (true, told), count in confusion(outcomes).most_common() if true != told]
    lines = tuple((true, "no answer" if told == NOTHING else told, str(count)) for true, told, count in wrong)
    return Sheet("What was taken for what", ("cause", "answer", "runs"), lines)


def _false(outcomes: Sequence[Outcome]) -> Sheet:
    lines = [
        (one.case.id, finding.cause, f"{finding.since}", finding.severity)
        for one in outcomes
        if one.case.cause is None
        for finding in incidents(one.findings)
    ]
    return Sheet("Incidents in healthy runs", ("run", "cause", "since", "severity"), tuple(lines))


def as_rich(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, name in enumerate(sheet.head):
        table.add_column(name, justify="left" if place == 0 else "right", overflow="fold")
    for line in sheet.lines:
        table.add_row(*line)
    return table


def as_markdown(sheet: Sheet) -> str:
    if not sheet.lines:
        return f"## {sheet.title}\n\nNone.\n"
    rule = "|".join(["---"] + ["---:"] * (len(sheet.head) - 1))
    rows = [f"| {' | '.join(line)} |" for line in (sheet.head, *sheet.lines)]
    return "\n".join([f"## {sheet.title}", "", rows[0], f"|{rule}|", *rows[1:], ""])


def document(outcomes: Mapping[str, Sequence[Outcome]], split: str) -> str:
    first = score(next(iter(outcomes.values())))
    intro = _INTRO.format(split=split, sick=first.sick, steps=first.healthy_steps, controls=first.controls)
    return "\n".join([intro, *map(as_markdown, sheets(outcomes))])


def _share(value: float) -> str:
    return "-" if math.isnan(value) else f"{100 * value:.0f} %"


def _number(value: float, digits: int = 0) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"
