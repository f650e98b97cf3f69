"""Small trainings in Lightning, and the same in plain torch."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holter

STEPS, BATCH, MAX_NORM = 60, 8, 0.05
EVERYTHING = {"run": False, "budget": None, "weights": 10, "updates": 1, "activations": 5}


def data(batches: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    x, noise = torch.randn(1600, 6, generator=generator), torch.randn(1600, 3, generator=generator)
    return TensorDataset(x[: batches * BATCH], (x[:, :3].sin() + 0.1 * noise)[: batches * BATCH])


def loader(batches: int = STEPS) -> DataLoader[Any]:
    return DataLoader(data(batches), BATCH)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


@functools.cache
def lightning() -> Any:
    """The package that the callback has chosen; takes seconds to import."""
    return importlib.import_module("holter.integrations.lightning")._lightning()


@functools.cache
def regression() -> Any:
    """Which calls a part of itself, not its own forward, as most training_steps do."""

    class Regression(lightning().LightningModule):  # type: ignore[misc]
        def __init__(self, lr: float = 0.1, raises_at: int | None = None) -> None:
            super().__init__()
            self.net, self.lr, self.raises_at = net(), lr, raises_at

        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            if index == self.raises_at:
                raise ArithmeticError("planted")
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            self.log("error", loss)
            self.log("of_training", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            loss = nn.functional.mse_loss(self(batch[0]), batch[1])
            self.log("val_loss", loss)
            self.log("error", 3 * loss)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 20), "interval": "step"}]

    return Regression


@functools.cache
def callable_regression() -> Any:
    class CallableRegression(regression()):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.mse_loss(self(batch[0]), batch[1])

    return CallableRegression


def callback(**options: Any) -> Any:
    from holter.integrations.lightning import HolterCallback

    return HolterCallback(**{**EVERYTHING, **options})


def trainer(*callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    plan = {
        "max_epochs": 1,
        "enable_model_summary": False,
        "accelerator": "cpu",
        "devices": 1,
        "num_sanity_val_steps": 0,
    }
    return lightning().Trainer(callbacks=list(callbacks), **{**quiet, **plan, **options})


def fitted(module: Any, batches: int = STEPS, watched: dict[str, Any] | None = None, **options: Any) -> holter.Monitor:
    watching = callback(**(watched or {}))
    trainer(watching, **options).fit(module, loader(batches))
    monitor = watching.monitor
    assert isinstance(monitor, holter.Monitor) and monitor.state == "closed"
    return monitor


class Truth:
    """What a plain loop sees, in float64."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.layers: list[list[float]] = []

    def see(self, parameters: Any) -> None:
        squares = [float(parameter.grad.double().square().sum()) for parameter in parameters]
        self.layers.append([square**0.5 for square in squares])
        self.norms.append(sum(squares) ** 0.5)


def plain(accumulate: int = 1, clip: bool = True, steps: int = STEPS) -> tuple[Truth, nn.Module]:
    model, truth = net(), Truth()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20)
    micro = iter(loader(steps * accumulate))
    for _ in range(steps):
        optimizer.zero_grad()
        losses = []
        for _ in range(accumulate):
            x, y = next(micro)
            loss = nn.functional.mse_loss(model(x), y)
            (loss / accumulate).backward()
            losses.append(loss.item())
        truth.losses.append(sum(losses) / len(losses))
        truth.see(model.parameters())
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        schedule.step()
    return truth, model


def check_against(truth: Truth, monitor: holter.Monitor) -> None:
    history = monitor.history
    assert history.scalar("loss")[0].tolist() == list(range(len(truth.losses)))
    assert history.scalar("loss")[1].tolist() == pytest.approx(truth.losses, rel=1e-6)
    assert history.scalar("gradient_norm")[1].tolist() == pytest.approx(truth.norms, rel=1e-6)
    np.testing.assert_allclose(history.series("gradient", "norm")[2], truth.layers, rtol=1e-6)


def parts_of_a_gan() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6)), nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))


def generator_loss(generator: nn.Module, critic: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.softplus(-critic(generator(y))).mean()


def critic_loss(generator: nn.Module, critic: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (nn.functional.softplus(-critic(x)) + nn.functional.softplus(critic(generator(y).detach()))).mean()


def optimizers_of(generator: nn.Module, critic: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(generator.parameters(), 1e-2), torch.optim.SGD(critic.parameters(), 0.1)]


def make_gan() -> Any:
    class Gan(lightning().LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = parts_of_a_gan()

        def training_step(self, batch: Any, index: int) -> None:
            x, y = batch
            first, second = self.optimizers()
            self.manual_backward(generator_loss(self.generator, self.critic, y))
            self.clip_gradients(first, MAX_NORM, "norm")
            first.step()
            first.zero_grad()
            second.zero_grad()
            self.manual_backward(critic_loss(self.generator, self.critic, x, y))
            second.step()

        def configure_optimizers(self) -> Any:
            return optimizers_of(self.generator, self.critic)

    return Gan()
