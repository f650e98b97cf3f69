"""What grows or wavers for too long: attention logits, output logits, residual streams, norms over too few examples."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from holter.diagnosis.anatomy import elements, fan_in, is_within, output_matrix, owner
from holter.diagnosis.causes.batches import label_entropies, targets_of
from holter.diagnosis.chart import Chart, until_news
from holter.diagnosis.evidence import matrices
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Floats, Integers, logs, median, overall_median
from holter.words import number, times

_FEW_EXAMPLES = 8  # below this, mean and variance of a batch say little about the next one
_WAVERS = 0.15  # powers of ten, from step to step
_STEPS = 12
_THIN = 0.8  # of the weights
_LOOKS = 5  # at updates, at each of which a weight must have grown
_CLIMBED, _AMPLIFIES = 1.6, 1.3  # times as large as at the start of its climb; and a gain that makes a signal larger
_SHARP = 50.0  # of a logit: the share of the next key is below 1e-20
_DRIFT = 4.0  # nats
_QUERY_OR_KEY = re.compile(r"(^|[._])(in_proj|qkv|query_key_value|c_attn|q|k|query|key|to_q|to_k|to_qkv|wq|wk)([._]|$)")


# Norms over few examples ------------------------------------------------------------------------------------------


def norm_batch(case: Case) -> Iterator[Suspicion]:
    """norm-batch-too-small: batch norm over a handful of examples, and gradients that waver from batch to batch."""
    chart = case.chart
    sizes = chart.table("batch", "size") if chart.has("batch") else chart.scalar("batch/size")
    if len(sizes) < _STEPS or not np.fmax.reduce(sizes.values[-1]) <= _FEW_EXAMPLES:
        return
    norms = chart.table("gradient", "norm")
    places = [place for place, name in enumerate(norms.names) if _is_batch_norm(chart, name)]
    if not places or len(norms) < _STEPS or _is_thinned(chart):
        return
    with np.errstate(all="ignore"):
        batches = np.fmax.reduce(sizes.values, axis=1)
        steps_apart = np.diff(logs(norms.values[-2 * _STEPS :, places]), axis=0)
        around = np.abs(steps_apart - median(steps_apart))
        wavers = float(median(1.05 * median(around)[:, None])[0])  # 1.48 for a bell, less sqrt(2) for a difference
    small = np.flatnonzero(batches > _FEW_EXAMPLES)
    since = chart.first_step if not len(small) else int(sizes.steps[min(small[-1] + 1, len(sizes.steps) - 1)])
    limit = _WAVERS if np.fmax.reduce(batches[-_STEPS:]) > _FEW_EXAMPLES / 2 else _WAVERS / 2
    if case.step - since < _STEPS or not wavers >= limit:
        return
    name = chart.in_depth([norms.names[place] for place in places])[0]
    batch = int(batches[-1])
    yield Suspicion(
        "norm-batch-too-small",
        "layer",
        since,
        0.95 if batch <= 4 else 0.65,
        Kind.FACT,
        owner(name),
        "warning",
        {"batch": batch, "wavers": 10**wavers, "norms": len({owner(norms.names[p]) for p in places})},
        f"{owner(name)} takes its mean and variance from {batch} examples, and its gradient changes "
        f"{10**wavers:.1f}-fold from batch to batch: use batches of 16 or more, or nn.GroupNorm in its place; "
        f"adding up gradients over several batches does not help it.",
        "It worked if the gradient of its weight changes less than 1.5-fold from step to step.",
    )


def _is_thinned(chart: Chart) -> bool:
    """Whether most of the output layer's weights have no gradient in a step: a dropout that leaves next to nothing
    makes all gradients waver, whatever the batch."""
    zeros, output = chart.table("gradient", "zero_share"), output_matrix(chart)
    if output not in zeros.names:
        return False
    return bool(overall_median(zeros.values[-2 * _STEPS :, zeros.names.index(output)]) > _THIN)


def _is_batch_norm(chart: Chart, name: str) -> bool:
    kind = chart.module(name)
    return "BatchNorm" in kind if kind else chart.part(name) == "norm" and ".bn" in f".{name.lower()}"


# Weights that climb -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Climb:
    """A weight whose norm grows at every look, and faster than the others'."""

    name: str
    since: int
    by: int  # the look that shows it first
    factor: float  # since then
    gain: float  # what it makes of a signal by now
    usual: float  # by how much the others have grown meanwhile


