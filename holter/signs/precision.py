"""Signs of numbers that their format cannot hold: not finite, near overflow, underflow, steps that were skipped."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.signs.sign import Evidence, Flags, Integers, Sign, since_words, trailing
from holter.statistics.histogram import FINITE, HALF, NEAR, Histogram
from holter.words import number, share, share_range

FLOAT16_SMALLEST = 2.0**-24
ZEROS, PILED = 0.1, 0.05  # of all gradient values; of those that are not zero, within a factor of four of the smallest
FEW_VALUES = 64  # of a layer: fewer show no pile
AVERAGED = 10  # powers of two that an average over processes or micro-batches may move the smallest number down
# Of a gradient that shows no pile; above all its values, where float16 begins to lose digits.
MOST_ZEROS, TINY = 0.5, 2.0**-14
SKIPPED, LATER = 0.2, 10  # the share of skipped steps; of so many at least, in the later half of the run


def not_finite(evidence: Evidence) -> Iterator[Sign]:
    """NaN and infinite values: in the loss, and in each role the layers that had them first."""
    history = evidence.history
    steps, losses = history.scalar("loss")
    bad = ~np.isfinite(losses)
    if bad.any():
        since = trailing(steps, bad)
        first, count = int(steps[bad][0]), int(bad.sum())
        text = f"the loss is not finite{since_words(since)}" if since is not None else ""
        text = text or f"the loss was not finite in {count:,} step{'s' if count > 1 else ''}, first in step {first:,}"
        yield Sign("not finite", text, (), first, float(bad.mean()))
    skipped_steps = _skipped_at(evidence)
    for role in ("batch", "activation", "gradient", "weight"):
        firsts = {}
        for look in evidence.looks(role, "nonfinite"):
            # A scaler finds the limits of float16 by overflowing: what it skips is no sign.
            counts = (look.values > 0) & ~np.isin(look.steps, skipped_steps)
            if counts.any():
                firsts[look.layer] = int(look.steps[counts][0])
        if firsts:
            since = min(firsts.values())
            layers = evidence.in_depth(layer for layer, step in firsts.items() if step == since)
            more = f"; later in {len(firsts) - len(layers):,} more" if len(firsts) > len(layers) else ""
            where = "" if role == "batch" else f" ({role})"
            text = f"{evidence.names(layers)}{where}: NaN or infinite values, first in step {since:,}{more}"
            yield Sign("not finite", text, layers, since, float(len(firsts)))


def _skipped_at(evidence: Evidence) -> Integers:
    steps, skipped = evidence.history.scalar("skipped")
    return steps[skipped > 0]


def skipped_steps(evidence: Evidence) -> Iterator[Sign]:
    """A scaler that goes on skipping; it may take a while at the start until it has found its scale."""
    steps, skipped = evidence.history.scalar("skipped")
    flags: Flags = skipped > 0
    later = flags[len(flags) // 2 :]
    if len(later) >= LATER and later.mean() > SKIPPED:
        # From which step on the share has been so high.
        shares = np.cumsum(flags[::-1])[::-1] / np.arange(len(flags), 0, -1)
        first = int(np.flatnonzero(flags & (shares > SKIPPED))[0])
        text = f"{share(float(shares[first]))} of the steps were skipped{since_words(int(steps[first]))}"
        _, scales = evidence.history.scalar("loss_scale")
        text += f"; the loss scale is {number(float(scales[-1]))}" if len(scales) else ""
        yield Sign("skipped", text, (), int(steps[first]), float(shares[first]))


def near_overflow(evidence: Evidence) -> Iterator[Sign]:
    """Layers that put out values beyond half of what their format can hold."""
    largest = evidence.last("activation", "abs_max")
    for look in evidence.looks("activation", "near_overflow"):
        since = trailing(look.steps, look.values > 0)
        if since is not None:
            part = float(look.values[-1])
            text = f"{evidence.names([look.layer])}: {share(part)} of its values are beyond half of what their format"
            text += f" can hold (up to {number(largest.get(look.layer))}){since_words(since)}"
            yield Sign("near overflow", text, (look.layer,), since, part)


# Underflow ------------------------------------------------------------------------------------------------------


def underflow(evidence: Evidence) -> Iterator[Sign]:
    """Gradients too small for float16: exact zeros, and the rest piled up at the smallest number that it has."""
    zeros = {look.layer: look for look in evidence.looks("gradient", "zero_share")}
    floors = {layer: floor for layer, floor in _floors(evidence) if zeros[layer].values[-1] >= ZEROS}
    largest = evidence.last("gradient", "abs_max")
    # Small layers, and what is zero altogether, show no pile: they go with those that do, or with their own format.
    tiny = [
        layer
        for layer, look in zeros.items()
        if (floors or evidence.is_float16(layer)) and look.values[-1] >= MOST_ZEROS and largest[layer] < TINY
    ]
    layers = evidence.in_depth(layer for layer in zeros if layer in floors or layer in tiny)
    if not layers:
        return
    shares = [float(zeros[layer].values[-1]) for layer in layers]
    starts = [trailing(zeros[layer].steps, zeros[layer].values >= ZEROS) for layer in layers]
    since = min(start for start in starts if start is not None)
    others = [float(look.values[-1]) for layer, look in zeros.items() if layer not in layers]
    text = f"{evidence.names(layers)}: {share_range(shares)} of the gradient is exactly zero"
    text += f" (elsewhere {share(max(others))} at most)" if others else ""
    if floors:
        text += f", much of the rest is near {number(min(floors.values()))}, the smallest that float16 can hold"
    yield Sign("underflow", f"{text}{since_words(since)}", layers, since, max(shares))


def _floors(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """Layers whose gradient has a floor where float16 has one, with a pile on it, and that floor.

    A gradient that was divided by the loss scale, or averaged, has its floor lower by as much.
    """
    steps, scales = evidence.history.scalar("loss_scale")
    scale_at = dict(zip(steps.tolist(), scales.tolist(), strict=True))
    is_half = len(scales) > 0 or any(map(evidence.is_float16, evidence.parameters))
    for layer, (step, histogram) in evidence.gradient_histograms.items():
        highest = FLOAT16_SMALLEST / max(scale_at.get(step, 1.0), 1.0)
        lowest = highest * 2.0**-AVERAGED if is_half else highest
        floor, piled = _floor_of(histogram)
        if lowest <= floor <= highest and piled >= PILED:
            yield layer, floor


def _floor_of(histogram: Histogram) -> tuple[float, float]:
    """The smallest magnitude, and the share of the values other than zero that are below four times as much.

    Of values that are rounded to multiples of the smallest these are the multiples by 1, 2 and 3. A distribution that
    is not rounded has next to nothing there: its smallest of n values is about 1/n of the others.
    """
    kept = FINITE[histogram.buckets] & (histogram.buckets % HALF != 0)
    magnitudes, counts = np.abs(NEAR[histogram.buckets[kept]]), histogram.counts[kept]
    if counts.sum() < FEW_VALUES:
        return np.nan, 0.0
    floor = float(magnitudes.min())
    return floor, float(counts[magnitudes < 4 * floor].sum() / counts.sum())
