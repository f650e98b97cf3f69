"""gpytorch: an exact Gaussian process, by Adam and by L-BFGS, and a variational one."""

from __future__ import annotations

from typing import Any

import gpytorch  # once, before the trainings are forked
import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Adam

from zoo.batches import draw_batches
from zoo.trainee import Trainee
from zoo.training import Fault, Training


def wave(count: int) -> tuple[Tensor, Tensor]:
    """Return a sine with noise."""
    inputs = torch.linspace(0, 1, count)
    return inputs, torch.sin(2 * torch.pi * inputs) + 0.2 * torch.randn(count)


def exact_process(inputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
    """Return the model and its negative marginal likelihood."""

    class Exact(gpytorch.models.ExactGP):  # type: ignore[misc]  # gpytorch is untyped
        def __init__(self, likelihood: Any) -> None:
            super().__init__(inputs, targets, likelihood)
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Exact(gpytorch.likelihoods.GaussianLikelihood())
    likelihood = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    return model, lambda: -likelihood(model(inputs), targets)


def train_by_adam(trainee: Trainee) -> nn.Module:
    model, find_loss = exact_process(*wave(100))
    optimizer = Adam(model.parameters(), lr=0.1)
    monitor = trainee.watch(model, optimizer)
    model.train()
    for _ in range(60):
        optimizer.zero_grad()
        loss = find_loss()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss)
    trained: nn.Module = model
    return trained


def train_by_lbfgs(trainee: Trainee) -> nn.Module:
    model, find_loss = exact_process(*wave(100))
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=4)
    monitor = trainee.watch(model, optimizer)
    model.train()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = find_loss()
        loss.backward()
        return loss

    for _ in range(30):
        loss = optimizer.step(closure)
        monitor.log(loss=loss)
    trained: nn.Module = model
    return trained


def train_variational(trainee: Trainee) -> nn.Module:
    inputs, targets = wave(512)

    class Sparse(gpytorch.models.ApproximateGP):  # type: ignore[misc]  # gpytorch is untyped
        def __init__(self, places: Tensor) -> None:
            guide = gpytorch.variational.CholeskyVariationalDistribution(len(places))
            super().__init__(gpytorch.variational.VariationalStrategy(self, places, guide))
            self.mean_module = gpytorch.means.ConstantMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu=2.5))

        def forward(self, x: Tensor) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model = Sparse(torch.linspace(0, 1, 16))
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    both = nn.ModuleDict({"model": model, "likelihood": likelihood})
    bound = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(inputs))
    rate = 2.0 if trainee.fault == "rate x 100" else 0.02
    optimizer = Adam(both.parameters(), lr=rate)
    monitor = trainee.watch(both, optimizer)
    both.train()
    for x, y in draw_batches(inputs, targets, size=64, steps=80):
        optimizer.zero_grad()
        loss = bound(model(x), y) if trainee.fault == "bound not negated" else -bound(model(x), y)
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, inputs=x, targets=y)
    return both


TRAININGS = (
    Training("gpytorch/exact-adam", train_by_adam, 60),
    Training("gpytorch/exact-lbfgs", train_by_lbfgs, 30),
    Training(
        "gpytorch/variational",
        train_variational,
        80,
        {"bound not negated": Fault(("loss-sign",)), "rate x 100": Fault(("lr-too-high",))},
    ),
)
