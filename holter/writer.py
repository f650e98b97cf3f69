"""Drafts to records, records to journal and sinks: everything that happens off the training thread.

A disk that fails is tried again with growing pauses; meanwhile drafts wait in a bounded queue, and what does not
fit is dropped and counted. Every sink has a thread of its own, so that none of them can hold the others up.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from holter.alerts import Alerts
from holter.alone import compute_alone
from holter.background import Background, Soon
from holter.diagnosis.finding import Finding
from holter.draft import Draft
from holter.examination import Examination
from holter.journal import Journal
from holter.machine import Machine
from holter.record import Ending, Entry, Problem, Record
from holter.repeats import Repeats
from holter.run import has_records, journal_path, next_segment, write_info
from holter.sinks.background import Background as BackgroundSink
from holter.sinks.sink import Sink

# To look for results of the device as soon as they are there would take the interpreter from the training thread just
# when that has to feed the device again. The step after is early enough, or this while where none comes.
_ARRIVAL = Soon(0.25)
_GATHER = 0.005  # seconds: what is logged for a step comes right after it
_EXIT_SECONDS = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0  # between two tries of a disk that fails

_WRITE = "write to the run's directory"

_logger = logging.getLogger("holter")

Task = Callable[[], float | None]
Report = Callable[[str, BaseException], None]


_open: weakref.WeakSet[Writer] = weakref.WeakSet()  # a writer lives as long as its thread has work


def _wait_for_all() -> None:
    """At exit: records of a model that went first may still be on their way."""
    for writer in list(_open):
        writer.wait(_EXIT_SECONDS)


class Writer:
    """Writes one process's part of a run; without a directory it keeps the records in `records`."""

    def __init__(
        self,
        directory: Path | None,
        rank: int,
        info: Mapping[str, Any],
        sinks: Sequence[Sink],
        report: Report,
        machine: Machine | None = None,
        examination: Examination | None = None,
    ) -> None:
        """The `machine` gives further scalars for a record: this thread has the time to look at it. The `examination`
        is shown what is written."""
        self.records: list[Record] = []
        self.newest: Mapping[str, float] = {}  # the loss; replaced as a whole, so that any thread may read it
        self._directory, self._rank, self._info, self._report, self._machine = directory, rank, info, report, machine
        self._examination = examination
        self._examined_until = self._told_until = 0.0  # by the clock: when they have to end
        self._segment = 0
        self._has_records = False  # in this segment
        self._journal: Journal | None = None
        self._waiting: Draft | None = None  # the newest draft, until its record is made
        self._built: tuple[Draft, Record] | None = None  # so that a failing disk does not make it anew each time
        self._joining, self._pause, self._repeats = threading.RLock(), 0.0, Repeats()
        # Until the first record. One process tells it for all.
        self._is_again = directory is not None and rank == 0 and has_records(directory, rank)
        if directory is not None:
            write_info(directory, info)
            self._open_journal(directory)
        self._last = 0, 0  # step and segment of the newest record
        self._is_ending, self._sinks_are_closed, self._last_words = False, False, list[Entry]()
        self._ending: Ending | None = None  # once that is asked for
        # Of the disk, as long as that fails; and whether what is queued is not written any more.
        self._trouble, self._has_given_up = "", False
        # Alerts have threads of their own, and to take a finding costs them no more than to queue it would.
        self._sinks: list[BackgroundSink | Alerts] = [
            sink if isinstance(sink, Alerts) else BackgroundSink(sink, self._sink_failed) for sink in sinks
        ]
        for sink in sinks:
            if isinstance(sink, Alerts):
                sink.begin(directory, self.post_delivery, report)
        self._background = self._thread(report)
        if not _open:
            atexit.unregister(_wait_for_all)
            atexit.register(_wait_for_all)
        _open.add(self)

    def _thread(self, report: Report) -> Background[Task]:
        failed = partial(report, "write a record")
        begin, idle, end = compute_alone, self._touch, self._give_up
        return Background(_call, failed, name="holter-writer", begin=begin, idle=idle, end=end, gather_seconds=_GATHER)

    @property
    def dropped(self) -> int:
        """Drafts that did not fit into the queue, or were still in it at the end; what sinks alone missed is not among
        them."""
        return self._background.dropped + (self._undone() if self._has_given_up else 0)

    def _undone(self) -> int:
        return sum(isinstance(task, partial) and task.func == self._write for task in self._background.waiting)

    @property
    def seconds(self) -> float:
        """Processor time that writing has taken."""
        return self._background.seconds + sum(sink.seconds for sink in self._sinks)

    def post(self, draft: Draft) -> None:
        self._has_records = True
        draft.segment = self._segment
        with self._joining:  # what is logged right after a step needs no record of its own
            if self._waiting is not None and self._waiting.take_up(draft):
                return
            self._waiting = draft
        # Not while that is held: whoever frees a draft under the queue's own lock may run a finalizer that logs.
        if not self._background.post(partial(self._write, draft), draft.size):
            self._let_go(draft)

    def _let_go(self, draft: Draft) -> None:
        """From now on nothing is joined to it."""
        with self._joining:
            if self._waiting is draft:
                self._waiting = None

    def post_problem(self, problem: Problem) -> None:
        self._post_entry(problem)

    def post_delivery(self, words: str) -> None:
        """An alert was delivered, or was not: noted at the newest step."""
        step, segment = self._last
        self._post_entry(Record(step, time.time(), notes={"alerts": words}, segment=segment, late=True))

    def _post_entry(self, entry: Entry) -> None:
        if self._is_ending:  # the queue takes nothing more, but the journal is still open
            self._last_words.append(entry)
        else:
            self._background.post(partial(self._append, entry))

    def alert(self, finding: Finding) -> None:
        for sink in () if self._sinks_are_closed else self._sinks:
            sink.alert(finding)

    def begin_segment(self) -> None:
        """What follows is another stretch of training: a file of its own. One that is still empty will do."""
        if not self._has_records:
            return
        self._has_records = False
        self._segment += 1
        if self._directory is not None:
            self._background.post(self._begin_segment)

    def flush(self, seconds: float) -> bool:
        return self._background.flush(seconds)

    def close(self, ending: Ending, seconds: float) -> int:
        """Writes what is queued and the ending, within these seconds; returns how many drafts were lost."""
        until = time.monotonic() + seconds
        self.stop(ending, seconds)
        self._background.wait(0.85 * seconds)  # longer than it works, for what it does last
        self._has_given_up = bool(self._background.waiting)
        # Where the disk kept the ending from being written, these are not closed yet.
        self._with_examination("end the diagnosis", Examination.stop)
        self._stop_sinks(max(0.0, until - time.monotonic()))
        for sink in self._sinks:
            sink.wait(max(0.0, until - time.monotonic()))
        return self.dropped

    def wait(self, seconds: float) -> None:
        """For what `stop`, or an interrupted `close`, left to do."""
        self._background.wait(seconds)

    def stop(self, ending: Ending, seconds: float) -> None:
        """Like close, without waiting for it."""
        self._is_ending, self._ending = True, ending
        self._examined_until, self._told_until = (time.monotonic() + part * seconds for part in (0.6, 0.7))
        self._background.post(partial(self._end, ending))
        self._background.stop(0.75 * seconds)

    def _write(self, draft: Draft) -> float | None:
        if not draft.has_arrived():
            return _ARRIVAL
        self._let_go(draft)
        if self._built is None or self._built[0] is not draft:
            dropped = {"dropped": float(self.dropped)} if self.dropped else {}
            record = draft.record({**dropped, **self._look(draft)}, self._report)
            repeated = self._repeats.scalars(record)
            self._built = draft, replace(record, scalars={**record.scalars, **repeated}) if repeated else record
        record = self._built[1]
        pause = self._append(record)
        if pause is None:
            self._built = None
            self._last = record.step, record.segment
            self._tell_of_earlier(record)
            if "loss" in record.scalars:
                self.newest = {"loss": record.scalars["loss"]}
            self._with_examination("show a record to the diagnosis", lambda examination: examination.post(record))
            for sink in self._sinks:
                sink.write(record)
        return pause

    def _tell_of_earlier(self, first: Record) -> None:
        """A script that was started again, or a checkpoint without the monitor's state, hides what was there before."""
        if self._is_again and first.step == 0:
            _logger.warning(
                "%s holds an earlier training: from step 0 on this one takes its place. Give each a run= of its own, "
                "or go on where it stopped with monitor.load_state_dict(state)",
                self._directory,
            )
        self._is_again = False

    def _sink_failed(self, sink: Sink, error: Exception) -> None:
        self._report(f"write to {type(sink).__name__}", error)

    def _with_examination(self, purpose: str, call: Callable[[Examination], None]) -> None:
        if self._examination is None:
            return
        try:
            call(self._examination)
        except Exception as error:  # records and sinks go on without it
            self._report(purpose, error)

    def _look(self, draft: Draft) -> Mapping[str, float]:
        """The scalars of the machine for this record; words about it are added to its notes."""
        if self._machine is None or draft.late:
            return {}
        try:
            scalars = self._machine.scalars()
            draft.notes.update(self._machine.notes())
        except Exception as error:  # the record is worth more than this
            self._report("look at the machine", error)
            return {}
        return scalars

    def _append(self, entry: Entry) -> float | None:
        if self._directory is None:
            if isinstance(entry, Record):
                self.records.append(entry)
            return None
        try:
            if self._journal is None:
                self._directory.mkdir(parents=True, exist_ok=True)
                write_info(self._directory, self._info)
                self._open_journal(self._directory)
            self._journal.append(entry)  # type: ignore[union-attr]
        except OSError as error:
            return self._try_later(error)
        self._pause, self._trouble = 0.0, ""
        return None

    def _try_later(self, error: OSError) -> float:
        if isinstance(error, FileNotFoundError):  # the directory was taken away: begin again in a new one
            self._close_journal()
        self._pause = min(max(2 * self._pause, _FIRST_PAUSE), _LONGEST_PAUSE)
        self._trouble = f"{type(error).__name__}: {os.strerror(error.errno or 0)}"
        self._report(_WRITE, error)
        return self._pause

    def _begin_segment(self) -> float | None:
        """The journal before stays open until there is a new one: a full disk leaves room for an ending in it alone."""
        earlier, self._journal = self._journal, None
        try:
            if self._directory is not None and earlier is not None:
                self._open_journal(self._directory)
        except OSError as error:
            self._journal = earlier
            pause = self._try_later(error)
            return pause if self._journal is not None else None  # else the next entry makes a new directory
        if earlier is not None:
            earlier.close()
        return None

    def _open_journal(self, directory: Path) -> None:
        self._segment = max(self._segment, next_segment(directory, self._rank))
        while self._journal is None:
            try:
                self._journal = Journal(journal_path(directory, self._rank, self._segment))
            except FileExistsError:  # someone else took that number just now
                self._segment += 1

    def _end(self, ending: Ending) -> float | None:
        ending = replace(ending, dropped=self.dropped)
        pause = self._append(ending)
        if pause is None:
            if self._machine is not None:
                self._machine.close()
            seconds = max(0.0, self._examined_until - time.monotonic())
            # Before the sinks, which hear what it finds.
            self._with_examination("end the diagnosis", lambda examination: examination.close(seconds))
            self._stop_sinks(_LONGEST_PAUSE)
            self._wait_for_sinks()
            if self._last_words:  # of alerts and sinks, and of what failed meanwhile; an ending comes last
                for entry in (*self._last_words, ending):
                    self._append(entry)
            self._close_journal()
        return pause

    def _give_up(self) -> None:
        """The thread ends. Where the disk kept the ending from being written, it is said in the room kept for it."""
        self._has_given_up = True
        if self._ending is None or self._journal is None:  # it is written, and the journal closed
            return
        ending = replace(self._ending, dropped=self.dropped)
        lost = f"{self._trouble or 'there was no time'}; {self.dropped:,} records were lost"
        problem = Problem(self._last[0], time.time(), _WRITE, lost)
        try:
            self._end_in_little_room(self._journal, problem, ending)
        except OSError as error:
            self._report(_WRITE, error)
        self._close_journal()
        if self._machine is not None:
            self._machine.close()

    @staticmethod
    def _end_in_little_room(journal: Journal, problem: Problem, ending: Ending) -> None:
        untold: Problem | None = problem
        try:
            journal.append(problem)
            untold = None
            journal.append(ending)
        except OSError:
            journal.end_in_place(untold, ending)

    def _stop_sinks(self, seconds: float) -> None:
        self._sinks_are_closed = True
        for sink in self._sinks:
            if isinstance(sink, BackgroundSink):
                sink.stop(seconds, self._ending.state if self._ending is not None else None)
            else:
                sink.stop(seconds)

    def _wait_for_sinks(self) -> None:
        for sink in self._sinks:
            sink.wait(max(0.0, self._told_until - time.monotonic()))
            sink.give_up()

    def _close_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    def _touch(self) -> None:
        if self._journal is not None:
            self._journal.touch()


def _call(task: Task) -> float | None:
    return task()
