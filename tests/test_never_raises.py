"""P1: nothing of Holter's raises into a training, whatever fails inside it."""

from __future__ import annotations

import errno
import inspect
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import holter
from holter import (
    background,
    batch,
    budget,
    capture,
    codec,
    collectives,
    collector,
    draft,
    examination,
    execution,
    gradient_reads,
    guarded,
    history,
    journal,
    loader_workers,
    logged,
    loss_scaler,
    machine,
    modules,
    monitor,
    record,
    repeats,
    run,
    sinks,
    spending,
    stages,
    training_steps,
    transfer,
    weight_role,
    writer,
)
from holter.diagnosis.finding import Finding
from holter.record import Record
from holter.statistics import blocks, content, cpu_rows, device_rows, histogram, measure, rows, torch_rows
from tests.models import Training, differences, make

STEPS = 8
ERRORS: dict[str, Callable[[], BaseException]] = {
    "disk full": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "input/output error": lambda: OSError(errno.EIO, "Input/output error"),
    "read-only": lambda: OSError(errno.EROFS, "Read-only file system"),
    "too many files": lambda: OSError(errno.EMFILE, "Too many open files"),
    "out of memory": lambda: MemoryError(),
    "a bug": lambda: RuntimeError("a bug"),
}
MODULES = (
    *(blocks, cpu_rows, device_rows, histogram, measure, rows, torch_rows),
    *(budget, capture, codec, collector, draft, gradient_reads, history, journal, record, run, transfer, writer),
    *(collectives, examination, execution, loader_workers, machine, modules),
    *(loss_scaler, spending, training_steps, weight_role),
    *(batch, content, logged, repeats),
)
# Not faulted: what runs once in watch(), before training, where errors are raised on purpose; and the hooks
# themselves, which are the guards under test. A fault is put into everything that they call.
SPARED = {"__init__", "attach", "__post_init__", "__len__", "__repr__", "__call__", "__reduce__"}
SPARED |= {
    "_before_any_clip",
    "skipped",
    "_before_step",
    "_after_step",
    "_before_any_step",
    "_after_any_step",
    "_listen",
}


def _functions(module: ModuleType) -> Iterator[tuple[Any, str]]:
    """Every function and plain method that a module defines, with its owner."""
    for name, member in vars(module).items():
        if getattr(member, "__module__", None) != module.__name__:
            continue
        if inspect.isfunction(member) and name not in SPARED:
            yield module, name
        elif inspect.isclass(member) and not issubclass(member, BaseException):
            yield from ((member, n) for n, f in vars(member).items() if inspect.isfunction(f) and n not in SPARED)


SITES = [(owner, name) for module in MODULES for owner, name in _functions(module)]
SITES += [(monitor.Monitor, "_tell"), (monitor.Monitor, "step_raised"), (sinks.Fanout, "_each")]
SITES += [(background.Background, name) for name in ("post", "flush", "close", "stop", "wait")]


class Injector:
    """Replaces a function by one that raises at some of its calls, one kind of error after the other."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int) -> None:
        self._patch, self._random = patch, random.Random(seed)
        self.armed = False
        self.injected = 0
        self.site: tuple[Any, str] | None = None

    def plant(self, owner: Any, name: str, kinds: tuple[str, ...], share: float = 0.75, armed: bool = False) -> None:
        honest = getattr(owner, name)
        self.site = owner, name
        self.armed = self.armed or armed

        def faulty(*args: Any, **kwargs: Any) -> Any:
            if self.armed and self._random.random() < share:
                self.injected += 1
                raise ERRORS[kinds[self.injected % len(kinds)]]()
            return honest(*args, **kwargs)

        self._patch.setattr(owner, name, faulty)


@pytest.fixture(scope="module")
def unwatched() -> Training:
    training = make("mlp")
    for _ in range(STEPS):
        training.step()
    return training


def _train_with(injector: Injector, path: Any) -> Training:
    training = make("mlp")
    training.monitor = holter.watch(
        training.model, training.optimizer, run=path, weights=1, histograms=1, budget=None, sinks=[sinks.Memory()]
    )
    injector.armed = True
    try:
        for _ in range(STEPS):
            training.step()
        _ = training.monitor.history, training.monitor.findings  # waits for all threads
        # A sign of life is nobody's record: a thread that failed to give it may be about to say so.
        deadline = time.monotonic() + 30  # of a busy machine
        while injector.injected and training.monitor.state != "degraded":  # not asked again afterwards: it may fail now
            assert time.monotonic() < deadline, injector.site
            time.sleep(0.001)
        training.monitor.close()
    finally:
        injector.armed = False
    training.monitor._writer.wait(2.0)  # where closing failed: what its threads still call is no fault of the next site
    return training


def _try_every_site(kinds: tuple[str, ...], unwatched: Training, path: Any, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many faults were injected; each site's training must be bit-equal and the fault must have been seen."""
    monkeypatch.setattr("holter.writer._FIRST_PAUSE", 0.001)
    monkeypatch.setattr("holter.writer._LONGEST_PAUSE", 0.002)
    total = 0
    for seed, (owner, name) in enumerate(SITES):
        with monkeypatch.context() as patch:
            injector = Injector(patch, seed)
            injector.plant(owner, name, kinds)
            training = _train_with(injector, path / str(seed))
        assert differences(unwatched, training) == [], f"{name} disturbed the training"
        if injector.injected:
            assert training.monitor.findings, f"a fault in {owner}.{name} went unseen"
            assert training.monitor.findings[0].cause == "monitor-degraded"
        total += injector.injected
    return total


