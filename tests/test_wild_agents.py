"""Agents: losses, targets and observations that change by design, and what is wrong all the same."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import odd_trainings as wild
from tests.odd_trainings import Training, alarms

SOUND: dict[str, tuple[Training, int]] = {
    "a surrogate that begins at zero": (wild.surrogate, 60),
    "values that run after their own targets": (wild.q_learning(), 120),
    "values, with targets that follow quickly": (wild.q_learning(5e-4, 0.99, 10), 120),
    "a buffer that fills": (wild.growing_buffer, 260),
}


@pytest.mark.parametrize("updates", [1, 10])
@pytest.mark.parametrize("name", SOUND)
def test_a_sound_agent_is_left_alone(name: str, updates: int) -> None:
    training, steps = SOUND[name]
    assert alarms(training, steps, updates=updates) == []


def test_values_that_diverge_have_nothing_to_do_with_zero_grad_clips_or_logits() -> None:
    found = alarms(wild.q_learning(later=1.2, targets_every=1), 200, updates=1)
    assert {"zero-grad-missing", "clipping-too-tight", "output-logit-drift"}.isdisjoint(found)


def test_a_rate_a_hundred_times_too_high_is_what_made_the_units_dead() -> None:
    assert alarms(wild.q_learning(rate=0.1), 60)[:1] == ["lr-too-high"]


def test_values_that_have_grown_a_thousandfold_are_told() -> None:
    """Little by little, so that no step of it is unusual."""
    assert alarms(wild.q_learning(5e-3, later=1.2, targets_every=1), 240)[:1] == ["lr-too-high"]


def test_a_critic_whose_values_are_far_from_zero_may_have_its_last_layer_at_its_bounds() -> None:
    """What comes before that still gets gradients of a fair size."""

    def critic() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model = wild.mlp(4, 64, 64, 1, act=nn.Tanh)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)

        def course() -> Iterator[wild.Logged]:
            for step in itertools.count():
                x = torch.randn(32, 4)
                value = 20 * min(1, step / 100) + 5 * x[:, :1]
                yield wild.stepped(optimizer, F.mse_loss(model(x), value), inputs=x)

        return model, optimizer, course()

    assert "saturated-activation" not in alarms(critic, 200, activations=20)
