"""Damage to a journal: every frame that is still whole is read, once and in order, and what is not is told."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from holter.comparison.reading import read_run
from holter.damage import Damage
from holter.frames import AROUND, BEGIN
from holter.glance import glance
from holter.journal import Journal, JournalReader
from holter.journal_parts import read_between
from holter.record import Ending, Entry, LayerRows, Problem, Record
from holter.report.reading import Follower
from holter.run import Run, open_run
from holter.statistics.rows import COLUMNS, Rows
from tests.test_cli import call, parse
from tests.test_codec import fingerprints

EDITS, FRAME_EDITS = 500, 130


def entries(count: int, seed: int = 0) -> list[Entry]:
    """Steps of a training that gets a layer in its middle, with values that came late, a problem and an ending."""
    rng, found = np.random.default_rng(seed), list[Entry]()
    for step in range(count):
        layers = ("a", "b") if step < count // 2 else ("a", "b", "c")
        rows = {
            role: LayerRows(layers, Rows(rng.random((len(layers), len(COLUMNS))))) for role in ("gradient", "weight")
        }
        found.append(Record(step, 1e9 + step, {"loss": 1 / (1 + step)}, rows))
        if step % 7 == 0:
            found.append(Record(step, 1e9 + step, {"accuracy": float(step)}, late=True))
    return [*found, Problem(3, 1e9, "write", "no space"), Ending(2e9, "finished")]


@dataclass
class Stored:
    """A journal as bytes: its header and its frames, and which entry each of them ends."""

    header: bytes
    frames: list[bytes]
    entries: list[Entry | None]  # None for what only serves others

    @property
    def data(self) -> bytes:
        return self.header + b"".join(self.frames)

    def whole_in(self, data: bytes) -> list[Entry]:
        """The entries whose frames stand somewhere in these bytes."""
        return [entry for frame, entry in zip(self.frames, self.entries, strict=True) if entry and frame in data]


def stored(path: Path, count: int = 36, seed: int = 0) -> Stored:
    path.parent.mkdir(exist_ok=True)
    (path.parent / "run.json").write_text("{}")
    journal, ends = Journal(path), {}
    for entry in entries(count, seed):
        journal.append(entry)
        ends[path.stat().st_size] = entry
    journal.close()
    data, place, frames = path.read_bytes(), BEGIN, list[bytes]()
    while place < len(data):
        size = AROUND + int.from_bytes(data[place : place + 4], "little")
        frames.append(data[place : place + size])
        place += size
    places = np.cumsum([BEGIN, *map(len, frames)])[1:].tolist()
    return Stored(data[:BEGIN], frames, [ends.get(end) for end in places])


def told(path: Path) -> bool:
    """Whether someone who opens the run hears of it."""
    run = Run(path.parent)
    return bool(run.unreadable_bytes or run.damage or run.state != "finished")


# Single bytes, ranges, cuts and insertions --------------------------------------------------------------------------


def edited(data: bytes, dice: random.Random) -> bytes:
    place, kind = dice.randrange(len(data)), dice.randrange(6)
    until = min(len(data), place + dice.choice((1, 3, 40, 900, 5000)))
    if kind == 0:
        return data[:place] + bytes([data[place] ^ 1 << dice.randrange(8)]) + data[place + 1 :]
    if kind == 1:
        return data[:place] + bytes([(data[place] + dice.randrange(1, 256)) % 256]) + data[place + 1 :]
    if kind == 2:
        return data[:place]
    if kind == 3:
        return data[:place] + dice.randbytes(until - place) + data[place:]
    if kind == 4:
        return data[:place] + bytes(until - place) + data[until:]
    return data[:place] + data[until:]


def wrong_after(path: Path, whole: Stored, data: bytes) -> str:
    path.write_bytes(data)
    reader = JournalReader(path)
    found, expected = list(reader.read()), whole.whole_in(data)
    if fingerprints(found) != fingerprints(expected):
        return f"{len(found)} entries of {len(expected)} that are whole"
    return "" if told(path) else "not told"


def test_of_500_random_edits_each_is_told_and_costs_only_what_it_hit(tmp_path: Path) -> None:
    """P12: flipped bits, changed bytes, cuts, insertions, zeros, deletions: at any byte, of the header too."""
    path, dice = tmp_path / "run" / "rank-0.journal", random.Random(17)
    whole = stored(path)
    for trial in range(EDITS):
        data = edited(whole.data, dice)
        assert data == whole.data or not wrong_after(path, whole, data), trial


def test_a_record_needs_no_single_table(tmp_path: Path) -> None:
    """P12: names of layers stand in frames of their own; each of them may be the one that is hit."""
    path = tmp_path / "run" / "rank-0.journal"
    whole = stored(path)
    tables = [place for place, entry in enumerate(whole.entries) if entry is None and place]
    assert len(tables) >= 4
    for place in tables:
        frames = [bytes(len(one)) if at == place else one for at, one in enumerate(whole.frames)]
        assert not wrong_after(path, whole, whole.header + b"".join(frames))


@pytest.mark.parametrize("kept", [0, BEGIN], ids=["another's header", "another's first block"])
@pytest.mark.parametrize("block", [BEGIN, 4096])
def test_the_begin_of_another_journal_hides_nothing(kept: int, block: int, tmp_path: Path) -> None:
    """P12: a file system may put a block of another file there, or nothing at all."""
    path = tmp_path / "run" / "rank-0.journal"
    whole, other = stored(path), stored(tmp_path / "other" / "rank-0.journal", seed=5)
    assert len(whole.data) > 2 * 4096
    begin = other.data[:block] if kept else other.header + whole.data[BEGIN:block]
    assert not wrong_after(path, whole, begin + whole.data[block:])


def test_a_header_that_was_cut_off_exactly_is_told(tmp_path: Path) -> None:
    path = tmp_path / "run" / "rank-0.journal"
    whole = stored(path)
    assert not wrong_after(path, whole, whole.data[BEGIN:])
    assert Run(path.parent).unreadable_bytes == BEGIN


# Whole frames --------------------------------------------------------------------------------------------------------


def duplicate(frames: list[bytes], dice: random.Random, other: list[bytes]) -> list[bytes]:
    place = dice.randrange(len(frames))
    return [*frames[: place + 1], frames[place], *frames[place + 1 :]]


def delete(frames: list[bytes], dice: random.Random, other: list[bytes]) -> list[bytes]:
    place = dice.randrange(len(frames))
    return [*frames[:place], *frames[place + dice.randint(1, 3) :]]


def swap(frames: list[bytes], dice: random.Random, other: list[bytes]) -> list[bytes]:
    a, b = dice.sample(range(len(frames)), 2)
    found = list(frames)
    found[a], found[b] = found[b], found[a]
    return found


def replay(frames: list[bytes], dice: random.Random, other: list[bytes]) -> list[bytes]:
    first, place = dice.randrange(len(frames)), dice.randrange(len(frames) + 1)
    return [*frames[:place], *frames[first : first + dice.randint(1, 5)], *frames[place:]]


def replace_by_another(frames: list[bytes], dice: random.Random, other: list[bytes]) -> list[bytes]:
    place = dice.randrange(len(frames))
    return [
        *frames[:place],
        frames[dice.choice([at for at in range(len(frames)) if at != place])],
        *frames[place + 1 :],
    ]


def take_from_another_run(frames: list[bytes], dice: random.Random, other: list[bytes]) -> list[bytes]:
    place = dice.randrange(len(frames))
    return [*frames[:place], other[place], *frames[place + 1 :]]


FRAME_EDITS_BY_NAME: tuple[Callable[[list[bytes], random.Random, list[bytes]], list[bytes]], ...] = (
    *(duplicate, delete, swap, replay, replace_by_another, take_from_another_run),
)


def frame_edits(whole: Stored, other: Stored, dice: random.Random) -> Iterator[bytes]:
    for trial in range(FRAME_EDITS):
        edit = FRAME_EDITS_BY_NAME[trial % len(FRAME_EDITS_BY_NAME)]
        yield whole.header + b"".join(edit(whole.frames, dice, other.frames))


def test_of_130_edits_of_whole_frames_each_is_told_and_every_frame_is_read_once(tmp_path: Path) -> None:
    """P12: duplicated, deleted, swapped, replayed, replaced, taken from another run: their checksums fit."""
    path = tmp_path / "run" / "rank-0.journal"
    whole, other = stored(path), stored(tmp_path / "other" / "rank-0.journal", seed=1)
    for trial, data in enumerate(frame_edits(whole, other, random.Random(5))):
        assert not wrong_after(path, whole, data), trial


@pytest.mark.parametrize(
    ("edit", "damage"),
    [
        (lambda f: [*f[:20], *f[21:]], Damage(missing=1)),
        (lambda f: [*f[:20], *f[24:]], Damage(missing=4)),
        (lambda f: [*f[:20], f[20], f[20], *f[21:]], Damage(repeated=1)),
        (lambda f: [*f, f[9]], Damage(repeated=1)),
        (lambda f: [*f[:9], f[20], *f[10:20], f[9], *f[21:]], Damage(moved=2)),
        (lambda f: [*f[:9], *f[10:20], f[9], *f[20:]], Damage(moved=1)),
        (lambda f: [*f[:9], f[30], *f[10:]], Damage(missing=1, repeated=1)),
        (lambda f: [*f[:9], bytes(len(f[9])), *f[10:]], Damage(damaged=1, unreadable_bytes=-9)),
        (lambda f: [*f[:9], b"x" * 50, *f[9:]], Damage(unreadable_bytes=50)),
    ],
)
def test_what_happened_is_said_in_numbers(
    edit: Callable[[list[bytes]], list[bytes]], damage: Damage, tmp_path: Path
) -> None:
    path = tmp_path / "run" / "rank-0.journal"
    whole = stored(path)
    path.write_bytes(whole.header + b"".join(edit(whole.frames)))
    reader = JournalReader(path)
    list(reader.read())
    size = damage.unreadable_bytes if damage.unreadable_bytes >= 0 else len(whole.frames[9])
    assert reader.damage == Damage(**{**vars(damage), "unreadable_bytes": size})
    assert reader.unreadable_bytes == size


def test_the_end_that_a_killed_process_leaves_is_no_damage(tmp_path: Path) -> None:
    """Cut within the last frame, or followed by zeros that were allocated and never written: unreadable, no more."""
    path = tmp_path / "run" / "rank-0.journal"
    data = stored(path).data
    for end in (data[:-40], data[:-300], data + bytes(5000), data[:-9] + bytes(9)):
        path.write_bytes(end)
        reader = JournalReader(path)
        list(reader.read())
        assert not reader.damage and reader.unreadable_bytes


def test_damage_that_comes_while_a_run_is_followed_is_told_as_if_it_had_been_there(tmp_path: Path) -> None:
    """P18: a reader that has read half of it goes on behind a gap, and waits at an end that is not there yet."""
    path = tmp_path / "run" / "rank-0.journal"
    whole = stored(path)
    half = whole.header + b"".join(whole.frames[:20])
    path.write_bytes(half)
    reader = JournalReader(path)
    found = list(reader.read())
    path.write_bytes(half + b"".join((*whole.frames[22:40], whole.frames[3], whole.frames[40][:30])))
    found += reader.read()
    path.write_bytes(half + b"".join((*whole.frames[22:40], whole.frames[3], *whole.frames[40:])))
    found += reader.read()
    expected = [entry for at, entry in enumerate(whole.entries) if entry and at not in (20, 21)]
    assert fingerprints(found) == fingerprints(expected)
    assert reader.damage == Damage(missing=2, repeated=1) and reader.starts == 1 and reader.unreadable_bytes == 0


# Everywhere the same -------------------------------------------------------------------------------------------------


def test_damage_is_told_wherever_a_run_is_shown(tmp_path: Path) -> None:
    """P32: by findings, show, diagnose, report and comparison alike."""
    path = tmp_path / "run" / "rank-0.journal"
    whole = stored(path)
    frames = [*whole.frames[:9], whole.frames[12], *whole.frames[11:15], *whole.frames[16:]]
    path.write_bytes(whole.header + b"".join(frames))
    run, follower = open_run(path.parent), Follower(path.parent, examine=True)
    assert run.damage == Damage(missing=3, repeated=1) and run.state == "finished" == glance(run).state
    follower.read_on()
    words = "3 frames missing, 1 frame repeated"
    for findings in (
        run.findings,
        follower.examined().findings,
        read_run(path.parent).findings,
        read_run(run).findings,
    ):
        assert [words in one.advice for one in findings if one.cause == "monitor-degraded"] == [False, True]
    assert words in call("show", run.path).output.replace("\n", " ")
    assert words in " ".join(call("diagnose", run.path).output.split())
    assert parse(call("diagnose", run.path, "--json"))["damage"]["missing"] == 3
    assert call("report", run.path, "-o", tmp_path / "page.html").exit_code == 0
    assert words in json.dumps((tmp_path / "page.html").read_text())


@pytest.mark.parametrize("trial", range(3))
def test_some_steps_that_are_looked_at_closely_are_those_of_the_whole(trial: int, tmp_path: Path) -> None:
    """P32: a zoom reads parts of a journal by its frames' lengths, and finds its way behind damage too."""
    path, dice = tmp_path / "run" / "rank-0.journal", random.Random(trial)
    whole = stored(path)
    for frames in (swap(whole.frames, dice, []), replay(whole.frames, dice, []), delete(whole.frames, dice, [])):
        place = dice.randrange(1, len(frames))
        frames[place] = frames[place][:30] + bytes(9) + frames[place][39:]
        path.write_bytes(whole.header + b"".join(frames))
        expected = [record.step for record in open_run(path.parent).history.latest().records if "weight" in record.rows]
        assert [record.step for record in read_between([path], "weight", 0, 99).records] == expected


def test_a_journal_of_an_earlier_version_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "rank-0.journal").write_bytes(b"HOLTER\x01\x00" + bytes(100))
    with pytest.raises(ValueError, match="format 1 by an earlier Holter"):
        open_run(tmp_path)


def test_frames_before_the_first_and_behind_the_last_are_known_by_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "run" / "rank-0.journal"
    whole = stored(path)
    assert all(one[8:12] == number.to_bytes(4, "little") for number, one in enumerate(whole.frames))
    assert len({one[4:8] for one in whole.frames}) == 1 and all(a != b for a, b in pairwise(whole.frames))
