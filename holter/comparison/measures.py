"""A run in the few numbers that are compared with those of others. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from holter.comparison.series import Level, last_level
from holter.comparison.tracks import Track
from holter.record import is_validation
from holter.series import Floats, Integers, spread

_LOSS = re.compile(r"loss|perplexity|ppl|nll|bpb", re.IGNORECASE)
_SOME, _MANY = 6, 40  # values of a loss on other data: that tell how it moves, and that can be averaged
_STARTING = 2  # steps that take longer because they are the first


@dataclass(frozen=True)
class Extreme:
    value: float
    step: int


@dataclass(frozen=True)
class Measures:
    """What was not recorded is None. Times, speed and norms are of steps; memory is the most that was seen: bytes."""

    first_loss: float | None
    last_loss: Level | None
    best_loss: Extreme | None
    validation: str | None  # the name of the loss on other data
    first_validation: float | None
    last_validation: Level | None
    best_validation: Extreme | None
    largest_norm: Extreme | None
    step_time: float | None  # median, in seconds
    process_memory: float | None
    device_memory: float | None
    samples_per_second: float | None  # medians
    tokens_per_second: float | None


def measure(track: Track, validation: str | None = None) -> Measures:
    """`validation` is the name of the loss that all runs of a comparison have."""
    steps, losses = track.scalar("loss")
    at, held = track.scalar(validation) if validation is not None else (steps[:0], losses[:0])
    return Measures(
        first_loss=float(losses[0]) if len(losses) else None,
        last_loss=last_level(losses),
        best_loss=_extreme(steps, -losses, -1.0),
        validation=validation,
        first_validation=float(held[0]) if len(held) > 1 else None,
        last_validation=last_validation(held, last_level(losses)),
        best_validation=_extreme(at, -held, -1.0),
        largest_norm=_extreme(*gradient_norms(track)),
        step_time=_median(track.scalar("step_time")[1]),
        process_memory=_most(track, "machine/process_memory"),
        device_memory=_most(track, "machine/gpu_memory"),
        samples_per_second=_median(track.scalar("samples_per_second")[1]),
        tokens_per_second=_median(track.scalar("tokens_per_second")[1]),
    )


def validation_name(tracks: list[Track]) -> str | None:
    """The first loss on other data that all of them have."""
    names = [name for name in tracks[0].scalars if is_validation(name) and _LOSS.search(name)]
    return next((name for name in names if all(name in track.scalars for track in tracks)), None)


def last_validation(values: Floats, trained: Level | None) -> Level | None:
    """The last value, or of many the mean of the last. Its error, as a share, is no less than that of the training."""
    if not len(values):
        return None
    few = Level(float(values[-1]), _apart(values[len(values) // 2 :]) if len(values) >= _SOME else float("nan"), 1)
    found = (last_level(values) if len(values) >= _MANY else None) or few
    if trained is None or not trained.mean:
        return found
    error = abs(found.mean * trained.error / trained.mean)
    lowest = found.lowest if np.isfinite(found.lowest) else found.mean
    return Level(found.mean, float(np.fmax(found.error, error)), found.values, lowest)


def _apart(values: Floats) -> float:
    """How far they lie apart, but for a few that stand out: what the last one says is of the time after a break."""
    return float(min(values.std(), spread(values[:, None])[0]) if len(values) >= _SOME else values.std())


def gradient_norms(track: Track) -> tuple[Integers, Floats]:
    """Before clipping; NaN where a value of it was not finite, though the record holds the norm of the others."""
    steps, norms = track.scalar("gradient_norm")
    bad_steps, bad = track.scalar("gradient_nonfinite")
    return steps, np.where(np.isin(steps, bad_steps[bad > 0]), np.nan, norms)


def _extreme(steps: Integers, values: Floats, sign: float = 1.0) -> Extreme | None:
    """The largest of the finite values; NaN, at its step, where not all are finite and the largest was asked for."""
    broken = np.flatnonzero(~np.isfinite(values))
    if not len(values) or len(broken) == len(values) or (sign > 0 and len(broken)):
        return Extreme(float("nan"), int(steps[broken[0]])) if len(broken) else None
    place = int(np.where(np.isfinite(values), values, -np.inf).argmax())
    return Extreme(sign * float(values[place]), int(steps[place]))


def _median(values: Floats) -> float | None:
    known = values[_STARTING:] if len(values) > 2 * _STARTING else values
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else None


def _most(track: Track, name: str) -> float | None:
    """The peak that was recorded, or else the most that was seen."""
    known = [values[np.isfinite(values)] for _, values in (track.scalar(f"{name}_peak"), track.scalar(name))]
    return next((float(values.max()) for values in known if len(values)), None)
