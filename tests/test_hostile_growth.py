"""Runs that were made to keep a reader busy: twice as large, they take about twice the calls (P18), never four times.

Time is not measured here: calls are counted, so that the tests say the same on a busy machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from holter import run as run_file
from holter.codec import _pack
from holter.frames import write_frame, write_header
from holter.history import History
from holter.journal import Journal
from holter.journal_parts import read_between
from holter.record import Ending, LayerRows, Problem, Record
from holter.run import Run, open_run
from holter.scalar_summary import summarise_scalars
from holter.signs.learning import without_gradient
from holter.signs.sign import Evidence
from holter.statistics.rows import COLUMNS, Rows
from holter.tail import Tail

FEW = 150


def rows(layer: str, **extras: float) -> LayerRows:
    known = {name: np.array([value]) for name, value in extras.items()}
    return LayerRows((layer,), Rows(np.ones((1, len(COLUMNS)))), known)


def calls(work: Callable[[], object]) -> int:
    """How many functions are called, and generators resumed."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def growth(prepare: Callable[[int], Callable[[], object]]) -> float:
    """How many times as many calls the second half of the work takes as the first: 1 if they are in proportion, and 3
    if there is a call for each pair. What is done once falls out."""
    prepare(8)()  # imports, caches
    small, middle, large = (calls(prepare(count)) for count in (FEW, 2 * FEW, 4 * FEW))
    return (large - middle) / 2 / max(1, middle - small)


def write(path: Path, entries: list[Record | Problem | Ending]) -> Path:
    journal = Journal(path)
    for entry in entries:
        journal.append(entry)
    journal.close()
    return path


# Segments ------------------------------------------------------------------------------------------------------------


def resumes(count: int) -> list[Record | Problem | Ending]:
    """A segment for each record."""
    return [Record(at % 7, 1e9 + at, {"loss": 1.0}, {"gradient": rows("a")}, segment=at) for at in range(count)]


def test_the_line_that_survived_of_many_segments() -> None:
    def latest(count: int) -> Callable[[], object]:
        history = History(one for one in resumes(count) if isinstance(one, Record))
        return history.latest

    assert growth(latest) < 1.5


def test_the_steps_that_survived_in_a_part_of_many_segments(tmp_path: Path) -> None:
    def part(count: int) -> Callable[[], object]:
        path = write(tmp_path / f"rank-0.{count}.journal", resumes(count))
        return lambda: read_between([path], "gradient", 0, 10)

    assert growth(part) < 1.5


def test_a_tail_of_many_journals(tmp_path: Path) -> None:
    def tail(count: int) -> Callable[[], object]:
        directory = tmp_path / str(count)
        directory.mkdir()
        for at in range(count):
            steps = [Record(at, 1e9), Record(at + 5, 1e9), Record(at, 1e9, late=True)]
            write(directory / f"rank-0.{at + 1}.journal", [*steps])
        one = Tail(directory, lambda: None)
        return lambda: list(one.read())

    assert growth(tail) < 1.5


def test_a_later_journal_ends_an_earlier_one_at_its_lowest_successor(tmp_path: Path) -> None:
    """As the loops over all successors had it."""
    for segment, first in ((0, 0), (1, 6), (2, 3), (3, 5)):
        steps = [Record(step, 1e9, {"loss": 1.0 * segment}, segment=segment) for step in range(first, first + 4)]
        write(tmp_path / (f"rank-0.{segment}.journal" if segment else "rank-0.journal"), [*steps])
    survived = open_run(tmp_path).history.latest().records
    assert [(one.segment, one.step) for one in survived] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (2, 3),
        (2, 4),
        *((3, step) for step in range(5, 9)),
    ]
    read = [one for one in Tail(tmp_path, lambda: None).read() if isinstance(one, Record)]
    assert [(one.segment, one.step) for one in read] == [(one.segment, one.step) for one in survived]


