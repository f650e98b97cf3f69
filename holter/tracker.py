"""MetricsTracker: scalars and histograms by name and step, kept here and handed on to sinks.

For loops that have no Monitor. Every sink has a thread of its own: one that is slow holds nobody up, one that fails or
hangs is cut off and reported once, and training goes on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, SupportsFloat

import numpy as np
import numpy.typing as npt

from holter.problems import Complaint
from holter.record import LayerRows, Record
from holter.sinks import Background, Sink, naming
from holter.sinks.wandb import UsersSteps, WandB
from holter.statistics.rows import Rows

if TYPE_CHECKING:
    import pandas

CLOSE_SECONDS = 30.0  # W&B may take some to start a run, and to finish it
_CUT_OFF_SECONDS = 1.0  # for one that was cut off: where it hangs, there is nothing to wait for

_logger = logging.getLogger("holter")
_open: weakref.WeakSet[Background] = weakref.WeakSet()  # one lives as long as its thread has work


class MetricsTracker:
    """Keeps scalars in memory, in the order they came, and writes each as a Record to every sink.

    Steps are kept as given: repeated and out of order, too. With `use_wandb` everything also goes to a new run of
    W&B, which `close` finishes; where W&B is not installed, that is skipped. There a step is `holter/step`, and has
    a row of its own. If a run of yours goes on, all goes there, as if you had called `wandb.log(..., step=step)`.

    >>> tracker = MetricsTracker()
    >>> tracker.log_scalar("loss", 0.5, step=0)
    >>> tracker.log_epoch(1, train_loss=0.4, val_loss=0.6)
    >>> tracker.scalar("val_loss")
    (array([1]), array([0.6]))
    """

    def __init__(self, use_wandb: bool = False, sinks: Iterable[Sink | str] = ()) -> None:
        self._sinks: tuple[Background, ...] = ()
        self._users_run: UsersSteps | None = None
        self._use_wandb = use_wandb  # from the first record on: the user may start a run until then
        self._add([naming.make(sink, Path("runs")) if isinstance(sink, str) else sink for sink in sinks])
        self._rows: list[tuple[int, dict[str, float]]] = []

    def log_scalar(self, name: str, value: SupportsFloat, *, step: int) -> None:
        """Logs one number. A tensor is read here and now, which waits for its device."""
        self._log(step, {name: value})

    def log_epoch(self, epoch: int, **metrics: SupportsFloat) -> None:
        """Logs the metrics of an epoch together, with the epoch as their step."""
        self._log(epoch, metrics)

    def log_histogram(self, name: str, rows: Rows, *, step: int) -> None:
        """Hands the histogram of measured rows to the sinks, all rows in one; it is not kept here."""
        if len(rows):
            layer_rows = LayerRows((name,), rows.total())
            self._write(Record(step, time.time(), rows={"histogram": layer_rows}))

    def scalar(self, name: str) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Steps and values of one scalar, in the order they were logged."""
        found = [(step, scalars[name]) for step, scalars in self._rows if name in scalars]
        return np.array([step for step, _ in found], np.int64), np.array([value for _, value in found], float)

    def to_dataframe(self) -> pandas.DataFrame:
        """A table with a column `step` and a column a name; what is logged for one step on end shares a line.

        A name that comes again begins a new line: nothing is overwritten.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError("to_dataframe() needs pandas: pip install 'holter[parquet]'") from error
        lines = [scalars for _, scalars in self._rows]
        names = list(dict.fromkeys(name for scalars in lines for name in scalars))
        frame = pandas.DataFrame(lines, columns=names, dtype=np.float64)
        frame.insert(0, "step", [step for step, _ in self._rows], allow_duplicates=True)
        return frame

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Closes the sinks when they have written what waits, at most this long; what was logged can still be read.

        Where it is not called, the end of the process does the same.
        """
        sinks, self._sinks, self._use_wandb, self._users_run = self._sinks, (), False, None
        _close(sinks, seconds)

    def __enter__(self) -> MetricsTracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _log(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        scalars = {}
        for name, value in metrics.items():
            if hasattr(value, "detach"):  # a loss with its graph: torch warns where that is read
                value = value.detach()
            try:
                scalars[name] = float(value)
            except (TypeError, ValueError, RuntimeError):  # torch raises the last for tensors of many values
                kind = type(value).__name__
                _logger.warning("%s at step %s is no number but a %s: left out", name, step, kind)
        if not scalars:
            return
        if self._rows and self._rows[-1][0] == step and not scalars.keys() & self._rows[-1][1].keys():
            self._rows[-1][1].update(scalars)
        else:
            self._rows.append((step, scalars))
        self._write(Record(step, time.time(), dict(scalars)))

    def _add(self, sinks: Iterable[Sink]) -> None:
        added = [Background(sink, _report) for sink in sinks]
        self._sinks = (*self._sinks, *added)
        _open.update(added)
        if added:
            weakref.finalize(self, _stop, added).atexit = False  # else their threads would outlive it for ever

    def _start_wandb(self) -> None:
        self._use_wandb = False
        # Quietly: the same script runs on machines that have it and on those that have not.
        with contextlib.suppress(ImportError):
            run = getattr(import_module("wandb"), "run", None)
            if run is not None:
                self._users_run = UsersSteps(run)
            else:
                self._add([WandB(layers="all")])

    def _write(self, record: Record) -> None:
        if self._use_wandb:
            self._start_wandb()
        if self._users_run is not None:
            try:
                self._users_run.write(record)
            except Exception as error:
                _report(self._users_run, error)
                self._users_run = None
        for sink in self._sinks:
            sink.write(record)
        if self._sinks:
            # Anew each time, for the last that is registered is called first, and W&B, which its sink's thread starts
            # some time, takes its service down at exit.
            atexit.unregister(_close_all)
            atexit.register(_close_all)


def _close_all() -> None:
    _close(list(_open), CLOSE_SECONDS)


def _close(sinks: Sequence[Background], seconds: float) -> None:
    until = time.monotonic() + seconds
    _stop(sinks, seconds)
    for sink in sinks:
        left = max(0.0, until - time.monotonic())
        sink.wait(min(left, _CUT_OFF_SECONDS) if sink.is_cut_off else left)
        if time.monotonic() >= until and not sink.flush(0):
            _report(sink.sink, Complaint(f"it was not done after {seconds:g} s"))
        _open.discard(sink)


def _stop(sinks: Sequence[Background], seconds: float = CLOSE_SECONDS) -> None:
    for sink in sinks:
        sink.stop(seconds)


def _report(sink: Sink | UsersSteps, error: Exception) -> None:
    # The class only: a message may hold an address or a key. Logged, not warned of: a warning can be made an error.
    what = str(error) if isinstance(error, Complaint) else type(error).__name__
    _logger.warning("training goes on, but Holter could not write to %s: %s", type(sink).__name__, what)
