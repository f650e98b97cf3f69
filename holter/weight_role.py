"""Weights as a role of a step: measured before any optimizer changes them, with what becomes of them in the step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from holter.capture import Layers, held_by, parameters_of
from holter.draft import NamedSums, RoleRows
from holter.measuring import Measuring
from holter.statistics.device_rows import DeviceRows

_FLAGS = NamedSums(("requires_grad", "held", "has_gradient"))  # of a weight; held: by an optimizer


@dataclass(eq=False)
class _Flags:
    owner: int  # the id of the parameter
    requires_grad: bool
    held: bool
    has_gradient: bool


class WeightRole:
    """Of one training; every so many steps, None for never."""

    def __init__(self, layers: Layers, measuring: Measuring, pace: int | None) -> None:
        self._layers, self._measuring, self._pace = layers, measuring, pace
        self.restart()

    def restart(self) -> None:
        self._parts: list[tuple[list[str], DeviceRows]] = []  # of this training step, a part a device
        self._flags: dict[str, _Flags] = {}
        # Ids of parameters of optimizers that have stepped since, and of those that had a gradient then.
        self._held: set[int] = set()
        self._with_gradient: set[int] = set()

    def read(self, optimizers: Iterable[Any]) -> None:
        """Measures them, if it is time to: before the first optimizer of a training step takes its step."""
        self.restart()
        if self._pace is None or not self._measuring.cadence.is_wanted("weight", self._pace):
            return
        names, parameters = self._layers.current()
        held = set().union(*map(held_by, optimizers))
        self._flags = {
            name: _Flags(id(one), one.requires_grad, id(one) in held, one.grad is not None)
            for name, one in zip(names, parameters, strict=True)
        }
        self._parts = self._measuring.measure("weight", names, list(parameters), self._pace)

    def note(self, optimizer: Any) -> None:
        """Which parameters this optimizer holds, and which of them have a gradient when it takes them. It may be seen
        for the first time. Where each parameter's optimizer steps within the backward, they never have gradients all at
        a time; after a closure they have others than before."""
        if self._parts:
            self._held |= held_by(optimizer)
            self._with_gradient.update(id(one) for one in parameters_of(optimizer) if one.grad is not None)

    def take(self) -> list[RoleRows]:
        """Of the training step that is over."""
        rows = []
        for part, measured in self._parts:
            flags = [self._flags[name] for name in part]
            table = [
                (
                    one.requires_grad,
                    one.held or one.owner in self._held,
                    one.has_gradient or one.owner in self._with_gradient,
                )
                for one in flags
            ]
            beside = torch.tensor(table, dtype=torch.float64, device="cpu")
            rows.append(RoleRows("weight", tuple(part), measured, beside, _FLAGS))
        self.restart()
        return rows
