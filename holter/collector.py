"""Collector: the step that is being taken. Decides what is measured in it and on which step a logged value lands."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from holter.activation_roles import ActivationRoles
from holter.attention import LOGITS
from holter.budget import Budget
from holter.cadence import Cadence
from holter.capture import Layers, gradient_scale_of, held_by
from holter.draft import Draft, ReadGradients, RoleRows
from holter.problems import Complaint, Problems
from holter.settings import Settings
from holter.stages import StageLog, StageTimes
from holter.statistics.device_rows import DeviceRows
from holter.statistics.measure import Measurer, are_alike, unmeasurable
from holter.transfer import DeviceTimer
from holter.updates import Before, Completion, Updates

BATCH = ("inputs", "targets")  # logged names whose tensors are measured as rows instead of read as scalars
# Names of Holter's own; what a user logs under one of them is kept as logged/<name>.
OWN = {
    *("learning_rate", "gradient_norm", "gradient_norm_clipped", "gradient_nonfinite", "clip_norm", "clip_max_norm"),
    *("skipped", "loss_scale", "step_time", "monitor_cost", "dropped", *LOGITS),
}


class Collector:
    """Fills one draft a step and posts it when the step is over. Runs on the training thread and never waits."""

    def __init__(
        self,
        model: nn.Module,
        layers: Layers,
        settings: Settings,
        budget: Budget,
        post: Callable[[Draft], None],
        problems: Problems,
    ) -> None:
        self.step = 0
        self._layers, self._settings, self._budget = layers, settings, budget
        self._post, self._problems = post, problems
        self._measurer = Measurer(lambda error: problems.add("measure in one launch, plain torch takes over", error))
        if settings.budget != 0:
            with problems.contained("prepare to measure"):
                self._measurer.prepare(layers.current()[1])
        self._cadence = Cadence(settings, budget)
        self._activations = ActivationRoles(model, problems)
        self._looked_before = 0.0  # seconds that looking at activations has been charged for
        self._stage_log = StageLog()
        self._pending = Draft()
        self._gradients: ReadGradients | None = None  # read for the step that comes
        # What the last step was told under each name; None before the first step.
        self._logged_last: dict[str, list[float | Tensor]] | None = None
        # Whether the norm of a clip, which is of all gradients, is that of what the optimizer holds; as last seen.
        self._clips_what_is_held = True
        self._updates: WeakKeyDictionary[Optimizer, dict[torch.device, Updates]] = WeakKeyDictionary()
        self._before: list[tuple[Updates, Before]] = []  # samples of the step that is being taken
        self._forward_since_step = False
        self._forwards_are_visible = False
        self._step_ended = time.perf_counter()
        self._spent_before = 0.0

    def restart(self, step: int) -> None:
        """Goes on from another step, as after loading a checkpoint; what was pending there is not of this line."""
        self.step = step
        self._pending = Draft()
        self._gradients = None
        self._logged_last = None
        self._cadence.restart(step)

    @property
    def is_hidden(self) -> bool:
        """Whether the time of this thread does not count, because the device has work for a while."""
        return self._cadence.is_hidden

    def training_forward(self) -> None:
        self._forward_since_step = True
        self._gradients = None  # those that were read belong to a step that was not taken

    def forget_step(self) -> None:
        """One that was begun and raised."""
        self._gradients = None
        self._before = []
        self._activations.give_up()

    # What is logged -------------------------------------------------------------------------------------------

    def log(self, values: Mapping[str, Any]) -> None:
        """Adds values to the step they belong to: the one being prepared, or the one just taken."""
        if not self._belongs_to_last_step(values):
            self._add_all(self._pending, values)
            return
        assert self._logged_last is not None
        late = Draft(step=self.step - 1, time=time.time(), late=True)
        self._add_all(late, values)
        for name, told in late.values.items():  # several in one step, micro-batches say, are one value: their mean
            told[:0] = self._logged_last.get(name, [])
            self._logged_last[name] = list(told)
        self._post(late.seal())

    def _belongs_to_last_step(self, values: Mapping[str, Any]) -> bool:
        """A value logged after a step and before the next training forward belongs to the step just taken.

        Where forwards cannot be seen (compiled away, or the model's own methods are called), a name that the last
        step has already been told belongs to the next one.
        """
        if self._logged_last is None or self._forward_since_step:
            return False
        return self._forwards_are_visible or self._logged_last.keys().isdisjoint(values)

    def _add_all(self, draft: Draft, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            if name in OWN or name.startswith(("learning_rate/", "machine/", "time/")):
                self._problems.add(f"log {name}", Complaint(f"that name is Holter's own; it is kept as logged/{name}"))
                name = f"logged/{name}"
            with self._problems.contained(f"log {name}"):
                self._add(draft, name, value)

    def _add(self, draft: Draft, name: str, value: Any) -> None:
        if name in BATCH and isinstance(value, Tensor):
            if any(rows.layers == (name,) for rows in draft.rows):
                return  # of several micro-batches the first stands for the step
            if self._cadence.is_wanted(f"batch {name}", self._settings.every):
                for names, rows in self._measure(f"batch {name}", [name], [value], self._settings.every):
                    draft.rows.append(RoleRows("batch", tuple(names), rows))
        elif isinstance(value, Tensor):
            if value.numel() != 1:
                raise Complaint("only inputs= and targets= take whole tensors, other values are single numbers")
            # On the host it can be read at once; elsewhere a copy is kept, which later changes do not reach.
            draft.add(name, float(value.detach()) if value.device.type == "cpu" else value.detach().clone().view(()))
        else:
            try:
                draft.add(name, float(value))
            except (TypeError, ValueError):
                raise Complaint(f"it is a {type(value).__name__}, not a number") from None

    # What is measured -----------------------------------------------------------------------------------------

    def read_gradients(self, at: str, optimizer: Optimizer | None = None) -> None:
        """Measures the gradients as they are now: those of an optimizer's parameters, or all that the model has."""
        kind = "gradient" if optimizer is None else f"gradient {id(optimizer)}"
        self._gradients = ReadGradients(at)
        if self._cadence.is_wanted(kind, self._settings.every):
            owners, tensors = self._gradients_of(optimizer)
            self._gradients.add(owners, self._measure(kind, list(owners), tensors, self._settings.every))

    def clip(self, max_norm: float) -> Tensor | None:
        """Measures all gradients and clips them in the same pass; returns their norm, or None if torch must clip them.

        The pass is made at every step, wanted or not: what a training computes must not depend on what is recorded.
        As it stands for torch's clip, it costs the budget nothing.
        """
        self._gradients = ReadGradients("clip")
        is_due = self._settings.budget != 0 and self._cadence.is_due("gradient", self._settings.every)
        if not is_due and not self._layers.is_on_cuda():
            return None
        owners, tensors = self._gradients_of(None)
        if not self._measurer.can_clip(tensors):
            if is_due and self._budget.affords("gradient"):
                self._gradients.add(owners, self._measure("gradient", list(owners), tensors, self._settings.every))
            return None
        histograms = is_due and self._cadence.wants_histogram("gradient", self._settings.every)
        timer = DeviceTimer.start(tensors[0].device)
        done = self._measurer.measure_and_clip(tensors, max_norm, histograms=histograms)
        if done is None:
            return None
        rows, norm = done
        # The gradients are clipped: no failure from here on may keep that from the caller.
        with self._problems.contained("note the clip"):
            if is_due:
                self._cadence.note_measured("gradient", histograms)
                self._gradients.add(owners, [(list(owners), rows)])
            if timer is not None:
                self._cadence.follow(timer, histograms)
            self.clipped(norm, max_norm, 2.0)
        return norm

    def _gradients_of(self, optimizer: Optimizer | None) -> tuple[dict[str, int], list[Tensor]]:
        """The ids of the parameters that have gradients, by name, and these gradients."""
        held = held_by(optimizer) if optimizer is not None else None
        owners: dict[str, int] = {}
        tensors = []
        for name, parameter in zip(*self._layers.current(), strict=True):
            gradient = parameter.grad
            if gradient is not None and (held is None or id(parameter) in held):
                owners[name] = id(parameter)
                tensors.append(gradient)
        return owners, tensors

    def has_gradients(self, optimizer: Optimizer) -> bool:
        """Whether gradients were read that this optimizer has not stepped with yet."""
        return self._gradients is not None and id(optimizer) not in self._gradients.used_by

    def read_weights(self) -> None:
        pace = self._settings.weights
        if pace is None or not self._cadence.is_wanted("weight", pace):
            return
        names, parameters = self._layers.current()
        self._pending.rows = [rows for rows in self._pending.rows if rows.role != "weight"]
        for part, rows in self._measure("weight", names, list(parameters), pace):
            self._pending.rows.append(RoleRows("weight", tuple(part), rows))

    def look_at_activations(self) -> None:
        """At the beginning of a training forward: at what the layers put out, if it is time to."""
        pace, roles = self._settings.activations, self._activations
        if pace is None or roles.is_armed or not self._cadence.is_wanted("activation", pace):
            return
        if not roles.observed:
            self._pending.notes["activations"] = "not observed: the model is compiled"
            return
        roles.arm(self._cadence.wants_histogram("activation", pace))

    def take_activations(self) -> None:
        """Of the step that is being taken."""
        if not self._activations.is_armed:
            return
        found, scalars = self._activations.collect()
        self._pending.rows += found
        for name, value in scalars.items():
            self._add(self._pending, name, value)
        seconds = self._activations.seconds - self._looked_before
        self._looked_before += seconds
        self._budget.spend(seconds)
        self._budget.learn("activation", seconds)
        if found:
            has_histograms = any(rows.rows.histograms is not None for rows in found)
            self._cadence.note_measured("activation", has_histograms)

    def before_update(self, optimizer: Optimizer) -> None:
        """Samples what this optimizer is about to change, and gradients one step ahead of that."""
        pace = self._settings.updates
        self._before = []
        if pace is None:
            return
        is_wanted = self._cadence.is_wanted("update", pace)
        if not is_wanted and not self._cadence.is_next("update", pace):
            return
        held = held_by(optimizer)
        named = [
            (name, parameter)
            for name, parameter in zip(*self._layers.current(), strict=True)
            if id(parameter) in held and parameter.grad is not None and not parameter.grad.is_sparse
        ]
        for names, parameters in self._by_device([name for name, _ in named], [p for _, p in named]):
            updates = self._updates.setdefault(optimizer, {}).setdefault(parameters[0].device, Updates())
            with self._cadence.account("update" if is_wanted else "update to come", False, parameters):
                if is_wanted:
                    self._before.append((updates, updates.before(self.step, names, parameters)))
                else:
                    gradients = [p.grad for p in parameters if p.grad is not None]
                    updates.remember_gradients(self.step, names, gradients)

    def after_update(self, optimizer: Optimizer) -> None:
        """Measures what the step has changed in the sample, where one was taken."""
        if not self._before:
            return
        rate_of = {id(p): group.get("lr") for group in optimizer.param_groups for p in group["params"]}
        for updates, before in self._before:
            with self._cadence.account("update", False, before.parameters):
                rows, sums = updates.after(before, self._measurer)
            rates = [rate_of.get(id(parameter)) for parameter in before.parameters]
            known = tuple(float(rate) if isinstance(rate, int | float) else math.nan for rate in rates)
            done = Completion(before.sampler.sizes, known)
            self._pending.rows.append(RoleRows("update", before.names, rows, sums, done))
        self._before = []

    def clipped(self, norm: Tensor, max_norm: float, norm_type: float) -> None:
        if self._gradients is not None:
            on_host = norm.device.type == "cpu"
            self._gradients.clip["clip_norm"] = float(norm) if on_host else norm.detach().clone()
            self._gradients.clip["clip_max_norm"] = float(max_norm)
            self._gradients.norm_type = float(norm_type)

    def _measure(
        self, kind: str, names: list[str], tensors: list[Tensor], every: int
    ) -> list[tuple[list[str], DeviceRows]]:
        """Rows of these tensors, a part a device; of a kind that is measured every so many steps."""
        histograms = self._cadence.wants_histogram(kind, every)
        parts = []
        for device_names, device_tensors in self._by_device(names, tensors):
            with self._cadence.account(kind, histograms, device_tensors):
                parts.append((device_names, self._measurer.measure(device_tensors, histograms=histograms)))
        return parts

    def _by_device(self, names: list[str], tensors: list[Tensor]) -> list[tuple[list[str], list[Tensor]]]:
        if are_alike(tensors):  # as in most trainings: one look is enough for all of them
            return [(names, tensors)]
        groups: dict[torch.device, tuple[list[str], list[Tensor]]] = {}
        for name, tensor in zip(names, tensors, strict=True):
            refused = unmeasurable(tensor)
            if refused is not None:
                self._problems.add(f"measure {name}", Complaint(refused))
                continue
            if hasattr(tensor, "to_local"):
                self._problems.add("merge shards", Complaint("only this process's part of sharded tensors is measured"))
            group = groups.setdefault(tensor.device, ([], []))
            group[0].append(name)
            group[1].append(tensor)
        return list(groups.values())

    # The end of a step ----------------------------------------------------------------------------------------

    def finish(
        self, optimizer: Optimizer, scaler: Any | None = None, *, skipped: bool = False, times: StageTimes | None = None
    ) -> None:
        """The step is over: its draft goes to the writer, the next one begins."""
        draft, self._pending = self._pending, Draft()
        logged = {name: list(values) for name, values in draft.values.items()}
        try:
            self._cadence.charge_device_time()
            self._take_gradients(draft, optimizer)
            self._describe(draft, optimizer, scaler, skipped)
            if times is not None:
                self._add_times(draft, times)
        finally:  # whatever could be collected is kept, and a step is counted once
            draft.step, draft.time = self.step, time.time()
            self._logged_last = logged
            self._forwards_are_visible, self._forward_since_step = self._forward_since_step, False
            self.step += 1
            self._cadence.step = self.step
            self._post(draft.seal())

    def _add_times(self, draft: Draft, times: StageTimes) -> None:
        for name, seconds in self._stage_log.add(self.step, times).items():
            draft.set(name, seconds)
        for step, known in self._stage_log.arrived():
            late = Draft(step=step, time=time.time(), late=True)
            for name, seconds in known.items():
                late.set(name, seconds)
            self._post(late.seal())

    def _take_gradients(self, draft: Draft, optimizer: Optimizer) -> None:
        read = self._gradients
        if read is None:
            return
        if read.parts:
            rows = read.held(held_by(optimizer))
            self._clips_what_is_held = len(rows) == len(read.parts) and all(
                len(kept.layers) == len(names) for kept, (names, _, _) in zip(rows, read.parts, strict=True)
            )
            draft.rows += rows
            if rows:
                draft.notes["gradients_read_at"] = read.at
        for name, value in read.clip.items():
            draft.set(name, value)
        if not read.parts and read.norm_type == 2.0 and self._clips_what_is_held:
            draft.set("gradient_norm", read.clip["clip_norm"])
        read.used_by.add(id(optimizer))
        if read.at != "clip":  # one clip may serve the steps of several optimizers
            self._gradients = None

    def _describe(self, draft: Draft, optimizer: Optimizer, scaler: Any | None, skipped: bool) -> None:
        for place, group in enumerate(optimizer.param_groups):
            rate = group.get("lr")
            if rate is not None:
                self._add(draft, f"learning_rate/{place}" if place else "learning_rate", rate)
        draft.gradient_scale = gradient_scale_of(optimizer)
        found_inf = getattr(optimizer, "found_inf", None)  # a fused optimizer skips the step by itself
        if isinstance(found_inf, Tensor):
            self._add(draft, "skipped", found_inf)
        elif scaler is not None:
            draft.add("skipped", float(skipped))
        read_scale = getattr(scaler, "_get_scale_async", None)  # get_scale() would wait for the device
        scale = read_scale() if read_scale else None
        if isinstance(scale, Tensor):
            self._add(draft, "loss_scale", scale)
        now = time.perf_counter()
        draft.set("step_time", now - self._step_ended)
        self._budget.earn(now - self._step_ended)
        draft.set("monitor_cost", (self._budget.spent - self._spent_before) / max(now - self._step_ended, 1e-9))
        self._step_ended, self._spent_before = now, self._budget.spent
