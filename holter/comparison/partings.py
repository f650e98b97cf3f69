"""Where two runs part: the first step and layer at which anything recorded differs, and from which on it matters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holter.comparison.series import departing, differing, first_true
from holter.comparison.setup import is_setting
from holter.comparison.tracks import Track, meet
from holter.series import Flags, Floats, Integers

# Clocks and machines: these differ between any two trainings.
_OF_THE_MACHINE = re.compile(
    r"(^|[/_. -])(time|times|seconds?|secs?|ms|duration|elapsed|eta|speed|throughput|per_second|memory|mem|gpu|cpu"
    r"|fps|tps|machine|monitor_cost|dropped)([/_. -]|$)",
    re.IGNORECASE,
)
_IDENTITIES = ("hash",)  # numbers without a size
_ORDER = {"batch": 0, "setting": 1, "weight": 2, "activation": 3, "loss": 4, "gradient": 5, "scalar": 6}
_IN_DEPTH = ("weight", "activation")
_ROUNDING = 1e-5
_HALVED = 2.0**-7  # of a norm that was rounded to bfloat16 more than once
_SETTING = 0.02  # by which share a setting must differ to matter
_TOLD = 12  # series that are listed


@dataclass(frozen=True)
class Parting:
    """A series that differs from a step on: there, `reference` was its value in the one run and `other` in the other.

    `step` is the reference's; in the other run it was `other_step`, which is another one only where runs are aligned by
    samples or tokens. `layers` says how many layers part with it at this step.
    """

    series: str
    layer: str | None
    step: int
    other_step: int
    reference: float
    other: float
    role: str = "scalar"
    layers: int = 0


@dataclass(frozen=True)
class Partings:
    """`difference` is the first anything, down to the last bit; `departure` the first that is material: more than is
    usual for the series. Each also of layers alone. `series` lists those that depart, the earliest first."""

    compared: int  # series that both runs have
    steps: int  # that both runs have
    difference: Parting | None
    layer_difference: Parting | None
    departure: Parting | None
    layer_departure: Parting | None
    series: tuple[Parting, ...]


def find_partings(ours: Track, theirs: Track) -> Partings:
    differences: list[Parting] = []
    departures: list[Parting] = []
    compared, began_equal = 0, _began_equal(ours, theirs)
    for table in (*_scalars(ours, theirs), *_layers(ours, theirs)):
        compared += len(table.layers)
        differences += table.first(differing(table.ours, table.theirs) & ~table.rounding)
        departures += table.first(table.departing(began_equal))
    return Partings(
        compared,
        len(meet(ours, theirs, ours.steps, theirs.steps)[0]),
        _earliest(differences),
        _earliest([one for one in differences if one.layers and one.role != "batch"]),
        _earliest(departures),
        _earliest([one for one in departures if one.layers and one.role != "batch"]),
        tuple(sorted(departures, key=_when)[:_TOLD]),
    )


def _began_equal(ours: Track, theirs: Track) -> bool:
    """Whether they had the same weights and the same data at first, whatever was set otherwise: then the first loss is
    the same to the bit. Where none was logged, the first gradient norm."""
    for name in ("loss", "gradient_norm"):
        (our_steps, our_values), (their_steps, their_values) = ours.scalar(name), theirs.scalar(name)
        left, right = meet(ours, theirs, our_steps, their_steps)
        if len(left):
            return not differing(our_values[left[:1]], their_values[right[:1]]).any()
    return True


def _fits_bfloat16(values: Floats) -> Flags:
    return np.asarray((values.astype(np.float32).view(np.uint32) & 0xFFFF) == 0)


@dataclass(frozen=True)
class _Table:
    """One scalar, or one statistic of all layers of a role, where both runs have it: [n], [n, k]."""

    series: str
    role: str
    statistic: str
    layers: tuple[str | None, ...]
    our_steps: Integers
    their_steps: Integers
    ours: Floats
    theirs: Floats

    @property
    def rounding(self) -> Flags:
        """Norms of all gradients are summed up in one of several ways, by what else is measured at a step."""
        if not (self.series.startswith("gradient norm") or self.series == "clip norm") or self.layers != (None,):
            return np.zeros(self.ours.shape, dtype=bool)
        # torch's clip sums up in the dtype of the model; what is left after it is worked out from that sum.
        is_halved = _fits_bfloat16(self.ours) != _fits_bfloat16(self.theirs)
        is_halved |= self.series == "gradient norm clipped"
        bound = np.where(is_halved, _HALVED, _ROUNDING) * np.abs(self.theirs)
        return np.asarray(np.abs(self.ours - self.theirs) <= bound)

    def departing(self, began_equal: bool) -> Flags:
        """Runs that began apart differ by chance, layers more than the rest: there are many. Settings never do."""
        if self.statistic in _IDENTITIES:
            return np.zeros(self.ours.shape, dtype=bool)
        if self.role == "setting":
            return ~np.isclose(self.ours, self.theirs, rtol=_SETTING, atol=0.0, equal_nan=True)
        return departing(self.ours, self.theirs, 0.0 if began_equal else 0.25 if self.layers == (None,) else 1.0)

    def first(self, flags: Flags) -> list[Parting]:
        """The earliest of all layers, and of each role one line: what parts later in the same series says no more."""
        rows = first_true(flags)
        if not len(rows) or (rows < 0).all():
            return []
        row = int(rows[rows >= 0].min())
        together = np.flatnonzero(rows == row)
        place = self._nearest(row, together)
        return [
            Parting(
                self.series,
                self.layers[place],
                int(self.our_steps[row]),
                int(self.their_steps[row]),
                float(self.ours[row, place]),
                float(self.theirs[row, place]),
                self.role,
                len(together) if self.layers[place] is not None else 0,
            )
        ]

    def _nearest(self, row: int, together: Integers) -> int:
        """The layer that is nearest to the cause, as far as one step can tell. The forward pass hands a difference down
        and the backward pass hands it up; where it is in all gradients, it is nearest where it is largest."""
        measured = ~(np.isnan(self.ours[row]) | np.isnan(self.theirs[row]))
        if self.role in _IN_DEPTH:
            return int(together[0])
        if self.role == "gradient" and len(together) < measured.sum():
            return int(together[-1])
        with np.errstate(all="ignore"):
            left, right = np.log(np.abs(self.ours[row, together])), np.log(np.abs(self.theirs[row, together]))
            return int(together[np.nan_to_num(np.abs(left - right), nan=np.inf).argmax()])


def _scalars(ours: Track, theirs: Track) -> Iterator[_Table]:
    known = set(theirs.scalars)
    for name in ours.scalars:
        if name not in known or _OF_THE_MACHINE.search(name):
            continue
        (our_steps, our_values), (their_steps, their_values) = ours.scalar(name), theirs.scalar(name)
        left, right = meet(ours, theirs, our_steps, their_steps)
        role = "setting" if is_setting(name) else "loss" if name == "loss" else "scalar"
        values = our_values[left, None], their_values[right, None]
        yield _Table(name.replace("_", " "), role, "", (None,), our_steps[left], their_steps[right], *values)


def _layers(ours: Track, theirs: Track) -> Iterator[_Table]:
    for role in (role for role in ours.roles if role in theirs.roles):
        known = theirs.reading.statistics(role)
        for statistic in ours.reading.statistics(role):
            if statistic in known:
                yield _layer_table(ours, theirs, role, statistic)


def _layer_table(ours: Track, theirs: Track, role: str, statistic: str) -> _Table:
    steps, layers, values = common_layers(ours, theirs, role, statistic)
    # Not measured in one of them is no difference.
    unknown = np.isnan(values[0]) | np.isnan(values[1])
    ours_, theirs_ = (np.where(unknown, np.nan, one) for one in values)
    return _Table(f"{role.replace('_', ' ')} {statistic}", role, statistic, layers, *steps, ours_, theirs_)


def common_layers(
    ours: Track, theirs: Track, role: str, statistic: str
) -> tuple[tuple[Integers, Integers], tuple[str, ...], tuple[Floats, Floats]]:
    """Steps, layers and values [n, k] of both, where both have them."""
    (our_steps, our_layers, left), (their_steps, their_layers, right) = (
        track.series(role, statistic) for track in (ours, theirs)
    )
    place = {layer: index for index, layer in enumerate(their_layers)}
    shared = np.array([index for index, layer in enumerate(our_layers) if layer in place], dtype=np.int64)
    layers = tuple(our_layers[index] for index in shared)
    their_shared = np.array([place[layer] for layer in layers], dtype=np.int64)
    rows, their_rows = meet(ours, theirs, our_steps, their_steps)
    values = left[np.ix_(rows, shared)], right[np.ix_(their_rows, their_shared)]
    return (our_steps[rows], their_steps[their_rows]), layers, values


def _when(parting: Parting) -> tuple[int, int]:
    return parting.step, _ORDER.get(parting.role, len(_ORDER))


def _earliest(partings: list[Parting]) -> Parting | None:
    return min(partings, key=_when, default=None)
