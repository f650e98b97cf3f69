"""Hugging Face Accelerate: one line after `accelerator.prepare`.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    monitor = watch(accelerator, model, optimizer)

What goes to `accelerator.log` is recorded, and `accelerator.end_training()` closes the run.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

import holter
from holter.monitor import Monitor
from holter.run import create_directory

try:
    accelerate: Any = import_module("accelerate")  # it has no types
    tracking: Any = import_module("accelerate.tracking")
except ImportError as error:
    raise ImportError("this integration needs accelerate: pip install 'holter[accelerate]'") from error


def watch(accelerator: Any, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], **options: Any) -> Monitor:
    """`holter.watch` of what `accelerator.prepare` returned; takes the same options.

    Knows the loss scaler, and that gradients are accumulated; sinks are kept on the main process. All processes write
    to one run. Where trackers are used, call it after `accelerator.init_trackers`.
    """
    alone = accelerator.num_processes == 1
    options["run"] = options.get("run") if alone else agreed_directory(options.get("run"), accelerator.is_main_process)
    options.setdefault("scaler", accelerator.scaler)
    if not accelerator.is_main_process:
        options = silenced(options)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else optimizer
    monitor = holter.watch(accelerator.unwrap_model(model), list(map(unwrapped, optimizers)), **options)
    accelerator.trackers.append(HolterTracker(monitor))
    return monitor


class HolterTracker(tracking.GeneralTracker):  # type: ignore[misc]  # of no known type
    """Takes what is given to `accelerator.log` to a monitor. Added by `watch`."""

    name = "holter"
    requires_logging_directory = False
    main_process_only = False  # every process has a monitor to close

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        self._monitor = monitor

    @property
    def tracker(self) -> Monitor:
        """What `accelerator.get_tracker("holter", unwrap=True)` returns."""
        return self._monitor

    def store_init_configuration(self, values: Mapping[str, Any]) -> None:
        """Not kept: a configuration may hold what must not be in a run's files."""

    def log(self, values: Mapping[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """`step` is not asked for: a monitor counts training steps, and a value belongs to the one at hand."""
        self._monitor.log(**{name: value for name, value in values.items() if is_loggable(name, value)})

    def finish(self) -> None:
        self._monitor.close()


def is_loggable(name: str, value: Any) -> bool:
    """No word, and not of a name that is taken among a method's arguments."""
    return name != "self" and (value.numel() == 1 if isinstance(value, Tensor) else hasattr(value, "__float__"))


def unwrapped(optimizer: Any) -> Any:
    """The optimizer that steps, inside of Accelerate's own. Those are told from others by what they hold."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer) and hasattr(optimizer, "gradient_state"):
        optimizer = optimizer.optimizer
    return optimizer


def silenced(options: Mapping[str, Any]) -> dict[str, Any]:
    """As all processes but the main one have them: it alone tells others what it sees."""
    return {name: value for name, value in options.items() if name not in ("sinks", "alerts")}


def agreed_directory(run: str | os.PathLike[str] | bool | None, is_main: bool, known: str | None = None) -> Any:
    """Where all processes write to: what was asked for, or else what the main one says: the `known`, or a new one."""
    if run is not None and run is not True:
        return run
    named = [known or str(create_directory(None).resolve()) if is_main else None]
    return accelerate.utils.broadcast_object_list(named)[0]


# What is backpropagated ------------------------------------------------------------------------------------------

_Told = Callable[[Any, Tensor], None]
_listening: list[_Told] = []
_stood: list[tuple[Callable[..., Any], Callable[..., Any]]] = []  # Accelerate's function, and what stands before it
_changing = threading.Lock()


def listen_to_backwards(told: _Told) -> Callable[[], None]:
    """Calls `told` before every `Accelerator.backward`, with the loss; returns what ends it. `told` must not raise.

    It is the only place that every Trainer's loss comes by, whoever computes it: the model, a smoother of labels or a
    user's function. After the last listener is gone Accelerate is as it was.
    """
    with _changing:
        _listening.append(told)
        if not _stood:
            inner = accelerate.Accelerator.backward
            outer = _backward_stand_in(inner)
            accelerate.Accelerator.backward = outer
            _stood.append((inner, outer))
    return functools.partial(_listen_no_more, told)


def _listen_no_more(told: _Told) -> None:
    with _changing:
        _listening[:] = [other for other in _listening if other is not told]
        while _stood and not _listening:
            inner, outer = _stood.pop()
            if (
                accelerate.Accelerator.backward is outer
            ):  # else somebody stands before it by now: it stays, and tells nobody
                accelerate.Accelerator.backward = inner


def _backward_stand_in(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def backward(self: Any, loss: Tensor, **kwargs: Any) -> Any:
        for told in tuple(_listening):
            told(self, loss)
        return inner(self, loss, **kwargs)

    return backward


def share_of_step(accelerator: Any, loss: Tensor) -> Tensor:
    """What this backward adds to the loss of its training step: all of them add up to it."""
    parts = 1 if accelerator.distributed_type == "DEEPSPEED" else accelerator.gradient_accumulation_steps
    return loss.detach() / parts
