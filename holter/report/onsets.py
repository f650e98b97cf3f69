"""Which series left their usual range about the onset of a finding, at the very steps at which the doctor saw it.

What a page draws is thinned out: of a long run it does not tell the step, nor what went before what.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from holter.diagnosis.doctor import Doctor
from holter.diagnosis.events import HELD, LEAST_FACTOR, Event
from holter.diagnosis.finding import Finding
from holter.record import Record

SET = ("learning_rate", "weight_decay", "clip_max_norm", "loss_scale")  # by the training, not by its course
_AFTER = 120  # steps after its onset in which what happens belongs to a finding
_NAMED = 6  # of a finding
_FAR = 10.0  # times its level: from there on one value is enough
_STEADY = 1.05  # times what it was, within which a setting is the same
_MOST = 4096  # events that are kept


class Onsets:
    """Of one run, in bounded memory: a doctor forgets its events after a while."""

    def __init__(self) -> None:
        self._events: dict[tuple[str, str | None, int], Event] = {}
        self._asked: tuple[Finding, ...] = ()  # as the doctor said when its rules were last asked
        self._over = 0  # events, by then
        self._set: dict[str, tuple[float, float]] = {}  # the last two values

    def see(self, record: Record) -> None:
        """What was set anew: no series of the doctor's has it. A schedule that changes it all the time is no such."""
        for name, value in record.scalars.items():
            if name.startswith(SET):
                before, last = self._set.get(name, (math.nan, math.nan))
                was_steady = last > 0 and math.isfinite(before) and not _is_beyond(last, before, _STEADY)
                if was_steady and _is_beyond(value, last, LEAST_FACTOR):
                    factor, way = value / last, 1 if value > last else -1
                    self._keep(Event(name, None, record.step, record.step, HELD, way, factor, factor))
                self._set[name] = last, value

    def take(self, doctor: Doctor) -> None:
        """Where it has just asked its rules: then its events are up to date. While it has found nothing, those that are
        over: it may know later what they belonged to."""
        events, findings = doctor.events, doctor.findings
        if findings is self._asked and (findings or len(events.past) == self._over):
            return
        self._asked, self._over = findings, len(events.past)
        for event in events.all() if findings else events.past:
            self._keep(event)
        if len(self._events) > _MOST:
            newest = sorted(self._events.values(), key=lambda event: event.since)[-_MOST // 2 :]
            near = self.about(doctor.findings)
            self._events = {}
            for event in (*near, *newest):
                self._keep(event)

    def about(self, findings: Iterable[Finding]) -> tuple[Event, ...]:
        """What belongs to any of them, once each."""
        known = list(self._events.values())
        return tuple(dict.fromkeys(event for finding in findings for event in onsets_of(finding, known)))

    def rewind(self, step: int) -> None:
        self._events = {key: event for key, event in self._events.items() if event.since < step}
        self._asked = ()

    def _keep(self, event: Event) -> None:
        self._events[event.series, event.layer, event.since] = event


def onsets_of(finding: Finding, events: Sequence[Event]) -> list[Event]:
    """The first ones of each series, the earliest first; what is set before what comes of it, and the loss last."""
    if finding.where == "monitor":
        return []
    near = [event for event in events if finding.since <= event.since <= finding.since + _AFTER]
    near = sorted((event for event in near if _belongs(event, finding)), key=lambda event: (event.since, rank(event)))
    first: dict[tuple[str, str | None], Event] = {}
    for event in near:
        first.setdefault((event.series, event.layer), event)
    return list(first.values())[:_NAMED]


def rank(event: Event) -> int:
    """At one step."""
    if event.series.startswith((*SET, "batch/")):
        return 0
    return 1 if event.layer is not None else 3 if event.series == "loss" else 2


def _belongs(event: Event, finding: Finding) -> bool:
    """How long a step takes says nothing of the training's health, and the other way round. One odd value is none."""
    if (event.series == "step_time") != (finding.where == "performance"):
        return False
    if event.values < 2 and 1 / _FAR < event.factor < _FAR:
        return False
    if event.layer is None or event.series.startswith("batch/"):
        return True
    return finding.layer is not None and f"{event.layer}.".startswith(f"{finding.layer}.")


def _is_beyond(value: float, last: float, factor: float) -> bool:
    """Whether one is so many times the other, up or down. Settings are not negative."""
    return value > factor * last or last > factor * value
