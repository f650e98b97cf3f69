"""Collector: the step that is being taken. Decides what is measured in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holter.activation_roles import ActivationRoles
from holter.budget import Budget
from holter.cadence import Cadence
from holter.capture import Layers, gradient_scale_of, held_by
from holter.draft import Draft, NamedSums, RoleRows
from holter.execution import ExecutionOrder
from holter.gradient_reads import GradientReads
from holter.logged import Logged, scalar_of
from holter.measuring import Measuring
from holter.optimizer_state import OptimizerRoles, settings_of
from holter.problems import Problems
from holter.settings import Settings
from holter.stages import StageLog, StageTimes
from holter.update_roles import UpdateRoles

_FLAGS = NamedSums(("requires_grad", "held", "has_gradient"))  # of a weight; held: by an optimizer


class Collector:
    """Fills one draft a step and posts it when the step is over. Runs on the training thread and never waits."""

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        optimizers: Iterable[Optimizer],
        settings: Settings,
        budget: Budget,
        post: Callable[[Draft], None],
        problems: Problems,
    ) -> None:
        self.step = 0
        self._layers, self._settings, self._budget = layers, settings, budget
        self._post, self._problems = post, problems
        self._cadence = Cadence(settings, budget)
        self._measuring = Measuring(self._cadence, problems)
        if settings.budget != 0:
            with problems.contained("prepare to measure"):
                self._measuring.measurer.prepare(layers.current()[1])
        self._activations = ActivationRoles(model, problems, layers.has_module)
        self._looked_before = 0.0  # seconds that looking at activations has been charged for
        self._order = ExecutionOrder(model, layers, problems)
        self._stage_log = StageLog()
        self._pending = Draft()
        self.gradients = GradientReads(layers, self._measuring, settings, problems)
        self._updates = UpdateRoles(layers, self._measuring, settings.updates)
        self._moments = OptimizerRoles(layers, self._measuring, settings.optimizer_state)
        self._optimizers = WeakSet(optimizers)  # all that have been seen
        self._logged = Logged(self._measuring, settings.every, post, problems)
        self._step_ended = time.perf_counter()
        self._spent_before = 0.0

    def restart(self, step: int) -> None:
        """Goes on from another step, as after loading a checkpoint; what was pending there is not of this line."""
        self.step = step
        self._pending = Draft()
        self.gradients.forget()
        self._order.forget()
        self._activations.restart()
        self._updates.restart()
        self._logged.restart()
        self._cadence.restart(step)

    @property
    def is_hidden(self) -> bool:
        """Whether the time of this thread does not count, because the device has work for a while."""
        return self._cadence.is_hidden

    def training_forward(self) -> None:
        self._logged.training_forward()
        self.gradients.forget()

    def forget_step(self) -> None:
        """One that was begun and raised."""
        self.gradients.forget()
        self._order.forget()
        self._updates.give_up()
        self._activations.give_up()

    def abandon(self) -> None:
        """Lets go of the parameters where the model is gone and a step had raised; by the garbage collector."""
        self._updates.give_up()

    def loaded(self, batch: Any) -> None:
        self._logged.loaded(batch)

    def log(self, values: Mapping[str, Any]) -> None:
        self._logged.log(values, self._pending, self.step)

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Numbers of Holter's own about the step that is being taken, or about one before."""
        if step != self.step:
            self._post_late(step, scalars)
            return
        for name, value in scalars.items():
            self._pending.set(name, value)

    # What is measured -----------------------------------------------------------------------------------------

    def read_weights(self) -> None:
        pace = self._settings.weights
        if pace is None or not self._cadence.is_wanted("weight", pace):
            return
        names, parameters = self._layers.current()
        self._pending.rows = [rows for rows in self._pending.rows if rows.role != "weight"]
        held = set().union(*map(held_by, self._optimizers))
        flags = {
            name: (parameter.requires_grad, id(parameter) in held, parameter.grad is not None)
            for name, parameter in zip(names, parameters, strict=True)
        }
        for part, rows in self._measuring.measure("weight", names, list(parameters), pace):
            beside = torch.tensor([flags[name] for name in part], dtype=torch.float64, device="cpu")
            self._pending.rows.append(RoleRows("weight", tuple(part), rows, beside, _FLAGS))

    def look_at_activations(self) -> None:
        """At the beginning of a training forward: at what the layers put out, if it is time to."""
        pace, roles = self._settings.activations, self._activations
        if pace is None or roles.is_armed or not self._cadence.is_wanted("activation", pace):
            return
        if not roles.observed:
            self._pending.notes["activations"] = "not observed: the model is compiled"
            return
        self._layers.everything()  # so that new modules are known to be selected or not
        roles.arm(self._cadence.wants_histogram("activation", pace))

    def look_at_order(self) -> None:
        """At the beginning of a training forward: at the order in which the modules run, if it is not known."""
        if self._settings.budget != 0:
            self._order.look()

    def take_order(self) -> None:
        """Of the step that is being taken."""
        if self._settings.budget != 0:
            self._pending.notes.update(self._order.take())

    def take_activations(self) -> None:
        """Of the step that is being taken."""
        if not self._activations.is_armed:
            return
        in_hooks = self._activations.seconds - self._looked_before  # what this takes is timed with the step
        looked = self._activations.collect()
        self._pending.rows += looked.rows
        self._pending.notes.update(looked.notes)
        for name, value in looked.scalars.items():
            self._add_scalar(self._pending, name, value)
        seconds = self._activations.seconds - self._looked_before
        self._looked_before += seconds
        self._budget.spend(in_hooks, None if self._cadence.sets_up("activation") else "activation")
        self._budget.learn("activation", seconds, is_settled=True)
        if looked.rows:
            has_histograms = any(rows.has_histograms for rows in looked.rows)
            self._cadence.note_measured("activation", has_histograms)

    def before_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._updates.before(self.step, optimizer, has_closure)

    def after_update(self, optimizer: Optimizer) -> None:
        self._pending.rows += self._updates.after(optimizer)

    def read_moments(self, optimizer: Optimizer) -> None:
        self._pending.rows += self._moments.after(optimizer)

    # The end of a step ----------------------------------------------------------------------------------------

    def finish(
        self, optimizer: Optimizer, scaler: Any | None = None, *, skipped: bool = False, times: StageTimes | None = None
    ) -> None:
        """The step is over: its draft goes to the writer, the next one begins."""
        draft, self._pending = self._pending, Draft()
        try:
            self._cadence.charge_device_time()
            self.gradients.take(draft, optimizer)
            self._describe(draft, optimizer, scaler, skipped)
            if times is not None:
                self._add_times(draft, times)
            self._logged.add_throughput(draft)
        finally:  # whatever could be collected is kept, and a step is counted once
            draft.step, draft.time = self.step, time.time()
            self.step += 1
            self._cadence.step = self.step
            self._logged.step_taken()
            self._post(draft.seal())

    def _add_scalar(self, draft: Draft, name: str, value: Any) -> None:
        """One that is no number costs itself: an optimizer may hold anything as its rate."""
        with self._problems.contained(f"record {name}"):
            draft.add(name, scalar_of(value))

    def _add_times(self, draft: Draft, times: StageTimes) -> None:
        for name, seconds in self._stage_log.add(self.step, times).items():
            draft.set(name, seconds)
        for step, known in self._stage_log.arrived():
            self._post_late(step, known)

    def _post_late(self, step: int, scalars: Mapping[str, float]) -> None:
        late = Draft(step=step, time=time.time(), late=True)
        for name, value in scalars.items():
            late.set(name, value)
        self._post(late.seal())

    def _describe(self, draft: Draft, optimizer: Optimizer, scaler: Any | None, skipped: bool) -> None:
        for name, value in settings_of(optimizer):
            self._add_scalar(draft, name, value)
        draft.gradient_scale = gradient_scale_of(optimizer)
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the step by itself
        if isinstance(found_inf, Tensor):
            self._add_scalar(draft, "skipped", found_inf)
        elif scaler is not None:
            draft.add("skipped", float(skipped))
        read_scale = getattr(scaler, "_get_scale_async", None)  # get_scale() would wait for the device
        scale = read_scale() if read_scale else None
        if isinstance(scale, Tensor):
            self._add_scalar(draft, "loss_scale", scale)
        now = time.perf_counter()
        draft.set("step_time", now - self._step_ended)
        self._budget.earn(now - self._step_ended)
        draft.set("monitor_cost", (self._budget.spent - self._spent_before) / max(now - self._step_ended, 1e-9))
        self._step_ended, self._spent_before = now, self._budget.spent
