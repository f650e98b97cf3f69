"""Karpathy's rule of thumb: updates are about a thousandth of their weights; here within a decade of it."""

from __future__ import annotations

from holter.clinic.rivals.alarms import in_order, series, told_of_layers
from holter.diagnosis.finding import Finding
from holter.history import History

LOW, HIGH = 1e-4, 1e-2


def karpathy(history: History) -> tuple[Finding, ...]:
    steps, layers, ratios = series(history, "update", "ratio")
    matrices = [place for place, layer in enumerate(layers) if layer.endswith("weight")]
    names = tuple(layers[place] for place in matrices)
    chosen = ratios[:, matrices]
    return in_order(
        (
            *told_of_layers(steps, names, chosen > HIGH, "lr-too-high", "lr"),
            *told_of_layers(steps, names, chosen < LOW, "lr-too-low", "lr"),
        )
    )
