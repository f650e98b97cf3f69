"""The score of a diagnosis: what it found of the clinic's cases, against what is known of them. Pure.

An *incident* is a finding of severity warning or critical; an info note is none, nor is what Holter says of itself.
In a sick run the *answer* is the first incident, in the order in which the diagnosis gives them, that began at the
fault's onset or later; a few steps too early is forgiven.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
import numpy.typing as npt

from holter.clinic.case import CAUSES, Case
from holter.diagnosis.finding import Finding

EARLY = 10  # steps before the onset that an answer may name: an estimate of when something began is one
NOTHING = "nothing"  # the answer where there is none
_WINDOW, _WIDTHS = 15, 4.0  # of the band of a loss: steps that are smoothed over, robust deviations

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Outcome:
    """What a diagnosis said of one case. `left_band` is the step at which the loss of a slow one was visibly worse
    than its twin's, None if never."""

    case: Case
    findings: tuple[Finding, ...]
    steps: int
    left_band: int | None = None


@dataclass(frozen=True)
class Score:
    """Shares are NaN where there is nothing to take a share of, and so are medians."""

    sick: int
    recall: float  # sick runs that have an answer
    precision: float  # incidents that are right: see is_right
    top1: float  # sick runs whose answer names the cause
    top3: float  # ... or has it among its first two alternatives
    location: float  # sick runs whose answer names the place
    onset_error: float  # median, steps
    delay: float  # median, steps from where a fault that shows at once can be seen to where it is known
    lead: float  # median, steps from where a slow fault is known to where the loss is worse, or the run over
    false_per_thousand: float  # incidents in 1,000 steps of healthy runs
    healthy_steps: int
    silent_controls: int  # of all runs of a control
    controls: int


def incidents(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    return tuple(one for one in findings if one.severity != "info" and one.where != "monitor")


def answer(outcome: Outcome) -> Finding | None:
    """None where nothing was found, or only what began before there was anything to find."""
    first = outcome.case.onset - EARLY
    return next((one for one in incidents(outcome.findings) if one.since >= first), None)


def right_causes(case: Case) -> set[str]:
    return {cause for cause in (case.cause, *case.also_right) if cause is not None}


def named(finding: Finding, most: int) -> tuple[str, ...]:
    """The causes that a finding names, its first choice first."""
    return (finding.cause, *finding.alternatives)[:most]


def is_right(outcome: Outcome, finding: Finding) -> bool:
    """Of an incident: the answer to a fault is right that there is one; any other must name it."""
    if outcome.case.cause is None or finding.since < outcome.case.onset - EARLY:
        return False
    return finding is answer(outcome) or not right_causes(outcome.case).isdisjoint(named(finding, 3))


def is_placed(case: Case, finding: Finding) -> bool:
    if finding.where not in {CAUSES[cause] for cause in right_causes(case)}:
        return False
    return not case.layers or any(same_place(finding.layer, layer) for layer in case.layers)


def same_place(found: str | None, true: str) -> bool:
    """The same layer, something within it, or the module whose parameter it is.

    >>> same_place("h.0.up.weight", "h.0"), same_place("h.0.up", "h.0.up.weight"), same_place("h", "h.0.up.weight")
    (True, True, False)
    """
    if found is None:
        return False
    return found == true or found.startswith(f"{true}.") or true.rpartition(".")[0] == found


def onset_error(case: Case, finding: Finding) -> int:
    """Steps between what was named and the stretch from the onset to where the evidence can first be there."""
    return max(case.onset - finding.since, finding.since - case.shows, 0)


def lead(outcome: Outcome) -> float:
    """Steps of warning; none where a slow fault was not found."""
    found = answer(outcome)
    if found is None:
        return 0.0
    return (outcome.steps if outcome.left_band is None else outcome.left_band) - found.step


def left_band(sick: Sequence[float], twin: Sequence[float], onset: int) -> int | None:
    """The first step from which on the loss stays above that of the twin by more than both vary from step to step."""
    length = min(len(sick), len(twin))
    ours, theirs = _smooth(np.asarray(sick[:length])), _smooth(np.asarray(twin[:length]))
    noise = np.asarray(twin[:length]) - theirs
    width = _WIDTHS * 1.4826 * float(np.median(np.abs(noise[onset:]))) / np.sqrt(_WINDOW)
    above = ~(ours <= theirs + width)  # NaN is above
    above[:onset] = False
    held = np.convolve(above, np.ones(_WINDOW), "full")[_WINDOW - 1 :][: length - _WINDOW + 1] == _WINDOW
    return int(np.argmax(held)) if held.any() else None


def _smooth(values: Floats) -> Floats:
    """The median of the last steps."""
    padded = np.concatenate([np.full(_WINDOW - 1, values[0]), values])
    windows = np.lib.stride_tricks.sliding_window_view(padded, _WINDOW)
    return np.asarray(np.median(windows, axis=1), dtype=np.float64)


def score(outcomes: Sequence[Outcome]) -> Score:
    sick = [one for one in outcomes if one.case.cause is not None]
    healthy = [one for one in outcomes if one.case.cause is None]
    answers = [(one, found) for one in sick if (found := answer(one)) is not None]
    told = [(one, finding) for one in outcomes for finding in incidents(one.findings)]
    right = [right_causes(one.case).intersection(named(found, 3)) for one, found in answers]
    first = [found.cause in right_causes(one.case) for one, found in answers]
    delays = [found.step - one.case.shows for one, found in answers if one.case.shows_at_once]
    steps = sum(one.steps for one in healthy)
    false = sum(len(incidents(one.findings)) for one in healthy)
    silent = silent_controls(healthy)
    return Score(
        sick=len(sick),
        recall=_share(len(answers), len(sick)),
        precision=_share(sum(is_right(one, finding) for one, finding in told), len(told)),
        top1=_share(sum(first), len(sick)),
        top3=_share(sum(map(bool, right)), len(sick)),
        location=_share(sum(is_placed(one.case, found) for one, found in answers), len(sick)),
        onset_error=_median([onset_error(one.case, found) for one, found in answers]),
        delay=_median([max(0, delay) for delay in delays]),
        lead=_median([lead(one) for one in sick if one.case.slow]),
        false_per_thousand=_share(1000 * false, steps),
        healthy_steps=steps,
        silent_controls=sum(silent.values()),
        controls=len(silent),
    )


def silent_controls(outcomes: Iterable[Outcome]) -> dict[str, bool]:
    """By the name of the control, whether not one of its runs has an incident."""
    silent: dict[str, bool] = {}
    for one in outcomes:
        if one.case.kind == "control":
            name = one.case.id.split("/")[1]
            silent[name] = silent.get(name, True) and not incidents(one.findings)
    return silent


def confusion(outcomes: Iterable[Outcome]) -> Counter[tuple[str, str]]:
    """How often a cause was answered by which; a right answer of a look-alike counts as the cause."""
    counts: Counter[tuple[str, str]] = Counter()
    for one in outcomes:
        if one.case.cause is not None:
            found = answer(one)
            told = NOTHING if found is None else found.cause
            counts[one.case.cause, one.case.cause if told in one.case.also_right else told] += 1
    return counts


def by_cause(outcomes: Sequence[Outcome]) -> dict[str, Score]:
    return {
        cause: score(chosen) for cause in CAUSES if (chosen := [one for one in outcomes if one.case.cause == cause])
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def _median(values: Sequence[float]) -> float:
    return float(median(values)) if values else float("nan")
