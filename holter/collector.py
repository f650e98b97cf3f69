"""Collector: the step that is being taken. Decides what is measured in it and on which step a logged value lands."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from holter.budget import Budget
from holter.capture import Layers, gradient_scale_of, held_by
from holter.draft import Draft, RoleRows
from holter.problems import Complaint, Problems
from holter.settings import Settings
from holter.statistics.device_rows import DeviceRows, select_rows
from holter.statistics.measure import Measurer, are_alike, unmeasurable
from holter.transfer import DeviceTimer

BATCH = ("inputs", "targets")  # logged names whose tensors are measured as rows instead of read as scalars
# Names of Holter's own; what a user logs under one of them is kept as logged/<name>.
OWN = {
    *("learning_rate", "gradient_norm", "gradient_norm_clipped", "gradient_nonfinite", "clip_norm", "clip_max_norm"),
    *("skipped", "loss_scale", "step_time", "monitor_cost", "dropped"),
}


@dataclass
class _Gradients:
    """Gradients as they were read: names, ids of parameters and rows, a part a device; and the clip, if it was one."""

    at: str
    parts: list[tuple[list[str], list[int], DeviceRows]] = field(default_factory=list)
    clip: dict[str, float | Tensor] = field(default_factory=dict)
    used_by: set[int] = field(default_factory=set)  # optimizers whose step they have been recorded with

    def add(self, owners: Mapping[str, int], parts: list[tuple[list[str], DeviceRows]]) -> None:
        self.parts += [(names, [owners[name] for name in names], rows) for names, rows in parts]

    def held(self, ids: set[int]) -> list[RoleRows]:
        """The rows of these parameters."""
        found = []
        for names, owners, rows in self.parts:
            places = [place for place, owner in enumerate(owners) if owner in ids]
            if len(places) < len(names):
                rows, names = select_rows(rows, places), [names[place] for place in places]
            if names:
                found.append(RoleRows("gradient", tuple(names), rows))
        return found


class Collector:
    """Fills one draft a step and posts it when the step is over. Runs on the training thread and never waits."""

    def __init__(
        self,
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
        self._measured_at: dict[str, int] = {}  # kind -> the last step that had it
        self._pending = Draft()
        self._gradients: _Gradients | None = None  # read for the step that comes
        # What the last step was told under each name; None before the first step.
        self._logged_last: dict[str, list[float | Tensor]] | None = None
        self._clips = True  # whether gradients can be clipped where they are measured, as far as is known
        # The device has not even come to what was measured in the step that is over here: it has work for a while, and
        # what this thread does meanwhile does not make the training any longer.
        self.is_hidden = False
        self._timers: list[DeviceTimer] = []  # of what was measured since the last step
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
        self._measured_at.clear()

    def training_forward(self) -> None:
        self._forward_since_step = True
        self.forget_gradients()  # those that were read belong to a step that was not taken

    def forget_gradients(self) -> None:
        self._gradients = None

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
            if name in OWN or name.startswith("learning_rate/"):
                self._problems.add(f"log {name}", Complaint(f"that name is Holter's own; it is kept as logged/{name}"))
                name = f"logged/{name}"
            with self._problems.contained(f"log {name}"):
                self._add(draft, name, value)

    def _add(self, draft: Draft, name: str, value: Any) -> None:
        if name in BATCH and isinstance(value, Tensor):
            if any(rows.layers == (name,) for rows in draft.rows):
                return  # of several micro-batches the first stands for the step
            if self._is_wanted(f"batch {name}", self._settings.every):
                for names, rows in self._measure(f"batch {name}", [name], [value]):
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
        self._gradients = _Gradients(at)
        if self._is_wanted(kind, self._settings.every):
            owners, tensors = self._gradients_of(optimizer)
            self._gradients.add(owners, self._measure(kind, list(owners), tensors))

    def clip(self, max_norm: float) -> Tensor | None:
        """Measures all gradients and clips them in the same pass; returns their norm, or None if torch must clip them.

        The pass is made at every step, wanted or not: what a training computes must not depend on what is recorded.
        """
        self._gradients = _Gradients("clip")
        is_wanted = self._is_wanted("gradient", self._settings.every)
        if not is_wanted and not self._clips:
            return None
        owners, tensors = self._gradients_of(None)
        self._clips = self._measurer.can_clip(tensors)
        if not self._clips:
            if is_wanted:
                self._gradients.add(owners, self._measure("gradient", list(owners), tensors))
            return None
        histograms = is_wanted and self._wants_histogram("gradient")
        with self._account("gradient", histograms, tensors):
            rows, norm = self._measurer.measure_and_clip(tensors, max_norm, histograms=histograms)
        if is_wanted:
            self._gradients.add(owners, [(list(owners), rows)])
        self.clipped(norm, max_norm, 2.0)
        return norm.to(functools.reduce(torch.promote_types, {tensor.dtype for tensor in tensors}))  # as torch's is

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
        if pace is None or not self._is_wanted("weight", pace) or self._must_wait("weight histogram"):
            return
        names, parameters = self._layers.current()
        self._pending.rows = [rows for rows in self._pending.rows if rows.role != "weight"]
        for part, rows in self._measure("weight", names, list(parameters)):
            self._pending.rows.append(RoleRows("weight", tuple(part), rows))

    def clipped(self, norm: Tensor, max_norm: float, norm_type: float) -> None:
        if norm_type == 2.0 and self._gradients is not None:
            on_host = norm.device.type == "cpu"
            self._gradients.clip["clip_norm"] = float(norm) if on_host else norm.detach().clone()
            self._gradients.clip["clip_max_norm"] = float(max_norm)

    def _is_due(self, kind: str, every: int) -> bool:
        """Every so many steps; and again within a step, where what was read is replaced."""
        since = self.step - self._measured_at.get(kind, self.step)
        return since == 0 or since >= every

    def _is_wanted(self, kind: str, every: int) -> bool:
        """Whether this kind is due, and the budget allows it."""
        return self._is_due(kind, every) and self._budget.affords(kind)

    def _wants_histogram(self, kind: str) -> bool:
        pace, with_histogram = self._settings.histograms, f"{kind} histogram"
        if pace is None or not self._is_due(with_histogram, pace) or self._must_wait(with_histogram):
            return False
        return self._budget.affords(with_histogram)

    def _must_wait(self, with_histogram: str) -> bool:
        """Histograms that are not taken at every step take turns: all of them in one step would make it a long one."""
        last, pace = self._measured_at.get(with_histogram), self._settings.histograms
        if last is None or pace is None or pace == 1 or self.step - last != pace:  # the first is taken, and waits once
            return False
        return any(step == self.step for kind, step in self._measured_at.items() if kind.endswith("histogram"))

    def _measure(self, kind: str, names: list[str], tensors: list[Tensor]) -> list[tuple[list[str], DeviceRows]]:
        """Rows of these tensors, a part a device."""
        histograms = self._wants_histogram(kind)
        parts = []
        for device_names, device_tensors in self._by_device(names, tensors):
            with self._account(kind, histograms, device_tensors):
                parts.append((device_names, self._measurer.measure(device_tensors, histograms=histograms)))
        return parts

    @contextlib.contextmanager
    def _account(self, kind: str, histograms: bool, tensors: list[Tensor]) -> Iterator[None]:
        """Takes the time of a measurement, here and on the device, and notes that it was made."""
        started = time.perf_counter()
        timer = DeviceTimer.start(tensors[0].device)
        yield
        if timer is not None:
            self._timers.append(timer.stop())
        self._measured_at[kind] = self.step
        with_histogram = f"{kind} histogram"
        if histograms:
            self._measured_at[with_histogram] = self.step
        self._budget.learn(with_histogram if histograms else kind, time.perf_counter() - started)

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

    def finish(self, optimizer: Optimizer, scaler: Any | None = None, *, skipped: bool = False) -> None:
        """The step is over: its draft goes to the writer, the next one begins."""
        draft, self._pending = self._pending, Draft()
        logged = {name: list(values) for name, values in draft.values.items()}
        try:
            self._take_gradients(draft, optimizer)
            self._describe(draft, optimizer, scaler, skipped)
        finally:  # whatever could be collected is kept, and a step is counted once
            draft.step, draft.time = self.step, time.time()
            if self._timers:
                self.is_hidden = not self._timers[-1].has_begun()
            draft.timers, self._timers = self._timers, []
            self._logged_last = logged
            self._forwards_are_visible, self._forward_since_step = self._forward_since_step, False
            self.step += 1
            self._post(draft.seal())

    def _take_gradients(self, draft: Draft, optimizer: Optimizer) -> None:
        read = self._gradients
        if read is None:
            return
        if read.parts:
            rows = read.held(held_by(optimizer))
            draft.rows += rows
            if rows:
                draft.notes["gradients_read_at"] = read.at
        for name, value in read.clip.items():
            draft.set(name, value)
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
