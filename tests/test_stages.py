"""Stages: a slow stage shows its share; on a device that runs behind the host, only what it stood idle for is data.

The truth on the CPU is a stopwatch around the planted sleeps. The truth on CUDA is a simulated device: a host clock
and a queue, with events that pass when the device gets to them.
"""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holter import stages as stages_module
from holter.stages import PENDING, STAGES, Stages, StageTimes, batches

SLEEP, SLOW = 0.004, 0.03
POINTS = 0.05


class Stopwatch:
    """Sleeps where it is told, and knows how long that was."""

    def __init__(self, slow: str) -> None:
        self._slow = slow
        self.slept: dict[str, float] = {}

    def sleep(self, stage: str) -> None:
        began = time.perf_counter()
        time.sleep(SLOW if stage == self._slow else SLEEP)
        self.slept[stage] = self.slept.get(stage, 0.0) + time.perf_counter() - began


class Sleepy(nn.Module):
    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self.linear, self.watch = nn.Linear(4, 4), watch

    def forward(self, inputs: Tensor) -> Tensor:
        self.watch.sleep("forward")
        outputs: Tensor = self.linear(inputs)
        if outputs.requires_grad:
            outputs.register_hook(lambda gradient: self.watch.sleep("backward"))
        return outputs


class SleepySGD(torch.optim.SGD):
    watch: Stopwatch

    def step(self, closure: Any = None) -> Any:
        self.watch.sleep("optimizer")
        return super().step(closure)


def attach(stages: Stages, model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    """As the capture does: training forwards only, and the optimizers' own hooks."""
    model.register_forward_pre_hook(lambda *_: stages.forward_began() if model.training else None)
    model.register_forward_hook(lambda *_: stages.forward_ended() if model.training else None)
    for optimizer in optimizers:
        optimizer.register_step_pre_hook(lambda *_: stages.step_began())
        optimizer.register_step_post_hook(lambda *_: stages.step_ended())


def train(
    slow: str, *, stages: Stages | None = None, accumulate: int = 1, evaluate: bool = False, steps: int = 7
) -> dict[str, float]:
    """How far each stage's share is from the truth: medians over steps of the difference, in parts of the whole."""
    watch, stages = Stopwatch(slow), stages or Stages()
    model = Sleepy(watch)
    optimizer = SleepySGD(model.parameters(), lr=0.1)
    optimizer.watch = watch
    attach(stages, model, optimizer)
    differences: dict[str, list[float]] = {stage: [] for stage in (*STAGES, "whole")}

    def loader() -> Iterator[Tensor]:
        for _ in range(steps * accumulate):
            watch.sleep("data")
            yield torch.ones(2, 4)

    began = time.perf_counter()
    for place, inputs in enumerate(batches(loader(), stages), 1):
        model(inputs).sum().backward()
        if place % accumulate:
            continue
        optimizer.step()
        if evaluate:
            model.eval()
            forward, watch.slept["forward"] = watch.slept["forward"], 0.0
            model(inputs)
            watch.slept["other"], watch.slept["forward"] = watch.slept["forward"], forward
            model.train()
        found, now = stages.finish().seconds(), time.perf_counter()
        for stage in STAGES:
            truth = watch.slept.get(stage, 0.0) / (now - began)
            differences[stage].append(found.get(stage, 0.0) / found["whole"] - truth)
        differences["whole"].append(found["whole"] / (now - began) - 1.0)
        assert sum(found[stage] for stage in STAGES if stage in found) == pytest.approx(found["whole"])
        began, watch.slept = now, {}
    return {stage: statistics.median(found) for stage, found in differences.items()}


def worst(differences: dict[str, float]) -> float:
    return max(map(abs, differences.values()))


@pytest.mark.parametrize("slow", ["data", "forward", "backward", "optimizer"])
def test_a_slow_stage_shows_its_share(slow: str) -> None:
    assert worst(train(slow)) < POINTS


@pytest.mark.parametrize("slow", ["data", "forward", "backward", "optimizer"])
def test_the_shares_are_true_under_accumulation(slow: str) -> None:
    assert worst(train(slow, accumulate=3, steps=5)) < POINTS


def test_evaluation_is_no_forward() -> None:
    assert worst(train("forward", evaluate=True)) < POINTS


class Deaf(Stages):
    """Planted faults: a stage that is never told."""

    def __init__(self, to: str) -> None:
        super().__init__()
        for name in {"data": ["waited"], "forward": ["forward_began"], "backward": ["forward_ended"]}.get(to, [to]):
            setattr(self, name, lambda *_: None)


@pytest.mark.parametrize(
    ("slow", "deaf"),
    [("data", "data"), ("forward", "forward"), ("backward", "backward"), ("optimizer", "step_began")],
)
def test_a_stage_that_is_not_told_fails_the_gate(slow: str, deaf: str) -> None:
    assert worst(train(slow, stages=Deaf(deaf))) > POINTS


def test_an_evaluation_that_is_told_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sleepy, "training", property(lambda self: True, lambda self, value: None), raising=False)
    assert worst(train("forward", evaluate=True)) > POINTS


