"""The shape of a distribution, decided from its histogram: what the picture says, and the numbers that decided it.

The values that are not zero are judged as they are, in the fixed buckets. No bucket is split: the mean densities of
a one-peaked distribution over neighbouring intervals have one peak as well, whatever the intervals, so logarithmic
buckets add no peaks of their own. Only counting noise does, and every gate asks for more than that.

What cannot be seen: a standard deviation below about 3 % of the value is one bucket ("collapsed"), from 3 to 8 % it
is collapsed or shifted by where buckets end; and two peaks on one side of zero need a ratio of 1.5 to be two.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import numpy as np

from holter.statistics.histogram import FIRST_NONFINITE, NEAR, Floats, Histogram, Integers

Kind = Literal["empty", "collapsed", "spike-at-zero", "several-peaks", "heavy-tailed", "shifted", "bell"]

COLLAPSED_SHARE = 0.99  # of the values, in two neighbouring buckets: a constant may lie on their common edge
SPIKE_SHARE = 0.1  # a continuous distribution has no exact zeros at all
ONE_SIDED_SHARE = 0.84  # of one sign: a normal whose mean is one standard deviation from zero
HEAVY_TAIL = 2.7  # times a normal's tail ratio; 1.4 an exponential, 2.0 a Laplace, 2.9 Student's t(3), 6.0 t(2)
NORMAL_TAIL = 4.5815  # (q99.9 - q0.1) / (q75 - q25) of a normal
BINS = 1.5  # times the cube root of the count, between the 5 % and 95 % quantiles: 12 for 500 values, as noise allows
MOST_BINS = 48
VALLEY = 0.7  # of the lower peak's density, at most
PEAK_SHARE = 0.05  # of the values: fewer are outliers, and the tails speak of those
NOISE = 4.5  # standard deviations of counting noise that a difference must exceed; many bins are compared

MEANINGS: dict[Kind, str] = {
    "empty": "There is no finite value: nothing was measured, or everything is NaN or infinite; find the first layer "
    "where that happens.",
    "collapsed": "Nearly all values are the same: gradients have vanished, activations are dead or saturated, or "
    "weights were never moved from a constant (as those of a normalisation start).",
    "spike-at-zero": "A large share is exactly zero: ReLU units that are off or dead, sparse inputs (embeddings), or "
    "gradients too small for their number format.",
    "several-peaks": "There are several peaks: sub-populations, such as units that saturate at both ends, weights "
    "fused from several parts, or groups of examples that pull apart.",
    "heavy-tailed": "A few values are far larger than the rest: gradients like this make training unstable, so clip "
    "them and look for outlying examples; in activations they cost precision.",
    "shifted": "The values lie on one side of zero: a bias in what enters the layer; normalise inputs or activations, "
    "and expect it where an activation function gives only one sign.",
    "bell": "One peak about zero with ordinary tails: the healthy shape of gradients, weights and activations.",
}


@dataclass(frozen=True)
class Shape:
    """What kind of distribution it is, and why. All numbers but `zero_share` are about the values that are not zero.

    Uniform and Laplace distributions about zero are "bell": one plateau or peak, no alarming tails. One-sided ones
    (half-normal, exponential) are "shifted". Of several that hold, the first in the order of `Kind` is named.
    """

    kind: Kind
    without_zeros: Kind  # the kind of what stands beside a spike at zero; else the same as `kind`
    count: int  # finite values, zeros included
    zero_share: float  # of the finite values; what is below 2**-128 counts as zero
    one_sided: float  # the share of the more frequent sign, 0.5 to 1
    lower_quartile: float
    median: float
    upper_quartile: float
    tail_ratio: float  # (q99.9 - q0.1) / (q75 - q25) as a multiple of a normal's
    peaks: int

    @property
    def meaning(self) -> str:
        """What it usually says, in a sentence for whoever trains."""
        return MEANINGS[self.kind]


def shape_of(histogram: Histogram) -> Shape:
    """The shape of the distribution that this histogram counts; non-finite values are left out."""
    bars = _Bars.of(histogram)
    finite = bars.zeros + bars.count
    if not bars.count:
        kind: Kind = "collapsed" if finite else "empty"
        middle = 0.0 if finite else np.nan
        return Shape(kind, kind, finite, 1.0 if finite else np.nan, np.nan, middle, middle, middle, np.nan, 0)
    zero_share = bars.zeros / finite
    one_sided = max(bars.positive, bars.count - bars.positive) / bars.count
    low, lower, median, upper, high = bars.quantile(np.array([0.001, 0.25, 0.5, 0.75, 0.999])).tolist()
    tail_ratio = (high - low) / (upper - lower) / NORMAL_TAIL
    peaks = _count_peaks(*bars.coarse())
    kind = _kind(bars, one_sided, tail_ratio, peaks)
    return Shape(
        kind="spike-at-zero" if zero_share >= SPIKE_SHARE else kind,
        without_zeros=kind,
        count=finite,
        zero_share=zero_share,
        one_sided=one_sided,
        lower_quartile=lower,
        median=median,
        upper_quartile=upper,
        tail_ratio=tail_ratio,
        peaks=peaks,
    )


def _kind(bars: _Bars, one_sided: float, tail_ratio: float, peaks: int) -> Kind:
    if bars.fullest_pair() >= COLLAPSED_SHARE * bars.count:
        return "collapsed"
    if peaks > 1:
        return "several-peaks"
    if tail_ratio >= HEAVY_TAIL:
        return "heavy-tailed"
    # 2 * one_sided - 1 is the difference of the signs' shares, with noise 1/sqrt(n) where the signs are even.
    if one_sided >= ONE_SIDED_SHARE and (2 * one_sided - 1) * np.sqrt(bars.count) >= NOISE:
        return "shifted"
    return "bell"


@dataclass(frozen=True, eq=False)
class _Bars:
    """The occupied buckets without the zeros, ascending: `counts` values between `lower` and `upper`, [m] each."""

    counts: Integers
    lower: Floats
    upper: Floats
    zeros: int

    @classmethod
    def of(cls, histogram: Histogram) -> _Bars:
        counts, edges = histogram.edges()
        lower, upper = edges[:-1], edges[1:]
        zero = (lower == 0) & (upper <= NEAR[1])  # the bucket that holds zero
        kept = (counts > 0) & ~zero
        return cls(counts[kept], lower[kept], upper[kept], int(counts[zero].sum()))

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @property
    def positive(self) -> int:
        return int(self.counts[self.lower >= 0].sum())

    def quantile(self, q: Floats) -> Floats:
        """As if the values were spread evenly within their bucket."""
        cumulated = np.cumsum(self.counts)
        rank = q * cumulated[-1]
        bar = np.searchsorted(cumulated, rank)
        within = 1 - (cumulated[bar] - rank) / self.counts[bar]
        return np.asarray(self.lower[bar] + within * (self.upper[bar] - self.lower[bar]))

    def fullest_pair(self) -> int:
        """The most values in one bucket or in two that touch."""
        touching = (self.upper[:-1] == self.lower[1:]) & (self.lower[1:] != 0)  # zero would lie between those
        pairs = np.where(touching, self.counts[:-1] + self.counts[1:], 0)
        return int(max(self.counts.max(), pairs.max(initial=0)))

    def coarse(self) -> tuple[Integers, Floats]:
        """Counts and widths of bins that are whole buckets: joined near zero, where buckets are far too fine."""
        low, high = self.quantile(np.array([0.05, 0.95]))
        bins = min(BINS * np.cbrt(self.count), MOST_BINS)
        width, reach = (high - low) / bins, max(-self.lower[0], self.upper[-1])
        edges = [0.0]
        while edges[-1] < reach:
            edges.append(float(_MAGNITUDES[np.searchsorted(_MAGNITUDES, edges[-1] + width)]))
        both = np.array([*(-edge for edge in edges[:0:-1]), *edges])
        bin_of = np.searchsorted(both, (self.lower + self.upper) / 2) - 1
        return np.bincount(bin_of, self.counts, len(both) - 1).astype(np.int64), np.diff(both)


_MAGNITUDES = np.append(NEAR[:FIRST_NONFINITE], [2.0**128, np.inf])


def _count_peaks(counts: Integers, widths: Floats) -> int:
    """Peaks of the density that clear valleys part from each other; the least clear is dropped until all are."""
    density = counts / widths
    rises = np.diff(density, prepend=0.0, append=0.0)
    tops = np.flatnonzero((rises[:-1] > 0) & (rises[1:] <= 0)).tolist()
    while len(tops) > 1:
        valleys = [left + int(np.argmin(density[left:right])) for left, right in itertools.pairwise(tops)]
        masses = np.add.reduceat(counts, [0, *valleys])
        clear = [
            min(_clearness(counts, widths, top, valley) for valley in valleys[max(i - 1, 0) : i + 1])
            if masses[i] >= PEAK_SHARE * masses.sum()
            else 0.0
            for i, top in enumerate(tops)
        ]
        if min(clear) >= NOISE:
            break
        weakest = min(range(len(tops)), key=lambda i: (clear[i], density[tops[i]]))
        tops.pop(weakest)
    return len(tops)


def _clearness(counts: Integers, widths: Floats, top: int, valley: int) -> float:
    """By how many standard deviations of counting noise the top's density exceeds the valley's; 0 if not deep."""
    high, low = counts[top] / widths[top], counts[valley] / widths[valley]
    if low > VALLEY * high:
        return 0.0
    return float((high - low) / np.sqrt(high / widths[top] + low / widths[valley]))
