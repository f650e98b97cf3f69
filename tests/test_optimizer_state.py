"""What an optimizer remembers: moments, step counter and settings against the state itself, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holter
from holter.optimizer_state import OptimizerRoles
from holter.samples import MOST
from tests.test_updates import MODELS

SECOND: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], str, str | None]] = {
    "Adam": (lambda p: torch.optim.Adam(p, lr=1e-3), "exp_avg_sq", "exp_avg"),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.3, betas=(0.8, 0.95)), "exp_avg_sq", "exp_avg"),
    "RMSprop": (lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5), "square_avg", "momentum_buffer"),
    "Adagrad": (lambda p: torch.optim.Adagrad(p, lr=1e-2), "sum", None),
}
STEPS = 5


def train(
    name: str, make: Callable[[Any], torch.optim.Optimizer], **options: Any
) -> tuple[holter.Monitor, nn.Module, torch.optim.Optimizer]:
    """A few steps; gradients and state are left as after the last one."""
    model, loss_of = MODELS[name]()
    optimizer = make(model.parameters())
    options = {"optimizer_state": 1, "budget": None, **options}
    with holter.watch(model, optimizer, run=False, **options) as monitor:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(step).backward()
            optimizer.step()
        _ = monitor.history
    return monitor, model, optimizer


@pytest.mark.parametrize("kind", SECOND)
@pytest.mark.parametrize("name", MODELS)
def test_moments_are_those_of_the_state(name: str, kind: str) -> None:
    make, second, first = SECOND[kind]
    monitor, model, optimizer = train(name, make)
    assert monitor.findings == ()
    for role, key in (("momentum", first), ("second_moment", second)):
        steps, layers, norms = monitor.history.series(role, "norm")
        if key is None:
            assert layers == ()
            continue
        assert steps[-1] == STEPS - 1 and set(layers) == {n for n, _ in model.named_parameters()}
        for layer, parameter in model.named_parameters():
            exact = optimizer.state[parameter][key].double().norm().item()
            assert norms[-1, layers.index(layer)] == pytest.approx(exact, rel=1e-6, abs=1e-30), (role, layer)


@pytest.mark.parametrize("kind", SECOND)
@pytest.mark.parametrize("name", MODELS)
def test_the_gradient_is_measured_by_the_second_moment(name: str, kind: str) -> None:
    """RMS of g / sqrt(v), v without its zero beginning; exact for small tensors, in a sample of large ones."""
    make, second, _ = SECOND[kind]
    monitor, model, optimizer = train(name, make)
    _, layers, ratios = monitor.history.series("second_moment", "rms_ratio")
    group = optimizer.param_groups[0]
    for layer, parameter in model.named_parameters():
        v = optimizer.state[parameter][second].double()
        v = v / (1 - group["betas"][1] ** STEPS) if "betas" in group else v
        assert parameter.grad is not None
        squares = parameter.grad.double() ** 2 / v.clamp(min=group["eps"] ** 2)
        error = 1e-5
        if parameter.numel() > MOST:
            error = 4 * (squares.std() / squares.mean()).item() / math.sqrt(0.75 * MOST) / 2
        assert ratios[-1, layers.index(layer)] == pytest.approx(squares.mean().sqrt().item(), rel=error), layer


def test_a_steady_gradient_has_a_ratio_of_one() -> None:
    """The figure that everything else is compared with: without the correction it would begin far above it."""
    model = nn.Linear(10, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    with holter.watch(model, optimizer, run=False, optimizer_state=1, budget=None) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(1, 10)).sum().backward()
            optimizer.step()
    assert monitor.history.series("second_moment", "rms_ratio")[2] == pytest.approx(1.0, rel=1e-5)


def test_the_share_below_eps() -> None:
    model = nn.Linear(8, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
    with holter.watch(model, optimizer, run=False, optimizer_state=1, budget=None) as monitor:
        model(torch.tensor([[1e-5, 1e-4, 9e-4, 1.1e-3, 1.0, 1.0, 1.0, 0.0]])).sum().backward()
        optimizer.step()
    assert monitor.history.series("second_moment", "below_eps")[2].tolist() == [[0.5]]


def test_rates_decay_and_steps_of_every_group() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = [
        {"params": model[0].parameters(), "lr": 0.1, "weight_decay": 0.5},
        {"params": model[1].parameters(), "lr": 0.01, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    with holter.watch(model, optimizer, run=False) as monitor:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        scalar = monitor.history.scalar
    assert scalar("learning_rate")[1].tolist() == [0.1] * 3 and scalar("learning_rate/1")[1].tolist() == [0.01] * 3
    assert scalar("weight_decay")[1].tolist() == [0.5] * 3 and scalar("weight_decay/1")[1].tolist() == [0.0] * 3
    assert scalar("optimizer_step")[1].tolist() == [1, 2, 3]


def test_a_state_that_was_lost_is_seen_in_the_counter() -> None:
    """As after a resume without the optimizer's state."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters())
    with holter.watch(model, optimizer, run=False) as monitor:
        for step in range(5):
            if step == 3:
                optimizer.state.clear()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert monitor.history.scalar("optimizer_step")[1].tolist() == [1, 2, 3, 1, 2]


