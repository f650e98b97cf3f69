"""torchrl: its loss modules in loops by hand."""

from __future__ import annotations

from typing import Any

import torch
import torchrl.objectives  # noqa: F401  # once, before the trainings are forked
from torch import Tensor, nn
from torch.optim import Adam

from zoo.trainee import Trainee
from zoo.training import Training


def play_pendulum(actor: nn.Module, episodes: int = 8, length: int = 64) -> Any:
    """Return transitions of a damped pendulum that is rewarded for standing upright."""
    from tensordict import TensorDict

    angle, speed = (torch.rand(episodes) - 0.5) * 2, torch.zeros(episodes)
    steps = []
    for index in range(length):
        now = TensorDict({"observation": torch.stack([angle.cos(), angle.sin(), speed], 1)}, [episodes])
        with torch.no_grad():
            now = actor(now)
        speed = 0.98 * speed + 0.05 * (now["action"].squeeze(1) + 3 * angle.sin())
        angle = angle + 0.05 * speed
        ended = torch.full((episodes, 1), index == length - 1)
        reward = (angle.cos() - 0.01 * speed**2).unsqueeze(1)
        observation = torch.stack([angle.cos(), angle.sin(), speed], 1)
        then = {"observation": observation, "reward": reward, "done": ended, "terminated": torch.zeros_like(ended)}
        steps.append(now.update({"next": TensorDict(then, [episodes])}))
    return torch.stack(steps, 1)


def train_ppo(trainee: Trainee) -> nn.Module:
    from tensordict.nn import TensorDictModule
    from tensordict.nn.distributions import NormalParamExtractor
    from torchrl.modules import MLP, ProbabilisticActor, TanhNormal, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    net = nn.Sequential(MLP(3, 2, num_cells=[64, 64], activation_class=nn.Tanh), NormalParamExtractor())
    actor = ProbabilisticActor(
        TensorDictModule(net, ["observation"], ["loc", "scale"]),
        ["loc", "scale"],
        distribution_class=TanhNormal,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(3, 1, num_cells=[64, 64], activation_class=nn.Tanh), ["observation"])
    advantage = GAE(gamma=0.98, lmbda=0.95, value_network=critic)
    criterion = ClipPPOLoss(actor, critic, entropy_coeff=1e-3)
    optimizer = Adam(criterion.parameters(), lr=1e-3)
    monitor = trainee.watch(criterion, optimizer)
    for _ in range(6):
        data = play_pendulum(actor)
        with torch.no_grad():
            advantage(data)
        data = data.reshape(-1)
        for part in torch.randperm(len(data)).split(64):
            losses = criterion(data[part])
            loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
            loss.backward()
            nn.utils.clip_grad_norm_(criterion.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss, inputs=data[part]["observation"])
    return criterion


def walk(steps: int) -> dict[str, Tensor]:
    """Return random transitions on a line of ten places; the last place pays 1 and ends the walk."""
    place = torch.randint(0, 9, (steps,))
    action = torch.randint(0, 2, (steps,))
    after = (place + 2 * action - 1).clamp(0, 9)
    return {"place": place, "action": action, "after": after, "reward": (after == 9).float()}


def train_dqn(trainee: Trainee) -> nn.Module:
    from tensordict import TensorDict
    from torchrl.data import OneHot
    from torchrl.modules import MLP, QValueActor
    from torchrl.objectives import DQNLoss, SoftUpdate

    actor = QValueActor(MLP(10, 2, num_cells=[64, 64]), in_keys=["observation"], spec=OneHot(2))
    criterion = DQNLoss(actor, action_space="one-hot", delay_value=True)
    criterion.make_value_estimator(gamma=0.9)
    update_target = SoftUpdate(criterion, eps=0.9)
    optimizer = Adam(criterion.parameters(), lr=3e-3)
    monitor = trainee.watch(criterion, optimizer)
    one_hot: Any = nn.functional.one_hot
    for _ in range(80):
        drawn = walk(64)
        ended = (drawn["after"] == 9).unsqueeze(1)
        then = {
            "observation": one_hot(drawn["after"], 10).float(),
            "reward": drawn["reward"].unsqueeze(1),
            "done": ended,
            "terminated": ended,
        }
        now = {"observation": one_hot(drawn["place"], 10).float(), "action": one_hot(drawn["action"], 2)}
        loss = criterion(TensorDict({**now, "next": TensorDict(then, [64])}, [64]))["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_target.step()
        monitor.log(loss=loss, inputs=now["observation"])
    return criterion


TRAININGS = (
    Training("torchrl/ppo", train_ppo, 48),
    Training("torchrl/dqn", train_dqn, 80),
)
