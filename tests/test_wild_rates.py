"""Optimizers whose rate means something else, first steps that go astray, and gradients that are not cleared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, RMSprop

import holter
from holter.diagnosis.causes import divergence
from holter.diagnosis.doctor import Doctor
from holter.record import Record
from tests import odd_trainings as wild
from tests.odd_trainings import Training, alarms, regression
from tests.test_chart import rows


def _line(model: nn.Linear, weight: float, rate: float = 1e-2) -> tuple[nn.Module, Adam, Iterator[wild.Logged]]:
    """Learnt slowly: at first the loss goes up and down with what is in the batches."""
    nn.init.constant_(model.weight, weight)
    optimizer = Adam(model.parameters(), rate)

    def course() -> Iterator[wild.Logged]:
        while True:
            x = torch.randn(32, model.in_features)
            yield wild.stepped(optimizer, F.mse_loss(model(x), 3 * x[:, :1]), inputs=x)

    return model, optimizer, course()


class Blocks(nn.Module):
    """Each explains a part of what those before it have left, and all forecasts are added up, as in N-BEATS."""

    def __init__(self, count: int = 32, past: int = 24, width: int = 64, future: int = 6) -> None:
        super().__init__()
        self.past = past
        self.blocks = nn.ModuleList(wild.mlp(past, width, width, width, past + future) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(())
        for block in self.blocks:
            out = block(x)
            x, total = x - out[:, : self.past], total + out[:, self.past :]
        return total


def _forecasts() -> tuple[nn.Module, Adam, Iterator[wild.Logged]]:
    """Its first steps are a few hundredths of the weights, in all blocks at once: the loss leaps, and soon is low."""
    model = Blocks()
    optimizer = Adam(model.parameters(), 7e-3)

    def course() -> Iterator[wild.Logged]:
        while True:
            time = torch.arange(30) + 30 * torch.rand(64, 1)
            series = torch.randn(64, 1) + (time / 2).sin() + 0.2 * torch.randn(64, 30)
            yield wild.stepped(optimizer, F.mse_loss(model(series[:, :24]), series[:, 24:]))

    return model, optimizer, course()


def _overshoots() -> tuple[nn.Module, Adam, Iterator[wild.Logged]]:
    """One weight, near its best value: what a step of this rate does to it no warm-up would change."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 0.5)
    optimizer = Adam(model.parameters(), 0.3)

    def course() -> Iterator[wild.Logged]:
        while True:
            x = torch.randn(64, 1)
            yield wild.stepped(optimizer, F.mse_loss(model(x), 0.55 * x + 0.01 * torch.randn(64, 1)))

    return model, optimizer, course()


SOUND: dict[str, tuple[Training, int]] = {
    "forecasts of many blocks that are added up": (_forecasts, 45),
    "one weight that overshoots": (_overshoots, 60),
    "a first step that goes a little too far": (regression(optimizer=lambda p: Adam(p, 3e-2)), 60),
    "Adadelta at its own rate": (regression(optimizer=torch.optim.Adadelta), 60),
    "an optimizer that finds its rate": (regression(optimizer=lambda p: wild.Prodigy(p, 1.0, d=1e-6)), 60),
    "steps that are shares of their weights": (
        regression(lambda p, y: 1e-6 * F.mse_loss(p, y), lambda p: wild.Lamb(p, 1e-2, eps=1e-6)),
        60,
    ),
    "RMSprop as Inception is trained, with an eps of 1": (
        regression(F.cross_entropy, lambda p: RMSprop(p, 0.045, eps=1.0, momentum=0.9), wild.classes, outputs=4),
        60,
    ),
    "a large eps whose rate fits, to the end": (regression(optimizer=lambda p: Adam(p, 0.1, eps=0.1)), 200),
    "units that nothing uses": (regression(lambda p, y: F.mse_loss(p[:, :1], y), outputs=400), 60),
    "one weight, near zero": (lambda: _line(nn.Linear(1, 1, bias=False), 0.02), 30),
    "one example a step": (regression(optimizer=lambda p: SGD(p, 1e-2), size=1), 120),
    "two examples a step, of classes": (
        regression(F.cross_entropy, lambda p: Adam(p, 3e-3), wild.classes, outputs=4, size=2),
        120,
    ),
}


