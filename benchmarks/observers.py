"""The contenders: ways to look at every gradient of a model, from torch's own, from trackers and from Holter."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import holter
from benchmarks.models import Shapes
from holter.statistics.measure import Measurer

MAX_NORM = 1.0  # small enough that every clip does scale
_TENSORBOARD_ELEMENTS = 400_000_000
_BINS = 64  # of wandb.watch's histograms

Call = Callable[[], object]


class LeftOut(Exception):
    """Why a contender cannot or should not take part here."""


class Given:
    """Parameters with gradients that no training made: normal, of the size that gradients have."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: torch.device) -> None:
        random = torch.Generator(device).manual_seed(0)
        self.names = list(shapes)
        self.module = nn.Module()
        for place, shape in enumerate(shapes.values()):
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
            parameter.grad = torch.empty_like(parameter).normal_(0, 1e-3, generator=random)
            self.module.register_parameter(f"parameter_{place}", parameter)
        self.parameters = list(self.module.parameters())
        self.gradients = [found for found in (parameter.grad for parameter in self.parameters) if found is not None]
        self.bytes = sum(gradient.numel() * gradient.element_size() for gradient in self.gradients)
        self.elements = sum(gradient.numel() for gradient in self.gradients)
        self._untouched = [gradient.clone() for gradient in self.gradients]

    def restore(self) -> None:
        """As they were before a clip."""
        torch._foreach_copy_(self.gradients, self._untouched)


@dataclass(frozen=True)
class Observer:
    """A way to look at gradients: `build` prepares it and returns the call that is timed."""

    name: str
    build: Callable[[Given, ExitStack], Call]
    is_very_slow: bool = False  # no warm-up, and a single turn


# torch's own ------------------------------------------------------------------------------------------------------


def _torch_clip(given: Given, _: ExitStack) -> Call:
    return lambda: torch.nn.utils.clip_grad_norm_(given.parameters, MAX_NORM)


def _naive_loop(given: Given, _: ExitStack) -> Call:
    return lambda: norms_by_item(given.parameters)


def norms_by_item(parameters: Sequence[nn.Parameter]) -> list[float]:
    """The loop that most training scripts have; it waits for the device once a parameter."""
    return [parameter.grad.norm().item() for parameter in parameters if parameter.grad is not None]


def _three_by_item(given: Given, _: ExitStack) -> Call:
    return lambda: [(one.norm().item(), one.mean().item(), one.std().item()) for one in given.gradients]


def _foreach_norm(given: Given, _: ExitStack) -> Call:
    return lambda: torch.stack(torch._foreach_norm(given.gradients))


# Trackers ---------------------------------------------------------------------------------------------------------


def _wandb_way(given: Given, _: ExitStack) -> Call:
    return lambda: [wandb_histogram(gradient) for gradient in given.gradients]


def wandb_histogram(tensor: Tensor) -> tuple[list[float], list[float]] | None:
    """Counts and edges as wandb.watch gets them: of a copy, in float32, by five reads to the host."""
    values = tensor.detach().clone().reshape(-1).float()
    if values.numel() == 0 or values.isfinite().logical_not().all().item():
        return None
    if not values.isfinite().all().item():
        values = values[values.isfinite()]
    low, high = values.min().item(), values.max().item()
    if low == high:
        return [float(values.numel())], [low, high]
    counts = values.histc(bins=_BINS, min=low, max=high).cpu()
    return counts.tolist(), torch.linspace(low, high, _BINS + 1).tolist()


def _real_wandb(given: Given, stack: ExitStack) -> Call:
    if not importlib.util.find_spec("wandb"):
        raise LeftOut("wandb is not installed")
    import wandb

    directory = stack.enter_context(tempfile.TemporaryDirectory())
    os.environ["WANDB_SILENT"] = "true"
    run = wandb.init(mode="offline", dir=directory, project="benchmark")
    stack.callback(run.finish)
    watcher = run._torch  # what the hooks of wandb.watch call with each gradient

    def observe() -> None:
        for name, gradient in zip(given.names, given.gradients, strict=True):
            watcher.log_tensor_stats(gradient, f"gradients/{name}")
        run.log({})

    return observe


def _tensorboard(given: Given, stack: ExitStack) -> Call:
    if not importlib.util.find_spec("tensorboard"):
        raise LeftOut("tensorboard is not installed")
    if given.elements > _TENSORBOARD_ELEMENTS:
        raise LeftOut("it would take minutes at this size")
    if given.gradients[0].dtype is not torch.float32:
        raise LeftOut("in float32 only: it copies everything to the host either way")
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(stack.enter_context(tempfile.TemporaryDirectory()))
    stack.callback(writer.close)

    def observe() -> None:
        for name, gradient in zip(given.names, given.gradients, strict=True):
            writer.add_histogram(f"gradients/{name}", gradient, 0)

    return observe


# Holter -----------------------------------------------------------------------------------------------------------


def _torch_rows(given: Given, _: ExitStack) -> Call:
    from holter.statistics.torch_rows import TorchRows

    backend = TorchRows()
    return lambda: backend.measure(given.gradients, False)


def _moments(given: Given, _: ExitStack) -> Call:
    measurer = Measurer()
    return lambda: measurer.measure(given.gradients)


def _moments_read(given: Given, _: ExitStack) -> Call:
    measurer = Measurer()
    return lambda: measurer.measure(given.gradients).values.cpu()


def _moments_and_histogram(given: Given, _: ExitStack) -> Call:
    measurer = Measurer()
    return lambda: measurer.measure(given.gradients, histograms=True)


def _clip(given: Given, stack: ExitStack) -> Call:
    optimizer = torch.optim.SGD(given.parameters, lr=0.0)
    run = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
    watched = holter.watch(given.module, optimizer, run=run, histograms=None, weights=None, budget=None)
    monitor = stack.enter_context(watched)
    return lambda: monitor.clip_grad_norm_(MAX_NORM)


REFERENCE = "torch's clip_grad_norm_"
MOMENTS = "holter: moments"
OBSERVERS = (
    Observer(REFERENCE, _torch_clip),
    Observer(f"{REFERENCE}, again", _torch_clip),
    Observer("torch._foreach_norm", _foreach_norm),
    Observer("norm().item() a parameter", _naive_loop),
    Observer("norm, mean, std .item()", _three_by_item),
    Observer("the way of wandb.watch", _wandb_way),
    Observer("wandb.watch itself", _real_wandb),
    Observer("TensorBoard add_histogram", _tensorboard, is_very_slow=True),
    Observer("holter: plain torch moments", _torch_rows),
    Observer(MOMENTS, _moments),
    Observer("holter: moments, read", _moments_read),
    Observer("holter: moments, histogram", _moments_and_histogram),
    Observer("holter: clip and moments", _clip),
)
