"""Journals that were made to do harm: reading takes time and memory in proportion to the file, and no other run waits.

At 1, 4 and 16 MB: `make gauntlet`, or `pytest -m gauntlet tests/test_hostile_journals.py`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from holter import frames
from holter.codec import SIGN, Decoder, Encoder, _pack
from holter.dashboard.details import layer_detail, whole_map, zoomed
from holter.dashboard.examinations import Examinations
from holter.dashboard.shelf import Shelf
from holter.dashboard.wire import Answer, to_line
from holter.dashboard.worker import Practice
from holter.diagnosis.health import check_health
from holter.frames import HEAD, write_frame, write_header
from holter.glance import glance
from holter.journal import Journal, JournalReader
from holter.proportion import ALLOWANCE, Proportion
from holter.record import LayerRows, Record
from holter.report.buckets import Buckets
from holter.report.drawing import map_id, ordered_strips
from holter.report.examining import Examined
from holter.report.reading import Follower
from holter.report.view import run_view
from holter.run import Run
from holter.statistics.rows import COLUMNS, Rows
from holter.summary import summarise
from tests.dashboards import served, wait_for, write_run

Blobs = list[bytes]
SMALL = 1 << 17  # bytes
ROLE = {"role": "gradient", "layers": 0, "columns": ["count"]}


def record(step: int = 0, roles: list[Any] | None = None, arrays: dict[str, Any] | None = None, **words: Any) -> bytes:
    said = {"kind": "record", "step": step, "time": 1.0, "segment": 0, "late": False, "notes": {}, "roles": roles or []}
    return _pack({**said, "scalars": ["loss"], **words}, {"scalars": np.ones(1), **(arrays or {})})


def table(names: list[str], number: int = 0) -> bytes:
    return _pack({"kind": "layers", "number": number, "role": "gradient", "layers": names}, {})


def framed(blobs: Blobs) -> bytes:
    return b"".join(write_frame(blob, 7, number) for number, blob in enumerate(blobs))


# What follows the header, of about so many bytes ---------------------------------------------------------------------


def overlapping(size: int) -> bytes:
    """Beginnings of frames that all reach to the same end, where all of their lengths stand again."""
    begin = HEAD + 8 + len(SIGN)
    count = size // (begin + 4)
    lengths = [(count - at) * begin + 4 * at - HEAD for at in range(count)]
    heads = (struct.pack("<IIII", length, 7, at + 1, 9) + bytes(8) + SIGN for at, length in enumerate(lengths))
    return b"".join(heads) + b"".join(struct.pack("<I", length) for length in lengths)


def signs(size: int) -> bytes:
    return SIGN * (size // len(SIGN))


def damage_between_all(size: int) -> bytes:
    return b"".join(b"x" + write_frame(record(step), 7, step) for step in range(size // 300))


def shuffled(size: int) -> bytes:
    order = np.random.default_rng(0).permutation(size // 300).tolist()
    return b"".join(write_frame(record(step), 7, 13 * step) for step in order)


def tiny(size: int) -> bytes:
    return b"".join(write_frame(b"x", 7, number) for number in range(size // 21))


def unknown_tables(size: int) -> bytes:
    rows = {"0.values": np.ones((1, 1))}
    return framed([record(step, [{**ROLE, "layers": step}], rows) for step in range(size // 430)])


def rows_without_numbers(size: int) -> bytes:
    names = [f"l{number}" for number in range(size // 30)]
    rows = record(0, [{**ROLE, "columns": []}], {"0.values": np.zeros((0, len(names)))})
    return framed([table(names), *[rows] * (size // 2 // len(rows))])


def narrow_numbers(size: int) -> bytes:
    names = [f"l{number}" for number in range(size // 60)]
    words = {"kind": "record", "step": 0, "time": 1.0, "segment": 0, "late": False, "scalars": [], "notes": {}}
    arrays = {"scalars": np.zeros(0), "0.values": np.ones((1, len(names)), np.uint8)}
    blob = bytes(safetensors_numpy.save(arrays, {"holter": json.dumps({**words, "roles": [ROLE]})}))
    return framed([table(names), *[blob] * (size // 2 // len(blob))])


def numbers_that_stand_for_many(size: int) -> bytes:
    names = [f"l{number}" for number in range(size // 30)]
    rows = record(0, [ROLE], {"0.values": np.ones((1, 1))})
    return framed([table(names), *[rows] * (size // 2 // len(rows))])


def one_column(size: int) -> bytes:
    names = [f"layer{number}" for number in range(size // 200)]
    rows = [record(step, [ROLE], {"0.values": np.ones((1, len(names)))}) for step in range(20)]
    return framed([table(names), *rows])


def lists(size: int) -> bytes:
    text = b'{"__metadata__":{"holter":"{\\"kind\\":\\"record\\",\\"a\\":[' + b"[]," * (size // 3) + b'0]}"}}'
    return framed([struct.pack("<Q", len(text)) + text])


def lists_in_the_header(size: int) -> bytes:
    text = b'{"__metadata__":{"holter":"{}"},"a":[' + b"[]," * (size // 3) + b"0]}"
    return framed([struct.pack("<Q", len(text)) + text])


def wide_characters(size: int) -> bytes:
    return framed([_pack({"kind": "problem", "what": "\U0001f600" + "x" * size}, {})])


def texts(size: int) -> bytes:
    return framed([_pack({"kind": "record", "a": [f"{number:x}" for number in range(size // 12)]}, {})])


def long_words(size: int) -> bytes:
    return framed([_pack({"kind": "problem", "step": 1, "time": 1.0, "where": "w" * size, "what": "x"}, {})])


KINDS: tuple[Callable[[int], bytes], ...] = (
    *(overlapping, signs, damage_between_all, shuffled, tiny, unknown_tables, rows_without_numbers, narrow_numbers),
    *(numbers_that_stand_for_many, one_column, lists, lists_in_the_header, wide_characters, texts, long_words),
)


class Effort:
    """Counts the bytes that are read and checksummed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        read, checksum = os.pread, zlib.crc32

        def counted_read(file: int, size: int, place: int) -> bytes:
            found = read(file, size, place)
            self.bytes += len(found) + 100  # what a call costs
            return found

        def counted_checksum(data: bytes, start: int = 0) -> int:
            self.bytes += len(data)
            return checksum(data, start)

        monkeypatch.setattr(frames.os, "pread", counted_read)
        monkeypatch.setattr(frames.zlib, "crc32", counted_checksum)


