"""Findings as a page tells them: each with the series that left their usual range about its onset, and in which order.

A mechanism in place of a list of causes: whatever was recorded is compared with its own past before the onset, and what
moved farthest is shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from holter.diagnosis.events import Event
from holter.diagnosis.finding import Finding
from holter.diagnosis.titles import heading_of, title_of
from holter.report.buckets import Buckets
from holter.report.digest import Digest
from holter.report.drawing import TITLES, numbers
from holter.report.onsets import SET, onsets_of, rank
from holter.report.verdict import ranked
from holter.words import number, times

Floats = npt.NDArray[np.float64]
Json = dict[str, Any]

_BEFORE, _AFTER = 60, 120  # steps that a chart shows about an onset; in a long run as many buckets as fit
_CHARTS = 3  # a finding
_MOVED = 6.0  # robust deviations from its past, from which on a series has left it
_LEAST = 2  # values before the onset, for a past
# Scalars that say nothing about why, or only of Holter.
_SILENT = frozenset(
    (
        *("monitor_cost", "dropped", "optimizer_step", "gradient_nonfinite", "gradients_kept", "gradients_left"),
        *("batch/repeated", "batch/nonfinite", "batch/first_nonfinite"),
    )
)
_ALWAYS = ("loss", "gradient_norm")
# What says how the machine fares, and the last batch of an epoch is a short one: signs of performance alone.
_MACHINE = ("time/", "machine/", "batch/size", "step_time", "samples_per_second", "tokens_per_second")


@dataclass(frozen=True)
class _Series:
    kind: str
    title: str
    is_log: bool
    steps: npt.NDArray[np.int64]
    values: Floats
    layer: str | None = None


def told_findings(findings: Sequence[Finding], digest: Digest) -> list[Json]:
    """The most severe first."""
    return [_told(finding, digest) for finding in ranked(findings)]


def _told(finding: Finding, digest: Digest) -> Json:
    return {
        "cause": finding.cause,
        "title": heading_of(finding.cause),
        "where": finding.where,
        "layer": finding.layer,
        "since": finding.since,
        "step": finding.step,
        "until": finding.until,
        "severity": finding.severity,
        "confidence": finding.confidence,
        "evidence": {str(name): _plain(value) for name, value in finding.further_evidence.items()},
        "advice": finding.advice,
        "alternatives": [title_of(cause) for cause in finding.alternatives],
        "charts": [chart for one in _shown(finding, digest) if (chart := _chart(one, finding.since))],
    }


def _shown(finding: Finding, digest: Digest) -> list[_Series]:
    """Of each kind the series that moved farthest, the kinds that moved first; then how the whole training took it.
    What failed of Holter's own has nothing to do with it."""
    if finding.where == "monitor":
        return []
    farthest = sorted(_departures(finding, digest), key=lambda one: -one[0])
    kinds: dict[str, tuple[int, float, _Series]] = {}
    for distance, step, one in farthest:
        kinds.setdefault(one.kind, (step, -distance, one))
    first = [one for _, _, one in sorted(kinds.values(), key=lambda found: found[:2])]
    own = [one for one in first if one.layer is not None] if finding.layer else first
    whole = sorted((one for one in _scalars(digest) if one.kind in _ALWAYS), key=lambda one: _ALWAYS.index(one.kind))
    return list({one.title: one for one in [*own[: _CHARTS - 1], *whole, *own[_CHARTS - 1 :]]}.values())[:_CHARTS]


def order_of_events(findings: Sequence[Finding], onsets: Sequence[Event]) -> list[Json]:
    """What happened when, oldest first: which series left their past, when it was known, when it was last seen."""
    events: list[tuple[int, int, str]] = []
    for finding in [one for one in ranked(findings) if one.where != "monitor"][:_CHARTS]:
        events += [(event.since, rank(event), _event(event)) for event in onsets_of(finding, onsets)]
        what = f"{title_of(finding.cause)}{f' in {finding.layer}' if finding.layer else ''}"
        events.append((finding.since, 7, f"{what} begins"))
        events.append((finding.step, 8, f"{what} is known"))
        if finding.until is not None:
            events.append((finding.until, 9, f"{what} is seen for the last time"))
    return [{"step": step, "what": what} for step, _, what in sorted(set(events))]


