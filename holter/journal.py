"""The journal: an append-only file of entries, readable whatever happened to it.

A header, then frames: length, CRC32 of length and blob, blob, and the length again, so that the file can be read
from its end too. An entry is one write() whose result is checked, with no buffer of our own, so a killed process
loses nothing that was written. A reader takes the longest valid prefix, needs no lock, and goes on when the file
grows.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from holter.codec import HEADER_LENGTH, SIGN, Decoder, Encoder
from holter.record import FORMAT, Ending, Entry

_HEADER = struct.Struct("<6sH")
_LENGTH = struct.Struct("<I")
BEGIN, LENGTH = _HEADER.size, _LENGTH.size  # where the first frame begins; bytes of a length
HEAD = 2 * LENGTH  # length and checksum
AROUND = 3 * LENGTH  # what a frame has besides its blob
_MAGIC = b"HOLTER"
_READ_AT_ONCE = 1 << 20
_SIGN_AT = HEAD + HEADER_LENGTH  # in a frame
# Bytes in which the beginning of a frame is looked for: at first, and at most.
_LOOK_BACK, _FARTHEST_BACK = 64 << 10, 64 << 20


class Journal:
    """The writing end of one file, which it creates and no one else writes to. Raises OSError where the disk does;
    the file then ends after the last whole entry, and the same entry can be tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o644)
        self._end = 0
        self._encoder = Encoder()
        try:
            self._write(_HEADER.pack(_MAGIC, FORMAT))
        except OSError:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise

    def append(self, entry: Entry) -> None:
        encoder = self._encoder.copy()  # a table counts as written only when the write went through
        self._write(b"".join(_frame(blob) for blob in encoder.encode(entry)))
        self._encoder = encoder

    def touch(self) -> None:
        """A sign of life: readers tell a crashed run by a file that nobody touches any more."""
        os.utime(self._file)

    def close(self) -> None:
        os.close(self._file)

    def _write(self, data: bytes) -> None:
        try:
            found = os.fstat(self._file)
            if found.st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "the journal was deleted", str(self.path))
            if found.st_size != self._end:  # an earlier write was cut short, and so was its undoing
                os.ftruncate(self._file, self._end)
            written = os.write(self._file, data)
            if written != len(data):  # a full disk may take a part and raise nothing
                raise OSError(errno.ENOSPC, "only a part was written", str(self.path))
        except OSError:
            self._undo()
            raise
        self._end += len(data)

    def _undo(self) -> None:
        # Where this fails too it is tried again before the next write; until then readers stop at the bad frame.
        with contextlib.suppress(OSError):
            os.ftruncate(self._file, self._end)


def _frame(blob: bytes) -> bytes:
    return _head(blob) + blob + _LENGTH.pack(len(blob))


def _head(blob: bytes) -> bytes:
    length = _LENGTH.pack(len(blob))
    return length + _LENGTH.pack(zlib.crc32(blob, zlib.crc32(length)))


