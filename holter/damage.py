"""What happened to the frames of a journal since they were written, by the numbers that they carry."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Damage:
    """Frames of a journal, or of all journals of a run. A torn end is not among them: a killed process leaves one."""

    damaged: int = 0  # whose place holds other bytes now
    missing: int = 0  # of which nothing is left
    repeated: int = 0  # that stand again where they do not belong; each is read once
    moved: int = 0  # that stand elsewhere; they are read in the order in which they were written
    foreign: int = 0  # of another journal; they are not read
    excessive: int = 0  # that have more than a file of this size can have; that is left out
    unreadable_bytes: int = 0

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def __add__(self, other: Damage) -> Damage:
        return Damage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def words(self) -> str:
        """
        >>> Damage(damaged=2, repeated=1, unreadable_bytes=90).words
        '2 frames damaged, 1 frame repeated, 90 bytes unreadable'
        """
        counts = {kind: getattr(self, name) for name, kind in _KINDS.items()}
        told = [f"{count:,} frame{'s' * (count != 1)} {kind}" for kind, count in counts.items() if count]
        return ", ".join((*told, *([f"{self.unreadable_bytes:,} bytes unreadable"] * bool(self.unreadable_bytes))))

    @property
    def loses(self) -> bool:
        """Whether something that was written is gone, not only out of place."""
        return bool(self.damaged or self.missing or self.excessive)


_KINDS = {name: name for name in ("damaged", "missing", "repeated", "moved")} | {
    "foreign": "of another journal",
    "excessive": "with more layers or values than a file of this size can have, which are left out",
}


def told_of(damage: Damage, unreadable_bytes: int) -> str:
    """A sentence about all that could not be read, a torn end included; empty where there is nothing of it.

    >>> told_of(Damage(missing=3), 7)
    'Its journals are torn or damaged: 3 frames missing, 7 bytes unreadable. The rest was read.'
    """
    words = replace(damage, unreadable_bytes=unreadable_bytes).words
    return f"Its journals are torn or damaged: {words}. The rest was read." if words else ""


def judge(numbers: Sequence[int], after_damage: Sequence[int], expected: int) -> tuple[Integers, Damage]:
    """Which frames are read, as places in `numbers`, in which order; and what became of the others.

    `numbers` are of the whole frames of a journal in the order in which they stand, from the one on that was to have
    the number `expected`; `after_damage` says before which of them there is something that is none.
    """
    found = np.asarray(numbers, dtype=np.int64)
    order = np.argsort(found, kind="stable")
    ascending = found[order]
    is_first = np.diff(ascending, prepend=-1) > 0
    is_read = is_first & (ascending >= expected)
    chosen = order[is_read]
    gaps = np.diff(found[chosen], prepend=expected - 1) - 1
    behind = np.asarray(after_damage, dtype=bool)[chosen]
    return chosen, Damage(
        damaged=int(gaps[behind].sum()),
        missing=int(gaps[~behind].sum()),
        repeated=len(found) - len(chosen),
        moved=len(chosen) - _longest_ascent(found[found >= expected]),
    )


def _longest_ascent(numbers: Integers) -> int:
    """How many of these can stay where they are, so that with the others elsewhere they ascend."""
    if (np.diff(numbers) > 0).all():
        return len(numbers)
    ends: list[int] = []  # the lowest number in which an ascent of each length ends
    for number in numbers.tolist():
        place = bisect_left(ends, number)
        ends[place : place + 1] = [number]
    return len(ends)