def _climbs(chart: Chart) -> Iterator[_Climb]:
    """The norms of weights are known wherever an update was looked at."""
    norms = chart.table("update", "weight_norm")
    if len(norms) < _LOOKS:
        return
    recent = logs(norms.values[-_LOOKS:])
    with np.errstate(invalid="ignore"):
        steady = np.flatnonzero((np.diff(recent, axis=0) > 0.003).all(axis=0) & (recent[-1] - recent[0] > 0.05))
    if not len(steady):
        return
    places = [place for place in matrices(chart, norms) if chart.is_matrix(norms.names[place])]
    for place in sorted(set(steady.tolist()).intersection(places)):
        name, values = norms.names[place], logs(norms.values[:, place])
        if not np.isfinite(values).all():
            continue
        gain = float(norms.values[-1, place]) * (fan_in(chart, name) / max(1, elements(chart, [name]))) ** 0.5
        start, since = _foot(norms.steps, values)
        climbed = float(values[-1] - values[start])
        if not gain > _AMPLIFIES or not climbed > np.log10(_CLIMBED):
            continue
        grown = logs(norms.values[-1, places]) - logs(norms.values[start, places])
        usual = overall_median(np.abs(grown[np.isfinite(grown)])) if len(places) > 2 else 0.0
        if climbed > 3 * usual:
            yield _Climb(name, since, int(norms.steps[start + 1]), 10**climbed, gain, 10**usual)


def _foot(steps: Integers, values: Floats) -> tuple[int, int]:
    """Where a climb began: the last look before it, and the step. Before it the increase from look to look was less
    than a third of what it became; the look in which it began shows a part of it, and so when that was."""
    rises = np.diff(values)
    place = len(rises) - 1
    while place > 0 and rises[place - 1] > 0.3 * rises[place]:
        place -= 1
    before, after = int(steps[place]), int(steps[place + 1])
    part = min(1.0, float(rises[place] / rises[place + 1])) if place + 1 < len(rises) and rises[place + 1] > 0 else 1.0
    return place, after - round(part * (after - before))


def climbing(case: Case) -> Iterator[Suspicion]:
    """attention-logit-growth and residual-growth, by the weights that make them: known long before the loss moves."""
    for climb in sorted(_climbs(case.chart), key=lambda one: (one.since, -one.factor)):
        attention = _attention_of(case.chart, climb.name)
        if attention is not None:
            yield _attention_growth(case.chart, attention, climb)
            return
        if _block_of(case.chart, climb.name) is not None:
            yield _residual_growth(case.chart, climb)
            return


def _attention_of(chart: Chart, parameter: str) -> str | None:
    """The attention whose queries or keys this weight makes."""
    if chart.part(parameter) != "attention" or not _QUERY_OR_KEY.search(parameter):
        return None
    names = chart.table("attention", "max_logit").names
    return next((name for name in names if is_within(parameter, name)), owner(parameter))


def _block_of(chart: Chart, parameter: str) -> str | None:
    """Return the innermost numbered module that holds it and is repeated with depth; None where there is none.

    A residual stream has one width, so its blocks have weights of one shape. Layers of a chain differ in theirs.
    """
    modules = owner(parameter).split(".")
    for end in range(len(modules) - 1, 0, -1):
        block = ".".join(modules[:end])
        if modules[end - 1].isdigit() and block in chart.table("activation", "rms").names:
            return block if _is_repeated(chart, parameter, block) else None
    return None


def _is_repeated(chart: Chart, parameter: str, block: str) -> bool:
    stem, within = block.rpartition(".")[0], parameter.removeprefix(block)
    prefix, shape = f"{stem}." if stem else "", chart.shape(parameter)
    siblings = (name for name in chart.parameters if name.startswith(prefix) and name.endswith(within))
    return any(
        name != parameter and name[len(prefix) : -len(within)].isdigit() and chart.shape(name) == shape
        for name in siblings
    )


