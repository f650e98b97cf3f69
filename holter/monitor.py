"""Monitor: wires capture, collector and writer to one model and its optimizers, and contains what goes wrong."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holter.budget import Budget
from holter.capture import Capture, Layers, warn_of_other_monitors
from holter.clipping import Clip
from holter.collector import Collector
from holter.compiled_calls import Called
from holter.diagnosis.finding import Finding, from_problem
from holter.endings import AtExit, ending_of
from holter.examination import Examination
from holter.guarded import attempt, contained
from holter.history import History
from holter.machine import Machine
from holter.modules import parameters_in
from holter.notebook import monitor_html
from holter.problems import Complaint, Problems
from holter.progress import progress_of
from holter.record import Ending, Problem
from holter.run import Run
from holter.settings import Settings, cannot_write, check_layers, check_training, make_directory, make_sinks
from holter.sinks import Sink
from holter.spending import Spending
from holter.stages import DEVICE_PACE, Batch, Batches, Stages, batches
from holter.stopping import StopOn
from holter.training_info import describe_training, rank_of_process
from holter.writer import Writer

_CLOSE_SECONDS, _CATCH_UP_SECONDS = 1.8, 0.2


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
        sinks: Sequence[Sink | str] = (),
    ) -> None:
        optimizers = check_training(model, optimizer, scaler)
        selection, rank = check_layers(settings.layers, model), rank_of_process()
        warn_of_other_monitors(optimizers)
        self.path: Path | None = make_directory(run, rank)
        self._process, self._rank, self._closed = os.getpid(), rank, False
        self._scaler = weakref.ref(scaler) if scaler is not None else lambda: None
        self._budget = Budget(settings.measuring_share)
        self._problems = Problems(self._tell)
        self._layers = Layers(model, selection, self._problems)
        info = describe_training(model, optimizers, scheduler, settings, self._layers)
        device = next(parameters_in(model)).device
        self._stages = Stages(device, DEVICE_PACE) if settings.stages else None
        machine = Machine(device) if settings.machine else None
        self._examination, self._stop_on = self._examine(info, settings), StopOn(settings.stop_on)
        try:
            shown = make_sinks(sinks, self.path) if rank == 0 else ()  # one process tells the world
            self._writer = Writer(self.path, rank, info, shown, self._problems.add, machine, self._examination)
        except OSError as error:
            if self._examination is not None:
                self._examination.stop()
            raise cannot_write(self.path, error) from error
        self._working_thread: int | None = None  # the thread that is at work for Holter right now
        self._collector = Collector(
            model, self._layers, optimizers, settings, self._budget, self._writer.post, self._problems
        )
        self._spending = Spending(self._budget, self._collector, self._writer, self._examination)
        self._capture = Capture(model, optimizers, scaler, self, self._problems, sees_ends=settings.stages)
        self._run = Run(self.path, rank) if self.path is not None else None
        self._history = History()  # as last read
        self._model = weakref.ref(model, lambda _: self._model_is_gone())
        self._at_exit = AtExit(self._close)

    def __repr__(self) -> str:
        return f"<Monitor {self.state}: {self.step} steps in {self.path or 'memory'}, {len(self._findings())} findings>"

    def _repr_html_(self) -> str:
        return monitor_html(self.path, self._rank, self._writer.records, self._findings(), self.state, self.step)

    # For the user ---------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """The number of the next training step; steps count from 0."""
        return self._collector.step + self._collector.steps.is_open

    @property
    def state(self) -> str:
        """watching, degraded (something of Holter's failed, see `findings`) or closed."""
        if self._closed:
            return "closed"
        own = [finding for finding in self._findings() if finding.where == "monitor" and finding.severity != "info"]
        return "degraded" if own or self._writer.dropped else "watching"

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
        """What failed of Holter's own, and what is wrong with the training: one finding an incident, as it is known by
        now. Waits a moment for what is still to be examined."""
        if self._model() is None:  # when it went, nothing could wait
            self._writer.wait(_CLOSE_SECONDS)
        if self._examination is not None and not self._closed:
            with self._problems.contained("catch up with the diagnosis"):
                self._writer.flush(_CATCH_UP_SECONDS / 2)
                self._examination.catch_up(_CATCH_UP_SECONDS)
        return self._findings()

    @property
    def should_stop(self) -> bool:
        """True once a critical finding is known, or the validation loss has not fallen for `patience` steps. Costs
        nothing and waits for nothing: ask it after every step."""
        with self._problems.contained("say whether to stop"):
            return self._examination is not None and self._examination.should_stop
        return False

    @property
    def history(self) -> History:
        """Everything recorded so far, as series; waits a moment for what is still being written."""
        with self._problems.contained("read the run back"):
            self.flush()
            if self._run is not None:
                self._run.refresh()
            self._history = self._run.history if self._run is not None else History(self._writer.records)
        return self._history

    def log(self, *unnamed: Any, **values: Any) -> None:
        """Adds values to the step: `log(loss=loss)` after its forward, before or after `optimizer.step()`.

        Numbers and one-element tensors become scalars (several in one step: their mean); tensors given as `inputs`
        and `targets`, also in tuples and dictionaries, are measured like any tensor. What is called val_..., eval_...
        or test_... belongs to the last step that was taken. Nothing waits for the device. Raises `TrainingStopped`
        where `watch(stop_on=...)` asked for it, and nothing else.
        """
        self._log(unnamed, values)
        if self._stop_on.least is not None and not self._closed and os.getpid() == self._process:
            self._stop_on.check(self._found())

    @contained("log values")
    def _log(self, unnamed: tuple[Any, ...], values: Mapping[str, Any]) -> None:
        if unnamed:
            self._problems.add("log values", Complaint("they need names, as in log(loss=loss)"))
        if self._collector.is_of_next(values):
            self._end_step()
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
        is_plain = norm_type == 2.0 and not error_if_nonfinite and isinstance(max_norm, int | float)
        if is_plain and torch.cuda.is_initialized():  # else there is nothing to be done: no need to enter
            found: Tensor | None = self._clip_in_one_pass(max_norm)
            if found is not None:
                return found
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type, error_if_nonfinite, foreach)

    def batches(self, loader: Iterable[Batch], *, progress: bool = False) -> Batches[Batch]:
        """`for batch in monitor.batches(loader)`: the same batches; counts them and times the waiting for them. With
        `progress` a line on stderr says how far it is, where that is a terminal."""
        shown = partial(progress_of, loader, lambda: self._writer.newest, self._problems.add)
        return batches(loader, self, self.loaded, shown if progress and self._rank == 0 else None)

    @contained("time a wait for data")
    def wait_began(self) -> None:
        """Told by `batches`."""
        if self._stages is not None:
            self._stages.wait_began()

    @contained("time a wait for data")
    def waited(self, seconds: float) -> None:
        """Told by `batches`."""
        if self._stages is not None:
            self._stages.waited(seconds)

    @contained("count a batch")
    def loaded(self, batch: Any) -> None:
        """Told by `batches`."""
        self._collector.loaded(batch)

    def flush(self, seconds: float = 2.0) -> bool:
        """Waits until everything recorded so far is in the file, at most this long; says whether it is. It ends the
        training step, if an optimizer has stepped."""
        self._end_step()
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
        if self._model() is None:  # when it went, nothing could wait
            self._writer.wait(_CLOSE_SECONDS)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(*ending_of(kind, "finished", error))

    # What the capture tells -----------------------------------------------------------------------------------

    @contained("see a forward")
    def training_forward(self, called: Called | None = None) -> None:
        if self._collector.steps.ends_at_forward():
            self._end_step()
        self._collector.training_forward()
        self._attempt("look at the order of the layers", self._collector.look_at_order, called)
        self._attempt("look at activations", self._collector.look_at_activations, called)
        self._time("forward_began")

    @contained("see a forward of a part")
    def part_forward(self) -> None:
        self._end_step()
        self._collector.part_forward()

    def forward_ended(self) -> None:
        with self._problems.contained("time a stage"):  # no more: to ask all that `attempt` asks would take longer
            if self._stages is not None and not self._closed:
                self._stages.forward_ended()

    @contained("see a step coming")
    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None:
        if self._collector.steps.ends_before(optimizer, has_closure):
            self._end_step()
        self._time("measuring")
        is_first = self._collector.steps.begin(optimizer)
        if not has_closure:  # a closure runs the forward and computes the gradients inside the step
            self._attempt("take the activations", self._collector.take_activations)
        if is_first:  # later some have changed
            self._attempt("read the weights", self._collector.read_weights)  # which wait for their turn after a look
        if not has_closure:
            self._attempt("read the gradients", self._collector.read_gradients, "step", optimizer)
        self._attempt("look at what a step changes", self._collector.before_update, optimizer, has_closure)
        self._time("step_began")

    @contained("see a step")
    def after_step(self, optimizer: Optimizer, gradients_at: str | None) -> None:
        self._time("step_ended")
        self._attempt("measure an update", self._collector.after_update, optimizer)
        self._attempt("read the moments", self._collector.read_moments, optimizer)
        if gradients_at is not None:
            self._attempt("take the activations", self._collector.take_activations)
            self._attempt("read the gradients", self._collector.read_gradients, gradients_at, optimizer)
        self._take(optimizer, skipped=False)

    @contained("see a skipped step")
    def skipped_step(self, optimizer: Optimizer) -> None:
        if self._collector.steps.ends_before(optimizer, False):
            self._end_step()
        self._collector.steps.begin(optimizer)
        self._attempt("take the activations", self._collector.take_activations)
        self._attempt("read the gradients", self._collector.read_gradients, "skipped step", optimizer)
        self._take(optimizer, skipped=True)

    @contained("forget a step")
    def step_raised(self) -> None:
        self._collector.forget_step()

    # Guarded pieces: a failure in one does not keep the next from running -------------------------------------

    def _attempt(self, purpose: str, piece: Callable[..., None], *args: Any) -> None:
        attempt(self, purpose, piece, *args)

    def _time(self, moment: str) -> Any:
        return attempt(self, "time a stage", getattr(self._stages, moment)) if self._stages is not None else None

    @contained("see torch's clip")
    def torch_clips(self, parameters: Sequence[Tensor], clip: Clip | None) -> None:
        if self._collector.gradients.torch_clips(parameters, clip):
            self._warn_of_scaled_gradients()

    @contained("clip in one pass", charged=False)
    def _clip_in_one_pass(self, max_norm: float) -> Tensor | None:
        self._warn_of_scaled_gradients()
        return self._collector.gradients.clip(max_norm)

    def _warn_of_scaled_gradients(self) -> None:
        if self._capture.gradients_are_scaled():
            advice = "they are still multiplied by the loss scale: call scaler.unscale_(optimizer) before the clip"
            self._problems.add("trust the gradients at the clip", Complaint(advice))

    def _take(self, optimizer: Optimizer, skipped: bool) -> None:
        """This optimizer has had its turn in the training step, which may be over with it."""
        self._attempt("take the order of the layers", self._collector.take_order)
        self._attempt("describe a step", self._collector.take, optimizer, self._scaler(), skipped)
        if self._collector.steps.take(optimizer):
            self._end_step()
        self._capture.await_forward(self._collector.awaits_parts)

    @contained("record a step")
    def _end_step(self, is_last: bool = False) -> None:
        """Records the training step, if an optimizer has stepped in it. The last one is not timed."""
        if self._collector.steps.is_open:
            self._attempt("look at collectives", self._collector.look_at_collectives)
            self._spending.charge_other_threads()
            self._problems.step = self._collector.step
            self._collector.finish(None if is_last else self._time("finish"))

    @contained("begin a segment")
    def _begin_segment(self, step: int) -> None:
        self._end_step()
        self._writer.begin_segment()
        self._collector.restart(step)

    # The diagnosis ------------------------------------------------------------------------------------------

    def _examine(self, info: Mapping[str, Any], settings: Settings) -> Examination | None:
        if not settings.diagnose:
            return None
        alert = lambda finding: self._writer.alert(finding)  # noqa: E731 - which comes later
        return Examination(info, settings.diagnosis_share, settings.patience, alert, self._problems.add)

    def _found(self) -> tuple[Finding, ...]:
        with self._problems.contained("look at the diagnosis"):
            return self._examination.findings if self._examination is not None else ()
        return ()

    def _findings(self) -> tuple[Finding, ...]:
        return (*map(from_problem, self._problems), *self._found())

    # The end --------------------------------------------------------------------------------------------------

    def _tell(self, problem: Problem) -> None:
        self._writer.post_problem(problem)
        self._writer.alert(from_problem(problem))

    @contained("close")
    def _close(self, state: str, error: str = "") -> None:
        self._end_step(is_last=True)
        self._closed = True
        self._at_exit.cancel()
        self._capture.detach()
        self._collector.close()
        self._writer.close(Ending(time.time(), state, error), _CLOSE_SECONDS)

    def _model_is_gone(self) -> None:
        """Called by the garbage collector, so nothing here may wait."""
        if self._closed or os.getpid() != self._process:
            return
        with self._problems.contained("end with the model"):
            self._end_step(is_last=True)
            self._closed = True
            self._at_exit.cancel()
            self._capture.abandon()
            self._collector.abandon()
            self._writer.stop(Ending(time.time(), "ended"), _CLOSE_SECONDS)
