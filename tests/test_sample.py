"""A sample of a long journal: found from any byte of it, without walking along all of it, whatever state it is in."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest

from holter import frames, journal_parts
from holter.codec import HEADER_LENGTH, SIGN, Encoder, read_words
from holter.frames import AROUND, BEGIN, SIGN_AT, ScanBudget, frame_before
from holter.journal import Journal, read_backwards
from holter.journal_parts import read_sample
from holter.record import Ending, Entry, LayerRows, Problem, Record
from holter.statistics.rows import COLUMNS, Rows

# Texts that look like the beginning of a blob, of a table or of a reference to one.
ALIKE = SIGN.decode() + '\\"kind\\": \\"layers\\", \\"layers\\": 999, "layers": 999'
COUNTED = pytest.mark.skipif(not hasattr(psutil.Process, "io_counters"), reason="nothing counts what is read here")


def record(step: int, layers: Iterable[str] = ("a", "b"), size: int = 1, **scalars: float) -> Record:
    names = tuple(layers)
    rows = {f"role{number}": LayerRows(names, Rows(np.ones((len(names), len(COLUMNS))))) for number in range(size)}
    return Record(step, 0.0, {"loss": 1.0, **scalars}, rows, {"note": ALIKE})


def write(path: Path, entries: Iterable[Entry]) -> Path:
    journal = Journal(path)
    for entry in entries:
        journal.append(entry)
    journal.close()
    return path


def begins(path: Path) -> list[int]:
    """Where frames begin, by their lengths."""
    data, place, found = path.read_bytes(), BEGIN, []
    while place < len(data):
        found.append(place)
        place += AROUND + int.from_bytes(data[place : place + 4], "little")
    return found


def steps_of(path: Path, most: int) -> list[int]:
    return [entry.step for entry in read_sample(path, most) if isinstance(entry, Record)]


def steps_between(path: Path, begin: int, end: int) -> list[int]:
    """The steps of the records that lie there."""
    with path.open("rb") as file:
        frames_there = frames.frames_from(file, begin, end)
        words = [read_words(frame.blob) for frame in frames_there]
    return [one["step"] for one in words if one["kind"] == "record"]


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "rank-0.journal"
    return write(path, (*(record(step) for step in range(8000)), Ending(0.0, "finished")))


@pytest.fixture
def few_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_parts, "_WALKED", 16)


@pytest.mark.parametrize("entry", [record(3), Problem(1, 0.0, "write", ALIKE), Ending(0.0, "failed", ALIKE)])
def test_every_blob_begins_with_the_sign_and_has_it_once(entry: Entry) -> None:
    for blob in Encoder().encode(entry):
        assert blob[HEADER_LENGTH:].startswith(SIGN) and blob.count(SIGN) == 1


def test_from_any_byte_the_frame_around_it_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_LOOK_BACK", 50)  # so that a sign lies across two looks
    entries = [record(step, size=step % 3) for step in range(6)]
    path = write(tmp_path / "journal", [*entries, Problem(1, 0.0, "write", ALIKE), Ending(0.0, "finished")])
    places = begins(path)
    with path.open("rb") as file:
        for place in range(BEGIN, end := path.stat().st_size):
            assert frame_before(file, place, end, BEGIN, ScanBudget()) == places[bisect_right(places, place) - 1], place
        assert frame_before(file, BEGIN - 1, end, BEGIN, ScanBudget()) is None


def test_what_only_looks_like_the_beginning_of_a_frame_is_none(tmp_path: Path) -> None:
    """Numbers may be any bytes: a length stands at both ends of a frame."""
    path = write(tmp_path / "journal", [record(0, size=3), Ending(0.0, "finished")])
    *_, begin, end = begins(path)
    data = bytearray(path.read_bytes())
    alike = (40).to_bytes(4, "little") + bytes(SIGN_AT - 4) + SIGN
    data[end - 300 : end - 300 + len(alike)] = alike
    path.write_bytes(data)
    with path.open("rb") as file:
        assert frame_before(file, end - 1, len(data), BEGIN, ScanBudget()) == begin


def test_a_sample_is_spread_over_the_whole_and_has_its_end(long: Path) -> None:
    steps = steps_of(long, 20)
    assert steps == sorted(set(steps)) and steps[-1] == 7999
    assert max(np.diff(steps)) < 2 * 8000 / 20 and len(steps) < 200
    assert isinstance(list(read_sample(long, 20))[-1], Ending)


@COUNTED
def test_a_long_journal_is_not_walked_along(long: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk touches every page of it, and systems read ahead: a cold disk would have to give all of it."""
    monkeypatch.setattr(journal_parts, "_WALKED", 100)
    this = psutil.Process()
    before = this.io_counters().read_count
    assert len(steps_of(long, 10)) > 10
    assert this.io_counters().read_count - before < 2000


