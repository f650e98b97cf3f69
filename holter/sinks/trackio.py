"""The Trackio sink: numbers and histograms in a run of Trackio, findings as its alerts.

Trackio keeps a project in one SQLite file (below TRACKIO_DIR) and its current run in a context variable, which
`trackio.init` finishes to put a new one in its place. A run of ours is therefore started in a context of its own: the
user's run goes on, and stays the current one.
"""

from __future__ import annotations

import contextvars
import inspect
import tempfile
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from holter.diagnosis.finding import Finding
from holter.random_state import random_state_kept
from holter.record import Record
from holter.sinks.finding_words import title_of
from holter.sinks.panels import FEW, Panel, Panels, joined, quantiles
from holter.words import printable

MOST_BINS = 64  # as many as trackio.Histogram makes of values
_LEVELS = {"info": "INFO", "warning": "WARN", "critical": "ERROR"}
# No dashboard started in a notebook, and no measuring of the machine: Holter has done that.
_QUIET = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}


class Trackio:
    """Logs to the user's current run, where that is of this project, or to a new one, finished by `close`.

    A `name` other than that of the current run, or further arguments of `trackio.init`, ask for a new run. That starts
    with the first record, for each process of a training makes a sink and only one of them writes to it. In a run of
    the user's, scalars are called `holter/{name}`: two writers of one name would be one curve that jumps.
    """

    def __init__(
        self, project: str, *, name: str | None = None, layers: int | str = FEW, every: int = 1, **init: Any
    ) -> None:
        if not isinstance(project, str) or not project:
            raise ValueError(f"project={project!r}: give the name of a project, such as 'my-training'")
        self._panels = Panels(layers, every)
        self._trackio = _trackio()
        self._init = {**_QUIET, **init, "project": project, "name": name}
        _check(self._trackio, self._init)
        current = self._trackio.context_vars.current_run.get()
        is_meant = current is not None and current.project == project and name in (None, current.name) and not init
        self._run: Any = current if is_meant else None
        self._is_own = not is_meant
        self._is_closed = False

    @property
    def run(self) -> Any:
        """A new run is started when it is asked for."""
        if self._run is None:
            if not self._init.get("space_id"):
                _check_directory(Path(self._trackio.utils.TRACKIO_DIR))
            held = self._trackio.config  # of the user's run: a name of the module, and not of a context
            self._run = contextvars.Context().run(self._trackio.init, **self._init)
            self._trackio.config = held
        return self._run

    def write(self, record: Record) -> None:
        panel = self._panels.of(record)
        prefix = "" if self._is_own else "holter/"
        values: dict[str, Any] = {}
        for tag, value in panel.scalars.items():
            values[self._name((prefix if tag in record.scalars else "") + tag)] = float(value)
        values |= self._histograms(panel)
        if values:
            self.run.log(values, step=record.step)

    def alert(self, finding: Finding) -> None:
        """Told at once, and once more when it is over."""
        self._panels.note(finding)
        is_over = finding.until is not None
        level = self._trackio.AlertLevel["INFO" if is_over else _LEVELS[finding.severity]]
        step = finding.step if finding.until is None else finding.until
        self.run.alert(title=printable(title_of(finding)), text=printable(str(finding)), level=level, step=step)

    def close(self) -> None:
        if self._is_own and self._run is not None and not self._is_closed:
            self._run.finish()
        self._is_closed = True

    def _histograms(self, panel: Panel) -> dict[str, Any]:
        """With their quantiles as numbers, which are series of their own (E3, E5)."""
        values: dict[str, Any] = {}
        for tag, histogram in panel.histograms.items():
            counts, edges = joined(histogram, MOST_BINS)
            if len(counts):  # else no value is finite
                name = self._name(tag)
                values[name] = self._trackio.Histogram(np_histogram=(counts, edges))
                values |= {f"{name}/{quantile}": value for quantile, value in quantiles(histogram).items()}
        return values

    def _name(self, tag: str) -> str:
        """Trackio keeps some names for itself, such as time."""
        name = printable(tag)
        return f"holter/{name}" if name in self._trackio.utils.RESERVED_KEYS or name.startswith("__") else name


def _check_directory(directory: Path) -> None:
    """Where it cannot write, Trackio warns on a thread of its own and goes on: everything would seem to be stored."""
    directory.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=directory).close()


def _check(trackio: Any, init: Mapping[str, Any]) -> None:
    try:
        inspect.signature(trackio.init).bind(**init)
    except TypeError as error:
        raise ValueError(f"trackio.init takes other arguments ({error}); see its documentation") from error


@random_state_kept()
def _trackio() -> Any:
    try:
        trackio = import_module("trackio")
        if not hasattr(trackio, "AlertLevel"):  # an old one, or a directory ./trackio, which can be imported, too
            raise ImportError("there is no trackio with alerts")
        return trackio
    except ImportError as error:
        raise ImportError("the Trackio sink needs trackio: pip install 'holter[trackio]'") from error
