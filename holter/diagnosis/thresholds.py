"""Thresholds: the outer limits, all in one place. Within them a series is judged by its own past and its siblings."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any


def _limit(default: float, requirement: str, means: str) -> Any:
    return field(default=default, metadata={"requirement": requirement, "means": means})


@dataclass(frozen=True)
class Thresholds:
    """Each default is what its requirement asks for; change one with `dataclasses.replace`.

    >>> Thresholds().critical_norm, Thresholds(loss_spike=5.0).loss_spike
    (1000.0, 5.0)
    """

    vanishing_norm: float = _limit(1e-7, "C2", "a layer's gradient norm below this, for several steps")
    exploding_norm: float = _limit(100.0, "C3, E33", "norm of all gradients together")
    least_norm: float = _limit(0.001, "E33", "norm of all gradients together, below this")
    critical_norm: float = _limit(1000.0, "E32", "norm of all gradients together: stop")
    norm_jump: float = _limit(10.0, "C4", "times its usual value, of a norm")
    norm_fall: float = _limit(0.1, "E33", "share of its start that is left of a norm")
    loss_spike: float = _limit(10.0, "E33", "times its usual value, of the loss")
    critical_loss_spike: float = _limit(100.0, "E32", "times its usual value, of the loss: stop")
    loss_noise: float = _limit(2.0, "C5", "standard deviation over mean of the last ten losses")
    plateau: float = _limit(0.99, "C5", "all of the last ten losses above this share of the first of them")
    update_ratio_high: float = _limit(0.1, "E2, E33", "size of an update over that of its weight")
    update_ratio_low: float = _limit(1e-7, "E2, E33", "size of an update over that of its weight, below this")
    layer_spread: float = _limit(100.0, "E31, E33", "largest norm over smallest, of layers of one kind")
    weight_growth: float = _limit(10.0, "E6", "times its size, of a weight at a jump")
    weight_spread: float = _limit(1000.0, "E6", "largest weight over smallest, between layers")
    validation_rise: float = _limit(0.1, "E19", "rise of the validation loss while the training loss falls")
    validation_patience: int = _limit(10_000, "E33", "steps without a better validation loss")
    throughput_drop: float = _limit(0.5, "E17", "share of the usual throughput that is lost")
    critical_throughput_drop: float = _limit(0.8, "E32", "share of the usual throughput that is lost: stop")
    step_time: float = _limit(2.0, "E17", "times its usual value, of a step's time")
    memory: float = _limit(0.95, "E17", "share of the memory there is")

    def __post_init__(self) -> None:
        for limit in fields(self):
            value = getattr(self, limit.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"{limit.name}={value!r}: a threshold is a number above 0")


def listed(limits: Thresholds) -> list[tuple[str, float, str, str]]:
    """Name, value, requirement and meaning of every limit."""
    described: tuple[Field[Any], ...] = fields(limits)
    return [
        (one.name, getattr(limits, one.name), one.metadata["requirement"], one.metadata["means"]) for one in described
    ]
