"""Layers that do not learn because of how they are wired: frozen, cut off, held by no optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from holter.diagnosis.anatomy import (
    did_run,
    elements,
    ends_a_line,
    first_in_depth,
    holder,
    holds_others,
    is_upstream,
    kind_of,
    last_in_depth,
    owner,
    reads_without,
)
from holter.diagnosis.chart import Chart, until_news
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Flags, Floats, Series

_GONE = 3  # measurements in a row without a gradient
_USUAL, _REGULAR = 32, 0.95  # so many before that, of which so many had one: else layers take turns (experts)
_FEW = 5  # measurements that make a past


@dataclass(frozen=True)
class _Gap:
    """Layers that lost their gradient together."""

    layers: tuple[str, ...]
    others: tuple[str, ...]  # that have one
    since: int
    is_zero: bool  # the gradient is there, every value of it zero


@dataclass(frozen=True)
class _Standing:
    """Of layers, what the last look at the weights says, at this step or later; None where nobody has looked."""

    frozen: bool | None
    held: bool | None


def lost_gradient(case: Case) -> Iterator[Suspicion]:
    """layer-frozen, graph-detached or optimizer-holds-other-parameters: gradients that were always there are gone."""
    yield from _all_replaced(case)
    gap = _gap(case.chart)
    if gap is None or (gap.is_zero and not _is_alive(case.chart, gap)) or _is_idle(case.chart, gap):
        return
    if _is_relieved(case.chart, gap):
        return
    standing = _standing(case.chart, gap)
    if standing.frozen:
        yield _frozen(case.chart, gap.layers, gap.since, 0.95)
    elif standing.held is False:
        yield _not_held(case.chart, gap.layers, gap.since, 0.9)
    elif is_upstream(case.chart, gap.layers, gap.others):
        yield _detached(case.chart, gap.layers, gap.since, 0.9 if standing.frozen is False else 0.6)
    elif _shares_examples(case.chart, gap):
        return  # an expert to whom nobody comes any more
    elif standing.frozen is False:
        yield _detached(case.chart, gap.layers, gap.since, 0.8)
    else:  # what comes before them learns on: it is they that stand still
        yield _frozen(case.chart, gap.layers, gap.since, 0.6, Kind.PATTERN)


def _all_replaced(case: Case) -> Iterator[Suspicion]:
    """No gradient is measured any more, since the optimizer holds nothing of the model."""
    held = case.chart.table("weight", "held")
    if not len(held) or held.values[-1].any():
        return
    norms = case.chart.table("gradient", "norm")
    if len(norms) and norms.steps[-1] < held.steps[-1]:
        wanted = case.chart.table("weight", "requires_grad").values[-1]
        layers = [name for name, wants in zip(held.names, wanted.tolist(), strict=True) if wants]
        if layers:
            yield _not_held(case.chart, layers, int(norms.steps[-1]) + 1, 0.95)


def _gap(chart: Chart) -> _Gap | None:
    names, last = chart.now("gradient", "norm")
    if (last > 0).all() and len(names) == len(chart.layers("gradient")):
        return None
    norms = chart.table("gradient", "norm")
    if len(norms) < _GONE + _FEW:
        return None
    gone = ~(norms.values[-_GONE:] > 0).any(axis=0)
    if not gone.any() or gone.all():
        return None
    places = np.flatnonzero(gone & ~_nonfinite(chart, norms))
    present = norms.values[:, places] > 0
    last = len(present) - 1 - present[::-1].argmax(axis=0)  # where each had its last one
    starts = {}
    for place, end, column in zip(places.tolist(), last.tolist(), present.T, strict=True):
        past = column[max(0, end + 1 - _USUAL) : end + 1]
        if column[end] and len(past) >= _FEW and past.mean() >= _REGULAR:
            starts[norms.names[place]] = int(norms.steps[end + 1])
    if not starts:
        return None
    since = min(starts.values())
    layers = tuple(name for name, start in starts.items() if start <= since + 1)
    others = tuple(name for place, name in enumerate(norms.names) if norms.values[-1, place] > 0)
    is_zero = any(norms.values[-1, norms.names.index(name)] == 0 for name in layers)
    return _Gap(chart.in_depth(layers), others, since, is_zero)


def _is_alive(chart: Chart, gap: _Gap) -> bool:
    """Whether a look since then saw no dead units: they too leave all that comes before them a gradient of zeros."""
    dead = chart.table("activation", "dead")
    is_new = len(dead) > 0 and dead.steps[-1] >= gap.since
    return is_new and bool(np.fmax.reduce(dead.values[-1]) < 0.5)


def _is_idle(chart: Chart, gap: _Gap) -> bool:
    """Whether a look since then did not see their modules run: nobody asks an idle expert, or a branch that is over."""
    seen = chart.table("activation", "rms")
    modules = {owner(layer) for layer in gap.layers}
    places = [place for place, name in enumerate(seen.names) if name in modules]
    is_new = len(seen) > 0 and seen.steps[-1] >= gap.since
    return bool(is_new and places and not np.isfinite(seen.values[-1, places]).any())


def _is_relieved(chart: Chart, gap: _Gap) -> bool:
    """Whether others got their gradient in the same step: tasks, or stages of a training, take turns."""
    norms = chart.table("gradient", "norm")
    before, after = norms.before(gap.since, _GONE), norms.since(gap.since)[:2]
    return len(before) == _GONE and bool((~(before > 0).any(axis=0) & (after > 0).any(axis=0)).any())


def _shares_examples(chart: Chart, gap: _Gap) -> bool:
    """Whether modules of one make were seen to get different numbers of examples, or none: a router shares them out."""
    counts = chart.table("activation", "count")
    makes = {(kind_of(layer), chart.shape(layer)) for layer in gap.layers}
    for make in makes:
        modules = {owner(name) for name in chart.parameters if (kind_of(name), chart.shape(name)) == make}
        seen = np.nan_to_num(counts.values[:, [place for place, name in enumerate(counts.names) if name in modules]])
        if seen.shape[1] > 1 and (seen.max(axis=1) > 1.01 * seen.min(axis=1)).any():
            return True
    return False


def _nonfinite(chart: Chart, norms: Series) -> Flags:
    """Layers whose gradient is all NaN have no norm either."""
    bad = chart.table("gradient", "nonfinite")
    if bad.names != norms.names:
        return np.zeros(len(norms.names), dtype=bool)
    return np.asarray((bad.values[-_GONE:] > 0).any(axis=0), dtype=bool)


def _standing(chart: Chart, gap: _Gap) -> _Standing:
    wanted, held = (_looked_at(chart.table("weight", name), gap) for name in ("requires_grad", "held"))
    if wanted is not None:
        return _Standing(bool((wanted == 0).all()), None if held is None else bool((held == 1).any()))
    for role in ("second_moment", "momentum"):
        kept = chart.table(role, "norm")
        later = _looked_at(kept, gap)
        before = kept.before(gap.since, most=3)
        places = [kept.names.index(name) for name in gap.layers if name in kept.names]
        if later is not None and places and np.isfinite(before[:, places]).any():
            return _Standing(None, bool(np.isfinite(later).any()))
    return _Standing(None, None)


def _looked_at(series: Series, gap: _Gap) -> Floats | None:
    """The latest values of the gap's layers, if there are any from after its beginning."""
    if not len(series) or series.steps[-1] < gap.since:
        return None
    place = {name: index for index, name in enumerate(series.names)}
    found: Floats = np.array([series.values[-1, place[name]] if name in place else np.nan for name in gap.layers])
    return found


