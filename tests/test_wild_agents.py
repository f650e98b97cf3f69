"""Agents: losses, targets and observations that change by design, and what is wrong all the same."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
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


class ActorAndCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pi, self.v = wild.mlp(4, 64, 64, 2, act=nn.Tanh), wild.mlp(4, 64, 64, 1, act=nn.Tanh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.pi(x), self.v(x)[:, 0]


def actor_and_critic() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
    """Two networks that read the same small observations; returns of 20 and more make the critic's gradients."""
    model = ActorAndCritic()
    optimizer = torch.optim.Adam(model.parameters(), 3e-4)

    def course() -> Iterator[wild.Logged]:
        while True:
            x = 0.05 * torch.randn(64, 4)
            logits, value = model(x)
            choice = torch.distributions.Categorical(logits=logits)
            action, returns = choice.sample(), 20 + 100 * x[:, 0]
            gain = (2.0 * action - 1) * x[:, 0] + 0.05 * torch.randn(64)
            gain = (gain - gain.mean()) / gain.std()
            loss = -(choice.log_prob(action) * gain).mean() + 0.5 * F.mse_loss(value, returns)
            yield wild.stepped(optimizer, loss, inputs=x)

    return model, optimizer, course()


class Coupling(nn.Module):
    """Moves and scales one half of its input by what the other half says."""

    def __init__(self, is_second: bool) -> None:
        super().__init__()
        self.net, self.is_second = wild.mlp(2, 64, 64, 4), is_second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)[:: -1 if self.is_second else 1]
        shift, log_scale = self.net(kept).chunk(2, 1)
        log_scale = 2 * torch.tanh(log_scale)
        both = [kept, (moved - shift) * log_scale.exp()]
        return torch.cat(both[:: -1 if self.is_second else 1], 1), log_scale.sum(1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling(place % 2 == 1) for place in range(6))

    def forward(self, x: Tensor) -> Tensor:
        """Return minus the log density."""
        log_volume = torch.zeros(())
        for layer in self.layers:
            x, added = layer(x)
            log_volume = log_volume + added
        return (0.5 * x.square()).sum(1) + 2 * math.log(2 * math.pi) - log_volume


def flow() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
    """A density of data that lie close together: to the layers examples are nearly alike, and the loss goes below 0."""
    model = Flow()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def course() -> Iterator[wild.Logged]:
        while True:
            z = torch.randn(128, 2)
            noise = 0.01 * torch.randn(128)
            x = torch.stack((0.1 * z[:, 0], 0.1 * z[:, 0] ** 2 + 0.02 * z[:, 1], 0.1 * z[:, 1], noise), 1)
            yield wild.stepped(optimizer, model(x).mean(), inputs=x)

    return model, optimizer, course()


def critic(rise: int, noise: float) -> Training:
    """What it is to say grows over so many steps, as returns do."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model = wild.mlp(4, 64, 64, 1, act=nn.Tanh)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)

        def course() -> Iterator[wild.Logged]:
            for step in itertools.count():
                x = torch.randn(32, 4)
                value = 20 * min(1, step / rise) + noise * x[:, :1]
                yield wild.stepped(optimizer, F.mse_loss(model(x), value), inputs=x)

        return model, optimizer, course()

    return begin


def test_a_critic_whose_values_are_far_from_zero_may_have_its_last_layer_at_its_bounds() -> None:
    """What comes before that still gets gradients of a fair size."""
    assert "saturated-activation" not in alarms(critic(100, 5.0), 200, activations=20)


def test_a_single_value_that_grows_needs_but_one_direction() -> None:
    assert alarms(critic(300, 1.0), 330, activations=20) == []


def test_a_critic_that_learns_faster_than_its_actor_is_no_deeper_layer() -> None:
    assert alarms(actor_and_critic, 60, seed=0) == []


def test_units_are_not_dead_where_examples_are_nearly_alike_and_the_loss_falls() -> None:
    assert alarms(flow, 80, seed=3, activations=8) == []


def policy(rate: float) -> Training:
    """A policy gradient with a running baseline: its loss lies around zero and says nothing of how well it does."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model = wild.mlp(4, 32, 32, 2, act=nn.Tanh)
        optimizer = torch.optim.Adam(model.parameters(), rate)

        def course() -> Iterator[wild.Logged]:
            usual = torch.zeros(())
            while True:
                x = torch.randn(64, 4)
                choice = torch.distributions.Categorical(logits=model(x))
                action = choice.sample()
                reward = (2.0 * action - 1) * x[:, 0].sign() + (x[:, 1] > 0)
                loss = -(choice.log_prob(action) * (reward - usual)).mean() - 0.01 * choice.entropy().mean()
                usual = 0.9 * usual + 0.1 * reward.mean()
                yield wild.stepped(optimizer, loss, inputs=x)

        return model, optimizer, course()

    return begin


@pytest.mark.parametrize(("rate", "found"), [(3e-3, []), (0.3, ["lr-too-high"])])
def test_a_rate_that_ends_a_policy_is_named_though_its_loss_says_nothing(rate: float, found: list[str]) -> None:
    assert alarms(policy(rate), 120, seed=0) == found
