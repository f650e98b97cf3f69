"""A run directory: opened, listed, followed and written by several, without one's damage hiding another."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holter
from holter import journal as journal_module
from holter import run as module
from holter import writer as writer_module
from holter.journal import Journal, JournalReader
from holter.record import FORMAT, Ending, Entry, Problem, Record
from holter.run import Run, create_directory, journal_path, list_runs, next_segment, open_run, write_info
from holter.writer import Writer

ROOT = Path(__file__).parent.parent


def a_record(step: int, segment: int = 0) -> Record:
    return Record(step, float(step), {"loss": 1.0 / (1 + step)}, segment=segment)


def make_run(directory: Path, entries: list[Entry], segment: int = 0, rank: int = 0, **info: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    write_info(directory, {"created": 1000.0, **info})
    journal = Journal(journal_path(directory, rank, segment))
    for entry in entries:
        journal.append(entry)
    journal.close()
    return directory


def steps_of(run: Run) -> list[int]:
    return run.history.steps.tolist()


# Opening ----------------------------------------------------------------------------------------------------------


def test_what_is_no_run_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Missing, a file, or a directory of something else: a ValueError that says where runs are."""
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / "file").write_text("text")
    with pytest.raises(ValueError, match=r"no such directory .*`holter runs` lists"):
        open_run(tmp_path / "missing")
    for name in ("photos", "file"):
        with pytest.raises(ValueError, match=f"{name} is not a run: it has neither run.json nor a journal"):
            open_run(tmp_path / name)


def test_a_run_of_a_newer_version_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    """Before anything is read from it, and with the way out."""
    make_run(tmp_path / "new", [])
    journal_path(tmp_path / "new", 0, 0).write_bytes(struct.pack("<6sH", b"HOLTER", FORMAT + 1))
    with pytest.raises(ValueError, match="pip install -U holter"):
        open_run(tmp_path / "new")


def test_an_opened_run_gives_back_what_it_was_told(tmp_path: Path) -> None:
    """Layers, records, problems as findings, and how it ended."""
    entries: list[Entry] = [a_record(0), Problem(1, 2.0, "write", "OSError"), a_record(1), Ending(9.0, "finished")]
    run = open_run(make_run(tmp_path / "one", entries, layers=[{"name": "a"}]))
    assert (run.name, run.created, run.layers, run.state) == ("one", 1000.0, ({"name": "a"},), "finished")
    assert steps_of(run) == [0, 1] and run.unreadable_bytes == 0
    assert [finding.step for finding in run.findings] == [1]
    assert run.ending == Ending(9.0, "finished") and "finished, 2 steps" in repr(run)


def test_journals_alone_are_a_run_and_so_is_run_json_alone(tmp_path: Path) -> None:
    """A crash between the two, or a run.json that was lost, hides nothing."""
    make_run(tmp_path / "journal", [a_record(0)])
    (tmp_path / "journal" / "run.json").unlink()
    write_info(create_directory(tmp_path / "info"), {"created": 5.0})
    assert steps_of(open_run(tmp_path / "journal")) == [0] and open_run(tmp_path / "journal").layers == ()
    assert open_run(tmp_path / "info").state == "empty" and steps_of(open_run(tmp_path / "info")) == []


def test_the_lowest_rank_speaks_for_the_run(tmp_path: Path) -> None:
    """P9: where rank 0 has no journal, the next one does."""
    make_run(tmp_path / "run", [a_record(0), a_record(1)], rank=2)
    make_run(tmp_path / "run", [a_record(0)], rank=5)
    assert steps_of(open_run(tmp_path / "run")) == [0, 1]
    assert steps_of(Run(tmp_path / "run", rank=5)) == [0]


