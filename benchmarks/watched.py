"""A training step with and without a monitor: the variants that are compared, and what a monitor says of itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import holter
from benchmarks.models import Trainable
from benchmarks.observers import MAX_NORM, norms_by_item

EVERY_STEP: dict[str, Any] = {"every": 1, "budget": None, "histograms": 100, "diagnose": False}


@dataclass(frozen=True)
class Variant:
    """`watch`: options of the monitor, None for no monitor; `before_step`: what a user does to the gradients."""

    watch: dict[str, Any] | None = None
    before_step: Callable[[nn.Module, holter.Monitor | None], object] | None = None


def _torch_clip(model: nn.Module, monitor: holter.Monitor | None) -> object:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)


def _own_clip(model: nn.Module, monitor: holter.Monitor | None) -> object:
    assert monitor is not None
    return monitor.clip_grad_norm_(MAX_NORM)


def _naive_loop(model: nn.Module, monitor: holter.Monitor | None) -> object:
    return norms_by_item(list(model.parameters()))


NOTHING, CLIP = "nothing", "torch's clip"
VARIANTS = {
    NOTHING: Variant(),
    "nothing, again": Variant(),
    CLIP: Variant(before_step=_torch_clip),
    "watch()": Variant(watch={}),
    "watch(), monitor's clip": Variant(watch={}, before_step=_own_clip),
    "watch(every=1, budget=None)": Variant(watch=EVERY_STEP),
    "norm().item() a parameter": Variant(before_step=_naive_loop),
}


class Training:
    """A copy of a model, trained its own way; nothing in a step of it waits for the device but what is compared."""

    def __init__(self, variant: Variant, trained: Trainable, device: torch.device, run: Path, stack: ExitStack) -> None:
        torch.manual_seed(0)
        self.model = trained.build()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._variant, self._loss, self._device = variant, trained.loss, device
        shape = (4, trained.batch, trained.length)
        self._batches = torch.randint(trained.tokens, shape, device=device).unbind()
        self._steps = 0
        self.monitor: holter.Monitor | None = None
        if variant.watch is not None:
            watched = holter.watch(self.model, self.optimizer, run=run, **variant.watch)
            self.monitor = stack.enter_context(watched)

    def backward(self) -> Tensor:
        tokens = self._batches[self._steps % len(self._batches)]
        self._steps += 1
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            loss = self._loss(self.model, tokens)
        loss.backward()
        return loss.detach()

    def finish(self, loss: Tensor) -> None:
        """All of a step in which Holter has a part, but for its hook on the forward."""
        if self._variant.before_step is not None:
            self._variant.before_step(self.model, self.monitor)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.monitor is not None:
            self.monitor.log(loss=loss)

    def step(self) -> None:
        self.finish(self.backward())


def leave_idle_time_out(monitor: holter.Monitor) -> None:
    """Time in which others took their turns is no training time of this one: it must not fill its budget."""
    monitor._collector._step_ended = time.perf_counter()


def thread_seconds(monitor: holter.Monitor) -> float:
    """What a monitor has taken of the training thread."""
    return monitor._spending.thread_seconds
