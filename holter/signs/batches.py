"""Signs in the data: batches that come again."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.signs.sign import Evidence, Sign
from holter.words import share

ALL = 16  # steps with one and the same batch: a training on all of its data, as a rule
EPOCH = 4  # batches that come round in the same order; fewer look like a loader that is stuck


def repeated_batches(evidence: Evidence) -> Iterator[Sign]:
    """A batch that was seen before; where all come round in one order, it is an epoch that nobody shuffles."""
    steps, ago = evidence.history.scalar("batch/repeated")
    again = ago > 0
    if not again.any():
        return
    count, part = int(again.sum()), float(again.mean())
    first, back = int(steps[again][0]), int(ago[again][0])
    if count > 1 and back >= EPOCH and (ago[again] == back).all() and again[np.flatnonzero(again)[0] :].all():
        text = f"the same {back:,} batches come round in the same order, since step {first:,} (not shuffled?)"
        yield Sign("same batch", text, since=first, value=part, level="info")
        return
    if len(ago) > ALL and (ago[1:] == 1).all():  # a training on all its data at once, or a loader that is stuck
        yield Sign(
            "same batch", f"all {len(ago):,} steps that were looked at have the same batch", (), first, 1.0, "info"
        )
        return
    text = f"the batch of step {first:,} repeats that of step {first - back:,}"
    looked = f"{share(part)} of the {len(steps):,} batches that were looked at"
    text += f", and {count - 1:,} more repeat an earlier one: {looked}" if count > 1 else ""
    yield Sign("same batch", text, since=first, value=part)
