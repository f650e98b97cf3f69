"""fine_tune: a training loop with validation, clipping, early stopping, and the gradients logged.

The step of everything logged is the number of epochs done. Every epoch logs

    train_loss, val_loss, lr, seconds
    gradients/norm_before_clipping, gradients/norm_after_clipping    means over the batches
    gradients/norm_max, gradients/clipped_share                      the largest before; how many were clipped

and the distribution of the gradients, as the optimizer used them, is logged after 0, n, 2n, ... epochs and at
the end. Losses and norms stay on the device until the epoch is over: no batch waits for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holter.gradients import Tracker, clip_on_device, log_gradient_distribution
from holter.random_state import random_state_kept
from holter.tracker import MetricsTracker

EarlyStoppingHook = Callable[[int, Mapping[str, float]], bool]
LossFunction = Callable[[Any, Any], Tensor]
Floats = npt.NDArray[np.float64]


class ClippingMonitor(Protocol):
    """The part of `holter.Monitor` that the loop uses."""

    def clip_grad_norm_(self, max_norm: float) -> Tensor: ...

    def log(self, **values: Any) -> object: ...


@dataclass(frozen=True)
class Epoch:
    """One pass over the training data: `number` counts from 1, `metrics` as they were logged."""

    number: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class TrainingResult:
    """What `fine_tune` did. `gradient_norms` holds the norm before clipping, one a batch."""

    history: tuple[Epoch, ...]
    stopped_early: bool
    gradient_norms: Floats
    tracker: Tracker

    @property
    def best(self) -> Epoch:
        """The epoch of the lowest validation loss, or training loss where there is no validation."""
        key = "val_loss" if "val_loss" in self.history[0].metrics else "train_loss"
        return min(self.history, key=lambda epoch: _nan_last(epoch.metrics[key]))


@dataclass
class EarlyStopping:
    """Says stop once a metric has not fallen by more than `min_delta` for `patience` epochs.

    >>> stop = EarlyStopping(patience=2)
    >>> [stop(epoch, {"val_loss": loss}) for epoch, loss in enumerate([1.0, 0.8, 0.9, 0.85], start=1)]
    [False, False, False, True]
    """

    patience: int = 3
    min_delta: float = 0.0
    metric: str = "val_loss"
    best: float = field(default=math.inf, init=False)
    waited: int = field(default=0, init=False)

    def __call__(self, epoch: int, metrics: Mapping[str, float]) -> bool:
        if self.metric not in metrics:
            raise ValueError(f"EarlyStopping watches {self.metric!r}; there are {', '.join(metrics)}")
        if metrics[self.metric] < self.best - self.min_delta:
            self.best, self.waited = metrics[self.metric], 0
        else:  # NaN, too, is no progress
            self.waited += 1
        return self.waited >= self.patience


def fine_tune(
    model: nn.Module,
    train_loader: Iterable[Any],
    val_loader: Iterable[Any] | None,
    *,
    n_epochs: int = 10,
    log_grad_dist_every: int = 5,
    max_grad_norm: float | None = 1.0,
    tracker: Tracker | None = None,
    optimizer: Optimizer | None = None,
    lr: float = 5e-5,
    loss_fn: LossFunction | None = None,
    scheduler: LRScheduler | ReduceLROnPlateau | None = None,
    device: torch.device | str | None = None,
    early_stopping: EarlyStoppingHook | None = None,
    monitor: ClippingMonitor | None = None,
    progress: bool = True,
    log_histogram: bool = False,
) -> TrainingResult:
    """Trains a model and logs every epoch; see the module's description for what is logged, and when.

    Batches are tuples `(inputs..., target)` with `loss_fn(output, target)`, cross-entropy unless given, or
    mappings with `loss_fn(output, batch)`, `output.loss` unless given. The optimizer is AdamW with `lr`
    unless given. A scheduler steps after every batch, ReduceLROnPlateau after every epoch.

    >>> data = [(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(3)]
    >>> result = fine_tune(torch.nn.Linear(4, 2), data, data, n_epochs=2, progress=False)
    >>> [epoch.number for epoch in result.history], result.stopped_early
    ([1, 2], False)
    """
    _check(model, (train_loader, val_loader), optimizer, n_epochs, log_grad_dist_every, max_grad_norm)
    if device is not None:
        model.to(device)
    if optimizer is None:
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=lr)
    log = _Log(model, MetricsTracker() if tracker is None else tracker, log_grad_dist_every, log_histogram)
    screen = _Screen(progress, n_epochs)
    loop = _Loop(model, optimizer, scheduler, loss_fn, max_grad_norm, monitor, log, screen)
    return loop.run(train_loader, val_loader, n_epochs, early_stopping)


@dataclass(frozen=True)
class _Log:
    """What is logged, and when; the step is the number of epochs done."""

    model: nn.Module
    tracker: Tracker
    every: int
    histogram: bool

    def epoch(self, epoch: Epoch) -> None:
        for name, value in epoch.metrics.items():
            self.tracker.log_scalar(name, value, step=epoch.number)

    def first_batch(self, done: int) -> None:
        if done % self.every == 0:
            self.gradients(done)

    def gradients(self, done: int) -> None:
        log_gradient_distribution(self.model, self.tracker, done, log_histogram=self.histogram)


@dataclass(frozen=True)
class _Loop:
    """What one training is made of."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | ReduceLROnPlateau | None
    loss_fn: LossFunction | None
    max_grad_norm: float | None
    monitor: ClippingMonitor | None
    log: _Log
    screen: _Screen

    def run(
        self,
        train_loader: Iterable[Any],
        val_loader: Iterable[Any] | None,
        n_epochs: int,
        early_stopping: EarlyStoppingHook | None,
    ) -> TrainingResult:
        if not self.model.training:  # else leave alone the parts that the caller has put into eval mode
            self.model.train()
        history: list[Epoch] = []
        norms: list[Floats] = []
        stop = False
        while len(history) < n_epochs and not stop:
            epoch, epoch_norms = self._epoch(len(history), train_loader, val_loader)
            history.append(epoch)
            norms.append(epoch_norms)
            self.log.epoch(epoch)
            self.screen.line(epoch)
            stop = early_stopping is not None and early_stopping(epoch.number, epoch.metrics)
        self.log.gradients(len(history))  # those of the last batch are still there
        return TrainingResult(tuple(history), stop, np.concatenate(norms), self.log.tracker)

    def _epoch(self, done: int, train_loader: Iterable[Any], val_loader: Iterable[Any] | None) -> tuple[Epoch, Floats]:
        began = time.perf_counter()
        losses, norms = _OnDevice(), _OnDevice()
        sizes: list[int] = []
        with self.screen.bar(train_loader, done + 1) as batches:
            for batch in batches:
                loss, norm = self._step(batch, done, first=not sizes)
                losses.append(loss)
                norms.append(norm)
                sizes.append(_size(batch))
        if not sizes:
            raise ValueError("train_loader gave no batches: pass a DataLoader or a list that is not empty")
        metrics = {"train_loss": _mean(losses, sizes)}
        if val_loader is not None:
            metrics["val_loss"] = self._validate(val_loader)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(metrics.get("val_loss", metrics["train_loss"]))
        read_norms = norms.read()
        metrics["lr"] = float(self.optimizer.param_groups[0]["lr"])
        metrics |= _norm_metrics(read_norms, self.max_grad_norm)
        metrics["seconds"] = time.perf_counter() - began
        return Epoch(done + 1, metrics), read_norms

    def _step(self, batch: Any, done: int, first: bool) -> tuple[Tensor, Tensor]:
        """One batch: its loss and the norm of its gradients before clipping, both still on the device."""
        self.optimizer.zero_grad()
        self.model.zero_grad()  # parameters that the optimizer does not hold would pile theirs up
        loss = self._loss(batch)
        loss.backward()
        if self.monitor is not None and self.max_grad_norm is not None:
            norm = self.monitor.clip_grad_norm_(self.max_grad_norm)
        else:
            norm = clip_on_device(self.model, self.max_grad_norm)
        if first:
            self.log.first_batch(done)
        self.optimizer.step()
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        if self.monitor is not None:
            self.monitor.log(loss=loss)
        return loss.detach(), norm

    def _validate(self, loader: Iterable[Any]) -> float:
        losses, sizes = _OnDevice(), []
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        try:
            with torch.no_grad():
                for batch in loader:
                    losses.append(self._loss(batch))
                    sizes.append(_size(batch))
        finally:
            for module, training in modes.items():
                module.training = training
        return _mean(losses, sizes)

    def _loss(self, batch: Any) -> Tensor:
        batch = _to(next(self.model.parameters()).device, batch)
        if isinstance(batch, Mapping):
            output = self.model(**batch)
            return self.loss_fn(output, batch) if self.loss_fn else _loss_of(output)
        if isinstance(batch, tuple | list) and len(batch) >= 2:
            *inputs, target = batch
            return (self.loss_fn or F.cross_entropy)(self.model(*inputs), target)
        raise ValueError(
            f"a batch is a tuple (inputs..., target) or a mapping of the model's arguments, got {type(batch).__name__}"
        )


class _OnDevice:
    """Numbers that stay on their device until they are read, all at once."""

    def __init__(self) -> None:
        self._packed: list[Tensor] = []
        self._loose: list[Tensor] = []

    def append(self, number: Tensor) -> None:
        self._loose.append(number.detach())
        if len(self._loose) == 1024:  # a lone number takes up 512 bytes of a GPU
            self._pack()

    def read(self) -> Floats:
        if self._loose:
            self._pack()
        return torch.cat(self._packed).cpu().double().numpy()

    def _pack(self) -> None:
        self._packed.append(torch.stack(self._loose))
        self._loose.clear()


def _norm_metrics(norms: Floats, max_norm: float | None) -> dict[str, float]:
    with np.errstate(invalid="ignore"):
        # What torch multiplies the gradients by.
        scale = 1.0 if max_norm is None else np.minimum(max_norm / (norms + 1e-6), 1.0)
        return {
            "gradients/norm_before_clipping": float(norms.mean()),
            "gradients/norm_after_clipping": float((norms * scale).mean()),
            "gradients/norm_max": float(norms.max()),
            "gradients/clipped_share": 0.0 if max_norm is None else float(np.mean(~(norms <= max_norm))),
        }


def _mean(losses: _OnDevice, sizes: list[int]) -> float:
    """The mean over samples, so that a short last batch does not count for more."""
    return float(np.average(losses.read(), weights=sizes)) if sizes else math.nan


def _to(device: torch.device, batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {name: _to(device, value) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        return [_to(device, value) for value in batch]
    return batch


def _size(batch: Any) -> int:
    """How many samples: the length of the first tensor that has one."""
    parts = batch.values() if isinstance(batch, Mapping) else batch
    return next((len(part) for part in parts if isinstance(part, Tensor) and part.ndim), 1)


def _loss_of(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise ValueError("the model's output has no loss: put the labels into the batches, or pass loss_fn")
    return loss


def _check(
    model: nn.Module,
    loaders: tuple[Iterable[Any] | None, ...],
    optimizer: Optimizer | None,
    n_epochs: int,
    log_grad_dist_every: int,
    max_grad_norm: float | None,
) -> None:
    """Refuses, before training, what would fail in the middle of it."""
    for name, count in {"n_epochs": n_epochs, "log_grad_dist_every": log_grad_dist_every}.items():
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"max_grad_norm must be positive, or None for no clipping, got {max_grad_norm}")
    trainable = {parameter for parameter in model.parameters() if parameter.requires_grad}
    if not trainable:
        raise ValueError("the model has no parameter that requires a gradient: there is nothing to train")
    if optimizer is not None and not any(p in trainable for group in optimizer.param_groups for p in group["params"]):
        raise ValueError("the optimizer holds none of the model's parameters: build it from model.parameters()")
    if n_epochs > 1 and any(isinstance(loader, Iterator) for loader in loaders):
        raise ValueError("a loader that can be read only once will not do: pass a DataLoader or a list")


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


class _Screen:
    """A bar while an epoch runs, a line when it is over; nothing where there is no terminal."""

    def __init__(self, show: bool, n_epochs: int) -> None:
        with random_state_kept():  # rich draws a number as it is loaded
            from rich.console import Console
        self._console = Console(stderr=True)
        self._quiet = not (show and (self._console.is_terminal or self._console.is_jupyter))
        self._n_epochs = n_epochs

    def bar(self, batches: Iterable[Any], number: int) -> closing[Any]:
        """The same batches; to be closed, so that an interrupted epoch leaves no bar behind."""
        from rich.progress import track

        title = f"epoch {number}/{self._n_epochs}"
        shown: Any = track(batches, title, console=self._console, transient=True, disable=self._quiet)
        return closing(shown)

    def line(self, epoch: Epoch) -> None:
        if not self._quiet:
            shown = {"train_loss": "train", "val_loss": "val", "gradients/norm_before_clipping": "gradients"}
            words = [f"{word} {epoch.metrics[name]:.4g}" for name, word in shown.items() if name in epoch.metrics]
            self._console.print(f"epoch {epoch.number}/{self._n_epochs}", *words, sep="  ", highlight=False)
