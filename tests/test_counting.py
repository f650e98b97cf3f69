"""P27: exactly one record a training step, and every value on its own step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import holter
from holter.monitor import Monitor
from tests.models import make, mlp


def _watch(model: nn.Module, optimizer: object, **more: object) -> Monitor:
    return holter.watch(model, optimizer, run=False, budget=None, **more)  # type: ignore[arg-type]


def _loss(model: nn.Module) -> Tensor:
    return model(torch.randn(4, 12)).square().mean()


def _plain(steps: int = 6) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), 0.01)


def _one_record_each(monitor: Monitor, steps: int) -> bool:
    history = monitor.history
    recorded, _, matrix = history.series("gradient", "norm")
    return history.steps.tolist() == list(range(steps)) == recorded.tolist() and bool(np.isfinite(matrix).all())


def test_gradient_accumulation_is_one_record_a_step() -> None:
    """E4: micro-batches are not steps; the gradient recorded is the accumulated one."""
    model, optimizer = _plain()
    monitor = _watch(model, optimizer)
    norms = []
    for _ in range(5):
        for _ in range(4):
            loss = _loss(model) / 4
            loss.backward()
            monitor.log(loss=loss, inputs=torch.randn(4, 12))
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])))
        optimizer.step()
        optimizer.zero_grad()
    assert _one_record_each(monitor, 5)
    assert all(record.rows["batch"].layers == ("inputs",) for record in monitor.history.records)
    np.testing.assert_allclose(monitor.history.scalar("gradient_norm")[1], norms, rtol=1e-6)
    assert monitor.history.scalar("loss")[0].tolist() == [0, 1, 2, 3, 4]


def test_two_backwards_before_a_step_are_one_record() -> None:
    model, optimizer = _plain()
    monitor = _watch(model, optimizer)
    for _ in range(5):
        _loss(model).backward()
        _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert _one_record_each(monitor, 5)


@pytest.mark.parametrize("forward", ["in the closure", "before the step too"])
def test_activations_of_a_closure_are_those_of_its_own_step(forward: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    expected = []
    with holter.watch(model, optimizer, run=False, activations=1, budget=None) as monitor:
        for _ in range(3):
            x = torch.randn(8, 4)

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().sum()  # noqa: B023
                loss.backward()
                return loss

            with torch.no_grad():
                expected.append(model[1](model[0](x)).double().norm().item())
            if forward == "before the step too":
                closure()
            optimizer.step(closure)
        steps, layers, norms = monitor.history.series("activation", "norm")
        rows = [record.rows["activation"].layers for record in monitor.history.records]
    assert steps.tolist() == [0, 1, 2] and rows == [("0", "1")] * 3
    np.testing.assert_allclose(norms[:, layers.index("1")], expected, rtol=1e-5)


@pytest.mark.parametrize("make_optimizer", [torch.optim.LBFGS, torch.optim.Adam, torch.optim.SGD])
def test_a_closure_is_one_record_however_often_it_is_called(
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    torch.manual_seed(0)
    model = mlp().eval().train()
    optimizer = make_optimizer(model.parameters(), lr=0.01)
    monitor = _watch(model, optimizer)
    x, calls, last = torch.randn(4, 12), 0, 0.0

    def closure() -> Tensor:
        nonlocal calls, last
        calls += 1
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        last = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        return loss

    for step in range(5):
        loss = optimizer.step(closure)
        monitor.log(loss=loss)
        assert monitor.history.scalar("gradient_norm")[1][step] == pytest.approx(last, rel=1e-6)
    assert calls >= 5
    assert _one_record_each(monitor, 5)
    assert monitor.history.scalar("loss")[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("told", ["both", "only the first"])
def test_two_optimizers_that_share_a_backward_are_one_record(told: str) -> None:
    """Two records were two steps of half a model each, and norms that alternate."""
    torch.manual_seed(0)
    model = mlp()
    first = torch.optim.SGD(model[0].parameters(), 0.01)
    second = torch.optim.Adam(model[3].parameters(), 0.01)
    monitor = _watch(model, [first, second] if told == "both" else first)
    truth = []
    for _ in range(4):
        _loss(model).backward()
        truth.append(float(torch.nn.utils.get_total_norm([p.grad.double() for p in model.parameters()])))
        first.step()
        second.step()
        model.zero_grad()
    assert _one_record_each(monitor, 4)
    np.testing.assert_allclose(monitor.history.scalar("gradient_norm")[1], truth, rtol=1e-6)


def test_two_monitors_with_an_optimizer_each_stay_apart() -> None:
    torch.manual_seed(0)
    model = mlp()
    first, second = (torch.optim.SGD(model[i].parameters(), 0.01) for i in (0, 3))
    one, two = _watch(model, first), _watch(model, second)
    for _ in range(3):
        _loss(model).backward()
        first.step()
        second.step()
    assert len(one.history) == len(two.history) == 3


def test_activation_checkpointing_counts_once() -> None:
    """pytorch #81296: the recomputed forward is not another step."""
    torch.manual_seed(0)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    model = Checkpointed()
    monitor = _watch(model, optimizer := torch.optim.SGD(model.parameters(), 0.01))
    for _ in range(5):
        loss = model(torch.randn(4, 12)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
    assert _one_record_each(monitor, 5)
    assert monitor.history.scalar("loss")[0].tolist() == [0, 1, 2, 3, 4]


def test_a_step_skipped_by_the_loss_scaler_is_a_record_too() -> None:
    training = make("accumulation+amp")
    training.monitor = _watch(training.model, training.optimizer, scaler=training.scaler)
    for _ in range(8):
        training.step()
    history = training.monitor.history
    taken = int(training.optimizer.state_dict()["state"][0]["step"])
    assert history.steps.tolist() == list(range(8))
    skipped = history.scalar("skipped")[1]
    assert skipped.sum() == 8 - taken > 0
    assert skipped[0] == 1 and taken > 0
    nonfinite = history.scalar("gradient_nonfinite")[1]
    np.testing.assert_array_equal(nonfinite > 0, skipped > 0)
    assert history.scalar("loss_scale")[1][-1] < 2.0**127


def test_a_fused_optimizer_under_a_scaler_shows_unscaled_gradients() -> None:
    """The fused kernel unscales and skips by itself, after the hook has read scaled gradients."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    monitor = _watch(model, optimizer, scaler=scaler, histograms=1)
    expected = []
    for step in range(4):
        loss = _loss(model) * (float("inf") if step == 2 else 1.0)
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        expected.append(float(torch.cat([p.grad.double().flatten() / scale for p in model.parameters()]).norm()))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    history = monitor.history
    np.testing.assert_allclose(history.scalar("gradient_norm")[1], expected, rtol=1e-6)
    assert history.scalar("skipped")[1].tolist() == [0, 0, 1, 0]
    largest = history.series("gradient", "max")[2][0, 0]
    assert history.histogram("gradient", "0.weight")[1][0].quantile(1.0) == pytest.approx(largest, rel=0.125)


@pytest.mark.parametrize("when", ["before", "after", "before backward", "every third before", "every third after"])
@pytest.mark.parametrize("value", ["tensor", "number"])
def test_a_value_lands_on_its_step_wherever_it_is_logged(when: str, value: str) -> None:
    model, optimizer = _plain()
    monitor = _watch(model, optimizer)
    truth = {}
    for step in range(9):
        loss = _loss(model)
        shown = loss if value == "tensor" else loss.item()
        now = not when.startswith("every") or step % 3 == 1
        if now:
            truth[step] = loss.item()
        if now and when == "before backward":
            monitor.log(loss=shown)
        loss.backward()
        if now and when in ("before", "every third before"):
            monitor.log(loss=shown)
        optimizer.step()
        optimizer.zero_grad()
        if now and when in ("after", "every third after"):
            monitor.log(loss=shown)
        model.eval()
        with torch.no_grad():  # evaluation forwards count for nothing
            _loss(model)
        model.train()
        with torch.inference_mode():
            _loss(model)
    steps, values = monitor.history.scalar("loss")
    assert dict(zip(steps.tolist(), values.tolist(), strict=True)) == truth
    assert len(monitor.history) == 9


@pytest.mark.parametrize("when", ["before", "after"])
def test_values_land_where_the_forward_cannot_be_seen(when: str) -> None:
    """Calling the model's parts directly, its own forward never runs."""
    model, optimizer = _plain()
    monitor = _watch(model, optimizer)
    truth = []
    for _ in range(6):
        loss = model[3](model[0](torch.randn(4, 12))).square().mean()
        truth.append(loss.item())
        loss.backward()
        if when == "before":
            monitor.log(loss=loss)
        optimizer.step()
        if when == "after":
            monitor.log(loss=loss)
    steps, values = monitor.history.scalar("loss")
    assert steps.tolist() == list(range(6)) and values.tolist() == truth


def test_values_logged_before_and_after_one_step_meet_on_it() -> None:
    model, optimizer = _plain()
    monitor = _watch(model, optimizer)
    for step in range(5):
        loss = _loss(model)
        monitor.log(before=step)
        loss.backward()
        optimizer.step()
        monitor.log(after=step)
        monitor.log(later=step)
    for name in ("before", "after", "later"):
        steps, values = monitor.history.scalar(name)
        assert steps.tolist() == values.tolist() == list(range(5))
    assert len(monitor.history) == 5


def test_a_logged_tensor_is_kept_as_it_was() -> None:
    """A running total that goes on changing must not change what was logged."""
    model, optimizer = _plain()
    monitor = _watch(model, optimizer)
    total = torch.zeros(())
    for _ in range(3):
        _loss(model).backward()
        total += 1
        monitor.log(total=total)
        optimizer.step()
    assert monitor.history.scalar("total")[1].tolist() == [1, 2, 3]


def test_a_second_attach_is_harmless() -> None:
    model, optimizer = _plain()
    one, two = _watch(model, optimizer), _watch(model, optimizer)
    for _ in range(3):
        _loss(model).backward()
        optimizer.step()
    assert len(one.history) == len(two.history) == 3
    one.close()
    _loss(model).backward()
    optimizer.step()
    assert len(one.history) == 3 and len(two.history) == 4


def test_the_count_fails_when_backwards_are_counted() -> None:
    """P27, planted fault: a monitor that records on every backward, as tensor hooks do."""
    model, optimizer = _plain()
    monitor = _watch(model, optimizer)
    handle = model[3].bias.register_hook(lambda _: monitor.after_step(optimizer, None))
    for _ in range(3):
        for _ in range(2):
            _loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    assert not _one_record_each(monitor, 3)


def test_copies_of_a_watched_model_are_not_watched() -> None:
    model, optimizer = _plain()
    monitor = _watch(model, optimizer)
    twin = copy.deepcopy(model)
    twins_optimizer = torch.optim.SGD(twin.parameters(), 0.01)
    F.mse_loss(twin(torch.randn(4, 12)), torch.zeros(4, 4)).backward()
    twins_optimizer.step()
    assert len(monitor.history) == 0