def test_run_json_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P18: a reader never sees half of it."""
    write_info(tmp_path, {"model": "old"})
    before = (tmp_path / "run.json").read_text()

    def fail(self: Path, target: Path) -> Path:
        assert json.loads(self.read_text())["model"] == "new"  # the draft is complete before it takes the place
        assert target.read_text() == before
        raise OSError("pulled out")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="pulled out"):
        write_info(tmp_path, {"model": "new"})
    assert (tmp_path / "run.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


# The state --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_the_time_of_its_first_start(tmp_path: Path) -> None:
    write_info(tmp_path, {"created": 1.0, "model": "old"})
    write_info(tmp_path, {"created": 2.0, "model": "new"})
    assert (Run(tmp_path).created, Run(tmp_path).info["model"]) == (1.0, "new")


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def test_a_run_is_running_as_long_as_its_journal_is_touched(tmp_path: Path) -> None:
    """P15: no end and no sign of life for half a minute is a crash; touching brings it back."""
    directory = make_run(tmp_path / "run", [a_record(0)])
    path = journal_path(directory, 0, 0)
    assert open_run(directory).state == "running"
    age(path, module.STALE_SECONDS + 5)
    assert open_run(directory).state == "crashed"
    age(path, module.STALE_SECONDS - 20)
    assert open_run(directory).state == "running"


@pytest.mark.parametrize("state", ["finished", "failed", "interrupted", "ended"])
def test_an_ending_is_told_however_old_it_is(state: str, tmp_path: Path) -> None:
    """P15: a run that ended did not crash."""
    directory = make_run(tmp_path / "run", [a_record(0), Ending(3.0, state, "KeyError", dropped=4)])
    age(journal_path(directory, 0, 0), 1e6)
    run = open_run(directory)
    assert run.state == state and run.ending == Ending(3.0, state, "KeyError", 4)


def test_the_newest_segment_tells_the_state(tmp_path: Path) -> None:
    """A run that failed and was resumed is running; segment 10 comes after segment 9."""
    directory = make_run(tmp_path / "run", [a_record(0), Ending(3.0, "failed")])
    run = open_run(directory)
    assert run.state == "failed"
    for segment in (9, 10):
        make_run(directory, [a_record(1, segment)], segment=segment)
        run.refresh()
        assert run.state == "running" and run.ending is None
    make_run(directory, [Ending(9.0, "finished")], segment=11)
    run.refresh()
    assert run.state == "finished" and run.history.segments.tolist() == [0, 9, 10]


# Listing ----------------------------------------------------------------------------------------------------------


def damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that are broken in every way but one: they are there."""
    for name in ("pickled", "deep", "huge", "words", "torn", "forbidden", "folder"):
        make_run(root / name, [a_record(0)])
    (root / "pickled" / "run.json").write_bytes(b"\x80\x04\x95\x00")
    (root / "deep" / "run.json").write_text("[" * 100_000)
    (root / "huge" / "run.json").write_text('{"created": 1' + "0" * 400 + "}")
    (root / "words" / "run.json").write_text('{"created": NaN, "layers": "many"}')
    journal_path(root / "torn", 0, 0).write_bytes(b"HOLT")
    journal_path(root / "folder", 0, 0).unlink()
    journal_path(root / "folder", 0, 0).mkdir()
    real = module.is_run

    def is_run(path: Path) -> bool:
        if path.name == "forbidden":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(module, "is_run", is_run)


def test_a_damaged_run_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P18: it is listed like any other, and each can be asked for its state."""
    make_run(tmp_path / "older", [a_record(0)], created=100.0)
    make_run(tmp_path / "newer", [a_record(0), a_record(1)], created=200.0)
    damage(tmp_path, monkeypatch)
    (tmp_path / "notes.txt").write_text("no run")
    runs = list_runs(tmp_path)
    names = [run.name for run in runs]
    assert sorted(names) == ["deep", "folder", "huge", "newer", "older", "pickled", "torn", "words"]
    assert names.index("newer") < names.index("older")
    assert {run.name: run.state for run in runs if run.state != "running"} == {"folder": "empty"}
    assert {run.name: len(run.history) for run in runs}["newer"] == 2
    assert list_runs(tmp_path / "nowhere") == []


def test_a_list_that_stops_at_the_first_damage_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P18: the planted twin: the same damage without the care."""
    damage(tmp_path, monkeypatch)
    monkeypatch.setattr(module, "_may_be_run", lambda path: module.is_run(path))
    with pytest.raises(PermissionError):
        list_runs(tmp_path)


