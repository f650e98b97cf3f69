"""pyro: stochastic variational inference, which has an optimizer for each parameter."""

from __future__ import annotations

import pyro.infer.autoguide  # noqa: F401  # once, before the trainings are forked
import torch
from torch import Tensor, nn

from zoo.batches import draw_batches
from zoo.data import digits
from zoo.trainee import Trainee
from zoo.training import Training


class Autoencoder(nn.Module):
    """A variational autoencoder of binary images, as pyro's tutorial writes it."""

    def __init__(self, latents: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, 64), nn.Softplus(), nn.Linear(64, 2 * latents))
        self.decoder = nn.Sequential(nn.Linear(latents, 64), nn.Softplus(), nn.Linear(64, 64))
        self.latents = latents

    def model(self, x: Tensor) -> None:
        import pyro
        from pyro.distributions import Bernoulli, Normal

        pyro.module("decoder", self.decoder)
        with pyro.plate("data", len(x)):
            prior = Normal(torch.zeros(len(x), self.latents), 1.0).to_event(1)
            z = pyro.sample("latent", prior)
            pyro.sample("image", Bernoulli(logits=self.decoder(z)).to_event(1), obs=x)

    def guide(self, x: Tensor) -> None:
        import pyro
        from pyro.distributions import Normal

        pyro.module("encoder", self.encoder)
        with pyro.plate("data", len(x)):
            mean, log_scale = self.encoder(x).chunk(2, dim=1)
            pyro.sample("latent", Normal(mean, log_scale.exp()).to_event(1))


def train_autoencoder(trainee: Trainee) -> nn.Module:
    import pyro
    from pyro.infer import SVI, Trace_ELBO
    from pyro.optim import Adam

    pyro.clear_param_store()
    model = Autoencoder()
    optimizer = Adam({"lr": 3e-3})
    inference = SVI(model.model, model.guide, optimizer, Trace_ELBO())
    monitor = trainee.watch(model, optimizer)
    images = (digits()[0].flatten(1) > 0).float()
    for (batch,) in draw_batches(images, size=64, steps=80):
        loss = inference.step(batch)
        monitor.log(loss=loss / len(batch), inputs=batch)
    return model


def train_regression(trainee: Trainee) -> nn.Module:
    """Bayesian linear regression with an automatic guide."""
    import pyro
    from pyro.distributions import HalfCauchy, Normal
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoDiagonalNormal
    from pyro.nn import PyroModule, PyroSample
    from pyro.optim import ClippedAdam

    class Regression(PyroModule):  # type: ignore[misc]  # pyro is untyped
        def __init__(self) -> None:
            super().__init__()
            self.linear = PyroModule[nn.Linear](4, 1)
            self.linear.weight = PyroSample(Normal(0.0, 1.0).expand([1, 4]).to_event(2))
            self.linear.bias = PyroSample(Normal(0.0, 5.0).expand([1]).to_event(1))

        def forward(self, x: Tensor, y: Tensor) -> None:
            noise = pyro.sample("noise", HalfCauchy(1.0))
            mean = self.linear(x).squeeze(-1)
            with pyro.plate("data", len(x)):
                pyro.sample("seen", Normal(mean, noise), obs=y)

    pyro.clear_param_store()
    x = torch.randn(200, 4)
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 0.3 * torch.randn(200)
    model = Regression()
    guide = AutoDiagonalNormal(model)
    guide(x, y)  # makes its parameters
    optimizer = ClippedAdam({"lr": 0.03})
    inference = SVI(model, guide, optimizer, Trace_ELBO(num_particles=4))
    monitor = trainee.watch(guide, optimizer)
    for _ in range(100):
        monitor.log(loss=inference.step(x, y) / len(x))
    trained: nn.Module = guide
    return trained


TRAININGS = (
    Training("pyro/vae", train_autoencoder, 80),
    Training("pyro/regression", train_regression, 100),
)
