"""The training loop: gradients that are not cleared, accumulation that is not averaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from holter.diagnosis.chart import Chart, column
from holter.diagnosis.evidence import data_is_usual, rate_is_flat, typical_now, typical_of
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Floats, Integers, Series, known_median, median, overall_median

_GROWN = 2.5  # times the usual norm: more than a gradient grows by that its own steps make larger
_PINNED = 1e-3  # of its size that a norm varies by where a clip cuts it to the same one at every step
_FAR_GROWN = 5.0  # times the usual norm: what is kept shows in it, and not only in that gradients agree
_RISEN = 0.5  # of what the loss had gained: where it gives that back, gradients that are kept do harm
_LEVEL = 8  # losses that stand for a level
_LOOKS, _ALIKE = 4, 0.99  # looks in a row, and cosines at them that gradients of new batches do not have
_LEFT, _SURE = "gradients_left", 2  # what lay in a gradient as a backward added to it, and looks in a row that tell
_MOVES = 1e-4  # of a weight's size: a step that is shorter need not show in the loss


def not_cleared(case: Case) -> Iterator[Suspicion]:
    """zero-grad-missing: each gradient holds the one before it. Where it was seen what a backward adds to, that alone
    decides."""
    yield from _left_behind(case) if len(case.chart.scalar(_LEFT)) else _agree_and_grow(case)


def _agree_and_grow(case: Case) -> Iterator[Suspicion]:
    """As gradients do that hold those before them.

    They agree and grow as well where what is learnt runs ahead, as a Q-function does of its own targets; but there they
    are new at every step. A stuck batch agrees too, but its norm and loss fall; with a loss of the wrong sign they grow
    while it goes down.
    """
    chart = case.chart
    if typical_now(chart, "update", "cosine") <= 0.9 or not _are_kept(chart):
        return
    steps, cosines = typical_of(chart, "update", "cosine")
    at, norms = column(chart.scalar("gradient_norm"))
    if len(cosines) < 2 or len(norms) < 5 or not (cosines[-2:] > 0.9).all() or not norms[-1] > 0:
        return
    low = np.flatnonzero(cosines <= 0.8)
    # The first look has no gradient before it to compare with.
    agree_since = int(steps[low[-1] + 1]) if len(low) else min(int(steps[0]), chart.first_step + 1)
    before = norms[at < agree_since][-10:]
    usual = overall_median(before) if len(before) >= 3 else float(norms[at >= agree_since][0])
    recent = overall_median(norms[-3:])
    if not usual > 0 or not (recent > _GROWN * usual or _agree_too_well(chart, cosines)) or _falls_for_ever(case):
        return
    # Of t gradients that have nothing in common the sum still agrees with the one before as sqrt(1 - 1 / t).
    if not cosines[-1] > 1 - 0.75 / max(int(steps[-1]) - agree_since, 4):
        return
    has_grown, does_harm = recent > _FAR_GROWN * usual, _has_risen(chart)
    found = Suspicion(
        "zero-grad-missing",
        "loop",
        _onset(at, norms, usual, agree_since),
        (0.85 if has_grown else 0.65) + (0.05 if does_harm else 0.0),  # what did harm once is not taken back
        Kind.FACT if has_grown else Kind.PATTERN,
        severity="critical" if does_harm else "warning",
        evidence={"cosine": float(cosines[-1]), "norm_growth": recent / usual},
        advice=f"Each step's gradient still holds those of the steps before (they agree to {cosines[-1]:.2f}, and have "
        f"grown {recent / usual:.1f}-fold): call optimizer.zero_grad() before each backward().",
        check="It worked if the cosine of successive gradients falls to near 0 and the norm stops growing.",
    )
    yield found
    if has_grown:  # recorded again, so what the loss does meanwhile belongs to it
        yield replace(found, since=max(found.since, int(steps[-1])))


def _left_behind(case: Case) -> Iterator[Suspicion]:
    """Where each backward adds to the gradients of the step before."""
    chart = case.chart
    steps, left = column(chart.scalar(_LEFT))
    if len(left) < _SURE or not (np.isfinite(left[-_SURE:]) & (left[-_SURE:] > 0)).all():
        return
    cleared = np.flatnonzero(left == 0)
    first = int(cleared[-1]) + 1 if len(cleared) else 0
    earliest = int(steps[first - 1]) + 1 if len(cleared) else 0
    does_harm = _has_risen(chart)
    yield Suspicion(
        "zero-grad-missing",
        "loop",
        max(_kept_since(chart, int(steps[first])), earliest),
        0.95,
        Kind.FACT,
        severity="critical" if does_harm else "warning",
        evidence={"left": float(left[-1]), "looks": len(left) - first},
        advice="When backward() begins, the gradients of the step before are still there, and it adds to them: call "
        "optimizer.zero_grad() before each backward().",
        check=f"It worked if {_LEFT} is 0, or is not recorded any more.",
    )


def _kept_since(chart: Chart, step: int) -> int:
    """Return the first of the steps up to this one in a row whose gradients lay in the tensors of the step before."""
    kept = chart.scalar("gradients_kept").steps
    kept = kept[kept <= step]
    gaps = np.flatnonzero(np.diff(kept) > 1)
    return int(kept[gaps[-1] + 1 if len(gaps) else 0]) if len(kept) else step


def _has_risen(chart: Chart) -> bool:
    """Return whether the loss has given back half of what it had gained."""
    losses = chart.scalar("loss")
    if len(losses) < 3 * _LEVEL or not np.isfinite(losses.values).all():
        return False
    levels = [overall_median(part) for part in np.array_split(losses.values[:, 0], len(losses) // _LEVEL)]
    first, lowest = overall_median(losses.opening[:_LEVEL, 0]), min(levels)
    return bool(levels[-1] - lowest > _RISEN * abs(first - lowest))


def _are_kept(chart: Chart) -> bool:
    """Whether the last gradients lie in the tensors of those before: those that were let go of hold nothing of them."""
    kept = chart.scalar("gradients_kept")
    return len(kept) >= 2 and bool(kept.steps[-2] >= chart.step - 2)


def _agree_too_well(chart: Chart, cosines: Floats) -> bool:
    """Return whether gradients agree as those of new batches do not: cut to one length, or to no avail."""
    norms = column(chart.scalar("gradient_norm"))[1][-20:]
    is_pinned = len(norms) >= 20 and len(cosines) >= 3 and bool(np.ptp(norms) < _PINNED * overall_median(norms[-3:]))
    return _batches_differ(chart) and (is_pinned or _lead_nowhere(chart, cosines))


def _lead_nowhere(chart: Chart, cosines: Floats) -> bool:
    """Return whether steps that go one way, and are not short, have not made the loss less since the first record: a
    gradient of what is lost now would."""
    losses = chart.scalar("loss")
    first, last = losses.opening[:_LEVEL, 0], losses.values[-_LEVEL:, 0]
    if len(cosines) < _LOOKS or len(losses) < 3 * _LEVEL or not np.isfinite(last).all():
        return False
    goes_one_way = bool((cosines[-_LOOKS:] > _ALIKE).all()) and typical_now(chart, "update", "ratio") > _MOVES
    return goes_one_way and overall_median(last) >= overall_median(first)


def _batches_differ(chart: Chart) -> bool:
    """Whether batches are known to be new ones: a gradient of the same batch agrees with itself."""
    repeated = chart.scalar("batch/repeated")
    return len(repeated) >= 8 and not repeated.values[-8:].any()


def _falls_for_ever(case: Case) -> bool:
    _, losses = column(case.chart.scalar("loss"))
    return len(losses) > 3 and bool(losses[-1] < 0 and losses[-1] < losses[: max(1, len(losses) // 2)].min())


def _onset(at: Integers, norms: Floats, usual: float, latest: int) -> int:
    """Where a straight line through the growing norms comes down to the usual one: each step adds about as much."""
    low = np.flatnonzero(norms <= 1.3 * usual)
    first = int(low[-1]) + 1 if len(low) else 0
    if first >= len(at) - 2:
        return min(int(at[-1]), latest)
    steps, values = at[first : first + 12].astype(float), norms[first : first + 12]
    rise = np.polyfit(steps, values, 1)
    meets = (usual - rise[1]) / rise[0] if rise[0] > 0 else float(at[first])
    return int(np.clip(np.ceil(meets), at[max(0, first - 12)], min(int(at[first]), latest)))


def not_averaged(case: Case) -> Iterator[Suspicion]:
    """accumulation-not-averaged: loss, or norm, is a whole number of times what it was, at once and to stay."""
    chart = case.chart
    for since in _rises(case):
        if not data_is_usual(case, since) or not rate_is_flat(chart, since - 5, since + 3):
            continue
        norm, loss = (_step_up(chart.scalar(name), since) for name in ("gradient_norm", "loss"))
        more = _more_batches(chart, since)
        found = _whole_times(norm, loss, more)
        if found is None and more is not None and more > 1 and _is_longer(chart, since):
            found = more, False
        if found is None or more == 1:
            continue
        times, by_loss = found
        if more != times and not by_loss and not _all_alike(chart, since, times):
            continue
        what = "loss and gradient are" if by_loss else "the gradient is"
        yield Suspicion(
            "accumulation-not-averaged",
            "loop",
            since,
            0.95 if more == times else 0.85 if by_loss else 0.6,
            Kind.FACT if more == times else Kind.PATTERN,
            evidence={"times": times, "norm": norm, "loss": loss, "micro_batches": more},
            advice=f"From step {since} on {what} {times} times as large: divide the loss by the {times} "
            "micro-batches that are accumulated.",
            check="It worked if loss and norm are as before.",
        )
        return


def _is_longer(chart: Chart, since: int) -> bool:
    """Whether gradients are clearly longer than before: a mean of several is shorter than one of them."""
    series = chart.scalar("gradient_norm")
    before, after = series.before(since, 16)[:, 0], series.since(since)[:6, 0]
    return len(before) >= 8 and len(after) >= 5 and bool(overall_median(after) > 1.5 * np.quantile(before, 0.9))


def _rises(case: Case) -> list[int]:
    """Steps of late from which on the norm or the loss has been larger, or a step has had more examples."""
    found = {
        event.since
        for name in ("gradient_norm", "loss")
        for event in case.lately(name, 40, direction=1)
        if event.until is None and event.values >= 4
    }
    steps, sizes = column(case.chart.scalar("batch/size"))
    steps, sizes = steps[-40:], sizes[-40:]
    found |= set(steps[1:][sizes[1:] > 1.5 * sizes[:-1]].tolist())
    return sorted(found)


def _whole_times(norm: float | None, loss: float | None, more: int | None) -> tuple[int, bool] | None:
    """How many times as large they are, and whether the loss is: the sum of k gradients is between sqrt(k) and k
    times as long as one of them, the sum of k losses is k times one of them."""
    if norm is None:
        return None
    times = more if more else round(loss) if loss is not None and loss > 1.5 else round(norm)
    if not 2 <= times <= 64 or loss is None:
        return None
    by_loss = abs(loss / times - 1) < (0.2 if more else 0.08) and 0.8 * times**0.5 < norm < 1.35 * times
    by_norm = abs(loss - 1) < 0.2 and (norm > 0.6 * times if more else times <= 16 and abs(norm - times) < 0.25)
    return (times, by_loss) if by_loss or by_norm else None


def _more_batches(chart: Chart, since: int) -> int | None:
    """How many times as many examples a step takes from there on, each batch being as large as before; None where
    that is not known."""
    whole, each = chart.scalar("batch/size"), chart.table("batch", "size")
    parts = [(whole.before(since, 8), whole.since(since)[:8]), (each.before(since, 8), each.since(since)[:8])]
    if not all(len(before) and len(after) for before, after in parts):
        return None
    usual = [known_median(before) for before, _ in parts]
    if not all(one > 0 for one in usual):
        return None
    examples, batch = (known_median(after) / was for (_, after), was in zip(parts, usual, strict=True))
    return round(examples) if abs(batch - 1) < 0.01 and examples > 1.5 else 1


def _all_alike(chart: Chart, since: int, times: int) -> bool:
    """Whether the gradients of most layers are so many times as long: what is multiplied is the loss."""
    norms = chart.table("gradient", "norm")
    with np.errstate(all="ignore"):
        grown = median(norms.since(since)[:8]) / median(norms.before(since, 8))
    grown = grown[np.isfinite(grown)]
    return len(grown) > 0 and bool((np.abs(grown / times - 1) < 0.35).mean() > 0.8)


def _step_up(series: Series, step: int) -> float | None:
    """How many times as large the values after a step are as those before it."""
    before, after = series.before(step, 8), series.since(step)[:8]
    if len(before) < 3 or len(after) < 5:
        return None
    was, now = overall_median(before), overall_median(after)
    # What grows step by step is something else.
    at_once = overall_median(after[:2]) > 0.75 * now and overall_median(after[-2:]) < 1.33 * now
    return now / was if was > 0 and np.isfinite(now) and at_once else None


RULES = (not_cleared, not_averaged)