def test_runs_made_at_the_same_moment_get_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P18: a name that is taken is tried again with another word; a named directory is taken as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "2026-01-01_00-00-00")
    made = {create_directory(None) for _ in range(12)}
    assert len(made) == 12 and all(path.parent == Path("runs") for path in made)
    assert create_directory("runs/mine") == create_directory("runs/mine") == Path("runs/mine")


# Several writers --------------------------------------------------------------------------------------------------


def segments_of_racing_writers(directory: Path, monkeypatch: pytest.MonkeyPatch, count: int = 8) -> list[int]:
    """Writers that all see an empty directory, as in a race, and then write."""
    monkeypatch.setattr(writer_module, "next_segment", lambda directory, rank: 0)
    problems: list[BaseException] = []
    writers: list[Writer] = []
    barrier = threading.Barrier(count)

    def start() -> None:
        barrier.wait()
        writers.append(Writer(directory, 0, {}, (), lambda where, error: problems.append(error)))

    threads = [threading.Thread(target=start) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for writer in writers:
        writer.close(Ending(1.0, "finished"), 5.0)
    assert problems == []
    return sorted(writer._segment for writer in writers)


def test_every_writer_of_a_run_gets_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P18: no lock: whoever creates the file has it, and the next one takes the next number."""
    directory = create_directory(tmp_path / "run")
    assert segments_of_racing_writers(directory, monkeypatch) == list(range(8))
    assert next_segment(directory, rank=0) == 8 and next_segment(directory, rank=1) == 0
    assert len(open_run(directory)._parts) == 8

    real = os.open  # the planted twin: a file that exists is opened all the same

    def careless(path: Any, flags: int, mode: int = 0o777) -> int:
        return real(path, flags & ~os.O_EXCL, mode)

    monkeypatch.setattr(os, "open", careless)
    assert segments_of_racing_writers(create_directory(tmp_path / "shared"), monkeypatch) != list(range(8))


def test_a_resumed_training_is_a_new_segment_and_nothing_is_lost(tmp_path: Path) -> None:
    """P17: six steps, a checkpoint after three, a resume from it: ten records, and a line of seven that survived."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(monitor: holter.Monitor, steps: int) -> Iterator[dict[str, Any]]:
        for _ in range(steps):
            model(torch.ones(2, 3)).mean().backward()
            optimizer.step()
            monitor.log(loss=float(monitor.step))
            yield monitor.state_dict()

    with holter.watch(model, optimizer, run=tmp_path / "run") as monitor:
        checkpoint = list(train(monitor, 6))[2]
    with holter.watch(model, optimizer, run=tmp_path / "run") as monitor:
        monitor.load_state_dict(checkpoint)
        list(train(monitor, 4))
    history = open_run(tmp_path / "run").history
    assert history.steps.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6]
    segments = history.segments.tolist()
    assert segments[:6] == [0] * 6 and len(set(segments[6:])) == 1 and segments[6] > 0
    assert history.latest().steps.tolist() == list(range(7))
    assert history.latest().segments.tolist() == [0, 0, 0, *segments[6:]]


# Following --------------------------------------------------------------------------------------------------------

COUNT = 1200
# Writes a finished journal into the run in pieces that tear nearly every record.
PIECEMEAL = """
import os, random, sys, time
data, path = open(sys.argv[1], "rb").read(), sys.argv[2]
file, rng, place = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), random.Random(1), 0
while place < len(data):
    place += os.write(file, data[place : place + rng.randrange(1, 4000)])
    time.sleep(rng.random() * 0.002)
"""


def followed(directory: Path, source: Path) -> tuple[list[Record], list[int]]:
    """The records that a reader collects while another process writes, and the steps at the end."""
    command = [sys.executable, "-c", PIECEMEAL, str(source), str(journal_path(directory, 0, 0))]
    run, fresh = Run(directory), []
    with subprocess.Popen(command) as writer:
        while writer.poll() is None:
            fresh += run.refresh()
            assert steps_of(run) == list(range(len(fresh)))
    fresh += run.refresh()
    return fresh, steps_of(run)


