"""The outer limits as a line of the health check: which of them a run has crossed, whatever its own past was."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.diagnosis.thresholds import Thresholds
from holter.history import History
from holter.series import Floats, overall_median
from holter.words import number

_RECENT = 10  # values that stand for "now"


def crossed(history: History, limits: Thresholds) -> dict[str, str] | None:
    """The names of the limits that are crossed now, each with the number; None where nothing was recorded to tell."""
    lines = [_norms, _layers, _losses, _weights, _times]
    found = [list(line(history, limits)) for line in lines]
    told = [one for line in found for one in line]
    return {name: text for name, is_beyond, text in told if is_beyond} if told else None


_Told = tuple[str, bool, str]  # a limit, whether it is crossed, and the number


def size_of_loss(history: History) -> float | None:
    """Return what gradients are measured by: the loss where it began or where it is, whichever is less, and no less
    than 1. A sum over a batch has larger gradients than a mean. None for a loss that goes below 0: it has no size."""
    values = _finite(history.scalar("loss")[1])
    if (values < 0).any():
        return None
    if len(values) < 2 * _RECENT:
        return 1.0
    return max(1.0, min(overall_median(values[:_RECENT]), overall_median(values[-_RECENT:])))


def _norms(history: History, limits: Thresholds) -> Iterator[_Told]:
    values = _finite(history.scalar("gradient_norm")[1])
    if len(values) < 2 * _RECENT:
        return
    now, first = overall_median(values[-_RECENT:]), overall_median(values[:_RECENT])
    usual = size_of_loss(history) or max(1.0, first)
    yield "exploding_norm", now > limits.exploding_norm * usual, f"gradient norm {number(now)}"
    yield "least_norm", now < limits.least_norm, f"gradient norm {number(now)}"
    if first > 0:
        yield "norm_fall", now < limits.norm_fall * first, f"{number(now / first)} of the first norms"


def _layers(history: History, limits: Thresholds) -> Iterator[_Told]:
    if "gradient" not in history.roles:
        return
    _, layers, values = history.series("gradient", "norm")
    with np.errstate(all="ignore"):
        small = ((values[-_RECENT:] < limits.vanishing_norm) & (values[-_RECENT:] > 0)).sum(axis=0) >= _RECENT // 2
    # A bias before a norm, or of keys, has a gradient that is zero but for rounding: its layer learns by its weight.
    learns = {layer for layer, is_small in zip(layers, small, strict=True) if not is_small}
    named = [
        layer
        for layer, is_small in zip(layers, small, strict=True)
        if is_small and f"{layer.removesuffix('bias')}weight" not in learns
    ]
    told = f"{len(named):,} layers, first {named[0]}" if len(named) > 1 else "".join(named)
    yield "vanishing_norm", bool(named), told


def _losses(history: History, limits: Thresholds) -> Iterator[_Told]:
    everything = _finite(history.scalar("loss")[1])
    values = everything[-_RECENT:]
    if len(values) < _RECENT:
        return
    mean = float(np.abs(values.mean()))
    if (everything < 0).any():  # near 0 a mean says nothing of its size
        mean = max(mean, overall_median(np.abs(everything)))
    yield "loss_noise", bool(values.std() > limits.loss_noise * mean), f"{number(float(values.std()))} around its mean"
    level = bool((values[1:] > limits.plateau * values[0]).all()) and values[0] > 0
    yield "plateau", level, f"none of the last {_RECENT} losses below {limits.plateau:g} of the first of them"


def _weights(history: History, limits: Thresholds) -> Iterator[_Told]:
    if "weight" not in history.roles:
        return
    _, _, values = history.series("weight", "rms")
    with np.errstate(all="ignore"):
        grown = np.where(values[:-1] > 1e-6, values[1:] / values[:-1], 1.0)  # a bias may begin at zero
        jump = float(np.nanmax(grown, initial=1.0)) if grown.size else 1.0
        last = values[-1][values[-1] > 0]
    yield "weight_growth", jump > limits.weight_growth, f"{number(jump)} times between two looks"
    if len(last) > 1:
        apart = float(last.max() / last.min())
        yield "weight_spread", apart > limits.weight_spread, f"{number(apart)} times between layers"


def _times(history: History, limits: Thresholds) -> Iterator[_Told]:
    values = _finite(history.scalar("step_time")[1])
    if len(values) >= 4 * _RECENT:
        now, usual = overall_median(values[-_RECENT:]), overall_median(values[_RECENT:])
        yield "step_time", now > limits.step_time * usual, f"{number(now / usual)} times the usual step"


def _finite(values: Floats) -> Floats:
    found: Floats = values[np.isfinite(values)]
    return found