def test_journals_without_a_record_are_not_read_again_at_every_look(tmp_path: Path) -> None:
    """They are looked through for a first record, from where the last look ended."""
    problems = [Problem(0, 1.0, f"do {at}", "x") for at in range(FEW)]
    write(tmp_path / "rank-0.journal", [Record(0, 1e9), *problems])
    later = Journal(tmp_path / "rank-0.1.journal")
    for problem in problems:
        later.append(problem)
    tail = Tail(tmp_path, lambda: None)
    assert len(list(tail.read())) == 1 + 2 * FEW
    assert calls(lambda: list(tail.read())) < 10 * FEW  # two dozen for each entry that is decoded
    later.append(Record(0, 1e9, {"loss": 2.0}, segment=1))
    later.close()
    assert [one.segment for one in tail.read() if isinstance(one, Record)] == [1]


def test_a_run_json_that_says_nothing_is_not_read_at_every_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To parse a large one takes seconds in which no other thread runs. One that changed is read."""
    write(tmp_path / "rank-0.journal", [Record(0, 1e9)])
    (tmp_path / "run.json").write_text("[1, 2]")
    read: list[str] = []
    real = run_file.read_json
    monkeypatch.setattr(run_file, "read_json", lambda text: (read.append(text), real(text))[1])
    tail = Tail(tmp_path, lambda: None)
    for _ in range(9):
        list(tail.read())
        assert not tail.run.info
    assert len(read) <= 2
    (tmp_path / "run.json").write_text('{"model": "Small"}')
    list(tail.read())
    assert tail.run.info == {"model": "Small"}


# Layers, roles, scalars ---------------------------------------------------------------------------------------------


class Name(str):
    """Counts how often it is compared with another name."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other) is True

    __hash__ = str.__hash__


@pytest.mark.parametrize("order", ['["m7"]', ""], ids=["those that ran are known", "they are not"])
def test_layers_without_a_gradient_are_not_compared_with_each_other(order: str) -> None:
    notes = {"execution_order": order} if order else {}
    history = History(Record(step, 1e9, {}, {"gradient": rows("other")}, notes) for step in range(4))

    def compared(count: int) -> int:
        names = [Name(f"m{at % 13}.weight{at}") for at in range(count)]
        Name.compared = 0
        signs = list(without_gradient(Evidence(history, {name: {} for name in names})))
        assert sum(len(sign.layers) for sign in signs) == count
        return Name.compared

    assert compared(4 * FEW) <= 5 * compared(FEW) + FEW


def test_many_validation_scalars() -> None:
    def summary(count: int) -> Callable[[], object]:
        history = History(Record(at, 1e9, {f"val_{at}": 1.0, "loss": 2.0}) for at in range(count))
        return lambda: summarise_scalars(history)

    assert growth(summary) < 1.5


class Asked(dict[str, LayerRows]):
    """Counts how often a record is asked whether it has a role."""

    count = 0

    def __contains__(self, role: object) -> bool:
        Asked.count += 1
        return super().__contains__(role)


def test_many_roles() -> None:
    """No record is asked for each role of all."""
    history = History(Record(at, 1e9, {}, Asked({f"r{at}": rows("a")})) for at in range(FEW))
    Asked.count = 0
    for role in history.roles:
        assert len(history.series(role, "norm")[0]) == 1 and not history.extras(role)
    assert Asked.count < 10 * FEW


def test_many_extras() -> None:
    """Their series have a cell for each record: it is what stands besides that is in proportion."""

    def extras(count: int) -> Callable[[], object]:
        history = History([Record(0, 1e9, {}, {"r": rows("a", **{f"e{at}": 1.0 for at in range(count)})})])
        return lambda: [history.series("r", name) for name in history.extras("r")]

    assert growth(extras) < 1.5


