"""Comparisons in bounded memory: what is read of a run, what of a long one is left out, and that it is said."""

from __future__ import annotations

import gc
import os
import shutil
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import holter
from holter.comparison import comparing
from holter.comparison.comparing import Comparison, compare
from holter.comparison.reading import read_run
from holter.comparison.sheets import Sheet
from holter.journal import Journal
from holter.record import Ending, LayerRows, Record
from holter.run import STALE_SECONDS, journal_path, write_info
from holter.statistics.rows import COLUMNS, Rows
from tests import sick_trainings

LAYERS = tuple(f"h.{place}.weight" for place in range(20))
STEPS = 400
ROOM = 6_000  # numbers in a sheet: of a hundred steps


def made(
    path: Path, steps: int = STEPS, *, differs_at: int | None = None, by: float = 1.5, ending: str = "finished"
) -> Path:
    """A run of which one layer has other gradients from a step on."""
    path.mkdir()
    write_info(path, {"created": 0.0, "layers": [{"name": name, "shape": [4, 4]} for name in LAYERS]})
    random, journal = np.random.default_rng(0), Journal(journal_path(path, 0, 0))
    for step in range(steps):
        sizes = 1 + 0.1 * random.random(len(LAYERS))
        if differs_at is not None and step >= differs_at:
            sizes[7] *= by
        scalars = {"loss": 2.0 / (1 + 0.01 * step), "gradient_norm": float(np.sqrt((sizes**2).sum()))}
        journal.append(Record(step, float(step), scalars, {"gradient": LayerRows(LAYERS, rows(sizes))}))
    if ending:
        journal.append(Ending(0.0, ending, "RuntimeError" if ending == "failed" else ""))
    journal.close()
    return path


def rows(sizes: np.ndarray) -> Rows:
    values = np.zeros((len(sizes), len(COLUMNS)))
    values[:, COLUMNS.index("count")], values[:, COLUMNS.index("sum_squares")] = 16, sizes**2
    return Rows(values)


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "read_run", partial(read_run, room=ROOM))


def told(comparison: Comparison) -> str:
    return " ".join(note for side in comparison.sides for note in side.notes)


# What is read -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("train", [sick_trainings.repeated_batch, sick_trainings.nan_in_weights])
def test_what_is_read_is_what_the_history_of_the_run_holds(tmp_path: Path, train: partial[Path]) -> None:
    """Every scalar and every statistic that is compared, to the bit, and the findings."""
    run = holter.open_run(train(tmp_path / "run"))
    reading, history = read_run(tmp_path / "run"), run.history.latest()
    assert set(reading.roles) == set(history.roles) and set(reading.scalars) == set(history.scalars)
    for name, (steps, values) in reading.scalars.items():
        np.testing.assert_array_equal(history.scalar(name)[0], steps)
        np.testing.assert_array_equal(history.scalar(name)[1], values)
    seen = 0
    for role in reading.roles:
        for statistic in reading.statistics(role):
            *axes, values = history.series(role, statistic)
            if statistic in ("norm", "ratio"):  # of the finite values alone: not what a layer is compared by
                values = np.where(history.series(role, "nonfinite")[2] > 0, np.inf, values)
            for ours, theirs in zip(reading.series(role, statistic), (*axes, values), strict=True):
                np.testing.assert_array_equal(np.array(ours), np.array(theirs))
            seen += 1
    assert seen > 6 and reading.findings == run.findings and reading.findings and reading.state == run.state


def test_of_a_resumed_run_the_line_that_survived_is_read(tmp_path: Path) -> None:
    made(tmp_path / "run", 30, ending="")
    journal = Journal(journal_path(tmp_path / "run", 0, 1))
    for step in range(20, 40):
        journal.append(Record(step, 0.0, {"loss": -1.0}, segment=1))
    journal.append(Record(39, 0.0, {"val_loss": 3.0}, segment=1, late=True))
    journal.close()
    for reading in (read_run(tmp_path / "run"), read_run(holter.open_run(tmp_path / "run"))):
        assert reading.steps.tolist() == list(range(40))
        assert (reading.scalars["loss"][1] == -1.0).tolist() == [False] * 20 + [True] * 20
        assert reading.series("gradient", "norm")[0].tolist() == list(range(20))
        assert reading.scalars["val_loss"][0].tolist() == [39]


