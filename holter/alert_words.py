"""What an alert says: one finding, or the many that came at once. Pure: findings in, text out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holter.diagnosis.finding import SEVERITIES, Finding
from holter.words import number, printable

MOST_CAUSES = 20  # lines of a summary
MOST_COUNTED = 1000  # causes that are counted each by itself
_OTHERS = "other causes"
_NAME, _ADVICE = 120, 2000  # letters: a name may be as long as its giver likes, a message may not
_KINDS = {"critical": "failure", "warning": "warning", "info": "info"}
_OVER = "success"

Key = tuple[str, str, bool]  # cause, severity, and whether it is over


@dataclass(frozen=True)
class Message:
    """`kind` is apprise's word for how it should look; `about` are the few words that the journal keeps of it."""

    title: str
    text: str
    kind: str
    about: str


def message_of(finding: Finding, run: Path | None) -> Message:
    is_over = finding.until is not None
    head = f"{_cause(finding)} {_when(finding)}"
    lines = [
        f"{head}. {'It is over.' if is_over else finding.severity.capitalize() + '.'}",
        f"Known at step {finding.step:,}, confidence {finding.confidence:.0%}.",
    ]
    if evidence := finding.further_evidence:
        lines.append(f"Evidence: {_evidence(evidence)}")
    if finding.advice:
        lines.append(f"Advice: {_short(finding.advice, _ADVICE)}")
    if finding.alternatives:
        lines.append(f"It may also be: {', '.join(_short(cause) for cause in finding.alternatives[:5])}")
    state = "over" if is_over else finding.severity
    kind = _OVER if is_over else _KINDS[finding.severity]
    return Message(f"Holter: {state}: {head}", _text(lines, run), kind, f"{state}: {head}")


class Tally:
    """Findings that get no message of their own, counted by cause: however many there are, it stays small."""

    def __init__(self) -> None:
        self.total = 0
        self._counts: dict[Key, int] = {}
        self._firsts: dict[Key, Finding] = {}

    def add(self, finding: Finding) -> None:
        key = finding.cause, finding.severity, finding.until is not None
        if key not in self._counts and len(self._counts) >= MOST_COUNTED:
            key = _OTHERS, finding.severity, finding.until is not None
        self.total += 1
        self._counts[key] = self._counts.get(key, 0) + 1
        self._firsts.setdefault(key, finding)

    def message(self, run: Path | None) -> Message:
        """All of them in one, the worst first."""
        keys = sorted(self._counts, key=self._badness)
        if self.total == 1:
            return message_of(self._firsts[keys[0]], run)
        head = f"{self.total:,} more findings"
        lines = ["They came faster than alerts are sent, and are told together:"]
        lines += [self._line(key) for key in keys[:MOST_CAUSES]]
        if len(keys) > MOST_CAUSES:
            rest = sum(self._counts[key] for key in keys[MOST_CAUSES:])
            lines.append(f"and {rest:,} of {_OTHERS}")
        first = self._firsts[keys[0]]
        kind = _OVER if first.until is not None else _KINDS[first.severity]
        return Message(f"Holter: {head}, first of all {_cause(first)}", _text(lines, run), kind, head)

    def _badness(self, key: Key) -> tuple[bool, int, int]:
        _, severity, is_over = key
        return is_over, -SEVERITIES.index(severity), -self._counts[key]

    def _line(self, key: Key) -> str:
        cause, severity, is_over = key
        first = self._firsts[key]
        return (
            f"{'over' if is_over else severity}: {self._counts[key]:,} x {_short(cause)}, the first in {_place(first)}"
        )


def _cause(finding: Finding) -> str:
    return f"{_short(finding.cause)} in {_short(finding.layer or finding.where)}"


def _place(finding: Finding) -> str:
    return f"{_short(finding.layer or finding.where)} {_when(finding)}"


def _when(finding: Finding) -> str:
    if finding.until is None:
        return f"since step {finding.since:,}"
    return f"from step {finding.since:,} to step {finding.until:,}"


def _evidence(evidence: Mapping[str, object]) -> str:
    return ", ".join(f"{_short(name.replace('_', ' '))} {_value(value)}" for name, value in list(evidence.items())[:20])


def _value(value: object) -> str:
    return number(float(value)) if isinstance(value, int | float) else _short(str(value))


def _text(lines: list[str], run: Path | None) -> str:
    # The whole path: who reads this is not where the training is.
    where = printable(str(run.absolute())) if run is not None else "in memory, not stored"
    return "\n".join([*lines, f"Run: {where}"])


def _short(text: str, most: int = _NAME) -> str:
    shown = printable(text[: most + 1])
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"
