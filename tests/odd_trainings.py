"""Trainings as they are in the wild, a few lines each: losses that are negative or near zero, agents, other optimizers.

Each is a generator of what is logged, a step at a time, after it has told model and optimizer.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam

import holter
from holter.diagnosis.finding import Finding

Logged = dict[str, Any]
Training = Callable[[], tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]]
Losses = Callable[[Tensor, Tensor], Tensor]


def alarms(training: Training, steps: int, seed: int = 1, **options: Any) -> list[str]:
    """The causes of all warnings and criticals."""
    return [found.cause for found in findings(training, steps, seed, **options) if found.severity != "info"]


def findings(training: Training, steps: int, seed: int = 1, **options: Any) -> list[Finding]:
    """All but those about the machine."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model, optimizer, course = training()
    with holter.watch(model, optimizer, run=False, **{"budget": None, **options}) as monitor:
        for logged in itertools.islice(course, steps):
            monitor.log(**logged)
    found = monitor.findings
    assert not any(finding.cause == "monitor-degraded" for finding in found), found
    return [finding for finding in found if finding.where != "performance"]


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    layers = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), act())]
    return nn.Sequential(*layers[:-1])


def stepped(optimizer: torch.optim.Optimizer, loss: Tensor, **batch: Any) -> Logged:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"loss": loss, **batch}


def regression(
    loss_of: Losses = F.mse_loss,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: Adam(parameters, 3e-3),
    targets_of: Callable[[Tensor, Tensor], Tensor] = lambda x, score: score,
    outputs: int = 1,
    size: int = 64,
    batch_of: Callable[[int], int] | None = None,  # which one comes at a step
    clears: bool = True,
    logs: tuple[str, ...] = ("inputs", "targets"),
) -> Training:
    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
        model, weights = mlp(8, 64, 64, outputs), torch.randn(8, 1) / 8**0.5
        stepper = optimizer(model.parameters())

        def course() -> Iterator[Logged]:
            random = torch.Generator()
            for step in itertools.count():
                random.manual_seed(step if batch_of is None else batch_of(step))
                x = torch.randn(size, 8, generator=random)
                y = targets_of(x, x @ weights)
                loss = loss_of(model(x), y)
                if clears:
                    stepper.zero_grad()
                loss.backward()
                stepper.step()
                yield {"loss": loss, **{name: {"inputs": x, "targets": y}[name] for name in logs}}

        return model, stepper, course()

    return begin


def classes(x: Tensor, score: Tensor) -> Tensor:
    return x[:, :4].argmax(1)


# Losses that are negative -----------------------------------------------------------------------------------------


def gaussian_likelihood() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
    """Of sharp data: the loss sinks below 0 and the gradient grows with the sharpness."""
    model = mlp(2, 64, 64, 2, act=nn.Tanh)
    optimizer = Adam(model.parameters(), 3e-3)

    def course() -> Iterator[Logged]:
        while True:
            x = torch.rand(128, 2) * 2 - 1
            y = torch.sin(3 * x[:, :1]) * x[:, 1:] + 0.01 * torch.randn(128, 1)
            mean, log_scale = model(x).chunk(2, 1)
            loss = (log_scale + 0.5 * ((y - mean) / log_scale.exp()) ** 2).mean()
            yield stepped(optimizer, loss, inputs=x, targets=y)

    return model, optimizer, course()


