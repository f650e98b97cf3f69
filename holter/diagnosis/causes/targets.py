"""The targets: labels that do not belong to their inputs, classes that come one after the other, overfitting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import numpy as np

from holter.diagnosis.causes.batches import (
    classes,
    first_losses,
    guess_loss,
    label_entropies,
    labels_changed,
    target_power,
    targets_of,
)
from holter.diagnosis.chart import Chart, column, until_news
from holter.diagnosis.evidence import data_is_usual, moved_far, rate_is_flat, typical_of
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.record import is_validation
from holter.series import Floats, Integers, Series, known_median, overall_median, spread
from holter.words import number, share

_NEAR = 0.85  # of the loss of a guess
_LEARNT = 0.93  # of it, before: the model knew more than a guess
_SETTLED = 20  # steps after which a loss that could fall again would have begun to
_WINDOW = 160  # steps in which a change of the loss is looked for
_NEVER = 200  # steps after which a loss that never left the guess is told
_BATCHES = 16  # that show whether they are alike
_APART = 0.35  # of the variance of targets, between batches
_SHARED = 0.2  # of the range of a batch's targets, that the next one has too: of sorted ones nearly nothing
_MOVES = 0.1  # of the variance within a batch, by which neighbouring means differ: a slow drift stays below it
_LOOKS, _ABOUT = 256, 32  # validations that are kept: the last ones, and those about the lowest of all
_STEADY = 1.3  # times their mean square before, or less, of targets that stay what they are
_REPLACED = 3.0  # times what its steps may have changed a weight's size by
_SURE = 6.0  # standard errors between two means of losses: the farthest of 160 changes, in a run looked at 100 times
_ADDED = 0.9  # cosine of successive gradients, if each holds those before it
_FEW_CLASSES = 0.35  # of those that there are: a stage of a curriculum has more


# Labels that tell nothing -----------------------------------------------------------------------------------------


def meaningless(case: Case) -> Iterator[Suspicion]:
    """labels-corrupt: a loss that was well below that of a guess, and at one step is thrown back to it for good."""
    chart = case.chart
    series = chart.scalar("loss")
    if len(series) < 2 * _SETTLED:
        return
    losses = series.values[-8:, 0]
    guess = _guess(chart)
    if not overall_median(losses) > _NEAR * guess or not np.isfinite(losses).all():
        return
    steps, values = series.steps[-_WINDOW:], series.values[-_WINDOW:, 0]
    if values.min() < _LEARNT * guess and np.isfinite(values).all():
        yield from _thrown_back(case, steps, values, guess)
    yield from _never_learnt(case, guess)


@until_news
def _guess(chart: Chart) -> float:
    """What a guess loses; of numbers their mean square. NaN where targets are not logged."""
    found = guess_loss(chart)
    if np.isnan(found):
        found = target_power(chart)
    if np.isnan(found):
        return found
    opening = first_losses(chart, 5)
    first = overall_median(opening) if len(opening) else float("nan")
    # The loss need not be a cross-entropy, nor a mean: the first losses say what it is.
    return found if 0.5 * first < found < 1.5 * first else first


def _targets_are_steady(chart: Chart, since: int) -> bool:
    """Whether targets that are numbers are of the size that they were of before: those of an agent are what it has
    seen or believes by now, and what a guess loses by them changes with it."""
    was, now = target_power(chart, until=since), target_power(chart, since=since)
    return np.isnan(was) or bool(was < _STEADY * now and now < _STEADY * was)


def _thrown_back(case: Case, steps: Integers, losses: Floats, guess: float) -> Iterator[Suspicion]:
    place = _change(losses)
    since, after = int(steps[place]), losses[place:]
    usual = losses[max(0, place - 16) : place]
    before, noise = overall_median(usual), float(spread(usual[:, None])[0])
    if len(after) < _SETTLED or not before < _LEARNT * guess:
        return
    gap = guess - before
    # Losses that a few rare examples decide lie far apart, most of them near each other.
    chance = float(np.hypot(usual.std() / len(usual) ** 0.5, after.std() / len(after) ** 0.5))
    if not float(after.mean() - usual.mean()) > _SURE * chance:
        return
    if not after[0] > before + max(0.4 * gap, 3 * noise) or not _blocks(after).min() > before + 0.5 * gap:
        return
    late, earlier = overall_median(after[-8:]), overall_median(after[-16:-8])
    is_falling = late < 0.95 * earlier
    if (
        not late < 1.6 * guess
        or (is_falling and len(after) < 3 * _SETTLED)
        or not rate_is_flat(case.chart, since - 3, since + 1)
    ):
        return
    if not data_is_usual(case, since) or labels_changed(case.chart, since) or _model_was_changed(case, since):
        return
    if not _targets_are_steady(case.chart, since) or moved_far(case.chart, since) or _pile_up(case.chart, since):
        return
    # Labels show in the same step in which they are wrong: what gradients knew before has another reason.
    if any(since - 12 <= e.since < since - 3 for e in case.events.of("gradient_norm", direction=1)):
        return
    yield Suspicion(
        "labels-corrupt",
        "data",
        since,
        0.75 if len(after) < 2 * _SETTLED else 0.9,
        Kind.PATTERN,
        severity="critical",
        evidence={"loss_before": before, "loss": late, "of_a_guess": guess},
        advice=f"At step {since:,} the loss went from {number(before)} to {number(float(after[0]))} at once and stays "
        f"near {number(guess)}, which a guess would lose, while inputs and rate are as before: the labels no longer "
        "belong to their inputs. Look for a shuffle or a join that moves one without the other.",
        check="It worked if the loss falls below that of a guess again.",
    )


def _pile_up(chart: Chart, since: int) -> bool:
    """Return whether gradients are added to those before about that step: wrong labels make them disagree."""
    kept = chart.scalar("gradients_kept").steps
    steps, cosines = typical_of(chart, "update", "cosine")
    near = cosines[np.abs(steps - since) <= _WINDOW]
    return bool((np.abs(kept - since) <= _SETTLED).any() and len(near) and overall_median(near) > _ADDED)


def _model_was_changed(case: Case, since: int) -> bool:
    """Whether weights or activations were already others in that step: labels change them in the next one."""
    near = [event for name in ("weight/norm", "activation/rms") for event in case.events.of(name, since=since - 2)]
    return any(event.since <= since for event in near) or _weights_were_replaced(case, since)


def _weights_were_replaced(case: Case, since: int) -> bool:
    """Whether any weight became larger about that step, from one look to the next, than its steps can have made it; or
    may have, as the next look is still to come."""
    sizes, ratios = case.chart.table("update", "weight_norm"), case.chart.table("update", "ratio")
    place = int(np.searchsorted(sizes.steps, since))
    if place == 0 or ratios.names != sizes.names or len(ratios) != len(sizes):
        return False
    if place == len(sizes):
        return case.step - since < 2 * _SETTLED
    was, now = sizes.values[place - 1 : place + 1]
    between = int(sizes.steps[place] - sizes.steps[place - 1])
    with np.errstate(all="ignore"):
        by_steps = between * np.fmax(*ratios.values[place - 1 : place + 1]) * was
        return bool((now - was > _REPLACED * np.fmax(by_steps, was))[was > 0].any())


def _change(losses: Floats) -> int:
    """Where the mean of all that follows is farthest above the mean of all before, in units of chance."""
    count = np.arange(4, len(losses) - 4)
    sums = np.cumsum(losses)
    before, after = sums[count - 1] / count, (sums[-1] - sums[count - 1]) / (len(losses) - count)
    gain = (after - before) * np.sqrt(count * (len(losses) - count))
    return int(count[np.argmax(gain)])


def _blocks(values: Floats, size: int = 6) -> Floats:
    """The medians of one stretch after the other."""
    whole = len(values) // size * size
    found: Floats = np.median(values[len(values) - whole :].reshape(-1, size), axis=1)
    return found


def _never_learnt(case: Case, guess: float) -> Iterator[Suspicion]:
    """Labels that were random from the start: steps of a fair size, each in another direction, and no progress."""
    chart = case.chart
    _, losses = column(chart.scalar("loss"))
    if chart.scalar("loss").seen < _NEVER or np.isnan(np.fmax(guess_loss(chart), target_power(chart))):
        return
    late = overall_median(losses[-32:])
    if not abs(late / guess - 1) < 0.04 or not np.min(_blocks(losses)) > 0.93 * guess:
        return
    _, cosines = typical_of(chart, "update", "cosine")
    _, ratios = typical_of(chart, "update", "ratio")
    if len(cosines) < 8 or not abs(overall_median(cosines[-8:])) < 0.1 or not 3e-4 < overall_median(ratios[-8:]) < 0.1:
        return
    yield Suspicion(
        "labels-corrupt",
        "data",
        chart.first_step,
        0.55,
        evidence={"loss": late, "of_a_guess": guess, "cosine": overall_median(cosines[-8:])},
        advice=f"After {chart.scalar('loss').seen:,} steps of a fair size the loss is {number(late)}, what a guess "
        "loses, and successive gradients do not agree at all: the labels may not belong to their inputs. Look at a "
        "few examples with their labels, and at whether 20 of them can be learnt by heart.",
        check="It worked if the loss falls below that of a guess.",
    )


# Classes one after the other --------------------------------------------------------------------------------------


def not_shuffled(case: Case) -> Iterator[Suspicion]:
    """data-not-shuffled: within a batch targets are alike, from batch to batch they differ, and neighbours less so."""
    means = case.chart.table("batch", "mean")
    chosen = targets_of(means)
    if len(means) < _BATCHES or not chosen:
        return
    entropy, labels = label_entropies(case.chart)
    place = labels if labels >= 0 else chosen[0]
    since = case.chart.first_step if labels < 0 else _alike_since(case.chart, entropy, labels)
    between = _between(case.chart, place, since, labels >= 0) if since is not None else None
    if since is None or between is None:
        return
    inside = float(np.exp(known_median(entropy.since(since)[:, labels]))) if labels >= 0 else None
    words = f"have {inside:.1f} classes in a batch" if inside is not None else "are alike within a batch"
    yield Suspicion(
        "data-not-shuffled",
        "data",
        since,
        0.9 if inside is not None else 0.65,
        Kind.FACT,
        evidence={"classes_in_a_batch": inside, "between_batches": between},
        advice=f"Since step {since:,} the targets {words} and move on from one batch to the next ({share(between)} of "
        "their variance lies between batches): DataLoader(..., shuffle=True), or shuffle the buffer of a stream.",
        check="It worked if the label entropy of a batch is that of the data set.",
    )


def _between(chart: Chart, place: int, since: int, are_classes: bool) -> float | None:
    """The share of the targets' variance that lies between batches, where that is more than chance and neighbours are
    alike; of n examples drawn at random it is 1 / n."""
    series = (chart.table("batch", name) for name in ("mean", "std", "size", "min", "max"))
    parts = np.stack([one.since(since)[-4 * _BATCHES :, place] for one in series])
    means, deviations, sizes, low, high = parts[:, np.isfinite(parts).all(axis=0) & (parts[2] > 1)]
    if len(means) < _BATCHES:
        return None
    inside = float((deviations**2).mean())
    centred = means - means.mean()
    total = float(centred @ centred)
    if not total > 0 or centred[1:] @ centred[:-1] < 0.4 * total:
        return None
    least = _APART + 1 / overall_median(sizes)
    between = total / (total + len(means) * inside)
    if not between > least:
        return None
    return between if are_classes or _are_apart(low, high) or _comes_back(means, inside, least) else None


def _are_apart(low: Floats, high: Floats) -> bool:
    """Return whether neighbouring batches share hardly any values, as those of sorted targets do.

    Targets that change as a model learns (its own estimates, say) move by far less in a step than they lie apart.
    """
    common = np.minimum(high[1:], high[:-1]) - np.maximum(low[1:], low[:-1])
    return bool(np.maximum(common, 0.0).sum() <= _SHARED * (high - low)[1:].sum())


def _comes_back(means: Floats, inside: float, least: float) -> bool:
    """Return whether the means of batches go up and down by more than chance, from one batch to the next and in all.

    A trend is no order: it explains the means as long as they only rise, or only fall.
    """
    moves = float(np.square(np.diff(means)).mean()) / 2
    back = min(float(np.square(np.maximum.accumulate(side) - side).mean()) for side in (means, -means))
    return moves > _MOVES * inside and back > least * (back + inside)


def _alike_since(chart: Chart, series: Series, place: int) -> int | None:
    """The step since which batches have few of the classes that there are; None where they have many."""
    low, high = (chart.table("batch", name) for name in ("min", "max"))
    ends = [float(np.nanmax(part[:, place], initial=0.0)) for part in (high.opening, high.values)]
    starts = [float(np.nanmin(part[:, place], initial=np.inf)) for part in (low.opening, low.values)]
    size = known_median(chart.table("batch", "size").values[:, place])
    # A batch cannot have more classes than examples.
    there_are = min(max(max(ends) - min(starts) + 1, float(classes(chart))), size)
    numbers = np.exp(series.values[:, place])
    mixed = numbers > max(1.5, 0.5 * there_are)
    # At the border between two classes one batch has both, of two classes as many as there are.
    both = np.flatnonzero(mixed[1:] & mixed[:-1])
    start = int(both[-1]) + 2 if len(both) else 0
    alike = numbers[start:]
    if len(alike) < _BATCHES // 2 or not known_median(alike) <= max(1.2, _FEW_CLASSES * there_are):
        return None
    return int(series.steps[start])


# Learnt by heart --------------------------------------------------------------------------------------------------


def overfitting(case: Case) -> Iterator[Suspicion]:
    """overfitting: the validation loss has risen from its lowest by a tenth while the training loss went on falling."""
    for name in _validation_losses(case.chart):
        looks = _looks_at(case.chart, name)
        looks.take(case.chart.scalar(name), case.chart.scalar("loss"))
        if len(looks.found) >= 4:
            yield from _diverged(case, name, looks.found)


@until_news
def _validation_losses(chart: Chart) -> list[str]:
    return [name for name in chart.names if "loss" in name.lower() and is_validation(name)]


class _Look(NamedTuple):
    """One validation: its step and loss, and what the training lost just before."""

    step: int
    loss: float
    training: float


class _Looks:
    """All that count of one validation loss. A chart forgets: by the time that a loss has risen, what the training lost
    at its lowest may be gone, and in the end the lowest itself."""

    def __init__(self) -> None:
        self.found: list[_Look] = []
        self._seen = 0

    def take(self, series: Series, training: Series) -> None:
        new, self._seen = min(series.seen - self._seen, len(series)), series.seen
        for step, loss in zip(*column(series), strict=True) if new else ():
            if step >= series.steps[-new] and np.isfinite(loss):
                self._add(int(step), float(loss), training)

    def _add(self, step: int, loss: float, training: Series) -> None:
        before = training.before(step + 1, max(1, min(32, len(training) // 4)))
        lost = overall_median(before) if len(before) else float("nan")
        if self.found and step <= self.found[-1].step:  # a checkpoint was loaded
            self.found = [one for one in self.found if one.step < step]
        self.found.append(_Look(step, loss, lost))
        if len(self.found) > 2 * _LOOKS:
            lowest = int(np.argmin(_smooth([one.loss for one in self.found[:-_LOOKS]]))) + 1
            self.found = [*self.found[max(0, lowest - _ABOUT) : -_LOOKS][: 2 * _ABOUT], *self.found[-_LOOKS:]]


def _looks_at(chart: Chart, name: str) -> _Looks:
    return cast(_Looks, chart.kept.setdefault((_looks_at, name), _Looks()))


def _smooth(values: Sequence[float] | Floats) -> Floats:
    """Of three neighbours the middle one: a single lucky value is no minimum."""
    return np.asarray(np.median(np.stack([values[:-2], values[1:-1], values[2:]]), axis=0))


def _diverged(case: Case, name: str, looks: list[_Look]) -> Iterator[Suspicion]:
    values = np.array([one.loss for one in looks])
    smooth, training = _smooth(values), case.chart.scalar("loss")
    place = int(np.argmin(smooth)) + 1
    lowest, late = float(smooth[place - 1]), values[place + 1 :]
    gap = max(later.step - one.step for one, later in pairwise(looks[-_LOOKS:]))
    if len(training) < 20 or len(late) < 2 or not lowest > 0 or case.step - looks[-1].step > 3 * gap:
        return
    noise = 1.4826 * overall_median(np.abs(np.diff(values[: place + 2]))) if place >= 3 else 0.0
    rise, allowed = overall_median(late[-3:]) - lowest, case.limits.validation_rise
    if not rise > max(allowed * lowest, 1.0 * noise) or not (late[-2:] > lowest + 0.5 * rise).all():
        return
    # Told by the very lowest, lucky or not: its checkpoint is the one to keep.
    best = min((look for look in looks if look.loss > 0), key=lambda look: look.loss)
    now = overall_median(training.values[-min(32, len(training) // 4) :])
    if now < 0.97 * best.training:
        yield _overfitted(name, best, lowest + rise, now, 0.9 if rise > 2 * allowed * lowest else 0.75)


def _overfitted(name: str, best: _Look, late: float, training: float, score: float) -> Suspicion:
    return Suspicion(
        "overfitting",
        "data",
        best.step,
        score,
        evidence={"lowest": best.loss, "now": late, "training_then": best.training, "training_now": training},
        advice=f"{name} was lowest at step {best.step:,} ({number(best.loss)}) and has risen by "
        f"{100 * (late / best.loss - 1):.0f} % since, to {number(late)}, while the training loss fell from "
        f"{number(best.training)} to {number(training)}: stop there and keep that checkpoint, or add data, "
        "augmentation, dropout or weight decay.",
        check=f"It worked if {name} stays within a tenth of its lowest.",
    )


RULES = (meaningless, not_shuffled, overfitting)
