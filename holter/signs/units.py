"""Signs in what layers put out: dead units, saturated values, attention that has made up its mind."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from holter.signs.sign import Evidence, Look, Sign, since_words, trailing
from holter.words import number, share_range

# A small batch may leave many a healthy unit at zero: one look must show more than looks that agree on the units.
DEAD_AT_ONCE, DEAD_LASTING = 0.75, 0.5
ALL_DEAD = 0.95
SATURATED = 0.8
COLLAPSED_ENTROPY, COLLAPSED_LOGIT = 0.1, 50.0  # nats; a logit that a sequence of one token need not have
LARGE_LOGIT, LOGIT_GROWTH = 100.0, 3.0


def dead_units(evidence: Evidence) -> Iterator[Sign]:
    """Layers most of whose units are zero for the whole batch, unless their weights are still zero on purpose."""
    lasting, zeros = evidence.last("activation", "dead_lasting"), evidence.last("activation", "zero_share")
    zero_for_now = _zero_on_purpose(evidence)
    found: dict[int, dict[str, float]] = {}
    for look in evidence.looks("activation", "dead"):
        dead = float(look.values[-1])
        is_most = dead >= DEAD_AT_ONCE or lasting.get(look.layer, 0.0) >= DEAD_LASTING
        # Where the other units are never zero the batch is a single example, for which any unit is zero or not.
        is_known = dead >= ALL_DEAD or zeros[look.layer] - dead > 1e-6
        since = trailing(look.steps, look.values >= DEAD_LASTING)
        if since is not None and is_most and is_known and look.layer not in zero_for_now:
            found.setdefault(since, {})[look.layer] = dead
    for since, layers in found.items():
        words = "of its units are dead" if len(layers) == 1 else "of their units are dead"
        yield _of_shares(evidence, "dead", f"{words} (zero for the whole batch)", since, layers)


def _zero_on_purpose(evidence: Evidence) -> set[str]:
    """Layers that are zero because their weights are (LoRA's B, the last gain of a residual branch), and what only
    passes that on."""
    norms: dict[str, list[Look]] = {}
    for weight in evidence.looks("weight", "norm"):
        owner, _, name = weight.layer.rpartition(".")
        if name != "bias":
            norms.setdefault(owner, []).append(weight)
    zero: set[str] = set()
    before = ""
    for look in evidence.looks("activation", "dead"):
        own = norms.get(look.layer)
        passes_on = not own and before in zero and look.values[-1] == 1
        if passes_on or (own and all(_at(weight, int(look.steps[-1])) == 0 for weight in own)):
            zero.add(look.layer)
        before = look.layer
    return zero


def _at(look: Look, step: int) -> float:
    """The value that was last known at this step, or the first one."""
    return float(look.values[max(int(np.searchsorted(look.steps, step, side="right")) - 1, 0)])


def saturated_values(evidence: Evidence) -> Iterator[Sign]:
    """Bounded activations most of whose values are at a bound; the model's own output may well be there."""
    looks = list(evidence.looks("activation", "saturated"))
    order = evidence.history.layers("activation")
    found: dict[int, dict[str, float]] = {}
    for look in looks:
        since = trailing(look.steps, look.values >= SATURATED)
        if since is not None and look.layer != order[-1]:
            found.setdefault(since, {})[look.layer] = float(look.values[-1])
    for since, layers in found.items():
        words = "of its values are at a bound" if len(layers) == 1 else "of their values are at a bound"
        yield _of_shares(evidence, "saturated", words, since, layers)


def _of_shares(evidence: Evidence, kind: str, words: str, since: int, shares: Mapping[str, float]) -> Sign:
    layers = evidence.in_depth(shares)
    text = f"{evidence.names(layers)}: {share_range(shares.values())} {words}{since_words(since)}"
    return Sign(kind, text, layers, since, max(shares.values()))


def attention_at_its_limit(evidence: Evidence) -> Iterator[Sign]:
    """Every query looks at one key only, or logits that grow without bound."""
    entropy = evidence.last("attention", "entropy")
    for look in evidence.looks("attention", "max_logit"):
        first, last = float(look.values[0]), float(look.values[-1])
        sharp = entropy.get(look.layer, np.inf)
        is_collapsed = last >= COLLAPSED_LOGIT and sharp <= COLLAPSED_ENTROPY
        if is_collapsed or (last >= LARGE_LOGIT and last >= LOGIT_GROWTH * first):
            grown = f", {number(first)} at first" if len(look.values) > 1 else ""
            spread = f", entropy {number(sharp)} nats" if np.isfinite(sharp) else ""
            text = f"{evidence.names([look.layer])}: largest attention logit {number(last)}{grown}{spread}"
            yield Sign("attention", text, (look.layer,), None, last)
