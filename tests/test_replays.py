"""Steps that a CUDA graph replays. There is no GPU here: a stand-in of torch's graph runs the same arithmetic without a
hook; test_cuda.py replays real graphs."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holter
from holter import replays

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, test_cuda.py replays graphs")
RATE, STEPS = 0.1, 6
INPUTS = torch.linspace(-1, 1, 15).view(5, 3)


class Failure(BaseException):
    """As KeyboardInterrupt is one: whatever is raised."""


@dataclass(eq=False)
class Graph:
    """Stands for torch's class: one that was built with CUDA cannot be called without a GPU."""

    work: Callable[[], Any]
    is_broken: bool

    def capture_end(self) -> None:
        if self.is_broken:
            raise Failure

    def replay(self) -> None:
        self.work()


class Device:
    """What is captured, and torch's graphs without a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_capturing = False
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)

    def capture(self, work: Callable[[], Any], replayed: Callable[[], Any], is_broken: bool = False) -> Any:
        graph = Graph(replayed, is_broken)
        self.is_capturing = True
        work()
        self.is_capturing = False
        graph.capture_end()
        return graph


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    own = Graph.replay, Graph.capture_end
    yield Device(monkeypatch)
    assert (Graph.replay, Graph.capture_end) == own


def start() -> tuple[nn.Linear, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return model, torch.optim.SGD(model.parameters(), RATE)


def loss_of(weight: Tensor, bias: Tensor) -> Tensor:
    return (INPUTS @ weight.T + bias).square().mean()


def replayed_step(model: nn.Linear) -> Tensor:
    """As a graph does it: in the same tensors, and no hook runs."""
    loss = loss_of(model.weight, model.bias)
    with torch.no_grad():
        for one, gradient in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
            assert one.grad is not None
            one.grad.copy_(gradient)
            one -= RATE * gradient
    return loss.detach()


def eager_step(model: nn.Linear, optimizer: torch.optim.SGD) -> Tensor:
    loss = loss_of(model.weight, model.bias)
    optimizer.zero_grad(set_to_none=False)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(step: Callable[[], Tensor], monitor: holter.Monitor) -> None:
    for _ in range(STEPS):
        monitor.log(loss=step())


def watch(model: nn.Module, optimizer: Any) -> holter.Monitor:
    return holter.watch(model, optimizer, run=False, budget=None, updates=1, weights=1, histograms=None)


def captured(device: Device, model: nn.Linear, optimizer: torch.optim.SGD) -> Callable[[], Tensor]:
    """Return what replays the graph and gives its loss."""
    found: list[Tensor] = []
    hidden = [parameter.detach().clone() for parameter in model.parameters()]
    graph = device.capture(optimizer.step, lambda: found.append(replayed_step(model)))
    with torch.no_grad():  # a capture computes nothing
        for parameter, before in zip(model.parameters(), hidden, strict=True):
            parameter.copy_(before)

    def step() -> Tensor:
        graph.replay()
        return found[-1]

    return step


def test_replays_are_recorded_as_eager_steps_are(device: Device) -> None:
    model, optimizer = start()
    with watch(model, optimizer) as eager:
        train(lambda: eager_step(model, optimizer), eager)
    model, optimizer = start()
    with watch(model, optimizer) as monitor:
        train(captured(device, model, optimizer), monitor)
        assert monitor.findings == ()
    assert len(monitor.history) == STEPS and monitor.history.scalar("loss")[1].tolist() == pytest.approx(
        eager.history.scalar("loss")[1].tolist()
    )
    for role in ("gradient", "weight", "update"):
        steps, layers, norms = monitor.history.series(role, "norm")
        theirs = eager.history.series(role, "norm")
        assert steps.tolist() == theirs[0].tolist() and layers == theirs[1]
        np.testing.assert_allclose(norms, theirs[2], rtol=1e-5)
    assert {record.notes["gradients_read_at"] for record in monitor.history.records} == {"replay"}
    assert "gradients_kept" not in monitor.history.scalars


def test_what_is_captured_is_no_step(device: Device) -> None:
    model, optimizer = start()
    with watch(model, optimizer) as monitor:
        eager_step(model, optimizer)
        captured(device, model, optimizer)
    assert len(monitor.history) == 1 and monitor.findings == ()


def test_each_graph_steps_its_own_optimizers(device: Device) -> None:
    """Two graphs, as of a GAN; a third one, captured without a step, is of no concern."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizers = [torch.optim.SGD(part.parameters(), RATE) for part in model]
    with watch(model, optimizers) as monitor:
        steps = [captured(device, part, optimizer) for part, optimizer in zip(model, optimizers, strict=True)]
        other = device.capture(lambda: None, lambda: None)
        for _ in range(STEPS):
            other.replay()
            monitor.log(loss=steps[0]())
    norms = monitor.history.series("gradient", "norm")
    assert len(monitor.history) == STEPS and set(norms[1]) == {"0.weight", "0.bias"}