def test_of_a_value_that_came_twice_for_a_step_the_newest_is_read(tmp_path: Path) -> None:
    path = made(tmp_path / "run", 4, ending="")
    journal = Journal(journal_path(path, 0, 1))
    for value in (5.0, 6.0, 7.0):
        journal.append(Record(2, 0.0, {"val_loss": value, "loss": value}, segment=1, late=True))
    journal.close()
    scalars = read_run(path).scalars
    assert [one.tolist() for one in scalars["val_loss"]] == [[2], [7.0]]
    assert scalars["loss"][0].tolist() == [0, 1, 2, 3] and scalars["loss"][1][2] == 7.0


def test_rows_that_come_late_stand_beside_those_of_their_step() -> None:
    sheet = Sheet("norm")
    sheet.put(3, LayerRows(("a", "b"), rows(np.array([1.0, 2.0]))))
    sheet.put(3, LayerRows(("b", "c"), rows(np.array([5.0, 6.0]))), is_late=True)
    steps, layers, values = sheet.series({})
    assert steps.tolist() == [3] and dict(zip(layers, values[0], strict=True)) == {"a": 1.0, "b": 5.0, "c": 6.0}
    sheet.put(3, LayerRows(("b",), rows(np.array([9.0]))))
    assert sheet.series({})[1] == ("b",), "the step was done again"


def test_no_record_of_a_run_is_kept(tmp_path: Path) -> None:
    made(tmp_path / "run")

    def alive() -> int:
        gc.collect()
        return sum(type(one) is Record for one in gc.get_objects())  # asking others for their class may do anything

    before = alive()
    reading = read_run(tmp_path / "run", ROOM)
    assert len(reading.steps) == STEPS and alive() == before
    run = holter.open_run(tmp_path / "run")
    assert len(run.records) == STEPS and alive() >= before + STEPS, "the gate would pass on anything"


def test_a_sheet_keeps_to_its_room_and_the_first_look_of_each_stretch() -> None:
    sheet, other = Sheet("norm", ROOM), Sheet("norm", ROOM)
    looks = LayerRows(LAYERS, rows(np.ones(len(LAYERS))))
    for step in range(3, 2000):
        sheet.put(step, looks)
        assert len(sheet._rows) * len(LAYERS) <= ROOM
        if step % 3 == 0:  # measured at other steps, and fewer
            other.put(step, looks)
    steps = sheet.series({})[0]
    assert sheet.span == 32 and steps[0] == 3 and (steps[1:] % 32 == 0).all() and len(steps) > 50
    assert len(np.intersect1d(steps, other.series({})[0])) > 15


# What is said of it -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("little_room")
def test_a_long_run_is_compared_at_some_steps_of_its_layers_and_that_is_said(tmp_path: Path) -> None:
    """What differs is found in its layer within a stretch, and to the step by what is compared at all of them."""
    comparison = compare(made(tmp_path / "a"), made(tmp_path / "b", differs_at=205))
    found = comparison.pairs[0].partings
    assert found.difference is not None and found.difference.step == 205 and found.difference.series == "gradient norm"
    layer = found.layer_difference
    assert layer is not None and layer.layer == LAYERS[7] and 205 <= layer.step < 205 + 4
    assert found.layer_departure is not None and found.layer_departure.layer == LAYERS[7]
    assert told(comparison).count("one in 4 (gradient)") == 2


@pytest.mark.usefixtures("little_room")
def test_runs_of_other_lengths_meet_where_both_are_kept(tmp_path: Path) -> None:
    comparison = compare(made(tmp_path / "a"), made(tmp_path / "b", 90))
    assert comparison.pairs[0].partings.difference is None and comparison.pairs[0].partings.compared > len(LAYERS)
    ratios = comparison.pairs[0].ratios
    assert ratios is not None and len(ratios.steps) > 10 and not np.nanmax(np.abs(ratios.values))


