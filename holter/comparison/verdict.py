"""What changed from one run to another: findings that went and came, whether it is better, and whether a fix worked.

**A regression** is any of these, seen from the reference:
- a finding of a warning or worse came, or one became more severe; of the machine's performance only where steps take
  half as long again or memory is half as much again, since other work on a machine makes such findings too
- the last loss is materially worse: by more than three times its error, by more than 2 % of itself and by more than 1 %
  of what it fell by. On data that was not trained on, where both runs have such a loss; at the last place that both
  have reached
- the training failed or crashed, where that of the reference did not
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from holter.comparison.measures import Measures
from holter.comparison.series import Level
from holter.diagnosis.finding import SEVERITIES, Finding
from holter.diagnosis.titles import title_of
from holter.verdicts import FixEffect, GradientComparison
from holter.words import digits, number

State = Literal["same", "no difference", "better", "worse", "worked", "worked in part", "did not work", "unknown"]
_PERFORMANCE = 1.5  # times the reference: below, a machine's own noise
BAD_ENDS = ("failed", "crashed")
_TOLD = 3  # findings in a sentence
# Under these the training loss is another one than without: of a sum, of few examples, with its sign turned.
OTHER_LOSS = frozenset(
    (
        *("loss-sign", "loss-reduction", "accumulation-not-averaged", "double-softmax"),
        *("batch-repeated", "data-not-shuffled", "overfitting"),
    )
)


@dataclass(frozen=True)
class Changes:
    """Findings by cause and place. What stays is told as it is now, with what it was before."""

    went: tuple[Finding, ...]
    came: tuple[Finding, ...]
    stayed: tuple[tuple[Finding, Finding], ...]  # in the reference, and in the other


@dataclass(frozen=True)
class Judged:
    """A loss at the last place that both runs have reached."""

    name: str
    reference: Level
    other: Level
    outcome: str  # better, worse, same; or other, where it is not the same loss in both
    at: int  # the reference's step


@dataclass(frozen=True)
class Evidence:
    """C10 of gradient norms and C11 of losses, each over the last steps; None where they were not recorded."""

    gradients: GradientComparison | None
    losses: FixEffect | None
    loss_means: tuple[float, float] | None = None  # of the losses that C11 looked at, in the reference and in the other


@dataclass(frozen=True)
class Verdict:
    state: State
    sentence: str
    regressions: tuple[str, ...]


def changes_of(before: Sequence[Finding], after: Sequence[Finding]) -> Changes:
    """Matched by cause and layer; what is left, by cause alone: it moved."""
    left, right = list(before), list(after)
    stayed: list[tuple[Finding, Finding]] = []
    for is_exact in (True, False):
        for one in tuple(left):
            other = next((found for found in right if _is_same(one, found, is_exact)), None)
            if other is not None:
                stayed.append((one, other))
                left.remove(one)
                right.remove(other)
    return Changes(tuple(left), tuple(right), tuple(stayed))


def _is_same(one: Finding, other: Finding, is_exact: bool) -> bool:
    same_place = (one.where, one.layer) == (other.where, other.layer)
    return one.cause == other.cause and (same_place or not is_exact)


def regressions_of(
    changes: Changes, judged: Judged | None, states: tuple[str, str], measures: tuple[Measures, Measures]
) -> tuple[str, ...]:
    """A sentence each; what they are stands at the top of this file."""
    costs_more = _costs_more(*measures)
    counted = [one for one in _ill(changes.came) if one.where != "performance" or costs_more]
    found = [f"{_named(one)} is new" for one in counted]
    found += [
        f"{_named(now)} became {now.severity}"
        for was, now in changes.stayed
        if now in _ill([now]) and SEVERITIES.index(now.severity) > SEVERITIES.index(was.severity)
    ]
    if judged is not None and judged.outcome == "worse":
        found.append(f"the {judged.name} is worse: {_levels(judged)}")
    if states[1] in BAD_ENDS and states[0] not in BAD_ENDS:
        found.append(f"the training {states[1]}")
    return tuple(found)


def _costs_more(was: Measures, now: Measures) -> bool:
    pairs = [(getattr(was, name), getattr(now, name)) for name in ("step_time", "process_memory", "device_memory")]
    return any(one is not None and other is not None and other > _PERFORMANCE * one for one, other in pairs)


def _ill(findings: Sequence[Finding]) -> list[Finding]:
    """Those that say that something is wrong with the training."""
    return [one for one in findings if one.severity != "info" and one.where != "monitor"]


def verdict_of(changes: Changes, judged: Judged | None, regressions: tuple[str, ...], is_same: bool) -> Verdict:
    """In one sentence. `is_same` where nothing that was recorded differs."""
    went, came, stayed = (_ill(found) for found in (changes.went, changes.came, [now for _, now in changes.stayed]))
    if is_same and not (changes.went or changes.came or stayed or regressions):
        return Verdict("same", "The two runs are the same in everything that was recorded.", ())
    if regressions and not (came or (judged is not None and judged.outcome == "worse")):
        # A training that broke off, or a finding that became more severe: whatever else is better.
        is_fix, told = bool(went or stayed), "; ".join(regressions)
        state: State = "did not work" if is_fix else "worse"
        return Verdict(state, f"{'The fix did not work' if is_fix else 'Worse'}: {told}.", regressions)
    if judged is None and not (went or came or stayed):
        return Verdict(
            "unknown", "There is too little to judge by: nothing is found, and no loss was logged in both.", regressions
        )
    loss = f"the {judged.name} {_told(judged)}" if judged is not None else "no loss was logged in both"
    if went or stayed:
        state, sentence = _of_a_fix(went, came, stayed, judged, loss)
    else:
        state, sentence = _of_a_change(came, judged, loss, bool(regressions))
    return Verdict(state, sentence, regressions)


def _of_a_fix(
    went: list[Finding], came: list[Finding], stayed: list[Finding], judged: Judged | None, loss: str
) -> tuple[State, str]:
    """The reference was sick."""
    is_worse = judged is not None and judged.outcome == "worse"
    new = f", and {_listed(came)} {_is(came)} new" if came else ""
    if not went:
        return "did not work", f"The fix did not work: {_listed(stayed)} {_is(stayed)} still found{new}; {loss}."
    gone = f"{_listed(went)} {_is(went)} gone"
    if is_worse:
        return "did not work", f"The fix did not work: {gone}, but {loss}{new}."
    if stayed or came:
        rest = f"{_listed(stayed)} {_is(stayed)} still found{new}" if stayed else f"{_listed(came)} {_is(came)} new"
        return "worked in part", f"The fix worked in part: {gone}, but {rest}; {loss}."
    return "worked", f"The fix worked: {gone}, and {loss}."


def _of_a_change(came: list[Finding], judged: Judged | None, loss: str, is_regression: bool) -> tuple[State, str]:
    """Nothing was wrong in the reference."""
    if came:
        word = "Worse" if is_regression else "About the same"
        return "worse" if is_regression else "no difference", f"{word}: {_listed(came)} {_is(came)} new; {loss}."
    outcome = judged.outcome if judged is not None else "same"
    if outcome in ("same", "other"):
        return "no difference", f"No difference that counts: nothing is wrong in either, and {loss}."
    return ("better", f"Better: {loss}.") if outcome == "better" else ("worse", f"Worse: {loss}.")


def _told(judged: Judged) -> str:
    words = {"better": "is better", "worse": "is worse", "same": "is the same within its error"}
    return f"{words.get(judged.outcome, 'is not the same loss in both')}: {_levels(judged)}"


def _levels(judged: Judged) -> str:
    return f"{level(judged.other)}, in the reference {level(judged.reference)}"


def level(found: Level | None) -> str:
    """0.31 ± 0.02."""
    if found is None:
        return "–"
    if not np.isfinite(found.mean):
        return "not finite"
    return number(found.mean) + (f" ± {digits(found.error, 2)}" if np.isfinite(found.error) else "")


def _listed(findings: Sequence[Finding]) -> str:
    named = list(dict.fromkeys(map(_named, findings)))
    rest = f" and {len(named) - _TOLD} more" if len(named) > _TOLD else ""
    return ", ".join(named[:_TOLD]) + rest


def _named(finding: Finding) -> str:
    """In quotation marks: some titles, as "no clipping", would turn the sense of a sentence that they stand in."""
    return f"“{title_of(finding.cause)}”" + (f" in {finding.layer}" if finding.layer else "")


def _is(findings: Sequence[Finding]) -> str:
    return "is" if len(findings) == 1 else "are"
