"""What the diagnosis says of a run that is read record by record: findings of every step, the rest of some of them.

The doctor sees every record, and keeps little of it. The health check, the outlook and the signs look at whole series:
of a long run they are given an even sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holter.diagnosis.convergence import Outlook, outlook
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.events import Event
from holter.diagnosis.finding import Finding
from holter.diagnosis.health import Check, check_health
from holter.history import History
from holter.record import Record, size_of
from holter.report.onsets import Onsets
from holter.signs import Sign, signs_of

_MOST_BYTES = 64 << 20  # of the records that are kept of each kind


@dataclass(frozen=True)
class Examined:
    """`sampled` is the share of the steps that health, outlook and signs were judged by; `onsets` are what left its
    usual range about those of the findings."""

    findings: tuple[Finding, ...] = ()
    health: tuple[Check, ...] = ()
    outlook: Outlook | None = None
    signs: tuple[Sign, ...] = ()
    sampled: float = 1.0
    onsets: tuple[Event, ...] = ()


class Examiner:
    """One for a run, given its records in their order."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        self._info = info
        self._doctor = Doctor(info)
        self._earlier: tuple[Finding, ...] = ()  # of the doctor before, where steps were repeated
        self._last_step = -1
        self._steps = 0
        self._sample, self._onsets = _Sample(), Onsets()
        self._is_finished = False

    def take(self, record: Record) -> None:
        if not record.late:
            if record.step <= self._last_step:
                self._go_back(record.step)
            self._last_step, self._steps = record.step, self._steps + 1
        self._onsets.see(record)
        self._doctor.take(record)
        self._onsets.take(self._doctor)
        self._sample.put(record)

    def examined(self, layers: Sequence[Mapping[str, Any]], own: Sequence[Finding], *, is_over: bool) -> Examined:
        if is_over and not self._is_finished:
            self._doctor.finish()
            self._is_finished = True
            self._onsets.take(self._doctor)
        findings = (*self._earlier, *self._doctor.findings, *own)
        history = History(record for records in self._sample.records.values() for record in records)
        planned = self._info.get("total_steps")
        return Examined(
            findings=findings,
            health=check_health(history, layers, findings=findings),
            outlook=outlook(*history.scalar("loss"), planned if isinstance(planned, int) else None),
            signs=signs_of(history, tuple(layers)),
            sampled=min(1.0, len(history) / max(self._steps, 1)),
            onsets=self._onsets.about(findings),
        )

    def _go_back(self, step: int) -> None:
        """A checkpoint was loaded in the middle of a journal: what began after it is gone with that line."""
        self._earlier = tuple(one for one in (*self._earlier, *self._doctor.findings) if one.since < step)
        self._doctor, self._is_finished = Doctor(self._info), False
        self._doctor.chart.resumed.append(step)
        self._sample.rewind(step)
        self._onsets.rewind(step)


class _Sample:
    """Steps with their records, evenly thinned out as they come; those that hold more than gradients apart."""

    def __init__(self) -> None:
        self.records: dict[int, list[Record]] = {}  # by step
        self._kinds = {False: _Thinned(), True: _Thinned()}

    def put(self, record: Record) -> None:
        if record.late:  # it goes with its step
            self.records.get(record.step, []).append(record)
            return
        kind = self._kinds[bool(record.rows.keys() - {"gradient"})]
        self.records[record.step] = [record]
        for step in kind.put(record.step, size_of(record)):
            self.records.pop(step, None)

    def rewind(self, step: int) -> None:
        self.records = {kept: records for kept, records in self.records.items() if kept < step}


class _Thinned:
    def __init__(self) -> None:
        self._kept: list[tuple[int, int]] = []  # steps and their bytes
        self._every, self._seen, self._bytes = 1, 0, 0

    def put(self, step: int, size: int) -> list[int]:
        """The steps that are to be forgotten: this one, or every second of those that were kept."""
        self._seen += 1
        if (self._seen - 1) % self._every:
            return [step]
        self._kept.append((step, size))
        self._bytes += size
        if self._bytes <= _MOST_BYTES or len(self._kept) < 2:
            return []
        gone, self._kept, self._every = self._kept[1::2], self._kept[::2], 2 * self._every
        self._bytes -= sum(size for _, size in gone)
        return [step for step, _ in gone]
