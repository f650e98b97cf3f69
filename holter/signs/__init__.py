"""What is odd about a run, with its numbers: observations, not a diagnosis. Pure, numpy only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holter.history import History
from holter.signs.batches import repeated_batches
from holter.signs.learning import not_learning, unchanged_weights, without_gradient
from holter.signs.losses import risen_loss
from holter.signs.precision import near_overflow, not_finite, skipped_steps, underflow
from holter.signs.sign import Evidence, Search, Sign
from holter.signs.units import attention_at_its_limit, dead_units, saturated_values

__all__ = ["Sign", "signs_of"]

# The worst first; of one search, the signs come as it finds them.
SEARCHES: tuple[Search, ...] = (
    not_finite,
    risen_loss,
    skipped_steps,
    underflow,
    near_overflow,
    dead_units,
    saturated_values,
    without_gradient,
    not_learning,
    unchanged_weights,
    repeated_batches,
    attention_at_its_limit,
)


def signs_of(history: History, layers: tuple[Mapping[str, Any], ...] = ()) -> tuple[Sign, ...]:
    """The signs in one line of training; `layers` as run.json lists them. Warnings first, then what is only told."""
    named = {str(layer.get("name")): layer for layer in layers if isinstance(layer, Mapping)}
    found = [sign for search in SEARCHES for sign in search(Evidence(history, named))]
    return tuple(sorted(_once(found), key=lambda sign: sign.level == "info"))


def _once(signs: list[Sign]) -> list[Sign]:
    """Without the gradients that are exactly zero because they are too small: underflow has said so."""
    small = {layer for sign in signs if sign.kind == "underflow" for layer in sign.layers}
    return [sign for sign in signs if sign.kind != "no gradient" or not small.issuperset(sign.layers)]
