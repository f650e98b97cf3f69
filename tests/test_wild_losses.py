"""Losses of all kinds: what is negative, near zero or a sum by design is left alone, what is so by mistake is named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

from holter.diagnosis.health import check_health
from holter.history import History
from holter.record import Record
from tests import odd_trainings as wild
from tests.odd_trainings import Training, alarms, regression


def minus_entropy(p: Tensor, y: Tensor) -> Tensor:
    return -torch.distributions.Categorical(logits=p).entropy().mean()


def punished(p: Tensor, y: Tensor) -> Tensor:
    policy = torch.distributions.Categorical(logits=p)
    return policy.log_prob(policy.sample()).mean()


def by_hand(p: Tensor, y: Tensor) -> Tensor:
    """Of outputs that are probabilities, as textbooks have it."""
    return -p[range(len(y)), y].log().mean()


def guesser(loss: wild.Losses, outputs: int = 10) -> Training:
    """Puts out probabilities, and learns so slowly that its loss stays near a guess."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model, weights = nn.Sequential(nn.Linear(8, outputs), nn.Softmax(1)), torch.randn(8, outputs)
        optimizer = SGD(model.parameters(), 0.02)

        def course() -> Iterator[wild.Logged]:
            while True:
                x = torch.randn(64, 8) / 4
                y = (x @ weights).argmax(1)
                yield wild.stepped(optimizer, loss(model(x), y), inputs=x, targets=y)

        return model, optimizer, course()

    return begin


def weighted(p: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(p, y, pos_weight=torch.tensor(99.0))


SOUND: dict[str, tuple[Training, int]] = {
    "a likelihood that sinks below zero": (wild.gaussian_likelihood, 90),
    "a marginal likelihood, by LBFGS": (wild.gaussian_process, 30),
    "minus a cosine": (wild.similarity, 60),
    "minus an overlap": (wild.overlap, 80),
    "minus a value that rises": (wild.actor, 160),
    "a critic of distances": (wild.wasserstein_critic, 80),
    "minus a reward, around zero": (regression(lambda p, y: -(p.tanh() * y).mean(), logs=("inputs",)), 60),
    "ways in time, summed": (wild.spoken, 12),
    "pixels, summed": (wild.autoencoder, 40),
    "all examples there are, summed": (
        regression(lambda p, y: 50 * ((p - y) ** 2).mean(), batch_of=lambda step: 0, size=100),
        20,
    ),
    "a loss of several terms, near eight guesses": (
        regression(lambda p, y: 6.6 * F.cross_entropy(p, y), targets_of=wild.classes, outputs=4, size=8),
        30,
    ),
    "a logarithm of probabilities": (guesser(by_hand), 120),
    "a logarithm of probabilities of three": (guesser(by_hand, 3), 40),
    "flags of which one in a batch is set, and counts for many": (
        regression(weighted, targets_of=lambda x, s: (s >= s.max()).float()),
        20,
    ),
    "an entropy that is to rise": (regression(minus_entropy, outputs=4, logs=("inputs",)), 120),
    "a policy whose every reward is -1": (regression(punished, outputs=4, logs=()), 240),
    "counts, below zero": (regression(F.poisson_nll_loss, targets_of=lambda x, s: (s + 1.5).exp().round()), 60),
}


@pytest.mark.parametrize("name", SOUND)
def test_a_loss_that_is_so_by_design_is_left_alone(name: str) -> None:
    training, steps = SOUND[name]
    assert alarms(training, steps) == []


def minus(loss: wild.Losses) -> wild.Losses:
    return lambda p, y: -loss(p, y)


def two_classes(p: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(p, y)


def summed(p: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(p, y, reduction="sum")


@pytest.mark.parametrize(
    ("training", "steps", "cause"),
    [
        (regression(minus(F.mse_loss)), 60, "loss-sign"),
        (regression(minus(F.mse_loss), logs=("inputs",)), 100, "loss-sign"),
        (regression(minus(F.cross_entropy), targets_of=wild.classes, outputs=4), 60, "loss-sign"),
        (regression(minus(F.cross_entropy), targets_of=wild.classes, outputs=4, logs=()), 180, "loss-sign"),
        (regression(minus(two_classes), targets_of=lambda x, s: (s > 0).float()), 180, "loss-sign"),
        (guesser(F.cross_entropy), 60, "double-softmax"),
        (guesser(F.cross_entropy, 3), 60, "double-softmax"),
        (regression(summed), 12, "loss-reduction"),
        (
            regression(
                lambda p, y: F.binary_cross_entropy_with_logits(p, y, reduction="sum"),
                targets_of=lambda x, s: (s > 0).float(),
            ),
            12,
            "loss-reduction",
        ),
        (
            regression(
                lambda p, y: F.cross_entropy(p, y, reduction="sum"),
                lambda parameters: SGD(parameters, 1e-3),
                wild.classes,
                outputs=4,
            ),
            12,
            "loss-reduction",
        ),
        (
            regression(
                lambda p, y: F.cross_entropy(p, y, reduction="sum"),
                lambda parameters: SGD(parameters, 1e-3),
                wild.classes,
                outputs=4,
                size=8,
            ),
            12,
            "loss-reduction",
        ),
    ],
)
def test_what_is_wrong_with_a_loss_is_still_named(training: Training, steps: int, cause: str) -> None:
    assert alarms(training, steps)[:1] == [cause]


def test_a_loss_around_zero_has_no_spikes() -> None:
    """As of a policy gradient: 1e-8 wherever the data is new, and a multiple of that says nothing."""
    losses = [1e-8 if step % 4 else (0.1 if step % 8 else -0.1) - step / 500 for step in range(60)]
    history = History(tuple(Record(step, 0.0, {"loss": loss}) for step, loss in enumerate(losses)))
    checks = {check.name: check for check in check_health(history)}
    assert checks["the loss falls, without spikes"].text.endswith("largest spike 1×")


def test_a_loss_that_creeps_up_a_thousandfold_is_told_though_no_cause_is_known() -> None:
    """Each is but a little above the one before, and the weights keep their size."""

    def training() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model, optimizer, course = regression(optimizer=lambda p: SGD(p, 3e-3))()
        return model, optimizer, (log | {"loss": log["loss"].detach() * 1.05**step} for step, log in enumerate(course))

    found = wild.findings(training, 220)
    assert [(one.cause, one.severity) for one in found] == [("unknown", "warning")]
    assert found[0].since < 90 and "step" in found[0].advice
