"""The same batch again: a loader that is stuck, and what only looks like one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.diagnosis.causes.batches import is_target, targets_of
from holter.diagnosis.chart import Chart, column
from holter.diagnosis.evidence import matrices, middle, typical_now
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Flags, Floats, Integers, overall_median
from holter.words import share

_STUCK = 4  # steps in a row with a batch of the last few
_ALWAYS = 16  # steps after which there has never been another batch
_NOTED = 50  # steps in which a note of it is made
_LOADED = 16  # examples: a batch that a loader makes, and not yet a data set
_BY_HEART = 10  # parameters for each example
_STATE = 16  # whole numbers, at most, that make one state of few
_FEW = 4  # different batches that must have been there before


def repeated(case: Case) -> Iterator[Suspicion]:
    """batch-repeated: the last batches are but one or two, after many different ones.

    An epoch that comes round, in whatever order, shows all its batches before one comes again; a training on the
    whole of a small data set has never had another one; a loader that gives each batch twice goes on to the next.
    """
    steps, ago = column(case.chart.scalar("batch/repeated"))
    if not len(ago):
        yield from _agreeing(case)
        return
    if len(ago) < _STUCK + _FEW or not (ago[-_STUCK:] > 0).all():
        return
    if len(ago) >= _ALWAYS and (ago[1:] == 1).all() and case.chart.scalar("batch/repeated").seen == len(ago):
        yield from _only_one(case)
        return
    again = (ago > 0) & (ago <= 2)
    run = _last_run(again)
    before = int((~again[: len(again) - run]).sum())  # batches that were not just there
    longest = _longest(again[: len(again) - run])
    few = 2 if run >= 2 * _STUCK and (ago[-run:] == 1).all() else _FEW  # an epoch of two batches shows both in turn
    if run < _STUCK or before < few or run < 2 * longest + 2 or _may_coincide(case.chart):
        return
    since = int(steps[-run])
    yield Suspicion(
        "batch-repeated",
        "data",
        since,
        0.95 if run >= _STUCK + 2 else 0.75,
        Kind.FACT,
        evidence={"steps": run, "distance": float(ago[-1]), "different_before": before},
        advice=f"The same batch has come {run} times in a row since step {since:,}: look for an iterator that is made "
        "anew in each step (next(iter(loader))), a sampler that no longer advances, or a cache that is not filled.",
        check="It worked if batch/repeated is 0, or as long as an epoch.",
    )


def _may_coincide(chart: Chart) -> bool:
    """Return whether two batches may be equal by chance: all flags are 0, or an agent is in the same state of few."""
    series = [chart.table("batch", name) for name in ("count", "size", "min", "max", "mean")]
    inputs = [place for place, name in enumerate(series[0].names) if not is_target(name)]
    if not inputs:
        return False
    count, size, low, high, mean = (one.values[-1, inputs] for one in series)
    whole = (low == np.round(low)) & (high == np.round(high)) & (mean * count == np.round(mean * count))
    is_state = (size == 1) & whole & ((high - low == 1) | (count <= _STATE))
    return bool(((low == high) | is_state | np.isnan(low)).all())


def _only_one(case: Case) -> Iterator[Suspicion]:
    """There has never been another batch: a note, as a training on the whole of its data is meant to be so, be it a
    graph, a table or the points of a curve. A warning where it is as small as those of a loader, has targets, and a
    model of many parameters learns it by heart."""
    chart = case.chart
    sizes, parameters = chart.table("batch", "size"), chart.info.get("parameters")
    size = float(np.fmax.reduce(sizes.values[-1], initial=0.0)) if len(sizes) else 0.0
    _, losses = column(chart.scalar("loss"))
    is_as_loaded = size <= _LOADED and size % 4 == 0 and len(targets_of(sizes)) > 0
    is_large = isinstance(parameters, int) and parameters >= _BY_HEART * size
    falls = len(losses) >= _ALWAYS and bool(losses[0] > 0 and overall_median(losses[-3:]) < 0.8 * losses[0])
    is_stuck = is_as_loaded and is_large and falls
    if not is_stuck and not (size > 1 and case.step - chart.first_step <= _NOTED):
        return
    evidence: dict[str, object] = {"steps": len(column(chart.scalar("batch/repeated"))[0]), "examples": size}
    told = "which the model learns by heart" if is_stuck else "which is right if they are all the data there are"
    yield Suspicion(
        "batch-repeated",
        "data",
        chart.first_step,
        0.75 if is_stuck else 0.5,
        Kind.FACT if is_stuck else Kind.STATE,
        severity="warning" if is_stuck else "info",
        evidence=evidence | ({"share_of_loss_left": float(losses[-1] / losses[0])} if is_stuck else {}),
        advice=f"All steps so far have seen the same {size:.0f} examples, {told}. "
        f"{'Look' if is_stuck else 'Else look'} for an iterator that is made anew in each step (next(iter(loader))), "
        "or a batch that was taken out of the loop. As a test whether one batch can be learnt it is right.",
        check="It worked if batch/repeated is 0, or as long as an epoch.",
    )


def _agreeing(case: Case) -> Iterator[Suspicion]:
    """Without hashes: gradients that began to agree while their norm and the loss fall."""
    if typical_now(case.chart, "update", "cosine") <= 0.9:
        return
    series, losses = case.chart.table("update", "cosine"), case.chart.scalar("loss")
    steps, cosines = middle(series, matrices(case.chart, series)) if len(losses) >= 20 else (series.steps, np.zeros(0))
    run = _last_run(cosines > 0.9)
    if run < 2 or len(cosines) - run < 2 or not (cosines[:-run] < 0.75).all():
        return
    # It began somewhere between two looks.
    since = int(steps[-run - 1] + steps[-run]) // 2 + 1
    before, now = losses.before(int(steps[-run - 1]), 12), losses.values[-3:]
    norms = case.chart.scalar("gradient_norm").since(int(steps[-run]))
    was, left = overall_median(before), overall_median(now)
    if not was > 0 or not left < 0.6 * was or (len(norms) and norms[-1] > 2 * norms[0]):
        return
    yield Suspicion(
        "batch-repeated",
        "data",
        since,
        0.6,
        evidence={"cosine": float(cosines[-1]), "share_of_loss_left": left / was},
        advice=f"Since step {since:,} at the latest successive gradients agree to {cosines[-1]:.2f} and the loss is "
        f"{share(left / was)} of what it was: one batch may be used again and again. "
        "Log inputs=x to be sure, and look at the sampler.",
        check="It worked if the cosine of successive gradients falls back below 0.9.",
    )


def _last_run(holds: Flags) -> int:
    """How many values at the end hold."""
    breaks = np.flatnonzero(~holds)
    return len(holds) - 1 - int(breaks[-1]) if len(breaks) else len(holds)


def _longest(holds: Flags) -> int:
    """The longest run of values that hold."""
    edges: Integers = np.flatnonzero(np.diff(np.concatenate([[0], holds.astype(np.int64), [0]])))
    lengths: Floats = np.diff(edges)[::2].astype(np.float64)
    return int(lengths.max(initial=0))
