"""Hugging Face transformers: `Trainer(..., callbacks=[HolterCallback()])`, and so every trainer that is made of it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

try:
    from transformers.trainer_callback import TrainerCallback
except ImportError as error:
    raise ImportError("this integration needs transformers: pip install 'holter[transformers]'") from error

import holter
from holter.hooks import ModuleHook
from holter.integrations.accelerate import (
    agreed_directory,
    is_loggable,
    listen_to_backwards,
    share_of_step,
    silenced,
    unwrapped,
)
from holter.integrations.options import check_options
from holter.monitor import Monitor
from holter.stopping import TrainingStopped, is_severe

_KEY = "holter"  # of what a checkpoint keeps. Not the callback's name: what is called so the Trainer would rebuild
_TRAINERS_OWN = ("model", "optimizer", "scaler", "scheduler", "total_steps")  # known from the Trainer
_NOT_LOGGED = {"loss", "grad_norm", "learning_rate", "epoch"}  # measured at every step, or no measurement
_TIMES = ("_runtime", "_per_second", "_time")  # ends of names: how long an evaluation took
_SUMMARY = "train_runtime"  # in what is logged once, when training is over


class HolterCallback(TrainerCallback):
    """Watches a Trainer's training; takes the options of `holter.watch`. `monitor` is there once it has begun.

    `stop=True` ends the training as soon as `monitor.should_stop`, `stop_on="warning"` at the first such finding: as
    Trainers end, with the last evaluation and the best model. Several processes agree on it when they log.
    A training that is resumed from a checkpoint goes on in the same run.
    """

    def __init__(self, *, stop: bool = False, **options: Any) -> None:
        check_options(options, stop, _TRAINERS_OWN)
        self._stop, self._options = stop, options
        self._attached: _Attached | None = None
        self._monitor: Monitor | None = None

    @property
    def monitor(self) -> Monitor:
        """Of the training that goes on, or of the last one."""
        if self._monitor is None:
            raise RuntimeError("no training has begun yet: the monitor is made by Trainer.train()")
        return self._monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._attached is not None:  # nobody said that the training before is over: it raised
            self._attached.close("failed")
            self._attached = None
        saved = _saved(state)
        options = {**self._options, "total_steps": state.max_steps, "scheduler": kwargs.get("lr_scheduler")}
        options["run"] = _directory(options.get("run"), saved, args.world_size, state.is_world_process_zero)
        options["scaler"] = getattr(kwargs["optimizer"], "scaler", None)
        if not state.is_world_process_zero:
            options = silenced(options)
        self._monitor = holter.watch(kwargs["model"], unwrapped(kwargs["optimizer"]), **options)
        if state.global_step > 0:
            self._monitor.load_state_dict({"step": saved.get("step", state.global_step)})
        self._attached = _Attached(self._monitor, kwargs["model"], kwargs["optimizer"])

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._with_attached(_Attached.asks_for_data)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._with_attached(_Attached.has_data)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._with_attached(_Attached.log_loss)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        attached = self._attached
        if attached is None:
            return
        attached.asks_for_data()
        if isinstance(getattr(state, "stateful_callbacks", None), dict):  # is part of every checkpoint
            state.stateful_callbacks[_KEY] = attached.saved()
        is_asked = self._stop or self._options.get("stop_on") is not None
        if is_asked and _agreed(attached.wants_to_stop(self._stop), args, control):
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._with_attached(_Attached.log, kwargs.get("logs") or {})

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._with_attached(_Attached.asks_for_data)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._with_attached(_Attached.asks_for_data)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._with_attached(_Attached.close)
        self._attached = None

    def _with_attached(self, call: Callable[..., None], *args: Any) -> None:
        if self._attached is not None:
            call(self._attached, *args)


class _Attached:
    """One training that is watched: what a monitor cannot see by itself. Nothing of it raises into the training."""

    def __init__(self, monitor: Monitor, model: nn.Module, optimizer: Any) -> None:
        self._monitor, self._problems = monitor, monitor._problems
        self._optimizer = weakref.ref(optimizer)
        self._run = None if monitor.path is None else str(monitor.path.resolve())
        self._loss: Tensor | None = None  # of the step that is being taken, as far as it is known
        self._has_losses = False  # of single steps
        self._wants_to_stop = False
        self._stopped: TrainingStopped | None = None  # the finding that it wants to for
        self._asked_at: float | None = None  # for data, by the clock
        hook = ModuleHook(self, "see a batch", _Attached._see_batch)
        self._handle = model.register_forward_pre_hook(hook, with_kwargs=True)
        self._listen_no_more = listen_to_backwards(_Weakly(self))

    def asks_for_data(self) -> None:
        """The last time before a step begins counts: what the Trainer does next is to fetch its batches."""
        self._monitor.wait_began()
        self._asked_at = time.perf_counter()

    def has_data(self) -> None:
        if self._asked_at is not None:
            self._monitor.waited(time.perf_counter() - self._asked_at)
            self._asked_at = None

    def see_backward(self, accelerator: Any, loss: Any) -> None:
        """Micro-batches add up: the Trainer has divided each by their number, or by that of all their tokens."""
        with self._problems.contained("see a loss"):
            optimizer = self._optimizer()
            if any(one is optimizer for one in accelerator._optimizers):
                share = share_of_step(accelerator, loss)
                self._loss = share if self._loss is None else self._loss + share

    def log_loss(self) -> None:
        loss, self._loss = self._loss, None
        if loss is not None:
            self._has_losses = True
            self._log({"loss": loss})

    def log(self, logs: Mapping[str, Any]) -> None:
        with self._problems.contained("see what the Trainer logs"):
            self._log(_worth_recording(logs, self._has_losses))
        self.asks_for_data()

    def saved(self) -> dict[str, Any]:
        """What a checkpoint needs, as JSON has it."""
        return {**self._monitor.state_dict(), "run": self._run}

    def wants_to_stop(self, is_asked: bool) -> bool:
        if is_asked and not self._wants_to_stop and self._monitor.should_stop:
            self._wants_to_stop = True
            found = next((one for one in self._monitor.findings if is_severe(one, "critical")), None)
            self._stopped = TrainingStopped(found) if found is not None else None  # else it is out of patience
        return self._wants_to_stop or self._stopped is not None

    def close(self, state: str | None = None) -> None:
        self._handle.remove()
        self._listen_no_more()
        if state is not None:
            self._monitor._close(state)
        elif self._stopped is not None:
            self._monitor.__exit__(TrainingStopped, self._stopped, None)
        else:
            self._monitor.close()

    def _see_batch(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if not (model.training and torch.is_grad_enabled()):
            return
        inputs = {name: value for name, value in kwargs.items() if name not in ("labels", "num_items_in_batch")}
        if inputs:
            self._log({"inputs": inputs})
        if isinstance(kwargs.get("labels"), Tensor):
            self._log({"targets": kwargs["labels"]})

    def _log(self, values: Mapping[str, Any]) -> None:
        try:
            self._monitor.log(**values)
        except TrainingStopped as stopped:  # where stop_on asked for it: a Trainer is ended by its own means
            self._stopped = stopped


class _Weakly:
    """Tells an attachment of backwards as long as it lives."""

    def __init__(self, attached: _Attached) -> None:
        self._attached = weakref.ref(attached)

    def __call__(self, accelerator: Any, loss: Any) -> None:
        attached = self._attached()
        if attached is not None:
            attached.see_backward(accelerator, loss)


def _saved(state: Any) -> Mapping[str, Any]:
    """What the checkpoint keeps of the run; nothing where there was none, or where it was made without Holter."""
    kept = getattr(state, "stateful_callbacks", None)
    found = kept.get(_KEY) if isinstance(kept, dict) and state.global_step > 0 else None
    return found if isinstance(found, dict) else {}


def _directory(asked: Any, saved: Mapping[str, Any], processes: int, is_main: bool) -> Any:
    """Of a resumed training the run it began in, if that is still there and no other was asked for."""
    before = saved.get("run")
    known = before if isinstance(before, str) and Path(before).is_dir() else None
    if processes > 1:  # which may see different disks
        return agreed_directory(asked, is_main, known)
    return known if known is not None and asked in (None, True) else asked


def _agreed(wants: bool, args: Any, control: Any) -> bool:
    """Whether to stop. One process of several that stopped alone would leave the others waiting for it: they ask each
    other at the steps that are logged, where Trainers wait for the device anyway."""
    if args.world_size == 1:
        return wants
    if not control.should_log:
        return False
    wanted = torch.tensor([float(wants)], device=args.device)
    torch.distributed.all_reduce(wanted, torch.distributed.ReduceOp.MAX)
    return bool(wanted.item())


def _worth_recording(logs: Mapping[str, Any], has_losses: bool) -> dict[str, Any]:
    """What a Trainer logs that Holter does not measure by itself.

    The loss that it logs is the mean of many steps, without those that were NaN: recorded, as what it is, only where
    the losses of single steps are not seen.
    """
    if _SUMMARY in logs:
        return {}
    found = {
        name: value
        for name, value in logs.items()
        if is_loggable(name, value) and name not in _NOT_LOGGED and not name.endswith(_TIMES)
    }
    if "loss" in logs and not has_losses:
        found["mean_loss"] = logs["loss"]
    return found
