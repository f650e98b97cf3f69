"""The journal gives back every entry that is still whole, whatever happened to the file, and tells what is not."""

from __future__ import annotations

import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holter import frames
from holter import journal as module
from holter.codec import Decoder
from holter.frames import BEGIN, HEAD, Frame
from holter.journal import Journal, JournalReader
from holter.record import FORMAT, Ending, Entry, LayerRows, Problem, Record
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows
from tests.test_codec import fingerprints

AB, CD, EFG = ("a", "b"), ("c", "d"), ("e" * 300, "f", "g")
real_frame = module.read_frame
TAIL = 64 << 10


def some_rows(layers: tuple[str, ...], seed: int, histograms: bool) -> LayerRows:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(len(layers), len(COLUMNS)))
    found = Histograms.of([rng.normal(size=50) for _ in layers]) if histograms else None
    return LayerRows(layers, Rows(values, found))


def some_entries(count: int, layers: int = 16) -> list[Entry]:
    """Steps of a training whose layers change once, with a problem and an ending among them."""
    entries: list[Entry] = []
    for step in range(count):
        names = tuple(f"block.{i}.weight" for i in range(layers if step < count // 2 else layers + 1))
        rows = {"gradient": some_rows(names, step, histograms=step % 3 == 0)}
        entries.append(Record(step, 1e9 + step, {"loss": 1.0 / (step + 1), "rate": float("nan")}, rows, {"at": "clip"}))
    entries.insert(count // 3, Problem(count // 3, 1e9, "write", "OSError"))
    return [*entries, Ending(2e9, "finished")]


def write(path: Path, entries: Sequence[Entry]) -> list[int]:
    """Writes a journal; returns where each entry ends."""
    journal, ends = Journal(path), []
    for entry in entries:
        journal.append(entry)
        ends.append(path.stat().st_size)
    journal.close()
    return ends


def read(path: Path) -> list[Entry]:
    return list(JournalReader(path).read())


# Damage --------------------------------------------------------------------------------------------------------


class Remembering(Decoder):
    """Decodes a blob once: tens of thousands of cuts hold the same blobs. An altered blob is decoded for real."""

    known: dict[bytes, Entry]

    def decode(self, blob: bytes) -> Entry | None:
        if blob not in self.known:
            entry = super().decode(blob)
            if entry is None:
                return None
            self.known[blob] = entry
        return self.known[blob]


@pytest.fixture
def remembering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Remembering, "known", {}, raising=False)
    monkeypatch.setattr(module, "Decoder", Remembering)


class Damaged:
    """A journal on which damage is done: knows how many whole entries end before a given byte."""

    def __init__(self, directory: Path, count: int = 18) -> None:
        self.path = directory / "rank-0.journal"
        self.ends = write(self.path, some_entries(count))
        self.data = self.path.read_bytes()
        self.truth = read(self.path)
        assert len(self.truth) == count + 2

    def whole_before(self, place: int) -> int:
        return bisect_right(self.ends, place)

    def untouched(self, begin: int, end: int) -> list[Entry]:
        """The entries of which no byte is in between."""
        begins = [0, *self.ends]
        return [
            entry for entry, a, b in zip(self.truth, begins, self.ends, strict=False) if b <= begin or a >= max(end, 1)
        ]

    def wrong(self, place: int, written: bytes) -> str:
        """Writes these bytes at this place, reads, and undoes it; says what was wrong with what was read."""
        there = self.data[place : place + len(written)]
        differs = [at for at, (a, b) in enumerate(zip(there, written, strict=False)) if a != b] or [len(there), 0]
        if there == written:
            return ""
        with self.path.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), written, place)
            reader = JournalReader(self.path)
            found, expected = list(reader.read()), self.untouched(place + differs[0], place + differs[-1] + 1)
            os.pwrite(file.fileno(), there, place)
            file.truncate(len(self.data))
        found = [entry for entry in found if entry not in self.truth or entry in expected]  # a table has a twin
        if found != expected and fingerprints(found) != fingerprints(expected):
            return f"{len(found)} entries of {len(expected)} whole ones, damaged at byte {place + differs[0]}"
        return "" if reader.unreadable_bytes else f"not told: damage at byte {place + differs[0]}"


def wrong_when_cut(damaged: Damaged, places: Iterator[int] | range) -> list[str]:
    """Cuts the file at these places, from the last on; the file is shortened in place, as a crash leaves it."""
    found = []
    damaged.path.write_bytes(damaged.data)
    for place in sorted(places, reverse=True):
        os.truncate(damaged.path, place)
        entries, whole = read(damaged.path), damaged.whole_before(place)
        if entries != damaged.truth[:whole]:
            found.append(f"{len(entries)} entries of {whole} when cut at byte {place}")
    return found