# A simulated device ---------------------------------------------------------------------------------------------


class Device:
    """The host's clock, and a stream that does what it is given in order."""

    def __init__(self) -> None:
        self.now = 100.0
        self.free_at = 0.0
        self.events = 0
        self.is_capturing = False

    def host(self, seconds: float) -> None:
        self.now += seconds

    def launch(self, seconds: float) -> None:
        """Work for the device, which the host hands over in 10 us."""
        self.now += 1e-5
        self.free_at = max(self.free_at, self.now) + seconds

    def synchronize(self) -> None:
        self.now = max(self.now, self.free_at)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing
            device.events += 1

        def record(self, stream: object) -> None:
            assert not device.is_capturing, "it would become part of the graph"
            self.at = max(device.free_at, device.now)

        def query(self) -> bool:
            return device.now >= self.at

        def elapsed_time(self, other: Event) -> float:
            assert self.query() and other.query(), "torch raises for events that have not passed"
            return 1e3 * (other.at - self.at)

        def synchronize(self) -> None:
            raise AssertionError("a wait")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: device.is_capturing)
    monkeypatch.setattr(stages_module.time, "perf_counter", lambda: device.now)
    return device


CUDA = torch.device("cuda", 0)


def step(stages: Stages, device: Device, *, load: float, between: float = 0.0, bracket: bool = True) -> StageTimes:
    """100 ms of work for the device: forward 30, backward 60, optimizer 10; `between` of it after the step."""
    if bracket:
        stages.wait_began()
    device.host(load)
    stages.waited(load)
    stages.forward_began()
    device.launch(0.03)
    stages.forward_ended()
    device.launch(0.06)
    stages.step_began()
    device.launch(0.01)
    stages.step_ended()
    times = stages.finish()
    if between:
        device.launch(between)  # the logging of a metric, say: it belongs to the next step
    return times


def third_step(stages: Stages, device: Device, **how: Any) -> dict[str, float]:
    """Milliseconds of a step in the steady state."""
    found = [step(stages, device, **how) for _ in range(3)][-1]
    device.synchronize()
    assert found.ready()
    return {stage: round(1e3 * seconds, 1) for stage, seconds in found.seconds().items()}


BUSY = {"forward": 30.0, "backward": 60.0, "optimizer": 10.0}
# What the loader takes, what of it the device stood idle for: the host is at most one step ahead here, for the
# loader's wait of every step is longer than the launches. With 150 ms of loading the device idles 50.
DATA = [(0.15, 50.0), (0.3, 200.0), (0.0, 0.0)]


@pytest.mark.parametrize(("load", "idle"), DATA)
def test_a_wait_for_data_counts_as_far_as_the_device_stood_idle(device: Device, load: float, idle: float) -> None:
    found = third_step(Stages(CUDA), device, load=load)
    assert found == pytest.approx({**BUSY, "data": idle, "other": 0.0, "whole": 100.0 + idle}, abs=0.2)


def test_the_host_clock_would_have_told_another_story(device: Device) -> None:
    """The planted fault: the gate above, held to the host's clock."""
    found = third_step(Stages(None), device, load=0.15)
    assert found["data"] == pytest.approx(150.0, abs=0.2) and found["backward"] < 1.0


