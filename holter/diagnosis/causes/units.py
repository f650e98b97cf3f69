"""End states of units: dead, at the bounds of their activation, or all saying the same. Anything may have led there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from holter.diagnosis.anatomy import ROOT, began, elements, is_upstream, is_within, output_matrix, owner
from holter.diagnosis.chart import Chart, last_of, until_news
from holter.diagnosis.evidence import most_zeros, moved_far
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Flags, Floats, Series, known_median, logs, median, overall_median
from holter.words import number, share

# A small batch leaves many a healthy unit at zero: one look must show more than looks that agree on the units.
_DEAD_AT_ONCE, _DEAD_LASTING, _ALL = 0.9, 0.65, 0.95
_VARIES, _LOOKS = 0.2, 5  # of the values of units that are not dead, that are zero where examples differ; at looks
_RISES = ("loss", "gradient_norm", "gradient/norm", "update/ratio", "batch/std", "batch/abs_max")  # what may kill
_STEPS = 8  # for which the gradient of a bias must have been zero for so many units
_UNITS = 4  # values: with fewer, a share of zeros says little of the units of a layer
_PASSED = 0.5  # of the units called dead: with fewer zeros than that in their gradient, they do learn
_COME_DOWN = 0.3  # of the loss when they died
_SATURATED, _MOSTLY = 0.8, 0.5
_TAUGHT = 0.25  # of the gradient before
# Powers of ten by which rank and spread must have fallen together, and each of them; and how low they must be by now.
_FELL, _BOTH, _RANK, _SPREAD = 0.5, 0.15, 3.0, 0.35
_MOVED = 1.5  # times its usual number of examples, between looks: an expert has as many as it is given
_MASSIVE = 30.0  # times the rms: one such value makes a rank of one, and is healthy


# Dead -----------------------------------------------------------------------------------------------------------


def dead_units(case: Case) -> Iterator[Suspicion]:
    """dead-relu: units that are zero for the whole batch; seen at a look, or in the gradient of their bias."""
    looked = _dead_at_look(case) if _most_dead(case.chart) >= _DEAD_LASTING else None
    if looked is not None:
        yield looked
        return
    felt = _dead_by_gradient(case)
    if felt is not None:
        yield felt


@until_news
def _most_dead(chart: Chart) -> float:
    return float(np.fmax.reduce(last_of(chart.table("activation", "dead")), initial=0.0))


def _dead_at_look(case: Case) -> Suspicion | None:
    chart = case.chart
    dead = chart.table("activation", "dead")
    now = last_of(dead)
    candidates = np.flatnonzero(now >= _DEAD_LASTING)
    lasting, zeros = last_of(chart.table("activation", "dead_lasting")), chart.table("activation", "zero_share")
    if len(lasting) != len(now) or zeros.names != dead.names:
        return None
    varies = median(zeros.values[-_LOOKS:] - dead.values[-_LOOKS:]) > _VARIES * (1 - median(dead.values[-_LOOKS:]))
    on_purpose = _zero_on_purpose(chart, dead, int(dead.steps[-1]))
    for place in candidates.tolist():  # in the order in which they finished
        is_most = now[place] >= _DEAD_AT_ONCE or lasting[place] >= _DEAD_LASTING
        # Where the other units are hardly ever zero the batch is a single example, or examples that are nearly alike,
        # for which any unit is zero or not.
        is_known = now[place] >= _ALL or varies[place]
        if is_most and is_known and dead.names[place] not in on_purpose:
            layer = _layer_before(chart, dead.names, place)
            if _has_gradient(chart, layer, int(dead.steps[-1]), float(now[place])) is not False:
                continue
            since = _since(case, dead, place, dead.values[:, place] >= _DEAD_LASTING, layer)
            return _dead(case, layer, dead.names[place], float(now[place]), since)
    return None


def _has_gradient(chart: Chart, layer: str, look: int, part: float) -> bool | None:
    """Return whether the units of a layer learn, though this part of them was zero at a look; None: not known yet.

    A unit that is zero for every example gives its weights no gradient. Zeros of units that learn are those of the
    first of many calls (a spiking network), of a function with a slope at zero, or of what this layer does not feed.
    The first step does not tell: behind a factor that starts at zero no layer has a gradient there.
    """
    zeros = chart.table("gradient", "zero_share")
    places = _of_units(chart, zeros.names, layer)
    if not places:
        return False
    values = zeros.since(max(look, chart.first_step + 1))[-_STEPS:, places]
    if not len(values):
        return None
    shares = np.fmax.reduce(values, axis=1)
    return bool(known_median(shares) < _PASSED * part)


def _of_units(chart: Chart, names: Sequence[str], layer: str) -> list[int]:
    """Return the places of the parameters with a line for each unit of a layer: vectors, or matrices without them.

    Of a module with no layer before it, whose weights are not known, those of the modules that hold it.
    """
    held = {owner(name) for name in chart.parameters}
    owners = {layer} if layer in held else {name for name in held if is_within(layer, name)}
    own = [place for place, name in enumerate(names) if owner(name) in owners and elements(chart, [name]) >= _UNITS]
    return [place for place in own if len(chart.shape(names[place])) == 1] or own


def _zero_on_purpose(chart: Chart, dead: Series, step: int) -> set[str]:
    """Modules that are zero because their weights are (LoRA's B, the last gain of a residual branch), or because they
    are given zeros (queries that start empty): weights that are not zero make something of anything else. And what
    only passes that on."""
    norms = chart.table("weight", "norm")
    zero_weights: set[str] = set()
    alive: set[str] = set()
    if len(norms):
        row = norms.values[max(int(np.searchsorted(norms.steps, step, side="right")) - 1, 0)]
        for name, norm in zip(norms.names, row.tolist(), strict=True):
            if not name.endswith("bias"):
                (zero_weights if norm == 0 else alive).add(owner(name) or ROOT)
    zero: set[str] = set()
    before = ""
    for place, module in enumerate(dead.names):
        has_weights = module in zero_weights or module in alive
        passes_on = not has_weights and before in zero and dead.values[-1, place] == 1
        is_given_none = module in alive and dead.values[-1, place] == 1
        if passes_on or is_given_none or (module in zero_weights and module not in alive):
            zero.add(module)
        before = module
    return zero


def _dead_by_gradient(case: Case) -> Suspicion | None:
    """A unit that is zero for the whole batch gives its bias no gradient; seen at every step."""
    chart = case.chart
    if most_zeros(chart) < _DEAD_LASTING:
        return None
    zeros = chart.table("gradient", "zero_share")
    if len(zeros) < _STEPS:
        return None
    recent = zeros.values[-_STEPS:]
    flagged = np.flatnonzero((recent >= _DEAD_LASTING).all(axis=0))
    if not len(flagged):
        return None
    places = [p for p in flagged.tolist() if _is_of_units(chart, zeros.names[p])]
    full = [p for p in places if (recent[:, p] == 1).all()]
    if full:  # nothing gets through: all that comes before the dead ones has no gradient either
        return _fully_dead(case, zeros, full)
    for place in sorted(places, key=lambda p: chart.depth.get(zeros.names[p], len(chart.depth))):
        column = zeros.values[:, place]
        since = began(zeros.steps, column >= _DEAD_LASTING)
        was = zeros.before(since or 0, most=32)[:, place]
        rose = len(was) < 4 or float(median(was[:, None])[0]) < 0.5 * overall_median(recent[:, place])
        part = overall_median(recent[:, place])
        is_steady = rose and part >= _DEAD_AT_ONCE and np.std(recent[:, place]) < 0.1
        if since is not None and is_steady and not _looks_alive(case, since, owner(zeros.names[place])):
            return _dead(case, owner(zeros.names[place]), zeros.names[place], part, since)
    return None


def _is_of_units(chart: Chart, name: str) -> bool:
    shape = chart.shape(name)
    # A recurrent unit is a tanh: without a gradient it is at a bound, not at zero.
    return len(shape) == 1 and shape[0] >= 4 and chart.part(name) not in ("embedding", "output", "recurrent")


def _fully_dead(case: Case, zeros: Series, places: list[int]) -> Suspicion | None:
    """Every value of the gradient is zero up to some layer, and from the next on it is not: that one's units are dead.

    Of a mixture of experts an idle one has no gradient either, but what comes before it has.
    """
    chart = case.chart
    norms = last_of(chart.table("gradient", "norm"))
    if not chart.depth or len(norms) != len(zeros.names):
        return None
    learning = [name for name, norm in zip(zeros.names, norms.tolist(), strict=True) if norm > 0]
    names = [zeros.names[p] for p in places]
    first_alive = min((chart.depth.get(name, len(chart.depth)) for name in learning), default=0)
    if not learning or not is_upstream(chart, names, learning):
        return None
    silent = [n for n, z in zip(zeros.names, zeros.values[-1].tolist(), strict=True) if z == 1]
    last = max(names, key=lambda name: chart.depth.get(name, -1))
    since = began(zeros.steps, zeros.values[:, zeros.names.index(last)] == 1)
    if (
        since is None
        or any(chart.depth.get(name, -1) > first_alive for name in silent)
        or _looks_alive(case, since, owner(last))
    ):
        return None
    return _dead(case, owner(last), last, 1.0, since)


def _looks_alive(case: Case, since: int, layer: str) -> bool:
    """Whether a look since then showed no dead unit, or none in the activation of this layer where that is a module:
    then something else keeps the gradient away, such as dropout."""
    dead = case.chart.table("activation", "dead")
    if not len(dead) or dead.steps[-1] < since:
        return False
    after = dead.names.index(layer) + 1 if layer in dead.names else len(dead.names)
    has_weights = {owner(name) for name in case.chart.parameters}
    if after < len(dead.names) and not any(is_within(held, dead.names[after]) for held in has_weights):
        return bool(dead.values[-1, after] < _DEAD_LASTING)
    return bool(np.fmax.reduce(dead.values[-1]) < _DEAD_LASTING)


def _dead(case: Case, layer: str, seen_at: str, part: float, since: int) -> Suspicion:
    """An end state, unless all died at once and nothing went before that: then there is nothing else to look for."""
    rises = [e for name in _RISES for e in case.events.of(name, direction=1, since=since - 20) if e.since < since]
    is_first = part >= 0.9 and not rises and not moved_far(case.chart, since)
    return Suspicion(
        "dead-relu",
        "layer",
        since,
        0.95 if is_first else 0.85 if part >= 0.9 else 0.65,
        Kind.PATTERN if is_first else Kind.STATE,
        layer,
        _severity(case.chart, part, since),
        {"dead": part, "seen_at": seen_at},
        f"{share(part)} of the units of {layer} are zero for every example, so nothing can change them: call "
        f"holter.replace_activations(model, new=lambda: nn.LeakyReLU(0.1)), start {layer}'s bias at 0, and lower the "
        f"rate if they died during training.",
        "It worked if fewer than 10 % of its units are dead after 100 steps.",
    )


def _severity(chart: Chart, part: float, since: int) -> str:
    """A note where the units that are left are enough: a few of many that cost no loss, or most, where it has come far
    down since."""
    losses = chart.scalar("loss")
    was, now = overall_median(losses.before(since, _STEPS)[:, 0]), overall_median(losses.values[-_STEPS:, 0])
    is_enough = part < 1 and min(was, now) > 0 and now < _COME_DOWN * was
    if part < _DEAD_AT_ONCE:
        return "info" if is_enough or not now > was else "warning"
    return "info" if is_enough else "critical"


def _layer_before(chart: Chart, modules: Sequence[str], place: int) -> str:
    """The layer with weights whose units these are: the last one to finish before, or the module itself."""
    with_weights = {owner(name) for name in chart.parameters}
    for module in reversed(modules[: place + 1]):
        if module in with_weights:
            return module
    return modules[place]


def _since(case: Case, looks: Series, place: int, holds: Flags, layer: str | None = None) -> int:
    """When it began: between the last look at which it did not hold and the first at which it did, at the
    largest departure of a gradient or the loss; without one, at the look, so that no cause seems to have come later."""
    found = began(looks.steps, holds)
    first = case.step if found is None else found
    earlier = looks.steps[looks.steps < first]
    if not len(earlier):
        return first if first - case.chart.first_step > 2 else case.chart.first_step
    before = int(earlier[-1])
    felt = _felt_since(case.chart, layer) if layer is not None else None
    if felt is not None and before < felt <= first:
        return felt
    found_events = [e for name in ("gradient/norm", "loss") for e in case.events.of(name, since=before + 1)]
    left = [(abs(np.log(max(e.factor, 1e-30))), e.since) for e in found_events if e.since <= first]
    return max(left)[1] if left else first


def _felt_since(chart: Chart, layer: str) -> int | None:
    """Since when most units of a layer have had no gradient."""
    zeros = chart.table("gradient", "zero_share")
    places = [p for p, name in enumerate(zeros.names) if owner(name) == layer and len(chart.shape(name)) == 1]
    if not places:
        return None
    return began(zeros.steps, zeros.values[:, places[-1]] >= _DEAD_LASTING)


# Saturated ------------------------------------------------------------------------------------------------------


def saturated(case: Case) -> Iterator[Suspicion]:
    """saturated-activation: most values are at the bounds, where the slope is zero. The model's output may be there."""
    chart = case.chart
    shares = chart.table("activation", "saturated")
    now = last_of(shares)
    candidates = np.flatnonzero(now >= _MOSTLY)
    if not len(candidates):
        return
    sizes, means = (last_of(chart.table("activation", name)) for name in ("rms", "mean"))
    for place in candidates.tolist():
        # Below the higher limit only what is at both bounds of a tanh counts: a gate may well be open or shut.
        is_centred = len(sizes) == len(means) == len(now) and abs(means[place]) < 0.5 * sizes[place] >= 0.35
        is_most = now[place] >= _SATURATED or is_centred
        if not is_most or place == len(now) - 1:
            continue
        name = shares.names[place]
        layer = _layer_before(chart, shares.names, place)
        since = _since(case, shares, place, shares.values[:, place] >= _MOSTLY)
        yield Suspicion(
            "saturated-activation",
            "layer",
            since,
            0.85 if now[place] >= _SATURATED else 0.65,
            Kind.STATE,
            name,
            "info" if _is_still_taught(chart, layer, since) else "warning",
            {"saturated": float(now[place]), "layer_before": layer},
            f"{share(float(now[place]))} of the values of {name} are at its bounds, where it passes no gradient: put "
            f"a LayerNorm before it, scale {layer} down (holter.init_weights starts it right), or call "
            f"holter.replace_activations(model, (nn.Tanh, nn.Sigmoid)).",
            "It worked if fewer than 20 % of its values are at the bounds.",
        )
        return


def _is_still_taught(chart: Chart, layer: str, since: int) -> bool:
    """Whether what comes before still gets a good part of the gradient that it got before the values were at their
    bounds: a critic's last layer may have to be there."""
    norms = chart.table("gradient", "norm")
    places = [place for place, name in enumerate(norms.names) if owner(name) == layer and chart.is_matrix(name)]
    before = norms.before(since, 32)[:, places]
    if len(before) < _STEPS or not places:
        return False
    return bool((median(norms.values[-_STEPS:, places]) > _TAUGHT * median(before)).all())


# Collapsed ------------------------------------------------------------------------------------------------------


def collapsed(case: Case) -> Iterator[Suspicion]:
    """representation-collapse: what told examples apart has gone, from one look to the next, and stays away.

    Most layers lose rank in their first steps, which is healthy: the first look is no past. A layer's own rank and the
    share that varies between examples must both have fallen since.
    """
    chart = case.chart
    ranks, spreads = chart.table("activation", "rank"), chart.table("activation", "spread")
    if len(ranks) < 4 or spreads.names != ranks.names or case.step - ranks.steps[-1] > 20:
        return
    if ranks.steps[-1] - ranks.steps[-2] < 10 and len(ranks) < 8:
        return
    with np.errstate(all="ignore"):
        now = [logs(np.fmax.reduce(series.values[-2:])) for series in (ranks, spreads)]
        past = [logs(median(_settled(series))) for series in (ranks, spreads)]
        fell = [before - after for before, after in zip(past, now, strict=True)]
        both = np.where(np.minimum(*fell) >= _BOTH, fell[0] + fell[1], 0.0)
    output = output_matrix(chart)
    # A model needs no more directions than it has outputs: a single value is told by one.
    most = _RANK if output is None else min(_RANK, chart.shape(output)[0] / 2)
    both[(now[0] > np.log10(most)) | (now[0] < np.log10(0.5)) | (now[1] > np.log10(_SPREAD)) | ~np.isfinite(both)] = 0
    place = int(both.argmax())
    if both[place] < _FELL or (output is not None and ranks.names[place] == owner(output)):
        return
    if _is_dead_or_massive(chart, place, len(both)):
        return
    half_way = (past[0][place] + now[0][place]) / 2
    since = _since(case, ranks, place, logs(ranks.values[:, place]) <= half_way)
    numbers = [float(10 ** values[place]) for values in (now[0], past[0], now[1], past[1])]
    yield _collapse(ranks.names[place], since, *numbers)


def _settled(series: Series) -> Floats:
    """The looks after the first few steps and before the last two."""
    late = series.steps[1:-2] - series.opening_steps[0] >= min(20, int(series.steps[-3] - series.opening_steps[0]))
    chosen: Floats = series.values[1:-2][late][-16:]
    return chosen


def _is_dead_or_massive(chart: Chart, place: int, count: int) -> bool:
    dead, largest, size = (last_of(chart.table("activation", name)) for name in ("dead", "abs_max", "rms"))
    if not len(dead) == len(largest) == len(size) == count:
        return False
    counts = chart.table("activation", "count").values[:, place]
    varies = len(counts) > 0 and not np.fmax.reduce(counts) <= _MOVED * np.fmin.reduce(counts)
    return bool(varies or dead[place] >= _ALL or largest[place] > _MASSIVE * size[place])


def _collapse(name: str, since: int, rank: float, was_rank: float, spread: float, was_spread: float) -> Suspicion:
    return Suspicion(
        "representation-collapse",
        "layer",
        since,
        0.8,
        Kind.STATE,
        name,
        "critical",
        {"rank": rank, "rank_before": was_rank, "spread": spread, "spread_before": was_spread},
        f"What {name} puts out has an effective rank of {number(rank)}, {number(was_rank)} before, and "
        f"{share(spread)} of it differs between examples: put a LayerNorm or BatchNorm before it and lower the rate; "
        f"with a loss of similarity alone, add a term that keeps examples apart or a stop-gradient.",
        "It worked if the effective rank climbs back within a few hundred steps.",
    )


RULES = (dead_units, saturated, collapsed)
