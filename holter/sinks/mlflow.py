"""The MLflow sink: numbers become metrics of a run, findings its tags and an artifact.

It goes by MlflowClient and the run's id: MLflow's active run belongs to a thread, and a sink is called on another.
MLflow has no histograms, so their quantiles are metrics.
"""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
import tempfile
import time
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

from holter.diagnosis.finding import Finding
from holter.random_state import random_state_kept
from holter.record import Record
from holter.sinks.finding_words import key_of, words_of
from holter.sinks.panels import FEW, Panels, quantiles
from holter.summary import as_json
from holter.words import printable

FINDINGS_FILE = "holter/findings.json"
FINDING_TAG = "holter.finding."  # and its number, from 1
_OWN_TAG = "holter.run"  # of a run that a sink has started, and may go on with under the same names
MOST_METRICS = 1000  # MLflow takes no more in one call
LONGEST_NAME = 250  # so does it with a metric's name
LONGEST_LINE = 500  # a tag holds more, but is shown as a line; the file has every word
FLUSH_SECONDS = 5.0
_DEFAULT_EXPERIMENT = "0"
# Also where the server runs on Windows, which takes no colon.
_UNSAFE = re.compile(r"[^\w./\- ]")


class MLflow:
    """Logs to the run with this id, or to the one that is active where this is made, or to a new one, ended by `close`.

    A `tracking_uri` other than MLflow's current one, or an `experiment` by its name, asks for a new run, which may have
    a `name`. It starts with the first record, for each process of a training makes a sink and only one of them writes
    to it. In a run of the user's, scalars are called `holter/{name}`: two writers of one name would be one curve that
    jumps.
    """

    def __init__(
        self,
        run_id: str | None = None,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        name: str | None = None,
        layers: int | str = FEW,
        every: int = 1,
    ) -> None:
        if run_id is not None and experiment is not None:
            raise ValueError(f"run_id={run_id!r} has its experiment already: leave out experiment={experiment!r}")
        self._panels = Panels(layers, every)
        mlflow = _mlflow()
        self._new_metric = mlflow.entities.Metric
        self._client = _client(mlflow, tracking_uri)
        self._experiment, self._name = experiment, name
        self._is_users_store = self._client.tracking_uri == mlflow.get_tracking_uri()
        active = mlflow.active_run() if self._is_users_store and experiment is None else None
        self._run_id: str | None = run_id or (active.info.run_id if active is not None else None)
        self._is_own = self._run_id is None
        tags = {} if self._run_id is None else self._tags_of(mlflow, self._run_id)
        self._prefix = "" if self._is_own or _OWN_TAG in tags else "holter/"
        self._first_number = 1 + max(map(_number_of, tags), default=0)
        self._waiting: list[Any] = []
        self._flushed = time.monotonic()
        self._findings: dict[tuple[object, ...], Finding] = {}
        self._earlier: list[Any] | None = [] if self._first_number == 1 else None  # of this run; None: not read yet
        self._not_stored: Exception | None = None
        self._is_closed, self._status = False, "FINISHED"

    @property
    def run_id(self) -> str:
        """A new run is started when it is asked for."""
        if self._run_id is None:
            self._run_id = self._start()
        return self._run_id

    def write(self, record: Record) -> None:
        panel = self._panels.of(record)
        numbers = {(self._prefix if tag in record.scalars else "") + tag: value for tag, value in panel.scalars.items()}
        for tag, histogram in panel.histograms.items():
            numbers |= {f"{tag}/{name}": value for name, value in quantiles(histogram).items()}
        milliseconds = int(panel.time * 1000)
        for tag, value in numbers.items():
            self._waiting.append(self._new_metric(metric_name(tag), float(value), milliseconds, panel.step))
        if len(self._waiting) >= MOST_METRICS or time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._flush()

    def alert(self, finding: Finding) -> None:
        self._panels.note(finding)
        key = key_of(finding)
        self._findings[key] = finding
        number = self._first_number + list(self._findings).index(key)
        self._client.set_tag(self.run_id, f"{FINDING_TAG}{number}", line_of(finding), synchronous=True)
        self._store_findings()
        self._flush()

    def will_end(self, state: str) -> None:
        self._status = {"failed": "FAILED", "crashed": "FAILED", "interrupted": "KILLED"}.get(state, "FINISHED")

    def close(self) -> None:
        if self._is_closed or (self._run_id is None and not self._waiting):  # nothing came
            return
        try:
            self._flush()
        finally:  # a run that is never ended would seem to train for ever
            if self._run_id is not None:
                self._end(self._run_id)
        self._is_closed = True
        if self._not_stored is not None:
            raise self._not_stored

    def _end(self, run_id: str) -> None:
        self._store_findings()
        if self._is_own:
            self._client.set_terminated(run_id, self._status)

    def _flush(self) -> None:
        while self._waiting:
            batch = self._waiting[:MOST_METRICS]
            self._client.log_batch(self.run_id, metrics=batch, synchronous=True)
            del self._waiting[: len(batch)]  # only now: what could not be logged waits for the next time
        self._flushed = time.monotonic()

    def _store_findings(self) -> None:
        """A store of artifacts that cannot be reached must not cost the metrics: it is told at the end."""
        try:
            if self._earlier is None:
                self._earlier = self._read_findings()
            text = json.dumps([*self._earlier, *as_json(list(self._findings.values()))], indent=1, default=str)
            self._client.log_text(self.run_id, text, FINDINGS_FILE)
            self._not_stored = None
        except Exception as error:
            self._not_stored = error

    def _read_findings(self) -> list[Any]:
        """What an earlier sink stored in this run: a training that is resumed adds to it."""
        if not any(file.path == FINDINGS_FILE for file in self._client.list_artifacts(self.run_id, "holter")):
            return []
        with tempfile.TemporaryDirectory() as directory:
            path = self._client.download_artifacts(self.run_id, FINDINGS_FILE, directory)
            return list(json.loads(Path(path).read_text("utf-8")))

    def _tags_of(self, mlflow: Any, run_id: str) -> Mapping[str, str]:
        try:
            return dict(self._client.get_run(run_id).data.tags)
        except mlflow.MlflowException as error:
            way_out = "give the id of a run that it has, or its tracking_uri"
            place = place_of(self._client.tracking_uri)
            # Its words, and those of what it came from, may hold the address with a password.
            raise ValueError(f"{place} has no run {run_id!r}: {way_out} ({error.error_code})") from None

    def _start(self) -> str:
        """Where MLflow itself would start one, unless told: set_experiment leaves its choice in the environment."""
        name, place = self._experiment, None
        if name is None and self._is_users_store:
            name, place = os.environ.get("MLFLOW_EXPERIMENT_NAME"), os.environ.get("MLFLOW_EXPERIMENT_ID")
        if place is None and name is not None:
            found = self._client.get_experiment_by_name(name)
            place = found.experiment_id if found is not None else self._client.create_experiment(name)
        started = self._client.create_run(place or _DEFAULT_EXPERIMENT, tags={_OWN_TAG: "true"}, run_name=self._name)
        return str(started.info.run_id)