@pytest.mark.parametrize(("bracket", "data"), [(True, 0.0), (False, 20.0)])
def test_work_of_the_device_is_no_wait(device: Device, bracket: bool, data: float) -> None:
    """The loader takes 50 ms while the device has 120 ms of work queued, 20 of them after the step.

    Without an event before the wait (the planted fault) these 20 would pass for waiting.
    """
    found = third_step(Stages(CUDA), device, load=0.05, between=0.02, bracket=bracket)
    assert found["data"] == pytest.approx(data, abs=0.2)
    assert found["other"] == pytest.approx(20.0 - data, abs=0.2) and found["whole"] == pytest.approx(120, abs=0.2)


def test_a_device_that_waits_for_a_slow_host_shows_where(device: Device) -> None:
    """No work queued and a host that computes for 40 ms in the forward: that is the forward's time."""
    stages = Stages(CUDA)
    stages.finish()
    stages.forward_began()
    device.host(0.04)
    device.launch(0.001)
    stages.forward_ended()
    stages.step_began()
    stages.step_ended()
    times = stages.finish()
    device.synchronize()
    assert times.seconds()["forward"] == pytest.approx(0.041, abs=1e-4)


def test_nothing_is_read_before_the_device_is_there(device: Device) -> None:
    times = step(Stages(CUDA), device, load=0.01)
    assert not times.ready() and times.seconds() == {}
    device.synchronize()
    assert times.ready() and times.seconds()["whole"] == pytest.approx(0.11, rel=0.01)
    assert times.seconds() == times.seconds()


def forwards_of_queued_steps(stages: Stages, device: Device) -> set[float]:
    """What is read of steps of which five are queued at a time."""
    found = set()
    for _ in range(20):
        queued = [step(stages, device, load=0.01) for _ in range(5)]
        device.synchronize()
        found |= {round(times.seconds()["forward"], 3) for times in queued}
    return found


def test_events_are_used_again_only_when_they_have_been_read(device: Device) -> None:
    assert forwards_of_queued_steps(Stages(CUDA), device) == {0.03}
    assert device.events < 60  # of 900 moments


def test_events_used_again_too_early_are_found(device: Device) -> None:
    class Hasty(Stages):
        def finish(self) -> StageTimes:
            self._unused.extendleft(moment.event for moment in self._moments if moment.event is not None)
            return super().finish()

    assert forwards_of_queued_steps(Hasty(CUDA), device) != {0.03}


def readable(device: Device) -> list[bool]:
    """Of 10 steps too many, which can be read in the end."""
    stages = Stages(CUDA)
    kept = [step(stages, device, load=0.01) for _ in range(PENDING + 10)]
    device.synchronize()
    return [bool(times.ready() and times.seconds()) for times in kept]


def test_steps_that_nobody_reads_are_given_up(device: Device) -> None:
    assert readable(device) == [False] * 10 + [True] * PENDING


def test_steps_that_are_kept_for_ever_are_found(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageTimes, "give_up", lambda self: None)
    assert readable(device) != [False] * 10 + [True] * PENDING


@pytest.mark.parametrize("where", [None, CUDA])
def test_a_step_of_very_many_moments_stays_bounded_and_adds_up(device: Device, where: torch.device | None) -> None:
    stages = Stages(where)
    stages.finish()
    for _ in range(5000):
        stages.forward_began()
        device.launch(0.001)
        stages.forward_ended()
        device.launch(0.002)
        device.synchronize()
        assert len(stages._moments) <= 1024
    stages.step_began()
    times = stages.finish()
    found = times.seconds()
    assert found["whole"] == pytest.approx(15.1, rel=0.01)
    if where is not None:
        assert found["forward"] == pytest.approx(5.0, rel=0.02) and found["backward"] == pytest.approx(10, rel=0.02)


def test_a_device_that_never_gets_there_costs_no_memory(device: Device) -> None:
    stages = Stages(CUDA)
    stages.finish()
    device.launch(1e9)
    for _ in range(3000):
        stages.forward_began()
    assert device.events <= 1100
    assert stages.finish().seconds() == {}
    assert stages._moments  # and the next step is observed again


def test_a_captured_step_is_not_observed(device: Device) -> None:
    stages = Stages(CUDA)
    step(stages, device, load=0.01)
    device.is_capturing = True
    captured = step(stages, device, load=0.01)
    device.is_capturing = False
    first = step(stages, device, load=0.01)  # its beginning was captured
    then = step(stages, device, load=0.01)
    device.synchronize()
    assert captured.seconds() == first.seconds() == {} and then.seconds()["forward"] == pytest.approx(0.03)
    assert captured.ready()


