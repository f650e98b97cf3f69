"""The journal: an append-only file of entries, readable whatever happened to it.

A header, then frames: length, CRC32 of length and blob, blob. An entry is one write() whose result is checked, with
no buffer of our own, so a killed process loses nothing that was written. A reader takes the longest valid prefix,
needs no lock, and goes on when the file grows.
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

import numpy as np

from holter.codec import Decoder, Encoder
from holter.record import FORMAT, Entry

_HEADER = struct.Struct("<6sH")
_FRAME = struct.Struct("<II")
_MAGIC = b"HOLTER"
_READ_AT_ONCE = 1 << 20
_LARGEST_FRAME = 1 << 26  # that is looked for from its end


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
        if os.fstat(self._file).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the journal was deleted", str(self.path))
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
            if os.fstat(self._file).st_size != self._end:  # an earlier write was cut short, and so was its undoing
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
    length = struct.pack("<I", len(blob))
    return length + struct.pack("<I", zlib.crc32(blob, zlib.crc32(length))) + blob


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
            if self._offset == 0 and not _has_header(file, self.path):
                return
            place = self._offset or _HEADER.size
            self.unreadable_bytes = size - place
            file.seek(place)
            for head, blob in _frames(file, size):
                try:
                    entry = self._decoder.decode(blob)
                except ValueError:
                    return
                begin, place = place, place + len(head) + len(blob)
                if entry is not None:  # a table is read again until its record is there: both are one write
                    self._offset, self._last = place, (begin, head)
                    self.unreadable_bytes = size - place
                    yield entry

    def _goes_on(self, file: BinaryIO, size: int) -> bool:
        """Whether this is still the file that was read before, or one that begins like it."""
        begin, head = self._last
        file.seek(begin)
        return size >= self._offset and file.read(len(head)) == head


def _has_header(file: BinaryIO, path: Path) -> bool:
    file.seek(0)
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size:  # being created just now, or cut off
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


def _frames(file: BinaryIO, size: int) -> Iterator[tuple[bytes, bytes]]:
    """Heads and blobs of the whole, intact frames from here on, up to the first that is neither."""
    while len(head := file.read(_FRAME.size)) == _FRAME.size:
        length, checksum = _FRAME.unpack(head)
        # A damaged length must not make us read for ever. Zeros are no frame: their checksum would not be zero.
        if length > size - file.tell():
            return
        blob = file.read(length)
        if len(blob) < length or zlib.crc32(blob, zlib.crc32(head[:4])) != checksum:
            return
        yield head, blob


def read_backwards(path: Path) -> Iterator[bytes]:
    """The blobs of a journal from its last on: a look at the end of a long file, in no time.

    A frame is known by ending where its successor begins, with a checksum that fits. Only where nothing whole ends
    with the file, because it was torn, is the end looked for from the start.
    """
    with path.open("rb") as file:
        if not _has_header(file, path):
            return
        size = os.fstat(file.fileno()).st_size
        found = _frame_before(file, size)
        if found is None:
            found = _frame_before(file, _end_of_frames(file, size))
        while found is not None:
            start, blob = found
            yield blob
            found = _frame_before(file, start)


def _frame_before(file: BinaryIO, end: int) -> tuple[int, bytes] | None:
    """Where the frame that ends here starts, and its blob; None where no frame does."""
    reach, limit = 0, min(end - _HEADER.size, _LARGEST_FRAME)
    while reach < limit:
        reach = min(max(8 * reach, 1 << 13), limit)
        file.seek(end - reach)
        data = file.read(reach)
        if len(data) < reach:  # cut just now
            return None
        for place in _places_of_length(data):
            _, checksum = _FRAME.unpack_from(data, place)
            blob = data[place + _FRAME.size :]
            if zlib.crc32(blob, zlib.crc32(data[place : place + 4])) == checksum:
                return end - reach + place, blob
    return None


def _places_of_length(data: bytes) -> list[int]:
    """Where in the data a length stands that reaches exactly to its end."""
    places = []
    for shift in range(4):
        words = np.frombuffer(data[shift : shift + (len(data) - shift) // 4 * 4], dtype="<u4")
        at = shift + 4 * np.arange(len(words))
        places += at[words == len(data) - _FRAME.size - at].tolist()
    return places


def _end_of_frames(file: BinaryIO, size: int) -> int:
    file.seek(_HEADER.size)
    return _HEADER.size + sum(len(head) + len(blob) for head, blob in _frames(file, size))
