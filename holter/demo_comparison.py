"""A training before and after a fix: the numbers side by side, and whether the fix worked. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from holter.comparison.series import steps_to
from holter.comparison.verdict import OTHER_LOSS
from holter.diagnosis.finding import Finding
from holter.history import History
from holter.series import Floats
from holter.words import duration, number, size

_CHANGED = 0.05  # by which share of itself a number must have changed to count
_LEARNT = 0.9  # of the first loss, below which a model has learnt something
_NEAR = 1.1  # times the loss that one of them ended with: the level to reach
_OTHER_INPUTS = frozenset(("input-scale",))  # what it has not seen was normalised: unfair to a model of raw inputs
_BY_TIME = frozenset(("data-loading-bound", "throughput-drop"))
_BY_MEMORY = frozenset(("memory-growth",))


@dataclass(frozen=True)
class Course:
    """One training in the numbers that are compared; times and memory from the step on at which the fault comes."""

    losses: Floats
    held_loss: float  # at the end, of data that was not trained on
    largest_norm: float
    step_time: float  # median, in seconds
    memory: float  # that the process has gained, in bytes
    causes: tuple[str, ...]

    @property
    def last_loss(self) -> float:
        """The mean over the last tenth of the steps."""
        return float(self.losses[-max(1, len(self.losses) // 10) :].mean()) if len(self.losses) else float("nan")

    @property
    def learns(self) -> bool:
        return bool(len(self.losses) and self.held_loss < _LEARNT * self.losses[0])


def course_of(history: History, findings: Sequence[Finding], onset: int) -> Course:
    norms = history.scalar("gradient_norm")[1]
    steps, times = history.scalar("step_time")
    at, memory = history.scalar("machine/process_memory")
    memory, times = memory[at >= onset], times[steps >= onset]
    held = history.scalar("val_loss")[1]
    with np.errstate(all="ignore"):
        return Course(
            losses=history.scalar("loss")[1],
            held_loss=float(held[-1]) if len(held) else float("nan"),
            largest_norm=float(norms.max()) if len(norms) else float("nan"),
            step_time=float(np.median(times)) if len(times) else float("nan"),
            memory=float(memory[-1] - memory[0]) if len(memory) else float("nan"),
            causes=tuple(dict.fromkeys(finding.cause for finding in findings)),
        )


class Line(NamedTuple):
    """A number of both trainings."""

    name: str
    before: str
    after: str


@dataclass(frozen=True)
class Verdict:
    worked: bool
    sentence: str


def lines(cause: str, before: Course, after: Course) -> list[Line]:
    """What is worth comparing where this was the cause."""

    def line(name: str, text: Callable[[Course], str]) -> Line:
        return Line(name, text(before), text(after))

    found = []
    if cause in _BY_MEMORY:
        found.append(line("memory gained since", lambda one: _told("memory gained", one.memory)))
    if cause in _BY_TIME:
        found.append(line("median time of a step since", lambda one: _told("time of a step", one.step_time)))
    if cause not in _OTHER_INPUTS:
        found.append(line("loss on unseen data, at the end", lambda one: _told("loss", one.held_loss)))
    other = " (not the same loss)" if cause in OTHER_LOSS else ""
    found.append(line(f"training loss, last tenth{other}", lambda one: _told("loss", one.last_loss)))
    level = _NEAR * after.last_loss
    if not other and np.isfinite(level) and level > 0:
        found.append(
            line(f"steps to a training loss of {number(level)}", lambda one: _reached(steps_to(one.losses, level)))
        )
    found.append(line("largest gradient norm", lambda one: _told("norm", one.largest_norm)))
    found.append(line("found by the diagnosis", lambda one: ", ".join(one.causes) or "nothing"))
    return found


def _reached(steps: int | None) -> str:
    return "never" if steps is None else f"{steps:,}"


def judge(cause: str, before: Course, after: Course, right: Collection[str] = ()) -> Verdict:
    """A fix worked where the cause is no longer found, the model learns, and what was spoilt is better; or is no worse
    and nothing else is found in its place.

    Where the cause was not found in the first place, no advice was followed: what it spoilt must be better. `right` are
    other names of the cause.
    """
    name, was, now = _measured(cause, before, after)
    found, again = (next((one for one in course.causes if one in {cause, *right}), None) for course in (before, after))
    numbers = f"the {name} is {_told(name, now)} (with the fault: {_told(name, was)})"
    also = ", ".join(one for one in after.causes if one not in before.causes)
    rest = f" What is found now: {also}." if also else ""
    is_better = bool(np.isfinite(now) and (not np.isfinite(was) or now < was - _CHANGED * abs(was)))
    if found is None:
        how = "better" if is_better else "no better"
        return Verdict(is_better, f"Without the fault the training is {how}: {numbers}.{rest}")
    if again is not None:
        return Verdict(False, f"The fix did not work: {again} is found again; {numbers}.")
    gone = f"The fix did not work: {found} is gone, but"
    if not np.isfinite(now) or now > was + _CHANGED * abs(was):
        return Verdict(False, f"{gone} {numbers}.{rest}")
    if not (after.learns or cause in _BY_TIME | _BY_MEMORY):
        return Verdict(
            False, f"{gone} the model hardly learns: {numbers}, and began at {number(after.losses[0])}.{rest}"
        )
    if also and not is_better:
        return Verdict(False, f"{gone} {also} is found in its place; {numbers}.")
    return Verdict(True, f"The fix worked: {found} is gone, and {numbers}.{rest}")


def _measured(cause: str, before: Course, after: Course) -> tuple[str, float, float]:
    """What a cause spoils, before and after."""
    if cause in _BY_TIME:
        return "time of a step", before.step_time, after.step_time
    if cause in _BY_MEMORY:
        return "memory gained", before.memory, after.memory
    if cause in _OTHER_INPUTS:
        return "training loss", before.last_loss, after.last_loss
    return "loss on unseen data", before.held_loss, after.held_loss


def _told(name: str, value: float) -> str:
    if not np.isfinite(value):
        return "not finite"
    if name == "memory gained":
        return size(int(value))
    return duration(value) if name == "time of a step" else number(value)
