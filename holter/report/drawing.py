"""From a digest to what a page draws: lines, strip charts, histograms over time, flow by depth. Plain JSON values."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from holter.report.buckets import Buckets, telling
from holter.report.digest import DRAWN, Digest, Snapshots, Strip
from holter.statistics.histogram import FINITE, LOWER, UPPER

Json = dict[str, Any]
Integers = npt.NDArray[np.int64]
Singles = npt.NDArray[np.float32]

TITLES = {
    "gradient/norm": "gradient norm",
    "gradient/std": "standard deviation of gradients",
    "gradient/zero_share": "share of gradients that are zero",
    "update/ratio": "update ratio",
    "update/unchanged": "share of weights that do not change",
    "update/cosine": "cosine of successive gradients",
    "weight/norm": "weight norm",
    "activation/rms": "size of activations",
    "activation/dead": "dead share",
    "activation/saturated": "saturated share",
    "activation/rank": "effective rank",
    "attention/max_logit": "largest attention logit",
    "attention/entropy": "attention entropy",
    "momentum/norm": "norm of the momentum",
    "second_moment/rms_ratio": "gradient over its second moment",
    "second_moment/below_eps": "share of second moments below eps",
    "batch/rms": "size of the batch's values",
}
_SHARES = frozenset(("zero_share", "unchanged", "cosine", "dead", "saturated", "below_eps", "entropy"))
_LEAST_COLUMNS, _FAR_APART = 4, 3  # times as far as columns usually are: nothing was measured in between
_CODES, _SPECIAL = 1 << 16, 4  # of two bytes; those that are no number on the ladder
_DIGITS = 1e-3  # between two logarithms, so that a value is off by half a thousandth at most
_BINS = 48  # of histograms over time
_MOST_HISTOGRAMS, _LEAST_SNAPSHOTS = 6400, 16  # of a role; of a layer
_FLOWS = {"gradient": ("norm", "gradient norm by depth"), "activation": ("rms", "size of activations by depth")}


def matrix(values: npt.NDArray[Any]) -> Json:
    """[rows, columns] as plotly's own typed array."""
    kind = {"f": "f4", "u": "u1"}[values.dtype.kind]
    packed = np.ascontiguousarray(values, dtype=f"<{kind}").tobytes()
    rows, columns = values.shape
    return {"dtype": kind, "bdata": base64.b64encode(packed).decode(), "shape": f"{rows}, {columns}"}


def compact(sent: Json) -> Json:
    """The same matrix in half as many bytes, good to three digits: two bytes a value, its logarithm.

    Codes are 0 for NaN, 1 for zero, 2 and 3 for what is infinite, and from 4 on the steps of a ladder from the lowest
    size up, each `step` times the one before; where there are negative values every second one is theirs. A matrix
    whose values lie too far apart for that stays as it is.
    """
    values = np.frombuffer(base64.b64decode(sent["bdata"]), "<f4").astype(np.float64)
    usual = np.isfinite(values) & (values != 0)
    sizes = np.log(np.abs(values[usual]))
    signs = 2 if (values[usual] < 0).any() else 1
    low = float(sizes.min()) if len(sizes) else 0.0
    rungs = (_CODES - _SPECIAL) // signs - 1
    step = (float(sizes.max()) - low) / rungs if len(sizes) else 0.0
    if step > _DIGITS:
        return sent
    codes = np.select([np.isnan(values), values == 0, values == np.inf], [0, 1, 2], 3).astype("<u2")
    places = np.round((sizes - low) / (step or 1.0)).astype(np.int64)
    codes[usual] = _SPECIAL + signs * places + (values[usual] < 0)
    packed = base64.b64encode(codes.tobytes()).decode()
    return {"dtype": "log", "bdata": packed, "shape": sent["shape"], "low": low, "step": step, "signs": signs}


def numbers(values: npt.NDArray[Any]) -> list[float | None]:
    """Six digits are more than a screen shows; what is not finite is None."""
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def scalar_lines(digest: Digest) -> Json:
    return {name: scalar_line(buckets) for name, buckets in digest.scalars.items()}


def scalar_line(buckets: Buckets) -> Json:
    line: Json = {"steps": buckets.steps.tolist(), "values": numbers(buckets.last[:, 0])}
    if buckets.span > 1:
        line |= {"low": numbers(buckets.low[:, 0]), "high": numbers(buckets.high[:, 0])}
    else:
        line |= {"low": line["values"], "high": line["values"]}
    return line


def ordered_strips(digest: Digest) -> list[Strip]:
    """Those that hold anything, as DRAWN orders them, roles that it does not know last."""
    known = [(role, statistic) for role, statistics in DRAWN.items() for statistic in statistics]
    keys = [*(key for key in known if key in digest.strips), *(key for key in digest.strips if key not in known)]
    return [digest.strips[key] for key in keys if np.isfinite(digest.strips[key].buckets.last).any()]


