"""Collector: the step that is being taken. Decides what is measured in it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from holter.activation_roles import ActivationRoles
from holter.budget import Budget
from holter.cadence import Cadence
from holter.capture import Layers
from holter.collectives import CollectiveClock
from holter.compiled_calls import Called
from holter.draft import Draft
from holter.execution import ExecutionOrder
from holter.gradient_reads import GradientReads
from holter.logged import Logged, scalar_of
from holter.measuring import Measuring
from holter.optimizer_state import OptimizerRoles, settings_of
from holter.problems import Problems
from holter.record import ACTIVATIONS, OPTIMIZER_SETTINGS
from holter.settings import Settings
from holter.stages import StageLog, StageTimes
from holter.training_steps import DESCRIBED, TrainingSteps
from holter.transfer import DeviceTimer
from holter.update_roles import UpdateRoles
from holter.weight_role import WeightRole


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
        self._seen_at: int | None = None  # the last step at which there were activations
        self._saw_forward = False  # since the last training step
        self._tell_unseen_at = 0  # the step from which on it is told again that there were none
        self._looked_before = 0.0  # seconds that looking at activations has been charged for
        self._weights = WeightRole(layers, self._measuring, settings.weights)
        self._order = ExecutionOrder(model, layers, problems)
        self._stage_log = StageLog()
        self._pending = Draft()
        self.gradients = GradientReads(layers, self._measuring, settings, problems)
        self._updates = UpdateRoles(layers, self._measuring, settings.updates)
        self._moments = OptimizerRoles(layers, self._measuring, settings.optimizer_state)
        self.steps = TrainingSteps(layers, optimizers)
        self._described = DESCRIBED  # as many as that need no note
        self._logged = Logged(self._measuring, settings.every, post, problems)
        self._has_seen_parts = False
        self._collectives = CollectiveClock(model) if settings.machine else None
        self._step_ended = self._taken_at = time.perf_counter()
        self._spent_before = 0.0

    def restart(self, step: int) -> None:
        """Goes on from another step, as after loading a checkpoint; what was pending there is not of this line."""
        self.step = step
        self._pending = Draft()
        self.gradients.forget()
        self._order.forget()
        self._activations.restart()
        self._weights.restart()
        self._updates.restart()
        self._logged.restart()
        self._cadence.restart(step)
        if self._collectives is not None:
            self._collectives.restart()

    @property
    def is_hidden(self) -> bool:
        """Whether the time of this thread does not count, because the device has work for a while."""
        return self._cadence.is_hidden

    def training_forward(self) -> None:
        self._saw_forward = True
        self._logged.training_forward()
        self.gradients.forget()

    def part_forward(self) -> None:
        """Of a model whose parts are called by themselves."""
        self._has_seen_parts = self._saw_forward = True
        self._logged.training_forward()

    @property
    def awaits_parts(self) -> bool:
        """Whether a forward of a part is to be seen: it ends the training step, and values that are logged then are
        those of the next one."""
        return self.steps.is_open or self._has_seen_parts

    def forget_step(self) -> None:
        """One that was begun and raised."""
        self.steps.give_up()
        self.gradients.forget()
        self._order.forget()
        self._updates.give_up()
        self._activations.give_up()

    def close(self) -> None:
        """At the end, which is none of a step that raised."""
        self._logged.ask_for_a_step()
        self.forget_step()
        self.gradients.close()

    def abandon(self) -> None:
        """Lets go of the parameters where the model is gone and a step had raised; by the garbage collector."""
        self._updates.give_up()

    def loaded(self, batch: Any) -> None:
        self._logged.loaded(batch)

    def log(self, values: Mapping[str, Any]) -> None:
        self._logged.log(values, self._pending, self.step, self.steps.is_open)

    def is_of_next(self, values: Mapping[str, Any]) -> bool:
        """Whether such values, told now, are those of the next training step, though nothing else shows that the last
        one is over."""
        return self.steps.is_open and self._logged.has_again(values)

    def look_at_collectives(self) -> None:
        """At the end of a training step: what is known by now is about this one, or about one before."""
        found = self._collectives.look(self.step) if self._collectives is not None else None
        if found is not None and found.step != self.step:
            self._post_late(found.step, found.scalars)
        elif found is not None:
            for name, value in found.scalars.items():
                self._pending.set(name, value)

    # What is measured -----------------------------------------------------------------------------------------

    def read_weights(self) -> None:
        self._weights.read(self.steps.optimizers())

    def look_at_activations(self, called: Called | None) -> None:
        """At the beginning of a training forward: at what the layers put out, if it is time to."""
        pace, roles = self._settings.activations, self._activations
        if pace is None or roles.is_armed or not self._cadence.is_wanted("activation", pace):
            return
        parameters = self._layers.everything()[1]  # also so that new modules are known to be selected or not
        timer = DeviceTimer.start(parameters[0].device) if parameters else None
        seconds = roles.arm(self._cadence.wants_histogram("activation", pace), called)
        if seconds:  # a forward was run, and all of it is Holter's
            self._looked_before += seconds
            if roles.ran:
                self._order.ran(roles.ran)
            self._budget.learn("activation", seconds, sets_up=self._cadence.sets_up("activation"))
            if timer is not None:
                self._cadence.follow(timer, "activation")

    def look_at_order(self, called: Called | None) -> None:
        """At the beginning of a training forward: at the order in which the modules run, if it is not known."""
        if self._settings.budget != 0 and not (called is not None and called.is_compiled):
            self._order.look()

    def take_order(self) -> None:
        """Of the step that is being taken."""
        if self._settings.budget != 0:
            self._pending.notes.update(self._order.take())

    def take_activations(self) -> None:
        """Of the step that is being taken."""
        if not self._activations.is_armed:
            if not self._saw_forward:
                self._note_unseen("no training forward of the model was seen")
            return
        in_hooks = self._activations.seconds - self._looked_before  # what this takes is timed with the step
        looked = self._activations.collect()
        self._pending.rows += looked.rows
        self._pending.notes.update(looked.notes)
        if looked.unseen:
            self._note_unseen(looked.unseen)
            self._cadence.note_tried("activation")
        for name, value in looked.scalars.items():
            self._add_scalar(self._pending, name, value)
        seconds = self._activations.seconds - self._looked_before
        self._looked_before += seconds
        self._budget.spend(in_hooks, None if self._cadence.sets_up("activation") else "activation")
        if not looked.is_uncompiled:
            self._budget.learn("activation", seconds, is_settled=True)
        if looked.rows:
            self._seen_at = self.step
            has_histograms = any(rows.has_histograms for rows in looked.rows)
            self._cadence.note_measured("activation", has_histograms)

    def _note_unseen(self, why: str) -> None:
        """Of activations that are due. Not after a step that shares its forward with one where they were seen."""
        pace = self._settings.activations
        if pace is None or not self._cadence.is_wanted("activation", pace):
            return
        since = math.inf if self._seen_at is None else self.step - self._seen_at
        if since >= 2 * max(pace, 2) and self.step >= self._tell_unseen_at:
            self._pending.notes[ACTIVATIONS] = f"not observed: {why}"
            self._tell_unseen_at = self.step + pace

    def before_update(self, optimizer: Optimizer, has_closure: bool) -> None:
        self._updates.before(self.step, optimizer, has_closure, self.steps.key)

    def after_update(self, optimizer: Optimizer) -> None:
        self._pending.rows += self._updates.after(optimizer)

    def read_moments(self, optimizer: Optimizer) -> None:
        self._pending.rows += self._moments.after(optimizer, self.steps.key)

    def read_gradients(self, at: str, optimizer: Optimizer) -> None:
        self._weights.note(optimizer)
        self.gradients.read(at, optimizer, self.steps.key)

    # The end of a step ----------------------------------------------------------------------------------------

    def take(self, optimizer: Optimizer, scaler: Any | None, skipped: bool) -> None:
        """This optimizer has had its turn in the training step, which may have others."""
        self._taken_at = time.perf_counter()
        self.gradients.take(optimizer)
        self._describe(self._pending, optimizer, scaler, skipped)

    def finish(self, times: StageTimes | None = None) -> None:
        """The training step is over: its draft goes to the writer, the next one begins."""
        draft, self._pending = self._pending, Draft()
        self.steps.end()
        self._note_undescribed(draft)
        try:
            self._cadence.charge_device_time()
            draft.rows += self._weights.take()
            self.gradients.add_to(draft)
            self._add_costs(draft)
            if times is not None:
                self._add_times(draft, times)
            self._logged.add_throughput(draft)
        finally:  # whatever could be collected is kept, and a step is counted once
            draft.step, draft.time = self.step, time.time()
            self.step += 1
            self._saw_forward = False
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
        member = self.steps.member(optimizer)
        if member.number < DESCRIBED:
            number_of_group = partial(self.steps.number_of_group, member)
            for name, value in settings_of(optimizer, member.number, number_of_group):
                draft.values.pop(name, None)
                self._add_scalar(draft, name, value)
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the step by itself
        if isinstance(found_inf, Tensor):
            self._add_scalar(draft, "skipped", found_inf)
        elif scaler is not None:
            draft.add("skipped", float(skipped))
        read_scale = getattr(scaler, "_get_scale_async", None)  # get_scale() would wait for the device
        scale = read_scale() if read_scale else None
        if isinstance(scale, Tensor):
            draft.values.pop("loss_scale", None)  # of all optimizers one
            self._add_scalar(draft, "loss_scale", scale)

    def _note_undescribed(self, draft: Draft) -> None:
        """Once, and again when there are more: not all of so many optimizers write their settings."""
        if self.steps.count > self._described:
            self._described = self.steps.count
            draft.notes[OPTIMIZER_SETTINGS] = f"recorded of the first {DESCRIBED} of {self._described:,} optimizers"

    def _add_costs(self, draft: Draft) -> None:
        """Up to the last optimizer's turn: what comes after it until the training step is known to be over is of the
        next one."""
        now = self._taken_at
        draft.set("step_time", now - self._step_ended)
        self._budget.earn(now - self._step_ended)
        draft.set("monitor_cost", (self._budget.spent - self._spent_before) / max(now - self._step_ended, 1e-9))
        self._step_ended, self._spent_before = now, self._budget.spent
