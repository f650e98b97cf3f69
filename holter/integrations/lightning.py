"""Holter in Lightning: `Trainer(callbacks=[HolterCallback()])` records every training step of a fit.

Lightning passes every optimizer a closure in which forward, backward and clip happen, and calls `training_step` without
the module's own forward hooks. So what a plain loop shows by itself is told here: when a batch is begun, when its
forward is over, and which loss, inputs and validation values belong to it.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holter.integrations.options import check_options
from holter.monitor import Monitor
from holter.record import is_validation
from holter.run import create_directory
from holter.stopping import TrainingStopped, is_severe
from holter.watching import watch

_logger = logging.getLogger("holter")


def _lightning() -> Any:
    """Of the two packages that are Lightning, the one in use: their classes are not each other's."""
    homes = {"lightning.pytorch": "lightning", "pytorch_lightning": "pytorch_lightning"}
    for module in homes:
        if sys.modules.get(module) is not None:
            return sys.modules[module]
    for module, package in homes.items():
        if find_spec(package) is not None:
            return import_module(module)
    raise ImportError("the Lightning callback needs lightning: pip install 'holter[lightning]'")


_Callback: Any = _lightning().Callback


class HolterCallback(_Callback):  # type: ignore[misc]  # which of two packages it is from is known at run time only
    """Watches the module of a Trainer while it fits; takes the options of `holter.watch`.

    Optimizers, scheduler, scaler and the number of steps are the trainer's. With `stop` the training ends where
    `Monitor.should_stop` says so. Of a batch that is a pair the first part is measured as inputs and the second as
    targets, unless `batch` is False. A checkpoint of the trainer carries the run: `fit(ckpt_path=...)` goes on in it.
    `monitor` is the Monitor of the last fit.
    """

    def __init__(self, *, stop: bool = False, batch: bool = True, **options: Any) -> None:
        if not isinstance(batch, bool):
            raise ValueError(f"batch={batch!r}: give True or False")
        check_options(options, stop, ("model", "optimizer"))
        self.monitor: Monitor | None = None
        self._options, self._stop, self._batch = options, stop, batch
        self._restored: Mapping[str, Any] | None = None  # from a checkpoint
        self._hooks: list[RemovableHandle] = []
        self._has_stopped = False
        self._manual_loss: Any = None  # of a manual step whose training_step returns nothing
        self._is_forward_due = False  # the batch was begun, and has had no backward yet
        self._metrics_before: dict[str, Any] = {}  # a validation

    # Beginning and end ----------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Here the optimizers exist, checkpoints are restored and the sanity check of the validation is over."""
        if self._restored is None and trainer.global_step > 0 and self.monitor is not None:
            self._restored = self.state_dict()  # the same trainer fits once more
        restored, self._restored = self._restored, None
        options = {**_plan(trainer, pl_module), **self._options, "run": self._run(trainer, restored)}
        self.monitor = watch(pl_module, trainer.optimizers, **options)
        self._has_stopped = False
        if restored is not None and restored.get("monitor"):
            self.monitor.load_state_dict(restored["monitor"])
        if pl_module.automatic_optimization:
            self._hooks = [one.register_step_pre_hook(self._step_begins) for one in trainer.optimizers]

    def _run(self, trainer: Any, restored: Mapping[str, Any] | None) -> Any:
        """The directory that the user named, or that of the checkpoint where it is still there, or a new one."""
        run = self._options.get("run")
        if run is not None and run is not True:
            return run
        before = restored.get("run") if restored is not None else None
        if before is not None and Path(before).is_dir():
            return before
        if trainer.world_size == 1:
            return run
        mine = str(create_directory(None)) if trainer.global_rank == 0 else None
        return trainer.strategy.broadcast(mine)  # all processes are here, and need one name

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        reasons = self.monitor.findings if self.monitor is not None and self._has_stopped else ()
        lasting = (finding for finding in reasons if finding.until is None and is_severe(finding, "critical"))
        found = next(lasting, None)
        self._end(TrainingStopped(found) if found is not None else None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._end(exception)

    def _end(self, error: BaseException | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._metrics_before.clear()
        if self.monitor is not None:
            self.monitor.__exit__(type(error) if error is not None else None, error, None)

    def state_dict(self) -> dict[str, Any]:
        """For the trainer's checkpoints."""
        if self.monitor is None:
            return {}
        path = self.monitor.path
        return {"monitor": self.monitor.state_dict(), "run": str(path) if path is not None else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From a checkpoint: before training starts, so it waits until there is a monitor."""
        self._restored = state_dict or None

    # Steps ----------------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor is None:
            return
        self._is_forward_due = True
        self.monitor.loaded(batch)
        self.monitor.training_forward()
        if self._batch and isinstance(batch, tuple | list) and len(batch) == 2:
            self.monitor.log(inputs=batch[0], targets=batch[1])

    def _step_begins(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward comes inside the step, in its closure: so it is no time of the optimizer's."""
        if self._is_forward_due and kwargs.get("closure") is not None and self.monitor is not None:
            self.monitor.training_forward()

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._is_forward_due = False
        if self.monitor is None:
            return
        if not pl_module.automatic_optimization:
            # The forward of a second optimizer's step was not seen; what was read before is of the step before.
            self.monitor.training_forward()
            if len(trainer.optimizers) == 1:  # of several it would be now this loss, now that
                self._manual_loss = loss.detach()
        self.monitor.forward_ended()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.monitor is None:
            return
        self._is_forward_due = False
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        loss, self._manual_loss = self._manual_loss if loss is None else loss, None
        if loss is not None:
            # Lightning divides the loss of a batch by the number of those that it accumulates.
            parts = trainer.accumulate_grad_batches
            self.monitor.log(loss=loss if parts == 1 else loss * parts)
        if self._stop:
            self._stop_if_asked(self.monitor, trainer, batch_idx)

    def _stop_if_asked(self, monitor: Monitor, trainer: Any, batch_idx: int) -> None:
        """Processes stop together or not at all: they ask each other, but not at every step, for that means waiting."""
        should_stop = monitor.should_stop
        if trainer.world_size > 1:
            if (batch_idx + 1) % max(trainer.log_every_n_steps, 1) != 0:
                return
            should_stop = trainer.strategy.reduce_boolean_decision(should_stop, all=False)
        if should_stop:
            self._has_stopped = trainer.should_stop = True

    # Validation -----------------------------------------------------------------------------------------------

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._metrics_before = dict(trainer.callback_metrics)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The metrics of a trainer are those of training and validation alike; those of this one are new objects."""
        if self.monitor is None:  # the sanity check, before the training starts
            return
        before, self._metrics_before = self._metrics_before, {}
        found = {name: value for name, value in trainer.callback_metrics.items() if value is not before.get(name)}
        self.monitor.log(**{name if is_validation(name) else f"val_{name}": value for name, value in found.items()})


def _plan(trainer: Any, pl_module: Any) -> dict[str, Any]:
    """What the trainer knows of the training to come."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    return {
        "scaler": getattr(trainer.precision_plugin, "scaler", None),
        "scheduler": schedulers[0] if schedulers else None,
        "total_steps": _total_steps(trainer, pl_module),
    }


def _total_steps(trainer: Any, pl_module: Any) -> int | None:
    """Of all optimizers together; None where it has no end, or is not known. By now the data are loaded: asking
    changes nothing."""
    try:
        # How often a manual training_step steps is its own affair; max_steps counts the steps of all optimizers.
        total = trainer.estimated_stepping_batches if pl_module.automatic_optimization else trainer.max_steps
    except Exception as error:  # Lightning's own: where the accumulation changes from epoch to epoch
        _logger.info("the number of steps is not known: %s", error)
        return None
    return int(total) if math.isfinite(total) and total > 0 else None