@COUNTED
@pytest.mark.usefixtures("few_walked")
def test_a_hole_is_looked_through_once(tmp_path: Path) -> None:
    path = write(tmp_path / "journal", (record(step) for step in range(600)))
    data, place, hole = path.read_bytes(), begins(path)[300], bytes(8 << 20)
    path.write_bytes(data[:place] + hole + data[place:])
    this = psutil.Process()
    before = this.io_counters().read_chars
    assert steps_of(path, 200)[-1] == 599
    assert this.io_counters().read_chars - before < 3 * len(hole), "not again for each place in it"


@pytest.mark.usefixtures("few_walked")
def test_a_table_that_comes_late_is_found(tmp_path: Path) -> None:
    """Layers that a training thaws in its middle, and others near its end."""
    layers = [tuple("abcd"[: 2 + (step > 150) + (step > 390)]) for step in range(400)]
    path = write(tmp_path / "journal", (record(step, names) for step, names in enumerate(layers)))
    for most in (3, 10, 50):
        sampled = [entry for entry in read_sample(path, most) if isinstance(entry, Record)]
        assert sampled[-1].step == 399 and sampled[-1].rows["role0"].layers == tuple("abcd")
        assert all(one.rows["role0"].layers == layers[one.step] for one in sampled)
        assert len(sampled) >= most


@pytest.mark.usefixtures("few_walked")
@pytest.mark.parametrize("size", [2, 5, 60])
def test_what_is_large_is_likelier_than_what_is_small(tmp_path: Path, size: int) -> None:
    """Weights and activations stand in one record of many, which say most: at whatever distance places are picked."""
    path = write(tmp_path / "journal", (record(step, size=size if step % 50 == 0 else 1) for step in range(5000)))
    found = [step for step in steps_of(path, 101) if step % 50 == 0]
    assert len(found) >= 50 and max(np.diff([*found, 5000])) < 500


@pytest.mark.usefixtures("few_walked")
def test_with_what_is_large_comes_what_was_logged_late_of_it(tmp_path: Path) -> None:
    late = (replace(record(step), late=True) for step in range(0, 5000, 50))
    entries = [record(step, size=9 if step % 50 == 0 else 1) for step in range(5000)]
    path = write(tmp_path / "journal", (one for e in entries for one in ([e, next(late)] if e.step % 50 == 0 else [e])))
    sampled = [entry for entry in read_sample(path, 40) if isinstance(entry, Record)]
    large = {one.step for one in sampled if len(one.rows) == 9}
    assert len(large) > 20 and large <= {one.step for one in sampled if one.late}


@pytest.mark.usefixtures("few_walked")
@pytest.mark.parametrize("thaws_at", [0, 150], ids=["early", "late table"])
@pytest.mark.parametrize("damage", [bytes, random.Random(0).randbytes], ids=["zeros", "anything"])
def test_damage_leaves_out_only_what_it_hit(tmp_path: Path, damage: Callable[[int], bytes], thaws_at: int) -> None:
    layers = {True: ("a", "b", "c"), False: ("a", "b")}
    path = write(tmp_path / "journal", (record(step, layers[step >= thaws_at]) for step in range(600)))
    data, places = bytearray(path.read_bytes()), begins(path)
    (tmp_path / "whole").write_bytes(data)
    data[places[200] : places[400]] = damage(places[400] - places[200])
    data[places[500] + 100] ^= 1  # one that only its checksum tells
    path.write_bytes(data)
    damaged = steps_between(path.parent / "whole", places[200], places[400])
    flipped = steps_between(path.parent / "whole", places[500], places[501])
    steps = steps_of(path, 100)
    assert not {*damaged, *flipped} & set(steps)
    assert min(steps) < 20 and steps[-1] == 599 and len([step for step in steps if step >= 400]) > 20


def test_damage_near_the_beginning_does_not_hide_the_rest(long: Path, tmp_path: Path) -> None:
    path, places = tmp_path / "journal", begins(long)
    data = bytearray(long.read_bytes())
    data[places[9] : places[10]] = bytes(places[10] - places[9])
    path.write_bytes(data)
    steps = steps_of(path, 20)
    assert steps[0] < 9 and steps[-1] == 7999 and max(np.diff(steps)) < 2 * 8000 / 20


@pytest.mark.parametrize("torn", ["cut", "zeros", "flipped"])
def test_a_torn_end_is_not_looked_for_from_the_start(
    tmp_path: Path, torn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_parts, "_WALKED", 16)
    path = write(tmp_path / "journal", (record(step) for step in range(300)))
    places, data = begins(path), bytearray(path.read_bytes())
    if torn == "cut":
        del data[-30:]
    elif torn == "zeros":
        data += bytes(300_000)
    else:
        data[places[-1] + 60] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(frames, "frames_from", lambda *_: pytest.fail("it was read from its start"))
    last = 299 if torn == "zeros" else 298
    assert len(list(read_backwards(path))) == len(places) - (torn != "zeros")
    assert steps_of(path, 10)[-1] == last


def test_a_file_in_which_nothing_is_whole_is_empty(tmp_path: Path) -> None:
    path = write(tmp_path / "journal", [record(0)])
    path.write_bytes(path.read_bytes()[:BEGIN] + SIGN * 5000)
    assert list(read_backwards(path)) == [] == list(read_sample(path, 10))