def wasteful(path: Path, kind: Callable[[int], bytes], size: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What takes more than in proportion to the file."""
    path.mkdir(exist_ok=True)
    (path / "run.json").write_text("{}")
    data = write_header(7) + kind(size)
    (path / "rank-0.journal").write_bytes(data)
    found = []
    with monkeypatch.context() as patched:
        effort = Effort(patched)
        for _ in range(2):
            glance(Run(path))
        if effort.bytes > 150 * len(data):
            found.append(f"a glance reads {effort.bytes / len(data):.0f} times its size")
        effort.bytes = 0
        tracemalloc.start()
        entries = list(JournalReader(path / "rank-0.journal").read())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        if effort.bytes > 150 * len(data):
            found.append(f"{len(entries)} entries, for which {effort.bytes / len(data):.0f} times its size are read")
        if peak > 20 * len(data):
            found.append(f"{len(entries)} entries, for which {peak / len(data):.0f} times its size are taken")
    return found


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_reading_takes_no_more_than_in_proportion_to_the_file(
    kind: Callable[[int], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P18: the same factor at a quarter of a megabyte and at a whole one."""
    for size in (1 << 18, 1 << 20):
        assert wasteful(tmp_path / "run", kind, size, monkeypatch) == []


@pytest.mark.gauntlet
@pytest.mark.parametrize("megabytes", [1, 4, 16])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_reading_is_in_proportion_at_any_size(
    kind: Callable[[int], bytes], megabytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P18"""
    assert wasteful(tmp_path / "run", kind, megabytes << 20, monkeypatch) == []


@pytest.mark.parametrize("kind", [overlapping, rows_without_numbers, narrow_numbers, lists])
def test_without_the_limits_they_would_do_harm(
    kind: Callable[[int], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P18: the planted twins."""
    monkeypatch.setattr(frames, "Spare", lambda size: type("Endless", (), {"left": 1 << 62})())
    monkeypatch.setattr("holter.codec._floats", lambda found, columns: found)
    monkeypatch.setattr("holter.codec._has_many_lists", lambda *text: False)
    monkeypatch.setattr("holter.proportion.MOST", math.inf)
    assert wasteful(tmp_path / "run", kind, 1 << 20, monkeypatch)


@pytest.mark.parametrize("extra", ["roles", "extras"])
def test_what_no_record_has_is_refused(extra: str) -> None:
    """Each role and each extra is a series to whoever reads on."""
    decoder, many = Decoder(), range(1000)
    decoder.decode(table(["a"]))
    role = {**ROLE, "extras": [f"e{number}" for number in many]}
    roles = [role] if extra == "extras" else [{**ROLE, "role": f"r{number}"} for number in many]
    arrays = {f"{number}.values": np.ones((1, 1)) for number in range(len(roles))} | {"0.extras": np.ones((1000, 1))}
    with pytest.raises(ValueError, match="more"):
        decoder.decode(record(0, roles, arrays))


def test_steps_far_apart_take_no_memory_between() -> None:
    found = Buckets(800, layers=20_000)
    tracemalloc.start()
    for step in (0, 1599):
        found.put(step, np.ones(20_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.steps.tolist() == [0, 1599] and peak < 20_000 * 8 * 20


def test_what_run_json_may_ask_for_is_bounded(tmp_path: Path) -> None:
    """P18: lists in lists, and what is larger than any model's."""
    for text in ('{"layers":[' + "[]," * 400_000 + "0]}", '{"a":"' + "x" * (33 << 20) + '"}'):
        (tmp_path / "run.json").write_text(text)
        tracemalloc.start()
        assert Run(tmp_path).info == {}
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 5 * len(text)


# What is made of what was read ---------------------------------------------------------------------------------------


def layers_of(role: str, names: list[str], number: int = 0) -> bytes:
    return _pack({"kind": "layers", "number": number, "role": role, "layers": names}, {})


def another_layer_each(size: int) -> bytes:
    """Each record has one layer, and a table of its own."""
    found: Blobs = []
    for step in range(size // 480):
        row = record(step, [{**ROLE, "layers": step}], {"0.values": np.ones((1, 1))})
        found += layers_of("gradient", [f"l{step}"], step), row
    return framed(found)


def another_place_each(size: int) -> bytes:
    """The same in one table, of which all was measured once."""
    names = [f"l{number}" for number in range(size // 300)]
    first = record(0, [ROLE], {"0.values": np.ones((1, len(names)))})
    found = [layers_of("gradient", names), first]
    for step in range(1, size // 450):
        places = np.array([step % len(names)], np.uint32)
        found.append(record(step, [ROLE], {"0.values": np.ones((1, 1)), "0.places": places}))
    return framed(found)


def wide(size: int, role: str, steps: int, apart: int) -> bytes:
    """Rows of one number for very many layers."""
    names = [f"l{number}" for number in range(size // (9 + 8 * steps))]
    roles = [{**ROLE, "role": role}]
    values = {"0.values": np.ones((1, len(names)))}
    rows = (record(step * apart, roles, values) for step in range(steps))
    return framed([layers_of(role, names), *rows])


def wide_and_far_apart(size: int) -> bytes:
    return wide(size, "gradient", 2, 10**6)


def wide_and_filled(size: int) -> bytes:
    return wide(size, "activation", 20, 1)


def nearly_as_wide_as_long(size: int) -> bytes:
    return wide(size, "activation", 400, 1)


def empty_histograms(size: int) -> bytes:
    names = [f"l{number}" for number in range(size // 57)]
    arrays = {"0.values": np.ones((1, len(names))), "0.offsets": np.zeros(len(names) + 1, np.int64)}
    arrays |= {"0.buckets": np.zeros(0, np.uint16), "0.counts": np.zeros(0, np.int64)}
    return framed(
        [layers_of("weight", names), *(record(step, [{**ROLE, "role": "weight"}], arrays) for step in range(3))]
    )


def other_scalars(size: int) -> bytes:
    many = range(size // 48)
    said = ([f"s{step}_{number}" for number in many] for step in range(2))
    return framed(
        [record(step, None, {"scalars": np.ones(len(names))}, scalars=names) for step, names in enumerate(said)]
    )


def other_extras(size: int) -> bytes:
    found = [layers_of("gradient", ["a"])]
    for step in range(size // 6000):
        role = {**ROLE, "extras": [f"e{step}_{number}" for number in range(250)]}
        found.append(record(step, [role], {"0.values": np.ones((1, 1)), "0.extras": np.ones((250, 1))}))
    return framed(found)


def other_roles(size: int) -> bytes:
    found = [layers_of("gradient", ["a"])]
    for step in range(max(2, size // 40_000)):
        roles = [{**ROLE, "role": f"r{step}_{number}"} for number in range(200)]
        found.append(record(step, roles, {f"{place}.values": np.ones((1, 1)) for place in range(200)}))
    return framed(found)


def names_in_a_note(size: int) -> bytes:
    order = json.dumps([f"{number:x}" for number in range(size // 14)], separators=(",", ":"))
    notes = {"execution_order": order}
    return framed([table(["a"]), *(record(step, [ROLE], {"0.values": np.ones((1, 1))}, notes=notes) for step in (0,))])


def problems(size: int) -> bytes:
    """Each is a finding to whoever shows it."""
    words = {"kind": "problem", "step": 0, "time": 1.0, "what": ""}
    return framed([_pack({**words, "where": f"{number:x}"}, {}) for number in range(size // 190)])


def another_segment_each(size: int) -> bytes:
    return framed([record(step % 7, segment=step) for step in range(size // 300)])


def another_validation_each(size: int) -> bytes:
    return framed([record(step, scalars=[f"val_{step}"]) for step in range(size // 300)])


def another_role_each(size: int) -> bytes:
    found: Blobs = []
    for step in range(size // 480):
        row = record(step, [{**ROLE, "role": f"r{step}", "layers": step}], {"0.values": np.ones((1, 1))})
        found += layers_of(f"r{step}", ["a"], step), row
    return framed(found)


MADE: tuple[Callable[[int], bytes], ...] = (
    *(another_layer_each, another_place_each, wide_and_far_apart, wide_and_filled, nearly_as_wide_as_long),
    *(empty_histograms, other_scalars, other_extras, other_roles, names_in_a_note),
    *(problems, another_segment_each, another_validation_each, another_role_each),
)


def diagnosed(path: Path) -> object:
    """As `holter diagnose` does."""
    run = Run(path)
    history = run.history.latest()
    return run.findings, check_health(history, run.layers), run, history


def summarised(path: Path) -> object:
    """As `holter show` does."""
    return summarise(Run(path))


def shown(path: Path) -> object:
    """As the dashboard's pages do."""
    follower = Follower(path)
    follower.look()
    follower.read_on()
    found: list[Any] = [follower, run_view(follower, Examined(), ())]
    for strip in ordered_strips(follower.digest)[:2]:
        found.append(whole_map(follower, map_id(strip)))
        found.append(layer_detail(follower, next(iter(strip.layers))))
        found.append(zoomed(path, map_id(strip), 0, 100))
    return found


def examined(path: Path) -> object:
    """As the dashboard's diagnosis does."""
    practice = Practice()
    return practice, to_line(practice.answer(str(path), math.inf))


READERS = (diagnosed, summarised, shown, examined)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What is imported on the way is not counted."""
    path = tmp_path_factory.mktemp("runs") / "warm"
    hungry(path, wide_and_filled, 1 << 14)


def hungry(path: Path, kind: Callable[[int], bytes], size: int) -> dict[str, int]:
    """Times its size that each reader takes at most."""
    path.mkdir(exist_ok=True)
    (path / "run.json").write_text("{}")
    data = write_header(7) + kind(size)
    (path / "rank-0.journal").write_bytes(data)
    taken = {}
    for reader in READERS:
        tracemalloc.start()
        try:
            kept = reader(path)
            taken[reader.__name__] = round(tracemalloc.get_traced_memory()[1] / len(data))
        finally:  # what one test left behind would be counted in the next
            tracemalloc.stop()
        del kept
    return taken


@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_what_is_made_of_a_file_takes_memory_in_proportion(
    kind: Callable[[int], bytes], tmp_path: Path, warm: None
) -> None:
    """P18: history, diagnosis, summary and pages. What any file may have stands against its size here too."""
    allowed = 20 + ALLOWANCE / SMALL
    assert {name: times for name, times in hungry(tmp_path / "run", kind, SMALL).items() if times > allowed} == {}


@pytest.mark.gauntlet
@pytest.mark.timeout(900)  # counting what is allocated takes several times as long
@pytest.mark.parametrize("megabytes", [1, 4, 16])
@pytest.mark.parametrize("kind", MADE, ids=lambda kind: kind.__name__)
def test_what_is_made_of_it_is_in_proportion_at_any_size(
    kind: Callable[[int], bytes], megabytes: int, tmp_path: Path, warm: None
) -> None:
    """P18"""
    taken = hungry(tmp_path / "run", kind, megabytes << 20)
    print(kind.__name__, megabytes, taken)
    assert {name: times for name, times in taken.items() if times > 20} == {}


@pytest.mark.parametrize("kind", [another_layer_each, wide_and_filled])
def test_without_the_proportion_it_would_take_more(
    kind: Callable[[int], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P18: the planted twins."""
    monkeypatch.setattr("holter.proportion.MOST", math.inf)
    assert max(hungry(tmp_path / "run", kind, SMALL).values()) > 20 + ALLOWANCE / SMALL


def test_what_is_left_out_is_told_and_all_else_is_read(tmp_path: Path) -> None:
    hungry(tmp_path, wide_and_far_apart, 1 << 20)
    run = Run(tmp_path)
    assert run.history.steps.tolist() == [0, 10**6] and run.history.scalars == ("loss",) and not run.history.roles
    assert run.damage.excessive == 2 and "more layers or values than a file of this size" in run.damage.words


def usual(names: tuple[str, ...]) -> LayerRows:
    values = np.zeros((len(names), len(COLUMNS)))
    values[:, [0, 5, 6, 7, 8, 9, 10]] = 1.0
    return LayerRows(names, Rows(values))


def test_what_a_real_training_has_is_not_left_out() -> None:
    """Thousands of layers without histograms, of which a quarter take turns from then on."""
    proportion, encoder = Proportion(), Encoder()
    names = tuple(f"blocks.{number}.mlp.weight" for number in range(4000))
    order = {"execution_order": json.dumps(names)}
    records = [Record(0, 0.0, {"loss": 1.0}, {"gradient": usual(names), "weight": usual(names)}, order)]
    records += [Record(step, 0.0, {"loss": 1.0}, {"gradient": usual(names)}) for step in range(1, 20)]
    records += [Record(step, 0.0, {"loss": 1.0}, {"gradient": usual(names[step % 4 :: 4])}) for step in range(20, 99)]
    size = sum(len(blob) for one in records for blob in encoder.encode(one))
    assert all(proportion.fit(one, size) is one for one in records)


def test_what_a_first_step_left_out_is_read_when_the_file_has_grown(tmp_path: Path) -> None:
    """Who looks at a training that has just begun sees what a later reader sees."""
    names = tuple(f"{number}.weight" for number in range(4000))
    journal = Journal(tmp_path / "rank-0.journal")
    rows = {role: usual(names) for role in ("gradient", "weight")}
    journal.append(Record(0, 0.0, {}, rows, {"execution_order": json.dumps(names)}))
    run = Run(tmp_path)
    assert run.damage.excessive == 1
    for step in range(1, 9):
        journal.append(Record(step, 0.0, {}, {"gradient": usual(names)}))
        run.refresh()
    journal.close()
    assert not run.damage and run.history.roles == ("gradient", "weight") and len(run.history) == 9


def test_steps_that_no_training_takes_are_refused(tmp_path: Path) -> None:
    """They went beyond the integers of numpy in the dashboard's diagnosis."""
    found = [record(2**62 + step * 2**40) for step in range(40)]
    (tmp_path / "rank-0.journal").write_bytes(write_header(7) + framed([record(0), *found]))
    assert Run(tmp_path).history.steps.tolist() == [0] and Run(tmp_path).damage.damaged == 40
    examined(tmp_path)


# Other runs ----------------------------------------------------------------------------------------------------------


def test_a_run_that_takes_long_is_examined_after_the_others_and_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P18: although it was begun, and although somebody looks at it; and it is said."""
    write_run(tmp_path / "slow", steps=3, created=1.79e9 + 9)
    write_run(tmp_path / "other", steps=3)
    runs = Shelf(tmp_path).runs()
    clock = [1e6]
    monkeypatch.setattr("holter.dashboard.examinations.time.monotonic", lambda: clock[0])

    async def asked() -> None:
        examinations = Examinations()

        async def ask(question: dict[str, str]) -> bytes:
            is_slow = question["examine"].endswith("slow")
            clock[0] += 6 if is_slow else 1
            return to_line(Answer(Examined(), "finished", 3, (), is_complete=not is_slow)).encode()

        monkeypatch.setattr(examinations._worker, "ask", ask)
        order = []
        for _ in range(30):
            examinations.attend("slow")
            if (run := examinations.next(runs.values())) is None:
                break
            order.append(run.id)
            await examinations.examine(run)
        assert order[:4] == ["slow", "slow", "other", "slow"] and len(order) < 20
        assert "takes too long" in examinations.known["slow"].trouble
        assert examinations.known["other"].verdict is not None

    asyncio.run(asked())


def test_beside_hostile_runs_the_others_are_shown_and_examined(tmp_path: Path) -> None:
    """P18: in the real server."""
    for kind in (overlapping, rows_without_numbers, lists, unknown_tables):
        path = write_run(tmp_path / kind.__name__, steps=0, created=1.79e9 + 9)
        (path / "rank-0.journal").write_bytes(write_header(7) + kind(1 << 20))
    write_run(tmp_path / "healthy", steps=30)
    with served(tmp_path) as server:
        for kind in (overlapping, rows_without_numbers, lists, unknown_tables):
            assert server.client.get(f"/api/run/{kind.__name__}").status_code in (200, 422)
        assert server.get("/api/run/healthy")["run"]["steps"] == 30
        wait_for(lambda: {run["name"]: run for run in server.get("/api/runs")["runs"]}["healthy"]["verdict"])