def _attention_growth(chart: Chart, attention: str, climb: _Climb) -> Suspicion:
    logits, entropy = chart.table("attention", "max_logit"), chart.table("attention", "entropy")
    evidence: dict[str, object] = {"weight": climb.name, "growth": climb.factor, "others": climb.usual}
    told = ""
    if attention in logits.names:
        place = logits.names.index(attention)
        first, last = float(logits.opening[0, place]), float(logits.values[-1, place])
        evidence |= {"max_logit": last, "first_max_logit": first, "entropy": float(entropy.values[-1, place])}
        told = f", and its largest logit went from {number(first)} to {number(last)}"
    return Suspicion(
        "attention-logit-growth",
        "layer",
        climb.since,
        0.85 if climb.factor > 2.5 else 0.7,
        Kind.PATTERN,
        attention,
        "warning",
        evidence,
        f"{climb.name} has grown {climb.factor:.2g}-fold since step {climb.since:,}, the other weights "
        f"{climb.usual:.2g}-fold{told}: normalise queries and keys (an RMSNorm on each before they meet), or lower the "
        f"rate of these two weights.",
        "It worked if the largest logit stays below about 30 and the entropy of the heads stops falling.",
        by=climb.by,
    )


def _residual_growth(chart: Chart, climb: _Climb) -> Suspicion:
    layer = owner(climb.name)
    return Suspicion(
        "residual-growth",
        "layer",
        climb.since,
        0.8 if climb.factor > 2.5 else 0.65,
        Kind.PATTERN,
        layer,
        "warning",
        {"weight": climb.name, "growth": climb.factor, "gain": climb.gain, "others": climb.usual},
        f"{climb.name} has grown {climb.factor:.2g}-fold since step {climb.since:,}, the other weights "
        f"{climb.usual:.2g}-fold, and makes a signal {climb.gain:.2g} times as large: its branch takes over. "
        f"Start the last layer of every branch 1 / sqrt(number of branches) as large, put a norm before each, or "
        f"give {layer} weight decay.",
        "It worked if the outputs of the blocks keep their size from step to step.",
        by=climb.by,
    )


# What is seen at looks --------------------------------------------------------------------------------------------


def attention_at_looks(case: Case) -> Iterator[Suspicion]:
    """attention-logit-growth, by the logits themselves: far above what they were once they had settled."""
    logits = case.chart.table("attention", "max_logit")
    if len(logits) < 2:
        return
    last = logits.values[-1]
    large = np.flatnonzero(last > _SHARP)  # a softmax over such logits looks at one key only
    if not len(large):
        return
    with np.errstate(all="ignore"):
        before = median(logits.values[-8:-1][-max(1, len(logits) - 2) :])
        grown = last / np.maximum(before, 1.0)
    places = [place for place in large.tolist() if grown[place] >= 2.5 or last[place] >= 4 * _SHARP]
    if not places or logits.opening[0, places[0]] > _SHARP:
        return
    place = max(places, key=lambda p: grown[p])
    name, entropy = logits.names[place], case.chart.table("attention", "entropy")
    yield Suspicion(
        "attention-logit-growth",
        "layer",
        int(logits.steps[-2]),
        0.75,
        Kind.PATTERN,
        name,
        "warning",
        {"max_logit": float(last[place]), "before": float(before[place]), "entropy": float(entropy.values[-1, place])},
        f"The largest attention logit of {name} is {number(float(last[place]))}, {number(float(before[place]))} "
        f"at the looks before: normalise queries and keys (an RMSNorm on each before they meet), or lower their rate.",
        "It worked if the largest logit stays below about 30 and the entropy of the heads stops falling.",
        by=int(logits.steps[-1]),
    )


def residual_at_looks(case: Case) -> Iterator[Suspicion]:
    """residual-growth, by what the blocks put out: larger with every look and with every block, one of them leading."""
    chart = case.chart
    sizes = chart.table("activation", "rms")
    if len(sizes) < 3 or case.step - sizes.steps[-1] > 12:
        return
    places = _blocks_in(sizes.names)
    if len(places) < 2:
        return
    values = logs(sizes.values[:, places])
    settled, last = np.median(values[1:-1], axis=0), values[-1]
    grown = last - settled
    steps = np.diff(grown, prepend=0.0)  # what each block adds to the growth that came in
    leads = int(steps.argmax())
    if not (grown[-1] >= np.log10(3) and steps[leads] >= np.log10(2) and last[-1] - last[0] >= np.log10(3)):
        return
    name = sizes.names[places[leads]]
    yield Suspicion(
        "residual-growth",
        "layer",
        int(sizes.steps[-2]),
        0.7,
        Kind.PATTERN,
        name,
        "warning",
        {"growth": float(10 ** grown[-1]), "of_the_block": float(10 ** steps[leads])},
        f"What the last block puts out is {times(float(10 ** grown[-1]))} as large as at the looks before, and {name} "
        f"adds most of it: start the last layer of every branch 1 / sqrt(number of branches) as large, or put a norm "
        f"before each branch.",
        "It worked if the outputs of the blocks keep their size from look to look.",
        by=int(sizes.steps[-1]),
    )


