"""MetricsTracker: scalars and histograms by name and step, kept here and handed on to sinks.

For loops that have no Monitor. A sink that fails is cut off and reported once; training goes on.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, SupportsFloat

import numpy as np
import numpy.typing as npt

from holter.record import LayerRows, Record
from holter.sinks import Fanout, Sink
from holter.sinks.wandb import WandB
from holter.statistics.rows import Rows

if TYPE_CHECKING:
    import pandas

_logger = logging.getLogger("holter")


class MetricsTracker:
    """Keeps scalars in memory, in the order they came, and writes each as a Record to every sink.

    Steps are kept as given: repeated and out of order, too. With `use_wandb` everything also goes to the W&B
    run that is going on, or to a new one, which `close` finishes; where W&B is not installed, that is skipped.
    There a step is `holter/step`, and has a row of its own.

    >>> tracker = MetricsTracker()
    >>> tracker.log_scalar("loss", 0.5, step=0)
    >>> tracker.log_epoch(1, train_loss=0.4, val_loss=0.6)
    >>> tracker.scalar("val_loss")
    (array([1]), array([0.6]))
    """

    def __init__(self, use_wandb: bool = False, sinks: Iterable[Sink] = ()) -> None:
        self._sinks = Fanout(list(sinks), _report)
        self._rows: list[tuple[int, dict[str, float]]] = []
        if use_wandb:
            # Quietly: the same script runs on machines that have it and on those that have not.
            with contextlib.suppress(ImportError):
                self._sinks.sinks.append(WandB(layers="all", own_rows=True))

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
            self._sinks.write(Record(step, time.time(), rows={"histogram": layer_rows}))

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

    def close(self) -> None:
        """Closes the sinks; what was logged can still be read."""
        self._sinks.close()

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
        self._sinks.write(Record(step, time.time(), dict(scalars)))


def _report(sink: Sink, error: Exception) -> None:
    # The class only: a message may hold an address or a key. Logged, not warned of: a warning can be made an error.
    kinds = type(sink).__name__, type(error).__name__
    _logger.warning("%s failed with %s: it gets no more records, training goes on", *kinds)