def test_what_is_trained_and_what_is_held() -> None:
    """A frozen layer, one that the optimizer does not have, and one that it has."""
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in ("frozen", "forgotten", "trained")})
    model["frozen"].requires_grad_(False)
    optimizer = torch.optim.SGD([*model["frozen"].parameters(), *model["trained"].parameters()], lr=0.1)
    with holter.watch(model, optimizer, run=False) as monitor:
        x = torch.ones(1, 4)
        for layer in model.values():
            x = layer(x)
        x.sum().backward()
        optimizer.step()
    _, layers, trained = monitor.history.series("weight", "requires_grad")
    _, _, held = monitor.history.series("weight", "held")
    found = {layer: (trained[0, place], held[0, place]) for place, layer in enumerate(layers)}
    assert found == {"frozen.weight": (0, 1), "forgotten.weight": (1, 0), "trained.weight": (1, 1)}


def test_two_optimizers_that_take_turns_are_both_seen() -> None:
    """With an even pace one of them would never be."""
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    optimizers = [torch.optim.Adam(model[name].parameters()) for name in ("a", "b")]
    with holter.watch(model, optimizers, run=False, updates=2, optimizer_state=2, budget=None) as monitor:
        for _ in range(6):
            for name, optimizer in zip(("a", "b"), optimizers, strict=True):
                model[name](torch.ones(1, 4)).sum().backward()
                optimizer.step()
        history = monitor.history
    for role in ("update", "momentum", "second_moment"):
        _, layers, norms = history.series(role, "norm")
        for layer in ("a.weight", "b.weight"):
            assert np.isfinite(norms[:, layers.index(layer)]).sum() >= 2, (role, layer)


@pytest.mark.parametrize(
    "state", [{"exp_avg": 3}, {"exp_avg": torch.ones(2)}, {"exp_avg_sq": None, "step": "three"}, {1: torch.ones(4, 4)}]
)
def test_a_state_of_another_kind_is_left_alone(state: dict[Any, Any]) -> None:
    class Odd(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].update(state)

    model = nn.Linear(4, 4)
    optimizer = Odd(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=False, optimizer_state=1, budget=None) as monitor:
        for _ in range(3):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert "momentum" not in monitor.history.roles and "second_moment" not in monitor.history.roles
    assert monitor.findings == ()


def test_gradients_that_are_gone_after_the_step_leave_the_rest() -> None:
    class Clearing(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            super().step()
            self.zero_grad()

    model = nn.Linear(4, 4)
    optimizer = Clearing(model.parameters())
    with holter.watch(model, optimizer, run=False, optimizer_state=1, budget=None) as monitor:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        history = monitor.history
    assert np.isnan(history.series("second_moment", "rms_ratio")[2]).all()
    assert (history.series("second_moment", "below_eps")[2] == 0).all()
    assert monitor.findings == ()


def test_a_state_of_another_layout_in_memory_is_compared_number_by_number() -> None:
    """As where the model is given channels_last and the state was loaded, or is older than that."""
    torch.manual_seed(0)
    model, images = nn.Conv2d(8, 16, 3, bias=False), torch.randn(4, 8, 8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    model(images).square().sum().backward()
    optimizer.step()
    model.to(memory_format=torch.channels_last).zero_grad()
    with holter.watch(model, optimizer, run=False, optimizer_state=1, budget=None) as monitor:
        model(images).square().sum().backward()
        optimizer.step()
        found = monitor.history.series("second_moment", "rms_ratio")[2]
    second, gradient = optimizer.state[model.weight]["exp_avg_sq"], model.weight.grad
    assert gradient is not None and gradient.stride() != second.stride()
    expected = (gradient.double().square() / (second.double() / (1 - 0.999**2))).mean().sqrt().item()
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_none_switches_it_off() -> None:
    monitor, _, _ = train("mlp", lambda p: torch.optim.Adam(p), optimizer_state=None)
    assert "second_moment" not in monitor.history.roles
    with pytest.raises(ValueError, match="optimizer_state=0"):
        holter.watch(nn.Linear(1, 1), torch.optim.SGD([Tensor([1.0])]), optimizer_state=0)


def test_moments_have_histograms_at_their_pace() -> None:
    monitor, model, optimizer = train("mlp", lambda p: torch.optim.Adam(p), histograms={"second_moment": 1})
    steps, histograms = monitor.history.histogram("second_moment", "0.weight")
    assert steps.tolist() == list(range(STEPS))
    v = optimizer.state[model[0].weight]["exp_avg_sq"]
    assert histograms[-1].quantile(0.5) == pytest.approx(v.double().median().item(), rel=0.15)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_an_optimizer_does_not_keep_is_looked_for_at_its_pace(
    momentum: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: a walk through ten thousand parameters takes tens of milliseconds."""
    walks, kept_by = [0], OptimizerRoles._kept

    def counted(self: OptimizerRoles, optimizer: torch.optim.Optimizer) -> Any:
        walks[0] += 1
        return kept_by(self, optimizer)

    monkeypatch.setattr(OptimizerRoles, "_kept", counted)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
    with holter.watch(model, optimizer, run=False, budget=None, optimizer_state=20) as monitor:
        for step in range(100):
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(step=step)
    assert walks[0] <= 2 * (100 / 20 + 1)
