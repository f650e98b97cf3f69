"""Numbers out of timings: medians, ratios with their intervals, and who takes a turn when. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
_RESAMPLES = 2000
_LEAST_ROUNDS = 3  # for an interval


@dataclass(frozen=True)
class Spread:
    """What many measurements of one thing look like; in the unit they were given in."""

    count: int
    median: float
    p99: float  # of fewer than a hundred it is nearly the largest
    mean: float


@dataclass(frozen=True)
class Ratio:
    """How many times as long as another, with the 95 % interval of that; None where too few rounds give one."""

    value: float
    low: float | None
    high: float | None


def spread(values: Iterable[float]) -> Spread | None:
    found = np.array(list(values), dtype=np.float64)
    if not found.size:
        return None
    middle, high = np.quantile(found, (0.5, 0.99))
    return Spread(found.size, float(middle), float(high), float(found.mean()))


def ratio_of_medians(of: Mapping[int, float], to: Mapping[int, float]) -> Ratio | None:
    """Medians over the rounds that both took part in; rounds are resampled whole, since drift hits both alike."""
    return _ratio(of, to, np.median)


def ratio_of_means(of: Mapping[int, float], to: Mapping[int, float]) -> Ratio | None:
    """As `ratio_of_medians`, but rare long steps count: what a whole training takes."""
    return _ratio(of, to, np.mean)


def ratio_of_tails(of: Mapping[int, Sequence[float]], to: Mapping[int, Sequence[float]]) -> Ratio | None:
    """Of the 99th percentile of all values of all rounds, each with as many; rounds are resampled whole here, too."""
    rounds = sorted(of.keys() & to.keys())
    if not rounds:
        return None
    pairs = np.array([(of[number], to[number]) for number in rounds], dtype=np.float64)  # [rounds, 2, values]
    value = _tails(pairs)
    if len(rounds) < _LEAST_ROUNDS:
        return Ratio(float(value[0] / value[1]), None, None)
    generator = np.random.default_rng(0)
    drawn = [_tails(pairs[generator.integers(len(pairs), size=len(pairs))]) for _ in range(_RESAMPLES)]
    low, high = np.quantile([tails[0] / tails[1] for tails in drawn], (0.025, 0.975))
    return Ratio(float(value[0] / value[1]), float(low), float(high))


def _tails(pairs: Floats) -> Floats:
    return np.asarray(np.quantile(pairs.swapaxes(0, 1).reshape(2, -1), 0.99, axis=1))


def _ratio(of: Mapping[int, float], to: Mapping[int, float], middle: Callable[..., Any]) -> Ratio | None:
    if not of or not to:
        return None
    rounds = sorted(of.keys() & to.keys())
    if len(rounds) < _LEAST_ROUNDS:
        return Ratio(float(middle(list(of.values())) / middle(list(to.values()))), None, None)
    pairs = np.array([(of[number], to[number]) for number in rounds], dtype=np.float64)  # [rounds, 2]
    drawn = np.random.default_rng(0).integers(len(pairs), size=(_RESAMPLES, len(pairs)))
    value, resampled = middle(pairs, axis=0), middle(pairs[drawn], axis=1)  # [2], [resamples, 2]
    low, high = np.quantile(resampled[:, 0] / resampled[:, 1], (0.025, 0.975))
    return Ratio(float(value[0] / value[1]), float(low), float(high))


def turn_order(count: int, number: int) -> list[int]:
    """Who comes when in a round: shifted by one every second round, backwards in every other.

    So over 2 x count rounds everyone has every place twice, and follows either neighbour equally often.
    """
    shift = number // 2 % count if count else 0
    order = [*range(shift, count), *range(shift)]
    return order[::-1] if number % 2 else order


def rounds_within(seconds: float, limit: float, rounds: int, least: int = 3) -> int:
    """How many rounds something of this length takes part in so that it stays within the limit."""
    if seconds > limit:
        return 1
    return max(min(least, rounds), min(rounds, int(limit / max(seconds, 1e-9))))


def evenly(taken: int, rounds: int) -> frozenset[int]:
    """So many rounds, spread over all of them."""
    return frozenset(int(place) for place in np.linspace(0, rounds - 1, min(taken, rounds)).round())
