"""What depth does to a signal: initialisations that blow it up, fade it out or make units alike; vanishing gradients.

How a weight is initialised is judged by its gain, rms x sqrt(inputs): the factor by which it makes a signal larger,
whatever its size (1 for Xavier, 1.4 for Kaiming, 0.6 as torch does it, 0.02 x sqrt(width) in a GPT).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holter.diagnosis.anatomy import PASSES, channels_read, fan_in, hidden_matrices, output_matrix, owner, units
from holter.diagnosis.causes.batches import inputs_are_large
from holter.diagnosis.chart import Chart, until_news
from holter.diagnosis.evidence import rate_of, stands_still
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Floats, logs, median, overall_median
from holter.words import number, times

_ASKED = (2, 5, 10, 20, 35)  # steps after the first at which the start is judged: it does not change any more
_LARGE = 4.0  # gain of a single layer
_LARGER, _SMALLER = 2.2, 0.4  # gains of most layers
_GROWN, _FADED = 12.0, 0.05  # what they make of a signal together, at the last layer before the output
_UNLIKE, _USUAL = 8.0, 1.5  # times the median of the other layers; a gain that is none too large by itself (Kaiming)
_LOUD = 8.0  # of the output's spread at the first step: a softmax of that is sure before it has learnt anything
_ALIKE = 1.001  # effective rank of units that are all the same
_LAYERS = 4  # that make a chain
_UNEVEN = 0.2  # of the whole drop, that one layer may take beyond its share
_BARELY = 0.8  # of the first losses, that are left where only the last layers learn, such as how frequent classes are
_STEPS = 40  # in which a loss comes down, if only by a little
_VARIED = 2.0  # effective rank of a signal that a layer of unlike units would put out with more than one too


@dataclass(frozen=True)
class _Start:
    """The weights that the signal passes through, from the input to the output, before the first step."""

    names: tuple[str, ...]
    gains: Floats
    sizes: Floats  # rms of what each puts out; NaN where nobody looked

    @property
    def usual(self) -> float:
        return overall_median(self.gains)


def initialisation(case: Case) -> Iterator[Suspicion]:
    """init-too-large and init-too-small: by the gains of the weights, and by what they do to the signal."""
    start = _start(case.chart) if _is_asked(case) else None
    if start is None:
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        unlike = start.gains / start.usual
    large = np.flatnonzero(
        (start.gains > _LARGE)
        | ((unlike > _UNLIKE) & (start.gains > _USUAL))
        | ((start.gains > _LARGER) & (start.usual > _LARGER))
    )
    if len(large):
        yield from _too_large(case.chart, start, int(large[0]))
    small = np.flatnonzero(
        (start.gains > 0) & ((unlike < 1 / _UNLIKE) | ((start.gains < _SMALLER) & (start.usual < _SMALLER)))
    )
    if len(small):
        yield from _too_small(case.chart, start, small.tolist())


def _is_asked(case: Case) -> bool:
    return case.chart.first_step <= 0 and case.step - case.chart.first_step in _ASKED


@until_news
def _start(chart: Chart) -> _Start | None:
    rms = chart.table("weight", "rms")
    if not len(rms) or rms.opening_steps[0] > chart.first_step:
        return None
    wanted = chart.table("weight", "requires_grad")
    frozen = {name for name, wants in zip(wanted.names, wanted.opening[:1].flat, strict=False) if wants == 0}
    places = [place for place in hidden_matrices(chart, rms.names) if rms.names[place] not in frozen]
    names = [rms.names[place] for place in places]
    output = output_matrix(chart)
    if output in rms.names and chart.part(output) == "embedding":  # it makes the output too: it counts as the last
        names.append(output)
        places.append(rms.names.index(output))
    if not names:
        return None
    gains = rms.opening[0, places] * np.sqrt([fan_in(chart, name) for name in names])
    return _Start(tuple(names), gains, _sizes(chart, "rms", names))


@until_news
def _first_look(chart: Chart, statistic: str) -> dict[str, float]:
    """Of every module, in the order in which they finished; empty where nobody looked at the first step."""
    series = chart.table("activation", statistic)
    if not len(series) or series.opening_steps[0] > chart.first_step:
        return {}
    return dict(zip(series.names, series.opening[0].tolist(), strict=True))


def _sizes(chart: Chart, statistic: str, parameters: Sequence[str]) -> Floats:
    seen = _first_look(chart, statistic)
    found = []
    for name in parameters:
        module = owner(name)
        found.append(seen.get(module, seen.get(module.rpartition(".")[0], math.nan)))
    return np.array(found)


def _too_large(chart: Chart, start: _Start, place: int) -> Iterator[Suspicion]:
    effects = _effects(chart, start)
    if not effects:
        return
    name, gain = start.names[place], float(start.gains[place])
    is_one = int((start.gains > _LARGER).sum()) == 1
    yield Suspicion(
        "init-too-large",
        "layer",
        chart.first_step,
        0.4 if is_one and set(effects) == {"saturated"} else 0.9,  # one activation at its bounds says so by itself
        Kind.FACT,
        name,
        "critical",
        {"gain": gain, "layers": int((start.gains > _LARGE).sum()), **effects},
        f"{name} starts {times(gain)} as large as keeps a signal its size: call holter.init_weights(model) before "
        f"training, or scale it down to a standard deviation of about {number(math.sqrt(2 / fan_in(chart, name)))}.",
        "It worked if the first loss is near that of guessing and activations have the same spread in all layers.",
    )


def _effects(chart: Chart, start: _Start) -> dict[str, float]:
    """What a weight that is too large has done at the first step; a norm behind it may have mended it all."""
    effects: dict[str, float] = {}
    output = output_matrix(chart)
    seen = _first_look(chart, "std")
    spread = seen.get(owner(output)) if output is not None and chart.part(output) == "output" else None
    if spread is None and seen:
        spread = list(seen.values())[-1]
    if spread is not None and spread > _LOUD:
        effects["output_spread"] = spread
    held = [share for share in _first_look(chart, "saturated").values() if share >= 0.5]
    if held:
        effects["saturated"] = max(held)
    with np.errstate(all="ignore"):
        grown = float(np.fmax.reduce(start.sizes) * start.gains[0] / start.sizes[0]) if len(seen) else math.nan
    if grown > max(_GROWN, 3 * float(start.gains.max())):  # more than any of them does alone
        effects["growth"] = grown
    logits = chart.table("attention", "max_logit")
    if len(logits) and logits.opening_steps[0] == chart.first_step and np.fmax.reduce(logits.opening[0]) > 50:
        effects["attention_logit"] = float(np.fmax.reduce(logits.opening[0]))
    return effects | _first_loss(chart, output, spread)


def _first_loss(chart: Chart, output: str | None, spread: float | None) -> dict[str, float]:
    """A first loss far above that of guessing, of a classifier. Logits that hardly differ cannot have that: then the
    loss is another, such as one over whole sequences."""
    losses, labels = chart.scalar("loss"), chart.table("batch", "label_entropy")
    if output is None or not len(losses) or not len(labels) or not np.isfinite(labels.opening).any():
        return {}
    guess = math.log(max(2, chart.shape(output)[0]))
    first = float(losses.opening[0, 0])
    is_of_logits = spread is None or spread > 0.5 * guess
    return {"first_loss": first, "guessing": guess} if first > 3 * guess and is_of_logits else {}


def _too_small(chart: Chart, start: _Start, small: list[int]) -> Iterator[Suspicion]:
    is_known = np.isfinite(start.sizes[0]) and start.gains[0] > 0
    if inputs_are_large(chart) or not is_known:  # next to large inputs anything is small
        return
    left = _reaches_output(chart) * float(start.gains[0] / start.sizes[0])
    if not left < _FADED:
        return
    after = _after_norms(chart, start, small)
    is_mended = 2 * len(after) < len(small)
    place = after[0] if is_mended and after else small[0]
    name, gain = start.names[place], float(start.gains[place])
    yield Suspicion(
        "init-too-small",
        "layer",
        chart.first_step,
        0.9 if left < 0.4 * _FADED else 0.75,
        Kind.FACT,
        name,
        "info" if is_mended and not _costs_steps(chart) else "warning",
        {"gain": gain, "layers": len(small), "signal_left": left},
        f"{name} starts at {times(gain)} what keeps a signal its size, and {times(left)} of the input's spread reaches "
        f"the last layer: call holter.init_weights(model) before training, or scale it up to a standard deviation of "
        f"about {number(math.sqrt(2 / fan_in(chart, name)))}.",
        "It worked if activations have about the same spread in all layers at the first step.",
    )


def _reaches_output(chart: Chart) -> float:
    """Return the rms of what differs between examples in what the output layer reads: that of the module that finished
    before; or, behind a function that is no module (a sine) or another branch, that of the output divided by its gain.
    The larger one counts. NaN if neither is known."""
    size, spread = _first_look(chart, "rms"), _first_look(chart, "spread")
    output = output_matrix(chart)
    module = owner(output) if output is not None else ""
    varied = {name: size[name] * math.sqrt(max(spread.get(name, math.nan), 0.0)) for name in size}
    place = list(size).index(module) if module in size else 0
    if output is None or not place or chart.part(output) == "embedding":
        return math.nan
    before = list(varied.values())[place - 1]
    rms = chart.table("weight", "rms")
    gain = rms.opening[0, rms.names.index(output)] * math.sqrt(fan_in(chart, output)) if output in rms.names else 0.0
    return max(before, varied[module] / float(gain)) if gain > 0 else before


def _after_norms(chart: Chart, start: _Start, small: list[int]) -> list[int]:
    """Return those of these weights that run after the last norm that gives a signal its size back."""
    size, end = _first_look(chart, "rms"), len(chart.depth)
    norms = [name for name in chart.parameters if chart.part(name) == "norm" and size.get(owner(name), 0) > _SMALLER]
    last = max((chart.depth.get(name, -1) for name in norms), default=-1)
    return [place for place in small if chart.depth.get(start.names[place], end) > last]


def _costs_steps(chart: Chart) -> bool:
    """Return whether the loss still stands still at the last step at which the start is judged, after any warm-up."""
    rates = rate_of(chart)[1][: _ASKED[-1]]
    is_warm = not len(rates) or int(rates.argmax()) < len(rates) / 2
    return is_warm and stands_still(chart, _ASKED[-1])


# Units that are all the same --------------------------------------------------------------------------------------


def symmetric(case: Case) -> Iterator[Suspicion]:
    """init-symmetric: rows of a weight that are identical get identical gradients, and stay so."""
    if not _is_asked(case):
        return
    chart, suspects = case.chart, _suspects(case.chart)
    for name, size, is_uniform, _ in suspects:
        if is_uniform:
            yield _same(chart, name, 0.95, {"weight": size, "spread": 0.0}, f"every weight is {number(size)}")
            return
    for name, size, _, rank in suspects:
        # One column that is far larger than all others makes a rank of one too.
        if rank is not None and not inputs_are_large(chart):
            yield _same(chart, name, 0.85, {"rank": rank}, "its units all put out the same")
            return
        if size == 0 and _never_moves(case, name):
            yield _same(chart, name, 0.8, {"weight": 0.0}, "all its weights are 0, and no gradient changes that")
            return


@until_news
def _suspects(chart: Chart) -> list[tuple[str, float, bool, float | None]]:
    """The layers whose units may have begun all the same: the size of their weights, whether these are all alike, and
    the rank of what they put out where that is about one."""
    rms, std = chart.table("weight", "rms"), chart.table("weight", "std")
    if not len(rms) or rms.opening_steps[0] > chart.first_step or std.names != rms.names:
        return []
    sizes, spreads = rms.opening[0].tolist(), std.opening[0].tolist()
    ranks, counts = _first_look(chart, "rank"), _first_look(chart, "count")
    found = []
    for place in hidden_matrices(chart, rms.names):
        name, size = rms.names[place], sizes[place]
        module = owner(name)
        rank = ranks.get(module, math.nan)
        # Units with weights of their own channel (a depthwise convolution) may all have the same.
        is_uniform, is_one = size > 0 and spreads[place] <= 1e-3 * size and not rank > _ALIKE, 0.5 < rank <= _ALIKE
        if (is_uniform or is_one or size == 0) and _has_units(chart, name):
            is_known = is_one and counts.get(module, 0.0) / units(chart, name) >= 4  # enough examples to tell
            is_known = is_known and _has_equal_rows(chart, name, ranks)
            found.append((name, size, is_uniform, rank if is_known else None))
    return found


def _has_equal_rows(chart: Chart, name: str, ranks: Mapping[str, float]) -> bool:
    """Whether it is its weights that make all units say the same. A layer has no more rank than what comes in: that of
    a single number is one. Without a histogram what comes in is taken to be what was put out just before."""
    repeats = chart.repeats(name)
    if repeats is not None:
        return repeats % units(chart, name) == 0
    before = list(ranks)[: list(ranks).index(owner(name))]
    return bool(before) and ranks[before[-1]] >= _VARIED


def _has_units(chart: Chart, name: str) -> bool:
    kind = chart.module(name)
    return (not kind or any(word in kind for word in PASSES)) and units(chart, name) >= 3 and fan_in(chart, name) > 1


def _never_moves(case: Case, name: str) -> bool:
    norms = case.chart.table("gradient", "norm")
    if name not in norms.names or case.step - case.chart.first_step < 10:
        return False
    values = norms.opening[:, norms.names.index(name)]
    rates = case.chart.scalar("learning_rate")
    return len(values) >= 5 and bool((values == 0).all()) and len(rates) > 0 and bool((rates.values[-5:] > 0).all())


def _same(chart: Chart, name: str, score: float, evidence: dict[str, object], why: str) -> Suspicion:
    return Suspicion(
        "init-symmetric",
        "layer",
        chart.first_step,
        score,
        Kind.FACT,
        name,
        "critical",
        evidence,
        f"In {name} {why}: units that start the same stay the same, however wide the layer is. Call "
        f"holter.init_weights(model) before training, which draws every weight at random.",
        "It worked if the effective rank of its activations is well above 1.",
    )


# Vanishing --------------------------------------------------------------------------------------------------------


def vanishing(case: Case) -> Iterator[Suspicion]:
    """vanishing-gradient: it shrinks by about the same factor a layer, from the output to the input, and did so before
    the first update: what a model loses later something has taken from it."""
    chart = case.chart
    if not 5 <= (case.step - chart.first_step) % 50 < 16:  # it changes slowly, and must be seen twice in a row
        return
    first = _first_profile(chart)
    if first is None or first[1] < 0.85 or first[0] < 1.3:
        return
    norms = chart.table("gradient", "norm")
    places = _chain(chart, norms.names)
    now = _profile(norms.values[-8:, places])
    if now is None or now[1] < 0.85:
        return
    drop, factor = min(first[0], now[0]), 10 ** (min(first[0], now[0]) / (len(places) - 1))
    if not (drop >= 1.3 and factor >= 1.8) and not drop >= 3:
        return
    if drop < 2 and not stands_still(chart, _STEPS):
        return
    # What reaches the first layers, as far as is known yet.
    is_enough = chart.has_column("loss") and not stands_still(chart, _STEPS, _BARELY)
    name = norms.names[places[0]]
    saturated = [share for share in _first_look(chart, "saturated").values() if share >= 0.5]
    flat = [share for share in _first_look(chart, "spread").values() if share < 0.1]
    sure = 0.1 * bool(flat or saturated) + 0.1 * (drop >= 2)
    yield Suspicion(
        "vanishing-gradient",
        "layer",
        chart.first_step,
        0.6 if is_enough else 0.7 + sure,
        Kind.PATTERN,
        name,
        "info" if is_enough else "warning" if drop < 3 else "critical",
        {"factor_per_layer": factor, "drop": 10**drop, "layers": len(places), "flat": len(flat)},
        f"The gradient shrinks {factor:.2g}-fold with every layer towards the input: {name} gets {times(10**-drop)} of "
        f"what the last one gets. Call holter.replace_activations(model, (nn.Sigmoid, nn.Tanh)) for GELU in their "
        f"place, put a LayerNorm between the layers, or add a skip around every two of them.",
        "It worked if the norms of the first and of the last hidden layer are within a factor of ten.",
    )


@until_news
def _first_profile(chart: Chart) -> tuple[float, float] | None:
    names, norms = chart.first("gradient", "norm", 8)
    places = _chain(chart, names) if len(norms) >= _LAYERS and chart.depth else []
    if len(places) < _LAYERS - 1:
        return None
    found, at_first = _profile(norms[:, places]), _profile(norms[:1, places], least=1)
    was_there = found is not None and (at_first is None or at_first[0] > 0.5 * found[0])
    return found if was_there else None


def _chain(chart: Chart, names: tuple[str, ...]) -> list[int]:
    """Places of the hidden matrices up to the first that reads what the first one reads, as a critic does beside its
    actor: no layer puts out so many numbers, or, where none reads all of them, 2 to 4 times as many for gates (GLU,
    GRU, LSTM)."""
    places = list(hidden_matrices(chart, names))
    read = [channels_read(chart, names[place]) for place in places]
    put_out: set[float] = {units(chart, names[place]) for place in places}
    put_out |= {count / gates for count in put_out - set(read) for gates in (2, 3, 4)}
    put_out.add(1)  # depthwise: of how many channels, its shape does not tell
    again = [at for at, count in enumerate(read) if at and count == read[0] and count not in put_out]
    return places[: again[0]] if again else places


def _profile(norms: Floats, least: int = 3) -> tuple[float, float] | None:
    """Powers of ten between the first and the last layer of a straight line through them, and how straight it is."""
    known = (norms > 0).all(axis=1)
    if known.sum() < least:
        return None
    sizes = logs(median(norms[known]))
    places = np.arange(len(sizes)) - (len(sizes) - 1) / 2
    slope = float(places @ (sizes - sizes.mean()) / (places @ places))
    spread = float(np.std(sizes) * np.std(places))
    straight = float(np.mean(places * (sizes - sizes.mean())) / spread) if spread > 0 else 0.0
    # Two parts of a model, or a first layer whose inputs are small, make one step that is most of it.
    drops = np.diff(sizes)
    is_even = bool(drops.max() <= (1 / len(drops) + _UNEVEN) * (sizes[-1] - sizes[0]))
    return slope * (len(sizes) - 1), straight if is_even else 0.0


RULES = (initialisation, symmetric, vanishing)
