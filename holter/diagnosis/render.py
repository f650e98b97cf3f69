"""Findings for the terminal: what is wrong, since when, why, and what to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from holter.diagnosis.convergence import Outlook
from holter.diagnosis.finding import Finding
from holter.diagnosis.health import Check
from holter.integrity import Integrity
from holter.words import number, printable

_MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "not observed": ("–", "dim")}
_ENDS = {"failed": "bold red", "crashed": "bold red", "running": "cyan"}
_STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim"}


def render_ending(state: str, error: str, steps: int) -> RenderableType:
    """How the training ended, where that is not as it should; of one that goes on, that it does."""
    after = f"after {steps:,} step{'s' * (steps != 1)}"
    words = {
        "failed": f"The training failed {after}{f', with {error}' if error else ''}.",
        "crashed": f"The training gave no sign of life any more {after}: it was killed, or its machine went down.",
        "stopped": f"The training was stopped {after}{f', by {error}' if error else ''}.",
        "interrupted": f"The training was interrupted {after}.",
        "running": f"The training goes on, {steps:,} step{'s' * (steps != 1)} so far.",
        "empty": "Nothing was recorded.",
    }
    return Text(f"{printable(words[state])}\n", _ENDS.get(state, "yellow")) if state in words else Text("", end="")


def render_damage(found: Integrity) -> RenderableType:
    """What the findings cannot be about."""
    told = found.sentence
    return Text(f"{told}\n" if told else "", _STYLES.get(found.severity, "dim"), end="")


def render_findings(findings: Sequence[Finding], steps: int, state: str = "finished") -> RenderableType:
    """One paragraph each, the most severe first."""
    if not findings and state in ("failed", "crashed", "empty"):
        return Text("Nothing that was recorded says why." if steps else "", "yellow")
    if not findings and not steps:
        return Text("There is no step to examine.", "yellow")
    if not findings:
        return Text(f"Nothing is wrong in these {steps:,} steps, as far as it was recorded.", "green")
    order = list(_STYLES)
    ranked = sorted(findings, key=lambda finding: (order.index(finding.severity), finding.since))
    return Group(*(part for finding in ranked for part in _paragraph(finding)))


def render_health(checks: Sequence[Check]) -> RenderableType:
    """The checklist, a line each."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(no_wrap=True)
    grid.add_column()
    for check in checks:
        mark, style = _MARKS[check.state]
        grid.add_row(Text(mark, style), Text(check.name), Text(printable(check.text), "dim"))
    return Group(Text("health", "bold"), Padding(grid, (0, 0, 0, 1)))


def render_outlook(found: Outlook) -> RenderableType:
    """Where the loss is going."""
    said = ["The loss has stopped falling."] if found.is_flat else []
    if found.forecast is not None:
        one = found.forecast
        said.append(
            f"At step {one.step:,} the loss is expected at {number(one.loss)}, and in nine of ten cases between "
            f"{number(one.low)} and {number(one.high)}."
        )
    return Group(Text("outlook", "bold"), Padding(Text(" ".join(said)), (0, 0, 0, 1))) if said else Text("")


def _paragraph(finding: Finding) -> list[RenderableType]:
    place = f" in {printable(finding.layer)}" if finding.layer else ""
    head = Text.assemble(
        (printable(finding.cause), _STYLES[finding.severity]),
        (f"{place} since step {finding.since:,}", "bold"),
        ("" if finding.until is None else f", last seen at step {finding.until:,}", "bold"),
        (f"  {finding.severity}, known at step {finding.step:,}, confidence {finding.confidence:.0%}", "dim"),
    )
    lines: list[RenderableType] = [head, Padding(Text(printable(finding.advice)), (0, 0, 0, 1))]
    if evidence := finding.further_evidence:
        lines.append(Padding(Text(_evidence(evidence), "dim"), (0, 0, 0, 1)))
    if finding.alternatives:
        others = ", ".join(map(printable, finding.alternatives))
        lines.append(Padding(Text(f"or: {others}", "dim"), (0, 0, 0, 1)))
    return [*lines, Text()]


def _evidence(evidence: Mapping[str, object]) -> str:
    return ", ".join(f"{printable(name.replace('_', ' '))} {_value(value)}" for name, value in evidence.items())


def _value(value: object) -> str:
    return number(float(value)) if isinstance(value, int | float) else printable(str(value))