def test_of_a_short_run_everything_is_compared(tmp_path: Path) -> None:
    comparison = compare(made(tmp_path / "a", 50), made(tmp_path / "b", 50, differs_at=33))
    layer = comparison.pairs[0].partings.layer_difference
    assert layer is not None and (layer.layer, layer.step) == (LAYERS[7], 33)
    assert "it is long" not in told(comparison)


# How it ended -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["crashed", "failed"])
def test_a_run_that_broke_off_is_a_regression_and_is_told(tmp_path: Path, state: str) -> None:
    """E27: also where all that was recorded is the same."""
    whole = made(tmp_path / "whole", 60)
    broken = made(tmp_path / "broken", 40, ending="failed" if state == "failed" else "")
    if state == "crashed":
        long_ago = time.time() - 10 * STALE_SECONDS
        os.utime(journal_path(broken, 0, 0), (long_ago, long_ago))
    comparison = compare(whole, broken)
    assert comparison.sides[1].state == state and comparison.regressed
    assert comparison.pairs[0].verdict.regressions == (f"the training {state}",)
    assert f"it {state} after 40 steps" in told(comparison)
    assert not compare(broken, whole).regressed, "to get through is none"
    shutil.copytree(broken, tmp_path / "again", copy_function=shutil.copy2)
    assert not compare(broken, tmp_path / "again").regressed, "it broke off before, too"


# What it costs ----------------------------------------------------------------------------------------------------


def costly(path: Path, times: float, step_time: float = 0.1, name: str = "process_memory") -> Path:
    """A training whose memory, which is looked at now and then, grows so many times."""
    path.mkdir()
    write_info(path, {"created": 0.0})
    journal, memory = Journal(journal_path(path, 0, 0)), np.linspace(1e9, times * 1e9, 10)
    for step in range(80):
        scalars = {"loss": 2.0 / (1 + 0.01 * step), "step_time": step_time}
        if step % 8 == 0:
            scalars |= {f"machine/{name}": float(memory[step // 8]), f"machine/{name}_free": 0.0}
        journal.append(Record(step, float(step), scalars))
    journal.append(Ending(0.0, "finished"))
    journal.close()
    return path


@pytest.mark.parametrize("name", ["process_memory", "gpu_memory"])
def test_memory_that_grows_is_a_regression_where_it_is_half_as_much_again(tmp_path: Path, name: str) -> None:
    """E27: a finding of performance alone may be a machine's own noise."""
    steady = costly(tmp_path / "steady", 1.0, name=name)
    doubled = costly(tmp_path / "doubled", 2.0, name=name)
    little = costly(tmp_path / "little", 1.4, name=name)
    assert [one.cause for one in holter.open_run(little).findings] == ["memory-growth"]
    assert compare(steady, doubled).pairs[0].verdict.regressions == ("“growing memory” is new",)
    comparison = compare(steady, little)
    assert not comparison.regressed and [one.cause for one in comparison.pairs[0].changes.came] == ["memory-growth"]
    assert not compare(doubled, steady).regressed


@pytest.mark.parametrize(("slower", "is_regression"), [(1.45, False), (1.55, True)])
def test_a_finding_of_performance_counts_where_steps_take_half_as_long_again(
    tmp_path: Path, slower: float, is_regression: bool
) -> None:
    steady = costly(tmp_path / "steady", 1.0)
    grown = costly(tmp_path / "grown", 1.4, step_time=0.1 * slower)
    assert compare(steady, grown).regressed == is_regression


# Names ------------------------------------------------------------------------------------------------------------


def test_runs_of_one_name_are_told_apart_by_as_little_of_their_paths_as_does(tmp_path: Path) -> None:
    (tmp_path / "monday").mkdir()
    (tmp_path / "tuesday").mkdir()
    one, two = made(tmp_path / "monday" / "run", 5), made(tmp_path / "tuesday" / "run", 5)
    assert [side.name for side in compare(one, two).sides] == ["monday/run", "tuesday/run"]
    assert [side.name for side in compare(one, one).sides] == ["run (1)", "run (2)"]
