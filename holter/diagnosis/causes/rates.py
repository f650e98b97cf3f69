"""The learning rate: too high, too low, a jump, a schedule that runs away, no warm-up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.diagnosis.anatomy import elements, fan_in
from holter.diagnosis.causes.batches import guess_loss
from holter.diagnosis.chart import Chart, column, until_news
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
from holter.series import Floats, Integers, known_median, median, overall_median, scale_of
from holter.words import number

_SMOOTH = 1.35  # between two steps, of a rate that follows its schedule
_AT_FLOOR = 8  # steps
_LATER_STEP, _SHORTER = 0.05, 4.0  # of a weight's size: of a rate that is fine later; and times the first were longer
_EXPLODES = 10.0  # times its size that a step moves a weight by: no rate is that high
_FIRST, _LOST = 6, 0.01  # steps after which, and gradient that is left where, a first step was one too many
_GROWN = 3.0  # times their first size: weights that run away
_WHOLE = 0.75  # of a weight's size, in one step: nothing that it was made for is left
_SPIKE = 1.0  # times the size of the loss, by which it must rise
_SPIKED = 2.0  # times its start: what a loss does not reach by the chance of its batches
_SMALL, _SINGLE = 0.1, 8  # of the size that keeps a signal its own; and numbers of a weight that says something
_FEW = 32.0  # examples whose mean loss says something
_OPENING = 60  # steps in which a rate that is wrong from the start shows


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


def too_high(case: Case) -> Iterator[Suspicion]:
    """lr-too-high: updates of the size of the weights from the first steps, and a loss that does not come down."""
    chart = case.chart
    if not _are_large(chart) or chart.resumed or finds_its_rate(chart):
        return
    steps, typical = _first_ratios(chart)
    largest = float(np.max(typical[steps < _opening_ends(chart)], initial=0.0))
    if not largest > 0.1:
        return
    harms = (
        (_does_not_come_down(case), "the loss does not come down"),
        (_thrown_up(case) if largest > 1 else None, "the loss does not come down"),
        (_went_up_again(chart), "the loss does not stay down"),
        (_silenced(chart) if largest > _WHOLE else None, "most gradients are exactly zero since"),
        (_knocked_out(chart), "most layers have next to no gradient since"),
    )
    bad, what = next((harm for harm in harms if harm[0] is not None), (None, ""))
    if bad is None or (bad <= _SPIKED and not _have_size(chart)):
        return
    _, cosines = typical_of(chart, "update", "cosine")
    one_way = len(cosines) > 1 and bool((cosines[-2:] > 0.9).all())  # too long steps go to and fro
    rates = chart.scalar("learning_rate").opening[:, 0]
    rate = float(np.nanmax(rates)) if len(rates) else float("nan")
    better = rate * min(0.1, max(1e-4, _right_step(chart) / (_first_ratio(chart, rate) or largest)))
    explodes = largest > _EXPLODES and not is_adaptive(chart)
    clip = "clip the gradients (monitor.clip_grad_norm_(1.0)), which are that long, and " if explodes else ""
    yield Suspicion(
        "lr-too-high",
        "lr",
        chart.first_step,
        0.55 if one_way else min(0.95, 0.6 + 0.15 * np.log10(largest / 0.1) + 0.2 * (bad > 3)),
        severity="critical",
        evidence={"update_ratio": largest, "rate": rate, "loss_over_start": bad},
        advice=f"One step changes a weight by {100 * largest:.0f} % of its size, and {what}: "
        f"{clip}lower the rate from {number(rate)} to about {number(better)}.",
        check="It worked if update ratios are near 0.01 or below and the loss falls within the first 50 steps.",
    )


def _right_step(chart: Chart) -> float:
    """The share of its size that a first step may change a weight by: with a momentum (0.9 as a rule) steps become ten
    times as long, where no second moment sees to their length."""
    return 1e-3 if chart.has("momentum") and not is_adaptive(chart) else 1e-2


def _first_ratio(chart: Chart, rate: float) -> float | None:
    """What a step of this rate makes of the weights as they began: once they have run away, so have the gradients."""
    (looks, typical), (steps, rates) = _first_ratios(chart), chart.opening("learning_rate")
    first = int(np.searchsorted(steps, looks[0])) if len(looks) else len(rates)
    known = first < len(rates) and rates[first] > 0 and typical[0] > 0
    return float(typical[0] * rate / rates[first]) if known else None


@until_news
def _are_large(chart: Chart) -> bool:
    """Whether any of the first updates changed half of the matrices by a tenth of their size or more."""
    ratios = chart.table("update", "ratio")
    sizes = ratios.opening[:, matrices(chart, ratios)]
    return bool(((sizes > 0.1).sum(axis=1) >= np.maximum((sizes <= 0.1).sum(axis=1), 1)).any())


def _first_ratios(chart: Chart) -> tuple[Integers, Floats]:
    """By how much of its size each of the first updates changed a typical matrix."""
    ratios = chart.table("update", "ratio")
    chosen = matrices(chart, ratios)
    with np.errstate(all="ignore"):
        typical = median((ratios.opening[:, chosen] if chosen else ratios.opening).T)
    return ratios.opening_steps[np.isfinite(typical)], typical[np.isfinite(typical)]


@until_news
def _have_size(chart: Chart) -> bool:
    """Whether half of the matrices began with a size to change: of a single number, and of weights that begin at or
    near zero, a step of any rate is a large part."""
    norms = chart.table("update", "weight_norm")
    if not len(norms):
        return True
    names = [norms.names[place] for place in matrices(chart, norms)]
    counts = np.array([max(1, elements(chart, [name])) for name in names])
    usual = np.sqrt(counts / np.array([fan_in(chart, name) for name in names]))
    first = norms.opening[0, matrices(chart, norms)]
    return bool(((first > _SMALL * usual) & (counts >= _SINGLE)).mean() >= 0.5)


@until_news
def _opening_ends(chart: Chart) -> int:
    """Where a rate that jumps begins another story."""
    steps, rates = rate_of(chart)
    late = np.flatnonzero((rates[1:] >= 2 * rates[:-1]) & (steps[1:] > chart.first_step + 10))
    return min([chart.first_step + _OPENING, *map(int, steps[1:][late[:1]])])


def _thrown_up(case: Case) -> float | None:
    """How many times its start the loss was in the first steps, where that was more than any batch makes it."""
    losses = case.chart.scalar("loss").opening[:20, 0]
    is_far = len(losses) >= 10 and np.isfinite(losses).all() and losses.max() > 2 * losses[0] > 0
    return float(losses.max() / losses[0]) if is_far else None


def _went_up_again(chart: Chart) -> float | None:
    """How many times its start the loss is, where it had come down and is far above that again, at the same rate, and
    the weights have grown: data that became harder leaves them their size."""
    opening, losses = chart.scalar("loss").opening[:, 0], chart.scalar("loss").values[-30:, 0]
    rates = chart.scalar("learning_rate")
    if len(opening) < 40 or len(losses) < 30 or not opening[0] > 0 or not np.isfinite(losses).all():
        return None
    if len(rates) and rates.values[-1, 0] > 1.05 * np.nanmax(rates.opening[:20, 0]):
        return None
    norms = chart.table("update", "weight_norm")
    with np.errstate(all="ignore"):
        grown = norms.values[-1] / norms.opening[0] if len(norms) else np.zeros(0)
    if not overall_median(grown[matrices(chart, norms)]) > _GROWN:
        return None
    came_down, is_now = overall_median(opening[20:40]), overall_median(losses)
    is_up = came_down < 0.7 * opening[0] and is_now > 2 * came_down and losses.max() > 1.5 * opening[0]
    return float(losses.max() / opening[0]) if is_up else None


def _knocked_out(chart: Chart) -> float | None:
    """How many times its start the loss is, where the very first steps left most layers next to no gradient, which has
    not come back since, though the loss is far from zero. What is lost later is what a training has learnt."""
    norms, first = chart.table("gradient", "norm"), chart.first("gradient", "norm", _FIRST + 6)[1]
    start, losses = chart.scalar("loss").opening[:, 0], chart.scalar("loss").values[:, 0]
    if not is_adaptive(chart) or len(first) < _FIRST + 6 or len(losses) < 40 or not start[0] > 0:
        return None
    places, late = matrices(chart, norms), overall_median(losses[-20:]) / start[0]
    with np.errstate(all="ignore"):
        soon, now = (median(rows)[places] / median(first[:2])[places] for rows in (first[-6:], norms.values[-8:]))
    is_lost = overall_median(soon) < _LOST and overall_median(now) < _LOST
    return float(late) if is_lost and late > 0.3 else None


def _silenced(chart: Chart) -> float | None:
    """How many times its start the loss is, where most gradients were not zero at first and are since the first steps:
    units that a step has pushed beyond all inputs."""
    zeros = chart.table("gradient", "zero_share")
    start, losses = chart.scalar("loss").opening[:, 0], chart.scalar("loss").values[:, 0]
    if len(zeros) < _FIRST + 6 or not len(start):
        return None
    places = matrices(chart, zeros)
    with np.errstate(all="ignore"):
        first, soon, now = (
            known_median(rows[:, places])
            for rows in (zeros.opening[:1], zeros.opening[_FIRST : _FIRST + 6], zeros.values[-6:])
        )
    is_silent = first < 0.5 and soon > 0.6 and now > 0.6
    return overall_median(losses[-20:]) / float(start[0]) if is_silent else None


def _does_not_come_down(case: Case) -> float | None:
    """How many times its start the loss is at the end of the opening, where it is no lower, or no better than a guess
    that knows how frequent the classes are; None where it has come down."""
    series = case.chart.scalar("loss")
    losses = series.opening[series.opening_steps < _opening_ends(case.chart), 0]
    if len(losses) < 4:
        return None
    if not np.isfinite(losses).all():
        return float("inf")
    start, late = _first_loss(case.chart), overall_median(losses[-max(3, len(losses) // 4) :])
    if (losses <= 0).any() or len(losses) < 10 or case.step - case.chart.first_step < 15:
        return None  # a loss that goes to both sides of zero need not come down
    guess = guess_loss(case.chart)
    # A model of language first learns how frequent the classes are, and falls on: only one that stays there is stuck.
    is_flat = late > 0.97 * overall_median(losses[len(losses) // 2 : -(len(losses) // 4)])
    knows_nothing = len(losses) >= 40 and is_flat and late > 0.97 * guess and 0.5 * guess < start < 3 * guess
    return late / start if late > 1.02 * start or knows_nothing else None


def _first_loss(chart: Chart) -> float:
    """Over as many steps as have a few dozen examples: the loss of one example says little."""
    sizes, losses = chart.table("batch", "size").opening, chart.scalar("loss").opening[:, 0]
    size = float(np.fmax.reduce(sizes[0], initial=1.0)) if len(sizes) else _FEW
    return overall_median(losses[: int(np.ceil(_FEW / max(size, _FEW / 8)))])


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
    that the same rate takes once the second moment has grown.
    """
    chart = case.chart
    (_, losses), (_, rates) = chart.opening("loss"), chart.opening("learning_rate")
    if not is_adaptive(chart) or chart.resumed or len(losses) < 30 or not np.isfinite(losses).all():
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
    if not _have_size(chart) or not _only_first_steps_are_long(chart):
        return  # not of the size of the weights either: no warm-up would help
    parameters = chart.info.get("parameters")
    most = (chart.total_steps or 5000) // 10
    length = 500 if not isinstance(parameters, int) or parameters < 1e8 else 2000 if parameters < 1e9 else 10_000
    length = max(10, min(length, most))
    yield Suspicion(
        "warmup-missing",
        "lr",
        chart.first_step,
        0.75,
        evidence={"peak_loss": peak, "first_loss": first, "rate": float(rates[0])},
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


RULES = (jump, too_high, too_low, runs_away, no_warmup)