def test_a_model_that_moves_is_timed_where_it_is(device: Device) -> None:
    stages = Stages(torch.device("cpu"))
    step(stages, device, load=0.01)
    stages.device = CUDA
    step(stages, device, load=0.01)
    times = step(stages, device, load=0.01)
    device.synchronize()
    assert times.seconds()["backward"] == pytest.approx(0.06)
    stages.device = torch.device("mps")
    step(stages, device, load=0.01)
    assert step(stages, device, load=0.01).seconds() == {}  # asynchronous, and we have no events of it


# What is told, and what is not ----------------------------------------------------------------------------------


def told(*moments: str) -> dict[str, float]:
    stages = Stages()
    for moment in moments:
        getattr(stages, moment)()
    return stages.finish().seconds()


def test_what_was_never_told_is_absent_not_zero() -> None:
    assert told() == {}
    assert set(told("step_began", "step_ended")) == {"optimizer", "other", "whole"}
    assert set(told("forward_began", "forward_ended")) == {"forward", "backward", "other", "whole"}


def test_two_optimizers_have_a_step_each(device: Device) -> None:
    """One forward and backward, two steps: the second is an optimizer's time only."""
    stages = Stages()
    found = []
    for moment, seconds in [("forward_began", 1), ("forward_ended", 2), ("step_began", 3), ("step_ended", 0)]:
        getattr(stages, moment)()
        device.host(seconds)
    found.append(stages.finish().seconds())
    for moment, seconds in [("step_began", 4), ("step_ended", 0)]:
        getattr(stages, moment)()
        device.host(seconds)
    found.append(stages.finish().seconds())
    first, second = ({stage: round(seconds) for stage, seconds in times.items()} for times in found)
    assert first == {"forward": 1, "backward": 2, "optimizer": 3, "other": 0, "whole": 6}
    assert second == {"forward": 0, "backward": 0, "optimizer": 4, "other": 0, "whole": 4}


def test_a_wait_told_afterwards_counts_within_its_stretch(device: Device) -> None:
    stages = Stages()
    device.host(3)
    stages.waited(3.0)  # the first thing told: the step began with it
    stages.forward_began()
    stages.forward_ended()
    device.host(5)
    stages.waited(2.0)  # accumulation: between a backward and the next forward
    stages.waited(100.0)  # no longer than since the last one: nothing
    stages.forward_began()
    assert stages.finish().seconds() == pytest.approx(
        {"data": 5.0, "forward": 0.0, "backward": 3.0, "other": 0.0, "whole": 8.0}
    )


def test_what_holter_does_before_the_step_is_no_backward(device: Device) -> None:
    stages = Stages()
    for moment, seconds in [("forward_began", 1), ("forward_ended", 2), ("measuring", 4), ("step_began", 8)]:
        getattr(stages, moment)()
        device.host(seconds)
    found = stages.finish().seconds()
    assert found == pytest.approx({"forward": 1, "backward": 2, "other": 4, "optimizer": 8, "whole": 15})


def test_a_batch_fetched_before_the_backward_leaves_it_a_backward(device: Device) -> None:
    """Some loops ask for the next batch between forward and backward, to overlap the two."""
    stages = Stages()
    stages.forward_began()
    stages.forward_ended()
    stages.wait_began()
    device.host(2)
    stages.waited(2.0)
    device.host(5)
    stages.step_began()
    found = stages.finish().seconds()
    assert (found["data"], found["backward"], found["other"]) == pytest.approx((2.0, 5.0, 0.0))


@pytest.mark.parametrize("keeps", [False, True], ids=["", "planted fault"])
def test_nothing_of_the_model_is_kept(keeps: bool) -> None:
    stages = Stages()
    model = nn.Linear(2, 2)
    for batch in batches([torch.ones(1, 2)], stages):
        stages.forward_began()
        model(batch)
    gone = weakref.ref(model), weakref.ref(batch)
    times = stages.finish()
    if keeps:
        stages.model, times.batch = model, batch  # type: ignore[attr-defined]
    del model, batch
    gc.collect()
    assert [reference() is None for reference in gone] == [not keeps] * 2 and times.ready()


