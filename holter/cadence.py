"""Cadence: what is measured in which step, and what that has cost, here and on the device."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence

from torch import Tensor

from holter.budget import Budget
from holter.settings import Settings
from holter.transfer import DeviceTimer

_MOST_TIMERS = 64
_PATIENCE = 4  # steps for which a turn is waited for
_REGULAR = ("gradient", "batch")  # kinds that a user expects at the steps that were asked for


class Cadence:
    """Decides what is due and can be paid for. A kind is what has a pace of its own: "gradient", "weight", ..."""

    def __init__(self, settings: Settings, budget: Budget) -> None:
        self.step = 0
        self._settings, self._budget = settings, budget
        self._measured_at: dict[str, int] = {}  # kind -> the last step that had it
        self._first_at: dict[str, int] = {}  # kind -> the first step that had it
        self._rare_at = -1  # the last step that had something that is not measured at every step
        # Of what was measured and is not done yet, the kind that is charged, and whether that was set up.
        self._timers: deque[tuple[DeviceTimer, str | None, bool]] = deque(maxlen=_MOST_TIMERS)
        # The device has not even come to what was measured in the step that is over here: it has work for a while, and
        # what this thread does meanwhile does not make the training any longer.
        self.is_hidden = False

    def restart(self, step: int) -> None:
        self.step = step
        self._measured_at.clear()

    def is_due(self, kind: str, every: int) -> bool:
        """Every so many steps; and again within a step, where what was read is replaced."""
        since = self.step - self._measured_at.get(kind, self.step)
        return since == 0 or since >= every

    def is_wanted(self, kind: str, every: int) -> bool:
        """Whether this kind is due, need not wait for its turn, and the budget allows it."""
        return self.is_due(kind, every) and not self.must_wait(kind, every) and self._budget.affords(kind)

    def goes_on(self, kind: str) -> bool:
        """Whether this kind was measured in this step: what one of its optimizers had, the others have too."""
        return self._measured_at.get(kind) == self.step

    def is_next(self, kind: str, every: int, ahead: int) -> bool:
        """Whether this kind is due within so many steps after this one, and the budget allows it now."""
        left = self._measured_at.get(kind, self.step) + every - self.step
        return 0 < left <= ahead and self._budget.affords(kind)

    def wants_histogram(self, kind: str, every: int) -> bool:
        """Of a kind that is measured every so many steps."""
        pace, with_histogram = self._settings.histogram_pace(kind), f"{kind} histogram"
        if pace is None or not self.is_due(with_histogram, pace):
            return False
        if self.goes_on(with_histogram):  # rows of one role have histograms, or none of them has
            return True
        if every == 1 and self.must_wait(with_histogram, pace):  # otherwise the kind itself waited, and comes rarely
            return False
        return self._budget.affords(with_histogram)

    def must_wait(self, kind: str, every: int) -> bool:
        """What is not measured at every step takes turns: all of it in one step would make that a long one.

        The first time is taken as it comes, and a turn is waited for a few steps at most.
        """
        is_small = kind.startswith("batch")  # and inputs must not wait for targets: they are one role of a record
        if is_small or (kind.startswith(_REGULAR) and not kind.endswith("histogram")):
            return False
        last = self._measured_at.get(kind)
        if last is None:
            return False
        return 0 <= self.step - last - every < min(every - 1, _PATIENCE) and self._rare_at == self.step

    @contextlib.contextmanager
    def account(self, kind: str, histograms: bool, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Takes the time of a measurement, here and on the device, and notes that it was made."""
        started = time.perf_counter()
        timer = DeviceTimer.start(tensors[0].device)
        yield
        if timer is not None:
            self.follow(timer, kind)
        self.note_measured(kind, histograms)
        seconds, learned = time.perf_counter() - started, f"{kind} histogram" if histograms else kind
        self._budget.learn(learned, seconds, sets_up=self.sets_up(kind))

    def sets_up(self, kind: str) -> bool:
        """Whether this is the first step that has this kind."""
        return self._first_at.setdefault(kind, self.step) == self.step

    def follow(self, timer: DeviceTimer, kind: str | None) -> None:
        """Charges what the device takes to this kind, when that is known; None for what costs nothing more."""
        self._timers.append((timer.stop(), kind, kind is not None and self.sets_up(kind)))

    def note_measured(self, kind: str, histograms: bool) -> None:
        self._measured_at[kind] = self.step
        if histograms or not kind.startswith(_REGULAR):
            self._rare_at = self.step
        if histograms:
            self._measured_at[f"{kind} histogram"] = self.step

    def note_tried(self, kind: str) -> None:
        """Nothing was there to be measured: it is tried again when it is due again, not at every step."""
        self._measured_at[kind] = self.step

    def charge_device_time(self) -> None:
        """For what the device has done by now."""
        if self._timers:
            self.is_hidden = not self._timers[-1][0].has_begun()
        while self._timers and (seconds := self._timers[0][0].seconds()) is not None:
            _, kind, sets_up = self._timers.popleft()
            if kind is not None:
                self._budget.spend(seconds, None if sets_up else kind)
