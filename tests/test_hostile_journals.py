"""Journals that were made to do harm: reading takes time and memory in proportion to the file, and no other run waits.

At 1, 4 and 16 MB: `make gauntlet`, or `pytest -m gauntlet tests/test_hostile_journals.py`.
"""

from __future__ import annotations

import asyncio
import json
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
from holter.codec import SIGN, Decoder, _pack
from holter.dashboard.examinations import Examinations
from holter.dashboard.shelf import Shelf
from holter.dashboard.wire import Answer, to_line
from holter.frames import HEAD, write_frame, write_header
from holter.glance import glance
from holter.journal import JournalReader
from holter.report.buckets import Buckets
from holter.report.examining import Examined
from holter.run import Run
from tests.dashboards import served, wait_for, write_run

Blobs = list[bytes]
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
