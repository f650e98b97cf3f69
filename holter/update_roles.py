"""Updates as a role of a step: sampled before the optimizer changes the weights, measured after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim import Optimizer

from holter.capture import Layers, parameters_of
from holter.draft import LateRows, RoleRows
from holter.loss_scaler import gradient_scale_of
from holter.measuring import Measuring
from holter.optimizer_state import number_on_host
from holter.statistics.device_rows import DeviceRows
from holter.statistics.measure import Measurer
from holter.updates import Before, Change, Completion, Gradients, Updates

_TO_COME = "update to come"  # the kind of what is sampled one step ahead


@dataclass(eq=False)
class _Look:
    """At the parameters of one optimizer on one device, around one step."""

    updates: Updates
    names: list[str]
    parameters: list[Tensor]
    before: Before | None = None  # None where only gradients are sampled, a step ahead of an update
    gradients: Gradients | None = None  # None until a closure has computed them
    kind: str = _TO_COME


class UpdateRoles:
    """Of one training, whatever its optimizers; every so many steps, None for never."""

    def __init__(self, layers: Layers, measuring: Measuring, pace: int | None) -> None:
        self._layers, self._measuring, self._pace = layers, measuring, pace
        self._samples: WeakKeyDictionary[Optimizer, dict[torch.device, Updates]] = WeakKeyDictionary()
        self._turns: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()  # steps: the last, and this
        self._looks: dict[int, list[_Look]] = {}  # at the step that is being taken, by the optimizer's id
        self._late_measurer = Measurer()  # of the writer's thread: two threads cannot share one

    def before(self, step: int, optimizer: Optimizer, has_closure: bool, key: int) -> None:
        """Samples what this optimizer is about to change, and gradients one step ahead of that. All optimizers of a
        training step have one `key`, and so one pace.

        A closure computes the gradients inside the step: they are sampled after it.
        """
        cadence = self._measuring.cadence
        looks = self._looks[id(optimizer)] = []
        if self._pace is None:
            return
        kind, last = f"update {key}", self._turn(step, optimizer)
        is_wanted = cadence.goes_on(kind) or cadence.is_wanted(kind, self._pace)
        if not is_wanted and not cadence.is_next(kind, self._pace, step - last):
            return
        for names, parameters in self._measuring.by_device(*self._named(optimizer, has_closure)):
            updates = self._samples.setdefault(optimizer, {}).setdefault(parameters[0].device, Updates())
            look = _Look(updates, names, parameters)
            with cadence.account(kind if is_wanted else _TO_COME, False, parameters):
                if not has_closure:
                    scale = gradient_scale_of(optimizer)
                    look.gradients = updates.gradients(step, last, names, parameters, scale)
                if is_wanted:
                    look.kind = kind
                    look.before = updates.before(parameters, self._measuring.measurer)
            if is_wanted or has_closure:
                looks.append(look)

    def after(self, optimizer: Optimizer) -> list[RoleRows]:
        """What the step has changed, where a sample was taken before it."""
        looks, found = self._looks.pop(id(optimizer), []), []
        for look in looks:
            with self._measuring.cadence.account(look.kind, False, look.parameters):
                if look.gradients is None:
                    last, step = self._turns[optimizer]
                    look.gradients = look.updates.gradients(step, last, look.names, look.parameters, None)
                if look.before is None:
                    continue
                change = look.updates.after(look.before, look.gradients, self._measuring.measurer)
                rows, sums = self._measure(change)
            completion = Completion(change.plan.sampler.sizes, _rates(optimizer, look.parameters))
            found.append(RoleRows("update", tuple(look.names), rows, sums, completion))
        return found

    def _named(self, optimizer: Optimizer, has_closure: bool) -> tuple[list[str], list[Tensor]]:
        """The measured parameters that this optimizer will change, as far as that is known."""
        names: list[str] = []
        parameters: list[Tensor] = []
        for name, parameter in zip(*self._layers.among(parameters_of(optimizer)), strict=True):
            has_gradient = parameter.grad is not None and not parameter.grad.is_sparse
            if parameter.requires_grad if has_closure else has_gradient:
                names.append(name)
                parameters.append(parameter)
        return names, parameters

    def _turn(self, step: int, optimizer: Optimizer) -> int:
        """Notes that this optimizer takes this step; the one before that it took: others may have had theirs since."""
        last, this = self._turns.get(optimizer, (step - 1, step - 1))
        last = last if this == step else this  # a step that raised is taken again
        self._turns[optimizer] = last, step
        return last

    def _measure(self, change: Change) -> tuple[DeviceRows | LateRows, Tensor | None]:
        if change.sampled.device.type != "cpu":
            return change.measure(self._measuring.measurer)
        return LateRows(lambda: change.measure(self._late_measurer), change.size), None

    def give_up(self) -> None:
        """The step that was begun is not taken."""
        self._looks.clear()

    def restart(self) -> None:
        """What follows is another line of training: there is no step before it."""
        self._samples.clear()
        self._turns.clear()


def _rates(optimizer: Optimizer, parameters: Sequence[Tensor]) -> tuple[float, ...]:
    """Of the group that each is in; NaN where it is not known on the host."""
    rate_of = {id(parameter): group.get("lr") for group in optimizer.param_groups for parameter in group["params"]}
    return tuple(number_on_host(rate_of.get(id(parameter))) for parameter in parameters)
