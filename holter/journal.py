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

from holter.codec import Decoder, Encoder
from holter.record import FORMAT, Entry

_HEADER = struct.Struct("<6sH")
_FRAME = struct.Struct("<II")
_MAGIC = b"HOLTER"
_READ_AT_ONCE = 1 << 20


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
        self._start_over()

    def _start_over(self) -> None:
        self._offset = 0
        self._identity: int | None = None
        self._decoder = Decoder()

    def read(self) -> Iterator[Entry]:
        """Entries not read yet, up to the first bad frame. A file that was replaced or cut is read from its start."""
        with self.path.open("rb", buffering=_READ_AT_ONCE) as file:
            status = os.fstat(file.fileno())
            if self._identity not in (None, status.st_ino) or status.st_size < self._offset:
                self._start_over()
            self._identity = status.st_ino
            if self._offset == 0 and not self._read_header(file.read(_HEADER.size), status.st_size):
                return
            file.seek(self._offset)
            for blob in _frames(file, status.st_size):
                try:
                    entry = self._decoder.decode(blob)
                except ValueError:
                    break
                self._offset += _FRAME.size + len(blob)
                if entry is not None:
                    yield entry
            self.unreadable_bytes = status.st_size - self._offset

    def _read_header(self, header: bytes, size: int) -> bool:
        if len(header) < _HEADER.size:  # being created just now, or cut off
            self.unreadable_bytes = size
            return False
        magic, version = _HEADER.unpack(header)
        if magic != _MAGIC:
            self.unreadable_bytes = size
            return False
        if version > FORMAT:
            raise ValueError(
                f"{self.path} was written in journal format {version}, this Holter reads up to {FORMAT}: "
                "upgrade it with `pip install -U holter`"
            )
        self._offset = _HEADER.size
        return True


def _frames(file: BinaryIO, size: int) -> Iterator[bytes]:
    """The blobs of the whole, intact frames from here on, up to the first that is neither."""
    while len(head := file.read(_FRAME.size)) == _FRAME.size:
        length, checksum = _FRAME.unpack(head)
        # A zero-filled tail would pass as empty frames; a damaged length must not make us read for ever.
        if length == 0 or length > size - file.tell():
            return
        blob = file.read(length)
        if len(blob) < length or zlib.crc32(blob, zlib.crc32(head[:4])) != checksum:
            return
        yield blob
