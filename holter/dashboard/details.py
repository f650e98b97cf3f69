"""Parts of a run page that are fetched when they are looked at: one layer, one map, some steps of a map."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holter.journal_parts import read_between
from holter.record import EXECUTION_ORDER
from holter.report.buckets import telling
from holter.report.digest import DRAWN, Digest, Strip
from holter.report.drawing import histograms, map_id, numbers, ordered_strips, strip_map, strip_title
from holter.report.reading import Follower
from holter.run import Run

_BUCKETS = 400
_FEW = 4  # of so many parts of a run one has at least 200 columns in its map
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
    """The map of these steps only, read again; None where it would not show more than the map of the whole run.

    Where there were too many to read them all, `thinned` has how many records were read, and of how many.
    """
    role, _, statistic = wanted.partition("/")
    if statistic not in DRAWN.get(role, ("norm",)):
        return None
    part = read_between(Run(path).own_journals, role, first, last)
    is_thinned = part.read < part.there
    if is_thinned and _FEW * (last - first + 1) > part.last_step:
        return None  # every step has left its mark in the columns of the whole run, and there are enough of them
    digest, strip = Digest(), Strip(role, statistic, _BUCKETS)
    if part.depth is not None:
        digest.notes[EXECUTION_ORDER] = part.depth
    for record in part.records:
        # Counted from the first step, so that the buckets are spent on these alone.
        strip.put(record.step - first, record.rows[role])
    if not len(strip.buckets.steps):
        return None
    found = strip_map(digest, strip)
    thinned = {"thinned": [part.read, part.there]} if is_thinned else {}
    return {**found, "steps": [step + first for step in found["steps"]], **thinned}
