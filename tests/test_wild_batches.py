"""Batches that come again, and labels: what is meant, and what is not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam

from tests import odd_trainings as wild
from tests.odd_trainings import alarms, regression


@pytest.mark.parametrize(
    ("size", "batch_of", "found"),
    [
        (16, lambda step: 0, ["batch-repeated"]),  # as small as those of a loader, learnt by heart
        (64, lambda step: min(step, 2), ["batch-repeated"]),
        (100, lambda step: 0, []),  # the whole data
        (64, lambda step: step % 2, []),  # an epoch of two batches
        (64, lambda step: step // 12, []),  # a few steps on each, as on the samples of a policy
    ],
)
def test_one_batch_again_and_again_is_told_within_fifty_steps(size: int, batch_of: object, found: list[str]) -> None:
    training = regression(batch_of=batch_of, size=size)  # type: ignore[arg-type]
    assert alarms(training, 40) == found


@pytest.mark.parametrize("size", [32, 100])
def test_that_there_was_never_another_batch_is_a_note_where_it_may_be_all_the_data(size: int) -> None:
    found = wild.findings(regression(batch_of=lambda step: 0, size=size), 140)
    assert [(one.cause, one.severity, one.since) for one in found] == [("batch-repeated", "info", 0)]
    assert found[0].step < 50 and found[0].until is None


def test_a_note_leads_nothing_that_is_worse() -> None:
    found = wild.findings(regression(batch_of=lambda step: 0, size=64, optimizer=lambda p: Adam(p, 0.5)), 60)
    assert found[0].cause == "lr-too-high" and "batch-repeated" in found[0].alternatives


def test_a_new_stage_of_a_curriculum_is_no_fault() -> None:
    stage = {"step": 0}

    def loss_of(p: wild.Tensor, y: wild.Tensor) -> wild.Tensor:
        stage["step"] += 1
        return F.cross_entropy(p, y)

    def labels(x: wild.Tensor, score: wild.Tensor) -> wild.Tensor:
        return x[:, : 2 if stage["step"] < 100 else 4].argmax(1)

    assert alarms(regression(loss_of, targets_of=labels, outputs=4), 180) == []


def test_weights_that_are_changed_by_hand_are_not_taken_for_labels() -> None:
    """The loss is thrown back, too, but weights and activations are others in the very step."""

    def training() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model, optimizer, course = regression(
            F.cross_entropy, lambda parameters: Adam(parameters, 1e-3), wild.classes, outputs=4
        )()

        def changed() -> Iterator[wild.Logged]:
            for step, logged in enumerate(course):
                if step == 79:
                    with torch.no_grad():
                        model.get_parameter("2.bias").sub_(1.5)
                        model.get_parameter("4.weight").mul_(-0.3)
                yield logged

        return model, optimizer, changed()

    options = {"weights": 1, "activations": 1, "updates": 1}
    assert "labels-corrupt" not in alarms(training, 112, **options)


def test_a_bias_that_was_changed_between_two_looks_is_not_taken_for_labels() -> None:
    """The loss is thrown back to a guess at once, and inputs and rate are as before; the model learns anew."""

    def training() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model = wild.mlp(8, 64, 64, 64, 64, 4, act=lambda: nn.LeakyReLU(0.1))
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

        def course() -> Iterator[wild.Logged]:
            for step in itertools.count():
                x = torch.randn(32, 8)
                y = x[:, :4].argmax(1)
                yield wild.stepped(optimizer, F.cross_entropy(model(x), y), inputs=x, targets=y)
                if step == 121:
                    with torch.no_grad():
                        model.get_parameter("4.bias").sub_(21)

        return model, optimizer, course()

    assert "labels-corrupt" not in alarms(training, 170)