# What was never there -------------------------------------------------------------------------------------------


def never_learning(case: Case) -> Iterator[Suspicion]:
    """The same three causes, of layers that never had a gradient. A frozen backbone is meant to be so."""
    chart = case.chart
    if not 2 <= case.step - chart.first_step <= 200:  # as it was from the start, it is said at the start
        return
    wanted, flags, holds = _at_first(chart)
    if flags.all() and holds.all() and len(chart.layers("gradient")) >= len(wanted):
        return
    norms = chart.table("gradient", "norm")
    at = {name: place for place, name in enumerate(norms.names)}
    had = [bool((norms.opening[:, at[name]] > 0).any()) if name in at else False for name in wanted]
    alone = [name for name, known in zip(wanted, had, strict=True) if not known and _is_selected(chart, name)]
    groups: dict[str, list[str]] = {"frozen": [], "not held": [], "detached": []}
    standing = dict(zip(wanted, zip(flags.tolist(), holds.tolist(), strict=True), strict=True))
    for name in alone:
        requires, is_held = standing[name]
        groups["frozen" if not requires else "not held" if not is_held else "detached"].append(name)
    learning = [name for name, known in zip(wanted, had, strict=True) if known]
    yield from _forgotten(chart, groups["frozen"], learning)
    yield from _unheld(chart, groups["not held"], learning)
    if len(norms) >= _GONE:
        yield from _cut_off(chart, [name for name in groups["detached"] if name not in at], learning)


