"""Events: which series left its own baseline, when, which way and how far. Causes are told apart by their order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from holter.diagnosis.chart import Moment
from holter.record import LayerRows
from holter.series import Baseline, Floats, Integers, logs
from holter.statistics.rows import STATISTICS

LIMIT = 6.0  # times its usual spread
LEAST_FACTOR = 1.5  # and at least so many times its level: a series that hardly moves leaves its band easily
HELD = 4  # values in a row, of the last few, that make a departure one that is sustained
KEPT = 400  # steps for which an event is remembered

# Watched of every layer, on a log scale.
TABLES = (
    ("gradient", "norm"),
    ("update", "ratio"),
    ("weight", "norm"),
    ("activation", "rms"),
    ("second_moment", "rms_ratio"),
    ("attention", "max_logit"),
    ("batch", "std"),
    ("batch", "abs_max"),
)
_LEAST = np.log10(LEAST_FACTOR)
SCALARS = ("loss", "gradient_norm", "step_time")


_DEPARTURE = [("since", "i8"), ("values", "i8"), ("direction", "i8"), ("factor", "f8"), ("first", "f8")]


@dataclass(frozen=True)
class Event:
    """One departure of one series. `until` is None while it lasts."""

    series: str  # such as "gradient/norm", or the name of a scalar
    layer: str | None
    since: int
    until: int | None
    values: int  # that lay outside
    direction: int  # 1 up, -1 down
    factor: float  # value over level where it was farthest
    first_factor: float  # the same at the onset

    @property
    def is_sustained(self) -> bool:
        return self.values >= HELD


class Events:
    """The departures of all watched series."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str | None], int] = {}  # series and layer -> its place
        self._by_place: list[tuple[str, str | None]] = []
        # Of each series, as its layers were last: a mixture of experts has others at every step.
        self._places_of: dict[str, tuple[tuple[str, ...], Integers]] = {}
        self._baseline = Baseline(0)
        self._now = np.zeros(0, dtype=_DEPARTURE)  # of every series; since -1 while it is inside
        self._lasting = 0  # departures that are not over
        self._sorted: list[Event] | None = None
        self.past: list[Event] = []
        self.last_outside = -1  # the last step at which any series was outside
        self._news = False
        self._has_signs = False  # whether the loss was ever 0 or below
        # Steps that wait, all with the same series; those, and how many may wait.
        self._waiting: list[tuple[int, Floats]] = []
        self._at, self._room = np.zeros(0, dtype=np.int64), 1
        self._parts, self._joined = [self._at], self._at
        self._bands: list[tuple[float, float]] | None = None  # of the scalars among them

    def add(self, moment: Moment) -> None:
        """Calm steps wait for a few others, as numpy takes as long for one as for many; a scalar that leaves its band
        is known at once, and with it all that happened."""
        scalars = {name: moment.scalars[name] for name in SCALARS if name in moment.scalars}
        self._has_signs |= scalars.get("loss", 1.0) <= 0
        if self._has_signs:
            scalars.pop("loss", None)  # on a log scale it has no size, and one that crosses zero has not grown
        places, values = self._measured(scalars, moment.rows)
        if places is not self._at:
            self.settle()
            self._at = places
        self._waiting.append((moment.step, values))
        if len(self._waiting) >= self._room or not self._are_inside(scalars):
            self.settle()
        if moment.step % 64 == 0 and self.past:
            kept = [event for event in self.past if event.since >= moment.step - KEPT]
            self._has_changed(len(kept) < len(self.past))
            self.past = kept

    def settle(self) -> None:
        """Judges the steps that wait."""
        waiting, self._waiting = self._waiting, []
        if len(self._now) < len(self._names):
            self._make_room()
        is_calm = len(waiting) > 1 and self._baseline.extend(
            logs(np.array([values for _, values in waiting])), LIMIT, self._at
        )
        if not is_calm:
            for step, values in waiting:
                self._judge(step, self._at, values)
        may_wait = not self._lasting and self._baseline.is_grown(self._at)
        self._room = self._baseline.room if may_wait else 1
        self._bands = None

    def _are_inside(self, scalars: Mapping[str, float]) -> bool:
        """In plain python, which is quicker for a few."""
        if self._bands is None:
            chosen = self._at[: len(scalars)]
            level, most = self._baseline.level[chosen], LIMIT * self._baseline.scale[chosen]
            self._bands = [(10.0**low, 10.0**high) for low, high in zip(level - most, level + most, strict=True)]
        return all(low < value < high for value, (low, high) in zip(scalars.values(), self._bands, strict=True))

    def _measured(self, scalars: Mapping[str, float], rows: Mapping[str, LayerRows]) -> tuple[Integers, Floats]:
        """Where the series of this step stand, and their values."""
        told = [np.inf if math.isnan(value) else value for value in scalars.values()]
        places, values = [self._places("", tuple(scalars))], [np.array(told)]
        for role, statistic in TABLES:
            found = rows.get(role)
            if found is not None and (statistic in found.extras or statistic in STATISTICS):
                places.append(self._places(f"{role}/{statistic}", found.layers))
                is_extra = statistic in found.extras
                values.append(found.extras[statistic] if is_extra else found.rows.derive(statistic))
        if len(places) != len(self._parts) or any(
            one is not last for one, last in zip(places, self._parts, strict=True)
        ):
            self._parts, self._joined = places, np.concatenate(places)
        return self._joined, np.concatenate(values)

    def has_news(self) -> bool:
        """Whether any event began, went on, ended or was forgotten since this was last asked."""
        had, self._news = self._news, False
        return had

    def _has_changed(self, is_so: bool) -> None:
        if is_so:
            self._news, self._sorted = True, None

    def of(self, name: str, *, direction: int | None = None, since: int = 0) -> list[Event]:
        """The events of one series, the earliest first."""
        return [event for event in self.all(since) if event.series == name and direction in (None, event.direction)]

    def all(self, since: int = 0) -> list[Event]:
        """Of all series, the earliest first. Kept until there is another: every rule asks."""
        self.settle()
        if self._sorted is None:
            lasting = [self._event(place, None) for place in np.flatnonzero(self._now["since"] >= 0).tolist()]
            self._sorted = sorted([*self.past, *lasting], key=lambda event: event.since)
        return self._sorted if not since else [event for event in self._sorted if event.since >= since]

    def _places(self, name: str, layers: tuple[str, ...]) -> Integers:
        """Where the series of these layers stand; new ones get a place. Without a name they are scalars."""
        last, known = self._places_of.get(name, ((), None))
        if known is None or last != layers:
            keys = [(name, layer) if name else (layer, None) for layer in layers]
            for key in keys:
                if key not in self._names:
                    self._names[key] = len(self._names)
                    self._by_place.append(key)
            known = np.array([self._names[key] for key in keys], dtype=np.int64)
            self._places_of[name] = layers, known
        return known

    def _make_room(self) -> None:
        more = np.zeros(len(self._names) - len(self._now), dtype=_DEPARTURE)
        more["since"] = -1
        self._now = np.concatenate([self._now, more])
        self._baseline.grow(len(more))

    def _judge(self, step: int, places: Integers, values: Floats) -> None:
        """Which series are outside at this step."""
        sizes, level = logs(values), self._baseline.level[places]
        found = self._baseline.add(sizes, LIMIT, places)
        outside, lost = np.abs(found) > LIMIT, values == np.inf
        if outside.any() or lost.any():
            with np.errstate(invalid="ignore"):
                away = sizes - level
                outside &= np.abs(away) > _LEAST
            outside |= lost & (self._baseline.count[places] >= 1)
            away[np.isnan(away)] = np.inf
            self._go_on(step, places[outside], away[outside])
        if self._lasting:
            lasts = self._now["since"][places] >= 0
            self._end(step, places[lasts & ~outside & ~np.isnan(values)])

    def _end(self, step: int, places: Integers) -> None:
        for place in sorted(places.tolist()):
            self.past.append(self._event(place, step))
        self._now["since"][places] = -1
        self._lasting -= len(places)
        self._has_changed(len(places) > 0)

    def _go_on(self, step: int, places: Integers, away: Floats) -> None:
        """Departures that begin or last, so many powers of ten from their levels."""
        if not len(places):
            return
        self.last_outside = step
        self._has_changed(True)
        now = self._now[places]
        begins = now["since"] < 0
        self._lasting += int(begins.sum())
        now["since"][begins], now["values"][begins], now["factor"][begins] = step, 0, 0.0
        now["direction"][begins], now["first"][begins] = np.sign(away[begins]), away[begins]
        now["values"] += 1
        farther = np.abs(away) > np.abs(now["factor"])
        now["factor"][farther] = away[farther]
        self._now[places] = now

    def _event(self, place: int, until: int | None) -> Event:
        since, values, direction, factor, first = self._now[place].tolist()
        name, layer = self._by_place[place]
        return Event(name, layer, since, until, values, direction, _power(factor), _power(first))


def _power(exponent: float) -> float:
    return float(10.0**exponent) if exponent < 300 else float("inf")
