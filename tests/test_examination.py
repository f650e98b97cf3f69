"""The live diagnosis: it finds what the stored run shows, within its share of the time, and in nobody's way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from click.testing import CliRunner

import holter
from holter import examination
from holter.background import Background
from holter.cli import main
from holter.diagnosis.causes import RULES
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding
from holter.diagnosis.suspicion import Kind, Suspicion
from holter.examination import ADVANCE_SECONDS, Examination, pause_for
from holter.record import Record
from holter.settings import Settings
from holter.sinks import Memory
from holter.stopping import Patience, StopOn, TrainingStopped, is_severe
from tests.models import differences, make
from tests.sick_trainings import Net, batches

PATIENCE = 30.0  # seconds that a test waits for what is bound to come
JUMP = 60


class Sick:
    """A training whose rate jumps, watched step by step."""

    def __init__(self, run: Path | bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.data = Net(), batches()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)
        self.monitor = holter.watch(self.model, self.optimizer, run=run, **{"budget": None, **options})

    def train(self, steps: int, log: Callable[..., None] | None = None) -> None:
        for _ in range(steps):
            if self.monitor.step == JUMP:
                self.optimizer.param_groups[0]["lr"] = 1.0
            x, y = next(self.data)
            loss = torch.nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.monitor.clip_grad_norm_(1e6)
            self.optimizer.step()
            self.optimizer.zero_grad()
            (log or self.monitor.log)(loss=loss, inputs=x, targets=y)

    def until_known(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while not self.monitor.findings and time.monotonic() < deadline:
            pass


def _incidents(findings: tuple[Finding, ...]) -> list[Finding]:
    return [finding for finding in findings if finding.where != "monitor"]


# What it finds ------------------------------------------------------------------------------------------------------


def test_a_jump_of_the_rate_is_found_while_it_trains_and_the_stored_run_says_the_same(tmp_path: Path) -> None:
    memory = Memory()
    sick = Sick(tmp_path / "run", sinks=[memory])
    sick.train(JUMP)
    assert sick.monitor.findings == () and not sick.monitor.should_stop
    sick.train(20)
    sick.until_known()
    (live,) = sick.monitor.findings
    assert (live.cause, live.since) == ("lr-jump", JUMP) and live.step < sick.monitor.step
    assert sick.monitor.should_stop and "1 findings" in repr(sick.monitor)
    sick.monitor.close()
    stored = holter.open_run(tmp_path / "run").findings
    assert list(map(repr, stored)) == list(map(repr, sick.monitor.findings))
    assert [finding.cause for finding in memory.findings] == ["lr-jump"], "told once"


def test_nothing_of_it_happens_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the twin of the test above: without a doctor nothing is found."""
    monkeypatch.setattr(examination, "Doctor", None)
    before = {thread.ident for thread in threading.enumerate()}
    sick = Sick(False, diagnose=False)
    sick.train(JUMP + 20)
    started = [thread.name for thread in threading.enumerate() if thread.ident not in before]
    assert started == ["holter-writer"]
    assert sick.monitor.findings == () and not sick.monitor.should_stop
    sick.monitor.close()


def test_the_training_is_the_same_to_the_bit() -> None:
    with_it, without = Sick(False), Sick(False, diagnose=False)
    for sick in (with_it, without):
        sick.train(JUMP + 10)
        sick.monitor.close()
    assert _incidents(with_it.monitor.findings)
    assert all(map(torch.equal, with_it.model.parameters(), without.model.parameters()))


def test_after_the_end_everything_has_been_examined(tmp_path: Path) -> None:
    """A run so short that the thread has hardly looked."""
    sick = Sick(tmp_path / "run")
    sick.train(JUMP + 6)
    sick.monitor.close()
    assert [finding.cause for finding in sick.monitor.findings] == ["lr-jump"]


class Scripted:
    """A doctor that says what a test has put down for each step."""

    script: ClassVar[dict[int, tuple[Finding, ...]]] = {}
    made: ClassVar[list[Scripted]] = []

    def __init__(self, info: Any) -> None:
        self.chart, self.findings, self.seen = SimpleNamespace(resumed=[]), (), []
        Scripted.made.append(self)

    def take(self, record: Record) -> None:
        self.seen.append(record.step)
        self.findings = self.script.get(record.step, self.findings)

    def finish(self) -> None:
        pass


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Scripted]]:
    monkeypatch.setattr(examination, "Doctor", Scripted)
    monkeypatch.setattr(Scripted, "made", [])
    yield Scripted


