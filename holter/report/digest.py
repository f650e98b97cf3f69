"""A run of any length in bounded memory, record by record: what its page draws."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from holter.history import layers_by_depth, names_in
from holter.record import ACTIVATIONS, EXECUTION_ORDER, LayerRows, Record
from holter.report.buckets import BUCKETS, Buckets
from holter.statistics.histogram import Histograms

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

# What is drawn of the layers of each role, the first one first; of others the norm.
DRAWN: Mapping[str, tuple[str, ...]] = {
    "gradient": ("norm", "std", "zero_share"),
    "update": ("ratio", "unchanged", "cosine"),
    "weight": ("norm",),
    "activation": ("rms", "dead", "saturated", "rank"),
    "attention": ("max_logit", "entropy"),
    "momentum": ("norm",),
    "second_moment": ("rms_ratio", "below_eps"),
    "batch": ("rms",),
}
_SNAPSHOTS = 32  # histograms of a role that are kept, at least; at most twice as many


class Strip:
    """One statistic of the layers of a role over the steps."""

    def __init__(self, role: str, statistic: str, buckets: int) -> None:
        self.role, self.statistic = role, statistic
        self.layers: dict[str, int] = {}  # and their places
        self.buckets = Buckets(buckets, layers=0)
        self._places: tuple[tuple[str, ...], Integers] = (), np.zeros(0, dtype=np.int64)

    def put(self, step: int, rows: LayerRows) -> None:
        values = rows.extras.get(self.statistic)
        if values is None:
            if self.statistic in _ONLY_EXTRA:
                return
            values = rows.rows.derive(self.statistic)
        if self.statistic in _SIZES:
            values = np.where(rows.rows.derive("nonfinite") > 0, np.inf, values)  # the norm of the others hides them
        self.buckets.put(step, values, self._places_of(rows.layers))

    def _places_of(self, layers: tuple[str, ...]) -> Integers:
        if self._places[0] is not layers:  # a journal's table is one object for all of its records
            for name in layers:
                self.layers.setdefault(name, len(self.layers))
            self.buckets.grow(len(self.layers))
            self._places = layers, np.array([self.layers[name] for name in layers], dtype=np.int64)
        return self._places[1]


_SIZES = ("norm", "rms", "std")
_ONLY_EXTRA = frozenset(name for names in DRAWN.values() for name in names) - {"norm", "std", "rms", "zero_share"}


class Snapshots:
    """Histograms of a role, thinned out as they come: evenly spread over the run whatever its length."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, tuple[str, ...], Histograms]] = []
        self._every, self._seen = 1, 0

    def put(self, step: int, layers: tuple[str, ...], histograms: Histograms) -> None:
        self._seen += 1
        if (self._seen - 1) % self._every:
            return
        self.taken.append((step, layers, histograms))
        if len(self.taken) > 2 * _SNAPSHOTS:
            self.taken, self._every = self.taken[::2], 2 * self._every

    def rewind(self, step: int) -> None:
        self.taken = [one for one in self.taken if one[0] < step]


class Digest:
    """Takes records in the order in which they were written; where steps are repeated, the newest count."""

    def __init__(self, buckets: int = BUCKETS) -> None:
        self._buckets = buckets
        self.scalars: dict[str, Buckets] = {}
        self.strips: dict[tuple[str, str], Strip] = {}
        self.snapshots: dict[str, Snapshots] = {}
        self.notes: dict[str, str] = {}  # the newest of each kind
        self.sums: dict[str, float] = {}  # of the time of all steps, its stages, and what monitoring took of it
        self.looks: dict[str, int] = {}  # steps in which a role was measured
        self.count = 0  # steps
        self.last_step = -1
        self.segments: set[int] = set()
        self.resumed: list[int] = []  # the first step of each segment but the first, as far as it still counts

    def take(self, record: Record) -> None:
        if not record.late:
            if record.step <= self.last_step:
                self._rewind(record.step)
            self.count += 1
            self.last_step = record.step
            if self.segments and record.segment not in self.segments:
                self.resumed.append(record.step)
            self.segments.add(record.segment)
        if "activation" in record.rows:  # then an older note says what is not so any more
            self.notes.pop(ACTIVATIONS, None)
        self.notes.update(record.notes)
        for name, value in record.scalars.items():
            if name not in self.scalars:
                self.scalars[name] = Buckets(self._buckets)
            # Buckets keep the extremes of what is a number: infinite stays seen, NaN would not. And a norm is recorded
            # of those values that are finite.
            is_partial = name == "gradient_norm" and record.scalars.get("gradient_nonfinite")
            shown = value if math.isfinite(value) and not is_partial else math.inf
            self.scalars[name].put(record.step, np.array([shown]))
        self._add_up(record)
        for role, rows in record.rows.items():
            self.looks[role] = self.looks.get(role, 0) + 1
            for strip in self._strips_of(role):
                strip.put(record.step, rows)
            if rows.rows.histograms is not None:
                snapshots = self.snapshots.setdefault(role, Snapshots())
                snapshots.put(record.step, rows.layers, rows.rows.histograms)

    def _add_up(self, record: Record) -> None:
        found = {
            name: value for name, value in record.scalars.items() if name.startswith("time/") or name == "step_time"
        }
        if "step_time" in found:
            found["monitor"] = found["step_time"] * record.scalars.get("monitor_cost", 0.0)
        for name, value in found.items():
            if math.isfinite(value):
                self.sums[name] = self.sums.get(name, 0.0) + value

    def _strips_of(self, role: str) -> Iterator[Strip]:
        for statistic in DRAWN.get(role, ("norm",)):
            key = role, statistic
            if key not in self.strips:
                self.strips[key] = Strip(role, statistic, self._buckets)
            yield self.strips[key]

    def in_depth(self, layers: Mapping[str, int]) -> tuple[str, ...]:
        """In the order in which they run, as far as that is known."""
        order = names_in(self.notes.get(EXECUTION_ORDER))
        return layers_by_depth(layers, {name: place for place, name in enumerate(order)})

    def _rewind(self, step: int) -> None:
        """Back to where a checkpoint was taken. Which of the steps before count is not known any more exactly."""
        self.count = max(0, self.count - (self.last_step - step + 1))
        self.resumed = [one for one in self.resumed if one < step]
        for scalar in self.scalars.values():
            scalar.rewind(step)
        for strip in self.strips.values():
            strip.buckets.rewind(step)
        for snapshots in self.snapshots.values():
            snapshots.rewind(step)
