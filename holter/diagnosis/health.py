"""The checklist of a healthy run: each line passed, failed, or not observed, with its number. Reads a History."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from holter.diagnosis.anatomy import kind_of
from holter.diagnosis.finding import Finding
from holter.diagnosis.limits import crossed, size_of_loss
from holter.diagnosis.thresholds import Thresholds
from holter.history import History
from holter.series import Flags, Floats, Integers, overall_median
from holter.statistics.shape import shape_of
from holter.words import number, share, times

State = Literal["passed", "failed", "not observed"]
# Update ratios that are right for the phase: up to this step, from, to.
_PHASES = ((1_000, 1e-3, 1e-2), (10_000, 1e-4, 1e-3), (np.inf, 1e-5, 1e-4))
_NEAR = 10.0  # times beyond those
_FALLEN = 0.01  # of the first losses: what is less is noise
_RECENT = 50  # values that stand for "now"
_LOST = 3  # gradients in a row that are not finite: a loss scale that is too large for one step makes one or two
_ODD = ("empty", "collapsed", "several-peaks", "shifted")
_SHAPED = 64  # values that can have a shape: a bias of one cannot
_STILL = "exactly 0 of late in all {} matrices, though other parameters move"
_TIMED = 40  # steps that tell how steady they are
_STEADY = 1 / 1.05  # of the throughput, that is left


@dataclass(frozen=True)
class Check:
    """One line; `value` is NaN where it was not observed."""

    name: str
    state: State
    value: float
    text: str


def check_health(
    history: History,
    layers: Sequence[Mapping[str, Any]] = (),
    thresholds: Thresholds | None = None,
    findings: Sequence[Finding] = (),
) -> tuple[Check, ...]:
    """E31, in the order of its lines. `layers` are those of run.json, whose shapes tell which can be compared.

    No line about updates passes while one of the `findings` is about the learning rate.
    """
    limits = thresholds or Thresholds()
    matrices = {str(layer.get("name")) for layer in layers if len(layer.get("shape") or ()) > 1}
    return (
        _loss_falls(history, limits),
        _norm_is_right(history),
        _agreeing(_updates_fit_the_phase(history, matrices), findings),
        _bells(history),
        _throughput_is_steady(history),
        _memory_is_steady(history, limits),
        _agreeing(_no_update_alert(history, limits, matrices), findings),
        _within_limits(history, limits),
        _layers_are_alike(history, limits, matrices),
    )


def _check(name: str, is_right: bool | np.bool_, value: float, text: str) -> Check:
    return Check(name, "passed" if is_right else "failed", float(value), text)


def _unseen(name: str, why: str) -> Check:
    return Check(name, "not observed", float("nan"), why)


def _agreeing(check: Check, findings: Sequence[Finding]) -> Check:
    """Return the check, failed if the rate is being found fault with: that takes more into account than a band does."""
    rates = [one for one in findings if one.where == "lr" and one.severity != "info" and one.until is None]
    if check.state != "passed" or not rates:
        return check
    return replace(check, state="failed", text=f"{check.text}; yet {rates[0].cause} since step {rates[0].since:,}")


def _loss_falls(history: History, limits: Thresholds) -> Check:
    name = "the loss falls, without spikes"
    values = history.scalar("loss")[1]
    if len(values) < 20:
        return _unseen(name, "fewer than 20 losses were logged")
    bad = int((~np.isfinite(values)).sum())
    if bad:
        return _check(name, False, bad, f"{bad} losses are not finite")
    first, last, _ = _levels(values)
    jumps = _over_usual(values)
    fell = first - last > _FALLEN * abs(first)
    text = f"{number(first)} → {number(last)}, largest spike {times(jumps)}"
    return _check(name, fell and jumps < limits.loss_spike, last / first if first else np.nan, text)


def _levels(values: Floats) -> tuple[float, float, float]:
    """Where the losses began, where they are, and by how much they differ from one to the next.

    They began at the median of their first tenth; where they rose within it, at the very first of them: to come back
    from there is no fall.
    """
    tenth = max(3, len(values) // 10)
    first, last = overall_median(values[:tenth]), overall_median(values[-tenth:])
    opening, swing = overall_median(values[:3]), overall_median(np.abs(np.diff(values[:tenth])))
    windows = np.lib.stride_tricks.sliding_window_view(values[:tenth], min(5, tenth))
    has_risen = np.median(windows, axis=1).max() > opening + 4 * swing
    noise = overall_median(np.abs(np.diff(values)))
    return (min(first, opening) if has_risen else first), last, noise


def _lost_since(steps: Integers, is_finite: Flags, least: int = 1) -> int | None:
    """The step since which nothing is finite; None where one of the last few is."""
    known = np.flatnonzero(is_finite)
    after = int(known[-1]) + 1 if len(known) else 0
    return int(steps[after]) if len(steps) - after >= least else None


def _not_finite(since: int) -> str:
    return f"not finite since step {since:,}"


def _is_old(history: History, looks: Integers) -> bool:
    """Whether the last look was twice as long ago as any two were apart, and more than a quarter of the run."""
    steps = history.steps
    if len(looks) < 2 or not len(steps):
        return False
    return bool(steps[-1] - looks[-1] > max(2 * np.diff(looks).max(), (steps[-1] - steps[0]) / 4))


def _over_usual(values: Floats) -> float:
    """The largest value over the median of the ten before it; 1 for a loss that goes below zero: it has no level."""
    if (values <= 0).any():
        return 1.0
    windows = np.lib.stride_tricks.sliding_window_view(values[:-1], min(10, len(values) - 1))
    usual = np.median(windows, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = values[-len(usual) :] / usual
    ratios = ratios[np.isfinite(ratios) & (usual > 0)]
    return float(ratios.max(initial=1.0))


def _norm_is_right(history: History) -> Check:
    name = "the gradient norm is between 0.1 and 10"
    steps, norms = history.scalar("gradient_norm")
    recent = norms[-_RECENT:]
    values = recent[np.isfinite(recent)]
    if not len(recent):
        return _unseen(name, "no gradient norm was recorded")
    if (since := _lost_since(steps, np.isfinite(norms), _LOST)) is not None:
        return _check(name, False, float(recent[-1]), _not_finite(since))
    if not len(values):
        return _check(name, False, float(recent[-1]), "it is not finite of late")
    usual = float(np.median(values))
    return _check(name, *_judged_norm(usual, history))


def _judged_norm(usual: float, history: History) -> tuple[bool, float, str]:
    """Whether a norm is right for the size of its loss. The band is that of a loss of about 1: a sum over a batch has
    larger gradients, and so has a likelihood of a narrow distribution, which may be of any sign."""
    text = f"{number(usual)} of late"
    if 0.1 <= usual <= 10 or usual < 0.1:
        return usual >= 0.1, usual, text
    if (size := size_of_loss(history)) is None:
        norms = history.scalar("gradient_norm")[1]
        first = max(1.0, overall_median(norms[np.isfinite(norms)][:_RECENT]))
        return (
            usual <= 10 * first,
            usual,
            f"{text}, {times(usual / first)} what it began with; a loss below 0 has no usual norm",
        )
    if size == 1:
        return False, usual, text
    return usual <= 10 * size, usual, f"{text}, {number(usual / size)} for each unit of a loss of {number(size)}"


def _updates_fit_the_phase(history: History, matrices: set[str]) -> Check:
    """Over the later half of the looks in this phase: at the end of a schedule updates are as small as its rate."""
    name = "update ratios are right for the phase"
    if "update" not in history.roles:
        return _unseen(name, "no updates were measured")
    steps, layers, values = history.series("update", "ratio")
    began, (_, low, high) = _phase_of(int(steps[-1]))
    places = _comparable(layers, matrices)
    if (trouble := _not_judged(name, history, values[:, places])) is not None:
        return trouble
    everything = values[steps >= began]
    everything = everything[len(everything) // 2 :]
    ratios = everything[:, places]
    known = ratios[np.isfinite(ratios) & (ratios > 0)]
    if len(known):
        return _beside_band(name, overall_median(known), (low, high), history)
    if (ratios == 0).all() and (everything > 0).any():
        return _check(name, False, 0.0, _STILL.format(len(places)))
    return _unseen(name, "no update above 0 was measured of late")  # at the first step of a warm-up the rate is 0


def _not_judged(name: str, history: History, ratios: Floats) -> Check | None:
    """Failed where there are no ratios any more, not observed where the last of them are old; None where neither is."""
    steps = history.series("update", "ratio")[0]
    since = _lost_since(steps, np.asarray(np.isfinite(ratios).any(axis=1)))
    if since is not None and np.isfinite(ratios).any():  # a weight of zeros has no ratio, and is not ill
        return _check(name, False, np.nan, _not_finite(since))
    return _unseen(name, f"last measured at step {steps[-1]:,}") if _is_old(history, steps) else None


def _beside_band(name: str, usual: float, band: tuple[float, float], history: History) -> Check:
    """The bands are rules of thumb that healthy trainings leave by a little, for their optimizer's or their batches'
    sake. One whose loss is above where it began has no claim to more than the band allows."""
    low, high = band
    told = f"{number(low)} to {number(high)}"
    if low <= usual <= high:
        return _check(name, True, usual, f"{number(usual)} of late, where {told} is usual")
    if high < usual <= high * _NEAR and _has_risen(history):
        text = f"{number(usual)} of late, above the usual {told}, and the loss is above where it began"
        return _check(name, False, usual, text)
    is_near = low / _NEAR <= usual <= high * _NEAR
    words = "near" if is_near else "far from"
    return _check(name, is_near, usual, f"{number(usual)} of late, {words} the usual {told}")


def _has_risen(history: History) -> bool:
    values = history.scalar("loss")[1]
    values = values[np.isfinite(values)]
    if len(values) < 20:
        return False
    first, last, noise = _levels(values)
    return last > first + 3 * noise


def _phase_of(step: int) -> tuple[int, tuple[float, float, float]]:
    """The step at which the phase of this one began, and the phase."""
    starts = (0, *(int(until) for until, _, _ in _PHASES[:-1]))
    return next((start, phase) for start, phase in zip(starts, _PHASES, strict=True) if step < phase[0])


def _comparable(layers: Sequence[str], matrices: set[str]) -> list[int]:
    """The places of matrices, where they are known: a bias begins at zero, and any update of it is huge beside that."""
    return [place for place, layer in enumerate(layers) if layer in matrices] or list(range(len(layers)))


def _no_update_alert(history: History, limits: Thresholds, matrices: set[str]) -> Check:
    name = "no layer's update is out of all bounds"
    if "update" not in history.roles:
        return _unseen(name, "no updates were measured")
    _, layers, values = history.series("update", "ratio")
    places = _comparable(layers, matrices)
    known = np.flatnonzero(np.isfinite(values[:, places]).any(axis=1))
    if not len(known):
        return _unseen(name, "no update was measured that is a number")
    last = values[known[-1], places]
    with np.errstate(invalid="ignore"):
        bad = (last > limits.update_ratio_high) | ((last < limits.update_ratio_low) & (last > 0))
    named = [layers[place] for place, is_bad in zip(places, bad, strict=True) if is_bad]
    if not named and (trouble := _not_judged(name, history, values[:, places])) is not None:
        return trouble
    if (last == 0).all() and (values[known[-1]] > 0).any():
        return _check(name, False, len(places), _STILL.format(len(places)))
    text = f"{len(named)} of {len(places)} layers" + (f", first {named[0]}" if named else "")
    return _check(name, not named, len(named), text)


def _bells(history: History) -> Check:
    name = "gradients are bell-shaped"
    layers = history.layers("gradient") if "gradient" in history.roles else ()
    looks = {layer: history.histogram("gradient", layer) for layer in layers}
    taken = {layer: known[-1] for layer, (_, known) in looks.items() if known}
    found = {layer: shape_of(last).without_zeros for layer, last in taken.items() if last.count >= _SHAPED}
    if not found:
        return _unseen(name, f"no histograms of gradients of {_SHAPED} values or more were recorded")
    odd: dict[str, str] = {layer: kind for layer, kind in found.items() if kind in _ODD}
    odd |= {layer: _not_finite(since) for layer, since in _lost_gradients(history).items() if layer in found}
    are_few = len(odd) <= 0.1 * len(found)
    newest = max((looks[layer][0] for layer in found), key=lambda steps: int(steps[-1]))
    if are_few and _is_old(history, newest):
        return _unseen(name, f"last looked at in step {newest[-1]:,}")
    such = next((f", such as {layer}: {kind}" for layer, kind in odd.items()), "")
    text = f"{len(odd)} of {len(found)} layers are not{such}"
    return _check(name, are_few, len(odd), text)


def _lost_gradients(history: History) -> dict[str, int]:
    """Layers whose gradients are not finite any more, and since when: histograms are too rare to tell."""
    steps, layers, nonfinite = history.series("gradient", "nonfinite")
    found = {}
    for layer, counts in zip(layers, nonfinite.T, strict=True):
        seen = ~np.isnan(counts)  # a layer that is not used has none
        since = _lost_since(steps[seen], counts[seen] == 0, _LOST)
        if since is not None:
            found[layer] = since
    return found


def _layers_are_alike(history: History, limits: Thresholds, matrices: set[str]) -> Check:
    name = "layers of a kind are within 100 times"
    if "gradient" not in history.roles:
        return _unseen(name, "no gradients were measured")
    _, layers, values = history.series("gradient", "norm")
    window = values[-_RECENT:]
    measured = ~np.isnan(window).all(axis=0)  # some had no gradient of late
    recent = np.full(len(layers), np.nan)
    recent[measured] = np.nanmedian(window[:, measured], axis=0)
    groups = _kin(layers, [place for place in _comparable(layers, matrices) if recent[place] > 0])
    if not groups:
        return _unseen(name, "fewer than two layers have a gradient above 0")
    spreads = [(float(recent[group].max() / recent[group].min()), group) for group in groups]
    apart, group = max(spreads, key=lambda one: one[0])
    smallest = layers[group[int(recent[group].argmin())]]
    return _check(name, apart < limits.layer_spread, apart, f"{times(apart)} apart, the smallest is {smallest}")


def _kin(layers: Sequence[str], places: Sequence[int]) -> list[list[int]]:
    """Layers whose names differ by numbers alone, as those of a stack do; where there are none, all together.

    An embedding, or a head, has gradients of a size of its own.
    """
    by_name: dict[str, list[int]] = {}
    for place in places:
        by_name.setdefault(kind_of(layers[place]), []).append(place)
    found = [group for group in by_name.values() if len(group) > 1]
    return found or ([list(places)] if len(places) > 1 else [])


def _throughput_is_steady(history: History) -> Check:
    """E31's 5 %. Failed where it has fallen by more than it swung by before, and stays there: other work on a machine
    comes and goes. By samples where their number is known: larger batches take longer."""
    name = "throughput holds up"
    speeds = history.scalar("samples_per_second")[1]
    speeds = speeds[np.isfinite(speeds) & (speeds > 0)]
    if len(speeds) < _TIMED:
        seconds = history.scalar("step_time")[1]
        speeds = 1 / seconds[np.isfinite(seconds) & (seconds > 0)]
    if len(speeds) < _TIMED:
        return _unseen(name, f"fewer than {_TIMED} steps were timed")
    pieces = [float(np.median(piece)) for piece in np.array_split(speeds[2:], 10)]
    left = float(np.median(speeds[len(speeds) // 2 :]) / np.median(speeds[2 : len(speeds) // 2]))
    has_fallen = max(pieces[-2:]) < _STEADY * min(pieces[:5])
    text = f"the second half went at {times(left)} the speed of the first"
    if left < _STEADY:
        text += ", and stays below all of it" if has_fallen else ", yet no slower now than parts of it were"
    # Steps that have become quicker are nobody's trouble.
    return _check(name, left >= _STEADY or not has_fallen, left, text)


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
    lost = _lost_scalars(history)
    if found is None and not lost:
        return _unseen(name, "nothing was recorded that has one")
    bad = lost | {limit: text for limit, text in (found or {}).items() if limit not in ("plateau", "norm_fall")}
    text = "; ".join(f"{limit}: {told}" for limit, told in bad.items()) or "all are kept"
    return _check(name, not bad, len(bad), text)


def _lost_scalars(history: History) -> dict[str, str]:
    """E32: what is not finite is beyond any limit. A loss at once, gradients if it lasts."""
    lost = {}
    for name, least in (("loss", 1), ("gradient_norm", _LOST)):
        steps, values = history.scalar(name)
        lost[name] = _lost_since(steps, np.isfinite(values), least)
    return {name: _not_finite(since) for name, since in lost.items() if since is not None}