def _examination(**more: Any) -> Examination:
    rest = {"info": {}, "share": 1.0, "patience": 100, "tell": lambda finding: None, "report": lambda *_: None}
    return Examination(**{**rest, **more})


def _record(step: int) -> Record:
    return Record(step, 0.0, {"loss": 1.0})


def test_a_finding_is_told_once_and_again_when_cause_or_severity_changed(
    scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = partial(Finding, where="lr", since=1, step=2)
    script = {
        2: first("a"),
        3: first("a", advice="more"),
        5: first("b"),
        6: first("a"),
        7: first("b", severity="critical"),
    }
    monkeypatch.setattr(scripted, "script", {step: (finding,) for step, finding in script.items()})
    told: list[Finding] = []
    examined = _examination(tell=told.append)
    for step in range(9):
        examined.post(_record(step))
    assert examined.catch_up(PATIENCE)
    assert [(finding.cause, finding.severity) for finding in told] == [
        ("a", "warning"),
        ("b", "warning"),
        ("b", "critical"),
    ]
    assert examined.findings == (script[7],)
    examined.close(PATIENCE)


def test_a_resumed_training_goes_on_and_one_that_begins_late_is_known_to(
    tmp_path: Path, scripted: type[Scripted]
) -> None:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run")
    for _ in range(4):
        training.step()
    training.monitor.load_state_dict({"step": 2})
    training.step()
    training.monitor.close()
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run")
    training.monitor.load_state_dict({"step": 3})
    training.step()
    training.monitor.close()
    first, gone_back, later = scripted.made  # what was found on the line that was left is no part of the new one
    assert list(dict.fromkeys(first.seen)) == [0, 1, 2, 3] and first.chart.resumed == []
    assert set(gone_back.seen) == {2} and gone_back.chart.resumed == [2]
    assert set(later.seen) == {3} and later.chart.resumed == [3]


# In nobody's way ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss", "gradient_norm"])
def test_what_is_not_finite_is_looked_at_without_delay(
    name: str, scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_PACE_SECONDS", 1000.0)
    examined = _examination()
    assert examined.catch_up(PATIENCE)  # the thread rests from now on
    examined.post(Record(0, 0.0, {name: 1.0}))
    examined.post(Record(1, 0.0, {name: float("nan")}))
    deadline = time.monotonic() + PATIENCE
    while examined.backlog and time.monotonic() < deadline:
        time.sleep(0.001)
    assert not examined.backlog and scripted.made[0].seen == [0, 1]
    examined.close(PATIENCE)


def _unwatched(steps: int) -> Any:
    training = make("mlp")
    for _ in range(steps):
        training.step()
    return training


def test_a_rule_that_raises_is_reported_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1."""

    def explosive(case: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(examination, "Doctor", partial(Doctor, rules=(explosive, *RULES)))
    sick = Sick(False)
    sick.train(JUMP + 10)
    sick.until_known()
    assert sick.monitor.state == "degraded"
    sick.monitor.close()
    assert sorted(finding.cause for finding in sick.monitor.findings) == ["lr-jump", "monitor-degraded"]
    assert any("explosive" in finding.advice for finding in sick.monitor.findings)


def _explode(*_: Any) -> None:
    raise RuntimeError("the token is hunter2")


@pytest.mark.parametrize("piece", ["take", "finish"])
def test_a_doctor_that_raises_is_reported_once_and_costs_no_record(
    piece: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, P24."""
    monkeypatch.setattr(Doctor, piece, _explode)
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run")
    for _ in range(12):
        training.step()
    training.monitor.close()
    assert differences(_unwatched(12), training) == []
    (told,) = training.monitor.findings
    assert "could not diagnose the training any further: RuntimeError" in told.advice and "hunter2" not in str(told)
    assert len(holter.open_run(tmp_path / "run").history) == 12


def test_a_next_doctor_that_cannot_be_made_is_reported(
    gate: threading.Event, scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "MOST_RECORDS", 100)
    reports: list[str] = []
    examined = _examination(report=lambda where, error: reports.append(where))
    monkeypatch.setattr(scripted, "__init__", _explode)
    _backlogs(examined)
    gate.set()
    assert examined.catch_up(PATIENCE) and reports == ["diagnose the training any further"]
    examined.close(PATIENCE)


def _slow(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Doctor, "take", lambda self, record: time.sleep(seconds))


@pytest.mark.hurried
def test_a_doctor_that_hangs_holds_up_neither_training_nor_writer_nor_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P15, P16: every take lasts longer than the whole training may be waited for."""
    _slow(4.0, monkeypatch)
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run")
    for _ in range(50):
        training.step()
    assert training.monitor.flush(PATIENCE)
    began = time.monotonic()
    training.monitor.close()
    assert time.monotonic() - began <= 2.0
    stored = holter.open_run(tmp_path / "run")
    assert len(stored.history) == 50 and stored.state == "finished" and training.monitor.dropped == 0
    (told,) = training.monitor.findings
    assert told.severity == "info" and "could not keep up" in told.advice and "holter diagnose" in told.advice


def test_a_diagnosis_in_the_writers_own_thread_would_be_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted twin of the test above: records are examined where they are written."""
    _slow(4.0, monkeypatch)
    monkeypatch.setattr(Examination, "post", lambda self, record: Doctor.take(self._doctor, record))
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run")
    for _ in range(3):
        training.step()
    assert not training.monitor.flush(1.0)


# What it may cost -----------------------------------------------------------------------------------------------------


def test_the_purse_pays_its_advance_and_then_its_share() -> None:
    spent = elapsed = 0.0
    while elapsed < 10_000:
        elapsed += pause_for(spent, elapsed, 0.002) + 0.05
        spent += 0.0007
        assert spent <= ADVANCE_SECONDS + 0.002 * elapsed + 0.0007
    assert spent == pytest.approx(ADVANCE_SECONDS + 0.002 * elapsed, rel=0.01), "and what it earned is used"
    assert pause_for(0.0, 1e9, 0.0) == float("inf")


def _stays_within(patience: float, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a doctor who thinks long about every record stays within the purse, for as long as we watch."""
    seconds = 0.01

    def spin(self: Doctor, record: Record) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(Doctor, "take", spin)
    began = time.monotonic()
    examined = _examination(share=0.002)
    for step in range(500):
        examined.post(_record(step))
    is_within = True
    while is_within and time.monotonic() < began + patience:
        time.sleep(0.02)
        allowed = ADVANCE_SECONDS + 0.002 * (time.monotonic() - began)
        is_within = examined.seconds <= allowed + 2 * seconds
    assert examined.backlog, "there was more to do"
    examined.stop()
    return is_within


def test_what_the_purse_cannot_pay_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _stays_within(1.5, monkeypatch)


def test_a_purse_that_is_not_asked_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "pause_for", lambda *_: 0.0)
    assert not _stays_within(60.0, monkeypatch)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, scripted: type[Scripted]) -> Iterator[threading.Event]:
    """The doctor waits for it in every take; opened at the end, so that no thread stays behind."""
    event, honest = threading.Event(), scripted.take

    def take(self: Scripted, record: Record) -> None:
        event.wait(PATIENCE)
        honest(self, record)

    monkeypatch.setattr(scripted, "take", take)
    yield event
    event.set()


def _backlogs(examined: Examination) -> list[int]:
    found = []
    for step in range(1000):
        examined.post(_record(step))
        found.append(examined.backlog)
    return found


def test_no_more_records_wait_than_may_and_a_new_doctor_begins_with_the_present(
    gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "MOST_RECORDS", 100)
    told: list[Finding] = []
    examined = _examination(tell=told.append)
    assert max(_backlogs(examined)) == 100
    gate.set()
    assert examined.catch_up(PATIENCE)
    first, second = Scripted.made
    assert first.seen == [0] and second.seen == list(range(second.seen[0], 1000)), "each sees a stretch without holes"
    assert second.chart.resumed == [second.seen[0]]
    (note,) = examined.findings
    assert note.severity == "info" and note.evidence == {"records_left_out": 1000 - 1 - len(second.seen)}
    assert told == [note] and not examined.should_stop
    examined.close(PATIENCE)


def test_the_bytes_that_wait_are_bounded_too(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "MOST_BYTES", 50 * 128)  # a record of one scalar counts 128 bytes
    assert max(_backlogs(_examination())) == 50


def test_a_backlog_without_bounds_is_seen(gate: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "Background", _unbounded)
    assert max(_backlogs(_examination())) == 1000


def _unbounded(*args: Any, **kwargs: Any) -> Background[Any]:
    return Background(*args, **{**kwargs, "most_items": 10**9, "most_bytes": 10**12})


def test_a_trouble_that_goes_on_is_not_told_again_by_the_next_doctor(
    gate: threading.Event, scripted: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "MOST_RECORDS", 100)
    trouble = (Finding("lr-too-high", "lr", 0, 1),)
    monkeypatch.setattr(scripted, "script", dict.fromkeys(range(1000), trouble))
    told: list[Finding] = []
    examined = _examination(tell=told.append)
    _backlogs(examined)
    gate.set()
    assert examined.catch_up(PATIENCE) and len(scripted.made) == 2
    assert [finding.cause for finding in told] == ["lr-too-high", "monitor-degraded"]
    assert [finding.cause for finding in examined.findings] == ["lr-too-high", "monitor-degraded"]
    examined.close(PATIENCE)


# Stopping -----------------------------------------------------------------------------------------------------------


def test_log_stops_the_training_where_it_was_asked_to_and_nothing_else_does(tmp_path: Path) -> None:
    raised: list[TrainingStopped] = []

    with pytest.raises(TrainingStopped) as stopped, holter_run(tmp_path, stop_on="critical") as sick:

        def log(**values: Any) -> None:
            sick.until_known() if sick.monitor.step > JUMP + 6 else None  # a slow machine may be late, not silent
            try:
                sick.monitor.log(**values)
            except TrainingStopped as error:
                raised.append(error)
                raise

        sick.train(JUMP + 20, log)
    assert raised == [stopped.value], "it came from log"
    assert stopped.value.finding.cause == "lr-jump" and "The rate rose" in str(stopped.value)
    run = holter.open_run(tmp_path / "run")
    assert (run.state, run.ending and run.ending.error) == ("stopped", f"lr-jump in lr since step {JUMP}")
    shown = CliRunner().invoke(main, ["show", str(tmp_path / "run")]).stdout
    assert f"stopped by lr-jump in lr since step {JUMP}" in shown


class holter_run:
    """`with` a sick training's monitor, giving the training."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.sick = Sick(path / "run", **options)

    def __enter__(self) -> Sick:
        self.sick.monitor.__enter__()
        return self.sick

    def __exit__(self, *error: Any) -> None:
        self.sick.monitor.__exit__(*error)


def test_without_stop_on_nothing_is_raised_and_should_stop_says_it(tmp_path: Path) -> None:
    with holter_run(tmp_path) as sick:
        sick.train(JUMP + 10)
        sick.until_known()
        sick.monitor.log(loss=1.0)
        assert sick.monitor.should_stop
    assert holter.open_run(tmp_path / "run").state == "finished"


def test_one_who_catches_it_has_decided() -> None:
    stop, grave = StopOn("warning"), Finding("a", "lr", 1, 2, severity="critical")
    with pytest.raises(TrainingStopped):
        stop.check([grave])
    stop.check([grave])
    with pytest.raises(TrainingStopped) as again:
        stop.check([grave, Finding("b", "layer", 5, 6)])
    assert again.value.finding.cause == "b"


@pytest.mark.parametrize("finding", [Finding("a", "lr", 1, 2), Finding("a", "monitor", 1, 2, severity="critical")])
def test_what_is_less_severe_or_holters_own_stops_nobody(finding: Finding) -> None:
    StopOn("critical").check([finding])
    StopOn(None).check([Finding("a", "lr", 1, 2, severity="critical")])
    with pytest.raises(TrainingStopped):  # the twin
        StopOn("critical").check([finding, Finding("b", "lr", 1, 2, severity="critical")])


def test_a_closed_monitor_stops_nobody(tmp_path: Path) -> None:
    with holter_run(tmp_path, stop_on="critical") as sick:
        sick.train(JUMP + 2)
    assert sick.monitor.findings
    sick.monitor.log(loss=1.0)


def test_a_validation_loss_that_no_longer_falls_says_stop() -> None:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False, patience=6)
    said = []
    for loss in (3.0, 2.0, 1.0, 1.1, 1.0, 1.2):
        training.step()
        training.step()
        training.monitor.log(val_loss=loss)
        assert training.monitor.flush(PATIENCE)
        said.append(training.monitor.should_stop)
    training.monitor.close()
    assert said == [False] * 5 + [True]


def test_patience_measures_by_the_line_that_survived() -> None:
    patience = Patience(10)
    for step, loss in ((0, float("nan")), (5, 2.0), (12, 1.0), (21, 1.5)):
        patience.see(Record(step, 0.0, {"loss": 0.0, "val/loss": loss}))
    assert not patience.is_over
    patience.see(Record(8, 0.0, {"val/loss": 1.8}))  # back at a checkpoint: the 1.0 of step 12 is undone
    patience.see(Record(16, 0.0, {"val/loss": 1.7}))
    patience.see(Record(25, 0.0, {"val/loss": float("nan")}))
    assert not patience.is_over
    patience.see(Record(26, 0.0, {"val/loss": 1.9}))
    assert patience.is_over


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"diagnose": 1}, "diagnose=1: give True or False"),
        ({"stop_on": "info"}, "stop_on='info': give 'warning' or 'critical', or None"),
        ({"stop_on": True}, "stop_on=True"),
        ({"stop_on": "critical", "diagnose": False}, "stop_on='critical' needs the live diagnosis"),
        ({"stop_on": "critical", "budget": 0}, "budget=0 leaves no time"),
        ({"patience": 0}, "patience=0: give a whole number of steps"),
        ({"patience": 5, "diagnose": False}, "patience=5 needs the live diagnosis"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, Any], told: str) -> None:
    training = make("mlp")
    with pytest.raises(ValueError, match=told):
        holter.watch(training.model, training.optimizer, **{"run": False, **more})


