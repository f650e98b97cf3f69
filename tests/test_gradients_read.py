"""Which gradients a record holds: those that the optimizer uses, of this step, before the clip."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import holter
from holter.monitor import Monitor
from tests.models import mlp


def _watch(model: nn.Module, optimizer: Any) -> Monitor:
    return holter.watch(model, optimizer, run=False, budget=None)


def _backward(model: nn.Module, scale: float = 1.0) -> float:
    """One backward pass; the norm of all gradients as torch has it."""
    (scale * model(torch.randn(4, 12)).square().mean()).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))


def _norms(monitor: Monitor) -> list[float]:
    return monitor.history.scalar("gradient_norm")[1].tolist()


def test_a_step_within_a_step_is_part_of_it() -> None:
    """P27: wrappers and super().step() call hooks of their own."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__([p for group in inner.param_groups for p in group["params"]], {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.inner.step()

    class Sub(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            return super().step(closure)

    torch.optim.Adam(mlp().parameters())  # from here on Adam.step itself calls hooks
    for make in (lambda p: Lookahead(torch.optim.SGD(p, 0.01)), lambda p: Sub(p, 0.01)):
        model = mlp()
        optimizer = make(list(model.parameters()))
        monitor = _watch(model, optimizer)
        truth = []
        for _ in range(5):
            truth.append(_backward(model))
            optimizer.step()
            optimizer.zero_grad()
        assert _norms(monitor) == pytest.approx(truth, rel=1e-6)
        monitor.close()


def test_a_step_that_raises_leaves_nothing_to_the_next() -> None:
    class Moody(torch.optim.SGD):
        bad = False

        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            if self.bad:
                raise ArithmeticError
            return super().step(closure)

    model = mlp()
    optimizer = Moody(model.parameters(), 0.01)
    monitor = _watch(model, optimizer)
    truth = []
    for step in range(6):
        norm = _backward(model, 10.0**step)
        optimizer.bad = step == 2
        try:
            optimizer.step()
            truth.append(norm)
        except ArithmeticError:
            pass
        optimizer.zero_grad()
    assert _norms(monitor) == pytest.approx(truth, rel=1e-6)
    assert monitor.history.steps.tolist() == [0, 1, 2, 3, 4]


def test_a_clip_whose_step_is_not_taken_leaves_nothing_to_the_next() -> None:
    """A loop that skips its worst batches."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = _watch(model, optimizer)
    truth = []
    for step in range(6):
        norm = _backward(model, 10.0**step)
        if step % 2 == 0:
            monitor.clip_grad_norm_(1.0)
        if step in (2, 4):
            optimizer.zero_grad()
            continue
        truth.append(norm)
        optimizer.step()
        optimizer.zero_grad()
    assert _norms(monitor) == pytest.approx(truth, rel=1e-6)


def test_a_clip_within_a_closure_keeps_the_norm_before_it() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = _watch(model, optimizer)
    truth: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        truth.append(_backward(model, 100.0))
        monitor.clip_grad_norm_(0.1)
        return torch.zeros(())

    for _ in range(3):
        optimizer.step(closure)
    assert _norms(monitor) == pytest.approx(truth, rel=1e-6)
    assert monitor.history.scalar("gradient_norm_clipped")[1].tolist() == pytest.approx([0.1] * 3, rel=1e-4)


def test_one_clip_serves_the_steps_of_two_optimizers() -> None:
    """Both are one training step, whose norm is that of all gradients."""
    torch.manual_seed(0)
    model = mlp()
    optimizers = [torch.optim.SGD(model[i].parameters(), 0.01) for i in (0, 3)]
    monitor = _watch(model, optimizers)
    truth = []
    for _ in range(3):
        truth.append(_backward(model, 100.0))
        monitor.clip_grad_norm_(1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert _norms(monitor) == pytest.approx(truth, rel=1e-6)
    np.testing.assert_allclose(monitor.history.scalar("gradient_norm_clipped")[1], 1.0, rtol=1e-4)


def test_gradients_that_the_optimizer_does_not_hold_are_not_its_own() -> None:
    """A backbone outside the optimizer: nobody zeroes its gradients, and they pile up."""
    model = mlp()
    head = torch.optim.SGD(model[3].parameters(), 0.0)
    monitor = _watch(model, head)
    truth = []
    for _ in range(4):
        _backward(model)
        truth.append(float(torch.nn.utils.get_total_norm([p.grad for p in model[3].parameters()])))
        head.step()
        head.zero_grad()
    assert _norms(monitor) == pytest.approx(truth, rel=1e-6)
    assert monitor.history.layers("gradient") == ("3.weight", "3.bias")


@pytest.mark.parametrize("forward", ["seen", "unseen"])
def test_micro_batches_logged_at_the_end_of_the_loop_body_are_one_mean(forward: str) -> None:
    """E4: the last of them is logged after the step, the others before it."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = _watch(model, optimizer)
    for micro in range(12):
        if forward == "seen":
            _backward(model)
        else:
            model[3](torch.randn(2, 24)).sum().backward()
        if micro % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
        if forward == "seen" or micro % 4 == 3:
            monitor.log(loss=float(micro))
    steps, losses = monitor.history.scalar("loss")
    assert steps.tolist() == [0, 1, 2]
    assert losses.tolist() == ([1.5, 5.5, 9.5] if forward == "seen" else [3.0, 7.0, 11.0])
    assert monitor.history.to_dataframe()["loss"].tolist() == losses.tolist()


def test_a_name_of_holters_own_does_not_lose_what_a_user_logs() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = _watch(model, optimizer)
    norm = _backward(model)
    monitor.log(gradient_norm=777.0, learning_rate=100.0)
    optimizer.step()
    history = monitor.history
    assert history.scalar("gradient_norm")[1].tolist() == pytest.approx([norm], rel=1e-6)
    assert history.scalar("learning_rate")[1].tolist() == [0.01]
    assert history.scalar("logged/gradient_norm")[1].tolist() == [777.0]
    assert history.scalar("logged/learning_rate")[1].tolist() == [100.0]
    assert any("kept as logged/learning_rate" in finding.advice for finding in monitor.findings)


def test_a_model_that_holds_its_parent_does_not_hang() -> None:
    class Child(nn.Linear):
        parent: nn.Module

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = Child(12, 4)
            self.child.parent = self

        def forward(self, x: Tensor) -> Tensor:
            return self.child(x)

    model = Parent()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = _watch(model, optimizer)
    norm = _backward(model)
    optimizer.step()
    assert _norms(monitor) == pytest.approx([norm], rel=1e-6)
    monitor.close()


def test_a_model_collected_within_a_hook_does_not_disturb_torch() -> None:
    """P1: torch walks its hooks while the garbage collector may end a monitor."""

    doomed: list[Any] = []

    def collect(*_: Any) -> None:
        doomed.clear()
        gc.collect()

    handle = register_optimizer_step_pre_hook(collect)  # torch calls it before the hooks that follow
    doomed.append(mlp())
    _watch(doomed[0], torch.optim.SGD(doomed[0].parameters(), 0.01))
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = _watch(model, optimizer)
    try:
        for _ in range(3):
            _backward(model)
            optimizer.step()
    finally:
        handle.remove()
    assert doomed == [] and len(monitor.history) == 3
    monitor.close()


# Steps that are not measured, at a clip ----------------------------------------------------------------------------

MAX_NORM = 1e-3


class Parts(nn.Module):
    """Whose parts are called directly, so that no forward is seen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)


def _part_backward(part: nn.Module) -> float:
    (10 * part(torch.randn(8, 4)).square().sum()).backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in part.parameters() if p.grad is not None]))


def _seldom(model: nn.Module, optimizer: Any) -> Monitor:
    options = dict.fromkeys(("updates", "weights", "activations", "optimizer_state"))
    return holter.watch(model, optimizer, run=False, budget=None, every=100, **options)


def _a_measured_step(model: Parts, optimizer: torch.optim.Optimizer) -> None:
    _part_backward(model.a)
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_group_whose_step_was_not_taken_does_not_join_the_next(order: str) -> None:
    """It would make a clipped step look calm."""
    model = Parts()
    optimizer = torch.optim.SGD([p for name in order for p in getattr(model, name).parameters()], 0.01)
    with _seldom(model, optimizer) as monitor:
        _a_measured_step(model, optimizer)
        _part_backward(model.a)
        torch.nn.utils.clip_grad_norm_(model.a.parameters(), MAX_NORM)
        optimizer.zero_grad()
        norm = _part_backward(model.b)
        torch.nn.utils.clip_grad_norm_(model.b.parameters(), MAX_NORM)
        optimizer.step()
    assert _norms(monitor)[1:] == pytest.approx([norm], rel=1e-6)
    assert monitor.history.scalar("clip_norm")[1].tolist()[1:] == pytest.approx([norm], rel=1e-6)


def test_a_new_layer_that_is_not_clipped_is_not_overlooked() -> None:
    """P26: the norm of a part is not that of all."""
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with _seldom(model, optimizer) as monitor:
        _a_measured_step(model, optimizer)
        model.b = nn.Linear(4, 4)
        optimizer.add_param_group({"params": list(model.b.parameters())})
        _part_backward(model.a)
        _part_backward(model.b)
        torch.nn.utils.clip_grad_norm_(model.a.parameters(), MAX_NORM)
        optimizer.step()
    assert monitor.history.scalar("gradient_norm_clipped")[0].tolist() == [0]
    assert monitor.history.scalar("clip_norm")[0].tolist() == [0]


def test_what_was_measured_at_a_clip_stays_where_another_gradient_comes_after_it() -> None:
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with _watch(model, optimizer) as monitor:
        norm = _part_backward(model.a)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        _part_backward(model.b)
        optimizer.step()
    assert monitor.history.records[0].notes["gradients_read_at"] == "clip"
    assert monitor.history.scalar("clip_norm")[1].tolist() == pytest.approx([norm], rel=1e-6)


def test_parameters_of_others_in_the_clip_are_not_the_models() -> None:
    model, other = Parts(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with _seldom(model, optimizer) as monitor:
        _a_measured_step(model, optimizer)
        _part_backward(model.a)
        _part_backward(other)
        both = float(torch.nn.utils.clip_grad_norm_([*model.parameters(), *other.parameters()], MAX_NORM))
        optimizer.step()
    assert monitor.history.scalar("gradient_norm")[0].tolist() == [0]
    assert monitor.history.scalar("clip_norm")[1].tolist()[1:] == pytest.approx([both], rel=1e-6)
