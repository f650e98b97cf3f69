"""From a finding to the training in which its advice was followed.

Where the advice is a number or a call, exactly that is done, with the fault still there. Where it is to take away what
was done wrongly, the twin without the fault is the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from holter.clinic.case import Case
from holter.clinic.faults.data import MissingValues, RawInputs
from holter.clinic.faults.layer import ChangedParameter
from holter.clinic.faults.optimizer import Decay, TightClip
from holter.clinic.training import Batch, Hooks, Training
from holter.demo_words import TOLD
from holter.diagnosis.finding import Finding
from holter.remedies import init_weights, replace_activations

_NUMBER = r"(-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?)"


@dataclass(frozen=True)
class Remedy:
    """What is done in words, and the training in which it is done. `removes_fault`: it is the twin."""

    words: str
    case: Case
    removes_fault: bool = False


Follow = Callable[[Case, Case, Finding], Remedy | None]  # of the sick one, its twin and what was found


def remedy_for(sick: Case, twin: Case, finding: Finding | None) -> Remedy:
    """Without a finding, or where its advice has no number to follow, the twin."""
    follow = _FOLLOWED.get(sick.cause or "")
    followed = follow(sick, twin, finding) if follow is not None and finding is not None else None
    return followed or Remedy(told(sick, twin, TOLD[str(sick.cause)].remedy), twin, removes_fault=True)


def told(sick: Case, twin: Case, words: str) -> str:
    return words.format(fault=sick.hooks(), sick=sick.recipe, well=twin.recipe)


def advised(finding: Finding, words: str) -> list[float] | None:
    """The numbers that stand for # in these words of the advice; None where it has no such words.

    >>> found = Finding("lr-too-high", "lr", 0, 9, advice="lower the rate from 2e+03 to about 1,200.5.")
    >>> advised(found, "from # to about #"), advised(found, "up to #")
    ([2000.0, 1200.5], None)
    """
    found = re.search(re.escape(words).replace(re.escape("#"), _NUMBER), finding.advice)
    return [float(number.replace(",", "")) for number in found.groups()] if found else None


# The fault is there, and so is what was advised against it ----------------------------------------------------------


@dataclass
class LeakyUnits(ChangedParameter):
    def built(self, training: Training) -> None:
        super().built(training)
        replace_activations(training.model, new=lambda: nn.LeakyReLU(0.1))


@dataclass
class FiniteExamples(MissingValues):
    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        x, y = super().batch(t, x, y)
        is_finite = torch.isfinite(x.flatten(1)).all(1)
        return x[is_finite], y[is_finite]


@dataclass
class Normalised(RawInputs):
    measured_mean: float = 0.0
    measured_std: float = 1.0

    def batch(self, t: int, x: Tensor, y: Tensor) -> Batch:
        x, y = super().batch(t, x, y)
        return (x - self.measured_mean) / self.measured_std, y


class Initialised(Hooks):
    """After the weights were spoilt."""

    def built(self, training: Training) -> None:
        super().built(training)
        init_weights(training.model)


class NormedGelus(Hooks):
    """A norm of one group is a LayerNorm that takes images, too. It has no weights: the optimizer is there already."""

    def built(self, training: Training) -> None:
        super().built(training)
        width = training.recipe.width // (6 if training.recipe.architecture == "convnet" else 1)
        replace_activations(
            training.model,
            (nn.Sigmoid, nn.Tanh),
            lambda: nn.Sequential(nn.GroupNorm(1, width, affine=False), nn.GELU()),
        )


# What was advised, cause by cause ------------------------------------------------------------------------------------


def _changed(case: Case, words: str, **recipe: float | str | None) -> Remedy:
    return Remedy(words, replace(case, recipe=replace(case.recipe, **recipe)))  # type: ignore[arg-type]


def _rate(sick: Case, twin: Case, finding: Finding) -> Remedy | None:
    numbers = advised(finding, "to about #")
    return _changed(sick, f"the rate at {numbers[0]:.3g}", rate=numbers[0]) if numbers else None


def _warmup(sick: Case, twin: Case, finding: Finding) -> Remedy | None:
    numbers = advised(finding, "over about #")
    if numbers is None:
        return None
    steps = min(int(numbers[0]), sick.recipe.steps // 3)
    short = f" (not {numbers[0]:,.0f}: this training is short)" if steps < numbers[0] else ""
    return _changed(sick, f"a warm-up of {steps} steps{short}", warmup=steps)


def _clip(sick: Case, twin: Case, finding: Finding) -> Remedy | None:
    numbers = advised(finding, "clip_grad_norm_(#")
    return _changed(twin, f"gradients clipped at {numbers[0]:.3g}", clip=numbers[0]) if numbers else None


def _wider_clip(sick: Case, twin: Case, finding: Finding) -> Remedy | None:
    numbers, fault = advised(finding, "to about #"), sick.hooks()
    if numbers is None or not isinstance(fault, TightClip):
        return None
    return Remedy(f"gradients clipped at {numbers[0]:.3g}", _by(sick, TightClip, at=fault.at, norm=numbers[0]))


def _less_decay(sick: Case, twin: Case, finding: Finding) -> Remedy | None:
    numbers, fault = advised(finding, "from # to #"), sick.hooks()
    if numbers is None or not isinstance(fault, Decay):
        return None
    return Remedy(f"weight_decay at {numbers[1]:.3g}", _by(sick, Decay, at=fault.at, decay=numbers[1]))


def _smaller_eps(sick: Case, twin: Case, finding: Finding) -> Remedy | None:
    numbers = advised(finding, "(# is usual")
    return _changed(sick, f"eps at {numbers[0]:g}", eps=numbers[0]) if numbers else None


def _faster_second_moment(sick: Case, twin: Case, finding: Finding) -> Remedy | None:
    numbers = advised(finding, "beta2 to #")
    return _changed(sick, f"beta2 at {numbers[0]:g}", beta2=numbers[0]) if numbers else None


def _normalised(sick: Case, twin: Case, finding: Finding) -> Remedy | None:
    numbers, fault = advised(finding, "(x - #) / #"), sick.hooks()
    if numbers is None or not isinstance(fault, RawInputs):
        return None
    mean, std = numbers
    case = _by(sick, Normalised, mean=fault.mean, scale=fault.scale, measured_mean=mean, measured_std=std)
    return Remedy(f"x = (x - {mean:g}) / {std:g}", case)


def _leaky(sick: Case, twin: Case, finding: Finding) -> Remedy | None:
    fault = sick.hooks()
    if not isinstance(fault, ChangedParameter):
        return None
    return Remedy(
        "LeakyReLU(0.1) in the place of ReLU, the bias shifted all the same", _by(sick, LeakyUnits, **vars(fault))
    )


def _filtered(sick: Case, twin: Case, finding: Finding) -> Remedy | None:
    fault = sick.hooks()
    if not isinstance(fault, MissingValues):
        return None
    return Remedy("examples with NaN dropped by torch.isfinite(x)", _by(sick, FiniteExamples, at=fault.at))


def _initialised(sick: Case, twin: Case, finding: Finding) -> Remedy:
    return Remedy("holter.init_weights(model) before training", replace(sick, hooks=Initialised))


def _other_activations(sick: Case, twin: Case, finding: Finding) -> Remedy:
    return Remedy("GELU in the place of sigmoids, and a norm before each", replace(sick, hooks=NormedGelus))


def _float32(sick: Case, twin: Case, finding: Finding) -> Remedy:
    words = "the same layer in float32 (here the whole model, which is small)"
    return _changed(sick, words, precision="float32", scaler=None)


def _scaler(sick: Case, twin: Case, finding: Finding) -> Remedy | None:
    numbers = advised(finding, "init_scale=2.0**#")
    if numbers is None:
        return None
    return _changed(sick, f"a GradScaler that starts at 2**{numbers[0]:.0f}", scaler=2 ** numbers[0])


def _by(case: Case, hooks: Callable[..., Hooks], **settings: Any) -> Case:
    return replace(case, hooks=partial(hooks, **settings))


_FOLLOWED: dict[str, Follow] = {
    "lr-too-high": _rate,
    "lr-too-low": _rate,
    "warmup-missing": _warmup,
    "clipping-missing": _clip,
    "clipping-too-tight": _wider_clip,
    "weight-decay-too-high": _less_decay,
    "adam-eps-dominates": _smaller_eps,
    "adam-second-moment-lag": _faster_second_moment,
    "input-scale": _normalised,
    "dead-relu": _leaky,
    "nan-in-data": _filtered,
    "init-too-large": _initialised,
    "init-too-small": _initialised,
    "init-symmetric": _initialised,
    "vanishing-gradient": _other_activations,
    "fp16-overflow": _float32,
    "fp16-underflow": _scaler,
}
