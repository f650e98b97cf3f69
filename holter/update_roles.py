"""Updates as a role of a step: sampled before the optimizer changes the weights, measured after it."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from holter.capture import Layers, held_by
from holter.draft import LateRows, RoleRows
from holter.measuring import Measuring
from holter.statistics.device_rows import DeviceRows
from holter.statistics.measure import Measurer
from holter.updates import Before, Change, Completion, Updates


class UpdateRoles:
    """Of one training, whatever its optimizers; every so many steps, None for never."""

    def __init__(self, layers: Layers, measuring: Measuring, pace: int | None) -> None:
        self._layers, self._measuring, self._pace = layers, measuring, pace
        self._samples: WeakKeyDictionary[Optimizer, dict[torch.device, Updates]] = WeakKeyDictionary()
        self._before: list[tuple[Updates, Before]] = []  # of the step that is being taken
        self._late_measurer = Measurer()  # of the writer's thread: two threads cannot share one

    def before(self, step: int, optimizer: Optimizer) -> None:
        """Samples what this optimizer is about to change, and gradients one step ahead of that."""
        cadence = self._measuring.cadence
        self._before = []
        if self._pace is None:
            return
        kind = _kind(optimizer)
        is_wanted = cadence.is_wanted(kind, self._pace)
        if not is_wanted and not cadence.is_next(kind, self._pace):
            return
        held = held_by(optimizer)
        named = [
            (name, parameter)
            for name, parameter in zip(*self._layers.current(), strict=True)
            if id(parameter) in held and parameter.grad is not None and not parameter.grad.is_sparse
        ]
        for names, parameters in self._measuring.by_device([name for name, _ in named], [p for _, p in named]):
            updates = self._samples.setdefault(optimizer, {}).setdefault(parameters[0].device, Updates())
            with cadence.account(kind if is_wanted else "update to come", False, parameters):
                if is_wanted:
                    self._before.append((updates, updates.before(step, names, parameters, self._measuring.measurer)))
                else:
                    gradients = [p.grad for p in parameters if p.grad is not None]
                    updates.remember_gradients(step, names, gradients)

    def after(self, optimizer: Optimizer) -> list[RoleRows]:
        """What the step has changed, where a sample was taken before it."""
        if not self._before:
            return []
        found = []
        rate_of = {id(p): group.get("lr") for group in optimizer.param_groups for p in group["params"]}
        for updates, before in self._before:
            with self._measuring.cadence.account(_kind(optimizer), False, before.parameters):
                change = updates.after(before, self._measuring.measurer)
                rows, sums = self._measure(change)
            rates = [rate_of.get(id(parameter)) for parameter in before.parameters]
            known = tuple(float(rate) if isinstance(rate, int | float) else math.nan for rate in rates)
            found.append(RoleRows("update", before.names, rows, sums, Completion(before.plan.sampler.sizes, known)))
        self._before = []
        return found

    def _measure(self, change: Change) -> tuple[DeviceRows | LateRows, Tensor | None]:
        if change.sampled.device.type != "cpu":
            return change.measure(self._measuring.measurer)
        return LateRows(lambda: change.measure(self._late_measurer), change.size), None

    def give_up(self) -> None:
        """The step that was begun is not taken."""
        self._before = []


def _kind(optimizer: Optimizer) -> str:
    """A pace for each: of two that take turns one might never be looked at otherwise."""
    return f"update {id(optimizer)}"