# batches --------------------------------------------------------------------------------------------------------


class Waits:
    def __init__(self) -> None:
        self.told: list[str] = []

    def wait_began(self) -> None:
        self.told.append("began")

    def waited(self, seconds: float) -> None:
        assert seconds >= 0
        self.told.append("waited")


def test_batches_are_the_loaders_own_at_every_iteration() -> None:
    data, waits = [object(), object(), None], Waits()
    wrapped = batches(data, waits)
    assert len(wrapped) == 3  # type: ignore[arg-type]
    for _ in range(2):
        assert all(ours is theirs for ours, theirs in zip(wrapped, data, strict=True))
    assert waits.told == 2 * 4 * ["began", "waited"]  # the end of the data is an answer too


def test_a_loader_without_a_length_has_none() -> None:
    wrapped = batches(iter([1, 2]), Waits())
    assert not hasattr(wrapped, "__len__") and bool(wrapped) and list(wrapped) == [1, 2]


class Loader:
    """Gives a new generator each time, and knows whether it was closed."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.closed, self.error = 0, error

    def __iter__(self) -> Iterator[int]:
        try:
            yield 1
            if self.error is not None:
                raise self.error
            yield 2
        finally:
            self.closed += 1


def leave(wrapped: Any) -> None:
    for _ in wrapped:
        break


def test_leaving_the_loop_ends_the_loaders_generator() -> None:
    loader = Loader()
    leave(batches(loader, Waits()))
    assert loader.closed == 1


def test_an_iterator_of_the_users_own_goes_on_after_a_break() -> None:
    """As with a plain for statement; closing it, the planted fault, would lose the second half."""
    numbers = (number for number in range(4))
    leave(batches(numbers, Waits()))
    assert list(batches(numbers, Waits())) == [1, 2, 3]


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), GeneratorExit()])
def test_what_a_loader_raises_passes_unchanged(error: BaseException) -> None:
    loader, waits = Loader(error), Waits()
    with pytest.raises(type(error)) as caught:
        list(batches(loader, waits))
    assert caught.value is error and loader.closed == 1


def test_what_the_loop_raises_ends_the_loader() -> None:
    loader = Loader()
    with pytest.raises(ZeroDivisionError):
        for _ in batches(loader, Waits()):
            1 / 0  # noqa: B018
    assert loader.closed == 1


def test_a_batch_is_let_go_before_the_next_is_asked_for() -> None:
    alive: list[bool] = []

    def loader() -> Iterator[Tensor]:
        tensor = torch.ones(1)
        gone = weakref.ref(tensor)
        yield tensor
        del tensor
        alive.append(gone() is not None)
        yield torch.ones(1)

    iterator = iter(batches(loader(), Waits()))
    next(iterator)
    next(iterator)
    assert alive == [False]


def slow_collate(items: list[Tensor]) -> Tensor:
    time.sleep(0.02)
    return torch.stack(items)


def test_a_loader_with_workers_gives_the_same_batches_and_ends_them() -> None:
    data = torch.arange(24.0).reshape(12, 2)
    loader = torch.utils.data.DataLoader(list(data), 4, num_workers=1, collate_fn=slow_collate)  # type: ignore[arg-type]
    stages = Stages()
    wrapped = batches(loader, stages)
    assert len(wrapped) == 3  # type: ignore[arg-type]
    iterator: Any = iter(wrapped)
    found = [next(iterator)]
    workers = iterator.gi_frame.f_locals["iterator"]._workers
    found += iterator
    assert torch.equal(torch.cat(found), data)
    assert not any(worker.is_alive() for worker in workers)
    times = stages.finish().seconds()
    assert times["data"] / times["whole"] > 0.9
    leave(wrapped)


def cost(tell: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(200):
        tell()
    return (time.perf_counter() - began) / 200


def test_telling_a_step_is_cheap() -> None:
    """P6 allows 1 ms of Python a step for everything; seven moments and their sum are to be a tenth of it."""
    stages = Stages()

    def tell() -> None:
        stages.wait_began()
        stages.waited(0.0)
        stages.forward_began()
        stages.forward_ended()
        stages.step_began()
        stages.step_ended()
        stages.finish().seconds()

    assert min(cost(tell) for _ in range(5)) < 1e-4
