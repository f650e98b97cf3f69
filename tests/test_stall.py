"""P16: a writer or a sink that stalls never blocks the training, and what it cost is counted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import holter
from holter.background import Background
from holter.diagnosis.finding import Finding
from holter.journal import Journal
from holter.record import Record
from holter.sinks import Memory
from tests.models import Training, make


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Closed until a test opens it; opened at the end, so that no thread stays behind."""
    event = threading.Event()
    yield event
    event.set()


def _stall(monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> threading.Event:
    """Makes every append wait for the gate; the event returned says that one does."""
    waiting, honest = threading.Event(), Journal.append

    def append(self: Journal, entry: Any) -> None:
        waiting.set()
        gate.wait(60)
        honest(self, entry)

    monkeypatch.setattr(Journal, "append", append)
    return waiting


def _train(training: Training, steps: int) -> None:
    for _ in range(steps):
        training.step()
        training.losses.clear()
        training.random_states.clear()


def test_training_goes_on_while_the_writer_stalls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """P16: thousands of steps are taken while one write hangs; the queue is bounded, every drop is counted."""
    waiting = _stall(monkeypatch, gate)
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run", budget=None)
    background = training.monitor._writer._background
    background._most_items = 1000
    _train(training, 3000)
    assert waiting.is_set() and not gate.is_set(), "the writer is still in its first write"
    assert len(background) == 1000
    # A step posts its record and, for the loss logged after it, another.
    assert training.monitor.dropped == 2 * 3000 - 1000
    assert background._bytes <= background._most_bytes
    gate.set()
    assert training.monitor.flush(30)
    _train(training, 5)
    training.monitor.close()
    history = holter.open_run(tmp_path / "run").history
    assert history.scalar("dropped")[1][-1] == 5000
    assert history.steps[-1] == 3004 and len(history) == 505


def test_the_queue_is_bounded_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event) -> None:
    """P16: memory is bounded for models with many layers too."""
    _stall(monkeypatch, gate)
    training = make("transformer+dropout")
    training.monitor = holter.watch(
        training.model, training.optimizer, run=tmp_path / "run", budget=None, histograms=1, weights=1
    )
    background = training.monitor._writer._background
    background._most_bytes = 4 << 20
    _train(training, 100)
    assert background._bytes <= 4 << 20 and training.monitor.dropped > 0


def test_a_blocking_queue_would_be_caught(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event, tmp_path: Path
) -> None:
    """P16, planted fault: a post that waits for room stops the training, and the steps do not get done."""
    _stall(monkeypatch, gate)
    honest = Background.post

    def patient(self: Background[Any], item: Any, size: int = 0) -> bool:
        while len(self) >= 20 and not gate.wait(0.01):
            pass
        return honest(self, item, size)

    monkeypatch.setattr(Background, "post", patient)
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run")
    trainer = threading.Thread(target=_train, args=(training, 3000), daemon=True)
    trainer.start()
    trainer.join(2)
    assert trainer.is_alive() and training.monitor.step < 3000
    gate.set()
    trainer.join(60)


class BlackHole:
    """A sink that never comes back."""

    def __init__(self, gate: threading.Event) -> None:
        self.gate, self.entered = gate, threading.Event()

    def write(self, record: Record) -> None:
        self.entered.set()
        self.gate.wait(60)

    def alert(self, finding: Finding) -> None:
        self.gate.wait(60)

    def close(self) -> None:
        self.gate.wait(60)


@pytest.mark.hurried
def test_a_sink_that_hangs_holds_up_neither_training_nor_journal_nor_close(
    tmp_path: Path, gate: threading.Event
) -> None:
    """P15, P16: close() comes back while the sink still hangs, and everything is in the journal."""
    hole = BlackHole(gate)
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run", sinks=[hole])
    _train(training, 50)
    training.monitor.close()
    assert hole.entered.is_set() and not gate.is_set()
    stored = holter.open_run(tmp_path / "run")
    assert len(stored.history) == 50 and stored.state == "finished"


def test_a_sink_that_is_too_slow_is_reported(tmp_path: Path, gate: threading.Event) -> None:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run", sinks=[BlackHole(gate)])
    training.monitor._writer._sinks[0]._queue._most_items = 10
    _train(training, 30)
    training.monitor.flush()
    assert any("BlackHole" in finding.advice and "too slow" in finding.advice for finding in training.monitor.findings)
    assert training.monitor.dropped == 0, "the journal lost nothing"


def test_a_healthy_sink_gets_every_record(tmp_path: Path) -> None:
    memory = Memory()
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run", sinks=[memory])
    _train(training, 20)
    training.monitor.close()
    assert [record.step for record in memory.records if not record.late] == list(range(20))
    assert memory.closed