@lru_cache(maxsize=8192)  # asked of the same names at every step
def metric_name(name: str) -> str:
    """A name as it is, where MLflow takes it; else what is left of it, and eight digits that keep it apart from others.

    >>> metric_name("gradients/head.weight/norm"), metric_name("acc@5")
    ('gradients/head.weight/norm', 'acc_5-c4e871ab')
    """
    safe = posixpath.normpath(_UNSAFE.sub("_", name)).lstrip("/.")
    if safe == name and 0 < len(name) <= LONGEST_NAME:
        return name
    digits = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"{safe[: LONGEST_NAME - 9]}-{digits}".lstrip("-")


def line_of(finding: Finding) -> str:
    line = printable(" ".join(words_of(finding).split()))
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 1]}…"


def place_of(uri: str) -> str:
    """A store without user, password and parameters, so that it may be printed.

    >>> place_of("postgresql://me:secret@host:5432/runs?sslkey=x"), place_of("sqlite:////home/a@b/m.db?key=x")
    ('postgresql://host:5432/runs', 'sqlite:////home/a@b/m.db')
    >>> place_of("mysql://me:a/b@host/runs"), place_of("mlruns")
    ('mysql://…', 'mlruns')
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or rest.startswith("/"):  # a path
        return re.split(r"[?#]", uri, maxsplit=1)[0]
    address = re.split(r"[/?#]", rest, maxsplit=1)[0]
    after = rest[len(address) :]
    if "@" in after:  # where the password ends cannot be told
        return f"{scheme}://…"
    return f"{scheme}://{address.rpartition('@')[2]}{re.split('[?#]', after, maxsplit=1)[0]}"


def _number_of(tag: str) -> int:
    digits = tag.removeprefix(FINDING_TAG)
    return int(digits) if digits != tag and digits.isdecimal() else 0


@random_state_kept()
def _mlflow() -> Any:
    try:
        import_module("mlflow.entities")
        return import_module("mlflow")
    except ImportError as error:
        raise ImportError("the MLflow sink needs mlflow: pip install 'holter[mlflow]'") from error


def _client(mlflow: Any, tracking_uri: str | None) -> Any:
    where = place_of(tracking_uri or mlflow.get_tracking_uri())
    try:
        return mlflow.MlflowClient(tracking_uri)
    except ImportError as error:  # mlflow-skinny comes without what a database needs
        way_out = "pip install sqlalchemy alembic and its driver, or give the tracking_uri of a server"
        raise ImportError(f"MLflow cannot open {where} ({error}): {way_out}") from error
    except Exception as error:
        way_out = "give the tracking_uri of a store or server that answers, or set MLFLOW_TRACKING_URI"
        raise ValueError(f"MLflow cannot open {where} ({type(error).__name__}): {way_out}") from None
