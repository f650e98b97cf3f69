"""The W&B sink at the end of the run it writes to, whoever ends that first."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from holter.diagnosis.finding import Finding
from holter.problems import Complaint
from holter.record import Record
from holter.sinks import Background, Sink
from holter.sinks.wandb import LEFT_OUT, STEP, WandB
from tests.wandb_file import offline, read

FINDING = Finding("lr-jump", "lr", 0, 0)
CALLS: dict[str, Callable[[WandB], None]] = {
    "write": lambda sink: sink.write(record(9)),
    "alert": lambda sink: sink.alert(FINDING),
    "close": WandB.close,
}


def record(step: int) -> Record:
    return Record(step, 1e9, {"loss": 1.0})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    directory = tmp_path_factory.mktemp("wandb")
    with offline(directory) as wandb:
        yield SimpleNamespace(wandb=wandb, read=lambda run_id: read(directory, run_id))


@pytest.fixture
def run(place: SimpleNamespace) -> Iterator[Any]:
    """The user's."""
    run = place.wandb.init()
    yield run
    run.finish()


@pytest.mark.parametrize("call", CALLS)
def test_a_run_that_the_user_has_finished_is_told(run: Any, call: str) -> None:
    """P16, P28: at once, and in words: W&B would never answer one that asks for its step."""
    sink = WandB(run)
    for step in range(3):  # the first takes the row that is open, and the others wait
        sink.write(record(step))
    run.finish()
    with pytest.raises(Complaint, match="finished before the monitor: it gets no more rows"):
        CALLS[call](sink)


@pytest.mark.parametrize("call", ["write", "alert"])
def test_a_run_that_was_finished_before_the_first_record_is_told(run: Any, call: str) -> None:
    """P28."""
    sink = WandB(run)
    run.finish()
    with pytest.raises(Complaint, match="finished before the monitor"):
        CALLS[call](sink)
    sink.close()


def test_a_sink_of_which_no_row_waits_ends_after_the_users_run(place: SimpleNamespace, run: Any) -> None:
    """What it placed went along with the run's end: nothing is lost, and nothing told."""
    sink = WandB(run)
    sink.write(record(0))
    sink.close()
    run.finish()
    sink.close()
    assert place.read(run.id).rows == [(0, {"holter/loss": 1.0, STEP: 0})]


def test_rows_that_were_told_are_not_owed_again(run: Any) -> None:
    """Closed before the user's run ends, and once more afterwards."""
    sink = WandB(run)
    for step in range(40):
        sink.write(record(step))
    sink.close()
    run.finish()
    sink.close()


def test_in_the_background_one_report_says_so_and_nothing_hangs(run: Any) -> None:
    """P1, P16, P28: also where several calls find the run finished."""
    reported: list[str] = []

    def failed(_: Sink, error: Exception) -> None:
        reported.append(str(error))

    sink = Background(WandB(run), failed)
    for step in range(3):
        sink.write(record(step))
    assert sink.flush(30)
    run.finish()
    for call in (lambda: sink.write(record(3)), lambda: sink.alert(FINDING)):
        call()
        assert sink.flush(10), "it waits for W&B"
    sink.close(10)
    assert reported == ["the W&B run was finished before the monitor: it gets no more rows"]


def test_a_run_of_its_own_that_the_user_finishes_is_told_too(place: SimpleNamespace) -> None:
    """P28: `wandb.finish()` ends whatever goes on."""
    sink = WandB(id="own")
    sink.write(record(0))
    place.wandb.finish()
    with pytest.raises(Complaint, match="finished before the monitor"):
        sink.write(record(1))
    sink.close()
    assert place.read("own").rows == [(0, {"loss": 1.0, STEP: 0})]


def test_a_run_of_its_own_is_finished_also_where_its_last_rows_fail(
    place: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: else W&B would return it to whoever asks for a new one."""

    def full() -> None:
        raise OSError(28, "No space left")

    sink = WandB(id="full")
    sink.write(record(0))
    monkeypatch.setattr(sink._rows, "close", full)
    with pytest.raises(OSError):
        sink.close()
    assert place.wandb.run is None and place.read("full").is_finished


@pytest.mark.parametrize(("users", "is_told"), [(0, True), (8, False)])
def test_most_rows_left_out_is_told_at_the_end_at_the_latest(
    place: SimpleNamespace, run: Any, caplog: pytest.LogCaptureFixture, users: int, is_told: bool
) -> None:
    """P17: where no row of the user's came, few as ours are; not where the last of many found none."""
    sink = WandB()
    with caplog.at_level(logging.WARNING, "holter"):
        for step in range(10):
            sink.write(record(step))
            if step < users:
                run.log({"user": step})
        sink.close()
    assert [message for message in caplog.messages if "own_rows=True" in message] == caplog.messages
    assert len(caplog.messages) == is_told
    run.finish()
    stored = place.read(run.id)
    assert sum(STEP in row for _, row in stored.rows) + stored.summary[LEFT_OUT] == 10