@pytest.mark.parametrize("name", SOUND)
def test_an_odd_rate_that_is_right_is_left_alone(name: str) -> None:
    training, steps = SOUND[name]
    assert alarms(training, steps) == []


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_that_are_not_cleared_are_told_from_those_that_agree(clears: bool) -> None:
    """They lie in the tensors of the step before."""
    found = alarms(regression(F.cross_entropy, _adam, wild.classes, outputs=4, clears=clears), 40, updates=1)
    assert found[:1] == ([] if clears else ["zero-grad-missing"])


def _adam(parameters: object) -> torch.optim.Optimizer:
    return Adam(parameters, 1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("training", "cause"),
    [
        (regression(optimizer=lambda p: wild.Lamb(p, 1.0)), "lr-too-high"),
        (regression(optimizer=lambda p: wild.RunawayProdigy(p, 1.0, d=1e-4)), "lr-too-high"),
        (regression(optimizer=lambda p: Adam(p, 0.5)), "lr-too-high"),
        (lambda: _line(nn.Linear(1, 1, bias=False), 0.0, 30.0), "lr-too-high"),
        (regression(optimizer=lambda p: Adam(p, 3e-3, eps=1.0)), "adam-eps-dominates"),
        (regression(optimizer=lambda p: RMSprop(p, 3e-3, eps=1.0)), "adam-eps-dominates"),
    ],
)
def test_what_is_wrong_with_a_rate_is_still_named(training: Training, cause: str) -> None:
    assert alarms(training, 60)[:1] == [cause]


@pytest.mark.parametrize(
    ("losses", "severities"),
    [
        ([0.5, 24.0, *np.geomspace(0.1, 1e-4, 28)], []),  # as L-BFGS without a line search, in torch's own example
        ([0.5, 24.0, *np.geomspace(0.1, 1e-4, 10)], []),
        ([0.5, 24.0, *[0.45] * 28], ["critical"]),
        ([0.5, *[24.0] * 8, *np.geomspace(0.1, 1e-4, 50)], ["warning"]),
    ],
)
def test_a_stumble_after_which_all_is_learnt_is_no_rate_that_is_too_high(
    losses: list[float], severities: list[str]
) -> None:
    layers = ("a.weight", "b.weight")
    doctor = Doctor({"layers": [{"name": name, "shape": [8, 8]} for name in layers]}, [divergence.too_high])
    for step, loss in enumerate(losses):
        told = {"update": rows(layers, ratio=1.2 if step < 4 else 0.03, weight_norm=2.0)}
        doctor.take(Record(step, float(step), {"loss": float(loss), "learning_rate": 0.8}, told))
    doctor.finish()
    assert [finding.severity for finding in doctor.findings] == severities


def test_units_that_the_loss_can_do_without_are_a_note() -> None:
    """All but a few of a layer's units die, and the loss comes down to a hundredth of what it was."""

    def training() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model, optimizer, course = regression(optimizer=lambda p: Adam(p, 1e-2))()

        def changed() -> Iterator[wild.Logged]:
            for step, logged in enumerate(course):
                if step == 2:
                    with torch.no_grad():
                        model.get_parameter("2.bias")[:58].sub_(30)
                yield logged

        return model, optimizer, changed()

    assert "dead-relu" not in alarms(training, 100)


def _not_cleared(path: Path) -> holter.Run:
    """A reader of digits by Adam, whose gradients pile up; the loss falls, and rises again."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images).float() / 16, torch.tensor(labels)
    torch.manual_seed(0)
    model = wild.mlp(64, 128, 128, 10)
    optimizer = Adam(model.parameters(), 1e-3)
    with holter.watch(model, optimizer, run=path) as monitor:
        for _ in range(200):
            chosen = torch.randint(len(y), (64,))
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss, inputs=x[chosen], targets=y[chosen])
    return holter.open_run(path)


@pytest.mark.parametrize(("is_late", "first"), [(False, 0), (True, 0), (False, 20), (True, 50)])
def test_gradients_that_pile_up_lead_whenever_the_diagnosis_comes(tmp_path: Path, is_late: bool, first: int) -> None:
    """What the loss does meanwhile, even back at a guess, is no trouble of its own. A doctor that could not keep up
    begins with the present."""
    run = _not_cleared(tmp_path / "run")
    doctor = Doctor(run.info)
    doctor.is_late = is_late
    for record in run.records:
        if record.step >= first:
            doctor.take(record)
    doctor.finish()
    assert [one.cause for one in doctor.findings if one.severity != "info"] == ["zero-grad-missing"]
