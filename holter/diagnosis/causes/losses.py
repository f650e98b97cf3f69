"""The loss: softmax twice, the wrong sign, a sum in place of a mean."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.diagnosis.causes.batches import (
    classes,
    first_losses,
    guess_loss,
    inputs_are_large,
    label_entropies,
    last_matrix,
    target_power,
    targets_of,
    two_classes_share,
)
from holter.diagnosis.chart import Chart, column, until_news
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Floats, median, overall_median, scale_of
from holter.words import number

_SEEN = 12  # losses within the bounds that two softmaxes leave
_SEEN_ONCE = 40  # of them, where outputs were looked at only once
_FIRST = 8  # gradients of a model that guesses still
_ONCE = 0.9  # of 1 / sqrt(K) times the length that one softmax makes: in 100 trainings each of 3, 5, 10 and 100 classes
# two left at most 0.48, 0.29, 0.15 and 0.02 times that length; one, but in one training, at least 0.7, 0.7, 0.8 and 1
_SLACK = 0.02  # of these bounds, in nats: labels may be smoothed or rounded
_BOUND = -1.05  # below what a similarity, an overlap or a probability with its sign turned can be
_DEEPER = 1.1  # times its first value
_FITS_MINUS = (0.9, 1.1)  # times what a guess loses, of a first loss with the other sign
_FAR, _LONGER = 8.0, 5.0  # times its first value, times the first gradient: where such a loss has no end
_SOME = 32  # labels: fewer times a guess is what a loss of several terms may well begin with
_FITS = (0.85, 1.2)  # times as many labels, of a sum that is compared with the mean that its own logits give
_FITS_A_GUESS = (0.75, 1.6)  # the same, where only the number of classes is known: logits of a new model vary
_FITS_A_SIZE = (0.7, 2.0)  # the same, of numbers whose mean square is known


# Softmax twice ----------------------------------------------------------------------------------------------------


def softmax_twice(case: Case) -> Iterator[Suspicion]:
    """double-softmax: outputs are probabilities already, and so a cross-entropy of them has narrow bounds.

    Of K probabilities p the loss ln(sum of e^p) - p[label] lies between ln(e + K - 1) - 1 and ln(e + K - 1).
    """
    chart = case.chart
    count = classes(chart)
    series = chart.scalar("loss") if count >= 2 else None
    if series is None or len(series) < _SEEN:
        return
    losses = np.concatenate([series.opening[:, 0], series.values[:, 0]])
    high = float(np.log(np.e + count - 1))
    low = high - 1
    if not (losses > low - _SLACK).all() or not (losses < high + _SLACK).all():
        return
    is_probability = _outputs_are_probabilities(chart, count)
    if is_probability and len(chart.scalar("logit_mean")) < 2 and len(losses) < _SEEN_ONCE:
        return  # one look may mislead
    if is_probability and _learns_by_one(chart, count):
        return
    is_stopped = _stopped_at(series.values[:, 0], low, float(np.log(count)))
    if not is_probability and not is_stopped:  # the first softmax may lie outside of the model
        return
    yield Suspicion(
        "double-softmax",
        "loss",
        chart.first_step,
        0.95 if is_probability else 0.6,
        Kind.FACT if is_probability else Kind.PATTERN,
        evidence={"lowest": float(losses.min()), "bound": low, "classes": count, "probabilities": is_probability},
        advice=f"The outputs are probabilities and the loss takes a softmax of them again: of {count} classes it "
        f"cannot fall below {low:.3f} (now {number(float(losses[-1]))}). Give cross_entropy the logits: remove the "
        "softmax from the model (a softmax over dim=0 mixes the batch besides), or use nll_loss(log(p)).",
        check=f"It worked if the loss falls below {low:.3f}.",
    )


def _outputs_are_probabilities(chart: Chart, count: int) -> bool | None:
    """Whether all looks at the model's output show numbers of mean 1/K whose exponentials add up as those of
    probabilities do, or of mean 1/N, as a softmax over a batch of N leaves them; None where nobody has looked."""
    _, means = column(chart.scalar("logit_mean"))
    _, sums = column(chart.scalar("logit_log_sum_exp"))
    if not len(means) or len(sums) != len(means):
        return None
    head = [name for name in chart.parameters if chart.part(name) == "output"]
    is_half = bool(head) and chart.dtype(head[-1]) in ("float16", "bfloat16")  # a probability has three digits then
    sizes = np.unique(column(chart.scalar("batch/size"))[1])
    shares = (count, *sizes[sizes > 1])
    exact = np.any([np.abs(means * share - 1) < (0.01 if is_half else 1e-3) for share in shares], axis=0)
    # By Jensen at least that of equal ones, ln(K e^(1/K)).
    bounded = (sums > np.log(count) + means - 0.01) & (sums < np.log(np.e + count - 1) + 0.01)
    return bool((exact & bounded).all())


def _learns_by_one(chart: Chart, count: int) -> bool:
    """Whether the first gradients of the last bias are as long as those of one softmax, as in -log(p[label]).

    While all K probabilities are alike, its gradient is 1/K minus the shares of the labels, whose squares add up to
    about 2 (ln K - their entropy) / K. Through a second softmax it is K times shorter; of two classes both overlap.
    """
    norms, (entropies, place) = chart.table("gradient", "norm"), label_entropies(chart)
    bias = (last_matrix(chart) or "").removesuffix("weight") + "bias"
    if count < 3 or bias not in norms.names or place < 0:
        return False
    _, at, where = np.intersect1d(norms.opening_steps[:_FIRST], entropies.opening_steps, return_indices=True)
    lacking = np.log(count) - entropies.opening[where, place]
    squares = norms.opening[at, norms.names.index(bias)] ** 2
    known = np.isfinite(lacking) & np.isfinite(squares)
    one = 2 * float(lacking[known].sum()) / count
    return one > 0 and float(squares[known].sum()) > _ONCE**2 / count * one


def _stopped_at(losses: Floats, low: float, guess: float) -> bool:
    """A loss that came down close to the bound and lies there, evenly: the bound is what stops it."""
    if len(losses) < 80:
        return False
    late, earlier = losses[-32:], losses[-64:-32]
    near = low + 0.12 * (guess - low)
    is_flat = overall_median(earlier) - overall_median(late) < 0.02 * (guess - low)
    return bool(overall_median(late) < near and late.min() > low - 1e-3 and is_flat)


# The wrong sign ---------------------------------------------------------------------------------------------------


def wrong_sign(case: Case) -> Iterator[Suspicion]:
    """loss-sign: the loss is minus what it should be, and falls without an end.

    Many a loss is negative by design: that of a density sinks below 0 and slows down, a similarity ends at -1, a policy
    gradient and a critic go to and fro. So that it is negative says nothing: either its first value is minus what a
    guess loses, or it went from one value to minus that in one step; and then it must fall further than those do.
    """
    chart = case.chart
    steps, losses = column(chart.scalar("loss"))
    if not chart.latest("loss") < 0 or len(losses) < 6 or not (losses[-3:] < 0).all():
        return
    known = np.isfinite(losses)
    steps, losses = steps[known], losses[known]
    positive = np.flatnonzero(losses >= 0)
    start = int(positive[-1]) + 1 if len(positive) else 0
    fallen = losses[start:]
    if len(fallen) < 5:
        return
    if start < 3 and (chart.scalar("loss").seen > len(chart.scalar("loss")) or chart.resumed):
        return  # what it was at first is not known any more
    since, first, now = int(steps[start]), float(fallen[0]), float(fallen[-1])
    growth = _growth(chart.scalar("gradient_norm").since(since)[:, 0])
    mirrored = _has_turned(losses, start) if start >= 3 else _begins_mirrored(chart, fallen)
    has_classes = label_entropies(chart)[1] >= 0
    is_deeper = fallen[-3:].max() < min(_DEEPER * overall_median(fallen[:2]), _BOUND)
    times = 20 if mirrored or has_classes else 1000
    is_wrong = _runs_away(fallen, times * scale_of(losses[: start + 3])) and growth > 10
    guess = _guess_at_first(chart) if start < 3 else float("nan")
    if _FITS_MINUS[0] < -overall_median(fallen[:2]) / guess < _FITS_MINUS[1]:
        mirrored = True
        is_wrong = is_wrong or (growth > _LONGER and _sinks(fallen, _FAR * guess))
    if not is_wrong and not (has_classes and mirrored and is_deeper):
        return
    yield Suspicion(
        "loss-sign",
        "loss",
        since,
        0.9 if mirrored else 0.75,
        Kind.FACT if mirrored else Kind.PATTERN,
        severity="critical",
        evidence={"first": first, "now": now, "norm_growth": growth, "of_a_guess": guess_loss(chart)},
        advice=f"The loss is {number(now)} and falls without end from {number(first)} at step {since:,}: its sign is "
        "turned round, and the training makes the model worse. Minimise the loss itself, not its negative.",
        check="It worked if the loss is positive and comes down towards 0.",
    )


def _growth(norms: Floats) -> float:
    """How many times its first length the gradient has now; NaN where that is not known."""
    norms = norms[np.isfinite(norms)]
    if len(norms) < 6 or not norms[:3].min() > 0:
        return float("nan")
    return overall_median(norms[-3:]) / overall_median(norms[:3])


def _begins_mirrored(chart: Chart, losses: Floats) -> bool:
    """Whether the first losses are minus what a guess loses."""
    should = guess_loss(chart) if label_entropies(chart)[1] >= 0 else target_power(chart)
    return bool(0.6 < -overall_median(losses[:2]) / should < 3.0) if should > 0.05 else False


def _guess_at_first(chart: Chart) -> float:
    """Return what a guess loses where the labels are not logged, or are numbers: by the first logits, or by targets
    that are 0 or 1 the entropy of their mean. NaN where neither is known."""
    share = two_classes_share(chart)
    if 0 < share < 1:
        return float(-share * np.log(share) - (1 - share) * np.log(1 - share))
    return _mean_by_logits(chart)


def _sinks(fallen: Floats, far: float) -> bool:
    """Whether it lies so far below 0 and falls on. Minus a cross-entropy falls for ever; minus an entropy, or a policy
    that is only ever punished, stays where it begins."""
    quarter = len(fallen) // 4
    if quarter < 5:
        return False
    late, earlier = fallen[-quarter:], fallen[-2 * quarter : -quarter]
    return bool(overall_median(late) < overall_median(earlier) and fallen[-3:].max() < -far)


def _has_turned(losses: Floats, start: int) -> bool:
    """Whether the loss went from a value to minus that in one step, far longer than any before it.

    What sinks through zero is as near to it before as after.
    """
    before = losses[max(0, start - 12) : start]
    was, is_now = overall_median(before[-3:]), -overall_median(losses[start : start + 2])
    longest = float(np.abs(np.diff(before)).max(initial=0.0))
    return bool(0.5 * was < is_now < 2.0 * was and losses[start - 1] - losses[start] > 1.5 * longest)


def _runs_away(fallen: Floats, far: float) -> bool:
    """Whether it has fallen so far, and doubles within a few steps."""
    return bool(len(fallen) >= 10 and fallen[-3:].max() < -far and fallen[-1] < 2 * fallen[-10])


# A sum in place of a mean -----------------------------------------------------------------------------------------


def summed(case: Case) -> Iterator[Suspicion]:
    """loss-reduction: the loss is as many times that of a guess as the batch has examples or labels. A loss of several
    terms may be so by chance: where labels are few and no logits were seen it is a note."""
    chart = case.chart
    if not _numbers(chart) or len(chart.scalar("loss")) < 2:
        return
    if case.step - chart.first_step <= 100 and not chart.resumed:
        yield from _summed_at_first(chart)
    yield from _summed_since(case)


@until_news
def _numbers(chart: Chart) -> dict[str, float]:
    """How many there are in a batch, of what may be summed over; more than a few, so that it is no coincidence."""
    sizes, counts = chart.table("batch", "size"), chart.table("batch", "count")
    place = label_entropies(chart)[1]
    if place < 0 or not len(sizes):
        place = next((i for i, name in enumerate(sizes.names) if name.startswith("targets")), -1)
    found: dict[str, float] = {}
    if place >= 0:
        found = {"labels": float(counts.opening[0, place]), "examples": float(sizes.opening[0, place])}
    elif len(sizes.names) and len(sizes.opening):
        found = {"examples": float(sizes.opening[0, 0])}
    return {name: number for name, number in found.items() if number >= 4}


def _summed_at_first(chart: Chart) -> Iterator[Suspicion]:
    losses = first_losses(chart, 1)
    count, guess = classes(chart), guess_loss(chart)
    is_classes = guess > 0.05
    expected = float(np.log(count)) if is_classes and count >= 2 else guess if is_classes else target_power(chart)
    if not is_classes and not np.isnan(two_classes_share(chart)):
        expected = float(np.log(2))  # of flags; their mean square, where few are set, is no loss of a guess
    if not len(losses) or not expected > (0 if is_classes else 0.01):  # targets that are all zero are no targets
        return
    times = float(losses[0]) / expected
    outputs = _outputs_are_sane(chart)
    if outputs is False or inputs_are_large(chart):
        return  # such a loss is a large mean
    low, high = _FITS_A_GUESS if is_classes else _FITS_A_SIZE
    number_of = _numbers(chart).get("labels", 0.0)
    if number_of < (4 if is_classes else 16) or not low < times / number_of < high or _has_terms(chart):
        return
    if is_classes:
        known = _mean_by_logits(chart)
        is_sure = number_of >= _SOME if np.isnan(known) else _FITS[0] < losses[0] / (known * number_of) < _FITS[1]
    else:
        is_sure = not _may_be_meant(chart)
    yield _sum_of(chart.first_step, "labels", number_of, float(losses[0]), expected, is_classes, not is_sure)


def _mean_by_logits(chart: Chart) -> float:
    """Return the mean cross-entropy that the first logits give, of labels that they do not know yet: their log-sum-exp
    less their mean. NaN where nobody has looked."""
    sums, means = chart.scalar("logit_log_sum_exp").opening, chart.scalar("logit_mean").opening
    found = float(sums[0, 0] - means[0, 0]) if len(sums) and len(means) else float("nan")
    return found if found > 0 else float("nan")


def _has_terms(chart: Chart) -> bool:
    """Whether there are targets of several kinds, as boxes and their labels: such a loss has a term for each."""
    return len(targets_of(chart.table("batch", "size"))) > 1


def _may_be_meant(chart: Chart) -> bool:
    """A likelihood is a sum: over the pixels of an image, or over all examples there are."""
    numbers, repeated = _numbers(chart), chart.scalar("batch/repeated")
    has_several = numbers["labels"] > numbers["examples"]
    return has_several or (len(repeated) > 0 and bool(repeated.values[-1, 0] > 0))


def _outputs_are_sane(chart: Chart) -> bool | None:
    """Whether the first logits are as even as those of a new model; None where nobody has looked."""
    sums, means, count = chart.scalar("logit_log_sum_exp"), chart.scalar("logit_mean"), classes(chart)
    if not len(sums.opening) or not len(means.opening) or count < 2:
        return None
    return bool(sums.opening[0, 0] - means.opening[0, 0] < 2 * np.log(count) + 1)


def _summed_since(case: Case) -> Iterator[Suspicion]:
    """A loss that is at once, and stays, as many times what it was."""
    series = case.chart.scalar("loss")
    numbers = _numbers(case.chart)
    for event in case.lately("loss", 60, direction=1):
        before, after = series.before(event.since, 24)[:, 0], series.since(event.since)[:12, 0]
        was = overall_median(before)
        if len(before) < 4 or len(after) < 4 or not was > 0 or not (after[:4] > 0.5 * event.first_factor * was).all():
            continue
        times = overall_median(after) / was
        if not _gradients_grew(case.chart, event.since, float(after[0]) / was):
            continue
        if not overall_median(after) > 2.5 * overall_median(first_losses(case.chart, 5)):
            continue  # a model that knows nothing any more loses as much
        for what, number_of in numbers.items():
            if 0.65 < times / number_of < 1.5 and 0.5 < event.first_factor / number_of < 2.0:
                yield _sum_of(event.since, what, number_of, float(after[0]), was, True, False)
                return


def _gradients_grew(chart: Chart, since: int, times: float) -> bool:
    """Whether the gradients of most layers are about as many times as long in the same step, before it is taken."""
    norms = chart.table("gradient", "norm")
    with np.errstate(all="ignore"):
        grown = median(norms.since(since)[:1]) / median(norms.before(since, 8)) / times
    grown = grown[np.isfinite(grown)]
    return not len(grown) or 0.6 < overall_median(grown) < 1.7


def _sum_of(
    since: int, what: str, count: float, loss: float, expected: float, is_sure: bool, is_meant: bool
) -> Suspicion:
    return Suspicion(
        "loss-reduction",
        "loss",
        since,
        0.9 if is_sure else 0.65,
        Kind.FACT if is_sure else Kind.PATTERN,
        severity="info" if is_meant else "warning",
        evidence={"loss": loss, "expected": expected, "times": loss / expected, what: count},
        advice=f"The loss at step {since:,} is {number(loss)}, about {count:,.0f} times {number(expected)}, and "
        f"a batch has {count:,.0f} {what}: it is a sum, and so the steps are {count:,.0f} times as large as the rate "
        'says. Use reduction="mean", or divide by the number of them.',
        check=f"It worked if the loss is near {number(expected)}.",
    )


RULES = (softmax_twice, wrong_sign, summed)
