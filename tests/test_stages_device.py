"""Stages on a device that runs behind the host: of a wait, only what the device stood idle for is data.

The truth is a simulated device: a host clock and a queue, with events that pass when the device gets to them.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from holter import stages as stages_module
from holter.stages import PENDING, Stages, StageTimes, batches


class Device:
    """The host's clock, and a stream that does what it is given in order."""

    def __init__(self) -> None:
        self.now = 100.0
        self.free_at = 0.0
        self.events = self.recorded = 0
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
            device.recorded += 1

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


def test_one_step_in_so_many_is_timed_and_the_others_make_no_call(device: Device) -> None:
    stages, found, events = Stages(CUDA, pace=4), [], []
    for _ in range(12):
        before = device.recorded
        found.append(step(stages, device, load=0.01))
        events.append(device.recorded - before)
        device.synchronize()
    assert [times.is_expected for times in found] == [number % 4 == 2 for number in range(12)]
    # The first moment of a step is the last of the one before.
    assert [number for number, many in enumerate(events) if not many] == [0, 3, 4, 7, 8, 11]
    assert found[6].seconds()["forward"] == pytest.approx(0.03, abs=1e-4) and found[7].seconds() == {}
    assert all(step(Stages(None, pace=4), device, load=0.01).seconds() for _ in range(4))


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
