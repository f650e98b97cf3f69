"""What is logged right after a step comes in the record of that step, and is never lost between two records."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holter
from holter.background import Background
from holter.draft import Draft
from holter.record import Ending, Record
from holter.writer import Writer
from tests.models import mlp

PATIENCE = 20.0


class Loop:
    """A training whose writer can be held up."""

    def __init__(self, run: Path) -> None:
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.monitor = holter.watch(self.model, self.optimizer, run=run, budget=None)

    def hold_writer(self) -> threading.Event:
        """Until the event that is returned is set."""
        go_on, held = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            go_on.wait(PATIENCE)

        self.monitor._writer._background.post(hold)
        assert held.wait(PATIENCE)
        return go_on

    def step(self) -> None:
        self.model(torch.randn(4, 12)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def records(self) -> list[Record]:
        return list(self.monitor.history.records)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(tmp_path / "run")
    yield loop
    loop.monitor.close()


def test_a_value_that_comes_before_the_record_is_made_is_part_of_it(loop: Loop) -> None:
    go_on = loop.hold_writer()
    for step in range(3):
        loop.step()
        loop.monitor.log(loss=float(step))
    go_on.set()
    assert [(record.step, record.late, record.scalars["loss"]) for record in loop.records()] == [
        (0, False, 0.0),
        (1, False, 1.0),
        (2, False, 2.0),
    ]


def test_a_value_that_comes_later_has_a_record_of_its_own(loop: Loop) -> None:
    """As where somebody thinks for a while between a step and its log."""
    loop.step()
    assert loop.monitor.flush(PATIENCE)
    loop.monitor.log(loss=5.0)
    own, late = loop.records()
    assert "loss" not in own.scalars and not own.late
    assert late.late and late.step == 0 and dict(late.scalars) == {"loss": 5.0}


def test_one_log_is_joined_and_what_follows_stays_bounded(loop: Loop) -> None:
    """A disk that hangs must not let one draft grow for ever: the queue counts, and is bounded."""
    go_on = loop.hold_writer()
    loop.step()
    loop.monitor.log(loss=1.0)
    loop.monitor.log(val_loss=2.0)
    loop.monitor.log(loss=3.0)
    go_on.set()
    assert [(record.late, record.scalars.get("loss")) for record in loop.records()] == [
        (False, 1.0),
        (True, None),
        (True, 2.0),  # the mean of both, as ever
    ]
    assert loop.monitor.history.scalar("val_loss")[1].tolist() == [2.0]


def test_what_was_told_before_the_step_is_not_overwritten(loop: Loop) -> None:
    go_on = loop.hold_writer()
    loop.monitor.log(val_loss=9.0)  # of the model as it was given
    loop.step()
    loop.monitor.log(val_loss=1.0)
    go_on.set()
    assert [(record.late, record.scalars["val_loss"]) for record in loop.records()] == [(False, 9.0), (True, 1.0)]


def test_a_batch_that_is_logged_after_the_step_is_measured_as_ever(loop: Loop) -> None:
    """Rows are not joined: inputs and targets of one role may come apart."""
    go_on = loop.hold_writer()
    loop.step()
    loop.monitor.log(inputs=torch.ones(4, 12), loss=1.0)
    go_on.set()
    own, late = loop.records()
    assert "batch" not in own.rows and "batch" in late.rows and late.scalars["loss"] == 1.0


def test_a_step_and_what_was_logged_for_the_one_before_stay_apart() -> None:
    mine, other = Draft(step=3).seal(), Draft(step=2, late=True).seal()
    elsewhere = Draft(step=3, late=True, segment=1).seal()
    assert not mine.take_up(other) and not mine.take_up(elsewhere) and not mine.take_up(Draft(step=3).seal())
    assert mine.take_up(Draft(step=3, late=True).seal())


def test_a_value_on_its_way_from_a_device_does_not_hold_up_the_step() -> None:
    """A long evaluation may be queued before it, and the process killed meanwhile."""
    own, late = Draft(step=0).seal(), Draft(step=0, late=True)
    late.add("loss", 2.0)
    assert late.seal()._parcel is not None
    late._parcel._flags.append(flag := torch.zeros(1, dtype=torch.uint8).numpy())
    assert not own.take_up(late) and own.has_arrived()
    flag[0] = 1
    assert own.take_up(late) and own.record({}, _never).scalars == {"loss": 2.0}


def test_words_have_a_record_of_their_own() -> None:
    own, late = Draft(step=0).seal(), Draft(step=0, late=True, notes={"batch": "odd"}).seal()
    assert not own.take_up(late)


def test_a_finalizer_that_logs_on_the_writers_thread_hangs_nobody(tmp_path: Path) -> None:
    """P16: it may run wherever memory is freed, under the lock of the queue too."""
    writer = Writer(tmp_path, 0, {}, (), _never)
    through = threading.Event()

    def log_under_the_lock() -> None:
        with writer._background._changed:
            posted.wait(0.2)  # the training thread is in the midst of a post by now, or waits for the lock
            writer.post(Draft(step=1, late=True).seal())

    def train() -> None:
        posted.set()
        for step in range(50):
            writer.post(Draft(step=step).seal())
        through.set()

    posted = threading.Event()
    holder = threading.Thread(target=log_under_the_lock, daemon=True)
    join = writer._joining

    class Held:
        """Between the two locks, if anybody takes both, the other thread has its turn."""

        def __enter__(self) -> None:
            join.__enter__()
            if threading.current_thread() is not holder and not holder.is_alive() and not holder.ident:
                holder.start()
                threading.Event().wait(0.1)

        def __exit__(self, *error: object) -> None:
            join.__exit__(*error)

    writer._joining = Held()  # type: ignore[assignment]
    threading.Thread(target=train, daemon=True).start()
    assert through.wait(PATIENCE)
    writer.close(Ending(0.0, "finished"), PATIENCE)


def test_no_value_falls_between_two_records(tmp_path: Path) -> None:
    """Threads change at every chance, so that a record is made at every moment of a log."""
    writer = Writer(tmp_path, 0, {}, (), _never)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for step in range(1500):
            writer.post(Draft(step=step).seal())
            writer.flush(1e-4 * (step % 3))  # so that it begins with it just now
            late = Draft(step=step, late=True)
            late.add("loss", float(step))
            writer.post(late.seal())
            if step % 10 == 0:  # the thread catches up, and begins the next with an empty queue
                assert writer.flush(PATIENCE)
    finally:
        sys.setswitchinterval(before)
        writer.close(Ending(0.0, "finished"), PATIENCE)
    records = holter.Run(tmp_path).history.records
    told = [record for record in records if "loss" in record.scalars]
    assert [(record.step, record.scalars["loss"]) for record in told] == [(step, float(step)) for step in range(1500)]
    assert any(record.late for record in told) and any(not record.late for record in told)  # both ways were taken


def test_a_record_that_is_made_while_its_draft_is_still_being_posted_takes_nothing_more(tmp_path: Path) -> None:
    writer = Writer(tmp_path, 0, {}, (), _never)
    post = writer._background.post

    def post_and_rest(task: Any, size: int = 0) -> bool:
        is_queued = post(task, size)
        writer.flush(0.1)  # the thread may make the record now, if nothing keeps it
        return is_queued

    writer._background.post = post_and_rest  # type: ignore[method-assign]
    writer.post(Draft(step=0).seal())
    late = Draft(step=0, late=True)
    late.add("loss", 4.0)
    writer.post(late.seal())
    writer.close(Ending(0.0, "finished"), PATIENCE)
    assert holter.Run(tmp_path).history.scalar("loss")[1].tolist() == [4.0]


def test_what_comes_right_after_the_item_that_wakes_the_thread_is_there_when_it_begins() -> None:
    begun: list[int] = []
    background: Background[int] = Background(
        begun.append, _never, name="holter-test", awake_seconds=0.0, gather_seconds=3600.0
    )
    while not background._asleep:
        threading.Event().wait(0.001)
    background.post(1)
    while background._asleep:
        threading.Event().wait(0.001)
    threading.Event().wait(0.05)  # it is awake, and could begin
    background.post(2)
    assert begun == []
    assert background.flush(PATIENCE) and begun == [1, 2]  # a flush is worth an end of the pause
    background.post(3)
    assert background.close(PATIENCE) == 0 and begun == [1, 2, 3]


def _never(*error: object) -> None:
    raise AssertionError(error)