class Process(nn.Module):
    """A Gaussian process, by its marginal likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.height, self.noise = (nn.Parameter(torch.zeros(1)) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        width, height, noise = map(F.softplus, (self.width, self.height, self.noise))
        kernel = height * torch.exp(-0.5 * (x - x.T) ** 2 / width**2) + (noise + 1e-4) * torch.eye(len(x))
        root = torch.linalg.cholesky(kernel)
        fit = 0.5 * (y.T @ torch.cholesky_solve(y, root)).squeeze()
        return (fit + root.diag().log().sum() + 0.5 * len(x) * math.log(2 * math.pi)) / len(x)


def gaussian_process() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
    model = Process()
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=5)
    x = torch.linspace(0, 1, 60)[:, None]
    y = torch.sin(6.28 * x) + 0.02 * torch.randn(60, 1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x, y)
        loss.backward()
        return loss

    def course() -> Iterator[Logged]:
        while True:
            yield {"loss": optimizer.step(closure), "inputs": x, "targets": y}

    return model, optimizer, course()


def similarity() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
    """SimSiam: minus a cosine, from 0 to -1."""
    encoder = nn.Sequential(
        *(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU()), *(nn.Linear(64, 32), nn.BatchNorm1d(32, affine=False))
    )
    predictor = nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 32))
    model = nn.ModuleDict({"encoder": encoder, "predictor": predictor})
    optimizer, centres = SGD(model.parameters(), 0.05, momentum=0.9), torch.randn(10, 16)

    def course() -> Iterator[Logged]:
        while True:
            x = centres[torch.randint(10, (64,))] + 0.5 * torch.randn(64, 16)
            a, b = (x + 0.3 * torch.randn_like(x) for _ in range(2))
            p, q = encoder(a), encoder(b)
            alike = F.cosine_similarity(predictor(p), q.detach()) + F.cosine_similarity(predictor(q), p.detach())
            yield stepped(optimizer, -alike.mean() / 2, inputs=(a, b))

    return model, optimizer, course()


def overlap() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
    """Minus a Dice score, as of a segmentation."""
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 1))
    optimizer = Adam(model.parameters(), 1e-2)

    def course() -> Iterator[Logged]:
        while True:
            y = F.interpolate((torch.rand(8, 1, 3, 3) > 0.8).float(), scale_factor=4)
            x = y + 0.5 * torch.randn_like(y)
            p = model(x).sigmoid()
            score = (2 * (p * y).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + y.sum((1, 2, 3)) + 1)
            yield stepped(optimizer, -score.mean(), inputs=x, targets=y)

    return model, optimizer, course()


def actor() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
    """Its loss is minus the value that a critic learns at the same time, which rises from 0 to what the rewards add
    up to."""
    model, critic = mlp(3, 64, 64, 1), mlp(4, 64, 64, 1)
    target = copy.deepcopy(critic)
    optimizer, other = Adam(model.parameters(), 3e-4), Adam(critic.parameters(), 1e-3)

    def course() -> Iterator[Logged]:
        while True:
            x = torch.randn(64, 3)
            a = torch.tanh(model(x))
            with torch.no_grad():
                reward = 1 - (a - x[:, :1].tanh()) ** 2
                wanted = reward + 0.97 * target(torch.cat((torch.randn(64, 3), a), 1))
            stepped(other, F.mse_loss(critic(torch.cat((x, a.detach()), 1)), wanted))
            with torch.no_grad():
                for mine, its in zip(critic.parameters(), target.parameters(), strict=True):
                    its.lerp_(mine, 0.02)
            yield stepped(optimizer, -critic(torch.cat((x, a), 1)).mean(), inputs=x)

    return model, optimizer, course()


def wasserstein_critic() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
    model, generator = mlp(2, 64, 64, 1, act=nn.LeakyReLU), mlp(8, 64, 64, 2)
    optimizer, other = (Adam(one.parameters(), 1e-4, betas=(0.5, 0.9)) for one in (model, generator))

    def course() -> Iterator[Logged]:
        for step in itertools.count():
            angle = 6.28 * torch.rand(64)
            x = torch.stack((angle.cos(), angle.sin()), 1)
            fake, share = generator(torch.randn(64, 8)).detach(), torch.rand(64, 1)
            between = (share * x + (1 - share) * fake).requires_grad_()
            (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
            loss = model(fake).mean() - model(x).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()
            yield stepped(optimizer, loss, inputs=x)
            if step % 3 == 2:
                stepped(other, -model(generator(torch.randn(64, 8))).mean())

    return model, optimizer, course()


# Losses that are sums ---------------------------------------------------------------------------------------------


def spoken() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
    """CTC, for each example over all ways in which its labels may lie in time."""
    model = nn.ModuleDict({"rnn": nn.GRU(8, 32, batch_first=True), "out": nn.Linear(32, 11)})
    optimizer, sounds = Adam(model.parameters(), 3e-3), torch.randn(11, 8)
    lengths = torch.full((16,), 24), torch.full((16,), 6)

    def course() -> Iterator[Logged]:
        while True:
            y = torch.randint(1, 11, (16, 6))
            x = sounds[y].repeat_interleave(4, 1) + 0.3 * torch.randn(16, 24, 8)
            logs = model["out"](model["rnn"](x)[0]).log_softmax(-1).transpose(0, 1)
            yield stepped(optimizer, F.ctc_loss(logs, y, *lengths, reduction="sum") / 16, inputs=x, targets=y)

    return model, optimizer, course()


def autoencoder() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
    """Variational: the likelihood of an image is that of all its pixels, the other term is let in little by little."""
    encoder, decoder = mlp(784, 64, 16), mlp(8, 64, 784)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = Adam(model.parameters(), 1e-3)

    def course() -> Iterator[Logged]:
        axis = torch.linspace(-1, 1, 28)
        for step in itertools.count():
            centre = torch.rand(32, 2, 1) - 0.5
            far = (axis - centre[:, 0])[:, None, :] ** 2 + (axis - centre[:, 1])[:, :, None] ** 2
            x = torch.exp(-far / 0.1).flatten(1)
            mean, log_variance = encoder(x).chunk(2, 1)
            out = decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp())
            likelihood = (50 * (x - out) ** 2 - math.log(10)).sum(1).mean()
            beside = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
            yield stepped(optimizer, likelihood + min(1, step / 20) * beside, inputs=x, targets=x)

    return model, optimizer, course()


# Agents -----------------------------------------------------------------------------------------------------------


def surrogate() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
    """A policy's, as of PPO: 0 but for rounding wherever the data is new, as the advantages have mean 0."""
    model = mlp(4, 64, 64, 2, act=nn.Tanh)
    optimizer = Adam(model.parameters(), 1e-3)

    def course() -> Iterator[Logged]:
        for step in itertools.count():
            if step % 12 == 0:
                x = torch.randn(512, 4)
                with torch.no_grad():
                    before = torch.distributions.Categorical(logits=model(x))
                    action = before.sample()
                    logs = before.log_prob(action)
                gain = (2.0 * action - 1) * x[:, 0] + torch.randn(512)
                gain = (gain - gain.mean()) / gain.std()
            ratio = (torch.distributions.Categorical(logits=model(x)).log_prob(action) - logs).exp()
            loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            yield stepped(optimizer, loss, inputs=x)

    return model, optimizer, course()


