"""W&B: numbers, histograms and findings in a run of Weights & Biases.

W&B keeps a run as rows, numbered by one counter, and drops what comes with a `step=` below it. Ours have a step of
their own, `holter/step`, but the counter moves with every row that is committed, whoever commits it. So in a run of the
user's a row of ours is never committed: it goes along with the user's next one, which keeps its step and its values.
Where the user logs less often than there are records, some have no row to go with: they wait, a few of them, and then
are left out and counted (`holter/rows_left_out`). A run of our own, or `own_rows=True`, has them all.
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
from holter.record import Record
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
    Start yours before the training: until ours is finished, W&B returns it to whoever calls `wandb.init()`.
    In the user's run scalars are called `holter/{name}`, for a name that both log would be overwritten, and rows go
    along with the user's. With `own_rows` every step has a row and all names stay as they are, but the run's counter
    moves: only for those who never call `wandb.log(..., step=...)`. `layers` and `every` as `Panels` says.
    """

    def __init__(
        self, run: Any = None, *, layers: int | str = FEW, every: int = 1, own_rows: bool = False, **init: Any
    ) -> None:
        self._panels = Panels(layers, every)
        self._wandb = _wandb()
        _check(self._wandb, run, init)
        self._run, self._init, self._own_rows = run, init, own_rows
        self._started: Any = None
        self._rows: _Rows | None = None  # from the first record on
        self._defined: set[str] = set()
        self._findings: dict[tuple[object, ...], str] = {}

    def write(self, record: Record) -> None:
        panel, rows = self._panels.of(record), self._opened()
        prefix = "" if rows.are_own else "holter/"
        row: Row = {}
        for tag, value in self._values(panel).items():
            is_scalar = tag in record.scalars
            name = (prefix if is_scalar else "") + (tag if tag.isprintable() else printable(tag))
            self._define(rows.run, name, by_name=is_scalar and rows.are_own)
            row[name] = value
        if row:
            rows.put({**row, STEP: record.step})

    def alert(self, finding: Finding) -> None:
        """Told at once, and once more when it is over; the summary has a line for each."""
        self._panels.note(finding)
        run, is_over = self._opened().run, finding.until is not None
        level = "INFO" if is_over else _LEVELS[finding.severity]
        line = _line(finding)
        run.alert(title=_title(finding), text=line, level=self._wandb.AlertLevel(level), wait_duration=_AT_ONCE)
        self._findings[_key(finding)] = line
        run.summary[FINDINGS] = "\n".join([*self._findings.values()][-MOST_LINES:])

    def close(self) -> None:
        if self._rows is not None:
            self._rows.close()
        started, self._started = self._started, None
        if started is not None:
            started.finish()

    def _opened(self) -> _Rows:
        if self._rows is None:
            run = self._run if self._run is not None or self._init else self._wandb.run
            if run is None:
                # Beside one of the user's; else as the one that goes on, for a `wandb.init()` to come would return it.
                beside = {"reinit": "create_new"} if self._wandb.run is not None else {}
                run = self._started = self._wandb.init(**{**beside, **self._init})
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

    def _values(self, panel: Panel) -> Row:
        values: Row = dict(panel.scalars)
        for tag, histogram in panel.histograms.items():
            counts, edges = joined(histogram, MOST_BINS)
            if len(counts):  # else no value is finite
                values[tag] = self._wandb.Histogram(np_histogram=(counts, edges))
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
        self._left_out = 0

    def put(self, row: Row) -> None:
        is_taken = self._is_taken()
        if is_taken and not self._waiting and _belong_together(self._placed, row):
            self._log(row)
        elif self.are_own:
            if is_taken:
                self.run.log({}, commit=True)
            self._place(row)
        else:
            self._wait(row)
            if not is_taken:
                self._place(self._waiting.popleft())

    def close(self) -> None:
        if self._waiting and not self._is_taken():
            self._place(self._waiting.pop())  # the newest: the others find no row any more
        self._left_out += len(self._waiting)
        self._waiting.clear()
        if self._left_out:
            self.run.summary[LEFT_OUT] = self._left_out

    def _is_taken(self) -> bool:
        return bool(self._placed) and self.run.step == self._number

    def _place(self, row: Row) -> None:
        self._placed = {}
        self._log(row)

    def _log(self, row: Row) -> None:
        self.run.log(row, commit=False)
        self._placed |= row
        # Read afterwards: if the user has committed in between, a free row is taken for ours, and not ours for free.
        self._number = self.run.step

    def _wait(self, row: Row) -> None:
        if self._waiting and _belong_together(self._waiting[-1], row):
            self._waiting[-1].update(row)
        else:
            self._waiting.append(row)
        if len(self._waiting) > MOST_WAITING:
            self._waiting.remove(min(self._waiting, key=len))  # of those that say least, the oldest
            if not self._left_out:
                _logger.warning(
                    "the W&B run gets fewer rows than Holter has steps, and some of Holter's are left out there: "
                    'WandB(project="...") has a run of its own for them, WandB(own_rows=True) rows of its own in yours'
                )
            self._left_out += 1


def _belong_together(one: Row, other: Row) -> bool:
    return one.keys() & other.keys() == {STEP} and one[STEP] == other[STEP]


def _title(finding: Finding) -> str:
    over = "over: " if finding.until is not None else ""
    title = printable(f"{over}{finding.cause} in {finding.layer or finding.where}")
    return title if len(title) <= LONGEST_TITLE else f"{title[: LONGEST_TITLE - 1]}…"


def _line(finding: Finding) -> str:
    over = f" (over: last seen at step {finding.until})" if finding.until is not None else ""
    return printable(f"{finding}{over}")


def _key(finding: Finding) -> tuple[object, ...]:
    """What stays when a finding is told again because it is over. Holter's own problems differ only in their words."""
    words = finding.advice if finding.where == "monitor" else ""
    return finding.step, finding.cause, finding.severity, finding.layer, words


def _check(wandb: Any, run: Any, init: Mapping[str, Any]) -> None:
    if run is not None and init:
        raise ValueError(f"run= goes on already: leave out {', '.join(init)}, or leave out run= to start a new one")
    if run is not None and not hasattr(run, "define_metric"):
        raise ValueError(f"run={run!r} is no run of W&B: give what wandb.init() returned, or nothing for wandb.run")
    try:
        inspect.signature(wandb.init).bind(**init)
    except TypeError as error:
        raise ValueError(f"wandb.init takes other arguments ({error}); see its documentation") from error


def _wandb() -> Any:
    try:
        wandb = import_module("wandb")
        if not hasattr(wandb, "init"):  # a directory ./wandb, where W&B has left its files, can be imported, too
            raise ImportError("wandb is not installed")
        return wandb
    except ImportError as error:
        raise ImportError("the W&B sink needs wandb: pip install 'holter[wandb]'") from error