@pytest.mark.usefixtures("remembering")
def test_a_file_cut_at_any_byte_gives_all_its_whole_entries(tmp_path: Path) -> None:
    """P12: cut at every single byte of the last 64 KiB."""
    damaged = Damaged(tmp_path)
    size = len(damaged.data)
    assert size > TAIL + BEGIN
    assert wrong_when_cut(damaged, range(size - TAIL, size + 1)) == []
    assert wrong_when_cut(damaged, range(200)) == []


def frames_but_the_last(file: Any, place: int, end: int, spare: Any = None) -> Frame | None:
    """The planted twin: a whole frame that ends with the file is taken for torn."""
    return real_frame(file, place, end - 1, spare)


def frames_without_checksum(file: Any, place: int, end: int, spare: Any = None) -> Frame | None:
    """The planted twin: lengths are believed, checksums not looked at."""
    length, number_of_file, number = struct.unpack("<III", os.pread(file.fileno(), 12, place).ljust(12, b"\0"))
    if not 0 < length <= end - place - HEAD:
        return None
    return Frame(place, number_of_file, number, os.pread(file.fileno(), length, place + HEAD))


@pytest.mark.usefixtures("remembering")
def test_a_reader_that_loses_whole_entries_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P12: the planted twin of the cuts."""
    damaged = Damaged(tmp_path)
    monkeypatch.setattr(module, "read_frame", frames_but_the_last)
    monkeypatch.setattr(frames, "read_frame", frames_but_the_last)
    assert wrong_when_cut(damaged, range(len(damaged.data) - 4000, len(damaged.data) + 1))


def zero_filled(damaged: Damaged) -> list[str]:
    """Zeros after the end, and in place of the last bytes: blocks that were allocated and never written."""
    size = len(damaged.data)
    longer = [damaged.wrong(size, bytes(more)) for more in (*range(1, 80), 4096, 65536, 1 << 20)]
    lost = [damaged.wrong(size - lost, bytes(lost)) for lost in (*range(1, 200), *range(200, 40_000, 97))]
    return [one for one in (*longer, *lost) if one]


def flipped(damaged: Damaged, count: int) -> list[str]:
    rng = np.random.default_rng(12)
    places = rng.integers(0, len(damaged.data), size=count).tolist()
    found = [damaged.wrong(place, bytes([damaged.data[place] ^ 1 << int(rng.integers(8))])) for place in places]
    return [one for one in found if one]


@pytest.mark.usefixtures("remembering")
def test_a_tail_of_zeros_is_no_entry(tmp_path: Path) -> None:
    """P12: what a file system leaves after a crash: zeros appended, or in place of the last bytes."""
    assert zero_filled(Damaged(tmp_path)) == []


@pytest.mark.usefixtures("remembering")
def test_a_flipped_bit_never_makes_a_wrong_entry(tmp_path: Path) -> None:
    """P12: 2,500 single bits: every entry but the one that was hit is read, and the damage is told."""
    assert flipped(Damaged(tmp_path), 2500) == []


@pytest.mark.usefixtures("remembering")
@pytest.mark.parametrize("damage", [zero_filled, lambda damaged: flipped(damaged, 200)], ids=["zeros", "flips"])
def test_without_checksums_damage_would_pass(
    damage: Callable[[Damaged], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: the planted twin of zeros and flips."""
    damaged = Damaged(tmp_path)
    monkeypatch.setattr(module, "read_frame", frames_without_checksum)
    assert damage(damaged)


