"""The checklist of a healthy run: each line passed, failed, or not observed, with its number. Reads a History."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from holter.diagnosis.limits import crossed
from holter.diagnosis.thresholds import Thresholds
from holter.history import History
from holter.series import Floats
from holter.statistics.shape import shape_of
from holter.words import number, share, times

State = Literal["passed", "failed", "not observed"]
# Update ratios that are right for the phase: up to this step, from, to.
_PHASES = ((1_000, 1e-3, 1e-2), (10_000, 1e-4, 1e-3), (np.inf, 1e-5, 1e-4))
_RECENT = 50  # values that stand for "now"


@dataclass(frozen=True)
class Check:
    """One line; `value` is NaN where it was not observed."""

    name: str
    state: State
    value: float
    text: str


def check_health(
    history: History, layers: Sequence[Mapping[str, Any]] = (), thresholds: Thresholds | None = None
) -> tuple[Check, ...]:
    """E31, in the order of its lines. `layers` are those of run.json, whose shapes tell which can be compared."""
    limits = thresholds or Thresholds()
    matrices = {str(layer.get("name")) for layer in layers if len(layer.get("shape") or ()) > 1}
    return (*(line(history, limits) for line in _LINES), _layers_are_alike(history, limits, matrices))


def _check(name: str, is_right: bool | np.bool_, value: float, text: str) -> Check:
    return Check(name, "passed" if is_right else "failed", float(value), text)


def _unseen(name: str, why: str) -> Check:
    return Check(name, "not observed", float("nan"), why)


def _loss_falls(history: History, limits: Thresholds) -> Check:
    name = "the loss falls, without spikes"
    values = history.scalar("loss")[1]
    if len(values) < 20:
        return _unseen(name, "fewer than 20 losses were logged")
    bad = int((~np.isfinite(values)).sum())
    if bad:
        return _check(name, False, bad, f"{bad} losses are not finite")
    tenth = max(3, len(values) // 10)
    first, last = float(np.median(values[:tenth])), float(np.median(values[-tenth:]))
    jumps = _over_usual(values)
    fell = last < first
    text = f"{number(first)} → {number(last)}, largest spike {times(jumps)}"
    return _check(name, fell and jumps < limits.loss_spike, last / first if first else np.nan, text)


def _over_usual(values: Floats) -> float:
    """The largest value over the median of the ten before it."""
    windows = np.lib.stride_tricks.sliding_window_view(values[:-1], min(10, len(values) - 1))
    usual = np.median(windows, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = values[-len(usual) :] / usual
    ratios = ratios[np.isfinite(ratios) & (usual > 0)]
    return float(ratios.max(initial=1.0))


def _norm_is_right(history: History, limits: Thresholds) -> Check:
    name = "the gradient norm is between 0.1 and 10"
    recent = history.scalar("gradient_norm")[1][-_RECENT:]
    values = recent[np.isfinite(recent)]
    if not len(recent):
        return _unseen(name, "no gradient norm was recorded")
    if not len(values):
        return _check(name, False, float(recent[-1]), "it is not finite of late")
    usual = float(np.median(values))
    return _check(name, 0.1 <= usual <= 10, usual, f"{number(usual)} of late")


def _updates_fit_the_phase(history: History, limits: Thresholds) -> Check:
    name = "update ratios are right for the phase"
    if "update" not in history.roles:
        return _unseen(name, "no updates were measured")
    steps, _, values = history.series("update", "ratio")
    known = values[-1][np.isfinite(values[-1]) & (values[-1] > 0)]
    if not len(known):  # at the first step of a warm-up the rate is 0
        return _unseen(name, "no update was measured of late")
    low, high = next((low, high) for until, low, high in _PHASES if steps[-1] < until)
    usual = float(np.median(known))
    text = f"{number(usual)} at step {steps[-1]:,}, where {number(low)} to {number(high)} is usual"
    return _check(name, low <= usual <= high, usual, text)


def _no_update_alert(history: History, limits: Thresholds) -> Check:
    name = "no layer's update is out of all bounds"
    if "update" not in history.roles:
        return _unseen(name, "no updates were measured")
    _, layers, values = history.series("update", "ratio")
    known = np.flatnonzero(np.isfinite(values).any(axis=1))
    if not len(known):
        return _unseen(name, "no update was measured that is a number")
    last = values[known[-1]]
    with np.errstate(invalid="ignore"):
        bad = (last > limits.update_ratio_high) | ((last < limits.update_ratio_low) & (last > 0))
    named = [layer for layer, is_bad in zip(layers, bad, strict=True) if is_bad]
    text = f"{len(named)} of {len(layers)} layers" + (f", first {named[0]}" if named else "")
    return _check(name, not named, len(named), text)


def _bells(history: History, limits: Thresholds) -> Check:
    name = "gradients are bell-shaped"
    layers = history.layers("gradient") if "gradient" in history.roles else ()
    taken = [history.histogram("gradient", layer)[1] for layer in layers]
    found = [shape_of(histograms[-1]).without_zeros for histograms in taken if histograms]
    if not found:
        return _unseen(name, "no histograms of gradients were recorded")
    odd = [kind for kind in found if kind in ("empty", "collapsed", "several-peaks", "shifted")]
    text = f"{len(odd)} of {len(found)} layers are not" + (f", such as {odd[0]}" if odd else "")
    return _check(name, len(odd) <= 0.1 * len(found), len(odd), text)


def _layers_are_alike(history: History, limits: Thresholds, matrices: set[str]) -> Check:
    name = "layers are within 100 times of each other"
    if "gradient" not in history.roles:
        return _unseen(name, "no gradients were measured")
    _, layers, values = history.series("gradient", "norm")
    weights = [place for place, layer in enumerate(layers) if layer in matrices] or list(range(len(layers)))
    window = values[-_RECENT:][:, weights]
    window = window[:, ~np.isnan(window).all(axis=0)]  # some had no gradient of late
    recent = np.nanmedian(window, axis=0)
    recent = recent[recent > 0]
    if len(recent) < 2:
        return _unseen(name, "fewer than two layers have a gradient")
    apart = float(recent.max() / recent.min())
    return _check(name, apart < limits.layer_spread, apart, f"{times(apart)} apart")


def _throughput_is_steady(history: History, limits: Thresholds) -> Check:
    name = "throughput is steady within 5 %"
    seconds = history.scalar("step_time")[1]
    if len(seconds) < 40:
        return _unseen(name, "fewer than 40 steps were timed")
    half = len(seconds) // 2
    change = float(np.median(seconds[half:]) / np.median(seconds[2:half]))
    # Steps that have become quicker are nobody's trouble.
    return _check(name, change <= 1.05, change, f"a step takes {times(change)} what it took in the first half")


def _memory_is_steady(history: History, limits: Thresholds) -> Check:
    name = "memory is steady, and below its limit"
    used, total = history.scalar("machine/gpu_memory")[1], history.scalar("machine/gpu_memory_total")[1]
    if len(used) >= 4 and len(total):
        filled = float(used[-1] / total[-1])
        is_steady = used[-1] < 1.05 * np.median(used[len(used) // 2 :])
        return _check(name, is_steady and filled < limits.memory, filled, f"{share(filled)} of the device is used")
    process = history.scalar("machine/process_memory")[1]
    if len(process) < 4:
        return _unseen(name, "too few looks at the machine")
    growth = float(process[-1] / np.median(process[len(process) // 4 : len(process) // 2 + 1]))
    return _check(name, growth < 1.2, growth, f"{times(growth)} what it was early in the run")


def _within_limits(history: History, limits: Thresholds) -> Check:
    """E33; `holter thresholds` shows them. At the end of a training a plateau is no illness, and noise never is."""
    name = "nothing is beyond the outer limits"
    found = crossed(history, limits)
    if found is None:
        return _unseen(name, "nothing was recorded that has one")
    bad = {limit: text for limit, text in found.items() if limit not in ("plateau", "norm_fall")}
    text = "; ".join(f"{limit}: {told}" for limit, told in bad.items()) or "all are kept"
    return _check(name, not bad, len(bad), text)


_LINES: tuple[Callable[[History, Thresholds], Check], ...] = (
    _loss_falls,
    _norm_is_right,
    _updates_fit_the_phase,
    _bells,
    _throughput_is_steady,
    _memory_is_steady,
    _no_update_alert,
    _within_limits,
)
