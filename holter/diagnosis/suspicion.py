"""Suspicion: what one rule believes at one step; Case: all that a rule may look at."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from holter.diagnosis.chart import STEP, Chart
from holter.diagnosis.events import Event, Events
from holter.diagnosis.thresholds import Thresholds

EVENTS = "events"  # among what a rule looks at


class Kind(IntEnum):
    """How near the evidence is to the cause. Of two that began together the nearer one explains the other."""

    STATE = 1  # an end state, such as dead units: any earlier event may have led to it
    PATTERN = 2  # an order or a course of events that the cause makes
    FACT = 3  # the cause itself was recorded, such as a rate that jumped


@dataclass(frozen=True)
class Suspicion:
    """`score` from 0 to 1: how well the evidence fits, by the rule's own lights; below one half it is only kept as an
    alternative. `check` says how to see that the advice has worked. `by` is for what is only seen at looks: it began
    after `since`, the look before, and by this step; what is known to have begun in between went before it."""

    cause: str
    where: str
    since: int
    score: float
    kind: Kind = Kind.PATTERN
    layer: str | None = None
    severity: str = "warning"
    evidence: Mapping[str, object] = field(default_factory=dict)
    advice: str = ""
    check: str = ""
    by: int | None = None

    @property
    def began(self) -> int:
        """For the order of events."""
        return self.since if self.by is None else self.by


class Case:
    """The chart keeps what a rule looks at, here too: where there is no news of that, a silent rule stays silent."""

    def __init__(self, chart: Chart, events: Events, limits: Thresholds | None = None) -> None:
        self.chart, self.limits = chart, limits or Thresholds()
        self._events = events

    @property
    def step(self) -> int:
        """The one that was last recorded."""
        self.chart.reads.add(STEP)
        return self.chart.step

    @property
    def events(self) -> Events:
        self.chart.reads.add(EVENTS)
        return self._events

    def lately(self, name: str, within: int, direction: int | None = None) -> list[Event]:
        """The events of one series in the last steps, the earliest first. That one has become old is no news."""
        return self.events.of(name, direction=direction, since=self.chart.step - within)


Rule = Callable[[Case], Iterable[Suspicion]]
