"""What Holter's threads take of a training, charged to its budget: by the training thread itself, the writer and the
diagnosis."""

from __future__ import annotations

from holter.budget import BESIDE, Budget
from holter.collector import Collector
from holter.examination import Examination
from holter.writer import Writer


class Spending:
    def __init__(self, budget: Budget, collector: Collector, writer: Writer, examination: Examination | None) -> None:
        self._budget, self._collector, self._writer, self._examination = budget, collector, writer, examination
        self.thread_seconds = 0.0  # of the training thread
        self._writer_seconds, self._examination_seconds = 0.0, 0.0  # that are charged already

    def note(self, seconds: float, charged: bool) -> None:
        """Takes note of training-thread seconds."""
        self.thread_seconds += seconds
        self._budget.settle(self._visible(seconds) if charged else 0.0)

    def charge_other_threads(self) -> None:
        """Charges what they have taken since the last call."""
        seconds = self._writer.seconds
        self._budget.share_out(BESIDE * self._visible(seconds - self._writer_seconds))
        self._writer_seconds = seconds
        if self._examination is not None:  # which has a limit of its own
            seconds = self._examination.seconds
            self._budget.spend(self._visible(seconds - self._examination_seconds), None)
            self._examination_seconds = seconds

    def _visible(self, seconds: float) -> float:
        """What so much time of the processor adds to the training."""
        return 0.0 if self._collector.is_hidden else seconds
