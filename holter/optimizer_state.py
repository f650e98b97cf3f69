"""What an optimizer remembers: its moments as roles of a step, its settings and its step counter as scalars."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from holter.capture import Layers, parameters_of
from holter.draft import LateRows, NamedSums, RoleRows
from holter.measuring import Measuring
from holter.samples import Sampler, Segments, in_line
from holter.statistics.device_rows import DeviceRows, widest

# Under which names optimizers keep the average of gradients, and that of their squares.
_FIRST = ("exp_avg", "momentum_buffer", "momentum", "m", "grad_avg")  # grad_avg, sqr_avg: fastai's
_SECOND = ("exp_avg_sq", "square_avg", "sum", "v", "sqr_avg")
_SETTINGS = {"learning_rate": ("lr",), "weight_decay": ("weight_decay", "wd")}  # wd: fastai's
_NUMBERS = (int, float, Tensor, Real)  # Real: numpy's too
EXTRAS = NamedSums(("rms_ratio", "below_eps"))


def settings_of(optimizer: Optimizer, number: int, number_of_group: Callable[[int], int]) -> Iterator[tuple[str, Any]]:
    """Rate and weight decay of every group, and how many steps its state has seen; numbers or tensors.

    Each under its number, the first under the bare name: of the optimizer, and of its groups by their places.
    """
    for place, group in enumerate(optimizer.param_groups):
        for name, keys in _SETTINGS.items():
            value = next((group[key] for key in keys if key in group), None)
            if isinstance(value, _NUMBERS):
                yield _numbered(name, number_of_group(place)), value
    first = next(iter(optimizer.state.values()), None)
    steps = first.get("step") if isinstance(first, dict) else None
    if isinstance(steps, _NUMBERS) and (not isinstance(steps, Tensor) or steps.numel() == 1):
        yield _numbered("optimizer_step", number), steps


def _numbered(name: str, number: int) -> str:
    return f"{name}/{number}" if number else name


@dataclass(frozen=True, eq=False)
class _Kept:
    """What an optimizer keeps for one parameter, and by which rules."""

    name: str
    parameter: Tensor
    first: Tensor | None
    second: Tensor | None
    steps: Any
    group: dict[str, Any]


class OptimizerRoles:
    """Roles momentum and second_moment, after a step; every so many steps, None for never."""

    def __init__(self, layers: Layers, measuring: Measuring, pace: int | None) -> None:
        self._layers, self._measuring, self._pace = layers, measuring, pace
        self._sampler: Sampler | None = None

    def after(self, optimizer: Optimizer, key: int) -> list[RoleRows]:
        """What is kept for the measured layers, as far as it is of the shape of their parameters. All optimizers of a
        training step have one `key`, and so one pace."""
        if self._pace is None or not optimizer.state:
            return []
        cadence, found = self._measuring.cadence, []
        kind = f"momentum {key}"
        if cadence.goes_on(kind) or cadence.is_wanted(kind, self._pace):
            kept = {one.name: one.first for one in self._kept(optimizer) if one.first is not None}
            cadence.note_tried(kind)  # plain descent keeps nothing, and a walk through all parameters takes long
            for names, rows in self._measuring.measure(kind, list(kept), list(kept.values()), self._pace):
                found.append(RoleRows("momentum", tuple(names), rows))
        kind = f"second_moment {key}"
        if cadence.goes_on(kind) or cadence.is_wanted(kind, self._pace):
            by_name = {one.name: one for one in self._kept(optimizer) if one.second is not None}
            cadence.note_tried(kind)
            tensors = [one.second for one in by_name.values() if one.second is not None]
            for names, rows in self._measuring.measure(kind, list(by_name), tensors, self._pace):
                with cadence.account(kind, False, tensors):
                    sample = self._sample([by_name[name] for name in names])
                    on_host = sample.second.device.type == "cpu"
                    sums = None if on_host else sample.sums()
                later = LateRows(partial(_both, rows, sample), sample.size) if on_host else rows
                found.append(RoleRows("second_moment", tuple(names), later, sums, EXTRAS))
        return found

    def _kept(self, optimizer: Optimizer) -> Iterator[_Kept]:
        group_of = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
        for name, parameter in zip(*self._layers.among(parameters_of(optimizer)), strict=True):
            state = optimizer.state.get(parameter)
            if isinstance(state, dict):
                first, second = (_alike(parameter, state, keys) for keys in (_FIRST, _SECOND))
                yield _Kept(name, parameter, first, second, state.get("step"), group_of[id(parameter)])

    def _sample(self, kept: Sequence[_Kept]) -> _Sample:
        seconds = in_line([one.second for one in kept if one.second is not None])
        sizes, device = tuple(line.numel() for line in seconds), seconds[0].device
        if self._sampler is None or (self._sampler.sizes, self._sampler.device) != (sizes, device):
            self._sampler = Sampler(sizes, device)
        known = [gradient for one in kept if (gradient := _gradient_of(one)) is not None]
        return _Sample(
            self._sampler.segments,
            self._sampler.take(seconds),
            self._sampler.take(in_line(known)) if len(known) == len(kept) else None,
            [_second_beta(one.group) for one in kept],
            [number_on_host(one.group.get("eps")) for one in kept],
            _steps(kept, device),
        )


@dataclass(frozen=True, eq=False)
class _Sample:
    """Of the second moments and of the gradients; and of each layer by what it is corrected, and its eps."""

    segments: Segments
    second: Tensor
    gradients: Tensor | None
    betas: list[float]  # NaN where the optimizer has none
    eps: list[float]
    steps: list[float] | Tensor

    @property
    def size(self) -> int:
        """Bytes that are held."""
        return sum(line.numel() * line.element_size() for line in (self.second, self.gradients) if line is not None)

    def sums(self) -> Tensor:
        """For each layer the RMS of g / sqrt(v), and the share of sqrt(v) < eps. [layers, 2]

        v is that of the step just taken, with the gradient in it, freed from its zero beginning where the optimizer
        does so. Where it is below eps², as for rows that never had a gradient, eps² stands for it, as in the step.
        """
        device = self.second.device
        eps = self.segments.spread(_line(self.eps, device))
        steps = self.steps if isinstance(self.steps, Tensor) else _line(self.steps, device)
        corrections = (1 - _line(self.betas, device) ** steps).nan_to_num(1.0)
        second = self.second / self.segments.spread(corrections)
        ratio = None
        if self.gradients is not None:
            ratio = self.gradients / second.clamp(min=eps.nan_to_num(0.0) ** 2).sqrt()
        below = torch.where(eps.isnan(), torch.nan, (second < eps**2).to(eps.dtype))
        counts = _line([float(count) for count in self.segments.counts], device)[:, None]
        found = self.segments.dots((ratio, ratio), (below, torch.ones_like(below))) / counts
        found[:, 0].sqrt_()
        return found


def _both(rows: DeviceRows, sample: _Sample) -> tuple[DeviceRows, Tensor]:
    return rows, sample.sums()


def _gradient_of(kept: _Kept) -> Tensor | None:
    """As it lies beside the second moment, number for number: one that was loaded may have another layout in memory."""
    gradient, second = kept.parameter.grad, kept.second
    if gradient is None or gradient.is_sparse or second is None:
        return None
    if gradient.stride() == second.stride():
        return gradient
    return torch.empty_like(second, dtype=gradient.dtype).copy_(gradient.detach())


def _alike(parameter: Tensor, state: dict[Any, Any], keys: Sequence[str]) -> Tensor | None:
    """The part of the state under one of these names that has a number for every number of the parameter."""
    for key in keys:
        value = state.get(key)
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.is_floating_point():
            return value
    return None


def _second_beta(group: dict[str, Any]) -> float:
    betas = group.get("betas")
    return number_on_host(betas[1]) if isinstance(betas, tuple | list) and len(betas) > 1 else math.nan


def _steps(kept: Sequence[_Kept], device: torch.device) -> list[float] | Tensor:
    """That the state of each has seen; where they are on the device they stay there."""
    on_device = [one.steps for one in kept if isinstance(one.steps, Tensor) and one.steps.device == device]
    if device.type != "cpu" and len(on_device) == len(kept):
        return torch.stack([step.detach().reshape(()) for step in on_device]).to(widest(device))
    return [number_on_host(one.steps) for one in kept]


def number_on_host(value: Any) -> float:
    """NaN for what is none, or is not known on the host."""
    if isinstance(value, Tensor) and (value.device.type != "cpu" or value.numel() != 1):
        return math.nan
    return float(value) if isinstance(value, _NUMBERS) else math.nan


def _line(values: Sequence[float], device: torch.device) -> Tensor:
    table = torch.tensor(values, dtype=widest(device), device="cpu")
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
