"""One run's reading holds up no other (P18): what is read for a list is bounded, and nobody waits behind a slow run."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import pytest

from holter import frames, journal_parts
from holter import glance as glance_file
from holter import run as run_file
from holter.codec import SIGN
from holter.dashboard import desk as desk_file
from holter.dashboard import shelf as shelf_file
from holter.dashboard.desk import Desk
from holter.dashboard.examinations import Examinations
from holter.dashboard.shelf import Listed, Shelf
from holter.frames import AROUND, BEGIN, HEAD, write_frame, write_header
from holter.glance import Glance, check_for_damage, glance
from holter.journal import read_backwards
from holter.journal_parts import read_beginning, read_end, read_sample
from holter.record import Record
from holter.report.examining import Examined
from holter.report.view import run_view
from holter.run import Run, write_info
from tests.dashboards import served, wait_for, write_run

HUGE = 50 << 30  # bytes; with holes, so that it takes no disk
WAIT = 60.0  # seconds after which something is taken to be held up


class TooMuch(BaseException):
    """No reader contains it."""


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From the call on, more bytes than that must not be read or checksummed."""

    def limit(most: int) -> None:
        left = [most]
        real_read, real_checksum = os.pread, frames.zlib.crc32

        def spend(count: int) -> None:
            left[0] -= count + 100  # what a call costs
            if left[0] < 0:
                raise TooMuch(f"more than {most:,} bytes")

        def pread(file: int, size: int, place: int) -> bytes:
            spend(min(size, max(0, os.fstat(file).st_size - place)))
            return real_read(file, size, place)

        def crc32(data: bytes, start: int = 0) -> int:
            spend(len(data))
            return real_checksum(data, start)

        monkeypatch.setattr(os, "pread", pread)
        monkeypatch.setattr(frames.zlib, "crc32", crc32)

    return limit


# Files that were made to be large -------------------------------------------------------------------------------------


def with_holes(path: Path) -> None:
    """Some records, and then nothing."""
    write_run(path, steps=3, state="running")
    os.truncate(path / "rank-0.journal", HUGE)


def nothing_at_all(path: Path) -> None:
    write_run(path, steps=0)
    (path / "rank-0.journal").write_bytes(b"")
    os.truncate(path / "rank-0.journal", HUGE)


def one_frame(path: Path) -> None:
    """Of nearly four gigabytes, at the beginning, where the room for an ending is, and at the end."""
    write_run(path, steps=0)
    length = (4 << 30) - 100
    journal = path / "rank-0.journal"
    journal.write_bytes(write_header(7))
    with journal.open("r+b") as file:
        for place in (BEGIN, HUGE - AROUND - length):
            file.seek(place)
            file.write(length.to_bytes(4, "little") + bytes(HEAD - 4 + 8) + SIGN)
            file.seek(place + HEAD + length)
            file.write(length.to_bytes(4, "little"))


