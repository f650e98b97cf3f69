"""The layout of a journal: a header, then frames. Found again from any byte, in time that grows with the file alone.

A header holds the format, a random number of this file, and its own checksum. A frame holds the length of its blob,
the number of the file, its own number, a checksum of these and of the blob, the blob, and the length again. So a frame
that is missing, repeated, moved or of another file is recognised, and the file can be read from its end too.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from holter.codec import HEADER_LENGTH, SIGN
from holter.record import FORMAT

_HEADER = struct.Struct("<6sHII")  # magic, format, number of the file, checksum of these
_NUMBERS = struct.Struct("<III")  # of a frame: length of its blob, number of the file, its own
_LENGTH = struct.Struct("<I")
_MAGIC = b"HOLTER"
BEGIN, LENGTH = _HEADER.size, _LENGTH.size  # where the first frame begins; bytes of a length
HEAD = _NUMBERS.size + 4  # bytes before a blob
AROUND = HEAD + LENGTH  # what a frame has besides its blob
SIGN_AT = HEAD + HEADER_LENGTH  # in a frame
_MOST_FRAMES = 2 << 10  # bytes that most frames have
# Bytes that are looked through at once: little at first, since the next frame is mostly near.
_FIRST_LOOK, _LARGEST_LOOK = 4 << 10, 1 << 20
# Bytes in which the beginning of a frame is looked for, backwards: at first, and at most.
_LOOK_BACK, _FARTHEST_BACK = 64 << 10, 64 << 20
_MOST_BACK = 128 << 20  # bytes in which the ends of frames are looked for in all, backwards: about 0.2 s
_TRY = 4 << 10  # bytes that are searched in the time that it takes to try one sign


class Frame(NamedTuple):
    place: int  # of its first byte
    file: int  # the number of the file that it was written to
    number: int
    blob: bytes

    @property
    def end(self) -> int:
        return self.place + AROUND + len(self.blob)


class Spare:
    """Bytes that may still be checksummed in vain. Frames made to overlap would otherwise take quadratic time.

    Damage costs each byte once; three times as much is only asked for by a file that was made to.
    """

    def __init__(self, size: int) -> None:
        self.left = 3 * size + (1 << 16)


class ScanBudget:
    """Bytes that may still be searched for the signs of frames. To try a sign takes as long as to search 4 KiB."""

    def __init__(self, left: float = math.inf) -> None:
        self.left = left

    def spend(self, searched: int, tried: int = 0) -> None:
        self.left -= searched + tried * _TRY


def write_header(number: int) -> bytes:
    header = _HEADER.pack(_MAGIC, FORMAT, number, 0)[:-4]
    return header + _LENGTH.pack(zlib.crc32(header))


def write_frame(blob: bytes, file: int, number: int) -> bytes:
    numbers = _NUMBERS.pack(len(blob), file, number)
    return b"".join((numbers, _checksum(numbers, blob), blob, numbers[:LENGTH]))


def _checksum(numbers: bytes, blob: bytes) -> bytes:
    return _LENGTH.pack(zlib.crc32(blob, zlib.crc32(numbers)))


def read_frame(file: BinaryIO, place: int, end: int, spare: Spare | None = None) -> Frame | None:
    """The frame that begins here; None where no whole one does before the end."""
    # Not by the file's own buffer, which reads much for little; and where frames are looked for, most are none.
    begin = os.pread(file.fileno(), _MOST_FRAMES if spare is None else HEAD, place)
    length = length_of(begin)
    if AROUND + length <= len(begin):
        is_framed = 0 < length <= end - place - AROUND and begin.startswith(begin[:LENGTH], HEAD + length)
    else:
        is_framed = _is_framed(file, begin, place, end)  # a damaged length must not be read for ever
    if not is_framed or (spare is not None and spare.left < length):
        return None
    head = begin[:HEAD]
    _, number_of_file, number = _NUMBERS.unpack_from(head)
    blob = begin[HEAD : HEAD + length]
    blob = blob if len(blob) == length else os.pread(file.fileno(), length, place + HEAD)
    if head[-4:] == _checksum(head[:-4], blob):
        return Frame(place, number_of_file, number, blob)
    if spare is not None:
        spare.left -= length
    return None


def is_framed(file: BinaryIO, place: int, end: int) -> bool:
    """Whether a length stands here, and again where it says. No blob is empty, but a disk may leave zeros behind."""
    return _is_framed(file, os.pread(file.fileno(), LENGTH, place), place, end)


def _is_framed(file: BinaryIO, begin: bytes, place: int, end: int) -> bool:
    after = place + HEAD + length_of(begin)
    return place + HEAD < after <= end - LENGTH and os.pread(file.fileno(), LENGTH, after) == begin[:LENGTH]


def is_begun(file: BinaryIO, place: int, end: int, number_of_file: int, number: int) -> bool:
    """Whether what stands here up to the end can be the first bytes of this frame, as a killed process leaves it."""
    head = os.pread(file.fileno(), HEAD, place)[: max(0, end - place)]
    known = _NUMBERS.pack(length_of(head), number_of_file, number)[LENGTH:]
    is_own = head[LENGTH : _NUMBERS.size] == known[: max(0, len(head) - LENGTH)]
    return is_own and (len(head) < LENGTH or length_of(head) + AROUND > end - place)


def length_of(begin: bytes) -> int:
    """Of the blob in a frame that begins like this."""
    return int.from_bytes(begin[:LENGTH], "little")


def number_of(begin: bytes) -> int:
    """Of a frame that begins like this."""
    return int(_NUMBERS.unpack_from(begin)[2])


def file_number(file: BinaryIO, path: Path) -> int | None:
    """The number of a journal by its header; None where that is damaged, cut off or of something else.

    ValueError where another version of Holter wrote it.
    """
    header = os.pread(file.fileno(), BEGIN, 0).ljust(BEGIN, b"\0")
    magic, version, number, checksum = _HEADER.unpack(header)
    is_whole = checksum == zlib.crc32(header[:-4])
    if magic != _MAGIC or not version:
        return None
    # Of another version, or of ours with a damaged header: our frames follow it, and its checksum does not hold.
    if version != FORMAT and (is_whole or next(frames_from(file, BEGIN, _LARGEST_LOOK), None) is None):
        raise ValueError(_other_version(path, version))
    return number if is_whole else None


def _other_version(path: Path, version: int) -> str:
    written = f"{path} was written in journal format {version}"
    if version > FORMAT:
        return f"{written}, this Holter reads up to {FORMAT}: upgrade it with `pip install -U holter`"
    return f"{written} by an earlier Holter, this one reads format {FORMAT}: read it with the version that wrote it"


# Forwards -----------------------------------------------------------------------------------------------------------


def frames_from(file: BinaryIO, place: int, end: int) -> Iterator[Frame]:
    """All whole frames from here to the end, in the order in which they stand, whatever lies between them."""
    spare, signs = Spare(end - place), _Signs(file, end, ScanBudget())
    while place + AROUND <= end and spare.left > 0:
        frame = read_frame(file, place, end, spare)
        if frame is None:
            place = signs.after(place) - SIGN_AT
            continue
        yield frame
        place = frame.end


def framed_from(file: BinaryIO, place: int, end: int, budget: ScanBudget | None = None) -> Iterator[int]:
    """Where frames begin, by their lengths and how their blobs do. Checksums are not looked at.

    The budget is for what lies between frames.
    """
    budget = budget or ScanBudget()
    signs = _Signs(file, end, budget)
    while place + AROUND <= end and budget.left > 0:
        begin = os.pread(file.fileno(), SIGN_AT + len(SIGN), place)
        if begin.startswith(SIGN, SIGN_AT) and _is_framed(file, begin, place, end):
            yield place
            place += AROUND + length_of(begin)
        else:
            place = signs.after(place) - SIGN_AT


class _Signs:
    """Where blobs may begin, by how every blob does."""

    def __init__(self, file: BinaryIO, end: int, budget: ScanBudget) -> None:
        self._file, self._end, self._budget = file, end, budget
        self._seen, self._seen_from = b"", 0

    def after(self, frame: int) -> int:
        """The first sign of a frame that begins behind this one; the end of the file where there is none."""
        place, much = frame + SIGN_AT + 1, _FIRST_LOOK
        self._budget.spend(0, tried=1)
        while place < self._end and self._budget.left > 0:
            at = self._seen.find(SIGN, place - self._seen_from) if place >= self._seen_from else -1
            if at >= 0:
                return self._seen_from + at
            read_until = self._seen_from + len(self._seen)
            if self._seen_from <= place < read_until:  # one may begin in the last bytes that were seen
                place = max(place, read_until - len(SIGN) + 1)
            self._seen = os.pread(self._file.fileno(), min(much, self._end - place), place)
            self._seen_from = place
            self._budget.spend(len(self._seen))
            if len(self._seen) < len(SIGN):
                break
            much = min(2 * much, _LARGEST_LOOK)
        return self._end + SIGN_AT


# Backwards ----------------------------------------------------------------------------------------------------------


def frames_before(file: BinaryIO, end: int, lowest: int = BEGIN) -> Iterator[Frame]:
    """The whole frames that end here or before, from the last on, whatever lies between them. Nothing below the lowest
    place is read."""
    spare, budget = Spare(end - lowest), ScanBudget(_MOST_BACK)
    while end > lowest:
        frame = _frame_until(file, end, spare, lowest)
        if frame is None:
            frame = _last_before(file, end, spare, lowest, budget)
        if frame is None:
            return
        yield frame
        end = frame.place


def _frame_until(file: BinaryIO, end: int, spare: Spare, lowest: int) -> Frame | None:
    """The frame that ends here."""
    place = end - AROUND - length_of(os.pread(file.fileno(), LENGTH, max(0, end - LENGTH)))
    return read_frame(file, place, end, spare) if place >= lowest else None


def _last_before(file: BinaryIO, end: int, spare: Spare, lowest: int, budget: ScanBudget) -> Frame | None:
    """The last whole frame that ends before, as far as that is looked for."""
    for place in _places_before(file, end, end, lowest, budget):
        if spare.left <= 0:
            return None
        if (frame := read_frame(file, place, end, spare)) is not None:
            return frame
    return None


def frame_before(file: BinaryIO, place: int, end: int, lowest: int, budget: ScanBudget) -> int | None:
    """Where the last frame begins that begins here or before, wherever in the file this is; None where none does that
    is near and not below the lowest place, or the budget is spent.

    Found by how every blob begins, so that nobody has to come along from the start. Its checksum is not looked at.
    """
    return next((one for one in _places_before(file, place, end, lowest, budget) if is_framed(file, one, end)), None)


def _places_before(file: BinaryIO, place: int, end: int, lowest: int, budget: ScanBudget) -> Iterator[int]:
    """Where frames may begin, here or before, from the last on. Every byte is looked at once."""
    lowest = max(lowest, place - _FARTHEST_BACK) + SIGN_AT
    after, much = place + SIGN_AT + 1, _LOOK_BACK  # it begins before that
    while after > lowest and budget.left > 0:
        first = max(lowest, after - much)
        seen = os.pread(file.fileno(), after - first + len(SIGN) - 1, first)
        budget.spend(len(seen))
        at = len(seen)
        while (at := seen.rfind(SIGN, 0, at)) >= 0 and budget.left > 0:
            budget.spend(0, tried=1)
            yield first + at - SIGN_AT
            at += len(SIGN) - 1  # where one that begins before that ends at the latest
        after, much = first, min(2 * much, 1 << 22)