# What is over -----------------------------------------------------------------------------------------------------


class Passing:
    """A rule that sees trouble at some steps, and the doctor that asks it alone."""

    def __init__(self, *stretches: range) -> None:
        self._stretches = stretches

    def __call__(self, case: Any) -> Iterator[Suspicion]:
        for stretch in self._stretches:
            if case.step in stretch:
                yield Suspicion("fp16-overflow", "precision", stretch.start, 0.9, Kind.FACT, severity="critical")


def _examined(monkeypatch: pytest.MonkeyPatch, rule: Passing, steps: list[int]) -> tuple[Examination, list[Finding]]:
    monkeypatch.setattr(examination, "Doctor", partial(Doctor, rules=(rule,)))
    heard: list[Finding] = []
    found = Examination({}, 1.0, None, heard.append, lambda *_: None)
    for step in steps:
        found.post(Record(step, float(step), {"loss": 1.0}))
    assert found.catch_up(PATIENCE)
    return found, heard


def test_that_trouble_is_not_seen_any_more_is_told_once_and_stops_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who asks once an epoch must not miss what happened in it."""
    found, heard = _examined(monkeypatch, Passing(range(20, 40)), list(range(200)))
    assert [(one.since, one.until is not None) for one in heard] == [(20, False), (20, True)]
    assert heard[1].until in range(35, 40) and found.should_stop
    found.close(PATIENCE)


def test_what_began_after_the_checkpoint_goes_with_that_line(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = _examined(monkeypatch, Passing(range(60, 80)), [*range(80), *range(50, 55)])
    assert found.findings == () and not found.should_stop
    found.close(PATIENCE)


def test_what_began_before_the_checkpoint_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    found, heard = _examined(monkeypatch, Passing(range(30, 80)), [*range(80), *range(50, 58)])
    assert [one.since for one in found.findings] == [30] and len(heard) == 1 and found.should_stop
    found.close(PATIENCE)


def test_what_comes_back_after_a_hole_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first was over; this is another one, of the same cause."""
    rule = Passing(range(20, 40), range(300, 400))
    found, heard = _examined(monkeypatch, rule, list(range(200)))
    found._lost_its_place = True  # as where records had to be forgotten
    for step in range(290, 320):
        found.post(Record(step, float(step), {"loss": 1.0}))
    assert found.catch_up(PATIENCE)
    assert [one.since for one in found.findings] == [20, 300] and heard[-1].since == 300
    found.close(PATIENCE)


# How much it may take -----------------------------------------------------------------------------------------------


def test_who_wants_to_be_stopped_gives_the_diagnosis_all_of_the_budget() -> None:
    plain, stopped = (Settings(stop_on=stop_on) for stop_on in (None, "critical"))
    assert plain.diagnosis_share < 0.002 and stopped.diagnosis_share == stopped.budget == 0.01
    assert plain.measuring_share == pytest.approx(0.01 - plain.diagnosis_share)
    assert Settings(diagnose=False).measuring_share == 0.01 and Settings(budget=None).measuring_share is None


@pytest.mark.parametrize(("where", "stops"), [("lr", True), ("performance", False), ("monitor", False)])
def test_a_slow_machine_stops_nobody(where: str, stops: bool) -> None:
    assert is_severe(Finding("a-cause", where, 0, 1, "critical"), "warning") == stops
