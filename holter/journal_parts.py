"""Parts of a long journal, without reading all of it: a sample from everywhere, or some steps of one role.

Frames tell their lengths, so the file can be walked along without being read; they can be found from any byte of it;
the words of an entry stand at its beginning, so what it holds is seen without being decoded. What is damaged is left
out here, and told by those who read everything.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO, NamedTuple

from holter.codec import HEADER_LENGTH, Decoder, is_table, read_words
from holter.frames import (
    AROUND,
    BEGIN,
    HEAD,
    LENGTH,
    Frame,
    ScanBudget,
    file_number,
    frame_before,
    framed_from,
    frames_before,
    is_framed,
    length_of,
    number_of,
    read_frame,
)
from holter.history import ends_of_segments
from holter.record import EXECUTION_ORDER, Entry, Record

_KIND_WITHIN = 72  # bytes of an entry in which its kind stands
_WORDS_WITHIN = 1024  # and all words of most entries
_LAST_ONES = 8
_AT_ONCE = 384 << 20  # bytes that are decoded in about a second
_EACH = 64 << 10  # bytes that take as long as any entry does, however small it is
_WALKED = 1024  # frames at the beginning of a long journal that are all looked at
_WALKED_AT_MOST = 100_000  # frames of it, where there are tables farther on: about a second
_STRETCH = 64 << 10  # bytes of it from which the largest frame is taken, at each place that is picked
_SEARCHED = 256 << 20  # bytes in which the frames of a sample are looked for: about half a second
_MOST_TABLES = 64  # that may stand between two records; there is one for each role
_MOST_WORDS = 4 << 20  # bytes of an entry; those of 10,000 layers have a tenth of that
_END_BYTES, _END_FRAMES = 32 << 20, 128  # of the end of a journal: the largest known record has a few million bytes
_JUMBLED = 4  # frames at the end that are put in order
# The first words of a record as the codec writes them: JSON within JSON.
_RECORD = re.compile(
    rb'\{\\"kind\\": \\"record\\", \\"step\\": (-?\d+), \\"time\\": [^,]+, '
    rb'\\"segment\\": (-?\d+), \\"late\\": (true|false),'
)
_TABLE = re.compile(rb'\\"(?:layers|number)\\": (\d{1,18})')  # a record's reference to one, and its own number


def read_end(path: Path, most: int = _END_BYTES) -> Iterator[bytes]:
    """Yield the blobs of the last frames of a journal, the newest first, of at most so many bytes at its end.

    As `journal.read_backwards`, and never more than that of any file: what is shown in a list must not wait for it.
    """
    with path.open("rb", buffering=0) as file:
        number = file_number(file, path)
        size = os.fstat(file.fileno()).st_size
        frames = itertools.islice(frames_before(file, size, max(BEGIN, size - most)), _END_FRAMES)
        seen = list(itertools.islice(frames, 1))
        if seen and seen[0].file != number:  # of another journal: this one is what most are of
            seen += frames
            counts = Counter(frame.file for frame in seen)
            number = max(counts, key=lambda one: (counts[one], one == number))
        own = (frame for frame in itertools.chain(seen, frames) if frame.file == number)
        before = math.inf
        for frame in itertools.chain(_newest_first(itertools.islice(own, _JUMBLED)), own):
            if frame.number < before:
                before = frame.number
                yield frame.blob


def _newest_first(frames: Iterable[Frame]) -> list[Frame]:
    return sorted(frames, key=attrgetter("number"), reverse=True)


def read_beginning(path: Path, most: int) -> Iterator[Entry]:
    """Yield the first entries of a journal, of at most so many frames."""
    with path.open("rb") as file:
        file_number(file, path)
        end = os.fstat(file.fileno()).st_size
        walk = _walk(file, end, HEAD + _KIND_WITHIN, ScanBudget(_END_BYTES))
        tables, places = _sorted_out(itertools.islice(walk, most))
        yield from _decoded(file, end, *_fitting(file, tables, places))


def read_sample(path: Path, most: int) -> Iterator[Entry]:
    """Some entries from all over a long journal, in their order: of so many stretches the largest, which says most, and
    the one after it, which may hold what was logged late of the same step; and the last ones.

    A second or two, whatever the file holds: fewer entries where they are large, or where it is hard to find them.
    """
    with path.open("rb") as file:
        file_number(file, path)
        end = os.fstat(file.fileno()).st_size
        tables, places = _sampled(file, end, most)
        yield from _decoded(file, end, *_fitting(file, tables, places))


def _sampled(file: BinaryIO, end: int, most: int) -> tuple[list[int], list[int]]:
    """Where the tables begin that a sample needs, and its frames.

    To walk along all of a long journal is to read it: systems read ahead. So only its beginning is walked along, where
    the tables are, and of the rest some frames are found from places that are spread over it.
    """
    walk = _walk(file, end, HEAD + _KIND_WITHIN, ScanBudget(_SEARCHED))
    tables, places = _sorted_out(itertools.islice(walk, _WALKED))
    walked = _end_of(file, [*tables, *places])
    if walked >= end:
        return tables, sorted({*_telling(places, most), *places[-_LAST_ONES:]})
    of_beginning = max(1, most * walked // end)
    picked = _picked(file, walked, end, most - of_beginning, ScanBudget(_SEARCHED))
    if _tables_needed(file, picked) <= _tables_needed(file, tables):
        return tables, sorted({*_telling(places, of_beginning), *picked})
    more_tables, more_places = _sorted_out(itertools.islice(walk, _WALKED_AT_MOST))  # there are tables farther on
    tables, places = [*tables, *more_tables], [*places, *more_places]
    return tables, sorted({*_telling(places, most), *places[-_LAST_ONES:], *picked})


def _sorted_out(frames: Iterable[tuple[int, bytes]]) -> tuple[list[int], list[int]]:
    """Where tables begin, and where entries do."""
    tables: list[int] = []
    places: list[int] = []
    for place, begin in frames:
        (tables if is_table(begin) else places).append(place)
    return tables, places


def _end_of(file: BinaryIO, places: list[int]) -> int:
    """Where the last of these frames ends."""
    last = max(places, default=None)
    return BEGIN if last is None else last + AROUND + length_of(os.pread(file.fileno(), LENGTH, last))


def _picked(file: BinaryIO, begin: int, end: int, most: int, budget: ScanBudget) -> set[int]:
    """Frames at so many places, as far from each other; and the last ones. Where the budget does not last, they are
    from all over the file nevertheless."""
    lasts = [end]
    while len(lasts) <= _LAST_ONES:
        before = frame_before(file, lasts[-1] - 1, end, BEGIN, budget)
        if before is None:
            break
        lasts.append(before)
    places: set[int] = set(lasts[1:])
    wanted = [begin + (end - begin) * one // most for one in range(most)]
    for one in _spread_out(most):
        found = frame_before(file, wanted[one], end, wanted[one - 1] + 1 if one else begin, budget)
        if found is not None:
            budget.spend(_STRETCH, tried=1)
            places.update(_largest_from(file, found, end))
    return places


def _spread_out(count: int) -> list[int]:
    """
    >>> _spread_out(6)
    [0, 4, 2, 1, 5, 3]
    """
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda one: int(f"{one:0{bits}b}"[::-1], 2))


def _fitting(file: BinaryIO, tables: Sequence[int], places: Sequence[int]) -> tuple[list[int], list[int]]:
    """Those of these frames that can be read at once: the first tables, and entries from all over with the last ones.
    They stay in pairs, as they were picked."""
    sizes = {place: length_of(os.pread(file.fileno(), LENGTH, place)) for place in (*tables, *places)}
    stretch, chosen = 1, list(places)
    while stretch < len(places) and sum(map(sizes.__getitem__, chosen)) > _AT_ONCE:
        stretch *= 2
        spread = (place for at, place in enumerate(places[:-_LAST_ONES]) if at // 2 % stretch == 0)
        chosen = [*spread, *places[-_LAST_ONES:]]
    return _up_to(_AT_ONCE, tables, sizes), _up_to(_AT_ONCE, chosen[::-1], sizes)[::-1]


def _up_to(most: int, places: Iterable[int], sizes: Mapping[int, int]) -> list[int]:
    """The first of these frames, without those that are too large for what is left of so many bytes."""
    fitting = []
    for place in places:
        if sizes[place] <= most:
            most -= sizes[place]
            fitting.append(place)
    return fitting


def _largest_from(file: BinaryIO, place: int, end: int) -> list[int]:
    """Of the frames that begin here or soon after the largest, and the one after it."""
    seen = os.pread(file.fileno(), _STRETCH, place)
    sizes = {0: AROUND + length_of(seen)}
    begin, after = 0, sizes[0]
    while after <= len(seen) - LENGTH and seen[after - LENGTH : after] == seen[begin : begin + LENGTH]:
        begin, after = after, after + AROUND + length_of(seen[after : after + LENGTH])
        sizes[begin] = after - begin
    if not is_framed(file, place + begin, end):
        del sizes[begin]
    largest = max(sizes, key=sizes.__getitem__, default=0)
    following = place + largest + sizes.get(largest, 0)
    for _ in range(_MOST_TABLES):
        if not is_framed(file, following, end):
            break
        head = os.pread(file.fileno(), HEAD + _KIND_WITHIN, following)
        if not is_table(head):
            return [place + largest, following]
        following += AROUND + length_of(head)
    return [place + largest]


def _tables_needed(file: BinaryIO, places: Iterable[int]) -> int:
    """By these entries, or listed by these tables: they are numbered as they come."""
    begins = ((place, os.pread(file.fileno(), _WORDS_WITHIN, place)) for place in places)
    found = (_TABLE.findall(_words(file.fileno(), place, begin)) for place, begin in begins)
    return 1 + max((int(number) for numbers in found for number in numbers), default=-1)


@dataclass(frozen=True)
class Part:
    """Some steps of a run. Where there were too many to be read at once, `read` is less than `there`."""

    records: Iterator[Record]
    read: int
    there: int
    last_step: int  # of the whole run
    depth: str | None  # the newest note of the order in which layers run


def read_between(journals: Sequence[Path], role: str, first: int, last: int, most: int = _AT_ONCE) -> Part:
    """The records with this role of these steps, of the line of training that survived, as `History.latest` has it.

    Where they have more than `most` bytes, one of each stretch of them.
    """
    looked = [_look(path, role, first, last) for path in journals]
    found = [frame for frame in _survivors(looked) if frame.has_role]
    chosen = _thinned(found, most)
    records = (
        record
        for one in looked
        for record in _records(one, [frame.place for frame in chosen if frame.journal is one.path])
        if role in record.rows
    )
    notes = (_depth_in(one) for one in reversed(looked) if one.noted is not None)
    return Part(records, len(chosen), len(found), max((one.last for one in looked), default=-1), next(notes, None))


class _Frame(NamedTuple):
    """A record, seen from outside."""

    journal: Path
    number: int
    place: int
    size: int
    step: int
    segment: int
    late: bool
    has_role: bool


@dataclass
class _Looked:
    """A journal that was walked along: the records of the steps that were asked for, and what is to be known of the
    others."""

    path: Path
    frames: list[_Frame] = field(default_factory=list)
    tables: list[int] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)  # the first step of each segment
    last: int = -1  # step
    noted: int | None = None  # where the order in which layers run was last written


def _look(path: Path, role: str, first: int, last: int) -> _Looked:
    looked = _Looked(path)
    of_role, of_depth = _as_written(f'"role": {json.dumps(role)}'), _as_written(f'"{EXECUTION_ORDER}": ')
    with path.open("rb") as file:
        file_number(file, path)
        end = os.fstat(file.fileno()).st_size
        for place, begin in _walk(file, end, _WORDS_WITHIN):
            if is_table(begin):
                looked.tables.append(place)
            elif (seen := _RECORD.search(begin, HEAD, HEAD + 4 * _KIND_WITHIN)) is not None:
                step, segment = int(seen[1]), int(seen[2])
                looked.last = max(looked.last, step)
                looked.starts[segment] = min(step, looked.starts.get(segment, step))
                words = _words(file.fileno(), place, begin)
                if of_depth in words:
                    looked.noted = place
                if first <= step <= last:
                    size, late, number = length_of(begin), seen[3] == b"true", number_of(begin)
                    looked.frames.append(_Frame(path, number, place, size, step, segment, late, of_role in words))
    looked.frames = _in_order(looked.frames)
    return looked


def _in_order(frames: list[_Frame]) -> list[_Frame]:
    """As they were written, each once."""
    if all(one.number < after.number for one, after in itertools.pairwise(frames)):
        return frames
    return sorted({frame.number: frame for frame in reversed(frames)}.values(), key=attrgetter("number"))


def _survivors(looked: Sequence[_Looked]) -> list[_Frame]:
    """Those that no later segment took again: one counts up to where the first of its successors starts. Where a step
    stands twice even so, the newer one."""
    starts: dict[int, int] = {}
    for segment, step in ((segment, step) for one in looked for segment, step in one.starts.items()):
        starts[segment] = min(step, starts.get(segment, step))
    until = ends_of_segments(starts)
    alive = [frame for one in looked for frame in one.frames if frame.step < until[frame.segment]]
    newest = {frame.step: place for place, frame in enumerate(alive) if not frame.late}
    return [frame for place, frame in enumerate(alive) if place >= newest.get(frame.step, 0)]


def _thinned(frames: list[_Frame], most: int) -> list[_Frame]:
    """All have the role, so that of a stretch one of a usual size is as good as the largest, and quicker to read."""
    stretch, chosen = 1, frames
    while len(chosen) > 1 and sum(frame.size + _EACH for frame in chosen) > most:
        stretch *= 2
        stretches = (frames[first : first + stretch] for first in range(0, len(frames), stretch))
        chosen = [sorted(some, key=attrgetter("size"))[len(some) // 2] for some in stretches]
    return chosen


def _records(looked: _Looked, places: list[int]) -> Iterator[Record]:
    if not places:
        return
    with looked.path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        for entry in _decoded(file, end, looked.tables, places):
            if isinstance(entry, Record):
                yield entry


def _depth_in(looked: _Looked) -> str | None:
    with looked.path.open("rb") as file:
        frame = read_frame(file, looked.noted or BEGIN, os.fstat(file.fileno()).st_size)
    try:
        found = read_words(frame.blob)["notes"].get(EXECUTION_ORDER) if frame is not None else None
    except (ValueError, KeyError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def _as_written(words: str) -> bytes:
    """How words look in a blob: they are JSON, kept as a text in JSON."""
    return json.dumps(words)[1:-1].encode()


def _words(file: int, place: int, begin: bytes) -> bytes:
    """The beginning of a frame up to where its numbers come."""
    whole = HEAD + HEADER_LENGTH + int.from_bytes(begin[HEAD : HEAD + HEADER_LENGTH], "little")
    most = min(whole, AROUND + length_of(begin), _MOST_WORDS)
    return begin[:whole] if whole <= len(begin) else os.pread(file, most, place)


def _walk(file: BinaryIO, end: int, much: int, budget: ScanBudget | None = None) -> Iterator[tuple[int, bytes]]:
    """Where frames begin, and so many bytes from there on. Where there is damage, behind it. Of what is whole nothing
    is checked but the lengths, and nothing else is read: mapped into memory, a long journal would count as ours."""
    for place in framed_from(file, BEGIN, end, budget):
        yield place, os.pread(file.fileno(), much, place)


def _telling(places: list[int], most: int) -> list[int]:
    """The largest frame of each of so many stretches, and its successor."""
    lengths = [after - place for place, after in itertools.pairwise(places)]
    stretch = max(1, -(-len(lengths) // most))
    chosen: set[int] = set()
    for first in range(0, len(lengths), stretch):
        largest = max(range(first, min(first + stretch, len(lengths))), key=lengths.__getitem__)
        chosen.update((largest, largest + 1))
    return [places[index] for index in sorted(chosen)]


def _decoded(file: BinaryIO, end: int, tables: Iterable[int], places: Iterable[int]) -> Iterator[Entry]:
    decoder = Decoder(end)
    for place in itertools.chain(tables, places):
        try:
            frame = read_frame(file, place, end)
            entry = decoder.decode(frame.blob) if frame is not None else None
        except ValueError:
            continue
        if entry is not None:
            yield entry
