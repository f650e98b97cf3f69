"""Sign: one thing about a run that is odd, with its number; Evidence: what a search for signs may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from holter.history import History
from holter.statistics.histogram import Histogram
from holter.statistics.rows import STATISTICS

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

Level = Literal["warning", "info"]

_NAMED = 3  # layers that a sign lists by name
_LONGEST = 60  # of a name in a sign


@dataclass(frozen=True)
class Sign:
    """What is odd, where and since when: an observation, not a diagnosis.

    `info` is for what is often meant to be so, such as a frozen backbone.
    """

    kind: str
    text: str
    layers: tuple[str, ...] = ()
    since: int | None = None
    value: float = float("nan")
    level: Level = "warning"


@dataclass(frozen=True)
class Look:
    """A statistic of one layer at the steps at which it was measured: [s] each."""

    layer: str
    steps: Integers
    values: Floats


@dataclass(frozen=True, eq=False)
class Evidence:
    """`parameters` are those of run.json, by name."""

    history: History
    parameters: Mapping[str, Mapping[str, Any]]

    def looks(self, role: str, statistic: str) -> Iterator[Look]:
        """Of every layer that has the statistic, in the order in which they run as far as that is known."""
        if role not in self.history.roles or statistic not in (*self.history.extras(role), *STATISTICS):
            return
        steps, layers, values = self.history.series(role, statistic)
        for layer, column in zip(layers, values.T, strict=True):
            seen = ~np.isnan(column)
            if seen.any():
                yield Look(layer, steps[seen], column[seen])

    def last(self, role: str, statistic: str) -> dict[str, float]:
        """The statistic of every layer as last measured."""
        return {look.layer: float(look.values[-1]) for look in self.looks(role, statistic)}

    def is_float16(self, parameter: str) -> bool:
        return self.parameters.get(parameter, {}).get("dtype") == "float16"

    def in_depth(self, layers: Iterable[str]) -> tuple[str, ...]:
        """From the input to the output where that is known; what never ran comes last."""
        depth = self.history.depth
        return tuple(sorted(layers, key=lambda layer: depth.get(layer, len(depth))))

    @cached_property
    def gradient_histograms(self) -> dict[str, tuple[int, Histogram]]:
        return last_histograms(self.history, "gradient")

    def names(self, layers: Sequence[str]) -> str:
        """Few layers by name; many by the modules that hold them and nothing else, the rest as a number."""
        if len(layers) > _NAMED:
            layers = _holders(layers, self.parameters)
        is_one_more = len(layers) == _NAMED + 1  # its name takes no more than the words about it
        shown = [_shorten(layer) for layer in (layers if is_one_more else layers[:_NAMED])]
        more = len(layers) - len(shown)
        return ", ".join(shown) + (f" and {more:,} more" if more else "")


Search = Callable[[Evidence], Iterator[Sign]]


def last_histograms(history: History, role: str) -> dict[str, tuple[int, Histogram]]:
    """The newest histogram of every layer of a role, and its step."""
    found: dict[str, tuple[int, Histogram]] = {}
    wanted = set(history.layers(role))
    for record in reversed(history.records_of(role)):
        rows = record.rows[role]
        histograms = rows.rows.histograms
        if histograms is not None:
            for place, layer in enumerate(rows.layers):
                found.setdefault(layer, (record.step, histograms[place]))
        if len(found) == len(wanted):
            break
    return found


def trailing(steps: Integers, holds: Flags) -> int | None:
    """The step since which something has held without a break; None where it does not hold at the last look.

    >>> trailing(np.array([0, 10, 20]), np.array([False, True, True]))
    10
    """
    if not len(holds) or not holds[-1]:
        return None
    breaks = np.flatnonzero(~holds)
    return int(steps[breaks[-1] + 1 if len(breaks) else 0])


def since_words(since: int | None) -> str:
    if since is None:
        return ""
    return f", since step {since:,}" if since else ", from the first step on"


def _holders(layers: Sequence[str], parameters: Mapping[str, Any]) -> list[str]:
    """The outermost modules that hold only such layers, written as `encoder.*`; single layers keep their names."""
    chosen = set(layers)
    mixed = {prefix for name in parameters if name not in chosen for prefix in _prefixes(name)}
    groups: dict[str, list[str]] = {}
    for layer in layers:
        whole = next((prefix for prefix in _prefixes(layer) if prefix not in mixed), layer)
        groups.setdefault(whole, []).append(layer)
    return [members[0] if len(members) == 1 else f"{whole}.*" for whole, members in groups.items()]


def _prefixes(name: str) -> list[str]:
    """From the outermost in.

    >>> _prefixes("encoder.0.weight")
    ['encoder', 'encoder.0']
    """
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _shorten(name: str) -> str:
    return name if len(name) <= _LONGEST else f"…{name[1 - _LONGEST :]}"
