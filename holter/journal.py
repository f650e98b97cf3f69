"""The journal: an append-only file of entries, of which everything that is whole can be read whatever happened to it.

An entry is one write() whose result is checked, with no buffer of our own, so a killed process loses nothing that was
written. Its frames are numbered: a reader goes on behind what is damaged, puts back in order what was moved, and tells
what is missing or stands twice. It needs no lock, and goes on when the file grows. The first frame is room for an
ending, to be written in its place where a full disk takes nothing more.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import secrets
from array import array
from collections import Counter, deque
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

from holter.codec import Decoder, Encoder, UnknownLayers, is_table, pack_reserve, unpack_reserve
from holter.damage import Damage, judge
from holter.frames import (
    BEGIN,
    HEAD,
    Frame,
    file_number,
    frames_before,
    frames_from,
    is_begun,
    read_frame,
    write_frame,
    write_header,
)
from holter.record import Ending, Entry, Problem


class Journal:
    """The writing end of one file, which it creates and no one else writes to. Raises OSError where the disk does;
    the file then ends after the last whole entry, and the same entry can be tried again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o644)
        self._end, self._count = 0, 1  # bytes, and frames
        self._number = secrets.randbits(32)
        self._encoder = Encoder()
        try:
            self._write(write_header(self._number) + write_frame(pack_reserve(), self._number, 0))
        except OSError:
            os.close(self._file)
            path.unlink(missing_ok=True)
            raise

    def append(self, entry: Entry) -> None:
        encoder = self._encoder.copy()  # a table counts as written only when the write went through
        blobs = encoder.encode(entry)
        self._write(b"".join(write_frame(blob, self._number, self._count + at) for at, blob in enumerate(blobs)))
        self._encoder, self._count = encoder, self._count + len(blobs)

    def end_in_place(self, problem: Problem | None, ending: Ending) -> None:
        """Writes an ending over the room that was reserved for it: a full disk lets that through."""
        blob = write_frame(pack_reserve(problem, ending), self._number, 0)
        file = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)  # what is opened to append writes at the end alone
        try:
            if not os.path.sameopenfile(file, self._file):  # deleted, and another one made
                raise FileNotFoundError(errno.ENOENT, "the journal was replaced", str(self.path))
            if os.pwrite(file, blob, BEGIN) != len(blob):
                raise OSError(errno.ENOSPC, "only a part was written", str(self.path))
        finally:
            os.close(file)

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


