"""What several rules ask of a case: was there harm, was the data as usual, what was usual before."""

from __future__ import annotations

import re

import numpy as np

from holter.diagnosis.chart import Chart, column, until_news
from holter.diagnosis.events import Event
from holter.diagnosis.suspicion import Case
from holter.series import Floats, Integers, Series, known_median, median, overall_median

STANDS = 0.95  # of the first losses, that the last of them keep: noise between batches is about as large
FAR = 0.1  # of its size that a step moves a weight by
_FINDS_ITS_RATE = re.compile(r"(?i)dadapt|prodigy|^l?dog$|^dowg$|cocob|mechanic")


def harm(case: Case, since: int, within: int = 12, least: float = 2.0) -> Event | None:
    """The first rise of loss or gradient norm that began in these steps, and is more than one odd value of a little."""
    found = [
        event
        for name in ("loss", "gradient_norm")
        for event in case.events.of(name, direction=1, since=since)
        if event.since <= since + within and event.factor >= least and (event.values >= 2 or event.factor >= 10)
    ]
    return min(found, key=lambda event: event.since) if found else None


def first_nonfinite(series: Series) -> int | None:
    """The first step, of those kept, at which a value was not finite."""
    bad = ~np.isfinite(series.values).all(axis=1) if len(series) else np.zeros(0, dtype=bool)
    return int(series.steps[bad.argmax()]) if bad.any() else None


def data_is_usual(case: Case, step: int, around: int = 1) -> bool:
    """Whether nothing about the inputs was out of the ordinary near this step, as far as they were logged."""
    return not any(
        abs(event.since - step) <= around for name in ("batch/std", "batch/abs_max") for event in case.events.of(name)
    )


@until_news
def rate_of(chart: Chart) -> tuple[Integers, Floats]:
    """The largest rate of any group, step by step."""
    series = [chart.scalar(name) for name in _rates(chart)]
    if not series or not len(series[0]):
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    steps, values = column(series[0])
    for other in series[1:]:
        if len(other) == len(values):
            values = np.fmax(values, column(other)[1])
    return steps, values


@until_news
def _rates(chart: Chart) -> list[str]:
    return [name for name in chart.names if name.split("/")[0] == "learning_rate"]


def rate_is_flat(chart: Chart, since: int, until: int, within: float = 1.3) -> bool:
    steps, values = rate_of(chart)
    seen = values[(steps >= since) & (steps <= until) & (values > 0)]
    return len(seen) == 0 or bool(seen.max() <= within * seen.min())


def stands_still(chart: Chart, steps: int, kept: float = STANDS) -> bool:
    """Return whether the loss has hardly come down in its first steps, of which there were this many."""
    losses = chart.opening("loss")[1]
    return len(losses) >= steps and bool(overall_median(losses[-5:]) > kept * overall_median(losses[:5]))


def matrices(chart: Chart, series: Series) -> list[int]:
    """Places of the layers that are matrices; of all, where shapes are not known."""
    return _matrices_in(chart, series.names) or list(range(len(series.names)))


@until_news
def _matrices_in(chart: Chart, names: tuple[str, ...]) -> list[int]:
    return [place for place, name in enumerate(names) if chart.is_matrix(name)]


def middle(series: Series, chosen: list[int]) -> tuple[Integers, Floats]:
    """The median over these layers, step by step; NaN where none was measured."""
    if not len(series) or not chosen:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    values = series.values[:, chosen]
    found = median(values.T)
    known = ~np.isnan(found)
    return series.steps[known], found[known]


@until_news
def typical_of(chart: Chart, role: str, statistic: str) -> tuple[Integers, Floats]:
    """The median over the matrices, step by step."""
    series = chart.table(role, statistic)
    return middle(series, matrices(chart, series))


@until_news
def typical_now(chart: Chart, role: str, statistic: str) -> float:
    """The last of them; NaN where it is not known. In a training that is well it tells a rule to look no further."""
    names, values = chart.now(role, statistic)
    chosen = _matrices_in(chart, names)
    return known_median(values[chosen] if chosen else values)


def moved_far(chart: Chart, since: int) -> bool:
    """Whether a step at or shortly before this one was of the size of the weights."""
    steps, sizes = typical_of(chart, "update", "ratio")
    return bool((sizes[(steps >= since - 12) & (steps <= since)] > FAR).any())


@until_news
def most_zeros(chart: Chart) -> float:
    """The largest share of zeros in the last gradient of any layer."""
    return float(np.fmax.reduce(chart.now("gradient", "zero_share")[1], initial=0.0))


def is_adaptive(chart: Chart) -> bool:
    """Whether the optimizer divides by a second moment."""
    return chart.has("second_moment")


@until_news
def searches_its_steps(chart: Chart) -> bool:
    """Return whether the optimizer searches along a line: where that finds nothing better, it takes no step at all."""
    names = chart.info.get("optimizers")
    return isinstance(names, list) and any("BFGS" in str(name) for name in names)


@until_news
def finds_its_rate(chart: Chart) -> bool:
    """Whether the optimizer finds the length of its steps, from far too short ones on: its rate is a factor, near 1."""
    names = chart.info.get("optimizers")
    return isinstance(names, list) and any(_FINDS_ITS_RATE.search(str(name)) for name in names)


@until_news
def clipping(chart: Chart) -> tuple[Integers, Floats]:
    """How many times its limit the gradient was long, at the steps at which it was clipped; empty without a clip."""
    norms, limits = chart.scalar("clip_norm"), chart.scalar("clip_max_norm")
    if not len(norms) or len(norms) != len(limits):
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return norms.steps, norms.values[:, 0] / limits.values[:, 0]
