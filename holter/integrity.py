"""How much of a run can be read: what is damaged, which steps are missing, and how serious that is. Pure.

One order everywhere: a torn end, as a killed process leaves it, is a note; frames that stand twice or elsewhere lose
nothing (info); lost frames are a warning; at least half of a run lost is critical.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from holter.damage import Damage
from holter.diagnosis.finding import Finding
from holter.journal import JournalReader

_MOST_GAPS = 1000  # that are remembered
_SHOWN = 3  # ranges of steps that are named


class Gaps:
    """Ranges of steps without a record, in steps that come one by one; a step that comes again begins a new line."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []  # the first and the last step of each
        self.count = 0  # steps that have a record
        self._last = -1

    def put(self, step: int) -> None:
        if step <= self._last:
            self.ranges = [(first, min(last, step - 1)) for first, last in self.ranges if first < step]
            self.count = step - sum(last - first + 1 for first, last in self.ranges)
        elif step > self._last + 1 and len(self.ranges) < _MOST_GAPS:
            self.ranges.append((self._last + 1, step - 1))
        self.count += 1
        self._last = step


def gaps_in(steps: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of steps that are not among these.

    >>> gaps_in([0, 1, 5, 6, 8])
    ((2, 4), (7, 7))
    """
    gaps = Gaps()
    for step in steps:
        gaps.put(step)
    return tuple(gaps.ranges)


@dataclass(frozen=True)
class Integrity:
    """What of a run's journals can be read. `gaps` are steps without a record: first and last of each range."""

    damage: Damage = field(default_factory=Damage)
    unreadable_bytes: int = 0
    lost_tail: int = 0  # bytes at the ends of journals that are no entry being written
    size: int = 0  # bytes of the journals
    steps: int = 0  # that have a record
    has_entries: bool = True
    gaps: tuple[tuple[int, int], ...] = ()

    @property
    def is_unreadable(self) -> bool:
        """Whether there are journals, and nothing in them can be read."""
        return not self.has_entries and bool(self._lost_bytes)

    @property
    def missing(self) -> tuple[tuple[int, int], ...]:
        """The steps that the damage may have cost. Each has a frame: a longer gap has another reason, such as a run
        that continues the training of another."""
        frames = self.damage.missing + self.damage.damaged
        return tuple((first, last) for first, last in self.gaps if last - first < frames)

    @property
    def severity(self) -> str:
        """Return info, warning or critical; empty if nothing is wrong, or an end is torn as by a kill."""
        lost_steps = sum(last - first + 1 for first, last in self.missing)
        if 2 * self._lost_bytes >= self.size > 0 or lost_steps > self.steps:
            return "critical"
        if self.damage.loses or self.lost_tail:
            return "warning"
        return "info" if self.damage else ""

    @property
    def words(self) -> str:
        """Return what is wrong in short, such as `60 frames missing; 28 steps have no record: 5 to 32`."""
        return "; ".join(filter(None, (self._damage_words, _missing_words(self.missing))))

    @property
    def sentence(self) -> str:
        """Return all that could not be read, a torn end included; empty if there is nothing of it."""
        if self.is_unreadable:
            return f"Nothing in its journals can be read: {self.words}."
        if not (words := self._damage_words):
            return ""
        steps = _missing_words(self.missing)
        return f"Its journals are torn or damaged: {words}. The rest was read.{f' {steps}.' if steps else ''}"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Return the damage as a finding like that of any failure of Holter's own; none for a torn end."""
        if not (severity := self.severity):
            return ()
        since = self.missing[0][0] if self.missing else 0
        failed = f"Holter could not read all of its journals: {self.words}; the rest was read"
        if self.is_unreadable:
            failed = f"nothing in its journals can be read: {self.words}"
        evidence: dict[str, object] = {"unreadable_bytes": self.unreadable_bytes, "steps_that_can_be_read": self.steps}
        return (
            Finding(
                cause="monitor-degraded",
                where="monitor",
                since=since,
                step=since,
                severity=severity,
                evidence=evidence,
                advice=f"Training is untouched, but {failed}",
            ),
        )

    @property
    def _damage_words(self) -> str:
        return replace(self.damage, unreadable_bytes=self.unreadable_bytes).words

    @property
    def _lost_bytes(self) -> int:
        return self.lost_tail + (self.damage.unreadable_bytes if self.damage.damaged else 0)


def integrity_of(readers: Sequence[JournalReader], steps: int = 0, gaps: Sequence[tuple[int, int]] = ()) -> Integrity:
    """Return what these readers of a run's journals know by now, of a line of so many steps with these gaps."""
    return Integrity(
        damage=sum((reader.damage for reader in readers), Damage()),
        unreadable_bytes=sum(reader.unreadable_bytes for reader in readers),
        lost_tail=sum(reader.lost_tail for reader in readers),
        size=sum(reader.size for reader in readers),
        steps=steps,
        has_entries=any(reader.has_entries for reader in readers),
        gaps=tuple(gaps),
    )


def _missing_words(gaps: tuple[tuple[int, int], ...]) -> str:
    """
    >>> _missing_words(((5, 32), (40, 40)))
    '29 steps have no record: 5 to 32, 40'
    """
    if not gaps:
        return ""
    count = sum(last - first + 1 for first, last in gaps)
    named = [f"{first:,}" if first == last else f"{first:,} to {last:,}" for first, last in gaps[:_SHOWN]]
    more = f" and {len(gaps) - _SHOWN:,} more ranges" if len(gaps) > _SHOWN else ""
    have = "step has" if count == 1 else "steps have"
    return f"{count:,} {have} no record: {', '.join(named)}{more}"
