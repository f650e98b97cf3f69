"""Signs of layers that do not learn: frozen, held by no optimizer, without a gradient, or never changed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from holter.signs.sign import Evidence, Floats, Level, Look, Sign, since_words, trailing
from holter.words import share_range

FEW_STEPS = 3  # a layer may be left out of a step by chance, as with stochastic depth
ZERO_STEPS = 5  # in a row: what starts behind a zero (LoRA's A) has its gradient after one step or two
FEW_VALUES = 20.0  # of a sample that must have had a gradient, before their rest says anything
SAMPLED = 4096.0  # values of a layer of which is known whether they changed
LOST = 0.5  # the share of values that should have changed and did not


@dataclass(frozen=True)
class _Standing:
    """How a layer stands in the training, as last known; `held` is None where nobody has said."""

    layer: str
    requires_grad: bool
    held: bool | None
    frozen_since: int | None


def not_learning(evidence: Evidence) -> Iterator[Sign]:
    """Layers that cannot learn, by what torch and the optimizers say of them."""
    changed = _changed_norms(evidence)
    groups: dict[tuple[str, int | None], list[str]] = {}
    for one in _standings(evidence):
        if not one.requires_grad:
            groups.setdefault(("held" if one.held else "frozen", one.frozen_since), []).append(one.layer)
        elif one.held is False:
            groups.setdefault(("moved" if one.layer in changed else "not held", None), []).append(one.layer)
    for (standing, since), layers in groups.items():
        yield _unlearning(evidence, standing, since, evidence.in_depth(layers))


def _unlearning(evidence: Evidence, standing: str, since: int | None, layers: tuple[str, ...]) -> Sign:
    it, requires = ("it", "it requires") if len(layers) == 1 else ("them", "they require")
    kind, words = {
        "held": ("frozen", f"frozen, requires_grad is off though an optimizer holds {it}"),
        "frozen": ("frozen", "frozen, requires_grad is off"),
        "not held": ("not held", f"not held by any optimizer though {requires} a gradient"),
        "moved": ("not held", f"not held by any optimizer, yet something changes {it}"),
    }[standing]
    text = f"{evidence.names(layers)}: {words}{since_words(since) if since else ''}"
    level: Level = "info" if standing in ("frozen", "moved") else "warning"
    return Sign(kind, text, layers, since, float(len(layers)), level)


def _standings(evidence: Evidence) -> Iterator[_Standing]:
    wanted = {look.layer: look for look in evidence.looks("weight", "requires_grad")}
    held = evidence.last("weight", "held")
    for name, told in evidence.parameters.items():
        look = wanted.get(name)
        if told.get("selected") is False:  # the user does not want to hear of it
            continue
        if look is None:
            yield _Standing(name, told.get("trained") is not False, _known(held, name), None)
        else:
            since = trailing(look.steps, look.values == 0)
            yield _Standing(name, bool(look.values[-1]), _known(held, name), since)


def _known(values: Mapping[str, float], name: str) -> bool | None:
    return bool(values[name]) if name in values else None


def _changed_norms(evidence: Evidence) -> set[str]:
    return {look.layer for look in evidence.looks("weight", "norm") if len(np.unique(look.values)) > 1}


def without_gradient(evidence: Evidence) -> Iterator[Sign]:
    """Layers that should have a gradient and never had one while others did, or whose gradient is exactly zero."""
    measured, with_gradient, _ = evidence.history.series("gradient", "norm")
    if len(measured) >= FEW_STEPS:
        missing = [
            one.layer
            for one in _standings(evidence)
            if one.requires_grad and one.held is not False and one.layer not in with_gradient
        ]
        yield from _never(evidence, missing, len(with_gradient))
    yield from _exactly_zero(evidence)


def _never(evidence: Evidence, missing: Sequence[str], others: int) -> Iterator[Sign]:
    """An expert without work has no gradient either: whether a layer was used is seen in the modules that ran."""
    ran = {*evidence.history.depth, *evidence.history.layers("activation")}
    used = evidence.in_depth(layer for layer in missing if not ran or _owner(layer) in ran)
    unused = tuple(layer for layer in missing if ran and _owner(layer) not in ran)
    if used:
        why = "detached?" if ran else "detached, or not used?"
        have = f"{others:,} other layer{'s have' if others > 1 else ' has'}"
        text = f"{evidence.names(used)}: no gradient at all while {have} one ({why})"
        yield Sign("no gradient", text, used, None, float(len(used)))
    if unused:
        text = f"{evidence.names(unused)}: no gradient, and not part of a forward that was looked at"
        yield Sign("no gradient", text, unused, None, float(len(unused)), "info")


def _owner(parameter: str) -> str:
    """The module whose parameter it is; a parametrised weight belongs to the module that uses it."""
    module, is_parametrised, _ = parameter.partition(".parametrizations.")
    return module if is_parametrised else parameter.rpartition(".")[0]


def _exactly_zero(evidence: Evidence) -> Iterator[Sign]:
    found: dict[int, list[str]] = {}
    for look in evidence.looks("gradient", "full_norm"):  # NaN where a value is
        since = trailing(look.steps, look.values == 0)
        if since is not None and int((look.steps >= since).sum()) >= ZERO_STEPS:
            found.setdefault(since, []).append(look.layer)
    for since, layers in found.items():
        ordered = evidence.in_depth(layers)
        text = f"{evidence.names(ordered)}: the gradient is exactly zero{since_words(since)}"
        yield Sign("no gradient", text, ordered, since, float(len(layers)))


def unchanged_weights(evidence: Evidence) -> Iterator[Sign]:
    """Weights whose bits stay though their layer has a gradient and a rate: lost in rounding, or never written."""
    zeros = {look.layer: look for look in evidence.looks("gradient", "zero_share")}
    planned = {look.layer: look for look in evidence.looks("update", "planned_ratio")}
    sizes = evidence.last("weight", "count")
    never, lost = [], {}
    for look in evidence.looks("update", "unchanged"):
        layer = look.layer
        if layer not in zeros or layer not in planned:
            continue
        stayed = _that_should_have_changed(look, planned[layer])
        zero = float(np.median(zeros[layer].values))
        if not len(stayed) or (1 - zero) * min(sizes.get(layer, SAMPLED), SAMPLED) < FEW_VALUES:
            continue
        # What has no gradient may stay as it is: rows of an embedding that the batch does not use.
        beyond = (float(np.median(stayed)) - zero) / (1 - zero)
        if (stayed == 1).all():
            never.append(layer)
        elif beyond >= LOST:
            lost[layer] = beyond
    if never:
        ordered = evidence.in_depth(never)
        its = "its bits never changed though it has" if len(never) == 1 else "their bits never changed though they have"
        yield Sign("unchanged", f"{evidence.names(ordered)}: {its} a gradient", ordered, None, 1.0)
    if lost:
        ordered, worst = evidence.in_depth(lost), max(lost.values())
        part = f"{share_range(lost.values())}{', by layer,' if len(lost) > 1 else ''}"
        text = (
            f"{evidence.names(ordered)}: in the median {part} of the weights with a gradient keep their bits at a step"
        )
        yield Sign("unchanged", f"{text}: updates are lost in rounding", ordered, None, worst)


def _that_should_have_changed(unchanged: Look, planned: Look) -> Floats:
    """The unchanged share at the steps that had a gradient and a rate: a warm-up begins with a rate of zero."""
    at = dict(zip(planned.steps.tolist(), planned.values.tolist(), strict=True))
    moving = [at.get(step, 0.0) > 0 for step in unchanged.steps.tolist()]
    kept: Floats = unchanged.values[np.array(moving, dtype=bool)]
    return kept
