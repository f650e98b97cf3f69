"""The demonstration with a fault: a training gets sick, is diagnosed while it runs, and is run again as advised.

The trainings are the clinic's: small and real, with a fault at a known step. So the demo can say whether the diagnosis
is right, and whether the advice helped.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from holter.clinic.case import CAUSES, Case
from holter.clinic.cases import all_cases
from holter.clinic.score import EARLY, incidents, is_placed, right_causes
from holter.clinic.training import train
from holter.demo_bedside import Bedside, print_finding, steps_on
from holter.demo_comparison import Course, course_of, judge, lines
from holter.demo_remedies import Remedy, remedy_for, told
from holter.demo_words import TOLD
from holter.diagnosis.finding import Finding
from holter.run import open_run

_KINDS = {
    "mlp": "An MLP",
    "tanh": "A deep network of tanh layers",
    "convnet": "A convolutional network",
    "lstm": "An LSTM",
    "transformer": "A transformer on bytes of Python",
    "patches": "A vision transformer",
    "residual": "A residual network",
}

Remark = Callable[[Finding], str]


def choose(cause: str, on: str | None = None) -> tuple[Case, Case]:
    """The first case of a cause, on this architecture where one is named, and its twin. ValueError where none is."""
    cases = {case.id: case for case in all_cases() if case.split == "development"}
    sick = [case for case in cases.values() if case.cause == cause]
    if not sick:
        raise ValueError(f"there is no fault {cause!r}: the faults are {', '.join(CAUSES)}")
    chosen = next((case for case in sick if on in (None, case.architecture)), None)
    if chosen is None:
        there = ", ".join(dict.fromkeys(case.architecture for case in sick))
        raise ValueError(f"{cause} is not shown on {on!r}: it is on {there}")
    return _validated(chosen), _validated(cases[str(chosen.twin)])


def _validated(case: Case) -> Case:
    """Judged at its end, too, on data that it has not seen: the loss that is trained on may be part of the fault."""
    recipe = case.recipe
    return case if recipe.validate else replace(case, recipe=replace(recipe, validate=recipe.steps))


def show_fault(console: Console, sick: Case, twin: Case, run: Path, run_fixed: Path) -> bool:
    """Trains both into these directories, and tells; returns whether the fix worked."""
    console.print(Text(introduction(sick, twin)))
    findings = _train(console, sick, run, partial(remark_on, sick))
    right = next((one for one in incidents(findings) if is_found(sick, one)), None)
    if right is None:
        console.print(Text(missed(sick, findings), "yellow"))
    remedy = remedy_for(sick, twin, right)
    console.print(Text(_announcement(remedy, right is not None), "bold"))
    after = _train(console, remedy.case, run_fixed, lambda finding: "(in the second training)")
    courses = _course(run, findings, sick.onset), _course(run_fixed, after, sick.onset)
    worked = _compare(console, sick, courses)
    for directory in (run, run_fixed):
        console.print(Text(f"holter show {shlex.quote(str(directory))}", "dim"), soft_wrap=True)
    return worked


def introduction(sick: Case, twin: Case) -> str:
    """What is trained, what will be broken, and when."""
    recipe = sick.recipe
    when = f"At step {sick.onset}" if sick.onset else "From the first step on"
    fault = told(sick, twin, TOLD[str(sick.cause)].fault)
    kind = _KINDS.get(recipe.architecture, recipe.architecture)
    return f"{kind} is trained with {recipe.optimizer} for {recipe.steps} steps. {when} {fault} ({sick.cause})."


def remark_on(sick: Case, finding: Finding) -> str:
    """Whether a finding is right: only the one who planted the fault can say."""
    if finding.step < sick.onset:
        return f"A false alarm: nothing is planted before step {sick.onset}."
    if is_found(sick, finding):
        alike = "" if finding.cause == sick.cause else f" ({sick.cause}: the evidence cannot tell the two apart)"
        place = "" if is_placed(sick, finding) else f", though in {' or '.join(sick.layers[:3]) or sick.where}"
        early = ", and is dated too early" if finding.since < sick.onset - EARLY else ""
        return f"That is what was planted{alike} at step {sick.onset}{place}{early}."
    planted = f"{sick.cause} at step {sick.onset}"
    if sick.cause in finding.alternatives:
        return f"That is not what was planted: {planted} is only among its alternatives."
    return f"That is not what was planted: it was {planted}."


def is_found(sick: Case, finding: Finding) -> bool:
    return finding.cause in right_causes(sick) and finding.step >= sick.onset


def missed(sick: Case, findings: Sequence[Finding]) -> str:
    named = ", ".join(dict.fromkeys(finding.cause for finding in incidents(findings)))
    found = f"it found {named} instead" if named else "it found nothing"
    return f"The diagnosis missed what was planted, {sick.cause} at step {sick.onset}: {found}."


def _announcement(remedy: Remedy, has_advice: bool) -> str:
    if not has_advice:
        return f"\nThere is no advice to follow. The same training without the fault: {remedy.words}."
    without = " (the same training without the fault)" if remedy.removes_fault else ""
    return f"\nNow with the advice followed: {remedy.words}{without}."


def _train(console: Console, case: Case, run: Path, remark: Remark) -> tuple[Finding, ...]:
    with steps_on(console, case.recipe.steps) as on_step:
        bedside = Bedside(run, on_step, lambda finding, when: print_finding(console, finding, when, remark(finding)))
        train(case, run, sinks=(bedside,))
        return bedside.finish()


def _course(run: Path, findings: Sequence[Finding], onset: int) -> Course:
    return course_of(open_run(run).history, incidents(findings), onset)


def _compare(console: Console, sick: Case, courses: tuple[Course, Course]) -> bool:
    cause = str(sick.cause)
    table = Table("", "with the fault", "fixed", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for line in lines(cause, *courses):
        table.add_row(*line)
    verdict = judge(cause, *courses, right=sick.also_right)
    console.print(Group("", table, ""))
    console.print(Text(verdict.sentence, "bold green" if verdict.worked else "bold yellow"))
    console.print()
    return verdict.worked