def _blocks_in(names: tuple[str, ...]) -> list[int]:
    """Places of the modules that repeat with depth and are made of others."""
    inner = {name.rpartition(".")[0] for name in names}
    return [place for place, name in enumerate(names) if name in inner and name.rpartition(".")[2].isdigit()]


# Output logits ----------------------------------------------------------------------------------------------------


def logit_drift(case: Case) -> Iterator[Suspicion]:
    """output-logit-drift: all logits move together, which no cross-entropy asks for; the loss does not see it."""
    chart = case.chart
    if not _has_logits(chart):
        return
    found = _bias_drift(chart) or _mean_drift(chart)
    if found is None:
        return
    since, by, evidence, told = found
    output = output_matrix(chart)
    layer = owner(output) if output is not None else None
    yield Suspicion(
        "output-logit-drift",
        "layer",
        since,
        0.75,
        Kind.PATTERN,
        layer,
        "warning",
        evidence,
        f"{told}, which changes no prediction and in half precision costs digits: add 1e-4 x logsumexp(logits)² to the "
        f"loss (z-loss), or leave out the bias of {layer or 'the output layer'}.",
        "It worked if the mean log-sum-exp of the logits stays where it is.",
        by=by,
    )


@until_news
def _has_logits(chart: Chart) -> bool:
    """Whether the outputs are those of classes, as the targets or tokens tell: values and prices may well drift."""
    if label_entropies(chart)[1] >= 0:
        return True
    output = output_matrix(chart)
    is_number = output is not None and chart.shape(output)[0] == 1
    is_of_values = is_number or bool(targets_of(chart.table("batch", "size")))  # numbers learnt from a text
    return not is_of_values and len(chart.scalar("tokens_per_second")) > 0


_Drift = tuple[int, int, dict[str, object], str]  # since, and by which look


def _bias_drift(chart: Chart) -> _Drift | None:
    """In the bias of the output, at every look at the updates: as large in all classes, and larger every time."""
    norms = chart.table("update", "weight_norm")
    if len(norms) < _LOOKS:
        return None
    for place in _output_biases(chart, norms.names):
        name = norms.names[place]
        with np.errstate(invalid="ignore"):
            if not (np.diff(norms.values[-_LOOKS:, place]) > 0).all():
                continue
        sizes = norms.values[:, place] / chart.shape(name)[0] ** 0.5
        if not np.isfinite(sizes).all():
            continue
        start, since = _foot(norms.steps, sizes)
        if sizes[-1] - sizes[start] >= 1.5:
            moved = float(sizes[-1] - sizes[start])
            told = f"The output's bias has moved by {moved:.2g} in every class since step {since:,}"
            return since, int(norms.steps[start + 1]), {"bias": float(sizes[-1]), "moved": moved}, told
    return None


@until_news
def _output_biases(chart: Chart, names: tuple[str, ...]) -> list[int]:
    return [p for p, name in enumerate(names) if chart.part(name) == "output" and len(chart.shape(name)) == 1]


def _mean_drift(chart: Chart) -> _Drift | None:
    means, sums = chart.scalar("logit_mean"), chart.scalar("logit_log_sum_exp")
    if len(means) < 3 or len(sums) != len(means):
        return None
    mean, total, steps = means.values[:, 0], sums.values[:, 0], means.steps
    # Together: what learning does to the logits moves mean and log-sum-exp apart.
    moves = np.sign(np.diff(mean)) * np.minimum(np.abs(np.diff(mean)), np.abs(np.diff(total)))
    moves[np.sign(np.diff(mean)) != np.sign(np.diff(total))] = 0
    place = len(moves)
    while place > 0 and moves[place - 1] * moves[-1] > 0:
        place -= 1
    while place < len(moves) and abs(moves[place]) < 0.25 * np.abs(moves[place:]).max():
        place += 1
    moved = float(moves[place:].sum())
    if len(moves) - place < 2 or abs(moved) < _DRIFT:
        return None
    told = f"The mean logit has moved by {number(moved)} since step {int(steps[place]):,}, and the log-sum-exp with it"
    evidence: dict[str, object] = {"mean": float(mean[-1]), "log_sum_exp": float(total[-1]), "moved": moved}
    return int(steps[place]), int(steps[place + 1]), evidence, told


RULES = (norm_batch, climbing, attention_at_looks, residual_at_looks, logit_drift)
