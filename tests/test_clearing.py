"""Gradients that are not cleared between two steps, seen as each backward adds to them."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import holter
from holter import clearing, gradient_reads

STEPS = 40
TRUE = torch.randn(20, 10, generator=torch.Generator().manual_seed(1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 10))


def loss_of(model: nn.Module) -> Tensor:
    x = torch.randn(16, 20)
    return F.cross_entropy(model(x), (x @ TRUE).argmax(1))


def set_to_zero(model: nn.Module, _: Optimizer) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()  # as before zero_grad(): torch counts no change of the gradient itself


Clear = Callable[[nn.Module, Optimizer], object]
CLEARS: dict[str, Clear] = {
    "to None": lambda _, optimizer: optimizer.zero_grad(),
    "in place": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "by the model": lambda model, _: model.zero_grad(set_to_none=False),
    "as data": set_to_zero,
}


def train(
    clear: Clear | None,
    where: str = "before",
    clip: float | None = None,
    make: Callable[..., Optimizer] = torch.optim.SGD,
    since: int = 0,
    watched: bool = True,
) -> tuple[nn.Module, holter.Monitor | None]:
    """`clear` is called there until step `since`, or always if that is 0."""
    model = net()
    optimizer = make(model.parameters(), lr=1e-2)
    monitor = holter.watch(model, optimizer, run=False, machine=False) if watched else None
    for step in range(STEPS):
        clears = clear if since == 0 or step < since else None
        if clears is not None and where == "before":
            clears(model, optimizer)
        loss = loss_of(model)
        if clears is not None and where == "between":
            clears(model, optimizer)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if clears is not None and where == "after":
            clears(model, optimizer)
        if monitor is not None:
            monitor.log(loss=loss)
    if monitor is not None:
        monitor.close()
    return model, monitor


def looks(monitor: holter.Monitor | None) -> dict[int, float]:
    assert monitor is not None
    steps, left = monitor.history.scalar("gradients_left")
    return dict(zip(steps.tolist(), left.tolist(), strict=True))


def alarms(monitor: holter.Monitor | None) -> list[tuple[str, int]]:
    assert monitor is not None
    return [(one.cause, one.since) for one in monitor.findings if one.severity != "info"]


@pytest.mark.parametrize("where", ["before", "between", "after"])
@pytest.mark.parametrize("clear", CLEARS.values(), ids=CLEARS.keys())
def test_what_was_cleared_is_zero_wherever_it_is_done(clear: Clear, where: str) -> None:
    _, monitor = train(clear, where)
    assert not any(looks(monitor).values()) and alarms(monitor) == []
    assert bool(looks(monitor)) == (clear is not CLEARS["to None"])  # which leaves nothing to look at


@pytest.mark.parametrize("clip", [None, 1.0, 0.05])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_what_is_never_cleared_is_named(clip: float | None, make: Callable[..., Optimizer]) -> None:
    """Also where a clip keeps the norm from growing, and new gradients are longer than what is left of the old ones."""
    _, monitor = train(None, clip=clip, make=make)
    assert min(looks(monitor).values()) > 0 and alarms(monitor) == [("zero-grad-missing", 1)]


@pytest.mark.parametrize(("kind", "earliest"), [("to None", 20), ("in place", 13)])
def test_since_when_it_is_no_longer_cleared(kind: str, earliest: int) -> None:
    """Where it was cleared in place it is looked at some steps apart."""
    _, monitor = train(CLEARS[kind], since=20)
    assert len(alarms(monitor)) == 1
    cause, since = alarms(monitor)[0]
    assert cause == "zero-grad-missing" and earliest <= since <= 20


def test_gradients_that_swing_are_named() -> None:
    """A least-squares fit, all data in one batch: with gradients that add up it swings, and nothing grows for long."""
    torch.manual_seed(0)
    x = torch.rand(64, 1)
    y, model = 3 * x + 1, nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with holter.watch(model, optimizer, run=False, machine=False) as monitor:
        for _ in range(100):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
    assert alarms(monitor) == [("zero-grad-missing", 1)]


def test_what_another_loss_adds_to_cleared_gradients_is_no_fault() -> None:
    """The generator's loss adds to the discriminator's gradients too; those are cleared before its own loss."""
    torch.manual_seed(0)
    both = nn.ModuleDict({"make": nn.Linear(4, 6), "judge": nn.Linear(6, 1)})
    makes, judges = (torch.optim.Adam(part.parameters(), lr=1e-3) for part in both.values())
    with holter.watch(both, [makes, judges], run=False, machine=False) as monitor:
        for _ in range(STEPS):
            made, real = both["make"](torch.randn(8, 4)), torch.randn(8, 6)
            judges.zero_grad(set_to_none=False)
            loss = F.softplus(both["judge"](made.detach())).mean() + F.softplus(-both["judge"](real)).mean()
            loss.backward()
            judges.step()
            makes.zero_grad(set_to_none=False)
            F.softplus(-both["judge"](made)).mean().backward()
            makes.step()
    assert looks(monitor) and not any(looks(monitor).values())
    assert "zero-grad-missing" not in [cause for cause, _ in alarms(monitor)]


@pytest.mark.parametrize("parts", [4, clearing._MOST_ADDITIONS + 1])
def test_micro_batches_add_to_what_the_first_one_found_cleared(parts: int) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with holter.watch(model, optimizer, run=False, machine=False) as monitor:
        for _ in range(STEPS):
            for _ in range(parts):
                (loss_of(model) / parts).backward()
            torch.autograd.grad(loss_of(model), list(model.parameters()))  # adds to nothing
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    assert alarms(monitor) == [] and not any(looks(monitor).values())
    assert bool(looks(monitor)) == (parts < clearing._MOST_ADDITIONS)


def test_a_closure_that_clears_is_no_fault() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = loss_of(model)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    with holter.watch(model, optimizer, run=False, machine=False) as monitor:
        for _ in range(12):
            optimizer.step(closure)
    assert alarms(monitor) == [] and not any(looks(monitor).values())


@pytest.mark.parametrize("clear", [None, CLEARS["in place"]])
def test_no_bit_is_changed(clear: Clear | None) -> None:
    bare, _ = train(clear, watched=False)
    bare_state = torch.get_rng_state()
    watched, monitor = train(clear)
    assert looks(monitor) and torch.equal(torch.get_rng_state(), bare_state)
    assert all(map(torch.equal, bare.parameters(), watched.parameters()))


def test_nothing_stays_on_the_parameters() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = holter.watch(model, optimizer, run=False, machine=False)
    for _ in range(4):
        loss_of(model).backward()
        optimizer.step()
    armed = [name for name, parameter in model.named_parameters() if parameter._backward_hooks]
    assert armed == ["2.bias"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of hooks that it does not store
        torch.save(model.state_dict(), io.BytesIO())
        assert b"holter" not in pickle.dumps(model[2])
        ForkingPickler.dumps(model[2].bias)  # as it is sent to another process
        assert all(one._backward_hooks is None for one in copy.deepcopy(model).parameters())
    monitor.close()
    assert all(parameter._backward_hooks is None for parameter in model.parameters())


def test_an_optimizer_that_is_gone_takes_its_hook_along() -> None:
    """A new one, as after every task or stage, is looked at however many there were before."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    with holter.watch(model, optimizer, run=False, machine=False) as monitor:
        for _ in range(2 * gradient_reads._MOST_CLEARINGS):
            for _ in range(4):
                loss_of(model).backward()
                optimizer.step()
            assert sum(len(one._backward_hooks or ()) for one in model.parameters()) == 1
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    assert max(looks(monitor)) >= 4 * 2 * gradient_reads._MOST_CLEARINGS - 2


def test_what_is_captured_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would become part of the user's CUDA graph, and run at each replay."""
    monkeypatch.setattr(clearing, "is_captured", lambda: True)
    assert looks(train(None)[1]) == {}


def test_a_look_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    bare, _ = train(None, watched=False)

    def fail(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("planted")

    monkeypatch.setattr(clearing.Clearing, "look", fail)
    watched, monitor = train(None)
    assert monitor is not None and all(map(torch.equal, bare.parameters(), watched.parameters()))
    assert looks(monitor) == {} and len(monitor.history) == STEPS
    assert "monitor-degraded" in [one.cause for one in monitor.findings]
