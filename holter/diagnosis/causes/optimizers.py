"""The optimizer: its clip, its state, its eps, its weight decay."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from holter.diagnosis.causes.batches import labels_changed
from holter.diagnosis.causes.divergence import begins_here
from holter.diagnosis.chart import Chart, column, last_of
from holter.diagnosis.evidence import (
    clipping,
    data_is_usual,
    harm,
    is_adaptive,
    matrices,
    middle,
    rate_is_flat,
    rate_of,
    typical_now,
    typical_of,
)
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Floats, Integers, Series, known_median, median, overall_median, slopes, spread
from holter.words import number

_TIGHT = 50.0  # times its limit
_LOOKS_BACK = 200
_UNUSED = 0.95  # of a layer: the rest says little
_GREW = 10.0  # times the first norms
_OPENING = 6  # measured updates: every tenth step
_LONG = 2e-3  # of the weights: with an eps by mistake steps are up to 6e-4, with one that is meant 5e-3 and more
_OUTGROWN = 3.0  # of g / sqrt(v)
_APART = 5  # steps: what comes sooner belongs to the same outlier
_GIVEN_BACK = (
    0.25  # of what the loss has gained since the start: a flow recovers from giving back 0.17 by itself, while
)
# trainings that a clip mends give back 0.3 and more (holter clinic score --only 'clipping-missing/*')
_ALL = 0.9  # of that gain: one outlier after which next to nothing is left of it is enough
_BRIEF = 4  # values of an outlier: those that follow it are of a model that it threw off
_NOTHING = 0.02  # of that gain: near the end of a training a loss that doubles may give back less
_LASTS = (4, 8)  # steps after an outlier, over which the loss is judged: a momentum takes some to show
_ABOVE_FIRST = 8.0  # times the first norms, of an outlier where no loss is logged
_AS_LONG = 3.0  # times the usual norm, and its inverse: within, gradients are what they were before an outlier
_PINNED = 1e-3  # of its size that a norm varies by where it is cut to the same one at every step


def no_clip(case: Case) -> Iterator[Suspicion]:
    """clipping-missing: single steps with a norm far above the usual, after which the loss gives back a part of what it
    had gained, and gradients are as long as before, or the training recovers. Near the end of a training norms are
    small, and those that are many times as long are no longer than the first."""
    chart = case.chart
    if len(chart.scalar("clip_norm")):
        return
    spikes = [
        event
        for event in case.lately("gradient_norm", _LOOKS_BACK, direction=1)
        if event.until is not None and event.values <= _BRIEF and 8 <= event.factor < np.inf
    ]
    spikes = [e for e in spikes if data_is_usual(case, e.since) and rate_is_flat(chart, e.since - 3, e.since)]
    spikes = [e for e in spikes if _did_harm(chart, e.since) and _is_over(chart, e.since)]
    apart = 1 + sum(later.since - e.since > _APART for e, later in itertools.pairwise(spikes))
    if not spikes or (apart < 2 and not any(e.factor >= 100 or given_back(chart, e.since) > _ALL for e in spikes)):
        return
    _, norms = column(chart.scalar("gradient_norm"))
    limit = float(np.nanquantile(norms[np.isfinite(norms)], 0.9))
    largest = max(event.factor for event in spikes)
    yield Suspicion(
        "clipping-missing",
        "optimizer",
        spikes[0].since,
        min(0.9, 0.55 + 0.1 * len(spikes)),
        evidence={"spikes": len(spikes), "largest": largest, "p90": limit},
        advice=f"{len(spikes)} steps had a gradient up to {largest:.0f} times the usual, and nothing clips it: call "
        f"monitor.clip_grad_norm_({number(limit)}) before optimizer.step().",
        check="It worked if such steps no longer show in the loss.",
    )


def _did_harm(chart: Chart, step: int) -> bool:
    """Return whether the step with such a gradient made the loss worse from the next one on; without a loss, whether
    the gradient was far longer than the first ones."""
    if chart.has_column("loss"):
        return given_back(chart, step) > _GIVEN_BACK
    norms = chart.scalar("gradient_norm")
    return bool(norms.since(step)[0, 0] > _ABOVE_FIRST * overall_median(norms.opening[:10, 0]))


def given_back(chart: Chart, step: int) -> float:
    """Return how much of what it had gained since the start the loss lost right after this step; of what it varies by
    where that is more. NaN where that is not known yet. Where the start is not known, a loss has gained as much as is
    left of it, or more."""
    series = chart.scalar("loss")
    before, after = series.before(step, 16)[:, 0], series.since(step + 1)[:, 0]
    if len(before) < 4 or len(after) < _LASTS[0]:
        return float("nan")
    was = overall_median(before)
    gained = max(overall_median(series.opening[:5, 0]) - was, 6 * float(spread(before[:, None])[0]))
    if not begins_here(chart):
        gained = max(gained, abs(was))
    worst = max(overall_median(after[:count]) for count in _LASTS)
    return (worst - was) / gained if gained > 0 else float("inf")


def _is_over(chart: Chart, step: int) -> bool:
    """Whether the loss is back where it was before this step, or it was this step alone that threw it up: gradients are
    as long again as before."""
    norms = chart.scalar("gradient_norm")
    usual, now = norms.before(step, 16)[:, 0], norms.since(step + 4)[:8, 0]
    if len(usual) >= 8 and len(now) >= 8:
        size = overall_median(usual)
        if size / _AS_LONG < overall_median(now) < size * _AS_LONG:
            return True
    series = chart.scalar("loss")
    before, after = series.before(step, 16)[:, 0], series.since(step + 4)[:8, 0]
    if not len(before):
        return True
    room = max(0.5 * abs(overall_median(before)), 6 * float(spread(before[:, None])[0]))
    return len(after) >= 2 and float(np.quantile(after, 0.25)) < overall_median(before) + room


def tight_clip(case: Case) -> Iterator[Suspicion]:
    """clipping-too-tight: every step is clipped, and little is left of it."""
    steps, times = clipping(case.chart)
    if not len(times):
        yield from _pinned(case)
        return
    if len(times) < 10 or not times[-1] > 1 or not (times[-10:] > 1).all() or not overall_median(times[-20:]) > _TIGHT:
        return
    _, ratios = typical_of(case.chart, "update", "ratio")
    # Adam's steps do not depend on the length of the gradient, as long as that is the same; and where gradients explode
    # a clip that leaves a millionth of them is what the training lives by.
    if len(ratios) and not overall_median(ratios[-3:]) < (1e-4 if is_adaptive(case.chart) else 1e-3):
        return
    below = np.flatnonzero(~(times > 0.5 * _TIGHT))
    since = int(steps[below[-1] + 1]) if len(below) and below[-1] + 1 < len(steps) else int(steps[0])
    if case.step - since < 10:
        return
    _, norms = column(case.chart.scalar("clip_norm"))
    if overall_median(norms[-20:]) > _GREW * overall_median(case.chart.scalar("clip_norm").opening[:10, 0]):
        return  # it is the training that diverges, and the clip that holds it
    limit = float(case.chart.scalar("clip_max_norm").values[-1, 0])
    lately = norms[-100:][np.isfinite(norms[-100:])]
    better = float(np.quantile(lately, 0.9)) if len(lately) else 1.0
    yield Suspicion(
        "clipping-too-tight",
        "optimizer",
        since,
        0.85,
        Kind.FACT,
        evidence={"max_norm": limit, "times": overall_median(times[-20:])},
        advice=f"Every step is cut to 1/{overall_median(times[-20:]):.0f} of its length by "
        f"max_norm={number(limit)}: raise it "
        f"to about {number(better)}, the 90 % quantile of the norms.",
        check="It worked if a tenth of the steps is clipped or less.",
    )


def _pinned(case: Case) -> Iterator[Suspicion]:
    """Of a clip that was not seen: every gradient has the same norm to the last digits, and moves next to nothing."""
    chart = case.chart
    if is_adaptive(chart):
        return
    _, ratios = typical_of(chart, "update", "ratio")
    if len(ratios) < 3 or not 0 < overall_median(ratios[-3:]) < 2e-5:  # a step of nothing is no clipped one
        return
    steps, norms = column(chart.scalar("gradient_norm"))
    if len(norms) < 20:
        return
    limit = overall_median(norms[-20:])
    if not limit > 0 or not np.ptp(norms[-20:]) < _PINNED * limit:
        return
    other = np.flatnonzero(~(np.abs(norms - limit) < _PINNED * limit))
    yield Suspicion(
        "clipping-too-tight",
        "optimizer",
        int(steps[other[-1] + 1]) if len(other) else int(steps[0]),
        0.85,
        Kind.FACT,
        evidence={"norm": limit, "update_ratio": float(ratios[-1])},
        advice=f"Every gradient has a norm of {number(limit)} to the last digits, so it is cut to that, and a step "
        f"changes weights by {ratios[-1]:.1g} of their size: raise max_norm, to 1 for a start, and clip "
        "with monitor.clip_grad_norm_ or torch's own to see what the norms were.",
        check="It worked if the norm of the gradient varies from step to step.",
    )


def lost_state(case: Case) -> Iterator[Suspicion]:
    """optimizer-state-lost: its own counter begins anew and goes on from there."""
    steps, counts = column(case.chart.scalar("optimizer_step"))
    if len(counts) >= 3 and counts[1:].min() <= 1:
        anew = (counts[1:-1] <= 1) & (counts[:-2] >= 5) & (counts[2:] == counts[1:-1] + 1)
        place = int(np.flatnonzero(anew)[-1]) + 1 if anew.any() else 0
        # With two optimizers that take turns the counter falls too, and comes back.
        goes_on = place and (counts[place:][:8] <= np.arange(1, 9)[: len(counts) - place]).all()
        if goes_on and not _has_other_layers(case.chart, int(steps[place])):
            yield _lost(int(steps[place]), {"steps_before": float(counts[place - 1]), "steps": float(counts[place])})
            return
    if not case.chart.resumed or len(counts):
        return
    series = case.chart.table("momentum", "norm")
    at = case.chart.resumed[-1]
    before, after = series.before(at, 5), series.since(at)[:3]
    if len(before) and len(after):
        with np.errstate(all="ignore"):
            fall = known_median(np.nanmedian(after, axis=0) / np.nanmedian(before, axis=0))
        if fall < 0.4:
            yield _lost(at, {"momentum_left": fall})


def _has_other_layers(chart: Chart, at: int) -> bool:
    """Return whether the layers with a gradient are others from this step on: a pruned model, or one that was unfrozen
    or grew, needs a new optimizer."""
    norms = chart.table("gradient", "norm")
    before, after = norms.before(at, 3), norms.since(at)[:3]
    had, have = (~np.isnan(values).all(axis=0) for values in (before, after))
    return bool(len(before) and len(after) and (had != have).any())


def _lost(since: int, evidence: dict[str, object]) -> Suspicion:
    return Suspicion(
        "optimizer-state-lost",
        "optimizer",
        since,
        0.95,
        Kind.FACT,
        evidence=evidence,
        advice=f"The optimizer began anew at step {since}: load its state with the model's "
        "(optimizer.load_state_dict(checkpoint['optimizer'])), and do not rebuild it in mid-training.",
        check="It worked if optimizer_step goes on counting across the resume.",
    )


def eps_dominates(case: Case) -> Iterator[Suspicion]:
    """adam-eps-dominates: for most weights the second moment is below eps, so that the rate is not what it says."""
    chart = case.chart
    if typical_now(chart, "second_moment", "below_eps") == 0:
        return
    series, sizes = chart.table("second_moment", "below_eps"), last_of(chart.table("second_moment", "norm"))
    chosen = [place for place in matrices(chart, series) if len(sizes) == len(series.names) and sizes[place] > 0]
    steps, shares = _below_eps(chart, series, chosen)
    if len(shares) < 3 or not (shares[-3:] > 0.5).all() or steps[-1] - chart.first_step < 10:
        return
    if _steps_are_shares(chart):
        return
    zeros = last_of(chart.table("gradient", "zero_share"))
    if len(zeros) and known_median(zeros) > 0.5:
        return  # no gradient, no second moment: another trouble
    below = np.flatnonzero(shares <= 0.5)
    if not len(below) and _began_with_long_steps(chart):
        return
    since = int(steps[below[-1] + 1]) if len(below) else int(steps[0])
    yield Suspicion(
        "adam-eps-dominates",
        "optimizer",
        since,
        0.85,
        Kind.FACT,
        evidence={"share_below_eps": float(shares[-1])},
        advice=f"For {100 * shares[-1]:.0f} % of the weights sqrt(v) is below eps, which makes their steps far smaller "
        "than the rate says: lower eps a thousandfold (1e-8 is usual), or scale the loss up.",
        check="It worked if the share of sqrt(v) below eps is near 0.",
    )


def _below_eps(chart: Chart, series: Series, chosen: list[int]) -> tuple[Integers, Floats]:
    """The median share over these layers, of the second moments that are not exactly zero: a unit that nothing uses has
    no gradient, and no step that eps could shorten."""
    known = chart.table("second_moment", "zero_share")
    if not chosen or known.names != series.names or not np.array_equal(known.steps, series.steps):
        return middle(series, chosen)
    zeros = known.values[:, chosen]
    with np.errstate(all="ignore"):
        shares = (series.values[:, chosen] - zeros) / (1 - zeros)
    shares[~(zeros < _UNUSED)] = np.nan
    found = median(shares.T)
    return series.steps[~np.isnan(found)], found[~np.isnan(found)]


def _steps_are_shares(chart: Chart) -> bool:
    """Whether the optimizer makes every step the same share of the weight, as LAMB does: then eps has no say in it."""
    steps, ratios = typical_of(chart, "update", "ratio")
    at, rates = rate_of(chart)
    if len(ratios) < 3 or not len(rates):
        return False
    rate = rates[np.minimum(np.searchsorted(at, steps[-3:]), len(rates) - 1)]
    return bool((np.abs(ratios[-3:] - rate) < 0.1 * rate).all())


def _began_with_long_steps(chart: Chart) -> bool:
    """Return whether the rate fits the large eps, as in Inception's recipe of RMSprop and in AvaGrad. The first steps
    tell: later ones shrink with the gradient."""
    ratios = chart.table("update", "ratio")
    first = median(ratios.opening[:_OPENING, matrices(chart, ratios)].T)
    return bool(known_median(first) > _LONG)


def second_moment_lags(case: Case) -> Iterator[Suspicion]:
    """adam-second-moment-lag: the gradient of one tensor outgrows its second moment, and the norm follows.

    In a steady state g / sqrt(v) is about 1 at most. Its step is known from the tensor's own gradient.
    """
    chart = case.chart
    if not (chart.now("second_moment", "rms_ratio")[1] > _OUTGROWN).any():
        return
    ratios = chart.table("second_moment", "rms_ratio")
    if len(ratios) < 4 or case.step - ratios.steps[-1] > 12:
        return
    with np.errstate(all="ignore"):
        grown = ratios.values[-1] / median(ratios.values[-9:-1])
    grown[~(ratios.values[-1] > _OUTGROWN) | ~np.isfinite(grown)] = 0.0
    place = int(grown.argmax())
    if grown[place] < 3 or (grown > grown[place] / 2).sum() > max(2, 0.2 * len(grown)):
        return  # all at once: the batch or the rate
    layer, before, seen = ratios.names[place], int(ratios.steps[-2]), int(ratios.steps[-1])
    rises = [e for e in case.events.of("gradient/norm", direction=1, since=before + 1) if e.layer == layer]
    since = rises[0].since if rises else before + 1
    hurt = harm(case, since, 12, least=1.5)
    if hurt is None or not data_is_usual(case, since) or not rate_is_flat(chart, since - 5, since):
        return
    if labels_changed(chart, hurt.since) or given_back(chart, since) < _NOTHING:
        return
    losses = chart.scalar("loss")
    if len(losses) and not overall_median(losses.since(since)) > 1.05 * overall_median(losses.before(since, 16)):
        return  # a gradient may grow for good reasons: what a step does wrong the loss shows
    yield Suspicion(
        "adam-second-moment-lag",
        "optimizer",
        since,
        0.8,
        layer=layer,
        evidence={"rms_ratio": float(ratios.values[-1, place]), "times": float(grown[place]), "and": hurt.series},
        advice=f"The gradient of {layer} outgrew its second moment ({grown[place]:.2g} times its usual ratio), and "
        f"{hurt.series} rose: lower beta2 to 0.95, or clip updates.",
        check="It worked if the ratio of g to sqrt(v) stays near 1.",
        by=None if rises else seen,
    )


def heavy_decay(case: Case) -> Iterator[Suspicion]:
    """weight-decay-too-high: all weights shrink by the factor that rate and decay give, whatever the gradients."""
    chart = case.chart
    series = chart.table("update", "weight_norm")
    chosen = matrices(chart, series)
    if len(series) < 3 or not len(chosen):
        return
    window = series.steps >= series.steps[-1] - 120
    at, norms = series.steps[window], series.values[window][:, chosen]
    with np.errstate(all="ignore"):
        if not known_median(np.fmin.reduce(norms) / norms[0]) <= 0.95:
            return
        # A decay that is strong enough comes to its end in a few looks: there the gradient holds against it.
        lowest = int(np.nanargmin(median((norms / norms[0]).T)))
        at, norms = at[: lowest + 1], norms[: lowest + 1]
        if len(at) < 3 or at[-1] - at[0] < 20:
            return
        found = slopes(at, np.log(norms))
    decay = _decay(chart.scalars("weight_decay"))
    steps, rates = rate_of(chart)
    if not decay > 0 or not len(rates):
        return
    planned = -overall_median(rates[steps >= at[0]]) * decay
    shrink = found[np.isfinite(found)]
    span, usual = int(at[-1] - at[0]), overall_median(shrink)
    if not planned < 0 or not usual * span < np.log(0.85) or not (shrink < 0).mean() > 0.9:
        return
    # Momentum makes the steps that a gradient with decay asks for up to a hundred times as long.
    most = 2.0 if is_adaptive(chart) or not chart.has("momentum") else 100.0
    if not 0.4 < usual / planned < most:
        return
    begun = _begun(series.steps, series.values[:, chosen])
    yield Suspicion(
        "weight-decay-too-high",
        "optimizer",
        begun,
        0.85,
        evidence={"decay": decay, "rate": float(rates[-1]), "shrink_per_step": usual},
        advice=f"All weights shrink by {100 * (1 - np.exp(usual * 100)):.0f} % in 100 steps, "
        f"as rate x decay "
        f"says: lower weight_decay from {number(decay)} to {number(decay / 10)} or below.",
        check="It worked if weight norms stop falling together.",
    )


def _decay(series: Mapping[str, Series]) -> float:
    found = [float(last_of(one)[0]) for one in series.values() if len(one)]
    return max(found, default=0.0)


def _begun(steps: Integers, norms: Floats) -> int:
    """The last step before the common fall: from there on the median of the norms only falls."""
    with np.errstate(all="ignore"):
        middle_ = np.nan_to_num(median(np.log(norms / norms[-1]).T), nan=-np.inf)
    top = len(middle_) - 1 - int(np.argmax(middle_[::-1]))
    return int(steps[top])


RULES = (no_clip, tight_clip, lost_state, eps_dominates, second_moment_lags, heavy_decay)