def _event(event: Event) -> str:
    name = TITLES.get(event.series, event.series.replace("/", " ").replace("_", " "))
    title = f"{name} of {event.layer}" if event.layer is not None else name
    if event.series.startswith(SET):
        return f"{title} is set to {times(event.factor)} what it was"
    return f"{title} {'leaves its usual range' if np.isfinite(event.first_factor) else 'is not finite'}"


def _departures(finding: Finding, digest: Digest) -> Iterator[tuple[float, int, _Series]]:
    """How far, since which step, and what: series that leave their past about the onset."""
    for one in _candidates(finding, digest):
        near = (one.steps >= finding.since - _BEFORE * _span(one)) & (one.steps <= finding.since + _AFTER * _span(one))
        past = near & (one.steps < finding.since)
        after = near & (one.steps >= finding.since)
        if past.sum() < _LEAST or not after.any():
            continue
        scale = _on_scale(one)
        usual = np.median(scale[past])
        spread = 1.4826 * np.median(np.abs(scale[past] - usual)) + 0.02 * max(abs(float(usual)), 0.05)
        away = np.abs(scale[after] - usual) / spread
        outside = np.flatnonzero(~(away < _MOVED))
        if len(outside):
            first = int(one.steps[after][outside[0]])
            yield float(np.minimum(np.nan_to_num(away, nan=1e6, posinf=1e6), 1e6).max()), first, one


def _candidates(finding: Finding, digest: Digest) -> Iterator[_Series]:
    is_slow = finding.where == "performance"
    yield from (one for one in _scalars(digest) if is_slow or not one.kind.startswith(_MACHINE))
    if finding.layer is None:
        return
    for (role, statistic), strip in digest.strips.items():
        for layer, place in strip.layers.items():
            if layer == finding.layer or layer.startswith(f"{finding.layer}."):
                kind = TITLES.get(f"{role}/{statistic}", f"{role} {statistic}")
                yield _series(kind, strip.buckets, place, statistic in ("norm", "ratio", "rms", "std"), layer)


def _scalars(digest: Digest) -> Iterator[_Series]:
    for name, buckets in digest.scalars.items():
        if name not in _SILENT:
            yield _series(name, buckets, 0, name.endswith(("norm", "loss", "scale")) or name == "gradient_norm")


def _series(kind: str, buckets: Buckets, place: int, is_log: bool, layer: str | None = None) -> _Series:
    values = buckets.last[:, place].astype(np.float64)
    seen = ~np.isnan(values)
    title = kind.replace("_", " ") + (f" of {layer}" if layer else "")
    return _Series(kind, title, is_log and bool((values[seen] > 0).all()), buckets.steps[seen], values[seen], layer)


def _on_scale(one: _Series) -> Floats:
    return np.log(one.values) if one.is_log else one.values


def _span(one: _Series) -> int:
    """Steps between two values, so that a chart of a long run shows as many values as one of a short run."""
    return max(1, int(np.median(np.diff(one.steps)))) if len(one.steps) > 1 else 1


def _chart(one: _Series, since: int) -> Json | None:
    span = _span(one)
    near = (one.steps >= since - _BEFORE * span) & (one.steps <= since + _AFTER * span)
    if near.sum() < 2:
        return None
    return {
        "title": one.title,
        "steps": one.steps[near].tolist(),
        "values": numbers(one.values[near]),
        "log": one.is_log,
    }


def _plain(value: object) -> object:
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float | np.number):
        return float(value) if np.isfinite(float(value)) else number(float(value))
    return str(value)
