"""W&B: numbers, histograms and findings in a run of Weights & Biases.

W&B keeps a run as rows, numbered by one counter, and drops what comes with a `step=` below it. Ours have a step of
their own, `holter/step`, but the counter moves with every row that is committed, whoever commits it. So in a run of the
user's a row of ours is never committed: it goes along with the user's next one, which keeps its step and its values.
Where the user logs less often than there are steps, some have no row to go with: with each of the user's goes the one
of ours that says most since the one before, and the others are left out and counted (`holter/rows_left_out`). A run of
our own, or `own_rows=True`, has them all.
"""

from __future__ import annotations

import inspect
import logging
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

from holter.diagnosis.finding import Finding
from holter.problems import Complaint
from holter.random_state import random_state_kept
from holter.record import Record
from holter.sinks.finding_words import key_of, title_of, words_of
from holter.sinks.panels import FEW, Panel, Panels, joined
from holter.words import printable

STEP = "holter/step"
FINDINGS = "holter/findings"
LEFT_OUT = "holter/rows_left_out"
MOST_BINS = 512  # of a wandb.Histogram
MOST_WAITING = 32  # rows of ours, for one of the user's
MOST_LINES = 100  # findings in the summary, the latest of them
LONGEST_TITLE = 63  # of an alert
_LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}
_AT_ONCE = timedelta(milliseconds=1)  # W&B takes 0 for its default, a minute in which it swallows a repeated title

_logger = logging.getLogger("holter")

Row = dict[str, Any]


class WandB:
    """Logs to this run, or to the one that goes on when the first record comes, or to a new one, finished by `close`.

    `init` are arguments of `wandb.init`, and ask for a new run also beside one of the user's: `WandB(project="x")`.
    Start yours before the training: until ours is finished, W&B returns it to whoever calls `wandb.init()`. Finish it
    after the monitor is closed: what comes later is refused.
    In the user's run scalars are called `holter/{name}`, for a name that both log would be overwritten, and rows go
    along with the user's. With `own_rows` every step has a row there, but the run's counter moves: only for those who
    never call `wandb.log(..., step=...)`. `layers` and `every` as `Panels` says.
    """

    def __init__(
        self, run: Any = None, *, layers: int | str = FEW, every: int = 1, own_rows: bool = False, **init: Any
    ) -> None:
        self._panels = Panels(layers, every)
        self._wandb = _wandb()
        _check(self._wandb, run, init)
        self._run, self._init, self._own_rows = run, init, own_rows
        self._started: Any = None
        self._exit_code = 0
        self._rows: _Rows | None = None  # from the first record on
        self._defined: set[str] = set()
        self._findings: dict[tuple[object, ...], str] = {}

    def write(self, record: Record) -> None:
        panel, rows = self._panels.of(record), self._opened()
        is_own_run = self._started is not None
        prefix = "" if is_own_run else "holter/"
        row: Row = {}
        for tag, value in _values(self._wandb, panel).items():
            is_scalar = tag in record.scalars
            name = (prefix if is_scalar else "") + (tag if tag.isprintable() else printable(tag))
            self._define(rows.run, name, by_name=is_scalar and is_own_run)
            row[name] = value
        if row:
            rows.put({**row, STEP: record.step})

    def alert(self, finding: Finding) -> None:
        """Told at once, and once more when it is over; the summary has a line for each."""
        self._panels.note(finding)
        run, is_over = self._opened().run, finding.until is not None
        level = "INFO" if is_over else _LEVELS[finding.severity]
        line = printable(words_of(finding))
        run.alert(title=_title(finding), text=line, level=self._wandb.AlertLevel(level), wait_duration=_AT_ONCE)
        self._findings[key_of(finding)] = line
        run.summary[FINDINGS] = "\n".join([*self._findings.values()][-MOST_LINES:])

    def will_end(self, state: str) -> None:
        self._exit_code = 1 if state in ("failed", "crashed", "interrupted") else 0

    def close(self) -> None:
        try:
            if self._rows is not None:
                self._rows.close()
        finally:
            started, self._started = self._started, None
            if started is not None:
                started.finish(exit_code=self._exit_code)

    def _opened(self) -> _Rows:
        if self._rows is not None:
            _check_open(self._rows.run)
            return self._rows
        run = self._run if self._run is not None or self._init else self._wandb.run
        if run is None:
            # Beside one of the user's; else as the one that goes on, for a `wandb.init()` to come would return it.
            beside = {"reinit": "create_new"} if self._wandb.run is not None else {}
            run = self._started = self._wandb.init(**{**beside, **self._init})
        _check_open(run)
        self._rows = _Rows(run, are_own=self._own_rows or self._started is not None)
        run.define_metric(STEP, hidden=True)
        return self._rows

    def _define(self, run: Any, name: str, by_name: bool) -> None:
        """By how it begins, where that is ours; scalars of a user's, in a run of our own, may begin like others."""
        pattern = name if by_name else f"{name.partition('/')[0]}/*"
        if name and "*" not in name and pattern not in self._defined:
            # Not synchronised: W&B would add our step to rows of the user's that have a name of this kind.
            run.define_metric(pattern, step_metric=STEP, step_sync=False)
            self._defined.add(pattern)


