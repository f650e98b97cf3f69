"""What monitoring costs, and how often it may measure so that it stays below the user's share of the step time.

Purses: every second of training earns `share` seconds, divided among the kinds of measurements; every measurement
spends what it took from the purse of its kind, and one that this cannot pay for is left out. So an expensive look at
activations, say, is paid off by later looks at activations, while gradients go on. What a full purse cannot hold goes
to the others. A run starts with an advance of a second, so that short runs are seen well, and pays it back with a
quarter of what it earns: after that, measuring costs its share of the time. It is for the first seconds, in which short
steps are many: what is left of it then is taken back. What every step needs, a record of its scalars, is spent from all
purses but never left out: where steps are very short that alone may exceed the share, and so it takes at most seven
tenths of what they earn. Setting up is paid by no purse: what a kind takes the first time is mostly the loading of
kernels and the making of tables, and would keep the run unseen for hundreds of steps.
"""

from __future__ import annotations

ADVANCE_SECONDS = 1.0
_ADVANCED_FOR = 20.0  # seconds of training
_REPAID = 0.25  # of what is earned, while an advance is owed
_FOR_RECORDS = 0.7  # of what is earned, at most
# Of the share, so much may be spent by our own clocks. A training feels more than they see: its caches are cold after
# us, and a hook has begun before they start. Measured: an ordinary step of 0.4 % by our clocks was 0.75 % longer.
_FELT = 0.6
BESIDE = 0.5  # of what another thread takes, that a training feels: torch lets go of the interpreter
_OUTLIER = 10  # times what was expected
_SMOOTHING = 0.2  # weight of the newest cost in the expected one
# How the share is divided, and the advance: most of that goes to what is wanted at every step. Kinds begin with these.
_PARTS = {"gradient": 0.4, "update": 0.15, "weight": 0.08, "moment": 0.07, "activation": 0.1, "batch": 0.2}
_ADVANCES = {"gradient": 0.3, "update": 0.1, "weight": 0.1, "moment": 0.1, "activation": 0.1, "batch": 0.3}
_MOMENTS = ("momentum", "second_moment")


def _part_of(kind: str) -> str:
    first = kind.partition(" ")[0]
    return "moment" if first in _MOMENTS else first if first in _PARTS else "weight"


class _Purse:
    def __init__(self, part: float, advance: float) -> None:
        self.part = part
        self.holds = self.owed = self.full = advance

    def earn(self, seconds: float) -> float:
        """Takes what it has room for, after what it owes; returns the rest."""
        paid = min(_REPAID * seconds, self.owed)
        self.owed -= paid
        taken = max(0.0, min(seconds - paid, self.full - self.holds))
        self.holds += taken
        return seconds - paid - taken

    def give_back(self) -> None:
        """What it owes and has not spent."""
        left = min(self.owed, max(0.0, self.holds))
        self.owed -= left
        self.holds -= left


class Budget:
    """`share` of the training time that monitoring may take; None for no limit, 0 for scalars only."""

    def __init__(self, share: float | None) -> None:
        self.share = share
        advance = ADVANCE_SECONDS if share else 0.0
        self._purses = {name: _Purse(part, advance * _ADVANCES[name]) for name, part in _PARTS.items()}
        self._expected: dict[str, float] = {}
        # Seconds of measurements within what is about to be settled, by part; None for setting up.
        self._unsettled: dict[str | None, float] = {}
        self._common = 0.0  # spent by everyone, and not yet taken from the purses: many small sums a step
        self.elapsed = 0.0
        self.spent = 0.0

    def earn(self, seconds: float) -> None:
        """Training time that went by. Purses are capped: a pause is no reason for a spending spree."""
        is_opening = self.elapsed < _ADVANCED_FOR
        self.elapsed += seconds
        if is_opening and self.elapsed >= _ADVANCED_FOR:
            for purse in self._purses.values():
                purse.give_back()
        earned = _FELT * (self.share or 0.0) * seconds
        left = earned - min(self._common, _FOR_RECORDS * earned)
        self._common = rest = 0.0
        for purse in self._purses.values():
            rest += purse.earn(purse.part * left)
        if rest > 0:
            for purse in self._purses.values():  # the largest comes first
                rest = purse.earn(rest)

    def spend(self, seconds: float, kind: str | None) -> None:
        """On a measurement of this kind; None for setting one up."""
        self.spent += seconds
        if kind is not None:
            self._purses[_part_of(kind)].holds -= seconds

    def share_out(self, seconds: float) -> None:
        """Spent for everyone."""
        self.spent += seconds
        self._common += seconds

    def settle(self, seconds: float) -> None:
        """A stretch of work: of the kinds that were learned of since the last time, and the rest of it everyone's."""
        if not self._unsettled:  # as in most stretches
            self.share_out(seconds)
            return
        unsettled, self._unsettled = self._unsettled, {}  # as a whole: another thread may log
        known = sum(unsettled.values())
        scale = min(1.0, seconds / known) if known > 0 else 0.0
        for part, own in unsettled.items():
            if part is not None:
                self._purses[part].holds -= scale * own
        self.spent += scale * known
        self.share_out(seconds - scale * known)

    def learn(self, kind: str, seconds: float, *, is_settled: bool = False, sets_up: bool = False) -> None:
        """What a measurement of this kind took, to expect the next one."""
        known = self._expected.get(kind, seconds)
        # A garbage collection, or another process, may fall into any measurement: that is not its price.
        seconds = min(seconds, _OUTLIER * known)
        # A first call that builds tables is no measure of the next: expectations fall at once and rise slowly.
        self._expected[kind] = min(seconds, known + _SMOOTHING * (seconds - known))
        if not is_settled:
            part = None if sets_up else _part_of(kind)
            self._unsettled[part] = self._unsettled.get(part, 0.0) + seconds

    def affords(self, kind: str) -> bool:
        """Whether a measurement of this kind may be made now."""
        if self.share is None:
            return True
        purse = self._purses[_part_of(kind)]
        # What costs more than the purse can hold is bought when that is full, and paid off afterwards.
        return (
            self.share > 0 and min(self._expected.get(kind, 0.0), purse.full) <= purse.holds - purse.part * self._common
        )
