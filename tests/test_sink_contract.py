"""One contract over every sink there is, each with its real package: raising, hanging, ending too early, closing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import holter
from holter.alerts import Alerts
from holter.problems import Complaint
from holter.record import Record
from holter.send import send
from holter.sinks import Background, Memory, MLflow, Sink, WandB
from holter.sinks.naming import NAMES, make
from tests import wandb_file
from tests.models import Training
from tests.models import make as make_training
from tests.test_sinks import FINDING, offline, record

__all__ = ["offline"]  # a fixture

SINKS: dict[str, Callable[[Path], Sink]] = {
    **{name: lambda path, name=name: make(name, path, project="contract") for name in NAMES},  # type: ignore[misc]
    "memory": lambda path: Memory(),
    "alerts": lambda path: Alerts([holter.Alert("json://127.0.0.1:9", private=True)]),
}


SHARED = Memory()


@pytest.fixture(params=SINKS)
def sink(request: pytest.FixtureRequest, offline: Path) -> Iterator[Sink]:
    made = SINKS[request.param](offline)
    yield made
    made.close()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What hangs does so for 60 s, or until the test is over."""
    opened = threading.Event()
    yield opened
    opened.set()


class Spoilt:
    """A real sink, of whose calls some go wrong."""

    def __init__(self, inner: Sink, spoil: Callable[[str], None]) -> None:
        self.inner, self._spoil, self.done = inner, spoil, list[str]()

    def write(self, record: Record) -> None:
        self._call("write", record)

    def alert(self, finding: Any) -> None:
        self._call("alert", finding)

    def close(self) -> None:
        self._call("close")

    def _call(self, name: str, *what: Any) -> None:
        self._spoil(name)
        getattr(self.inner, name)(*what)
        self.done.append(name)


@pytest.mark.parametrize("at", ["write", "alert", "close"])
def test_one_that_raises_is_reported_once_gets_nothing_more_and_is_closed(sink: Sink, at: str) -> None:
    """P1."""
    reported: list[Exception] = []

    def spoil(name: str) -> None:
        if name == at and spoilt.done:
            raise ConnectionError("gone")

    spoilt = Spoilt(sink, spoil)
    background = Background(spoilt, lambda _, error: reported.append(error))
    for call in (background.write, background.write, background.alert, background.write):
        call(FINDING if call == background.alert else record(0))
        assert background.flush(30)
    background.close(30)
    assert [type(error) for error in reported] == [ConnectionError]
    expected = {"write": ["write", "close"], "alert": ["write", "write", "close"]}
    assert spoilt.done == expected.get(at, ["write", "write", "alert", "write"])


def test_one_that_hangs_for_a_minute_is_cut_off_and_close_comes_back(sink: Sink, gate: threading.Event) -> None:
    """P16."""
    reported: list[Exception] = []
    is_in = threading.Event()

    def spoil(name: str) -> None:
        if spoilt.done:
            is_in.set()
            gate.wait(60)

    spoilt = Spoilt(sink, spoil)
    background = Background(spoilt, lambda _, error: reported.append(error), hangs_after=0.02)
    background.write(record(0))
    assert background.flush(30)
    background.write(record(1))
    assert is_in.wait(30)
    while not background.is_cut_off:
        threading.Event().wait(0.005)
        background.write(Record(2, 0.0))
    background.close(0.05)
    assert not gate.is_set() and spoilt.done == ["write"]
    assert len(reported) == 1 and "not answered" in str(reported[0])


def watched(sink: Sink, run: Path) -> Training:
    """Eight steps, all of them in the journal. A run ends with its model, so that is handed over too."""
    training = make_training("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=run, sinks=[sink])
    for _ in range(8):
        training.step()
    training.monitor.flush()
    return training


@pytest.mark.hurried
def test_one_that_is_not_done_at_the_end_is_told_in_the_journal(gate: threading.Event, tmp_path: Path) -> None:
    """P15, P28: the journal says what the tool does not have."""
    is_in = threading.Event()

    def spoil(name: str) -> None:
        is_in.set()
        gate.wait(60)

    training = watched(Spoilt(Memory(), spoil), tmp_path / "run")
    assert is_in.wait(30)
    training.monitor.close()
    assert not gate.is_set()
    stored = holter.open_run(tmp_path / "run")
    (problem,) = [one for one in stored.problems if "Spoilt" in one.where]
    assert "not done when the training ended" in problem.what and stored.state == "finished"
    assert len(stored.history) == 8


@pytest.mark.hurried
def test_one_that_only_takes_long_to_close_is_no_trouble(gate: threading.Event, tmp_path: Path) -> None:
    def spoil(name: str) -> None:
        if name == "close":
            gate.wait(60)

    spoilt = Spoilt(Memory(), spoil)
    training = watched(spoilt, tmp_path / "run")
    training.monitor.close()
    assert not gate.is_set() and not holter.open_run(tmp_path / "run").problems
    assert {"write"} == set(spoilt.done)


def test_what_was_left_out_is_told_once(gate: threading.Event) -> None:
    reported: list[Exception] = []
    spoilt = Spoilt(Memory(), lambda name: gate.wait(60) and None)
    background = Background(spoilt, lambda _, error: reported.append(error))
    for step in range(3):
        background.write(record(step))
    background.stop(0.0)
    background.give_up()
    background.give_up()
    gate.set()
    background.wait(30)
    assert len(reported) == 1 and isinstance(reported[0], Complaint) and "3 records or findings" in str(reported[0])
    assert spoilt.inner.closed  # type: ignore[attr-defined]


@pytest.mark.parametrize(("error", "status", "code"), [(None, "FINISHED", 0), (ValueError, "FAILED", 1)])
def test_a_run_of_a_tool_ends_as_the_training_did(
    error: type[Exception] | None, status: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P15: live, and when the stored run is sent."""
    monkeypatch.chdir(tmp_path)  # MLflow keeps files beside its store, below the current directory
    training, uri = make_training("mlp"), f"sqlite:///{tmp_path}/mlflow.db"
    live = MLflow(tracking_uri=uri)
    with wandb_file.offline(tmp_path):
        monkeypatch.setenv("WANDB_RUN_ID", "mine")
        sinks = [live, WandB(project="contract")]
        with (
            contextlib.suppress(ValueError),
            holter.watch(training.model, training.optimizer, run=tmp_path / "run", sinks=sinks) as training.monitor,
        ):
            for _ in range(3):
                training.step()
            for sink in training.monitor._writer._sinks:
                assert sink.flush(60)
            if error is not None:
                raise error
        for sink in training.monitor._writer._sinks:
            sink.wait(60)
        assert wandb_file.read(tmp_path, "mine").exit_code == code
    sent = MLflow(tracking_uri=uri)
    send(holter.open_run(tmp_path / "run"), sent)
    for sink in (live, sent):
        assert sink._client.get_run(sink.run_id).info.status == status


@pytest.mark.parametrize("sinks", [[Memory], [SHARED, SHARED]])
def test_a_class_and_one_that_is_given_twice_are_refused(sinks: Any) -> None:
    training = make_training("mlp")
    with pytest.raises(ValueError, match=r"give one of it, Memory|given twice"):
        holter.watch(training.model, training.optimizer, run=False, sinks=sinks)


def test_after_its_end_a_sink_takes_nothing_and_says_nothing(sink: Sink) -> None:
    reported: list[Exception] = []
    background = Background(sink, lambda _, error: reported.append(error))
    background.write(record(0))
    background.close(30)
    background.write(record(1))
    background.alert(FINDING)
    background.close(30)
    assert reported == []