def test_a_flipped_bit_in_the_header_costs_nothing(tmp_path: Path) -> None:
    """P12: every bit of it, those of the format too: no upgrade would help."""
    damaged = Damaged(tmp_path, count=3)
    truth = fingerprints(damaged.truth)
    for bit in range(8 * BEGIN):
        data = bytearray(damaged.data)
        data[bit // 8] ^= 1 << bit % 8
        damaged.path.write_bytes(data)
        assert fingerprints(read(damaged.path)) == truth, bit


@pytest.mark.parametrize("data", [b"", b"H", b"HOLTER", b"PK\x03\x04" * 99, b"\x80\x04\x95" * 50, bytes(4096)])
def test_a_file_that_is_no_journal_has_no_entries(data: bytes, tmp_path: Path) -> None:
    """P12: and every byte of it is told to be unreadable."""
    path = tmp_path / "rank-0.journal"
    path.write_bytes(data)
    reader = JournalReader(path)
    assert list(reader.read()) == [] and reader.unreadable_bytes == len(data)


def test_a_journal_of_a_newer_version_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """A guess at what a newer Holter meant would be a wrong record."""
    path = tmp_path / "rank-0.journal"
    rest = Damaged(tmp_path, count=3).data[BEGIN:]
    begin = struct.pack("<6sHI", b"HOLTER", FORMAT + 1, 7)
    for header in (begin, begin + struct.pack("<I", zlib.crc32(begin)) + rest):  # also where frames look like ours
        path.write_bytes(header)
        with pytest.raises(ValueError, match=r"format 3, this Holter reads up to 2: upgrade it with `pip install"):
            read(path)


def test_unreadable_bytes_are_counted(tmp_path: Path) -> None:
    """What a crash tore off is told, and a whole file has none."""
    path = tmp_path / "rank-0.journal"
    ends = write(path, some_entries(3))
    reader = JournalReader(path)
    assert len(list(reader.read())) == 5 and reader.unreadable_bytes == 0
    os.truncate(path, ends[-1] - 7)
    reader = JournalReader(path)
    assert len(list(reader.read())) == 4 and reader.unreadable_bytes == ends[-1] - 7 - ends[-2]


# Growing and replaced files ---------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(places=st.lists(st.floats(0, 1), max_size=12))
def test_a_growing_file_is_read_as_if_at_once(places: list[float], tmp_path_factory: pytest.TempPathFactory) -> None:
    """P18: whatever part of it is there when the reader looks."""
    directory = tmp_path_factory.mktemp("growing")
    write(directory / "whole", some_entries(9))
    data = (directory / "whole").read_bytes()
    path = directory / "rank-0.journal"
    path.touch()
    reader, found = JournalReader(path), []
    for place in sorted([*(int(p * len(data)) for p in places), len(data)]):
        with path.open("ab") as file:
            file.write(data[file.tell() : place])
        found += reader.read()
    assert fingerprints(found) == fingerprints(some_entries(9))
    assert list(reader.read()) == [] and reader.starts == 1


def replace_by_another_inode(path: Path, data: bytes) -> None:
    (path.parent / "new").write_bytes(data)
    (path.parent / "new").replace(path)


@pytest.mark.parametrize("replace", [replace_by_another_inode, Path.write_bytes])
@pytest.mark.parametrize("count", [1, 50, 500])
def test_a_replaced_file_is_read_from_its_start(
    replace: Callable[[Path, bytes], None], count: int, tmp_path: Path
) -> None:
    """P18: shorter, as long or longer than what was read before, on the same inode or another."""
    path = tmp_path / "rank-0.journal"
    write(path, some_entries(4))
    reader = JournalReader(path)
    assert len(list(reader.read())) == 6
    fresh = [Record(step, 7e8 + step, {"loss": 3.0}) for step in range(count)]
    write(tmp_path / "other", fresh)
    replace(path, (tmp_path / "other").read_bytes())
    assert fingerprints(list(reader.read())) == fingerprints(fresh) and reader.starts == 2


def test_a_copy_that_grew_is_read_on(tmp_path: Path) -> None:
    """P18: a synchronised copy of a run gets a new inode each time, and is the same file all the same."""
    path = tmp_path / "rank-0.journal"
    ends = write(tmp_path / "source", some_entries(5))
    data = (tmp_path / "source").read_bytes()
    path.write_bytes(data[: ends[2]])
    reader = JournalReader(path)
    assert len(list(reader.read())) == 3
    replace_by_another_inode(path, data)
    assert fingerprints(list(reader.read())) == fingerprints(some_entries(5)[3:]) and reader.starts == 1


def test_a_file_cut_within_an_entry_that_was_read_is_read_anew(tmp_path: Path) -> None:
    """P18: a copy that was restored is shorter than what was seen; the reader does not wait for the old end."""
    path = tmp_path / "rank-0.journal"
    ends = write(path, some_entries(4))
    reader = JournalReader(path)
    assert len(list(reader.read())) == 6
    os.truncate(path, ends[-1] - 5)
    assert fingerprints(list(reader.read())) == fingerprints(some_entries(4)[:5]) and reader.starts == 2


def test_names_that_were_torn_from_their_record_are_not_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: a write that stopped after the table of layers is taken back, and another entry comes in its place."""
    monkeypatch.setattr(module.secrets, "randbits", lambda bits: 7)  # it is one file
    path = tmp_path / "rank-0.journal"
    first, second, other = (
        Record(s, 1.0, rows={"gradient": some_rows(n, s, False)}) for s, n in enumerate((AB, CD, EFG))
    )
    ends = write(tmp_path / "planned", [first, second])
    write(tmp_path / "changed", [first, other])
    path.write_bytes((tmp_path / "planned").read_bytes()[: ends[-1] - 5])
    reader = JournalReader(path)
    assert fingerprints(list(reader.read())) == fingerprints([first])
    path.write_bytes((tmp_path / "changed").read_bytes())
    assert fingerprints(list(reader.read())) == fingerprints([other]) and reader.starts == 1
