"""stable-baselines3: its agents on gymnasium's classic control."""

from __future__ import annotations

from typing import Any

import stable_baselines3  # noqa: F401  # once, before the trainings are forked
from torch import nn

from zoo.trainee import Trainee
from zoo.training import Fault, Training


def learn(agent: Any, optimizers: Any, timesteps: int, trainee: Trainee) -> nn.Module:
    """Hand the losses of the last update on to the monitor before each rollout."""
    from stable_baselines3.common.callbacks import BaseCallback

    monitor = trainee.watch(agent.policy, optimizers)

    class LogLosses(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            values = self.logger.name_to_value
            monitor.log(**{key.split("/")[1]: value for key, value in values.items() if key.endswith("loss")})

    agent.learn(timesteps, callback=LogLosses())
    policy: nn.Module = agent.policy
    return policy


def train_ppo(trainee: Trainee) -> nn.Module:
    from stable_baselines3 import PPO

    agent = PPO(
        "MlpPolicy", "CartPole-v1", n_steps=256, batch_size=64, n_epochs=4, learning_rate=1e-3, seed=0, device="cpu"
    )
    return learn(agent, agent.policy.optimizer, 1280, trainee)


def train_a2c(trainee: Trainee) -> nn.Module:
    from stable_baselines3 import A2C

    agent = A2C("MlpPolicy", "CartPole-v1", n_steps=16, seed=0, device="cpu")
    return learn(agent, agent.policy.optimizer, 1280, trainee)


def train_dqn(trainee: Trainee) -> nn.Module:
    from stable_baselines3 import DQN

    agent = DQN(
        "MlpPolicy",
        "CartPole-v1",
        learning_rate=0.2 if trainee.fault == "rate x 100" else 2e-3,
        learning_starts=200,
        train_freq=4,
        gradient_steps=1,
        target_update_interval=50,
        exploration_fraction=0.3,
        buffer_size=5_000,
        batch_size=64,
        seed=0,
        device="cpu",
    )
    return learn(agent, agent.policy.optimizer, 600, trainee)


def train_sac(trainee: Trainee) -> nn.Module:
    from stable_baselines3 import SAC

    agent = SAC(
        "MlpPolicy",
        "Pendulum-v1",
        learning_starts=100,
        batch_size=64,
        policy_kwargs={"net_arch": [64, 64]},
        seed=0,
        device="cpu",
    )
    optimizers = [agent.actor.optimizer, agent.critic.optimizer]
    return learn(agent, optimizers, 160, trainee)


TRAININGS = (
    Training("stable-baselines3/ppo", train_ppo, 80),
    Training("stable-baselines3/a2c", train_a2c, 80),
    Training(
        "stable-baselines3/dqn",
        train_dqn,
        100,
        {"rate x 100": Fault(("lr-too-high",))},
    ),
    Training("stable-baselines3/sac", train_sac, 120),
)
