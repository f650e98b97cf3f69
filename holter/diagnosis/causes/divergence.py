"""Divergence: a loss that steps of the size of the weights have thrown up, or hold where a guess would be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import numpy as np

from holter.diagnosis.anatomy import elements, fan_in
from holter.diagnosis.causes.batches import guess_loss
from holter.diagnosis.chart import Chart, until_news
from holter.diagnosis.evidence import FAR, finds_its_rate, is_adaptive, matrices, rate_of, typical_of
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import OPENING, Floats, Integers, Series, known_median, median, overall_median
from holter.words import number

_RECENT = 20  # losses that stand for "now"
_GROWN = 3.0  # times their first size: weights that run away
_LEAPT = 1.3  # times its size from one look to the next: from there on they ran away
_LOST = 1e3  # times its start: a loss that no batch and no target makes
_BEGINS = 5  # the latest step that a training is seen from its start with; records before it were forgotten, or lie
# in the run that it was resumed from
_EXPLODES = 10.0  # times its size that a step moves a weight by: no rate is that high
_FIRST, _FAINT = 6, 0.01  # steps after which, and gradient that is left where, a first step was one too many
_WHOLE = 0.75  # of a weight's size, in one step: nothing that it was made for is left
_STILL = 0.05  # of a weight's size: steps that go on so are half as long as what is too long for a first one
_SOON = 20  # steps in which weights that are thrown away have outgrown their first size
_SPIKED = 2.0  # times its start: what a loss does not reach by the chance of its batches
_SMALL, _SINGLE = 0.1, 8  # of the size that keeps a signal its own; and numbers of a weight that says something
_FEW = 32.0  # examples whose mean loss says something
_OPENING = 60  # steps in which a rate that is wrong from the start shows
_BELOW = 0.9  # of its start, of a guess, or of what it was at the end of the opening: a loss that is lower has learnt
_LEAST, _MOST = 0.97, 1.25  # times the loss of a guess: what has learnt nothing lies there; above, it may yet come
_UNLEARNT = 0.3  # of its start: a loss that is lower has learnt, whatever was lost on the way
_BRIEF, _SETTLED = 2, 5  # steps above its start that are a stumble, and losses by which it is known to be over
_STAYS_UP = "the loss does not come down"
_SAID, _EASED = "lr-too-high was said", "lr-too-high was eased"  # what a chart remembers


def diverges(case: Case) -> Iterator[Suspicion]:
    """lr-too-high: a loss that has grown a thousandfold, or that steps whose length an optimizer found by itself have
    left above its start. What led there may be a rate, or targets that the model makes itself."""
    chart = case.chart
    times = _risen(chart)
    is_own = finds_its_rate(chart)
    if times is None or not times > (1.02 if is_own else _LOST) or not _weights_grown(chart) > _GROWN:
        return
    sizes = typical_of(chart, "update", "ratio")[1]
    since, largest = _grew_since(chart), float(np.max(sizes, initial=0.0))
    rates = rate_of(chart)[1]
    rate = float(rates[-1]) if len(rates) else float("nan")
    remedy = (
        f"multiply what the optimizer finds by less (a rate of {number(0.1 * rate)} in place of {number(rate)}), or "
        "hold it back (a growth_rate of 1.02, or a smaller d0)"
        if is_own
        else f"lower the rate from {number(rate)} to about {number(0.1 * rate)} and clip the gradients "
        "(monitor.clip_grad_norm_(1.0)); where the targets come from the model itself, take them from a copy that is "
        "renewed every few hundred steps"
    )
    yield Suspicion(
        "lr-too-high",
        "lr",
        rose_since(chart) if since is None else since,
        0.8,
        Kind.STATE if since is None else Kind.PATTERN,
        severity="critical",
        evidence={"loss_over_start": times, "update_ratio": largest, "rate": rate},
        advice=f"The loss is {number(times)} times what it was at the start and stays there, and the weights have "
        f"outgrown their first sizes: {remedy}. Go on from a checkpoint before it rose, or start anew.",
        check="It worked if the loss stays below its start and the weights keep their size.",
    )


def _risen(chart: Chart) -> float | None:
    """How many times its start the lowest of the last losses is, but for a few; None where a loss that goes below zero
    has no size, and where it is too early."""
    losses = chart.scalar("loss")
    opening, recent = losses.opening[:, 0], losses.values[-_RECENT:, 0]
    if losses.seen < 2 * _RECENT or not (opening > 0).all() or not (recent > 0).all() or not np.isfinite(recent).all():
        return None
    return float(np.quantile(recent, 0.1)) / overall_median(opening[:5])


def _weights_grown(chart: Chart) -> float:
    """How many times its first size a typical matrix is."""
    norms = chart.table("update", "weight_norm")
    return float(_typical_growth(chart, norms, norms.opening[:1], norms.values[-1:])[0]) if len(norms) > 1 else 0.0


def _grew_since(chart: Chart) -> int | None:
    """The look after which a typical matrix leapt for the first time."""
    norms = chart.table("update", "weight_norm")
    leaps = np.flatnonzero(_typical_growth(chart, norms, norms.values[:-1], norms.values[1:]) > _LEAPT)
    return int(norms.steps[leaps[0]]) if len(leaps) else None


def _typical_growth(chart: Chart, norms: Series, before: Floats, after: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return median((after / before)[:, matrices(chart, norms)].T)


def rose_since(chart: Chart) -> int:
    """The step after the last, of those kept, at which the loss was not far above its start."""
    losses = chart.scalar("loss")
    near = losses.steps[losses.values[:, 0] < 10 * overall_median(losses.opening[:5, 0])]
    return int(near[-1]) + 1 if len(near) else chart.first_step


# A rate that is too high from the start ----------------------------------------------------------------------------


class _Harm(NamedTuple):
    """What long steps did to the loss: how many times its start it is or was, and whether that is over."""

    times: float
    told: str
    is_over: bool = False


def too_high(case: Case) -> Iterator[Suspicion]:
    """lr-too-high: updates of the size of the weights from the first steps, and a loss that does not come down. Where
    it has come down since, a loss that was thrown up is a warning, and one that only was late is a note."""
    chart = case.chart
    if not begins_here(chart) or finds_its_rate(chart) or not _are_large(chart):
        return
    steps, typical = _first_ratios(chart)
    largest = float(np.max(typical[steps < _opening_ends(chart)], initial=0.0))
    harm = _harm(case, largest) if largest > FAR else None
    if harm is None or (harm.times <= _SPIKED and not have_size(chart)):
        if chart.kept.get(_SAID) == {_STAYS_UP} and _has_come_down(chart):
            chart.kept[_EASED] = True
            yield _taken_back(chart, largest)
        return
    chart.kept[_SAID] = {harm.told} | cast(set[str], chart.kept.get(_SAID, set()))
    if harm.is_over:
        chart.kept[_EASED] = True
    _, cosines = typical_of(chart, "update", "cosine")
    one_way = len(cosines) > 1 and bool((cosines[-2:] > 0.9).all())  # too long steps go to and fro
    rates = chart.scalar("learning_rate").opening[:, 0]
    rate = float(np.nanmax(rates)) if len(rates) else float("nan")
    better = rate * min(0.1, max(1e-4, _right_step(chart) / (_first_ratio(chart, rate) or largest)))
    explodes = largest > _EXPLODES and not is_adaptive(chart)
    clip = "clip the gradients (monitor.clip_grad_norm_(1.0)), which are that long, and " if explodes else ""
    score = min(0.95, 0.6 + 0.15 * np.log10(largest / FAR) + 0.2 * (harm.times > 3))
    yield Suspicion(
        "lr-too-high",
        "lr",
        chart.first_step,
        0.95 if _EASED in chart.kept else 0.55 if one_way else score,  # what is eased has the highest, to be replaced
        severity="warning" if harm.is_over else "critical",
        evidence={"update_ratio": largest, "rate": rate}
        | ({} if np.isnan(harm.times) else {"loss_over_start": harm.times}),
        advice=f"One step changes a weight by {100 * largest:.0f} % of its size, and {harm.told}: "
        f"{clip}lower the rate from {number(rate)} to about {number(better)}.",
        check="It worked if update ratios are near 0.01 or below and the loss falls within the first 50 steps.",
    )


def _taken_back(chart: Chart, largest: float) -> Suspicion:
    """Return the note that replaces what was said before: its score is the highest that the rule gives."""
    now = overall_median(chart.scalar("loss").values[-_RECENT:, 0])
    return Suspicion(
        "lr-too-high",
        "lr",
        chart.first_step,
        0.95,
        severity="info",
        evidence={"update_ratio": largest, "loss": now, "first_loss": _first_loss(chart)},
        advice=f"One step changed a weight by {100 * largest:.0f} % of its size, and the loss did not come down at "
        f"first; it has since, from {number(_first_loss(chart))} to {number(now)}. A lower rate may come down sooner.",
        check="Nothing needs to be done while the loss falls.",
    )


def begins_here(chart: Chart) -> bool:
    """Return whether the first record is of the first steps, so that what was first is known."""
    return not chart.resumed and chart.first_step <= _BEGINS


def _harm(case: Case, largest: float) -> _Harm | None:
    """Return what steps of this size did, the worst first."""
    chart = case.chart
    thrown = _thrown_up(case) if largest > 1 else None
    was_thrown = thrown is not None and _has_come_down(chart)
    harms = (
        (_does_not_come_down(case, largest), _STAYS_UP),
        (None if was_thrown else thrown, _STAYS_UP),
        (_went_up_again(chart), "the loss does not stay down"),
        (_silenced(chart) if largest > _WHOLE else None, "most gradients are exactly zero since"),
        (_knocked_out(chart, largest), "most layers have next to no gradient since"),
    )
    found = next((_Harm(times, told) for times, told in harms if times is not None), None)
    if found is None and thrown is not None:
        return _Harm(thrown, f"threw the loss up to {number(thrown)} times its start", is_over=True)
    return found


def _has_come_down(chart: Chart) -> bool:
    """Return whether the loss is by now well below its start, and below what a guess loses or what it was at the end of
    the opening."""
    losses, guess = chart.scalar("loss"), guess_loss(chart)
    recent = losses.values[-_RECENT:, 0]
    if losses.seen < 2 * _RECENT or not np.isfinite(recent).all():
        return False
    now, end = overall_median(recent), overall_median(losses.opening[-_RECENT:, 0])
    has_learnt = np.isnan(guess) or now < _BELOW * guess or (losses.seen >= OPENING + _RECENT and now < _BELOW * end)
    return bool(now < _BELOW * _first_loss(chart) and has_learnt)


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
def _first_sizes(chart: Chart) -> tuple[Integers, Floats]:
    """Return steps, and by how much of its size each matrix changed in one step, [looks, matrices]: as the first looks
    saw it, or as a norm has grown since the look before. No norm grows by more than its steps are long."""
    ratios, norms = chart.table("update", "ratio"), chart.table("update", "weight_norm")
    places = matrices(chart, ratios)
    steps, sizes = ratios.opening_steps, ratios.opening[:, places]
    if norms.names != ratios.names or len(steps) < 2 or len(norms.opening) != len(steps):
        return steps, sizes
    began = norms.opening[:-1, places]
    with np.errstate(all="ignore"):
        grown = (norms.opening[1:, places] / began) ** (1 / np.diff(steps)[:, None]) - 1
        grown[~(began > _SMALL * _usual_norms(chart, [norms.names[place] for place in places]))] = np.nan
        return steps, np.concatenate([sizes[:1], np.fmax(sizes[1:], grown)])


@until_news
def _are_large(chart: Chart) -> bool:
    """Return whether any of the first steps changed half of the matrices by a tenth of their size or more."""
    _, sizes = _first_sizes(chart)
    return bool(((sizes > FAR).sum(axis=1) >= np.maximum((sizes <= FAR).sum(axis=1), 1)).any())


def _first_ratios(chart: Chart) -> tuple[Integers, Floats]:
    """Return by how much of its size each of the first steps changed a typical matrix."""
    steps, sizes = _first_sizes(chart)
    with np.errstate(all="ignore"):
        typical = median(sizes.T)
    return steps[np.isfinite(typical)], typical[np.isfinite(typical)]


def _usual_norms(chart: Chart, names: list[str]) -> Floats:
    """Return the norms of weights that keep a signal its size."""
    counts = np.array([max(1, elements(chart, [name])) for name in names])
    usual: Floats = np.sqrt(counts / np.array([fan_in(chart, name) for name in names]))
    return usual


@until_news
def have_size(chart: Chart) -> bool:
    """Return whether half of the matrices began with a size to change: of a single number, and of weights that begin at
    or near zero, a step of any rate is a large part."""
    norms = chart.table("update", "weight_norm")
    if not len(norms):
        return True
    names = [norms.names[place] for place in matrices(chart, norms)]
    counts = np.array([max(1, elements(chart, [name])) for name in names])
    first = norms.opening[0, matrices(chart, norms)]
    return bool(((first > _SMALL * _usual_norms(chart, names)) & (counts >= _SINGLE)).mean() >= 0.5)


@until_news
def _opening_ends(chart: Chart) -> int:
    """Where a rate that jumps begins another story."""
    steps, rates = rate_of(chart)
    late = np.flatnonzero((rates[1:] >= 2 * rates[:-1]) & (steps[1:] > chart.first_step + 10))
    return min([chart.first_step + _OPENING, *map(int, steps[1:][late[:1]])])


def _thrown_up(case: Case) -> float | None:
    """How many times its start the loss was in the first steps, where that was more than any batch makes it.

    None after a stumble: one or two steps too far, as L-BFGS takes them without a line search, and learnt at once."""
    losses, recent = case.chart.scalar("loss").opening[:20, 0], case.chart.scalar("loss").values[-_SETTLED:, 0]
    is_far = len(losses) >= 10 and np.isfinite(losses).all() and losses.max() > 2 * losses[0] > 0
    if not is_far or ((losses > losses[0]).sum() <= _BRIEF and (recent < _UNLEARNT * losses[0]).all()):
        return None
    return float(losses.max() / losses[0])


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


def _knocked_out(chart: Chart, largest: float) -> float | None:
    """How many times its start the loss is, where the very first steps left most layers next to no gradient, which has
    not come back since, though the loss is far from zero. What is lost later is what a training has learnt.

    NaN of a loss without a size, as an agent's around zero: then the steps must have left nothing of the weights."""
    norms, first = chart.table("gradient", "norm"), chart.first("gradient", "norm", _FIRST + 6)[1]
    start, losses = chart.scalar("loss").opening[:, 0], chart.scalar("loss").values[:, 0]
    if not is_adaptive(chart) or len(first) < _FIRST + 6 or len(losses) < 40 or not np.isfinite(losses).all():
        return None
    has_size = bool((start > 0).all())
    if not has_size and not largest > _WHOLE:
        return None
    places, late = matrices(chart, norms), overall_median(losses[-20:]) / start[0] if has_size else float("nan")
    with np.errstate(all="ignore"):
        soon, now = (median(rows)[places] / median(first[:2])[places] for rows in (first[-6:], norms.values[-8:]))
    is_lost = overall_median(soon) < _FAINT and overall_median(now) < _FAINT
    return float(late) if is_lost and not late <= _UNLEARNT else None


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
    late = overall_median(losses[-_RECENT:]) / float(start[0])
    is_silent = first < 0.5 and soon > 0.6 and now > 0.6
    return late if is_silent and not late < _UNLEARNT else None


