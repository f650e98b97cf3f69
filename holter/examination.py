"""The diagnosis of a training while it runs: a doctor on a thread of its own, within a small share of the time.

Records come here when they are written. They wait until a purse can pay for them: it begins with a small advance, so
that the first step is examined at once, and earns `share` of the time that goes by. So the interpreter, which the
training needs too, is taken for no longer than that. The doctor sees every record in its order, and says live what it
will say of the stored run. Where steps are so short that more records wait than may, what waits is forgotten and
another doctor begins with the present, as after a resume: late findings help nobody, and series with holes would
mislead the rules.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from holter.background import Background
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding
from holter.diagnosis.thresholds import Thresholds
from holter.record import Record, size_of
from holter.stopping import Patience, is_severe

ADVANCE_SECONDS = 0.002  # with what it earns, below 0.2 % of the first ten seconds
_LATE = 64  # records that wait, from which on the rules are asked less often
MOST_RECORDS = 2048  # a step may have two: what is logged after it can come late
MOST_BYTES = 16 << 20
# Between two looks at what has come: the first record after a rest costs several times as much as the next ones, as
# nothing of the diagnosis is in the processor's caches any more. What is not finite is looked at without delay, and is
# paid for later.
_PACE_SECONDS = 1.0
_LONGEST_PAUSE = 10.0
# A purse that is empty saves for several records: one at a time, each would be the first after a rest. Where many wait,
# it saves longer, and so needs less for each: else they would be ever more.
_SAVES_SECONDS, _SAVES_LONGER = 2.0, 5.0
_URGENT = ("loss", "gradient_norm")
_WORK_SECONDS = 5e-4  # before a breath, which costs a twentieth of that
_BREATH_SECONDS = 5e-5
_LONGEST_BREATH = 0.02
_GENTLE = 10  # times as long as it has worked the thread rests, where
_FEW = 8  # records wait, or fewer: steps are long, and there is time

Item = tuple[Record, bool]  # and whether what came before it was forgotten
Report = Callable[[str, BaseException], None]


def pause_for(spent: float, elapsed: float, share: float) -> float:
    """Seconds until a purse that earns `share` of the time has paid off what was spent. With 0 it pays for nothing.

    >>> pause_for(0.1, 0.0, 0.002), round(pause_for(0.21, 3.0, 0.002))
    (0.0, 2)
    """
    return max(0.0, (spent - ADVANCE_SECONDS) / share - elapsed) if share > 0 else float("inf")


class Examination:
    """Of one training. `tell` is given each finding once, and again when its cause or severity has changed, and when it
    has not been seen for a while."""

    def __init__(
        self,
        info: Mapping[str, Any],
        share: float,
        patience: int | None,
        tell: Callable[[Finding], None],
        report: Report,
    ) -> None:
        self._info, self._share, self._tell, self._report = info, share, tell, report
        self._patience = Patience(patience or Thresholds().validation_patience)
        self._doctor: Doctor | None = self._new_doctor()
        self._last_step = -1
        self._is_new = True  # the doctor: it has seen no record
        self._known: tuple[Finding, ...] = ()  # replaced as a whole, so that any thread may read it
        self._earlier: tuple[Finding, ...] = ()  # of doctors before this one
        self._told: set[tuple[object, ...]] = set()
        self._published: tuple[tuple[Finding, ...], int] | None = None  # found by this doctor, and records forgotten
        self._forgotten = 0  # records
        self._lost_its_place = False  # what came before the next record was forgotten
        self._lost: set[str] = set()  # of what is urgent, that which is not finite
        self._urgent: int | None = None  # the step at which that began, until it has been examined
        self._hurries = 0  # how many wait for the diagnosis
        self._asked_for = 0.0  # seconds spent while they did, which the purse does not pay for
        self._rested_at = 0.0  # by the thread's own clock
        self._guard = threading.Lock()
        self._started = time.monotonic()
        self._background: Background[Item] = Background(
            self._take,
            partial(report, "diagnose the training"),
            name="holter-doctor",
            pace_seconds=_PACE_SECONDS,
            awake_seconds=2 * _PACE_SECONDS,
            most_items=MOST_RECORDS,
            most_bytes=MOST_BYTES,
        )

    @property
    def findings(self) -> tuple[Finding, ...]:
        """As known by now."""
        return (*self._known, *self._not_examined())

    @property
    def seconds(self) -> float:
        """Processor time that the diagnosis has taken."""
        return self._background.seconds

    @property
    def elapsed(self) -> float:
        """Seconds by the clock since the training has been watched."""
        return time.monotonic() - self._started

    @property
    def backlog(self) -> int:
        """Records that wait."""
        return len(self._background)

    @property
    def should_stop(self) -> bool:
        return self._patience.is_over or any(is_severe(finding, "critical") for finding in self.findings)

    def post(self, record: Record) -> None:
        """A record that is in the journal."""
        self._patience.see(record)
        size = size_of(record)
        if not self._background.post((record, self._lost_its_place), size):
            self._forgotten += self._background.clear()
            self._lost_its_place = True
            if not self._background.post((record, True), size):
                self._forgotten += 1
                return
        self._lost_its_place = False
        lost = {name for name in _URGENT if not math.isfinite(record.scalars.get(name, 0.0))}
        if lost - self._lost:
            self._urgent = record.step
            self._background.flush(0.0)  # waits for nothing, but wakes the thread
        self._lost = (self._lost - record.scalars.keys()) | lost

    def catch_up(self, seconds: float) -> bool:
        """Examines what waits, whatever that costs, for at most this long; says whether it is all done."""
        self._hurry(1)
        try:
            return self._background.flush(seconds)
        finally:
            self._hurry(-1)

    def close(self, seconds: float) -> None:
        """Examines what is left, at most this long, and ends."""
        self._hurry(1)
        left = self._background.close(seconds)
        if left:
            self._forgotten += left
            self._publish()
        elif self._doctor is not None:  # its thread has ended
            self._attempt(self._doctor.finish)

    def stop(self) -> None:
        """Ends at the next record, without waiting for that."""
        self._background.stop(0.0)

    def _hurry(self, more: int) -> None:
        with self._guard:
            self._hurries += more

    def _new_doctor(self) -> Doctor:
        doctor = Doctor(self._info)
        doctor.breathe = self._breathe
        return doctor

    def _breathe(self) -> None:
        """Lets the training have the interpreter: it would wait 5 ms for it otherwise, python's interval.

        Every operation of torch lets go of the interpreter and takes it again, so all that this thread does while a
        forward is being launched makes that longer: a few milliseconds in a row are a device that stands idle.
        """
        now = time.thread_time()
        worked = now - self._rested_at
        if worked < _WORK_SECONDS:
            return
        self._rested_at = now
        if not self._hurries:
            gentle = min(_GENTLE * worked, _LONGEST_BREATH) if len(self._background) <= _FEW else 0.0
            time.sleep(max(_BREATH_SECONDS, gentle))

    # On the thread ----------------------------------------------------------------------------------------------

    def _take(self, item: Item) -> float | None:
        record, follows_a_hole = item
        if self._doctor is None:
            return None
        if not self._hurries and self._urgent is None:
            pause = pause_for(time.thread_time() - self._asked_for, self.elapsed, self._share)
            if pause > 0:
                saves = _SAVES_SECONDS if len(self._background) <= _LATE else _SAVES_LONGER
                return min(max(pause, saves), _LONGEST_PAUSE)
        began, is_asked_for = time.thread_time(), self._hurries > 0
        self._attempt(partial(self._show, record, follows_a_hole))
        self._asked_for += time.thread_time() - began if is_asked_for else 0.0
        if self._urgent is not None and record.step > self._urgent:  # a step is over when the next one comes
            self._urgent = None
        return None

    def _show(self, record: Record, follows_a_hole: bool) -> None:
        is_back = not record.late and record.step <= self._last_step  # a checkpoint of before was loaded
        self._last_step = self._last_step if record.late else record.step
        if follows_a_hole or is_back:
            # What began after the checkpoint went with that line of training.
            stay = (one for one in self._known if not is_back or one.since < record.step)
            self._earlier, self._doctor, self._is_new = tuple(stay), self._new_doctor(), True
            self._published = None
            if is_back:
                self._urgent = None
        assert self._doctor is not None
        self._doctor.is_late = not self._hurries and len(self._background) > _LATE
        if self._is_new and not record.late:
            self._is_new = False
            if record.step > 0:  # it has not seen the beginning, and the rules must know that
                self._doctor.chart.resumed.append(record.step)
        self._doctor.take(record)

    def _attempt(self, examine: Callable[[], None]) -> None:
        try:
            examine()
            self._publish()
        except Exception as error:
            self._doctor = None  # what it knows may be half of a step: nothing it says could be trusted
            self._report("diagnose the training any further", error)

    def _publish(self) -> None:
        found = self._doctor.findings if self._doctor is not None else ()
        if self._published is not None and self._published[0] is found and self._published[1] == self._forgotten:
            return
        self._published = found, self._forgotten
        # A trouble that goes on is found again by a doctor that begins anew.
        known = {(one.cause, one.layer, one.severity) for one in self._earlier if one.until is None}
        new = tuple(one for one in found if (one.cause, one.layer, one.severity) not in known)
        self._known = (*self._earlier, *new)
        for finding in (*new, *self._not_examined()):
            is_over = finding.until is not None
            key = finding.step, finding.cause, finding.severity, is_over, finding.evidence.get("rule")
            if key not in self._told:
                self._told.add(key)
                self._tell(finding)

    def _not_examined(self) -> tuple[Finding, ...]:
        if not self._forgotten:
            return ()
        advice = (
            "The live diagnosis could not keep up with steps this short, and left some out: `holter diagnose RUN` "
            "examines all of a stored run, and watch(budget=...) gives it more time."
        )
        evidence = {"records_left_out": self._forgotten}
        return (Finding("monitor-degraded", "monitor", 0, 0, severity="info", evidence=evidence, advice=advice),)