def q_learning(rate: float = 1e-3, later: float = 0.97, targets_every: int = 25) -> Training:
    """The targets are what the model itself believes, and jump where they are taken anew."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
        model = mlp(4, 64, 64, 2)
        target = copy.deepcopy(model)
        optimizer = Adam(model.parameters(), rate)

        def course() -> Iterator[Logged]:
            for step in itertools.count():
                x, action = torch.randn(64, 4) * 0.3, torch.randint(2, (64, 1))
                with torch.no_grad():
                    wanted = 1 + later * target(x + 0.1 * torch.randn(64, 4)).max(1).values
                loss = F.smooth_l1_loss(model(x).gather(1, action).squeeze(1), wanted)
                yield stepped(optimizer, loss, inputs=x)
                if step % targets_every == targets_every - 1:
                    target.load_state_dict(model.state_dict())

        return model, optimizer, course()

    return begin


def growing_buffer() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[Logged]]:
    """An agent wanders away from where it began; what it learns from is drawn from all that it has seen."""
    model = mlp(4, 32, 2)
    optimizer = Adam(model.parameters(), 1e-3)

    def course() -> Iterator[Logged]:
        seen = 0.03 * torch.randn(1, 4)
        while True:
            seen = torch.cat((seen, seen[-1:] + 0.05 * torch.randn(1, 4)))
            x = seen[torch.randint(len(seen), (32,))]
            y = x[:, :2] * 0.5 + 0.02 * torch.randn(32, 2)
            yield stepped(optimizer, F.mse_loss(model(x), y), inputs=x, targets=y)

    return model, optimizer, course()


# Optimizers -------------------------------------------------------------------------------------------------------


class Steps(torch.optim.Optimizer):
    """Adam's, of which a subclass says how long they are."""

    def __init__(self, parameters: Any, lr: float, eps: float = 1e-8, **more: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": eps, **more})

    def length(self, group: dict[str, Any], weight: Tensor, step: Tensor) -> float:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                state = self.state[one]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(one), exp_avg_sq=torch.zeros_like(one))
                state["step"] += 1
                mean = state["exp_avg"].lerp_(one.grad, 0.1)
                square = state["exp_avg_sq"].mul_(0.999).addcmul_(one.grad, one.grad, value=0.001)
                step = mean / (square.sqrt() + group["eps"])
                one.add_(step, alpha=-self.length(group, one, step))


class Lamb(Steps):
    """A step is a share of its weight, whatever the gradient."""

    def length(self, group: dict[str, Any], weight: Tensor, step: Tensor) -> float:
        return float(group["lr"] * weight.norm() / step.norm().clamp(min=1e-12))


class Prodigy(Steps):
    """Begins with far too short steps and makes them longer; its rate is a factor, 1 as a rule."""

    growth, most = 1.02, 1e-2

    def length(self, group: dict[str, Any], weight: Tensor, step: Tensor) -> float:
        group["d"] = min(self.growth * group["d"], self.most)
        return float(group["lr"] * group["d"])


class RunawayProdigy(Prodigy):
    """Makes them longer without end."""

    growth, most = 1.1, math.inf
