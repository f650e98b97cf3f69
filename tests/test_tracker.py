"""MetricsTracker: nothing logged is lost, nothing that fails reaches the training."""

import doctest
import math
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import holter.tracker
from holter.gradients import log_gradient_distribution
from holter.record import Record
from holter.sinks import Memory
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
    tracker = MetricsTracker(sinks=[sink])
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
        if self.on == "close":
            raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RuntimeError("https://secret"), MemoryError()])
def test_a_failing_sink_is_cut_off_and_reported_once(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """P1, P24: training and the other sinks go on; the message of the error is not repeated."""
    failing, healthy = Failing(error, on="write"), Memory()
    tracker = MetricsTracker(sinks=[failing, healthy])
    for step in range(5):
        tracker.log_scalar("loss", 1.0, step=step)
    tracker.close()
    (told,) = caplog.messages
    assert f"Failing failed with {type(error).__name__}" in told
    assert "secret" not in told
    assert len(failing.records) == 1 and len(healthy.records) == 5
    assert tracker.scalar("loss")[0].tolist() == [0, 1, 2, 3, 4]


def test_a_sink_that_fails_to_close_does_not_keep_the_others_open(caplog: pytest.LogCaptureFixture) -> None:
    """P1."""
    healthy = Memory()
    MetricsTracker(sinks=[Failing(OSError(), on="close"), healthy]).close()
    assert "failed with OSError" in caplog.text
    assert healthy.closed


def test_an_interrupt_passes() -> None:
    """P1: KeyboardInterrupt is the user's."""
    with pytest.raises(KeyboardInterrupt):
        MetricsTracker(sinks=[Failing(KeyboardInterrupt(), on="write")]).log_scalar("loss", 1.0, step=0)


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
    ((_, row),) = place.read(run.id).rows
    assert row.keys() == {"gradients/weight/norm", "gradients/histogram", "holter/step", "mine"}
    counts, edges = (np.array(row["gradients/histogram"][part]) for part in ("values", "bins"))
    assert row["holter/step"] == 9
    assert measure_rows([model.weight.grad], histograms=True).histograms[0].edges()[0].size > 512
    assert 128 < len(counts) <= 512 and counts.sum() == 30_000
    expected, _ = np.histogram(model.weight.grad.numpy().astype(float), edges)
    assert np.abs(counts - expected).sum() <= 100  # -0.0 and 0.0 share an edge, and may fall to either side


def test_a_wandb_that_fails_is_cut_off(
    place: SimpleNamespace, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: no key, no network."""

    def init() -> None:
        raise RuntimeError("api_key not configured")

    monkeypatch.setattr(place.wandb, "init", init)
    tracker = MetricsTracker(use_wandb=True)
    tracker.log_scalar("loss", 1.0, step=0)
    assert "WandB failed with RuntimeError" in caplog.text
    tracker.log_scalar("loss", 1.0, step=1)
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