def signs(path: Path) -> None:
    """Beginnings of frames and nothing else, with holes before them."""
    write_run(path, steps=0)
    with (path / "rank-0.journal").open("r+b") as file:
        file.seek(HUGE - (8 << 20))
        file.write(SIGN * ((8 << 20) // len(SIGN)))


def of_another_file(path: Path) -> None:
    """Whole frames with a byte between them, all of another journal than the header."""
    write_run(path, steps=0)
    data = b"".join(b"x" + write_frame(b"x" * 200, 8, number) for number in range(20_000))
    (path / "rank-0.journal").write_bytes(write_header(7) + data)


def many(path: Path) -> None:
    write_run(path, steps=0, state="running")
    for segment in range(1, 300):
        (path / f"rank-0.{segment}.journal").write_bytes(write_header(7))
    os.truncate(path / "rank-0.7.journal", HUGE)


MADE = (with_holes, nothing_at_all, one_frame, signs, of_another_file, many)


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_glance_reads_a_bounded_part_of_any_journal(
    make: Callable[[Path], None], tmp_path: Path, limited: Callable[[int], None]
) -> None:
    make(tmp_path)
    limited(5 * glance_file._END_BYTES)
    assert glance(Run(tmp_path)).size


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
def test_a_first_look_reads_a_bounded_part_of_any_journal(
    make: Callable[[Path], None], tmp_path: Path, limited: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also for the search by layer."""
    make(tmp_path)
    for name, most in (("_SEARCHED", 4 << 20), ("_AT_ONCE", 4 << 20), ("_END_BYTES", 4 << 20)):
        monkeypatch.setattr(journal_parts, name, most)
    limited(128 << 20)
    journal = tmp_path / "rank-0.journal"
    found = [entry.step for entry in read_sample(journal, 256) if isinstance(entry, Record)]
    first = [entry.step for entry in read_beginning(journal, 32) if isinstance(entry, Record)]
    assert (found, first) == (([0], [0, 1, 2]) if make is with_holes else ([], []))


def test_a_sample_is_from_all_over_where_not_all_places_can_be_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = write_run(tmp_path, steps=3000) / "rank-0.journal"
    monkeypatch.setattr(journal_parts, "_SEARCHED", 3 << 20)
    monkeypatch.setattr(journal_parts, "_AT_ONCE", 60_000)
    steps = [entry.step for entry in read_sample(journal, 256) if isinstance(entry, Record)]
    assert steps == sorted(steps) and steps[-1] == 2999 and 8 < len(steps) < 100
    assert all(any(first <= step < first + 750 for step in steps) for first in range(0, 3000, 750))


def test_the_end_of_a_journal_is_what_reading_backwards_gives(tmp_path: Path) -> None:
    journal = write_run(tmp_path, steps=40) / "rank-0.journal"
    whole = list(read_backwards(journal))
    assert list(read_end(journal)) == whole
    assert list(read_end(journal, 5000)) == whole[: len(list(read_end(journal, 5000)))] != []
    data = journal.read_bytes()
    journal.write_bytes(write_header(7) + data[BEGIN:])
    assert list(read_end(journal)) == whole, "although its header is that of another"


def test_what_a_large_run_json_says_of_a_run_is_read_from_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"blocks.{number}.mlp.experts.down_projection.weight" for number in range(40_000)]
    write_run(tmp_path, steps=0)
    (tmp_path / "run.json").unlink()
    info = {"created": 1.79e9, "model": "Small", "parameters": 2000}  # a training writes them in this order
    write_info(tmp_path, {**info, "layers": [{"name": name, "shape": [10, 100]} for name in names]})
    assert (tmp_path / "run.json").stat().st_size > glance_file.MOST_INFO
    parsed: list[int] = []
    real = json.loads

    def loads(text: str) -> object:
        parsed.append(len(text))
        return real(text)

    monkeypatch.setattr(json, "loads", loads)
    seen = glance(Run(tmp_path))
    assert (seen.model, seen.parameters, seen.created, seen.trouble) == ("Small", 2000, 1.79e9, "")
    (tmp_path / "run.json").write_text('{"a": [' + "1," * (3 << 20) + "1]}")
    assert "missing or damaged" in glance(Run(tmp_path)).trouble
    assert max(parsed, default=0) <= run_file._INFO_END


def test_that_nothing_in_a_large_journal_can_be_read_is_said_by_those_who_read_it(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=0)
    (path / "rank-0.journal").write_bytes(bytes(2 << 20))
    seen = glance(Run(path))
    assert seen.state == "running" and "nothing can be read" in seen.trouble
    (checked,), _ = check_for_damage([seen])
    assert checked.state == "unreadable" and "Nothing in its journals can be read" in checked.trouble
    with served(tmp_path) as server:
        (run,) = wait_for(lambda: [run for run in server.get("/api/runs")["runs"] if run["state"] == "unreadable"])
        assert run["is_lost_mostly"]


# Runs that take long to read ------------------------------------------------------------------------------------------


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Three runs whose reading does not end before the event, and a healthy one."""
    over, real = threading.Event(), shelf_file.glance

    def waits(run: Run) -> Glance:
        if run.path.name.startswith("slow"):
            over.wait(4 * WAIT)
        return real(run)

    for number in range(3):
        write_run(tmp_path / f"slow{number}", steps=3, created=1.79e9 + 9)
    write_run(tmp_path / "healthy", steps=30)
    monkeypatch.setattr(shelf_file, "glance", waits)
    monkeypatch.setattr(shelf_file, "_FRESH", -1.0)
    yield over
    over.set()


def test_a_run_is_found_and_looked_at_while_others_are_read(tmp_path: Path, slow: threading.Event) -> None:
    """No lock is held meanwhile."""
    shelf = Shelf(tmp_path)
    with ThreadPoolExecutor() as pool:
        try:
            listing = pool.submit(shelf.runs)
            found = pool.submit(shelf.find, "healthy").result(WAIT)
            assert found is not None and found.glance.steps == 30
            write_run(tmp_path / "new", steps=4)
            assert getattr(pool.submit(shelf.find, "new").result(WAIT), "name", "") == "new"
            os.utime(found.path / "rank-0.journal")
            assert pool.submit(shelf.look_again, found).result(WAIT).glance.steps == 30
            assert not slow.is_set()
        finally:
            slow.set()
        assert listing.result(WAIT)["healthy"].glance.steps == 30


def test_a_list_has_runs_that_take_long_as_they_were(
    tmp_path: Path, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(tmp_path)
    wait_for(lambda: shelf.runs()["healthy"].glance.steps == 30)
    runs = shelf.runs()
    assert {run.name for run in runs.values() if run.blocked} == {"slow0", "slow1", "slow2"}
    assert runs["slow0"].glance.state == "unknown" and runs["slow0"].signature
    slow.set()
    runs = wait_for(lambda: (found := shelf.runs()) and not any(run.blocked for run in found.values()) and found)
    assert [run.glance.steps for run in runs.values()] == [3, 3, 3, 30]
    slow.clear()
    for number in range(3):
        os.utime(tmp_path / f"slow{number}" / "rank-0.journal")
    runs = shelf.runs()
    assert runs["slow0"].blocked and (runs["slow0"].glance.state, runs["slow0"].glance.steps) == ("finished", 3)


def test_work_that_takes_long_keeps_no_thread_from_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_file, "_LONG", 0.0)
    over = threading.Event()

    async def asked() -> None:
        desk = Desk(threads=2)
        long = [asyncio.create_task(desk.in_thread(over.wait, 4 * WAIT)) for _ in range(6)]
        try:
            assert await asyncio.wait_for(desk.in_thread(lambda: "answer"), WAIT) == "answer"
            assert not any(one.done() for one in long)
        finally:
            over.set()
            await asyncio.gather(*long)
        assert not desk._busy.borrowed_tokens

    asyncio.run(asked())


class Reading:
    """A follower that takes so many turns to read its run."""

    turns: ClassVar[dict[str, int]] = {"short": 1}
    taken: ClassVar[dict[str, int]] = {}
    is_sample = False
    version = 1

    def __init__(self, path: Path, **asked: int) -> None:
        self.run = Run(path)

    @property
    def is_complete(self) -> bool:
        return self.taken.get(self.run.name, 0) >= self.turns.get(self.run.name, 50)

    def look(self) -> None:
        while not self.is_complete:
            self.read_on(1.0)

    def read_on(self, seconds: float) -> bool:
        self.taken[self.run.name] = self.taken.get(self.run.name, 0) + 1
        return self.is_complete


def test_runs_that_take_long_to_open_take_turns_with_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve of them, opened before it, kept its page for 25 seconds: each was read to its end or for four seconds."""
    monkeypatch.setattr(desk_file, "Follower", Reading)
    monkeypatch.setattr(desk_file, "_FIRST", WAIT)
    names = [*(f"long{number}" for number in range(12)), "short"]
    for name in names:
        write_run(tmp_path / name, steps=1)
    runs = Shelf(tmp_path).runs()

    async def asked() -> None:
        desk = Desk(threads=2)
        pages = [
            asyncio.create_task(desk.ask(runs[name], "view", lambda follower: follower.run.name)) for name in names
        ]
        assert (await pages[-1]).plain == b'"short"'
        assert max(Reading.taken.values()) <= 4 and not any(page.done() for page in pages[:-1])
        assert [(await page).plain.decode() for page in pages] == [f'"{name}"' for name in names]
        assert Reading.taken == {name: Reading.turns.get(name, 50) for name in names}

    asyncio.run(asked())


def described(path: Path, layers: int) -> Listed:
    """A run whose run.json is as a training of so many layers writes it."""
    names = [f"model.layers.{number}.self_attention.query.weight" for number in range(layers)]
    told = {"dtype": "float32", "trained": True, "part": "attention", "module": "Linear", "selected": True}
    write_run(path, steps=3)
    info = {"created": 1.79e9, "model": "Small", "parameters": 2000}
    listed = [{"name": name, "shape": [1024, 1024], **told} for name in names]
    write_info(path, {**info, "layers": listed, "versions": {"torch": "2.9"}})
    return Shelf(path.parent).runs()[path.name]


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what is parsed, during which no other thread runs."""
    lengths: list[int] = []
    real = json.loads
    monkeypatch.setattr(json, "loads", lambda text: (lengths.append(len(text)), real(text))[1])
    return lengths


@pytest.mark.parametrize("layers", [10_000, 60_000])
def test_no_page_parses_a_large_run_json(layers: int, tmp_path: Path, parsed: list[int]) -> None:
    """It held the GIL for up to 17 s. That of 10,000 layers is read whole; of a larger one all but its layers."""
    listed = described(tmp_path / "run", layers)
    whole = (tmp_path / "run" / "run.json").stat().st_size
    parsed.clear()
    shelf = Shelf(tmp_path)
    shelf.runs()
    page = asyncio.run(Desk().ask(listed, "view", lambda follower: run_view(follower, Examined(), ())))
    seen = json.loads(page.plain)["run"]
    assert (seen["model"], seen["parameters"], seen["versions"]) == ("Small", 2000, {"torch": "2.9"})
    names = shelf.layers(listed)
    assert "first.weight" in names
    if layers == 10_000:
        assert len(names) == 10_002 and whole in parsed and whole < glance_file.MOST_INFO / 1.5
    else:
        assert whole > 2 * glance_file.MOST_INFO and max(parsed) < 1 << 20


def test_a_large_run_json_is_read_whole_where_nobody_else_waits(tmp_path: Path) -> None:
    described(tmp_path / "run", 60_000)
    run = Run(tmp_path / "run")
    assert len(run.layers) == 60_000 and len(run.anew().layers) == 60_000


BLOCKED = """
from holter.dashboard import desk, shelf
flag = {flag!r}
def waits(real):
    def wait(*asked):
        path = getattr(asked[0], "path", None) or asked[0].run.path
        while path.name.startswith("slow") and not os.path.exists(flag):
            time.sleep(0.05)
        return real(*asked)
    return wait
import time
desk.Follower.read_on = waits(desk.Follower.read_on)
shelf.glance = waits(shelf.glance)
"""


def test_a_page_and_the_list_are_answered_while_others_are_read(tmp_path: Path) -> None:
    """In the real server: of five runs neither a glance nor a page comes to an end."""
    root, flag = tmp_path / "runs", tmp_path / "over"
    for number in range(5):
        write_run(root / f"slow{number}", steps=3, created=1.79e9 + 9)
    write_run(root / "healthy", steps=30)
    with served(root, BLOCKED.format(flag=str(flag))) as server, ThreadPoolExecutor(8) as pool:
        try:
            pages = [pool.submit(server.client.get, f"/api/run/slow{number}") for number in range(5)]
            listing = pool.submit(server.get, "/api/runs")
            assert pool.submit(server.get, "/api/run/healthy").result(WAIT)["run"]["steps"] == 30
            runs = {run["name"]: run for run in listing.result(WAIT)["runs"]}
            assert len(runs) == 6
            assert not any(page.done() for page in pages)
        finally:
            flag.touch()
        assert [page.result(WAIT).status_code for page in pages] == [200] * 5


def test_a_run_too_large_to_be_examined_soon_comes_after_the_others(tmp_path: Path) -> None:
    write_run(tmp_path / "large", steps=3, created=1.79e9 + 9)
    write_run(tmp_path / "other", steps=3)
    os.truncate(tmp_path / "large" / "rank-0.journal", HUGE)
    examinations = Examinations()
    examinations.attend("large")
    found = examinations.next(Shelf(tmp_path).runs().values())
    assert found is not None and found.id == "other"


def test_the_time_that_a_list_waits_is_bounded_by_what_is_new(
    tmp_path: Path, slow: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was waited for once is not waited for again."""
    monkeypatch.setattr(shelf_file, "_PATIENCE", 0.5)
    waited: list[int] = []
    real = shelf_file.wait
    monkeypatch.setattr(shelf_file, "wait", lambda new, timeout: (waited.append(len(new)), real(new, timeout))[1])
    shelf = Shelf(tmp_path)
    wait_for(lambda: shelf.runs()["healthy"].glance.steps == 30)
    waited.clear()
    shelf.runs()
    assert waited == [0]