def map_id(strip: Strip) -> str:
    return f"{strip.role}/{strip.statistic}"


def strip_map(digest: Digest, strip: Strip) -> Json:
    layers = digest.in_depth(strip.layers)
    places = [strip.layers[layer] for layer in layers]
    steps, values = _with_gaps(strip.buckets.steps, telling(strip.buckets).T[places])
    return {**strip_title(strip), "layers": list(layers), "steps": steps.tolist(), "values": matrix(values)}


def _with_gaps(steps: Integers, values: Singles) -> tuple[Integers, Singles]:
    """A stretch in which nothing was measured gets columns of its own at its ends: not the colour of its neighbours."""
    if len(steps) < _LEAST_COLUMNS:
        return steps, values
    apart = np.diff(steps)
    usual = int(np.median(apart))
    before = np.flatnonzero(apart > _FAR_APART * usual)
    empty = np.concatenate([steps[before] + usual, steps[before + 1] - usual])
    places = np.concatenate([before + 1, before + 1])
    return np.insert(steps, places, empty), np.insert(values, places, np.nan, axis=1)


def strip_title(strip: Strip) -> Json:
    return {
        "id": map_id(strip),
        "role": strip.role,
        "statistic": strip.statistic,
        "title": TITLES.get(map_id(strip), f"{strip.role}: {strip.statistic}"),
        "log": strip.statistic not in _SHARES,
    }


def histograms(snapshots: Snapshots, only: Sequence[str] | None = None) -> Json:
    """Shares of the values in bins that all layers and steps have in common, the widest bins far from zero.

    Of many layers at fewer steps, evenly spread: they are most of what a page of a large model weighs.
    """
    if not snapshots.taken:
        return {}
    edges = _edges(snapshots)
    drawn_of = len(only) if only is not None else max(len(layers) for _, layers, _ in snapshots.taken)
    every = -(-len(snapshots.taken) // max(_LEAST_SNAPSHOTS, _MOST_HISTOGRAMS // max(1, drawn_of)))
    found: dict[str, tuple[list[int], list[npt.NDArray[np.uint8]]]] = {}
    for step, layers, taken in snapshots.taken[::every]:
        for place, layer in enumerate(layers):
            if only is not None and layer not in only:
                continue
            one = taken[place]
            keep = FINITE[one.buckets]
            buckets, counts = one.buckets[keep], one.counts[keep]
            middles = (LOWER[buckets] + UPPER[buckets]) / 2
            middles[buckets == 0] = 0.0
            bins = np.clip(np.searchsorted(edges, middles, side="right") - 1, 0, _BINS - 1)
            share = np.bincount(bins, weights=counts, minlength=_BINS) / max(1, counts.sum())
            steps, rows = found.setdefault(layer, ([], []))
            steps.append(step)
            # A share is drawn, not read: 255 steps of its root keep the tails visible.
            rows.append(np.round(255 * np.sqrt(share)).astype(np.uint8))
    drawn = {layer: {"steps": steps, "counts": matrix(np.stack(rows))} for layer, (steps, rows) in found.items()}
    return {"edges": [float(f"{edge:.4g}") for edge in edges], "scale": "sqrt255", "layers": drawn}


def _edges(snapshots: Snapshots) -> npt.NDArray[np.float64]:
    """Symmetrical and logarithmic: from the largest value down through five decades, and one bin about zero."""
    largest = 0.0
    for _, _, taken in snapshots.taken:
        finite = taken.buckets[FINITE[taken.buckets]]
        if len(finite):
            largest = max(largest, float(np.abs(UPPER[finite]).max()), float(np.abs(LOWER[finite]).max()))
    largest = largest or 1.0
    side = np.geomspace(largest / 1e5, largest, _BINS // 2)
    return np.concatenate([-side[::-1], side, [np.nextafter(largest, np.inf)]])[: _BINS + 1]


def flows(digest: Digest) -> list[Json]:
    """Layers in their order, early, in the middle and at the end of the run."""
    found = []
    for role, (statistic, title) in _FLOWS.items():
        strip = digest.strips.get((role, statistic))
        if strip is None or not np.isfinite(strip.buckets.last).any():
            continue
        layers = digest.in_depth(strip.layers)
        values = strip.buckets.last[:, [strip.layers[layer] for layer in layers]]
        steps = strip.buckets.steps
        places = dict.fromkeys((0, len(steps) // 2, len(steps) - 1))
        names = ("first", "middle", "last") if len(places) == 3 else ("first", "last")
        curves = [
            {"name": name, "step": int(steps[place]), "values": numbers(values[place])}
            for name, place in zip(names, places, strict=False)
        ]
        found.append({"id": role, "title": title, "layers": list(layers), "curves": curves, "log": True})
    return found
