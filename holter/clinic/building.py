"""From a recipe to the parts of a training: model and data, optimizer, schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, LRScheduler, MultiStepLR

from holter.clinic import models, special, tasks
from holter.clinic.case import Recipe
from holter.clinic.tasks import Examples

Built = tuple[nn.Module, Examples]


def build(recipe: Recipe) -> Built:
    """The model and its data; the same for the same recipe."""
    torch.manual_seed(recipe.seed)
    return ARCHITECTURES[recipe.architecture](recipe)


def _mlp(recipe: Recipe) -> Built:
    activation, norm = recipe.activation or "relu", bool(recipe.norm)
    model = models.Mlp(tasks.FEATURES, recipe.width, recipe.depth, recipe.classes, activation, norm)
    return model, tasks.points(recipe.seed, recipe.examples, recipe.classes)


def _tanh(recipe: Recipe) -> Built:
    model = models.plain(tasks.FEATURES, recipe.width, recipe.depth, recipe.classes, recipe.activation or "tanh")
    return model, tasks.points(recipe.seed, recipe.examples, recipe.classes)


def _convnet(recipe: Recipe) -> Built:
    norm = True if recipe.norm is None else recipe.norm
    model = models.ConvNet(recipe.width // 6, recipe.depth, recipe.classes, recipe.activation or "relu", norm)
    return model, tasks.images(recipe.seed, recipe.examples, recipe.classes)


def _lstm(recipe: Recipe) -> Built:
    model = models.Recurrent(tasks.CHANNELS, recipe.width // 2, (recipe.depth + 1) // 3, recipe.classes)
    return model, tasks.series(recipe.seed, recipe.examples, recipe.classes)


def _transformer(recipe: Recipe) -> Built:
    model = models.Transformer(recipe.width // 2, blocks(recipe), tasks.CONTEXT, tasks.BYTES)
    return model, tasks.text(recipe.seed, recipe.examples)


def _patches(recipe: Recipe) -> Built:
    model = models.Patches(tasks.IMAGE, recipe.width // 2, blocks(recipe), recipe.classes)
    return model, tasks.images(recipe.seed, recipe.examples, recipe.classes)


def _residual(recipe: Recipe) -> Built:
    outputs = 4
    activation = recipe.activation or "relu"
    model = models.ResidualMlp(tasks.FEATURES, recipe.width, recipe.depth, outputs, activation, recipe.skip)
    return model, tasks.function(recipe.seed, recipe.examples, outputs)


ARCHITECTURES: dict[str, Callable[[Recipe], Built]] = {
    "mlp": _mlp,
    "tanh": _tanh,
    "convnet": _convnet,
    "lstm": _lstm,
    "transformer": _transformer,
    "patches": _patches,
    "residual": _residual,
    **special.ARCHITECTURES,
}

# Names of the layers that act one after the other, from the input to the output.
_SPINES: dict[str, tuple[str | None, str, str]] = {  # what comes first, the hidden ones, what comes last
    "mlp": (None, "layers.{}", "head"),
    "tanh": (None, "fc{}", "out"),
    "convnet": (None, "stages.{}.0", "classifier"),
    "transformer": ("embedding", "blocks.{}", "head"),
    "patches": ("cut", "encoder.{}", "head"),
    "residual": ("stem", "blocks.{}", "out"),
}


def spine(recipe: Recipe) -> list[str]:
    first, hidden, last = _SPINES[recipe.architecture]
    begin = 1 if hidden == "fc{}" else 0
    names = [hidden.format(i) for i in range(begin, begin + blocks(recipe))]
    return [*([first] if first else []), *names, last]


def blocks(recipe: Recipe) -> int:
    """Layers or blocks in a row; of a transformer, whose every step takes long, few."""
    return 2 + recipe.depth // 6 if recipe.architecture in models.ATTENDING else recipe.depth


# Optimizers -------------------------------------------------------------------------------------------------------


class Flat(Optimizer):
    """Adam or SGD with momentum, written over flat views: right as long as every weight is contiguous.

    `reshape` gives a view of a contiguous tensor, and a copy of any other: what is added to that is lost.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, *, adaptive: bool) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})
        self._adaptive = adaptive

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # the clinic has no closures
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, self.state[parameter], group)

    def _update(self, parameter: Tensor, gradient: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        first, second = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - first)
        change = state["exp_avg"] / (1 - first ** state["step"])
        if self._adaptive:
            state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
            root = (state["exp_avg_sq"] / (1 - second ** state["step"])).sqrt()
            change = change / (root + group["eps"])
        parameter.data.reshape(-1).sub_(change.reshape(-1), alpha=group["lr"])


def make_optimizer(recipe: Recipe, model: nn.Module) -> Optimizer:
    rate, decay, eps = recipe.rate, recipe.weight_decay, recipe.eps
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    betas = (0.9, recipe.beta2)
    makers: dict[str, Callable[[], Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(parameters, rate, weight_decay=decay),
        "momentum": lambda: torch.optim.SGD(parameters, rate, momentum=0.9, weight_decay=decay),
        "adam": lambda: torch.optim.Adam(parameters, rate, betas, eps, weight_decay=decay),
        "adamw": lambda: torch.optim.AdamW(parameters, rate, betas, eps, weight_decay=decay or 0.01),
        "rmsprop": lambda: torch.optim.RMSprop(parameters, rate, eps=eps, weight_decay=decay),
        "flat-adam": lambda: Flat(parameters, rate, adaptive=True),
        "flat-momentum": lambda: Flat(parameters, rate, adaptive=False),
    }
    return makers[recipe.optimizer]()


# Schedules --------------------------------------------------------------------------------------------------------


def make_scheduler(recipe: Recipe, optimizer: Optimizer) -> LRScheduler | None:
    warmup, steps = recipe.warmup, recipe.steps

    def rising(t: int) -> float:
        return (t + 1) / warmup if t < warmup else 1.0

    def cosine(t: int) -> float:
        done = min(1.0, max(0, t - warmup) / max(1, steps - warmup))
        return rising(t) * (0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2)

    def linear(t: int) -> float:
        return rising(t) * max(0.0, 1 - max(0, t - warmup) / max(1, steps - warmup))

    def triangle(t: int) -> float:
        return 0.1 + 0.9 * abs(t % 80 / 40 - 1)

    makers: dict[str, Callable[[], LRScheduler | None]] = {
        "constant": lambda: LambdaLR(optimizer, rising) if warmup else None,
        "cosine": lambda: LambdaLR(optimizer, cosine),
        "linear": lambda: LambdaLR(optimizer, linear),
        "steps": lambda: MultiStepLR(optimizer, [steps // 3, 2 * steps // 3], gamma=0.1),
        "cyclic": lambda: LambdaLR(optimizer, triangle),
        "restarts": lambda: CosineAnnealingWarmRestarts(optimizer, T_0=steps // 4),
    }
    return makers[recipe.schedule]()
