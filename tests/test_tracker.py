"""MetricsTracker: nothing logged is lost, nothing that fails reaches the training."""

import doctest
import gc
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import holter.tracker
from holter.gradients import log_gradient_distribution
from holter.record import Record
from holter.sinks import Background, Fanout, Memory, Sink
from holter.statistics.measure import measure_rows
from holter.tracker import MetricsTracker
from tests.wandb_file import offline, read


def test_the_examples_in_the_docstrings_run() -> None:
    outcome = doctest.testmod(holter.tracker)
    assert outcome.attempted >= 4 and outcome.failed == 0


def test_steps_are_kept_as_given() -> None:
    """P17: repeated, out of order and negative steps, NaN and infinity, all in the order they came."""
    tracker = MetricsTracker()
    logged = [(3, 1.0), (1, math.nan), (3, 2.0), (-1, math.inf), (3, 2.0)]
    for step, value in logged:
        tracker.log_scalar("loss", value, step=step)
        tracker.log_scalar("other", step, step=step)
    steps, values = tracker.scalar("loss")
    assert steps.tolist() == [step for step, _ in logged]
    np.testing.assert_array_equal(values, [value for _, value in logged])
    assert tracker.scalar("never")[0].tolist() == []


def test_the_table_has_a_line_for_what_a_step_logged_on_end() -> None:
    """P17: and a new one where a name comes again."""
    tracker = MetricsTracker()
    tracker.log_scalar("a", 1, step=0)
    tracker.log_scalar("b", 2, step=0)
    tracker.log_epoch(1, a=3, b=4)
    tracker.log_scalar("a", 5, step=1)
    tracker.log_scalar("c/d", 6, step=0)
    frame = tracker.to_dataframe()
    assert list(frame.columns) == ["step", "a", "b", "c/d"]
    assert frame["step"].tolist() == [0, 1, 1, 0]
    nan = math.nan
    np.testing.assert_array_equal(frame[["a", "b", "c/d"]], [[1, 2, nan], [3, 4, nan], [5, nan, nan], [nan, nan, 6]])


def test_an_empty_table_and_a_scalar_called_step_are_tables_too() -> None:
    assert list(MetricsTracker().to_dataframe().columns) == ["step"]
    tracker = MetricsTracker()
    tracker.log_scalar("step", 7.0, step=2)
    assert tracker.to_dataframe().to_numpy().tolist() == [[2, 7.0]]


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'holter\[parquet\]'"):
        MetricsTracker().to_dataframe()


def test_numbers_of_every_kind_become_floats() -> None:
    """A1: tensors and numpy scalars too."""
    tracker = MetricsTracker()
    for value in (2, True, np.float32(2), torch.tensor(2.0, requires_grad=True), torch.tensor([[2]]), np.int8(2)):
        tracker.log_scalar("x", value, step=0)
    values = [scalars["x"] for _, scalars in tracker._rows]
    assert values == [2.0, 1.0, 2.0, 2.0, 2.0, 2.0]
    assert {type(value) for value in values} == {float}


