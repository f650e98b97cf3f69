"""The learning rate: too low, a jump, a schedule that runs away, no warm-up. `divergence` has the rate too high."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.diagnosis.causes.divergence import begins_here, have_size
from holter.diagnosis.chart import Chart, column
from holter.diagnosis.evidence import (
    FAR,
    clipping,
    finds_its_rate,
    harm,
    is_adaptive,
    matrices,
    middle,
    rate_of,
    typical_now,
    typical_of,
)
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import median, overall_median, scale_of
from holter.words import number

_SMOOTH = 1.35  # between two steps, of a rate that follows its schedule
_AT_FLOOR = 8  # steps
_LATER_STEP, _SHORTER = 0.05, 4.0  # of a weight's size: of a rate that is fine later; and times the first were longer
_WHOLE = 0.75  # of a weight's size, in one step: nothing that it was made for is left
_SPIKE = 1.0  # times the size of the loss, by which it must rise
_FEW_STEPS = 10  # above the first loss: fewer are made good before anyone looks
_LITTLE = 10.0  # first losses: what all losses above the first have cost together, as ten steps at twice the first


def jump(case: Case) -> Iterator[Suspicion]:
    """lr-jump: a rate that rose at once, above all before it, and harm right after."""
    steps, rates = rate_of(case.chart)
    lowest = rates.min(initial=np.inf)
    if len(rates) < 6 or not lowest > 0 or rates.max() < 2 * lowest:
        return
    ratios, peaks = rates[1:] / rates[:-1], column(case.chart.peaks)[1]
    if len(peaks) != len(rates):
        return
    for place in np.flatnonzero(ratios >= 2.0)[-3:] + 1:
        calm = ratios[max(0, place - 5) : place - 1]
        if len(calm) < 3 or (calm > _SMOOTH).any():
            continue  # a warm-up grows by large factors in its first steps
        since, factor = int(steps[place]), float(ratios[place - 1])
        above = float(rates[place] / peaks[place])
        if above < 1.5:
            continue  # it has been there before: a cycle, or a restart
        hurt = harm(case, since)
        if hurt is None and not (above >= 8 and case.step - since >= 4):
            continue
        score = 0.95 if hurt is not None else 0.7
        yield Suspicion(
            "lr-jump",
            "lr",
            since,
            score,
            Kind.FACT,
            severity="critical" if hurt is not None else "warning",
            evidence={"rate_before": float(rates[place - 1]), "rate": float(rates[place]), "factor": factor},
            advice=f"The rate rose {factor:.3g}-fold at step {since}, from {number(float(rates[place - 1]))} to "
            f"{number(float(rates[place]))}: look at what the schedule does there, and go back to "
            f"{number(float(rates[place - 1]))} from a checkpoint before step {since}.",
            check="It worked if loss and update ratio stay in their band past that step.",
        )


def too_low(case: Case) -> Iterator[Suspicion]:
    """lr-too-low: no layer moves, from the start, though gradients are there and the rate does not grow."""
    chart = case.chart
    if chart.peak_rate == 0 and _is_never_taken(chart):
        yield _no_rate(case)
        return
    if typical_now(chart, "update", "ratio") >= 2e-5 or finds_its_rate(chart):
        return
    steps, sizes = typical_of(chart, "update", "ratio")
    if len(sizes) < 3 or steps[-1] - steps[0] < 20 or not np.nanmax(sizes) < 2e-5 or not sizes[-1] > 0:
        return
    _, rates = rate_of(chart)
    if len(rates) > 10 and rates[-1] > 1.05 * rates[-11]:
        return  # it is being warmed up
    if len(rates) and rates[-1] < 0.5 * max(rates.max(), chart.peak_rate):
        return  # it has come down from where it worked
    _, norms = column(chart.scalar("gradient_norm"))
    if len(norms) >= 20 and np.ptp(norms[-20:]) < 1e-3 * overall_median(norms[-20:]):
        return  # a clip makes them all alike
    _, times_limit = clipping(chart)
    if len(times_limit) and overall_median(times_limit) > 50:
        return  # the clip makes it small
    _, losses = column(chart.scalar("loss"))
    if len(losses) >= 10 and np.isfinite(losses).all():
        first, last = overall_median(losses[: len(losses) // 4 + 1]), overall_median(losses[-(len(losses) // 4 + 1) :])
        if last < first - 0.1 * (first if losses.min() > 0 else scale_of(losses)):
            return
    ratio = overall_median(sizes)
    rate = float(rates[-1]) if len(rates) else float("nan")
    yield Suspicion(
        "lr-too-low",
        "lr",
        chart.first_step,
        0.8 if ratio < 1e-5 else 0.6,
        evidence={"update_ratio": ratio, "rate": rate},
        advice=f"A step changes weights by {ratio:.1g} of their size: raise the rate from {number(rate)} to about "
        f"{number(rate * min(1e4, 1e-3 / ratio))}.",
        check="It worked if update ratios are between 0.0001 and 0.01 and the loss falls.",
    )


def _is_never_taken(chart: Chart) -> bool:
    _, rates = rate_of(chart)
    return len(rates) >= 20 and not rates.any() and bool((chart.scalar("gradient_norm").values[-3:] > 0).any())


def _no_rate(case: Case) -> Suspicion:
    return Suspicion(
        "lr-too-low",
        "lr",
        case.chart.first_step,
        0.95,
        Kind.FACT,
        severity="critical",
        evidence={"rate": 0.0, "steps": case.step - case.chart.first_step},
        advice="The rate has been exactly 0 since the first step, so nothing is learnt: look at how the schedule "
        "computes it (a whole-number division gives 0), and at whether a warm-up ever leaves its start.",
        check="It worked if learning_rate is above 0 and the loss falls.",
    )


def runs_away(case: Case) -> Iterator[Suspicion]:
    """scheduler-stepped-too-often: the rate is at its floor long before the plan ends."""
    chart = case.chart
    steps, rates = rate_of(chart)
    if not len(rates) or rates[-1] > 0.02 * chart.peak_rate:
        return
    peak = max(float(rates.max()), float(np.nanmax(chart.scalar("learning_rate").opening, initial=0.0)))
    if not peak > 0:
        return
    at_floor = rates <= 0.02 * peak
    if not at_floor[-_AT_FLOOR:].all() or len(at_floor) < _AT_FLOOR:
        return
    if rates[-1] > 1e-3 * peak and np.ptp(rates[-_AT_FLOOR:]) > 1e-3 * rates[-1]:
        return  # still on its way: at the end of a cycle it turns
    place = len(at_floor) - int(np.argmin(at_floor[::-1])) if not at_floor.all() else 0
    since = int(steps[place])
    planned = chart.total_steps
    if planned is not None and not planned >= 1.9 * since:
        return  # twice as often is the least there is
    gone = case.step - chart.first_step
    if planned is None and (rates[-1] > 1e-6 * peak or case.step - since < max(40, 0.3 * gone)):
        return  # many a schedule ends at its floor; this training goes on there
    times = round(planned / max(since, 1)) if planned else None
    yield Suspicion(
        "scheduler-stepped-too-often",
        "lr",
        since,
        0.9 if planned else 0.6,
        Kind.FACT if planned else Kind.PATTERN,
        evidence={"peak": peak, "rate": float(rates[-1]), "planned_steps": planned},
        advice=f"The rate has fallen from {number(peak)} to {number(float(rates[-1]))} by step {since}"
        + (f" of {planned}: the scheduler steps about {times} times too often." if planned else ", and stays there.")
        + " Call scheduler.step() once an optimizer step, or once an epoch if its plan counts epochs.",
        check="It worked if the rate reaches its floor at the end of the plan.",
    )


def no_warmup(case: Case) -> Iterator[Suspicion]:
    """warmup-missing: a spike while the second moment is young, from which the training recovers at the same rate.

    Other things throw a loss up and let it come back: a rate so high that steps stay long, a momentum that overshoots,
    a few weights that any step changes. A warm-up mends one thing alone, first steps that are far longer than those
    that the same rate takes once the second moment has grown. A spike that cost a few steps is a note.
    """
    chart = case.chart
    (_, losses), (_, rates) = chart.opening("loss"), chart.opening("learning_rate")
    if not is_adaptive(chart) or not begins_here(chart) or len(losses) < 30 or not np.isfinite(losses).all():
        return
    if len(rates) < 10 or rates[0] < 0.5 * np.nanmax(rates):
        return
    first, peak, late = float(losses[0]), float(losses[1:22].max()), overall_median(losses[-5:])
    # A bump that a few steps make good is no harm, nor is one that is no higher than what the loss does later too.
    scale = max(abs(first), scale_of(losses[22:]))
    if not peak - first > _SPIKE * scale or not late < min(first - 0.05 * scale, peak - 0.1 * scale):
        return
    rest = np.diff(losses[22:])
    if not peak - first > 6 * 1.05 * overall_median(np.abs(rest - overall_median(rest))):
        return  # what losses differ by from batch to batch
    if not have_size(chart) or not _only_first_steps_are_long(chart):
        return  # not of the size of the weights either: no warm-up would help
    above, cost = int((losses > first).sum()), float(np.maximum(losses - first, 0).sum()) / scale
    parameters = chart.info.get("parameters")
    most = (chart.total_steps or 5000) // 10
    length = 500 if not isinstance(parameters, int) or parameters < 1e8 else 2000 if parameters < 1e9 else 10_000
    length = max(10, min(length, most))
    yield Suspicion(
        "warmup-missing",
        "lr",
        chart.first_step,
        0.75,
        severity="info" if above < _FEW_STEPS and cost < _LITTLE else "warning",
        evidence={"peak_loss": peak, "first_loss": first, "rate": float(rates[0]), "steps_above": above},
        advice=f"The loss rose to {number(peak)} in the first steps and came back at the same rate: warm the rate up "
        f"over about {length} steps (holter.get_linear_schedule_with_warmup).",
        check="It worked if the loss falls from the first step on.",
    )


def _only_first_steps_are_long(chart: Chart) -> bool:
    """Whether the first steps, and they alone, were a large part of the weights: not all of it, nor a little."""
    ratios = chart.table("update", "ratio")
    places = matrices(chart, ratios)
    first = ratios.opening[ratios.opening_steps <= chart.first_step + 2][:, places]
    largest, (_, later) = float(np.nanmax(median(first.T), initial=0.0)), middle(ratios, places)
    return FAR < largest < _WHOLE and len(later) > 1 and bool(later[-1] < min(_LATER_STEP, largest / _SHORTER))


RULES = (jump, too_low, runs_away, no_warmup)
