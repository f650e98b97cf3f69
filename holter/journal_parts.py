"""Parts of a long journal, without reading all of it: a sample from everywhere, or some of its steps.

Frames tell their lengths, so the file can be walked along without being read; steps only grow in a journal, so one is
found by halving. What is damaged is left out here, and told by those who read everything.
"""

from __future__ import annotations

import itertools
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from holter.codec import Decoder, read_words
from holter.journal import AROUND, BEGIN, HEAD, LENGTH, has_header, read_frame
from holter.record import Entry, Record

_KIND_WITHIN = 64  # bytes of an entry in which its kind stands
_LAST_ONES = 8


def read_sample(path: Path, most: int) -> Iterator[Entry]:
    """Some entries from all over a long journal, in their order: of each of so many stretches the largest, which says
    most, and the one after it, which may hold what was logged late of the same step; and the last ones."""
    with path.open("rb") as file:
        if not has_header(file, path):
            return
        end = os.fstat(file.fileno()).st_size
        places, tables = _walk(file.fileno(), end)
        yield from _decoded(file, end, sorted({*tables, *_telling(places, most)}))


def read_between(path: Path, first: int, last: int, most: int) -> Iterator[Record]:
    """The records of these steps, evenly thinned out to about so many. Where a training went back in the middle of a
    journal, steps may be missing."""
    with path.open("rb") as file:
        if not has_header(file, path):
            return
        end = os.fstat(file.fileno()).st_size
        places, tables = _walk(file.fileno(), end)
        steps = _Steps(file, end, places)
        chosen = places[bisect_left(steps, first) : bisect_right(steps, last)]
        chosen = chosen[:: max(1, len(chosen) // most)]
        needed = [table for table in tables if chosen and table < chosen[-1]]
        for entry in _decoded(file, end, sorted((*needed, *chosen))):
            if isinstance(entry, Record) and first <= entry.step <= last:
                yield entry


def _walk(file: int, end: int) -> tuple[list[int], list[int]]:
    """Where frames begin, and which of them are tables of layers. Nothing is checked but the lengths, and nothing
    else is read: mapped into memory, a long journal would count as ours."""
    places: list[int] = []
    tables: list[int] = []
    place = BEGIN
    while place + AROUND <= end:
        begin = os.pread(file, HEAD + _KIND_WITHIN, place)
        after = place + AROUND + int.from_bytes(begin[:LENGTH], "little")
        if after > end:
            break
        (tables if b"layers" in begin else places).append(place)
        place = after
    return places, tables


def _telling(places: list[int], most: int) -> list[int]:
    """The largest frame of each of so many stretches and its successor, and the last few."""
    lengths = [after - place for place, after in itertools.pairwise(places)]
    stretch = max(1, -(-len(lengths) // most))
    chosen = set(range(len(places))[-_LAST_ONES:])
    for first in range(0, len(lengths), stretch):
        largest = max(range(first, min(first + stretch, len(lengths))), key=lengths.__getitem__)
        chosen.update((largest, largest + 1))
    return [places[index] for index in sorted(chosen)]


class _Steps(Sequence[int]):
    """The step of each frame, read when it is asked for; what has none counts as the one before."""

    def __init__(self, file: BinaryIO, end: int, places: list[int]) -> None:
        self._file, self._end, self._places = file, end, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> int:  # type: ignore[override]  # bisect asks for no slices
        for place in reversed(self._places[max(0, index - 8) : index + 1]):
            try:
                blob = _blob(self._file, place, self._end)
                words = read_words(blob) if blob is not None else {}
            except ValueError:
                continue
            if words.get("kind") == "record":
                return int(words["step"])
        return -1


def _decoded(file: BinaryIO, end: int, places: list[int]) -> Iterator[Entry]:
    decoder = Decoder()
    for place in places:
        try:
            blob = _blob(file, place, end)
            entry = decoder.decode(blob) if blob is not None else None
        except ValueError:
            continue
        if entry is not None:
            yield entry


def _blob(file: BinaryIO, place: int, end: int) -> bytes | None:
    file.seek(place)
    frame = read_frame(file, end)
    return frame[1] if frame else None
