"""Thresholds: the outer limits, all in one place. Within them a series is judged by its own past and its siblings."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Thresholds:
    """Of the defaults each is what the requirement in its comment asks for; change one with `dataclasses.replace`."""

    vanishing_norm: float = 1e-7  # C2: a layer's gradient below this, for several steps
    exploding_norm: float = 100.0  # C3, E33: of all gradients together
    least_norm: float = 0.001  # E33: of all gradients together
    critical_norm: float = 1000.0  # E32: stop
    norm_jump: float = 10.0  # C4: between two steps
    norm_fall: float = 0.1  # E33: of its start
    loss_spike: float = 10.0  # E33
    critical_loss_spike: float = 100.0  # E32: stop
    loss_noise: float = 2.0  # C5: standard deviation over mean of the last ten
    plateau: float = 0.99  # C5: all of the last ten above this share of the first of them
    update_ratio_high: float = 0.1  # E2, E33
    update_ratio_low: float = 1e-7  # E2, E33
    layer_spread: float = 100.0  # E31, E33: the largest norm over the smallest, of layers of one kind
    weight_growth: float = 10.0  # E6: a jump
    weight_spread: float = 1000.0  # E6: between layers
    validation_rise: float = 0.1  # E19: while the training loss falls
    validation_patience: int = 10_000  # E33: steps without improvement
    throughput_drop: float = 0.5  # E17
    critical_throughput_drop: float = 0.8  # E32: stop
    step_time: float = 2.0  # E17: over its usual
    memory: float = 0.95  # E17: of what there is

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"{field.name}={value!r}: a threshold is a number above 0")
