"""A Monitor, a Run and a Finding as a notebook shows them: HTML without scripts, readable on light and dark.

Never raises: what cannot be shown is a sentence. Names come from the user's model and disk, and may hold anything: all
of them pass through `_escaped`.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from holter.diagnosis.finding import Finding
from holter.history import History, layers_by_depth
from holter.random_state import random_state_kept
from holter.record import Record
from holter.words import number, printable

if TYPE_CHECKING:
    from holter.report.strip_svg import Strip

_MOST_EXAMINED = 20_000  # steps: more would take long, and nobody has asked for it
_MOST_DRAWN, _MOST_SAMPLED = 5_000, 1_000  # records that the picture is made of: in memory, and from a journal
_MOST_FINDINGS = 8
_COLUMNS = 120  # stretches of steps of the picture, at least
_NAME, _WORDS = 120, 1_200  # characters that are shown
_COLOURS = {"critical": "#b3261e", "warning": "#9a5b00", "info": "#55616d", "healthy": "#0b6e99", "unknown": "#55616d"}
_BOX = "border:1px solid rgba(128,128,128,.4);border-radius:6px;padding:10px 14px;margin:4px 0;max-width:900px"
_FAINT = "opacity:.75"


class _StoredRun(Protocol):
    """A Run; it knows this module, so this one does not import it."""

    @property
    def name(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def records(self) -> Sequence[Record]: ...
    @property
    def findings(self) -> tuple[Finding, ...]: ...
    def refresh(self) -> list[Record]: ...


def run_html(run: _StoredRun) -> str:
    """The verdict, the strip chart of the gradients and the findings."""

    def shown() -> str:
        run.refresh()
        state, records = run.state, run.records
        steps = sum(not record.late for record in records)
        findings = run.findings if steps <= _MOST_EXAMINED else None
        return _training(f"run {run.name}: {state}", state, steps, records, findings)

    return _safely(shown, "This run could not be shown")


def monitor_html(
    path: Path | None, rank: int, kept: Sequence[Record], findings: Sequence[Finding], state: str, steps: int
) -> str:
    """Of what is in the journals of its process by now, or in memory: it waits for nothing, and keeps nothing."""

    def shown() -> str:
        name = f"monitor ({state}) of run {path.name}" if path is not None else f"monitor ({state}), not stored"
        records = list(kept) if path is None else _sampled(path, rank)
        return _training(name, "running", steps, records, findings)

    return _safely(shown, "This monitor could not be shown; the training goes on")


def _sampled(path: Path, rank: int) -> list[Record]:
    """Records from all over the run: a long one does not fit into the memory of a training."""
    from holter.journal_parts import read_sample
    from holter.run import Run

    journals = [file for found, file in Run(path).journals if found == rank]
    most = max(1, _MOST_SAMPLED // max(1, len(journals)))
    return [entry for file in journals for entry in read_sample(file, most) if isinstance(entry, Record)]


def finding_html(finding: Finding) -> str:
    return _safely(lambda: f'<div style="{_BOX}">{_finding(finding)}</div>', "This finding could not be shown")


def _safely(shown: Callable[[], str], otherwise: str) -> str:
    try:
        with random_state_kept():  # of what is drawn with
            return shown()
    except Exception as error:  # a cell that fails would hide what it was asked for
        return f"<p>{html.escape(otherwise)}: {html.escape(type(error).__name__)}.</p>"


def _escaped(text: str, most: int = _NAME) -> str:
    """Nothing of it is markup, a control or a bidirectional character, and it does not fill the page."""
    shown = printable(text[: most + 1])
    return html.escape(shown if len(shown) <= most else f"{shown[: most - 1]}…")


# A training -----------------------------------------------------------------------------------------------------


def _training(name: str, state: str, steps: int, records: Sequence[Record], findings: Sequence[Finding] | None) -> str:
    """`findings` is None where they were not looked for."""
    from holter.report.verdict import ranked, verdict_of

    found = ranked(findings or ())
    if findings is None:
        head = f"{_badge('unknown', 'not examined')} So many steps take a while: ask run.findings, or holter diagnose."
    else:
        verdict = verdict_of(found, state, steps)
        badge = verdict.severity or verdict.state
        head = f"{_badge(badge, badge)} {_escaped(verdict.sentence, _WORDS)}"
    rest = len(found) - _MOST_FINDINGS
    told = "".join(_finding(finding) for finding in found[:_MOST_FINDINGS])
    told += f'<div style="{_FAINT}">… and {rest:,} more</div>' if rest > 0 else ""
    title = f'<div style="{_FAINT}">{_escaped(name)}, {steps:,} step{"s" * (steps != 1)}</div>'
    return f'<div style="{_BOX}">{title}<div style="margin:4px 0 8px">{head}</div>{_chart(records, found)}{told}</div>'


def _chart(records: Sequence[Record], findings: Sequence[Finding]) -> str:
    """The strip of gradient norms; where that fails, the rest is shown without it."""
    from holter.report.strip_svg import strip_svg

    try:
        strip = _strip_of(records)
    except (ValueError, IndexError, TypeError):
        return f'<div style="{_FAINT}">The strip chart could not be drawn.</div>'
    if strip is None:
        return f'<div style="{_FAINT}">No gradients have been measured yet.</div>'
    return strip_svg(strip, findings, "gradient norm")


def _strip_of(records: Sequence[Record]) -> Strip | None:
    """Gradient norms, in the order in which the layers run; of a long run one in so many steps."""
    from holter.report.buckets import telling
    from holter.report.digest import Strip as Strips
    from holter.report.strip_svg import Strip

    drawn = [record for record in records if "gradient" in record.rows]
    strips, last = Strips("gradient", "norm", _COLUMNS), -1
    for record in drawn[:: -(-len(drawn) // _MOST_DRAWN) or 1]:
        if record.step <= last:  # a checkpoint was loaded: that line of training is gone
            strips.buckets.rewind(record.step)
        last = record.step
        strips.put(record.step, record.rows["gradient"])
    if not len(strips.buckets.steps):
        return None
    layers = layers_by_depth(strips.layers, History(records).depth)
    values = telling(strips.buckets)[:, [strips.layers[name] for name in layers]]
    return Strip(layers, strips.buckets.steps.tolist(), values.T.astype(np.float64), until=last)


def _badge(kind: str, text: str) -> str:
    style = f"background:{_COLOURS[kind]};color:#fff;border-radius:4px;padding:1px 7px;font-weight:600"
    return f'<span style="{style}">{html.escape(text)}</span>'


# A finding ------------------------------------------------------------------------------------------------------


def _finding(finding: Finding) -> str:
    from holter.report.verdict import place_of

    over = f", last seen at step {finding.until:,}" if finding.until is not None else ""
    where = _escaped(place_of(finding))
    lines = [
        f"{_badge(finding.severity, finding.severity)} <b>{_escaped(finding.cause)}</b>{where} "
        f"since step {finding.since:,}{over} "
        f'<span style="{_FAINT}">known at step {finding.step:,}, confidence {finding.confidence:.0%}</span>',
        _escaped(finding.advice, _WORDS),
    ]
    if evidence := finding.further_evidence:
        lines.append(f'<span style="{_FAINT}">{_escaped(", ".join(_evidence(evidence)), _WORDS)}</span>')
    if finding.alternatives:
        lines.append(f'<span style="{_FAINT}">or: {_escaped(", ".join(finding.alternatives), _WORDS)}</span>')
    inner = "".join(f"<div>{line}</div>" for line in lines if line)
    return (
        f'<div style="margin:8px 0;padding-left:10px;border-left:3px solid {_COLOURS[finding.severity]}">{inner}</div>'
    )


def _evidence(evidence: Mapping[str, object]) -> Iterator[str]:
    for name, value in evidence.items():
        shown = number(float(value)) if isinstance(value, int | float) else str(value)
        yield f"{name.replace('_', ' ')} {shown}"