def test_scalars_are_those_that_the_records_have() -> None:
    """Late ones replace those of their step; steps that a resume repeated stand twice; names as first seen."""
    records = [
        Record(0, 0.0, {"loss": 1.0}),
        Record(1, 0.0, {"loss": 2.0, "rate": 9.0}),
        Record(0, 0.0, {"accuracy": 0.5, "loss": 1.5}, late=True),
        Record(1, 0.0, {"loss": 2.5}, segment=1),
        Record(5, 0.0, {"accuracy": 0.25}, late=True, segment=1),
    ]
    history = History(records)
    found = {name: [values.tolist() for values in history.scalar(name)] for name in history.scalars}
    assert found == {
        "loss": [[0, 1, 1], [1.5, 2.0, 2.5]],
        "rate": [[1], [9.0]],
        "accuracy": [[0, 5], [0.5, 0.25]],
    }
    assert list(found) == ["loss", "rate", "accuracy"]
    assert [values.dtype for values in history.scalar("no such")] == [np.int64, np.float64]


def test_scalars_of_a_run_that_grows(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "rank-0.journal")
    run = Run(tmp_path)
    for step in range(3):
        journal.append(Record(step, 1e9, {"loss": float(step), f"val_{step}": 1.0}))
        run.refresh()
        assert run.history.scalar("loss")[1].tolist() == [float(one) for one in range(step + 1)]
        assert run.history.validation == tuple(f"val_{one}" for one in range(step + 1))
    journal.close()


# Problems ------------------------------------------------------------------------------------------------------------


def test_problems_beyond_those_of_any_training_are_counted(tmp_path: Path) -> None:
    """Each is a finding: thousands of them took 28 times the size of the file, and made a page of each."""
    blobs = [
        _pack({"kind": "problem", "step": 7, "time": 1.0, "where": f"do {at}", "what": "x"}, {}) for at in range(3000)
    ]
    frames = b"".join(write_frame(blob, 7, number) for number, blob in enumerate(blobs))
    (tmp_path / "rank-0.journal").write_bytes(write_header(7) + frames)
    (tmp_path / "run.json").write_text("{}")
    run = Run(tmp_path)
    assert [one.where for one in run.problems[:2]] == ["do 0", "do 1"] and len(run.problems) == 1001
    assert "2,000 more of its problems" in run.problems[-1].where
    assert "2,000 more of its problems" in run.findings[-1].advice and len(run.findings) == 1001


def test_problems_of_many_segments_are_counted_together(tmp_path: Path) -> None:
    for segment in range(4):
        problems = [Problem(segment, 1.0, f"do {at}", "x") for at in range(300)]
        write(tmp_path / f"rank-0.{segment + 1}.journal", [Record(segment, 1e9, segment=segment), *problems])
    run = Run(tmp_path)
    assert len(run.problems) == 1001 and "200 more of its problems" in run.problems[-1].where
    later = Journal(tmp_path / "rank-0.9.journal")
    later.append(Problem(9, 1.0, "do", "x"))
    run.refresh()
    later.append(Problem(9, 1.0, "do again", "x"))
    later.close()
    run.refresh()
    assert len(run.problems) == 1001 and "202 more of its problems" in run.problems[-1].where


def test_as_many_problems_as_a_training_can_write_are_all_shown(tmp_path: Path) -> None:
    problems = [Problem(3, 1.0, f"do {at}", "x") for at in range(100)]
    for segment in range(10):
        write(tmp_path / f"rank-0.{segment + 1}.journal", [*problems])
    assert Run(tmp_path).problems == problems * 10


def test_a_journal_that_was_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.journal"
    write(path, [Record(0, 1e9, {"loss": 1.0}), Problem(0, 1.0, "do", "x"), Ending(1.0, "finished")])
    run = open_run(tmp_path)
    assert (len(run.history), len(run.problems), run.state) == (1, 1, "finished")
    path.unlink()
    write(path, [Record(3, 1e9, {"loss": 1.0})])
    assert [record.step for record in run.refresh()] == [3]
    assert (len(run.history), run.problems, run.ending) == (1, [], None)
