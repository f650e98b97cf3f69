"""Judging stored cases: every run is read once, by Holter's diagnosis and by all rivals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from holter.clinic.case import Case
from holter.clinic.processes import Done, in_processes
from holter.clinic.rivals import RIVALS
from holter.clinic.score import Outcome, left_band
from holter.clinic.storing import directory_of
from holter.diagnosis.finding import Finding
from holter.run import Run, open_run

OURS = "Holter"
Judge = Callable[[Run], tuple[Finding, ...]]


def judges(with_rivals: bool = True) -> dict[str, Judge]:
    """Who looks at a run, by name; Holter first."""
    from holter.diagnosis.doctor import diagnose  # here, so that runs can be made and listed without the rules

    found: dict[str, Judge] = {OURS: lambda run: diagnose(run.records, run.info)}
    if with_rivals:
        found |= {name: partial(_of_history, rule) for name, rule in RIVALS.items()}
    return found


def _of_history(rule: Callable[..., tuple[Finding, ...]], run: Run) -> tuple[Finding, ...]:
    with np.errstate(all="ignore"):  # a run that is not finite any more is what they are to judge
        return rule(run.history)


def judge_all(
    cases: Sequence[Case], root: Path, by: Mapping[str, Judge], jobs: int
) -> Iterator[Done[Case, dict[str, Outcome]]]:
    """The outcome of every case, by the name of the judge."""
    # A case holds functions, which no pipe carries: only what was found comes back.
    of_case = partial(_judge, root=root, by=by)
    for done in in_processes(of_case, cases, jobs):
        if done.result is None:
            yield Done(done.task, error=done.error)
            continue
        steps, left, findings = done.result
        outcomes = {name: Outcome(done.task, found, steps, left) for name, found in findings.items()}
        yield Done(done.task, outcomes)


def _judge(case: Case, root: Path, by: Mapping[str, Judge]) -> tuple[int, int | None, dict[str, tuple[Finding, ...]]]:
    run = open_run(directory_of(case, root))
    findings = {name: judge(run) for name, judge in by.items()}
    return len(run.history), _left_band(case, run, root), findings


def _left_band(case: Case, run: Run, root: Path) -> int | None:
    if not case.slow or case.twin is None:
        return None
    _, sick = run.history.scalar("loss")
    _, twin = open_run(root / case.twin).history.scalar("loss")
    return left_band(sick.tolist(), twin.tolist(), case.onset)