class UsersSteps:
    """Rows in a run of the user's, as if the user had called `run.log(values, step=step)`: for what users log by hand.

    Not on another thread, for its rows must be in time with the user's own. Where the run is farther already, the
    values go along with the row that is open, with their step as `holter/step`: W&B would drop them.
    """

    def __init__(self, run: Any) -> None:
        self._wandb, self._run, self._panels = _wandb(), run, Panels("all")

    def write(self, record: Record) -> None:
        _check_open(self._run)
        values = _values(self._wandb, self._panels.of(record))
        if record.step >= self._run.step:
            self._run.log(values, step=record.step)
        else:
            self._run.log({**values, STEP: record.step}, commit=False)


def _values(wandb: Any, panel: Panel) -> Row:
    values: Row = dict(panel.scalars)
    for tag, histogram in panel.histograms.items():
        counts, edges = joined(histogram, MOST_BINS)
        if len(counts):  # else no value is finite
            values[tag] = wandb.Histogram(np_histogram=(counts, edges))
    return values


class _Rows:
    """Rows of a run: what is logged for one step on end, under different names, shares one.

    What is logged without a commit joins the row that the run has open. `run.step` is the number of that one: as long
    as it is the same, the row that was placed last is still there, and another would be mixed with it.
    """

    def __init__(self, run: Any, *, are_own: bool) -> None:
        self.run, self.are_own = run, are_own
        self._placed: Row = {}
        self._number = -1
        self._waiting: deque[Row] = deque()
        self._rows_placed = self._left_out = 0
        self._is_told = False  # that some are left out

    def put(self, row: Row) -> None:
        _check_open(self.run)
        is_taken = self._is_taken()
        if is_taken and not self._waiting and _belong_together(self._placed, row):
            self._log(row)
        elif self.are_own:
            if is_taken:
                self.run.log({}, commit=True)
            self._place(row)
        else:
            self._wait(row)
            if not is_taken and len(self._waiting) > 1:  # the last one may get more: what is logged after a step
                self._place_one()

    def close(self) -> None:
        if not self._waiting and not self._left_out:
            return
        _check_open(self.run)
        if self._waiting and not self._is_taken():
            self._place(self._waiting.pop())  # the newest: the others find no row any more
        left_out = self._left_out + len(self._waiting)
        self._waiting.clear()
        self._left_out = 0  # they are told now: another call has nothing more to do
        if left_out > self._rows_placed:
            self._tell()
        if left_out:
            self.run.summary[LEFT_OUT] = left_out

    def _is_taken(self) -> bool:
        return bool(self._placed) and self.run.step == self._number

    def _place(self, row: Row) -> None:
        self._placed = {}
        self._rows_placed += 1
        self._log(row)

    def _log(self, row: Row) -> None:
        self.run.log(row, commit=False)
        self._placed |= row
        # Read afterwards: if the user has committed in between, a free row is taken for ours, and not ours for free.
        self._number = self.run.step

    def _place_one(self) -> None:
        """Of those that say most, the newest. Those before it are left out: a chart that lags behind helps nobody."""
        *complete, last = self._waiting
        place = max(range(len(complete)), key=lambda number: (len(complete[number]), number))
        self._left_out += place
        self._waiting = deque([*complete[place + 1 :], last])
        self._place(complete[place])

    def _wait(self, row: Row) -> None:
        same = next((one for one in self._waiting if _belong_together(one, row)), None)
        if same is not None:
            same.update(row)
        elif row[STEP] != self._placed.get(STEP):  # else it comes too late: its row is with the user's already
            self._waiting.append(row)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.remove(min([*self._waiting][:-1], key=len))  # of those that say least, the oldest
            self._left_out += 1
            self._tell()

    def _tell(self) -> None:
        if not self._is_told:
            self._is_told = True
            _logger.warning(
                "in your W&B run, Holter's steps go along with the rows that you log, and for some there was none: "
                'WandB(project="...") has a run of its own for all, WandB(own_rows=True) rows of its own in yours'
            )


def _check_open(run: Any) -> None:
    """Before anything is asked of the run: `run.step` of one that is finished waits for an answer that never comes.

    W&B has no public way to say so; where the private one goes away, we are as wise as before.
    """
    if getattr(run, "_is_finished", False):
        raise Complaint("the W&B run was finished before the monitor: it gets no more rows")


def _belong_together(one: Row, other: Row) -> bool:
    return one.keys() & other.keys() == {STEP} and one[STEP] == other[STEP]


def _title(finding: Finding) -> str:
    title = printable(title_of(finding))
    return title if len(title) <= LONGEST_TITLE else f"{title[: LONGEST_TITLE - 1]}…"


def _check(wandb: Any, run: Any, init: Mapping[str, Any]) -> None:
    if run is not None and init:
        raise ValueError(f"run= goes on already: leave out {', '.join(init)}, or leave out run= to start a new one")
    if run is not None and not hasattr(run, "define_metric"):
        raise ValueError(f"run={run!r} is no run of W&B: give what wandb.init() returned, or nothing for wandb.run")
    try:
        inspect.signature(wandb.init).bind(**init)
    except TypeError as error:
        raise ValueError(f"wandb.init takes other arguments ({error}); see its documentation") from error


@random_state_kept()
def _wandb() -> Any:
    try:
        wandb = import_module("wandb")
        if not hasattr(wandb, "init"):  # a directory ./wandb, where W&B has left its files, can be imported, too
            raise ImportError("wandb is not installed")
        return wandb
    except ImportError as error:
        raise ImportError("the W&B sink needs wandb: pip install 'holter[wandb]'") from error
