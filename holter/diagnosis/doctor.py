"""The doctor: takes in records as they come and says what is wrong. Live and afterwards the same, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from holter.diagnosis.causes import RULES
from holter.diagnosis.chart import COURSE, Chart, Moments
from holter.diagnosis.endings import is_over
from holter.diagnosis.events import Events
from holter.diagnosis.finding import Finding
from holter.diagnosis.incidents import Incidents
from holter.diagnosis.suspicion import EVENTS, Case, Rule, Suspicion
from holter.diagnosis.thresholds import Thresholds
from holter.record import Record

# With nothing unusual the rules are asked every so many steps: the longer a run is, the rarer. At the beginning, where
# much happens, after these.
_BEGINNING = (0, 1, 2, 3, 5, 7, 10, 14, 20, 27, 35)
_QUIET_PACE, _RAREST, _LENGTHS = 8, 25, 80
_ALERT = 12  # steps after an unusual value for which they are asked at every one
_LATE_PACE = 25  # where steps wait to be examined
# Some trainings are never calm. Each step adds so much to the times that they may be asked out of turn, up to a stock
# that a training with something new to tell has always full.
_EARNED, _STOCK = 0.25, 30.0


class Doctor:
    """One for a training. Pure: what it says depends on the records alone."""

    def __init__(
        self, info: Mapping[str, Any], rules: Sequence[Rule] = RULES, limits: Thresholds | None = None
    ) -> None:
        self.chart, self.events = Chart(info), Events()
        self._case = Case(self.chart, self.events, limits or Thresholds())
        self._moments, self._incidents = Moments(), Incidents(partial(is_over, self.chart))
        self._rules = list(rules)
        self._looked_at: dict[Rule, set[str]] = {}  # by those that had nothing to say
        self._asked_at = -1
        self._stock = _STOCK
        self.is_late = False  # whether more wait than it can keep up with
        self.breathe: Callable[[], None] | None = None  # between two rules, where others wait for the interpreter
        self._failed: list[Finding] = []
        # One an incident, as it is known by now, in the order in which they became known.
        self.findings: tuple[Finding, ...] = ()

    # A division by zero makes an infinity or a NaN; whoever trains may have told numpy to raise then.
    @np.errstate(all="ignore")
    def take(self, record: Record) -> None:
        for moment in self._moments.add(record):
            self._examine(moment)

    @np.errstate(all="ignore")
    def finish(self) -> None:
        """No more records will come."""
        for moment in self._moments.finish():
            self._examine(moment)
        self._ask()

    def _examine(self, moment: Any) -> None:
        self.chart.add(moment)
        self.events.add(moment)
        step = moment.step
        self._stock = min(self._stock + _EARNED, _STOCK)
        age, waited = step - self.chart.first_step, step - self._asked_at
        if waited >= self._pace(age) or self._incidents.is_unsure or (age in _BEGINNING and not self.is_late):
            self._ask()
        elif not self.is_late and 0 <= self.events.last_outside >= step - _ALERT and self._stock >= 1:
            self._stock -= 1
            self._ask()

    def _pace(self, age: int) -> int:
        """In steps, where nothing is unusual."""
        if self.is_late:
            return _LATE_PACE
        return min(max(_QUIET_PACE, age // _LENGTHS), _RAREST)

    def _ask(self) -> None:
        if self._asked_at == self.chart.step or self.chart.step < 0:
            return
        self._asked_at = self.chart.step
        self.events.settle()
        news, self.chart.news = self.chart.news, set()
        if self.events.has_news():
            news.add(EVENTS)
        suspicions: list[Suspicion] = []
        for rule in tuple(self._rules):
            if rule in self._looked_at and self._looked_at[rule].isdisjoint(news):
                continue  # it would say nothing again
            if self.breathe is not None:
                self.breathe()
            self.chart.reads = {COURSE}
            try:
                said = list(rule(self._case))
            except Exception as error:  # one bad rule must not silence the others
                self._rules.remove(rule)
                self._failed.append(_switched_off(rule, error, self.chart.step))
                continue
            self._looked_at.pop(rule, None)
            if not said:
                self._looked_at[rule] = self.chart.reads
            suspicions.extend(said)
        self._incidents.add(suspicions, self.chart.step)
        self.findings = (*self._incidents.findings, *self._failed)


def diagnose(records: Iterable[Record], info: Mapping[str, Any]) -> tuple[Finding, ...]:
    """What is wrong with a training, of its records and of what run.json says."""
    doctor = Doctor(info)
    for record in records:
        doctor.take(record)
    doctor.finish()
    return doctor.findings


def _switched_off(rule: Rule, error: Exception, step: int) -> Finding:
    name = getattr(rule, "__name__", type(rule).__name__)
    return Finding(
        cause="monitor-degraded",
        where="monitor",
        since=step,
        step=step,
        evidence={"rule": name, "error": type(error).__name__},
        advice=f"The rule {name} failed and is switched off; the others go on.",
    )
