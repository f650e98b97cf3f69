"""A run on an axis that it shares with others: steps, or samples or tokens seen."""

from __future__ import annotations

from typing import Literal

import numpy as np

from holter.comparison.reading import Reading
from holter.comparison.series import align
from holter.series import Floats, Integers

Axis = Literal["step", "samples", "tokens"]
AXES: tuple[Axis, ...] = ("step", "samples", "tokens")
_MOST_MISSING = 0.1  # of the steps whose size is not known: theirs is taken to be the usual one


class Track:
    """What was read of a run, each of its series with the places where its values stand."""

    def __init__(self, name: str, reading: Reading, by: Axis) -> None:
        self.name, self.reading = name, reading
        self.steps, self.roles, self._scalars = reading.steps, reading.roles, reading.scalars
        self._places = self._seen(by) if by != "step" else self.steps.astype(np.float64)
        self.step_size = float(np.diff(self._places).max(initial=0.0)) if by != "step" else 0.0

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def end(self) -> float:
        return float(self._places[-1]) if len(self._places) else float("nan")

    def places(self, steps: Integers) -> Floats:
        """Where these steps of the run stand; what was logged for a step that was lost stands where the next one is."""
        if not len(self.steps):
            return steps.astype(np.float64)
        return self._places[np.minimum(np.searchsorted(self.steps, steps), len(self.steps) - 1)]

    @property
    def scalars(self) -> tuple[str, ...]:
        return tuple(self._scalars)

    def scalar(self, name: str) -> tuple[Integers, Floats]:
        """Ascending steps and the values there; empty where it was never recorded."""
        return self._scalars.get(name, (np.zeros(0, dtype=np.int64), np.zeros(0)))

    def series(self, role: str, statistic: str) -> tuple[Integers, tuple[str, ...], Floats]:
        return self.reading.series(role, statistic)

    def _seen(self, by: Axis) -> Floats:
        """Samples or tokens up to and including each step. ValueError where they were not recorded."""
        steps, sizes = self.scalar("batch/size") if by == "samples" else self._tokens()
        known = np.isfinite(sizes) & (sizes > 0)
        steps, sizes = steps[known], sizes[known]
        if len(self.steps) and len(steps) < (1 - _MOST_MISSING) * len(self.steps):
            raise ValueError(
                f"{self.name} cannot be aligned by {by}: how many a step has is known of {len(steps):,} of its "
                f"{len(self.steps):,} steps. Give monitor.log(inputs=...), or compare by step"
            )
        every = np.full(len(self.steps), np.median(sizes) if len(sizes) else 0.0)
        own, theirs = align(self.steps.astype(np.float64), steps.astype(np.float64))
        every[own] = sizes[theirs]
        return np.cumsum(every)

    def _tokens(self) -> tuple[Integers, Floats]:
        """Recorded as a speed: what a step had is that times how long it took."""
        (steps, speeds), (others, seconds) = self.scalar("tokens_per_second"), self.scalar("step_time")
        left, right = align(steps.astype(np.float64), others.astype(np.float64))
        return steps[left], np.rint(speeds[left] * seconds[right])


def meet(ours: Track, theirs: Track, our_steps: Integers, their_steps: Integers) -> tuple[Integers, Integers]:
    """Indices of the steps of both that stand at the same place."""
    return align(ours.places(our_steps), theirs.places(their_steps), max(ours.step_size, theirs.step_size))
