"""The one training loop of the clinic, as a user would write it, and the hooks by which a fault gets into it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from holter.clinic.building import build, make_optimizer, make_scheduler
from holter.clinic.case import Case, Recipe
from holter.monitor import Monitor
from holter.sinks import Sink
from holter.watching import watch

Batch = tuple[Tensor, Tensor]


class Training:
    """The moving parts, built from the recipe alone: two of them take exactly the same steps."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.model, self.examples = build(recipe)
        if recipe.precision == "bfloat16":
            self.model.to(torch.bfloat16)
        self.optimizer = make_optimizer(recipe, self.model)
        self.scheduler = make_scheduler(recipe, self.optimizer)
        self.scaler: torch.amp.GradScaler | None = None
        if recipe.scaler is not None:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=recipe.scaler, growth_interval=200)

    def batches(self) -> Iterator[Batch]:
        """Random ones, for ever. The generator is its own: no fault can move the data of the steps before it."""
        random = torch.Generator().manual_seed(self.recipe.seed + 1)
        inputs, targets = self.examples.inputs, self.examples.targets
        while True:
            chosen = torch.randint(len(inputs), (self.recipe.batch,), generator=random)
            yield inputs[chosen], targets[chosen]

    def output(self, x: Tensor) -> Tensor:
        if self.recipe.precision == "bfloat16" and x.is_floating_point():
            x = x.to(torch.bfloat16)
        with torch.autocast("cpu", torch.float16, enabled=self.recipe.precision == "float16"):
            result: Tensor = self.model(x)
        return result.float()

    def criterion(self, output: Tensor, y: Tensor) -> Tensor:
        if self.examples.is_classes:
            return functional.cross_entropy(output.flatten(0, -2), y.flatten())
        return functional.mse_loss(output, y)

    def validation_loss(self) -> float:
        self.model.eval()
        with torch.no_grad():
            loss = self.criterion(self.output(self.examples.held_inputs), self.examples.held_targets)
        self.model.train()
        return float(loss)


class Hooks:
    """What can be done to a training at each point of it; this one leaves everything as it is."""

    training: Training

    def built(self, training: Training) -> None:
        """Model and optimizer are there, nothing is watched yet."""
        self.training = training

    def before_step(self, t: int) -> None: ...

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        """What the loader gives."""
        return x, y

    def micro_batches(self, t: int) -> int:
        return self.training.recipe.accumulate

    def share(self, t: int) -> float:
        """By which the loss of a micro-batch counts."""
        return 1 / self.micro_batches(t)

    def loss(self, t: int, x: Tensor, y: Tensor) -> Tensor:
        return self.training.criterion(self.training.output(x), y)

    def after_backward(self, t: int) -> None: ...

    def max_norm(self, t: int) -> float | None:
        """None: the gradients are not clipped."""
        return self.training.recipe.clip

    def zeroes_gradients(self, t: int) -> bool:
        return True

    def scheduler_steps(self, t: int) -> int:
        return 1

    def after_step(self, t: int) -> None: ...


def train(case: Case, run: str | os.PathLike[str] | bool, sinks: Sequence[Sink] = ()) -> Monitor:
    """Trains under a monitor, which is returned closed; `sinks` see the records as they come."""
    torch.set_num_threads(1)  # the models are tiny, and a result must not depend on the number of cores
    training, hooks = Training(case.recipe), case.hooks()
    hooks.built(training)
    with watch(
        training.model,
        training.optimizer,
        run=run,
        budget=None,
        diagnose=False,  # a run is judged when it is stored
        scheduler=training.scheduler,
        total_steps=case.recipe.steps,
        scaler=training.scaler,
        sinks=sinks,
    ) as monitor:
        batches = iter(monitor.batches(_loader(training, hooks)))
        for t in range(case.recipe.steps):
            hooks.before_step(t)
            _step(t, training, hooks, monitor, batches)
            hooks.after_step(t)
            if case.recipe.validate and (t + 1) % case.recipe.validate == 0:
                monitor.log(val_loss=training.validation_loss())
    return monitor


def _loader(training: Training, hooks: Hooks) -> Iterator[Batch]:
    batches = training.batches()
    for t in range(training.recipe.steps):
        for _ in range(hooks.micro_batches(t)):
            yield hooks.batch(t, *next(batches))


def _step(t: int, training: Training, hooks: Hooks, monitor: Monitor, batches: Iterator[Batch]) -> None:
    optimizer, scheduler, scaler = training.optimizer, training.scheduler, training.scaler
    total = torch.zeros(())
    for _ in range(hooks.micro_batches(t)):
        x, y = next(batches)
        loss = hooks.loss(t, x, y) * hooks.share(t)
        (loss if scaler is None else scaler.scale(loss)).backward()
        total += loss.detach()
        monitor.log(inputs=x, targets=y)
    hooks.after_backward(t)
    if scaler is not None:
        scaler.unscale_(optimizer)
    if (max_norm := hooks.max_norm(t)) is not None:
        monitor.clip_grad_norm_(max_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    if hooks.zeroes_gradients(t):
        optimizer.zero_grad()
    if scheduler is not None:
        for _ in range(hooks.scheduler_steps(t)):
            scheduler.step()
    monitor.log(loss=total)