class JournalReader:
    """Reads a journal from its start and, called again, what was appended since.

    Entries come in the order in which they were written, each once. A torn end is waited for: it may be an entry that
    is still being written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.starts = 0  # how often it was read from its start: again where the file was replaced or cut
        self._start_over()

    def _start_over(self) -> None:
        self.starts += 1
        self.damage = Damage()  # what is known of it; a torn end is not among it
        self._size = 0  # of the file, as it was last seen
        self._offset, self._expected = 0, 0  # where the last entry that was read ends, and the number after it
        self._last = 0, b""  # where its frame begins, and with which head: the checksum tells another file
        self._survey: deque[int] = deque()  # places of frames that are still to be read, where they are not in order
        self._torn: object = None  # the file and the place in it behind which nothing whole was found
        self._number: int | None = None  # of the file
        self._reserve: int | None = None  # where room for an ending is
        self._ending: list[Problem | Ending] = []  # what was said there
        self._short_at = 0  # the size of the file when it was too small for all that its records have
        self._has_all_tables = False  # they were looked for in all of the file
        self._decoder = Decoder()
        self.has_entries = False
        self._stopped = 0, 0  # the place behind the last whole frame, and the number of the next one
        self._is_begun = True  # behind it stands that next one, as far as it has been written

    @property
    def size(self) -> int:
        """Bytes of the file, as it was last seen."""
        return self._size

    @property
    def lost_tail(self) -> int:
        """Bytes behind the last whole frame that are no frame being written: a killed process leaves none."""
        return 0 if self._is_begun else max(0, self._size - max(self._offset, self._stopped[0]))

    @property
    def unreadable_bytes(self) -> int:
        """Damaged ones, and what comes after the last whole entry: a torn end, or one still being written."""
        return self.damage.unreadable_bytes + max(0, self._size - self._offset)

    def read(self) -> Iterator[Entry]:
        """Entries not read yet. A file that was replaced or cut is read from its start."""
        with self.path.open("rb", buffering=0) as file:
            found = os.fstat(file.fileno())
            if not self._goes_on(file, found.st_size):
                self._start_over()
            self._size = self._decoder.size = found.st_size
            self._is_begun = True  # until all is read
            if not self._expected:
                self._offset = self._read_header(file)
            for entry in self._read_on(file, (found.st_size, found.st_mtime_ns)):
                self.has_entries = True
                yield entry
            self._is_begun = self._is_being_written(file)
            for entry in self._read_reserve(file):
                self.has_entries = True
                yield entry

    def _is_being_written(self, file: BinaryIO) -> bool:
        if self._number is None:
            return self._size < BEGIN
        place, expected = self._stopped
        return is_begun(file, place, self._size, self._number, expected)

    def survey(self) -> None:
        """Look for damage in a journal that was not read yet, by its frames alone: nothing of it is decoded."""
        with self.path.open("rb", buffering=0) as file:
            self._size = os.fstat(file.fileno()).st_size
            self.has_entries = self._look_ahead(file, self._read_header(file), 0)
            self._stopped = self._offset, self._expected
            self._is_begun = self._is_being_written(file)

    def _read_header(self, file: BinaryIO) -> int:
        """Find out the number of the file, and return the place behind the header."""
        written = file_number(file, self.path)
        self._number = _number_of_most(file, self._size, written)
        is_cut_off = written is None and read_frame(file, 0, self._size) is not None
        if is_cut_off or written not in (None, self._number):
            self.damage += Damage(unreadable_bytes=BEGIN)
        return 0 if written is None else BEGIN

    def _goes_on(self, file: BinaryIO, size: int) -> bool:
        """Whether this is still the file that was read before, or one that begins like it."""
        if self._short_at and size > 2 * self._short_at:  # what was left out may find room now
            return False
        begin, head = self._last
        return size >= self._offset and os.pread(file.fileno(), len(head), begin) == head

    def _read_on(self, file: BinaryIO, state: tuple[int, int]) -> Iterator[Entry]:
        place, expected = self._offset, self._expected
        while True:
            while self._survey:
                frame = read_frame(file, self._survey.popleft(), self._size)
                if frame is not None and (entry := self._decoded(file, frame)) is not None:
                    yield entry
            frame = read_frame(file, place, self._size)
            if frame is None or (frame.file, frame.number) != (self._number, expected):
                if self._torn == (state, place) or not self._look_ahead(file, place, expected):
                    self._torn, self._stopped = (state, place), (place, expected)
                    return
                place, expected = self._offset, self._expected
                continue
            entry = self._decoded(file, frame)
            place, expected = frame.end, expected + 1
            if entry is not None or not frame.number:  # a table is read again until its record is there: one write
                self._read_until(file, frame, expected)
            if entry is not None:
                yield entry

    def _read_until(self, file: BinaryIO, last: Frame, expected: int) -> None:
        self._offset, self._expected = last.end, expected
        self._last = last.place, os.pread(file.fileno(), HEAD, last.place)

    def _look_ahead(self, file: BinaryIO, place: int, expected: int) -> bool:
        """Finds all whole frames behind a place where the next one is not, and says whether there are any."""
        places, numbers, after_damage = array("q"), array("q"), array("b")
        foreign = lost = is_behind = 0
        last: Frame | None = None
        for frame in frames_from(file, place, self._size):
            last, between = frame, frame.place - place
            lost, is_behind, place = lost + between, is_behind or between > 0, frame.end
            if self._number is None:
                self._number = frame.file
            if frame.file != self._number:
                foreign += 1
                continue
            places.append(frame.place)
            numbers.append(frame.number)
            after_damage.append(is_behind)
            is_behind = 0
        if last is None:
            return False
        chosen, damage = judge(numbers, after_damage, expected)
        self.damage += damage + Damage(foreign=foreign, unreadable_bytes=lost)
        self._survey.extend(places[at] for at in chosen.tolist())
        self._read_until(file, last, max((expected, *(numbers[at] + 1 for at in chosen[-1:].tolist()))))
        return True

    def _decoded(self, file: BinaryIO, frame: Frame) -> Entry | None:
        if not frame.number:
            self._reserve = frame.place
        left_out = self._decoder.left_out
        try:
            return self._decoder.decode(frame.blob)
        except UnknownLayers:
            self._find_tables(file)
            return self._decoder.decode(frame.blob, partly=True)
        except ValueError:  # whole, and yet no entry
            self.damage += Damage(damaged=1, unreadable_bytes=frame.end - frame.place)
            return None
        finally:
            if self._decoder.left_out > left_out:
                self.damage += Damage(excessive=1)
                self._short_at = self._short_at or self._size

    def _find_tables(self, file: BinaryIO) -> None:
        """Tables are repeated: where one was lost, another says the same."""
        if self._has_all_tables:
            return
        self._has_all_tables = True
        for frame in frames_from(file, BEGIN, self._size):
            if is_table(frame.blob):
                with contextlib.suppress(ValueError):
                    self._decoder.decode(frame.blob)

    def _read_reserve(self, file: BinaryIO) -> Iterator[Entry]:
        """What was said in the room for an ending, since it was last looked at."""
        frame = read_frame(file, self._reserve, self._size) if self._reserve is not None else None
        said = _said_in(frame)
        if said and said != self._ending:
            self._ending = said
            yield from said


def _number_of_most(file: BinaryIO, size: int, written: int | None) -> int | None:
    """Return the number in the header, unless most frames have another: then it is the header of another journal."""
    last = next(frames_before(file, size), None)
    if last is None or last.file == written:
        return written
    counts = Counter(frame.file for frame in frames_from(file, 0, size))
    most, count = counts.most_common(1)[0] if counts else (written, 0)
    return most if written is None or count > counts[written] else written


def _said_in(reserve: Frame | None) -> list[Problem | Ending]:
    try:
        return unpack_reserve(reserve.blob) if reserve is not None else []
    except ValueError:
        return []


_JUMBLED = 4  # frames at the end of a journal that are put in order


def read_backwards(path: Path) -> Iterator[bytes]:
    """The blobs of a journal from its last on: a look at the end of a long file, in no time.

    Where nothing whole ends with the file, because it was torn, the last whole frame is looked for.
    """
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        number = _number_of_most(file, size, file_number(file, path))
        frames = frames_before(file, size)
        own = (frame for frame in frames if number is None or frame.file == number)
        last = sorted(itertools.islice(own, _JUMBLED), key=attrgetter("number"), reverse=True)
        before = math.inf
        for frame in itertools.chain(last, own):
            if frame.number < before:
                before = frame.number
                yield frame.blob


def reserved_ending(path: Path) -> Ending | None:
    """How a run ended, where a full disk had no room to append that."""
    with path.open("rb", buffering=0) as file:
        frame = read_frame(file, BEGIN, os.fstat(file.fileno()).st_size)
    return next((said for said in _said_in(frame) if isinstance(said, Ending)), None)
