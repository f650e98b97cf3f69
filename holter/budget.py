"""What monitoring costs, and how often it may measure so that it stays below the user's share of the step time.

A purse: every second of training earns `share` seconds, every measurement spends what it took, and one that the
purse cannot pay for is left out. A run starts with an advance, so that short runs are seen whole, and what it earns
first pays that back: measuring costs no more than the advance, or than the share of the time where that is more.
What every step needs, a record of its scalars, is spent from the same purse but never left out: where steps are very
short, that alone may exceed the share.
"""

from __future__ import annotations

ADVANCE_SECONDS = 0.25
_SMOOTHING = 0.2  # weight of the newest cost in the expected one


class Budget:
    """`share` of the training time that monitoring may take; None for no limit, 0 for scalars only."""

    def __init__(self, share: float | None) -> None:
        self.share = share
        self._purse = ADVANCE_SECONDS if share else 0.0
        self._owed = self._purse  # of the advance
        self._expected: dict[str, float] = {}
        self.elapsed = 0.0
        self.spent = 0.0

    def earn(self, seconds: float) -> None:
        """Training time that went by. The purse is capped: a pause is no reason for a spending spree."""
        self.elapsed += seconds
        earned = (self.share or 0.0) * seconds
        paid = min(earned, self._owed)
        self._owed -= paid
        self._purse = min(self._purse + earned - paid, ADVANCE_SECONDS)

    def spend(self, seconds: float) -> None:
        self.spent += seconds
        self._purse -= seconds

    def learn(self, kind: str, seconds: float) -> None:
        """What a measurement of this kind took, to expect the next one."""
        known = self._expected.get(kind, seconds)
        # A first call that builds tables is no measure of the next: expectations fall at once and rise slowly.
        self._expected[kind] = min(seconds, known + _SMOOTHING * (seconds - known))

    def affords(self, kind: str) -> bool:
        """Whether a measurement of this kind may be made now."""
        if self.share is None:
            return True
        # What costs more than the purse can hold is bought when that is full, and paid off afterwards.
        return self.share > 0 and min(self._expected.get(kind, 0.0), ADVANCE_SECONDS) <= self._purse
