"""Whether a batch was there before, from the hashes in the records."""

from __future__ import annotations

import numpy as np

from holter.record import Record


class Repeats:
    """Told records in the order of their steps, it finds batches that are the same as one of the newest before them.

    Batches are the same where their inputs are, and their targets too as far as both were hashed. Inputs and targets
    of a step may come in several records. What a resumed training sees again is no repetition.
    """

    def __init__(self, most: int = 10_000) -> None:
        # A place a batch, in fixed memory: hashes of its inputs and of its targets (0 where not known), and its step.
        self._inputs, self._targets, self._steps = np.zeros((3, most), dtype=np.int64)
        self._written = 0
        self._segment = self._step = -1
        self._hashes: dict[str, float] = {}  # of this step, by layer

    def scalars(self, record: Record) -> dict[str, float]:
        """`batch/repeated`: how many steps ago this batch was seen last; 0 where it is new, absent where not hashed."""
        rows = record.rows.get("batch")
        if rows is None or "hash" not in rows.extras:
            return {}
        if record.segment != self._segment:
            self._segment, self._step, self._written = record.segment, -1, 0
        if record.step != self._step:
            self._step, self._hashes = record.step, {}
        known = zip(rows.layers, rows.extras["hash"].tolist(), strict=True)
        self._hashes.update({layer: number for layer, number in known if not np.isnan(number)})
        inputs, targets = self._key("inputs"), self._key("targets")
        if not inputs:
            return {}
        age = self._age(inputs, targets)
        self._remember(inputs, targets)
        return {"batch/repeated": float(age)}

    def _key(self, root: str) -> int:
        """One number for all tensors of inputs or of targets; 0 where none was hashed."""
        found = sorted((layer, number) for layer, number in self._hashes.items() if layer.partition("/")[0] == root)
        return (hash(tuple(found)) or 1) if found else 0

    def _age(self, inputs: int, targets: int) -> int:
        places = np.flatnonzero(self._inputs[: self._written] == inputs)
        contradicted = (self._targets[places] != targets) & (self._targets[places] != 0) & (targets != 0)
        steps = self._steps[places][~contradicted]
        earlier = steps[steps < self._step]
        return self._step - int(earlier.max()) if earlier.size else 0

    def _remember(self, inputs: int, targets: int) -> None:
        """In place of the oldest, or of what was known of this step so far."""
        newest = (self._written - 1) % len(self._steps)
        if not self._written or self._steps[newest] != self._step:
            newest = self._written % len(self._steps)
            self._written += 1
        self._inputs[newest], self._targets[newest], self._steps[newest] = inputs, targets, self._step