def test_a_reader_keeps_up_with_a_writer_in_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P18: torn records are waited for: every one once, in order, and no lock."""
    make_run(tmp_path / "source", [*map(a_record, range(COUNT)), Ending(1.0, "finished")])
    source = journal_path(tmp_path / "source", 0, 0)
    fresh, steps = followed(create_directory(tmp_path / "run"), source)
    assert [record.step for record in fresh] == steps == list(range(COUNT))
    assert Run(tmp_path / "run").state == "finished"

    real = JournalReader.read  # the planted twin: what is torn now is passed over

    def impatient(self: JournalReader) -> Iterator[Entry]:
        yield from real(self)
        self._offset += self.unreadable_bytes if self._offset else 0

    monkeypatch.setattr(journal_module.JournalReader, "read", impatient)
    with pytest.raises(AssertionError):
        fresh, steps = followed(create_directory(tmp_path / "skipped"), source)
        assert steps == list(range(COUNT))


def test_tail_gives_every_record_as_it_comes_and_ends_with_the_run(tmp_path: Path) -> None:
    """Records of a second segment too; nothing twice, whoever else reads the run meanwhile."""
    directory = create_directory(tmp_path / "run")
    first = Journal(journal_path(directory, 0, 0))
    first.append(a_record(0))
    run, seen = Run(directory), []
    for record in run.tail(poll_seconds=0.001):
        seen.append((record.segment, record.step))
        if len(seen) == 1:
            second = Journal(journal_path(directory, 0, 1))
            second.append(a_record(5, segment=1))
        if len(seen) == 2:
            run.refresh()
            first.append(a_record(1))  # a writer that was thought dead
            second.append(a_record(6, segment=1))
            run.refresh()
        if len(seen) == 4:
            second.append(a_record(7, segment=1))
            second.append(Ending(1.0, "finished"))
    assert sorted(seen) == [(0, 0), (0, 1), (1, 5), (1, 6), (1, 7)] and len(seen) == 5
    assert run.history.segments.tolist() == [0, 0, 1, 1, 1]  # as if it had been read at once
    first.close(), second.close()


def test_tail_of_a_crashed_run_ends(tmp_path: Path) -> None:
    """P15: nobody waits for ever for a dead writer."""
    directory = make_run(tmp_path / "run", [a_record(0)])
    age(journal_path(directory, 0, 0), 1000)
    assert [record.step for record in Run(directory).tail()] == [0]


def test_a_replaced_or_cut_journal_is_read_anew_and_nothing_twice(tmp_path: Path) -> None:
    """P18: a run that was begun again under the same name, or restored from a copy that was shorter."""
    entries: list[Entry] = [*map(a_record, range(5)), Problem(1, 1.0, "x", "y"), Ending(1.0, "finished")]
    run = open_run(make_run(tmp_path / "run", entries))
    assert steps_of(run) == [0, 1, 2, 3, 4] and run.state == "finished"
    path = journal_path(tmp_path / "run", 0, 0)
    path.unlink()
    make_run(tmp_path / "run", [a_record(7), a_record(8)])
    assert [record.step for record in run.refresh()] == [7, 8]
    assert steps_of(run) == [7, 8] and run.state == "running" and run.findings == ()
    os.truncate(path, path.stat().st_size - 3)
    run.refresh()
    assert steps_of(run) == [7] and run.unreadable_bytes > 0
    path.unlink()
    assert run.refresh() == [] and steps_of(run) == [] and run.state == "empty"


def test_a_history_stays_the_same_object_until_there_is_more(tmp_path: Path) -> None:
    """What a rule has stacked is not stacked again for nothing."""
    run = open_run(make_run(tmp_path / "run", [a_record(0)]))
    before = run.history
    run.refresh()
    assert run.history is before
    make_run(tmp_path / "run", [a_record(1, 1)], segment=1)
    run.refresh()
    assert run.history is not before and steps_of(run) == [0, 1]
