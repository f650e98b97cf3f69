"""A run directory, followed for its page: read quickly first, then wholly, then on as it grows. Bounded memory."""

from __future__ import annotations

import math
import time
from pathlib import Path

from holter.diagnosis.finding import from_problem
from holter.integrity import Integrity
from holter.journal_parts import read_sample
from holter.record import Ending, Entry, Problem, Record
from holter.report.buckets import BUCKETS
from holter.report.digest import Digest
from holter.report.examining import Examined, Examiner
from holter.run import Run
from holter.tail import Tail

_SMALL = 48 << 20  # bytes of journals that are read at once
_LOOK = 4.0  # seconds for these: a short run takes one, and others wait
_SAMPLE = 256  # places of a long journal that a first look takes something of
_MOST_PROBLEMS = 200


class Follower:
    """`version` grows when there is something new. Not safe for several threads."""

    def __init__(self, path: Path, *, buckets: int = BUCKETS, examine: bool = False) -> None:
        self.version = 0
        self.is_complete = False  # everything that is there has been read
        self._buckets, self._examine = buckets, examine
        self._sampled_ending: Ending | None = None
        self._tail = Tail(path, self._begin)

    def _begin(self) -> None:
        self._whole = Digest(self._buckets)
        # What is shown until everything was read: that of a sample, or what was known before it was read again.
        self.digest = getattr(self, "digest", self._whole)
        self.examiner: Examiner | None = None
        self.problems: list[Problem] = []
        self.more_problems = 0  # beyond those that are kept

    @property
    def run(self) -> Run:
        return self._tail.run

    @property
    def ending(self) -> Ending | None:
        return self._tail.ending or (self._sampled_ending if self.is_sample else None)

    @property
    def run_state(self) -> str:
        """As `Run.state` says it."""
        if self.is_sample and self._sampled_ending is not None:
            return self._sampled_ending.state
        state = self._tail.state(time.time())
        return "empty" if state == "waiting" else state

    @property
    def unreadable_bytes(self) -> int:
        return self.integrity.unreadable_bytes

    @property
    def integrity(self) -> Integrity:
        """As `Run.integrity` has it, once all is read."""
        return self._tail.integrity if self.is_complete else Integrity()

    @property
    def read_share(self) -> float:
        """Of what is there, in bytes."""
        if not self._tail.is_there:
            return 0.0
        return 1 - self._tail.bytes_unread / max(1, self._tail.bytes_there)

    @property
    def is_sample(self) -> bool:
        return self.digest is not self._whole

    @property
    def steps(self) -> int:
        """How many were taken; of a sample the number of the last one says it."""
        return self.digest.last_step + 1 if self.is_sample else self.digest.count

    @property
    def seconds(self) -> float:
        """That these steps took."""
        taken = self.digest.sums.get("step_time", 0.0)
        return taken * self.steps / max(1, self.digest.count) if self.is_sample else taken

    def look(self) -> None:
        """A first look: all of a short run, some of a long one, in a second or two."""
        if self._tail.bytes_there <= _SMALL:
            self.read_on(_LOOK)
            return
        sample = Digest(self._buckets)
        journals = self.run.own_journals
        for path in journals:
            self._sampled_ending = None
            for entry in read_sample(path, _SAMPLE // len(journals) + 1):
                if isinstance(entry, Record):
                    sample.take(entry)
                elif isinstance(entry, Ending):
                    self._sampled_ending = entry
        self.digest, self.version = sample, self.version + 1

    def read_on(self, seconds: float = math.inf) -> bool:
        """Reads what is new, for about so long; says whether that is all."""
        deadline = time.monotonic() + seconds
        before = self._known()
        self.is_complete = True
        for entry in self._tail.read():
            self._take(entry)
            if time.monotonic() > deadline:
                self.is_complete = False
                break
        if self.is_complete and self.is_sample:
            self.digest, self.version = self._whole, self.version + 1
        elif before != self._known():
            self.version += 1
        return self.is_complete

    def examined(self) -> Examined:
        """What the doctor says by now; only of a follower that examines."""
        own = [*map(from_problem, self.problems), *self.integrity.findings]
        if self.examiner is None:
            return Examiner(self.run.info).examined(self.run.layers, own, is_over=False)
        return self.examiner.examined(self.run.layers, own, is_over=self.run_state != "running")

    def _known(self) -> tuple[object, ...]:
        return self._whole, self._whole.count, len(self.problems) + self.more_problems, self.ending

    def _take(self, entry: Entry) -> None:
        if isinstance(entry, Record):
            self._whole.take(entry)
            if self._examine:
                self.examiner = self.examiner or Examiner(self.run.info)  # run.json may come after the directory
                self.examiner.take(entry)
        elif isinstance(entry, Problem):
            if len(self.problems) < _MOST_PROBLEMS:
                self.problems.append(entry)
            else:
                self.more_problems += 1