@pytest.mark.hurried
@pytest.mark.timeout(400)  # hundreds of trainings, on a machine that may be busy
def test_no_fault_reaches_the_training(unwatched: Training, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: every function of Holter's, six kinds of error in turn, at least 2,000 faults."""
    assert _try_every_site(tuple(ERRORS), unwatched, tmp_path, monkeypatch) >= 2000


@pytest.mark.gauntlet
@pytest.mark.parametrize("kind", ERRORS)
def test_no_fault_of_one_kind_reaches_the_training(
    kind: str, unwatched: Training, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1: every function of Holter's times every kind of error."""
    assert _try_every_site((kind,), unwatched, tmp_path, monkeypatch) >= 2000


def test_the_check_fails_for_an_unguarded_hook(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """P1, planted fault: a guard that lets errors through."""
    injector = Injector(monkeypatch, 0)
    injector.plant(collector.Collector, "log", ("a bug",))
    monkeypatch.setattr(guarded, "attempt", lambda _, __, piece, *args, charged: piece(*args))
    with pytest.raises(RuntimeError, match="a bug"):
        _train_with(injector, tmp_path)


# What a step is made of: a failing function of Holter's, and what must then be the only thing missing.
PIECES = {
    "look_at_activations": {"activation"},
    "take_activations": {"activation"},
    "read_weights": {"weight"},
    "gradients.read": {"gradient"},
    "before_update": {"update"},
    "after_update": {"update"},
}


def _roles_with(piece: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The roles of a step in which one piece of Holter's own failed."""
    training = make("mlp")
    training.clip = False
    training.monitor = holter.watch(training.model, training.optimizer, run=False, budget=None, updates=1)
    if piece:
        owner = gradient_reads.GradientReads if "." in piece else collector.Collector
        Injector(monkeypatch, 0).plant(owner, piece.rpartition(".")[2], ("a bug",), share=1.0, armed=True)
    training.step()
    assert bool(training.monitor.findings) == bool(piece)
    return set(training.monitor.history.roles)


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_that_fails_takes_nothing_else_with_it(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _roles_with("", monkeypatch)
    assert whole >= {"activation", "weight", "gradient", "update"}
    assert _roles_with(piece, monkeypatch) == whole - PIECES[piece]


def test_pieces_under_one_guard_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a step that is read as one piece, so that what fails first takes the rest with it."""

    def in_one(self: monitor.Monitor, optimizer: torch.optim.Optimizer, has_closure: bool) -> None:
        with self._problems.contained("read a step"):
            self._collector.take_activations()
            self._collector.read_weights()
            self._collector.read_gradients("step", optimizer)

    monkeypatch.setattr(monitor.Monitor, "before_step", in_one)
    assert "gradient" in _roles_with("", monkeypatch)
    assert "gradient" not in _roles_with("take_activations", monkeypatch)


@pytest.mark.parametrize("piece", ["scalars", "notes", "close"])
def test_a_machine_that_cannot_be_looked_at_costs_no_record(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Injector(monkeypatch, 0).plant(machine.Machine, piece, ("a bug",), share=1.0, armed=True)
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False, budget=None)
    for _ in range(3):
        training.step()
    training.monitor.close()
    assert len(training.monitor.history) == 3 and len(training.monitor.findings) == 1


@pytest.mark.parametrize(
    "moment", ["measuring", "step_began", "step_ended", "forward_began", "forward_ended", "finish"]
)
def test_a_stage_that_cannot_be_timed_costs_no_measurement(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _roles_with("", monkeypatch)
    Injector(monkeypatch, 0).plant(stages.Stages, moment, ("a bug",), share=1.0, armed=True)
    training = make("mlp")
    training.clip = False
    training.monitor = holter.watch(training.model, training.optimizer, run=False, budget=None, updates=1)
    training.step()
    assert set(training.monitor.history.roles) == whole and len(training.monitor.history) == 1


def test_a_moment_that_a_framework_tells_is_contained_too(monkeypatch: pytest.MonkeyPatch) -> None:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False)
    Injector(monkeypatch, 0).plant(stages.Stages, "forward_ended", ("a bug",), share=1.0, armed=True)
    training.monitor.forward_ended()
    assert training.monitor.state == "degraded"


def test_a_moment_told_after_the_end_is_not_kept() -> None:
    """By a framework that goes on when the monitor was closed."""
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False)
    training.step()
    training.monitor.forward_ended()
    assert training.monitor._stages is not None
    told = len(training.monitor._stages._moments)
    training.monitor.close()
    training.monitor.forward_ended()
    assert told > 1 and len(training.monitor._stages._moments) == told


class Hostile:
    """A sink that raises at everything."""

    def write(self, record: Record) -> None:
        raise RuntimeError("the token is hunter2")

    def alert(self, finding: Finding) -> None:
        raise RuntimeError("the token is hunter2")

    def close(self) -> None:
        raise RuntimeError("the token is hunter2")


def test_a_sink_that_raises_is_cut_off_and_reported(tmp_path: Any, unwatched: Training) -> None:
    training = make("mlp")
    good = sinks.Memory()
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run", sinks=[Hostile(), good])
    for _ in range(STEPS):
        training.step()
    training.monitor.flush()
    training.monitor.close()
    assert differences(unwatched, training) == []
    assert sum(not record.late for record in good.records) == STEPS and good.closed
    assert any("Hostile" in finding.advice for finding in training.monitor.findings)
    stored = b"".join(file.read_bytes() for file in (tmp_path / "run").iterdir())
    assert b"Hostile" in stored and b"hunter2" not in stored


def test_monitors_that_come_and_go_leave_the_step_of_another_training_alone() -> None:
    """P1: torch walks its global hooks while a step's are called; another thread may open or close a monitor then."""

    def meddle(*_: Any) -> None:
        thread = threading.Thread(target=lambda: watched().close())
        thread.start()
        thread.join()

    def watched() -> holter.Monitor:
        model = torch.nn.Linear(2, 2)
        return holter.watch(model, torch.optim.SGD(model.parameters(), lr=0.1), run=False)

    handles = [register(meddle) for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
    try:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holter.watch(model, optimizer, run=False) as monitor:
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
            assert len(monitor.history) == 3 and monitor.findings == ()
    finally:
        for handle in handles:
            handle.remove()


def test_an_interrupt_passes_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: a KeyboardInterrupt belongs to the user, wherever it strikes."""
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure.Measurer, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        training.step()


def test_bad_values_are_reported_and_the_good_ones_kept() -> None:
    training = make("mlp")
    monitor = holter.watch(training.model, training.optimizer, run=False)
    training.step()
    monitor.log(loss=1.0, name="a string", many=torch.zeros(3), nothing=None, late=torch.tensor([2.0]))
    assert monitor.history.scalar("loss")[1].tolist() == [1.0]
    assert monitor.history.scalar("late")[1].tolist() == [2.0]
    told = " ".join(finding.advice for finding in monitor.findings)
    assert "log name: it is a str, not a number" in told and "log many" in told and "log nothing" in told
    assert monitor.state == "degraded"


def test_clipping_still_raises_what_the_user_asked_for() -> None:
    training = make("mlp")
    monitor = holter.watch(training.model, training.optimizer, run=False)
    for parameter in training.model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(RuntimeError, match="non-finite"):
        monitor.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert monitor.findings == ()
