"""What the diagnosis has said of each run, and which is asked about next: one worker process, the newest runs first.

Nothing is examined while nobody looks: a training on the same machine needs the processor more.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from holter.dashboard.process import Died, NotStarted, Process
from holter.dashboard.shelf import Listed
from holter.dashboard.wire import Answer, from_line
from holter.report.verdict import Verdict, verdict_of

_log = logging.getLogger(__name__)

_ATTENTION = 20.0  # seconds for which a request keeps the worker at work
_AGAIN = 2.0  # seconds between two examinations of a run that goes on, at least
_REST = 4.0  # times as long as the last one took
_DEATHS = 2  # of the worker over one run, until that is left alone
_FAIR = 10.0  # seconds of the worker's that one run may take before it lets the others go first
_LARGE = 1 << 30  # bytes of a run that takes longer than that
# Seconds that one may take in all, and so many more for each byte: a run of a gigabyte takes a few minutes.
_MOST, _MOST_PER_BYTE = 60.0, 2e-6
_TROUBLED = 60.0  # seconds until a run that could not be read is tried again: that may be over
_REFUSED = 5.0  # seconds until it is tried again where this machine had no room for a worker


@dataclass(frozen=True)
class Examination:
    """The last answer that was about all of a run. `extent` and `state` are how the list had the run when it was last
    asked about; `trouble` says why there is no answer."""

    extent: tuple[tuple[str, int], ...]
    state: str
    answer: Answer | None = None
    verdict: Verdict | None = None
    trouble: str = ""
    at: float = 0.0  # on the monotonic clock
    took: float = 0.0
    is_partial: bool = False  # there is more of it to read
    version: int = 0  # grows with each answer, over all runs


class Examinations:
    """By the id of a run. All of it lives on the event loop."""

    def __init__(self) -> None:
        self.known: dict[str, Examination] = {}
        self.version = 0
        self._looked_at: dict[str, float] = {}  # when the page of a run was last asked for
        self._attended = float("-inf")
        self._deaths: dict[str, int] = {}
        self._spent: dict[str, float] = {}  # seconds on what is not examined to its end yet
        self._worker = Process()
        self.trouble = ""  # why nothing at all is examined just now
        self._not_before = float("-inf")

    def attend(self, run: str | None = None) -> None:
        """Somebody looks: at the list, or at this run, which then comes first."""
        self._attended = time.monotonic()
        if run is not None:
            self._looked_at[run] = self._attended

    def of(self, listed: Listed) -> Examination | None:
        return self.known.get(listed.id)

    def next(self, runs: Iterable[Listed]) -> Listed | None:
        """The run that is examined next; None where all is said or nobody looks."""
        now = time.monotonic()
        if now - self._attended > _ATTENTION:
            return None
        due = [run for run in runs if self._is_due(run, now)]
        if not due:
            self.trouble = ""  # the run that it was about may be gone
        if now < self._not_before:
            return None
        return min(due, key=lambda run: self._turn(run, now), default=None)

    def _turn(self, run: Listed, now: float) -> tuple[bool, bool, bool, float]:
        """Runs that take long last. Before them runs that are looked at, then what was begun: the worker keeps few
        open, and would begin again and again. Of those, and of the others, what has waited longest."""
        is_watched = now - self._looked_at.get(run.id, float("-inf")) < _ATTENTION
        known = self.known.get(run.id)
        is_long = self._spent.get(run.id, 0.0) > _FAIR or sum(size for _, size in run.extent) > _LARGE
        is_begun = known is not None and known.is_partial
        return is_long, not is_watched, not is_begun, known.at if known is not None else 0.0

    def _is_due(self, run: Listed, now: float) -> bool:
        if not run.signature or self._deaths.get(run.id, 0) >= _DEATHS:
            return False
        known = self.known.get(run.id)
        if known is None or known.is_partial:
            return True
        changed = (known.extent, known.state) != (run.extent, run.glance.state)
        pause = _AGAIN if changed else _TROUBLED if known.trouble else float("inf")
        return now - known.at > max(pause, _REST * known.took)

    async def examine(self, run: Listed) -> None:
        """Asks the worker about a run and keeps what it says. One at a time."""
        began = time.monotonic()
        try:
            answer, trouble = _read(await self._worker.ask({"examine": str(run.path)}))
        except NotStarted as error:  # whichever run it was to be asked about
            self._pause(error)
            return
        except (Died, ValueError) as error:
            self._deaths[run.id] = self._deaths.get(run.id, 0) + 1
            _log.warning("%s: the diagnosis ended (%s)", run.name, error)
            # It is as if this state of the run had not been asked about.
            self._keep(run, (), began, None, f"the diagnosis ended ({error})")
        else:
            if answer is None or answer.is_complete:
                self._deaths.pop(run.id, None)
            if answer is not None and self._takes_too_long(run, answer, time.monotonic() - began):
                answer, trouble = None, "its diagnosis takes too long for its size: `holter diagnose` has no limit"
            self._keep(run, run.extent, began, answer, trouble)
        self.trouble = ""

    def _takes_too_long(self, run: Listed, answer: Answer, seconds: float) -> bool:
        spent = self._spent.pop(run.id, 0.0) + seconds
        if answer.is_complete:
            return False
        if spent > _MOST + _MOST_PER_BYTE * sum(size for _, size in run.extent):
            return True
        self._spent[run.id] = spent
        return False

    def _pause(self, error: NotStarted) -> None:
        self._not_before = time.monotonic() + _REFUSED
        if not self.trouble:
            _log.warning("the diagnosis cannot be started (%s): it is tried again", error)
        self.trouble = f"Runs are not examined just now: the diagnosis cannot be started ({error})."

    def _keep(
        self, run: Listed, extent: tuple[tuple[str, int], ...], began: float, answer: Answer | None, trouble: str
    ) -> None:
        now = time.monotonic()
        asked = replace(
            self.known.get(run.id) or Examination(extent, run.glance.state),
            extent=extent,
            state=run.glance.state,
            at=now,
            took=now - began,
            is_partial=answer is not None and not answer.is_complete,
        )
        if not asked.is_partial:
            self.version += 1
            verdict = verdict_of(answer.examined.findings, answer.state, answer.steps) if answer is not None else None
            asked = replace(asked, answer=answer, verdict=verdict, trouble=trouble, version=self.version)
        self.known[run.id] = asked

    def forget(self, runs: Iterable[str]) -> None:
        """Keeps what is known of these only."""
        kept = set(runs)
        for memory in (self.known, self._looked_at, self._deaths, self._spent):
            for gone in memory.keys() - kept:
                memory.pop(gone)

    async def stop(self) -> None:
        await self._worker.stop()


def _read(line: bytes) -> tuple[Answer | None, str]:
    """What the worker says of a run, or why it says nothing. ValueError where it is neither."""
    if line.startswith(b'{"trouble"'):
        return None, str(json.loads(line)["trouble"])
    return from_line(line), ""