@until_news
def _at_first(chart: Chart) -> tuple[tuple[str, ...], Floats, Floats]:
    """The weights that were looked at first, whether each wants a gradient, and whether an optimizer holds it."""
    wanted, held = chart.table("weight", "requires_grad"), chart.table("weight", "held")
    if not len(wanted):
        return (), np.ones(0), np.ones(0)
    return (
        wanted.names,
        wanted.opening[0],
        held.opening[0] if held.names == wanted.names else np.ones(len(wanted.names)),
    )


def _is_selected(chart: Chart, name: str) -> bool:
    return chart.told(name, "selected") is not False


def _forgotten(chart: Chart, frozen: Sequence[str], learning: Sequence[str]) -> Iterator[Suspicion]:
    """Frozen layers between others that learn and are alike. What comes before all that learns is a backbone; what is
    most of the model carries adapters, of which some may have been forgotten; a part of its own, unlike all others, is
    a teacher."""
    if not frozen or not learning:
        return
    kinds = {(kind_of(name), chart.part(name)) for name in learning}
    suspicious = [name for name in frozen if (kind_of(name), chart.part(name)) in kinds and did_run(chart, name)]
    if elements(chart, frozen) > 0.5 * elements(chart, (*frozen, *learning)):
        alike = {kind_of(name) for name in suspicious}
        whole = [*suspicious, *(name for name in learning if kind_of(name) in alike)]
        if elements(chart, suspicious) > 0.5 * elements(chart, whole):
            return
    else:
        modules = {owner(name) for name in frozen}
        is_layer = any(_is_of_a_layer(name) for name in frozen) and chart.part(frozen[0]) != "embedding"
        if len(modules) == 1 and is_layer and did_run(chart, frozen[0]):
            suspicious = list(frozen)
    if suspicious and not is_upstream(chart, suspicious, learning):
        yield _frozen(chart, suspicious, chart.first_step, 0.8)


def _is_of_a_layer(name: str) -> bool:
    """Return whether torch's layers have a parameter of such a name; others (positions, frequencies, windows) are
    tables of a model's own, often fixed."""
    own = name.rpartition(".")[2]
    return "weight" in own or "bias" in own


def _unheld(chart: Chart, layers: Sequence[str], learning: Sequence[str]) -> Iterator[Suspicion]:
    """Layers that no optimizer has, though they get a gradient; not those before all that it has (a backbone)."""
    with_gradient = chart.table("weight", "has_gradient")
    if len(with_gradient):
        known = dict(zip(with_gradient.names, with_gradient.values[-1].tolist(), strict=True))
        layers = [name for name in layers if known.get(name) != 0]
    if not layers:
        return
    if not _are_chosen(chart, layers) and not all(chart.told(name, "replaced") for name in layers):
        if is_upstream(chart, layers, learning):
            return
        if learning and elements(chart, layers) > 0.5 * elements(chart, (*layers, *learning)):
            return  # few are held on purpose: adapters, biases, a head
        if learning and not chart.depth and not len(with_gradient):
            return
    yield _not_held(chart, layers, chart.first_step, 0.95 if not learning else 0.8)


def _are_chosen(chart: Chart, layers: Sequence[str]) -> bool:
    """Whether a few still require a gradient where the rest of the model was told not to: they are meant to learn."""
    names, wanted, _ = _at_first(chart)
    frozen = [name for name, wants in zip(names, wanted.tolist(), strict=True) if not wants]
    return bool(frozen) and elements(chart, layers) <= 0.5 * elements(chart, frozen)


