"""Monitor: wires capture, collector and writer to one model and its optimizers, and contains what goes wrong."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holter.budget import Budget
from holter.capture import Capture, Layers, is_watched
from holter.collector import Collector
from holter.diagnosis.finding import Finding, from_problem
from holter.guarded import contained
from holter.history import History
from holter.machine import Machine
from holter.problems import Complaint, Problems
from holter.record import Ending, Problem
from holter.run import Run
from holter.settings import Settings, activations_pace, cannot_write, check_sinks, check_training, make_directory
from holter.sinks import Sink
from holter.stages import Batch, Batches, Stages, batches
from holter.training_info import describe_training, rank_of_process
from holter.writer import Writer

_CLOSE_SECONDS = 1.8
_logger = logging.getLogger("holter")


def watch(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    *,
    run: str | os.PathLike[str] | bool | None = None,
    every: int = 1,
    weights: int | None = 100,
    updates: int | None = 10,
    activations: int | Literal["auto"] | None = "auto",
    histograms: int | None = 100,
    scaler: Any | None = None,
    scheduler: Any | None = None,
    total_steps: int | None = None,
    budget: float | None = 0.01,
    sinks: Sequence[Sink] = (),
) -> Monitor:
    """Records every optimizer step of this model from now on.

    `run` names the directory (`runs/<date-time-word>` by default; False keeps everything in memory). Gradients are
    measured every `every` steps, `weights`, `updates`, `activations` and `histograms` every so many, None for never,
    all within `budget`: the share of the training time that monitoring may take (None for no limit, 0 for scalars
    only); "auto" looks at activations every 100 steps on the CPU, and not on other devices. Pass the `scaler` of mixed
    precision so that the steps it skips are seen.

    >>> import holter, torch
    >>> model = torch.nn.Linear(2, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with holter.watch(model, optimizer, run=False) as monitor:
    ...     loss = model(torch.ones(4, 2)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     monitor.log(loss=loss)
    >>> len(monitor.history)
    1
    """
    looks = activations_pace(activations, model)
    settings = Settings(every, weights, updates, looks, histograms, budget, total_steps)
    return Monitor(model, optimizer, settings, run=run, scaler=scaler, scheduler=scheduler, sinks=sinks)


class Monitor:
    """Attached to a training until `close()`; made by `watch()`. Nothing it does raises into the training."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        settings: Settings,
        *,
        run: str | os.PathLike[str] | bool | None = None,
        scaler: Any | None = None,
        scheduler: Any | None = None,
        sinks: Sequence[Sink] = (),
    ) -> None:
        optimizers = check_training(model, optimizer, scaler)
        check_sinks(sinks)
        if any(is_watched(one) for one in optimizers):
            _logger.warning(
                "this optimizer is watched already, by a monitor that goes on too: close() that one to end it"
            )
        rank = rank_of_process()
        self.path: Path | None = make_directory(run, rank)
        self._process, self._rank, self._closed = os.getpid(), rank, False
        self._scaler = weakref.ref(scaler) if scaler is not None else lambda: None
        self._budget = Budget(settings.budget)
        self._problems = Problems(self._tell)
        info = describe_training(model, optimizers, scheduler, settings.total_steps)
        device = next(model.parameters()).device
        # On CUDA the stages need events at every step, whose cost is not known yet: there they are not observed.
        self._stages = Stages(device if device.type == "cpu" else torch.device("meta"))
        machine = Machine(device)
        try:
            self._writer = Writer(self.path, rank, info, sinks, self._problems.add, machine.scalars)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._thread_seconds = 0.0  # of the training thread
        self._writer_seconds = 0.0  # that are charged to the budget
        self._layers = Layers(model)
        self._collector = Collector(model, self._layers, settings, self._budget, self._writer.post, self._problems)
        self._capture = Capture(model, optimizers, scaler, self, self._problems)
        self._run = Run(self.path, rank) if self.path is not None else None
        self._history = History()  # as last read
        self._model = weakref.ref(model, lambda _: self._model_is_gone())
        self._last_error = getattr(sys, "last_value", None)
        atexit.register(self._at_exit)

    def __repr__(self) -> str:
        where = self.path or "memory"
        return f"<Monitor {self.state}: {self.step} steps in {where}, {len(self.findings)} findings>"

    # For the user ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of the next optimizer step; steps count from 0."""
        return self._collector.step

    @property
    def state(self) -> str:
        """watching, degraded (something of Holter's failed, see `findings`) or closed."""
        if self._closed:
            return "closed"
        return "degraded" if self._problems or self._writer.dropped else "watching"

    @property
    def dropped(self) -> int:
        """Records that were lost because the disk could not keep up."""
        return self._writer.dropped

    @property
    def cost(self) -> float:
        """The share of the training time that monitoring has taken so far, on the device and, where the device has to
        wait for it, on the processor."""
        return self._budget.spent / max(self._budget.elapsed, 1e-9)

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(from_problem(problem) for problem in self._problems)

    @property
    def history(self) -> History:
        """Everything recorded so far, as series; waits a moment for what is still being written."""
        with self._problems.contained("read the run back"):
            self.flush()
            if self._run is None:
                self._history = History(self._writer.records)
            else:
                self._run.refresh()
                self._history = self._run.history
        return self._history

    @contained("log values")
    def log(self, *unnamed: Any, **values: Any) -> None:
        """Adds values to the step: `log(loss=loss)`, before or after `optimizer.step()`.

        Numbers and one-element tensors become scalars (several in one step: their mean); tensors given as `inputs`
        and `targets` are measured like any tensor. Nothing waits for the device.
        """
        if unnamed:
            self._problems.add("log values", Complaint("they need names, as in log(loss=loss)"))
        self._collector.log(values)

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clips all gradients of the model as torch.nn.utils.clip_grad_norm_ does, and sees them before it.

        On CUDA one pass both measures and gives the norm, and what is within max_norm is not written again; with
        another norm_type, error_if_nonfinite or a tensor as max_norm, and elsewhere, torch's own function clips.
        """
        model = self._model()
        if model is None:
            raise RuntimeError("the model that this monitor watched is gone: there is nothing to clip")
        if not isinstance(max_norm, int | float | Tensor):
            raise TypeError(f"max_norm comes first and is a number, not {max_norm!r}: the monitor knows the parameters")
        if norm_type == 2.0 and not error_if_nonfinite and isinstance(max_norm, int | float):
            found: Tensor | None = self._clip_in_one_pass(max_norm)
            if found is not None:
                return found
        else:
            self._read_gradients_at_clip()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)
        self._note_clip(norm, max_norm, norm_type)
        return norm

    def batches(self, loader: Iterable[Batch]) -> Batches[Batch]:
        """`for batch in monitor.batches(loader)`: the same batches, and the time that waiting for them takes."""
        return batches(loader, self)

    @contained("time a wait for data")
    def wait_began(self) -> None:
        """Told by `batches`."""
        self._stages.wait_began()

    @contained("time a wait for data")
    def waited(self, seconds: float) -> None:
        """Told by `batches`."""
        self._stages.waited(seconds)

    def flush(self, seconds: float = 2.0) -> bool:
        """Waits until everything recorded so far is in the file, at most this long; says whether it is."""
        with self._problems.contained("wait for the writer"):
            return self._writer.flush(seconds)
        return False

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs so that a resumed training goes on counting where it stopped."""
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from a checkpoint. What follows is a new segment of the run; earlier records stay."""
        step = state.get("step") if isinstance(state, Mapping) else None
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"not a monitor's state: {state!r}. Pass what Monitor.state_dict() returned")
        self._begin_segment(step)

    def close(self) -> None:
        """Writes what is left and detaches. Takes 2 seconds at most; a second call does nothing."""
        self._close("finished")

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(*_ending_of(kind, "finished"))

    # What the capture tells -----------------------------------------------------------------------------------

    def training_forward(self) -> None:
        self._collector.training_forward()
        self._look_at_activations()
        self._time("forward_began")

    def forward_ended(self) -> None:
        self._time("forward_ended")

    @contained("read a step")
    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._stages.measuring()
        self._collector.take_activations()
        self._collector.read_weights()
        # A closure computes the gradients inside the step, and Holter's own clip has seen them already.
        if not has_closure and not self._collector.has_gradients(optimizer):
            self._collector.read_gradients("step", optimizer)
        self._collector.before_update(optimizer)
        self._stages.step_began()

    def after_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._time("step_ended")
        self._measure_update(optimizer)
        if has_closure:
            self._read_gradients_after_closure(optimizer)
        self._finish_step(optimizer, skipped=False)

    def skipped_step(self, optimizer: Optimizer) -> None:
        self._take_activations()
        self._read_gradients_of_skipped(optimizer)
        self._finish_step(optimizer, skipped=True)

    def step_raised(self) -> None:
        self._collector.forget_step()

    def _take_note_of(self, seconds: float, charged: bool) -> None:
        """Of the training thread's time."""
        self._thread_seconds += seconds
        self._budget.spend(self._visible(seconds) if charged else 0.0)

    def _visible(self, seconds: float) -> float:
        """What so much time of the processor adds to the training."""
        return 0.0 if self._collector.is_hidden else seconds

    # Guarded pieces: a failure in one does not keep the next from running -------------------------------------

    @contained("time a stage")
    def _time(self, moment: str) -> None:
        getattr(self._stages, moment)()

    @contained("look at activations")
    def _look_at_activations(self) -> None:
        self._collector.look_at_activations()

    @contained("take the activations of a skipped step")
    def _take_activations(self) -> None:
        self._collector.take_activations()

    @contained("clip in one pass", charged=False)
    def _clip_in_one_pass(self, max_norm: float) -> Tensor | None:
        self._warn_of_scaled_gradients()
        return self._collector.clip(max_norm)

    @contained("read the gradients at the clip")
    def _read_gradients_at_clip(self) -> None:
        self._collector.read_gradients("clip")
        self._warn_of_scaled_gradients()

    def _warn_of_scaled_gradients(self) -> None:
        if self._capture.gradients_are_scaled():
            advice = "they are still multiplied by the loss scale: call scaler.unscale_(optimizer) before the clip"
            self._problems.add("trust the gradients at the clip", Complaint(advice))

    @contained("note the clip")
    def _note_clip(self, norm: Tensor, max_norm: float, norm_type: float) -> None:
        self._collector.clipped(norm, max_norm, norm_type)

    @contained("measure an update")
    def _measure_update(self, optimizer: Optimizer) -> None:
        self._collector.after_update(optimizer)

    @contained("read the gradients of the closure")
    def _read_gradients_after_closure(self, optimizer: Optimizer) -> None:
        if not self._collector.has_gradients(optimizer):
            self._collector.read_gradients("closure", optimizer)

    @contained("read a skipped step")
    def _read_gradients_of_skipped(self, optimizer: Optimizer) -> None:
        if not self._collector.has_gradients(optimizer):
            self._collector.read_gradients("skipped step", optimizer)

    @contained("record a step")
    def _finish_step(self, optimizer: Optimizer, skipped: bool) -> None:
        seconds = self._writer.seconds
        self._budget.spend(self._visible(seconds - self._writer_seconds))
        self._writer_seconds = seconds
        self._problems.step = self.step
        self._collector.finish(optimizer, self._scaler(), skipped=skipped, times=self._stages.finish())

    @contained("begin a segment")
    def _begin_segment(self, step: int) -> None:
        self._writer.begin_segment()
        self._collector.restart(step)

    # The end --------------------------------------------------------------------------------------------------

    def _tell(self, problem: Problem) -> None:
        self._writer.post_problem(problem)
        self._writer.alert(from_problem(problem))

    @contained("close")
    def _close(self, state: str, error: str = "") -> None:
        self._closed = True
        atexit.unregister(self._at_exit)
        self._capture.detach()
        self._collector.forget_step()
        self._writer.close(Ending(time.time(), state, error), _CLOSE_SECONDS)

    def _at_exit(self) -> None:
        # An error from before, as an interactive session keeps them, did not end this training.
        error = None if getattr(sys, "last_value", None) is self._last_error else getattr(sys, "last_type", None)
        self._close(*_ending_of(None if hasattr(sys, "ps1") else error, "ended"))

    def _model_is_gone(self) -> None:
        """Called by the garbage collector, so nothing here may wait."""
        if self._closed or os.getpid() != self._process:
            return
        with self._problems.contained("end with the model"):
            self._closed = True
            atexit.unregister(self._at_exit)
            self._capture.abandon()
            self._writer.stop(Ending(time.time(), "ended"), _CLOSE_SECONDS)


def _ending_of(kind: type[BaseException] | None, otherwise: str) -> tuple[str, str]:
    """How a training ended, by the exception that ended it; only its class is kept."""
    if kind is None:
        return otherwise, ""
    if issubclass(kind, KeyboardInterrupt):
        return "interrupted", ""
    if issubclass(kind, SystemExit):
        return "ended", ""
    return "failed", kind.__name__
