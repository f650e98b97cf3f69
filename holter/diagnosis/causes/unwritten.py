"""Weights that an optimizer steps and that stay as they are: it writes to a copy, or is given no gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from holter.diagnosis.anatomy import elements
from holter.diagnosis.chart import Chart
from holter.diagnosis.evidence import searches_its_steps
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Floats, Series, median

_VALUES = 20.0  # of a layer's sample that must have had a gradient before their rest says anything
_HALF = ("float16", "bfloat16")
# Of a weight's size: a step that moves most values by several of the smallest differences that the format knows.
_SHOWS = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-10}
_EPS = 1e-8  # of Adam, as it mostly is
_SURE = 20  # steps without any gradient: a first few may well be meant


def not_written(case: Case) -> Iterator[Suspicion]:
    """weight-not-written: a tensor keeps every bit while its gradient and its rate ask for a change that would show."""
    chart = case.chart
    if not (chart.now("update", "unchanged")[1] == 1).any():
        return
    unchanged, planned = chart.table("update", "unchanged"), chart.table("update", "planned_ratio")
    if len(unchanged) < 2 or planned.names != unchanged.names:
        return
    is_still = (unchanged.values[-2:] == 1).all(axis=0)
    if is_still.all() and searches_its_steps(chart):
        return
    still = np.flatnonzero(is_still)
    for place in still.tolist():
        name = unchanged.names[place]
        asked = _asked_for(chart, name, planned.values[-2:, place])
        shows = asked > _SHOWS.get(chart.dtype(name), _SHOWS["float32"])
        if shows.all() and _has_gradient_values(chart, name) and _format_is_fine(chart, name, unchanged):
            yield _unwritten(chart, name, unchanged, float(asked[-1]), place)
            return


def _asked_for(chart: Chart, name: str, planned: Floats) -> Floats:
    """The size of a step over that of the weight. That of plain descent is rate times gradient; Adam divides by the
    usual size of the gradient, or by its eps if that is larger. NaN where it is not known."""
    if not _latest(chart.table("second_moment", "norm"), name) > 0:
        return planned  # a gradient that is zero but for rounding (the bias of keys) asks for nothing
    if _latest(chart.table("second_moment", "below_eps"), name) > 0.5:
        return np.zeros_like(planned)
    size = _latest(chart.table("gradient", "norm"), name) / math.sqrt(max(1, elements(chart, [name])))
    return planned / max(size, _EPS)


def _latest(series: Series, name: str) -> float:
    return float(series.values[-1, series.names.index(name)]) if len(series) and name in series.names else math.nan


def _has_gradient_values(chart: Chart, name: str) -> bool:
    zeros = chart.table("gradient", "zero_share")
    share = float(median(zeros.values[-8:, [zeros.names.index(name)]])[0]) if name in zeros.names else 1.0
    return (1 - share) * min(elements(chart, [name]) or _VALUES, 4096) >= _VALUES


def _format_is_fine(chart: Chart, name: str, unchanged: Series) -> bool:
    """In half precision small updates are lost in rounding: then the others of its shape must change. Rows of an
    embedding that are not used do not."""
    if chart.dtype(name) not in _HALF:
        return True
    alike = [
        place
        for place, other in enumerate(unchanged.names)
        if other != name and chart.is_matrix(other) == chart.is_matrix(name) and chart.part(other) != "embedding"
    ]
    return bool(len(alike)) and bool((unchanged.values[-1, alike] < 0.5).all())


def _unwritten(chart: Chart, name: str, unchanged: Series, ratio: float, place: int) -> Suspicion:
    changed = np.flatnonzero(unchanged.values[:, place] < 1)
    since = chart.first_step
    if len(changed):  # somewhere between two looks
        before, after = int(unchanged.steps[changed[-1]]), int(unchanged.steps[changed[-1] + 1])
        since = min(before + (after - before + 1) // 2, int(unchanged.steps[-1]))
    return Suspicion(
        "weight-not-written",
        "layer",
        since,
        0.9,
        Kind.FACT,
        name,
        "critical",
        {"unchanged": 1.0, "planned_ratio": ratio, "looks": int((unchanged.values[:, place] == 1).sum())},
        f"{name} keeps every bit though its gradient asks for a step of {ratio:.1g} of its size: the optimizer writes "
        f"to a copy. Make it contiguous (parameter.data = parameter.data.contiguous()) before the optimizer is built.",
        f"It worked if {name} has an update ratio above 0.",
    )


# No gradient at all -------------------------------------------------------------------------------------------------


def no_gradient(case: Case) -> Iterator[Suspicion]:
    """graph-detached, of the whole model: at every step the optimizer finds no gradient, or one that is zero."""
    chart = case.chart
    if chart.resumed or case.step - chart.first_step < _SURE:
        return
    if not (_are_none(chart) or _are_zero(chart)) or not _are_still(chart):
        return
    if chart.has_column("loss") and not chart.scalar("loss").values.any():
        return  # a loss of zero asks for nothing
    told = "no gradient" if _are_none(chart) else "a gradient of exactly zero"
    yield Suspicion(
        "graph-detached",
        "loop",
        chart.first_step,
        0.7,
        severity="critical",
        evidence={"steps": case.step - chart.first_step + 1, "layers_with_gradient": 0},
        advice=f"Every weight has {told} at every optimizer.step(), so nothing is learnt: see that zero_grad() does "
        "not stand between backward() and step(), that backward() is called on the loss of this very model, and that "
        "the loss is not cut off from its output by detach(), .item(), argmax or torch.no_grad().",
        check="It worked if gradient_norm is above 0.",
    )


def _are_none(chart: Chart) -> bool:
    """Whether weights that are to learn were looked at, and none ever had a gradient."""
    wanted, held, has = (chart.table("weight", name) for name in ("requires_grad", "held", "has_gradient"))
    if chart.layers("gradient") or not len(has) or not wanted.names == held.names == has.names:
        return False
    are_to_learn = (wanted.values[-1] == 1) & (held.values[-1] == 1)
    return bool(are_to_learn.any() and not (has.opening == 1).any() and not (has.values == 1).any())


def _are_zero(chart: Chart) -> bool:
    norms = chart.table("gradient", "norm")
    is_from_start = norms.seen == len(norms) or not norms.opening.any()
    return len(norms) >= _SURE // 2 and is_from_start and not norms.values.any()


def _are_still(chart: Chart) -> bool:
    """Whether weights were looked at twice and are as they were: else they may be trained without gradients."""
    norms, unchanged = chart.table("weight", "norm"), chart.table("update", "unchanged")
    if len(unchanged):
        return bool((unchanged.values == 1).all())
    return len(norms) > 1 and np.array_equal(norms.values[-1], norms.opening[0])


RULES = (not_written, no_gradient)
