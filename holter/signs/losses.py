"""Signs in the course of the loss."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.series import scale_of
from holter.signs.sign import Evidence, Sign, trailing
from holter.words import number, times

FEW = 5  # values that stand for the beginning and for the end
RISEN = 10.0  # times what it was at first


def risen_loss(evidence: Evidence) -> Iterator[Sign]:
    """A loss that ends far above where it began; noise and ordinary spikes come down again."""
    steps, losses = evidence.history.scalar("loss")
    steps, losses = steps[np.isfinite(losses)], losses[np.isfinite(losses)]
    if len(losses) < 2 * FEW:
        return
    first, last = float(np.median(losses[:FEW])), float(np.median(losses[-FEW:]))
    # One that crosses zero, or begins there, has no level to be a multiple of.
    if (losses[: 2 * FEW] > 0).all() and last >= RISEN * max(first, scale_of(losses[: 2 * FEW])):
        # The newest value may happen to be low: it is the median of the end that says so.
        since = trailing(steps[:-FEW], losses[:-FEW] > first)
        since = int(steps[-FEW]) if since is None else since
        text = f"the loss is about {number(last)}, {times(last / first)} what it was at first"
        yield Sign("loss", f"{text}; above that since step {since:,}", (), since, last / first)