def _cut_off(chart: Chart, layers: Sequence[str], learning: Sequence[str]) -> Iterator[Suspicion]:
    """Layers that run and are held, but have no gradient. An expert without work does not run; a head or a last block
    whose output nobody uses is a note, where of a branch that is cut off the same part learns in other blocks."""
    flags = chart.table("weight", "has_gradient")
    known = dict(zip(flags.names, flags.values[-1].tolist(), strict=True)) if len(flags) else {}
    # One that has a gradient, of an optimizer that does not step, is cut off from nothing.
    ran = [name for name in layers if did_run(chart, name) and known.get(name) != 1]
    # Where a module that holds others uses a parameter of its own is not known.
    learning = [name for name in learning if not holds_others(chart, owner(name))]
    if not ran or not learning:
        return
    if is_upstream(chart, [first_in_depth(chart, ran)], learning):
        upstream = [name for name in ran if is_upstream(chart, [name], learning)]
        if reads_without(chart, learning, upstream):  # a teacher, or a copy that gives the targets
            yield _unused(chart, upstream)
        else:
            yield _detached(chart, upstream, chart.first_step, 0.9)
        return
    makes = {(kind_of(name), chart.shape(name)) for name in learning}
    inner = [name for name in ran if chart.part(name) == "output" or not ends_a_line(name, learning)]
    alike = [name for name in inner if (kind_of(name), chart.shape(name)) in makes]
    if alike:
        yield _detached(chart, alike, chart.first_step, 0.7)
    elif unused := [name for name in ran if "pooler" not in name]:  # many a model has one, asked for or not
        yield _unused(chart, unused)


# The findings -------------------------------------------------------------------------------------------------


def _frozen(chart: Chart, layers: Sequence[str], since: int, score: float, kind: Kind = Kind.FACT) -> Suspicion:
    first = first_in_depth(chart, layers)
    name = holder(chart, layers, first)
    told = "does not require a gradient" if kind is Kind.FACT else "has no gradient any more"
    return Suspicion(
        "layer-frozen",
        "layer",
        since,
        score,
        kind,
        name,
        evidence={"layers": len(layers), "first": first, "requires_grad": 0 if kind is Kind.FACT else "not known yet"},
        advice=f"{name} {told} since step {since:,} while its neighbours learn: set "
        f"requires_grad_(True) on it, or leave it out of the optimizer if it is to stay as it is.",
        check=f"It worked if {first} has a gradient again.",
    )


def _not_held(chart: Chart, layers: Sequence[str], since: int, score: float) -> Suspicion:
    first = first_in_depth(chart, layers)
    name = holder(chart, layers, first)
    count = elements(chart, layers)
    return Suspicion(
        "optimizer-holds-other-parameters",
        "optimizer",
        since,
        score,
        Kind.FACT,
        name,
        "critical",
        {"layers": len(layers), "first": first, "parameters": count},
        f"No optimizer holds {name} ({count:,} parameters in all): it was made or replaced after the optimizer. Build "
        f"the optimizer from model.parameters() once the model is complete, or add it with optimizer.add_param_group.",
        f"It worked if {first} is among the layers with an update.",
    )


def _detached(chart: Chart, layers: Sequence[str], since: int, score: float) -> Suspicion:
    last = last_in_depth(chart, layers)
    name = owner(last) or last
    return Suspicion(
        "graph-detached",
        "layer",
        since,
        score,
        Kind.PATTERN,
        name,
        "critical",
        {"layers": len(layers), "first": first_in_depth(chart, layers), "last": last},
        f"No gradient reaches {name} and what comes before it, {len(layers):,} tensors, though they run: look behind "
        f"{name} for detach(), .data, .item(), torch.no_grad() or a new tensor made from numbers, and take it away.",
        f"It worked if {last} has a gradient.",
    )


def _unused(chart: Chart, layers: Sequence[str]) -> Suspicion:
    """A note: many a model computes more than its loss asks for, as a pooler or a second head."""
    first = first_in_depth(chart, layers)
    name = holder(chart, layers, first)
    return Suspicion(
        "graph-detached",
        "layer",
        chart.first_step,
        0.6,
        Kind.STATE,
        name,
        "info",
        {"layers": len(layers), "first": first, "last": last_in_depth(chart, layers)},
        f"{name} runs in every step and an optimizer holds it, but no gradient has ever reached it: it does not learn. "
        f"If it should, see that what it puts out is a part of the loss, without a detach(), .item() or "
        f"torch.no_grad() on the way; else leave it out of the forward, or set requires_grad_(False) on it.",
        f"It worked if {first} has a gradient.",
    )


RULES = (lost_gradient, never_learning)