def _does_not_come_down(case: Case, largest: float) -> float | None:
    """Return how many times its start the loss is, at the end of the opening and by now, where it is no lower, or is
    that of a guess that knows how frequent the classes are and steps are still long; None where it has come down."""
    chart, series = case.chart, case.chart.scalar("loss")
    losses = series.opening[series.opening_steps < _opening_ends(chart), 0]
    if len(losses) < 4:
        return None
    if not np.isfinite(losses).all():
        return float("inf")
    if (losses <= 0).any() or len(losses) < 10 or case.step - chart.first_step < 15:
        return None  # a loss that goes to both sides of zero need not come down
    last = min(_RECENT, max(3, len(losses) // 4))
    start, late, now = _first_loss(chart), overall_median(losses[-last:]), overall_median(series.values[-last:, 0])
    lowest, guess = min(late, now), guess_loss(chart)
    if lowest > 1.02 * start:
        return lowest / start
    # A model of language first learns how frequent the classes are, and falls on: only one that stays there is stuck.
    # Far above a guess, one that falls at all is on its way there.
    half = len(losses) // 2
    is_flat = late > _LEAST * overall_median(losses[half : -(len(losses) // 4)])
    is_flat &= late < _MOST * guess or late > _LEAST * overall_median(losses[:half])
    is_guess = lowest > _LEAST * guess and 0.5 * guess < start < 3 * guess
    knows_nothing = len(losses) >= 40 and is_flat and is_guess and _are_still_long(chart, largest)
    return lowest / start if knows_nothing else None


def _are_still_long(chart: Chart, largest: float) -> bool:
    """Return whether steps are long beside the weights, or the first ones have thrown the weights away: beside those
    that have grown at once a step is short."""
    _, sizes = typical_of(chart, "update", "ratio")
    norms = chart.table("update", "weight_norm")
    soon = norms.opening[norms.opening_steps <= chart.first_step + _SOON]
    outgrown = len(soon) > 0 and bool((_typical_growth(chart, norms, soon[:1], soon) > _GROWN).any())
    return largest > _WHOLE or outgrown or (len(sizes) > 0 and overall_median(sizes[-3:]) > _STILL)


def _first_loss(chart: Chart) -> float:
    """Over as many steps as have a few dozen examples: the loss of one example says little."""
    sizes, losses = chart.table("batch", "size").opening, chart.scalar("loss").opening[:, 0]
    size = float(np.fmax.reduce(sizes[0], initial=1.0)) if len(sizes) else _FEW
    return overall_median(losses[: int(np.ceil(_FEW / max(size, _FEW / 8)))])


RULES = (diverges, too_high)