class JournalReader:
    """Reads a journal from its start and, called again, what was appended since."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable_bytes = 0  # after the last whole entry: a torn tail, or one still being written
        self.starts = 0  # how often it was read from its start: again where the file was replaced or cut
        self._start_over()

    def _start_over(self) -> None:
        self.starts += 1
        self._offset = 0  # where the last entry that was read ends
        self._last = 0, b""  # where its frame begins, and with which head: the checksum tells another file
        self._decoder = Decoder()

    def read(self) -> Iterator[Entry]:
        """Entries not read yet, up to the first bad frame. A file that was replaced or cut is read from its start."""
        with self.path.open("rb", buffering=_READ_AT_ONCE) as file:
            size = os.fstat(file.fileno()).st_size
            if not self._goes_on(file, size):
                self._start_over()
            self.unreadable_bytes = size
            if self._offset == 0 and not has_header(file, self.path):
                return
            place = self._offset or BEGIN
            self.unreadable_bytes = size - place
            file.seek(place)
            for head, blob in _frames(file, size):
                try:
                    entry = self._decoder.decode(blob)
                except ValueError:
                    return
                begin, place = place, place + AROUND + len(blob)
                if entry is not None:  # a table is read again until its record is there: both are one write
                    self._offset, self._last = place, (begin, head)
                    self.unreadable_bytes = size - place
                    yield entry

    def _goes_on(self, file: BinaryIO, size: int) -> bool:
        """Whether this is still the file that was read before, or one that begins like it."""
        begin, head = self._last
        file.seek(begin)
        return size >= self._offset and file.read(len(head)) == head


def has_header(file: BinaryIO, path: Path) -> bool:
    file.seek(0)
    header = file.read(BEGIN)
    if len(header) < BEGIN:  # being created just now, or cut off
        return False
    magic, version = _HEADER.unpack(header)
    if magic != _MAGIC:
        return False
    if version > FORMAT:
        raise ValueError(
            f"{path} was written in journal format {version}, this Holter reads up to {FORMAT}: "
            "upgrade it with `pip install -U holter`"
        )
    return True


def _frames(file: BinaryIO, end: int) -> Iterator[tuple[bytes, bytes]]:
    """Heads and blobs of the whole, intact frames from here to the end, up to the first that is neither."""
    while frame := read_frame(file, end):
        yield frame


def read_frame(file: BinaryIO, end: int) -> tuple[bytes, bytes] | None:
    """Head and blob of the frame that begins here; None where no whole one does before the end."""
    head = file.read(HEAD)
    length = _number(head[:LENGTH])
    if len(head) < HEAD or file.tell() + length + LENGTH > end:  # a damaged length must not be read for ever
        return None
    blob, length_again = file.read(length), file.read(LENGTH)
    return (head, blob) if head == _head(blob) and head.startswith(length_again) else None


def _number(length: bytes) -> int:
    return int.from_bytes(length, "little")


def read_backwards(path: Path) -> Iterator[bytes]:
    """The blobs of a journal from its last on: a look at the end of a long file, in no time.

    Where nothing whole ends with the file, because it was torn, the last whole frame is looked for.
    """
    with path.open("rb") as file:
        if not has_header(file, path):
            return
        end = os.fstat(file.fileno()).st_size
        if not _blob_before(file, end):
            end = _whole_until(file, end)
        while blob := _blob_before(file, end):
            yield blob
            end -= AROUND + len(blob)


def _whole_until(file: BinaryIO, end: int) -> int:
    """Where the last whole frame before the end of a torn file ends."""
    place = end
    while (found := frame_before(file, place, end)) is not None:
        file.seek(found)
        if read_frame(file, end):
            return file.tell()
        place = found - 1
    file.seek(BEGIN)  # nothing near: damage without end
    return BEGIN + sum(AROUND + len(blob) for _, blob in _frames(file, end))


def frame_before(file: BinaryIO, place: int, end: int, lowest: int = BEGIN) -> int | None:
    """Where the last frame begins that begins here or before, wherever in the file this is; None where none does that
    is near and not below the lowest place.

    Found by how every blob begins, so that nobody has to come along from the start. Its checksum is not looked at.
    """
    lowest = max(lowest, place - _FARTHEST_BACK) + _SIGN_AT
    after, much = place + _SIGN_AT + 1, _LOOK_BACK  # it begins before that
    while after > lowest:
        first = max(lowest, after - much)
        file.seek(first)
        seen = file.read(after - first + len(SIGN) - 1)
        at = len(seen)
        while (at := seen.rfind(SIGN, 0, at)) >= 0:
            if is_framed(file, first + at - _SIGN_AT, end):
                return first + at - _SIGN_AT
            at += len(SIGN) - 1  # where one that begins before that ends at the latest
        after, much = first, min(2 * much, 1 << 22)
    return None


def is_framed(file: BinaryIO, place: int, end: int) -> bool:
    """Whether a length stands here, and again where it says. No blob is empty, but a disk may leave zeros behind."""
    file.seek(place)
    length = file.read(LENGTH)
    after = place + HEAD + _number(length)
    file.seek(after)
    return place + HEAD < after <= end - LENGTH and file.read(LENGTH) == length


def last_ending(path: Path) -> Ending | None:
    """How a run ended, by the last frame of its journal: it stands there too where damage hides what comes before."""
    with path.open("rb") as file:
        blob = _blob_before(file, os.fstat(file.fileno()).st_size) if has_header(file, path) else b""
    try:
        entry = Decoder().decode(blob) if blob else None
    except ValueError:
        return None
    return entry if isinstance(entry, Ending) else None


def _blob_before(file: BinaryIO, end: int) -> bytes:
    """The blob of the frame that ends here; empty where none does."""
    file.seek(max(0, end - LENGTH))
    place = end - AROUND - _number(file.read(LENGTH))
    if place < BEGIN:
        return b""
    file.seek(place)
    frame = read_frame(file, end)
    return frame[1] if frame else b""
