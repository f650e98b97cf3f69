"""What the diagnosis has said of each run, and which is asked about next: one worker process, the newest runs first.

Nothing is examined while nobody looks: a training on the same machine needs the processor more.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from holter.dashboard.process import Died, Process
from holter.dashboard.shelf import Listed
from holter.dashboard.wire import Answer, from_line
from holter.report.verdict import Verdict, verdict_of

_log = logging.getLogger(__name__)

_ATTENTION = 20.0  # seconds for which a request keeps the worker at work
_AGAIN = 2.0  # seconds between two examinations of a run that goes on, at least
_REST = 4.0  # times as long as the last one took
_DEATHS = 2  # of the worker over one run, until that is left alone


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
        self._worker = Process()

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
        return min(due, key=lambda run: self._turn(run, now), default=None)

    def _turn(self, run: Listed, now: float) -> tuple[bool, bool, float]:
        """Runs that are looked at first, then what was begun: the worker keeps few open, and would begin again and
        again. Of those, and of the others, what has waited longest."""
        is_watched = now - self._looked_at.get(run.id, float("-inf")) < _ATTENTION
        known = self.known.get(run.id)
        return not is_watched, not (known is not None and known.is_partial), known.at if known is not None else 0.0

    def _is_due(self, run: Listed, now: float) -> bool:
        if not run.signature or self._deaths.get(run.id, 0) >= _DEATHS:
            return False
        known = self.known.get(run.id)
        if known is None or known.is_partial:
            return True
        changed = (known.extent, known.state) != (run.extent, run.glance.state)
        return changed and now - known.at > max(_AGAIN, _REST * known.took)

    async def examine(self, run: Listed) -> None:
        """Asks the worker about a run and keeps what it says. One at a time."""
        began = time.monotonic()
        try:
            line = await self._worker.ask({"examine": str(run.path)})
            words = json.loads(line) if line.startswith(b'{"trouble"') else {}
            answer = None if words else from_line(line)
            trouble = str(words.get("trouble", ""))
        except (Died, ValueError) as error:
            self._deaths[run.id] = self._deaths.get(run.id, 0) + 1
            answer, trouble = None, f"the diagnosis ended ({error})"
            _log.warning("%s: %s", run.name, trouble)
        now = time.monotonic()
        asked = replace(
            self.known.get(run.id) or Examination(run.extent, run.glance.state),
            extent=run.extent,
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
        for memory in (self.known, self._looked_at, self._deaths):
            for gone in memory.keys() - kept:
                memory.pop(gone)

    async def stop(self) -> None:
        await self._worker.stop()