def test_two_optimizers_of_one_graph_make_one_record(device: Device) -> None:
    model, _ = start()
    optimizers = [torch.optim.SGD([parameter], RATE) for parameter in model.parameters()]
    with watch(model, optimizers) as monitor:

        def step() -> None:
            for optimizer in optimizers:
                optimizer.step()

        graph = device.capture(step, lambda: replayed_step(model))
        before = [parameter.detach().clone() for parameter in model.parameters()]
        graph.replay()
        changed = [float((b - p.detach()).norm()) for b, p in zip(before, model.parameters(), strict=True)]
        graph.replay()
    _, layers, updates = monitor.history.series("update", "norm")
    assert len(monitor.history) == 2 and layers == ("weight", "bias")
    assert updates[0].tolist() == pytest.approx(changed, rel=1e-5)


def test_torchs_class_is_its_own_again_after_the_last_monitor(device: Device) -> None:
    """P3: nothing is wrapped before a step is captured, nor after close()."""
    theirs = torch.cuda.CUDAGraph.replay
    (model, optimizer), (other, its) = start(), start()
    one, two = watch(model, optimizer), watch(other, its)
    assert torch.cuda.CUDAGraph.replay is theirs
    replay, its_replay = captured(device, model, optimizer), captured(device, other, its)
    replay(), its_replay()
    one.close()
    assert torch.cuda.CUDAGraph.replay is not theirs
    replay(), its_replay()
    two.close()
    assert torch.cuda.CUDAGraph.replay is theirs
    replay()
    assert len(one.history) == 1 and len(two.history) == 2


def test_a_replay_is_replayed_whatever_fails_in_the_monitor(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """P1: the weights are those of a training that nobody watches."""
    model, optimizer = start()
    for _ in range(3):
        replayed_step(model)
    bare = model.weight.detach().clone()
    model, optimizer = start()
    with watch(model, optimizer) as monitor, caplog.at_level(logging.CRITICAL, logger="holter"):
        replay = captured(device, model, optimizer)
        for name in ("before_update", "read_gradients", "take"):
            monkeypatch.setattr(monitor._collector, name, lambda *_: 1 / 0)
            replay()
    assert torch.equal(model.weight, bare) and monitor.findings != ()


def test_optimizers_are_told_of_in_the_order_of_their_steps(device: Device) -> None:
    """Not in that of their addresses, which is another in every process."""
    model, _ = start()
    optimizers = [torch.optim.SGD(model.parameters(), RATE) for _ in range(12)]
    seen = replays.Replays(None)  # type: ignore[arg-type]
    for optimizer in optimizers:
        seen.capture(optimizer)
    seen.end_capture(model)
    assert seen.stepped_by(model) == optimizers
    seen.detach()


def test_a_capture_on_another_thread_does_not_disturb_a_replay(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(weakref.WeakSet[Any]):
        def __iter__(self) -> Iterator[Any]:
            for one in super().__iter__():
                if others:
                    threads.append(threading.Thread(target=others.pop().capture, args=(optimizer,)))
                    threads[-1].start()
                    threads[-1].join(0.3)  # where it may, it captures in between
                yield one

    monkeypatch.setattr(replays, "_seeing", Slow())
    threads: list[threading.Thread] = []
    others: list[replays.Replays] = []
    model, optimizer = start()
    with watch(model, optimizer) as monitor:
        replay = captured(device, model, optimizer)
        others.append(other := replays.Replays(monitor))
        replay()
        threads[0].join()
        other.detach()
        assert len(monitor.history) == 1


def test_a_replay_that_raises_is_told_of_itself(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: not of what the monitor makes of it."""

    def work() -> None:
        raise Failure

    model, optimizer = start()
    with watch(model, optimizer) as monitor:
        graph = device.capture(optimizer.step, work)
        with monkeypatch.context() as patch, pytest.raises(Failure):
            patch.setattr(monitor._collector, "forget_step", lambda: 1 / 0)
            graph.replay()


def test_steps_of_a_capture_that_raised_are_of_no_other_graph(device: Device) -> None:
    model, optimizer = start()
    with watch(model, optimizer) as monitor:
        with pytest.raises(Failure):
            device.capture(optimizer.step, lambda: None, is_broken=True)
        device.capture(lambda: None, lambda: None).replay()  # an evaluation
        assert not len(monitor.history)
        captured(device, model, optimizer)()
    assert len(monitor.history) == 1


def test_a_replay_that_raises_is_no_step(device: Device) -> None:
    """And the forward that follows it belongs to the next step."""

    def work() -> Tensor:
        if fails:
            raise Failure
        return replayed_step(model)

    model, optimizer = start()
    with watch(model, optimizer) as monitor:
        graph = device.capture(optimizer.step, work)
        fails = True
        with pytest.raises(Failure):
            graph.replay()
        assert not monitor._collector.steps._is_stepping and not monitor._collector._updates._looks
        fails = False
        graph.replay()
        assert monitor.findings == ()
    assert monitor.history.steps.tolist() == [0]
