"""Parts of a run page that are fetched when they are looked at: one layer, one map, some steps of a map."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from holter.journal_parts import read_between
from holter.report.buckets import telling
from holter.report.digest import Digest
from holter.report.drawing import histograms, map_id, numbers, ordered_strips, strip_map, strip_title
from holter.report.reading import Follower
from holter.run import Run

_BUCKETS, _MOST_RECORDS = 400, 1600
_HISTOGRAM_ROLES = ("gradient", "weight", "activation")


def layer_detail(follower: Follower, layer: str) -> dict[str, Any]:
    """Its series in every map, and its histograms over time."""
    digest = follower.digest
    series = []
    for strip in ordered_strips(digest):
        if layer in strip.layers:
            values = numbers(telling(strip.buckets)[:, strip.layers[layer]])
            series.append({**strip_title(strip), "steps": strip.buckets.steps.tolist(), "values": values})
    drawn = {}
    for role in _HISTOGRAM_ROLES:
        found = histograms(digest.snapshots[role], [layer]) if role in digest.snapshots else {}
        layers = found.pop("layers", {})
        if layer in layers:
            drawn[role] = {**found, **layers[layer]}
    return {"layer": layer, "series": series, "histograms": drawn}


def whole_map(follower: Follower, wanted: str) -> dict[str, Any] | None:
    found = [strip for strip in ordered_strips(follower.digest) if map_id(strip) == wanted]
    return strip_map(follower.digest, found[0]) if found else None


def zoomed(path: Path, wanted: str, first: int, last: int) -> dict[str, Any] | None:
    """The map of these steps only, read again; None where none of them has it."""
    role, _, statistic = wanted.partition("/")
    digest = Digest(_BUCKETS)
    for journal in Run(path).own_journals:
        for record in read_between(journal, first, last, _MOST_RECORDS):
            if role in record.rows:
                # Counted from the first step, so that the buckets are spent on these alone.
                only = {role: record.rows[role]}
                digest.take(replace(record, step=record.step - first, rows=only, scalars={}))
    strip = digest.strips.get((role, statistic))
    if strip is None:
        return None
    found = strip_map(digest, strip)
    return {**found, "steps": [step + first for step in found["steps"]]}
