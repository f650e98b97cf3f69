"""A run in one sentence: healthy, or what is wrong, since when, and what to change. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holter.diagnosis.finding import SEVERITIES, Finding
from holter.diagnosis.titles import heading_of

_FEW_STEPS = 20  # below, silence says little
_ADVICE_CHARACTERS = 240
_BAD_ENDS = {"failed": "The training failed", "crashed": "The training gave no sign of life any more"}


@dataclass(frozen=True)
class Verdict:
    """`severity` is that of the worst finding; None where there is none."""

    state: Literal["healthy", "sick", "unknown"]
    severity: str | None
    sentence: str


def verdict_of(findings: Sequence[Finding], run_state: str, steps: int) -> Verdict:
    """What is wrong with the training leads; what failed of Holter's own is told only where nothing else is."""
    ill = [finding for finding in findings if finding.where != "monitor" and finding.severity != "info"]
    ended = f" {_BAD_ENDS[run_state]} after {_steps(steps)}." if run_state in _BAD_ENDS else ""
    if ill:
        leading = ranked(ill)[0]
        others = f" {more(len(ill) - 1, 'finding')}." if len(ill) > 1 else ""
        sentence = f"{_what(leading)}. {first_sentence(leading.advice)}{others}{ended}"
        return Verdict("sick", leading.severity, sentence)
    if lost := [one for one in findings if one.where == "monitor" and one.severity == "critical"]:
        return Verdict("unknown", None, f"Not known: {first_sentence(lost[0].advice)}{ended}")
    if steps < _FEW_STEPS:
        return Verdict("unknown", None, f"Too early to say: {_steps(steps)} so far.{ended}")
    if ended:
        return Verdict("unknown", None, f"{ended.strip()} Nothing that was recorded says why.")
    degraded = " Holter itself was hindered." if any(one.where == "monitor" for one in findings) else ""
    return Verdict(
        "healthy", None, f"Healthy: nothing is wrong in {_steps(steps)}, as far as they were recorded.{degraded}"
    )


def ranked(findings: Sequence[Finding]) -> list[Finding]:
    """The most severe first; of those the one that is not over, then the one that began first."""
    return sorted(findings, key=lambda one: (-SEVERITIES.index(one.severity), one.until is not None, one.since))


def place_of(finding: Finding) -> str:
    """`in h.0.mlp`, `in the loop`; nothing where the cause says it already."""
    if finding.layer:
        return f" in {finding.layer}"
    return " in the loop" if finding.where == "loop" else ""


def first_sentence(text: str, most: int = _ADVICE_CHARACTERS) -> str:
    """Up to the first full stop that ends a sentence, and never more than a glance takes in.

    >>> first_sentence("Set lr to 1e-3. It was 0.1.")
    'Set lr to 1e-3.'
    """
    head = text.split(". ")[0].strip()
    head = head if len(head) <= most else f"{head[: most - 1].rsplit(' ', 1)[0]} …"
    return head if not head or head.endswith((".", "!", "?", "…")) else f"{head}."


def more(count: int, what: str) -> str:
    """What is there besides what is shown.

    >>> more(2, "finding")
    '2 more findings'
    """
    return f"{count:,} more {what}{'s' * (count != 1)}"


def _what(finding: Finding) -> str:
    over = f", last seen at step {finding.until:,}" if finding.until is not None else ""
    return f"{heading_of(finding.cause)}{place_of(finding)} since step {finding.since:,}{over}"


def _steps(count: int) -> str:
    return f"{count:,} step{'s' * (count != 1)}"