@pytest.mark.parametrize("value", [None, "many", torch.ones(2), torch.ones((), device="meta"), [1.0], np.ones(3)])
def test_what_is_no_number_is_told_and_left_out_alone(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    """P1: the other metrics of the call are kept."""
    tracker = MetricsTracker()
    tracker.log_epoch(4, good=1.0, bad=value)
    assert "bad at step 4 is no number" in caplog.text
    assert tracker.scalar("good")[1].tolist() == [1.0]
    assert tracker.scalar("bad")[1].tolist() == []


def test_sinks_get_records() -> None:
    """A3: one a call, an epoch in one, and close() closes them once."""
    sinks = Memory(), Memory()
    with MetricsTracker(sinks=sinks) as tracker:
        tracker.log_scalar("loss", 0.5, step=3)
        tracker.log_epoch(4, a=1, b=2)
        assert not sinks[0].closed
    for sink in sinks:
        assert all(isinstance(record, Record) and record.time > 1e9 for record in sink.records)
        assert [(record.step, dict(record.scalars)) for record in sink.records] == [
            (3, {"loss": 0.5}),
            (4, {"a": 1.0, "b": 2.0}),
        ]
        assert sink.closed


def test_what_a_sink_got_does_not_change_afterwards() -> None:
    sink = Memory()
    with MetricsTracker(sinks=[sink]) as tracker:
        tracker.log_scalar("a", 1, step=0)
        tracker.log_scalar("b", 2, step=0)
    assert [dict(record.scalars) for record in sink.records] == [{"a": 1.0}, {"b": 2.0}]


class Failing(Memory):
    def __init__(self, error: BaseException, *, on: str) -> None:
        super().__init__()
        self.error, self.on = error, on

    def write(self, record: Record) -> None:
        super().write(record)
        if self.on == "write":
            raise self.error

    def close(self) -> None:
        super().close()
        if self.on == "close":
            raise self.error


ERRORS = OSError(28, "No space left"), RuntimeError("https://secret"), MemoryError(), SystemExit(3)


@pytest.mark.parametrize("error", ERRORS)
def test_a_failing_sink_is_cut_off_and_reported_once(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """P1, P24: training and the other sinks go on, sys.exit() or not; the message of the error is not repeated."""
    failing, healthy = Failing(error, on="write"), Memory()
    tracker = MetricsTracker(sinks=[failing, healthy])
    for step in range(5):
        tracker.log_scalar("loss", 1.0, step=step)
    tracker.close()
    (told,) = caplog.messages
    assert told == f"training goes on, but Holter could not write to Failing: {type(error).__name__}"
    assert len(failing.records) == 1 and failing.closed
    assert len(healthy.records) == 5
    assert tracker.scalar("loss")[0].tolist() == [0, 1, 2, 3, 4]


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open(caplog: pytest.LogCaptureFixture) -> None:
    """P1."""
    healthy = Memory()
    MetricsTracker(sinks=[Failing(OSError(), on="close"), healthy]).close()
    assert "could not write to Failing: OSError" in caplog.text
    assert healthy.closed


class Waiting(Memory):
    """One that writes when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_go, self.is_closed = threading.Event(), threading.Event(), threading.Event()

    def write(self, record: Record) -> None:
        self.is_asked.set()
        self.may_go.wait(30)
        super().write(record)

    def close(self) -> None:
        super().close()
        self.is_closed.set()


def test_a_slow_sink_holds_nobody_up() -> None:
    """C15, P16: what is logged waits for it; the other sinks and the training do not."""
    slow, quick = Waiting(), Memory()
    with MetricsTracker(sinks=[slow, quick]) as tracker:
        for step in range(3):
            tracker.log_scalar("loss", 1.0, step=step)
        assert tracker._sinks[1].flush(10) and len(quick.records) == 3
        assert slow.is_asked.wait(10) and slow.records == []
        slow.may_go.set()
    assert [record.step for record in slow.records] == [0, 1, 2] and slow.closed


def test_close_waits_for_a_hanging_sink_as_long_as_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """P1, P16, P28: the others are whole, and the one that is not is named; a second call has nothing to wait for."""
    hanging, healthy = Waiting(), Memory()
    tracker = MetricsTracker(sinks=[hanging, healthy])
    tracker.log_scalar("loss", 1.0, step=0)
    assert hanging.is_asked.wait(10)
    tracker.close(0.5)
    assert hanging.records == [] and healthy.closed
    assert caplog.messages == [
        "training goes on, but Holter could not write to Waiting: it was not done after 0.5 s",
    ]
    tracker.close()
    tracker.log_scalar("loss", 1.0, step=1)  # kept, and no sink's any more
    assert tracker.scalar("loss")[0].tolist() == [0, 1] and len(caplog.messages) == 1
    hanging.may_go.set()
    assert hanging.is_closed.wait(10)


def test_an_interrupt_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: KeyboardInterrupt is the user's, also while close() waits; the sinks are closed without it."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    sinks = Waiting(), Waiting()
    tracker = MetricsTracker(sinks=sinks)
    tracker.log_scalar("loss", 1.0, step=0)
    monkeypatch.setattr(Background, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tracker.close()
    for sink in sinks:
        sink.may_go.set()
        assert sink.is_closed.wait(10) and len(sink.records) == 1


def test_the_sinks_of_a_tracker_that_is_gone_are_closed() -> None:
    """P4: their threads end, and what waited is written first."""
    sink = Waiting()
    MetricsTracker(sinks=[sink]).log_scalar("loss", 1.0, step=0)
    gc.collect()
    sink.may_go.set()
    assert sink.is_closed.wait(10) and len(sink.records) == 1


UNCLOSED = """
import time
from holter.sinks import Memory
from holter.tracker import MetricsTracker

class Slow(Memory):
    def write(self, record):
        time.sleep(0.01)
        super().write(record)

    def close(self):
        print(*(record.step for record in self.records))

tracker = MetricsTracker(sinks=[Slow()])
for step in range(10):
    tracker.log_scalar("loss", 1.0, step=step)
"""


def test_what_was_logged_is_written_also_where_nobody_closes() -> None:
    """P17: the end of the process waits for it."""
    ended = subprocess.run([sys.executable, "-c", UNCLOSED], capture_output=True, text=True, timeout=110, check=True)
    assert ended.stdout.split() == [str(step) for step in range(10)] and ended.stderr == ""


def test_one_that_raised_leaves_a_fanout_and_is_closed() -> None:
    """P1: sys.exit(), too, for a fanout may be on the training's own thread; an interrupt there is the user's."""
    reported: list[tuple[Sink, str]] = []
    members = [Failing(error, on="write") for error in ERRORS]
    healthy = Memory()
    fanout = Fanout([*members, healthy], lambda sink, error: reported.append((sink, type(error).__name__)))
    for step in range(3):
        fanout.write(Record(step, 1e9))
    assert all(member.closed and len(member.records) == 1 for member in members)
    assert len(healthy.records) == 3 and not healthy.closed
    fanout.close()
    assert healthy.closed and fanout.sinks == []
    assert reported == list(zip(members, ["OSError", "RuntimeError", "MemoryError", "Complaint"], strict=True))
    with pytest.raises(KeyboardInterrupt):
        Fanout([Failing(KeyboardInterrupt(), on="write")], lambda *_: None).write(Record(0, 1e9))


# W&B, the real one, offline


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    directory = tmp_path_factory.mktemp("wandb")
    with offline(directory) as wandb:
        yield SimpleNamespace(wandb=wandb, read=lambda run_id: read(directory, run_id))


def test_wandb_gets_scalars_at_their_own_steps(place: SimpleNamespace) -> None:
    """A3, P17: by a step metric, for W&B drops what comes with a lower `step=` than the last."""
    with MetricsTracker(use_wandb=True) as tracker:
        assert place.wandb.run is None  # nothing before something is logged
        for step in (5, 2):
            tracker.log_scalar("loss", step / 2, step=step)
            tracker.log_scalar("other", step, step=step)
        tracker.log_epoch(1, loss=1.0)
        assert tracker._sinks[0].flush(30)
        run = place.wandb.run
        tracker.log_histogram("h", measure_rows([torch.tensor([math.nan])], histograms=True), step=7)
        tracker.log_histogram("h", measure_rows([], histograms=True), step=7)
    assert place.wandb.run is None
    stored = place.read(run.id)
    assert [row for _, row in stored.rows] == [
        {"loss": 2.5, "other": 5, "holter/step": 5},
        {"loss": 1.0, "other": 2, "holter/step": 2},
        {"loss": 1.0, "holter/step": 1},
    ]
    assert {stored.metrics[name].step_metric for name in ("loss", "other")} == {"holter/step"}


def test_wandb_gets_the_histogram_of_all_gradients_in_the_users_run(place: SimpleNamespace) -> None:
    """A3: a wandb.Histogram with every value in it, joined to as few bins as W&B takes; the run is left open."""
    model = torch.nn.Linear(300, 100, bias=False)
    torch.manual_seed(0)
    exponents = torch.randint(-30, 3, (100, 300)).double()
    model.weight.grad = (torch.randn(100, 300).double() * 10**exponents).float()
    model.weight.grad[0, :50] = 0
    run = place.wandb.init()
    with MetricsTracker(use_wandb=True) as tracker:
        log_gradient_distribution(model, tracker, step=9, log_histogram=True)
    run.log({"mine": 1})
    run.finish()
    ((number, row),) = place.read(run.id).rows
    assert row.keys() == {"gradients/weight/norm", "gradients/histogram", "mine"} and number == 9
    counts, edges = (np.array(row["gradients/histogram"][part]) for part in ("values", "bins"))
    assert measure_rows([model.weight.grad], histograms=True).histograms[0].edges()[0].size > 512
    assert 128 < len(counts) <= 512 and counts.sum() == 30_000
    expected, _ = np.histogram(model.weight.grad.numpy().astype(float), edges)
    assert np.abs(counts - expected).sum() <= 100  # -0.0 and 0.0 share an edge, and may fall to either side


@pytest.mark.parametrize("late", [0, 3])
def test_the_users_rows_keep_their_steps_beside_the_trackers(place: SimpleNamespace, late: int) -> None:
    """A3, P17: as if the user had logged it all; also where the user's run is farther than the tracker."""
    run = place.wandb.init()
    with MetricsTracker(use_wandb=True) as tracker:
        for step in range(20):
            if step >= late:
                tracker.log_scalar("loss", step - late, step=step - late)
                tracker.log_epoch(step - late, accuracy=1.0)
            run.log({"mine": step}, step=step)
    run.finish()
    rows = place.read(run.id).rows
    assert [(number, row["mine"]) for number, row in rows] == [(n, n) for n in range(20)]
    theirs = [row["loss"] for _, row in rows if "loss" in row]
    assert len(theirs) == len([row for _, row in rows if "accuracy" in row]) >= 20 - late - 1
    assert theirs == list(range(len(theirs))) and (late == 0) == all("holter/step" not in row for _, row in rows)


def test_a_user_who_logs_nothing_else_has_all_in_their_run(place: SimpleNamespace) -> None:
    """A1, A3: also where the run begins after the tracker was made."""
    tracker = MetricsTracker(use_wandb=True)
    run = place.wandb.init()
    for step in (0, 5, 10):
        tracker.log_scalar("gradients/head.weight/norm", step, step=step)
    tracker.close()
    assert place.wandb.run is run  # it is the user's to finish
    run.finish()
    assert place.read(run.id).rows == [(n, {"gradients/head.weight/norm": n}) for n in (0, 5, 10)]


def test_a_run_that_the_user_finished_first_is_told(place: SimpleNamespace, caplog: pytest.LogCaptureFixture) -> None:
    """A3, P28: and waited for by nobody."""
    run = place.wandb.init()
    tracker = MetricsTracker(use_wandb=True)
    tracker.log_scalar("loss", 1.0, step=0)
    run.finish()
    tracker.log_scalar("loss", 1.0, step=1)
    tracker.log_scalar("loss", 1.0, step=2)
    tracker.close()
    (told,) = [record.getMessage() for record in caplog.records if record.name == "holter"]
    assert "the W&B run was finished before" in told


def test_a_wandb_that_fails_is_cut_off(
    place: SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: no key, no network."""

    def init() -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(place.wandb, "init", init)
    tracker = MetricsTracker(use_wandb=True)
    tracker.log_scalar("loss", 1.0, step=0)
    tracker.log_scalar("loss", 1.0, step=1)
    tracker.close()
    assert caplog.messages == ["training goes on, but Holter could not write to WandB: RuntimeError"]
    assert tracker.scalar("loss")[0].tolist() == [0, 1]


def test_without_wandb_installed_it_is_skipped_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A3: no error and, with warnings as errors, no warning."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    tracker = MetricsTracker(use_wandb=True)
    tracker.log_scalar("loss", 1.0, step=0)
    model = torch.nn.Linear(1, 1)
    model(torch.ones(1, 1)).sum().backward()
    log_gradient_distribution(model, tracker, 0, log_histogram=True)
    assert tracker.scalar("gradients/weight/norm")[1].tolist() == [1.0]


def test_wandb_is_left_alone_unless_asked_for(place: SimpleNamespace) -> None:
    """A3."""
    run = place.wandb.init()
    MetricsTracker().log_scalar("loss", 1.0, step=0)
    run.finish()
    assert place.read(run.id).rows == []


def test_a_sink_may_be_named_and_one_that_there_is_not_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with MetricsTracker(sinks=["tensorboard"]) as tracker:
        tracker.log_scalar("loss", 1.0, step=0)
    assert list((tmp_path / "runs" / "tensorboard").glob("events*"))
    with pytest.raises(ValueError, match="there is no sink 'tensorbord'"):
        MetricsTracker(sinks=["tensorbord"])
