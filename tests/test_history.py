"""History: records as series. Truth: plain loops over the records."""

from __future__ import annotations

import builtins
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holter import history as module
from holter.history import History
from holter.record import LayerRows, Record
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, STATISTICS, Rows


def tensors_of(step: int, layer: str) -> np.ndarray:
    rng = np.random.default_rng([step, *layer.encode()])
    return rng.normal(size=20) * (step + 1)


def row_of(values: np.ndarray) -> list[float]:
    sums = [values.sum(), np.abs(values).sum(), (values**2).sum(), (values**4).sum()]
    return [values.size, (values == 0).sum(), 0, 0, 0, *sums, values.min(), values.max()]


def rows_of(step: int, layers: Sequence[str], histograms: bool = False) -> LayerRows:
    values = [tensors_of(step, layer) for layer in layers]
    stacked = np.array([row_of(value) for value in values]).reshape(len(layers), len(COLUMNS))
    return LayerRows(tuple(layers), Rows(stacked, Histograms.of(values) if histograms else None))


def a_record(step: int, segment: int = 0, late: bool = False, **scalars: float) -> Record:
    return Record(step, float(step), scalars, segment=segment, late=late)


def a_training() -> list[Record]:
    """Layers come and go: "new" appears at step 3, "old" is gone from step 5, "gone" is there at step 2 only."""
    records = []
    for step in range(8):
        layers = [
            "a",
            *(["old"] if step < 5 else []),
            *(["new"] if step >= 3 else []),
            *(["gone"] if step == 2 else []),
        ]
        layers = layers[::-1] if step == 6 else layers  # and another order once
        rows = {"gradient": rows_of(step, layers, histograms=step % 2 == 0)}
        if step % 3 == 0:
            rows["weight"] = rows_of(step, ["a"])
        records.append(Record(step, float(step), {"loss": 1 / (step + 1)} if step != 4 else {}, rows))
    return records


def test_a_scalar_is_its_values_at_the_steps_that_have_it() -> None:
    """Against a plain loop; one that was never recorded is empty, not an error."""
    records = a_training()
    steps, values = History(records).scalar("loss")
    assert steps.tolist() == [r.step for r in records if "loss" in r.scalars] == [0, 1, 2, 3, 5, 6, 7]
    assert values.tolist() == [r.scalars["loss"] for r in records if "loss" in r.scalars]
    nothing = History(records).scalar("accuracy")
    assert (nothing[0].dtype, nothing[1].dtype, nothing[0].size, nothing[1].size) == (np.int64, np.float64, 0, 0)


def by_a_loop(records: Sequence[Record], role: str, statistic: str) -> dict[tuple[int, str], float]:
    found = {}
    for record in records:
        if role in record.rows:
            for place, layer in enumerate(record.rows[role].layers):
                found[record.step, layer] = float(record.rows[role].rows.derive(statistic)[place])
    return found


def as_a_mapping(steps: np.ndarray, layers: Sequence[str], matrix: np.ndarray) -> dict[tuple[int, str], float]:
    assert matrix.shape == (len(steps), len(layers))
    cells = {(int(step), layer): float(matrix[i, j]) for i, step in enumerate(steps) for j, layer in enumerate(layers)}
    return {cell: value for cell, value in cells.items() if not math.isnan(value)}


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("role", ["gradient", "weight"])
def test_a_series_is_steps_by_layers_and_nan_where_there_was_no_layer(role: str, statistic: str) -> None:
    """P26: layers that come, go and change places; each number under its own name and step."""
    records = a_training()
    steps, layers, matrix = History(records).series(role, statistic)
    found = as_a_mapping(steps, layers, matrix)
    assert found == by_a_loop(records, role, statistic)
    assert steps.tolist() == [r.step for r in records if role in r.rows]
    assert layers == (("a", "old", "gone", "new") if role == "gradient" else ("a",))
    if statistic == "norm":
        assert found == {cell: pytest.approx(np.linalg.norm(tensors_of(*cell))) for cell in found}


def test_layers_taken_by_place_instead_of_name_are_noticed() -> None:
    """P26: the planted twin: the names of the first record used for all of them."""
    records = a_training()[3:]
    swapped = [
        Record(r.step, r.time, rows={"gradient": LayerRows(("a", "old", "new")[: len(rows.layers)], rows.rows)})
        for r in records
        if (rows := r.rows["gradient"])
    ]
    found = as_a_mapping(*History(swapped).series("gradient", "norm"))
    assert found != by_a_loop(records, "gradient", "norm")


def test_a_role_that_was_never_measured_is_empty() -> None:
    """No rows, no layers, no error; an unknown statistic is one."""
    steps, layers, matrix = History(a_training()).series("activation", "norm")
    assert (steps.size, layers, matrix.shape) == (0, (), (0, 0))
    assert History([]).series("gradient", "mean")[2].shape == (0, 0)
    with pytest.raises(ValueError, match="unknown statistic 'sum of it'"):
        History(a_training()).series("gradient", "sum of it")


def test_histograms_stand_at_the_steps_where_they_were_taken() -> None:
    """Equal to those of the values; a layer that was never there has none."""
    steps, found = History(a_training()).histogram("gradient", "old")
    assert steps.tolist() == [0, 2, 4]
    for step, histogram in zip(steps.tolist(), found, strict=True):
        truth = Histograms.of([tensors_of(step, "old")])[0]
        assert np.array_equal(histogram.buckets, truth.buckets) and np.array_equal(histogram.counts, truth.counts)
    assert History(a_training()).histogram("gradient", "gone")[0].tolist() == [2]
    assert History(a_training()).histogram("gradient", "never")[1] == []
    assert History(a_training()).histogram("weight", "a")[1] == []


def test_a_history_says_what_it_holds() -> None:
    """Names in the order of first sight, steps as they were taken."""
    history = History([*a_training(), a_record(7, late=True, accuracy=0.5)])
    assert (history.scalars, history.roles) == (("loss", "accuracy"), ("gradient", "weight"))
    assert len(history) == 8 and history.steps.tolist() == list(range(8)) and set(history.segments.tolist()) == {0}
    assert "8 steps" in repr(history)


# Steps that repeat, go back or come late (P17) --------------------------------------------------------------------


def test_steps_out_of_order_repeated_or_resumed_are_all_kept() -> None:
    """P17: what was written is there, in the order of writing."""
    taken = [(0, 0), (1, 0), (5, 0), (3, 0), (3, 0), (1, 1), (2, 1), (0, 2)]
    history = History([a_record(step, segment, loss=float(i)) for i, (step, segment) in enumerate(taken)])
    assert history.steps.tolist() == [step for step, _ in taken]
    assert history.segments.tolist() == [segment for _, segment in taken]
    assert history.scalar("loss")[1].tolist() == list(range(8))
    frame = history.to_dataframe()
    assert list(zip(frame["step"], frame["segment"], frame["loss"], strict=True)) == [
        (step, segment, i) for i, (step, segment) in enumerate(taken)
    ]


def test_a_late_value_lands_on_its_own_step() -> None:
    """P17: after the next step was recorded, and in a table on the line of its step."""
    late = Record(1, 9.0, {"validation": 0.25}, {"batch": rows_of(1, ["targets"])}, late=True)
    first = Record(1, 1.0, {"loss": 2.0}, {"batch": rows_of(1, ["inputs"])})
    history = History([a_record(0, loss=3.0), first, a_record(2, loss=1.0), late])
    assert history.steps.tolist() == [0, 1, 2] and len(history) == 3
    assert [array.tolist() for array in history.scalar("validation")] == [[1], [0.25]]
    frame = history.to_dataframe()
    assert frame["step"].tolist() == [0, 1, 2]
    assert frame["loss"].tolist() == [3, 2, 1] and frame["validation"].tolist()[1] == 0.25
    assert frame["validation"].isna().tolist() == [True, False, True]
    steps, layers, matrix = history.series("batch", "norm")
    assert (steps.tolist(), layers) == ([1], ("inputs", "targets")) and np.isfinite(matrix).all()


def survivors_by_a_loop(records: Sequence[Record]) -> list[Record]:
    """Walks through the segments in their order: a resume rubs out every step from its first one on."""
    line: list[Record] = []
    for segment in sorted({record.segment for record in records}):
        mine = [record for record in records if record.segment == segment]
        first = min(record.step for record in mine)
        line = [record for record in line if record.step < first]
        for record in mine:
            if not record.late:
                line = [old for old in line if old.step != record.step]
            line.append(record)
    return line


def test_the_latest_line_of_three_segments_is_the_one_that_survived() -> None:
    """P17: 0-9, resumed at 5 up to 7, resumed at 3 up to 4: steps 0, 1, 2 of the first and 3, 4 of the last."""
    taken = [*((s, 0) for s in range(10)), *((s, 1) for s in range(5, 8)), *((s, 2) for s in (3, 4))]
    records = [a_record(step, segment, loss=float(segment)) for step, segment in taken]
    records.insert(3, a_record(2, 0, late=True, validation=1.0))
    records.insert(9, a_record(7, 0, late=True, validation=2.0))
    latest = History(records).latest()
    assert latest.steps.tolist() == [0, 1, 2, 3, 4] and latest.segments.tolist() == [0, 0, 0, 2, 2]
    assert [array.tolist() for array in latest.scalar("validation")] == [[2], [1.0]]
    assert len(History(records)) == 15  # and nothing was taken out of the whole


def newest_of_each_step(records: Sequence[Record]) -> list[Record]:
    """The planted twin: steps of an abandoned line that were not repeated pass for survivors."""
    newest = {record.step: record for record in records if not record.late}
    return [record for record in records if record.late or newest[record.step] is record]


@settings(max_examples=200, deadline=None)
@given(
    segments=st.lists(st.tuples(st.integers(0, 8), st.integers(1, 8)), min_size=1, max_size=4),
    late=st.sets(st.integers(0, 31)),
)
def test_the_latest_line_is_what_walking_through_the_segments_leaves(
    segments: list[tuple[int, int]], late: set[int]
) -> None:
    """P17: any number of resumes, from anywhere."""
    records = []
    for segment, (start, count) in enumerate(segments):
        for step in range(start, start + count):
            records.append(a_record(step, segment, loss=float(segment)))
            if len(records) in late:
                records.append(a_record(step, segment, late=True, validation=1.0))
    assert list(History(records).latest().records) == survivors_by_a_loop(records)


def test_an_abandoned_line_that_passes_for_the_latest_is_noticed() -> None:
    """P17: the planted twin of the test above."""
    records = [*(a_record(step, 0) for step in range(9)), *(a_record(step, 1) for step in range(2, 5))]
    assert list(History(records).latest().records) == survivors_by_a_loop(records)
    assert newest_of_each_step(records) != survivors_by_a_loop(records)


def test_a_repeated_step_supersedes_what_was_logged_late_for_the_first_try() -> None:
    """P17: a value told of a try that was given up is not the surviving one's."""
    records = [a_record(4, loss=1.0), a_record(4, late=True, validation=9.0), a_record(4, loss=2.0)]
    latest = History(records).latest()
    assert latest.scalar("loss")[1].tolist() == [2.0] and latest.scalar("validation")[1].tolist() == []
    assert latest.latest().records == latest.records


# Tables -----------------------------------------------------------------------------------------------------------


def test_a_table_of_a_role_has_a_line_a_step_and_layer() -> None:
    """Every statistic, against the series; no line where there was no layer."""
    history = History(a_training())
    frame = history.to_dataframe("gradient")
    expected = by_a_loop(history.records, "gradient", "norm")
    assert {(s, n): v for s, n, v in zip(frame["step"], frame["layer"], frame["norm"], strict=True)} == expected
    assert list(frame.columns) == ["step", "segment", "layer", *STATISTICS] and len(frame) == len(expected)
    for statistic in STATISTICS:
        found = {(s, n): v for s, n, v in zip(frame["step"], frame["layer"], frame[statistic], strict=True)}
        assert found == by_a_loop(history.records, "gradient", statistic)


def test_a_layer_without_a_finite_value_still_has_its_line() -> None:
    """Measured and not finite is not the same as not measured."""
    values = np.array([[3.0, 0, 3, 0, 0, 0, 0, 0, 0, np.inf, -np.inf]])
    frame = History([Record(0, 0.0, rows={"gradient": LayerRows(("a",), Rows(values))})]).to_dataframe("gradient")
    assert frame["nonfinite"].tolist() == [3] and math.isnan(frame["mean"][0])


def test_values_logged_as_step_or_segment_keep_a_column_of_their_own() -> None:
    """P17: what a user calls "step" neither hides ours nor is lost."""
    frame = History([Record(3, 3.0, {"step": 100.0, "segment": 7.0, "loss": 1.0})]).to_dataframe()
    assert frame.loc[0].to_dict() == {"step": 3, "segment": 0, "logged/step": 100, "logged/segment": 7, "loss": 1}


@pytest.mark.parametrize("records", [[], [a_record(0), a_record(1)]], ids=["no records", "no scalars"])
def test_a_table_of_nothing_is_a_table(records: list[Record]) -> None:
    """The columns are there, the lines are the steps."""
    frame = History(records).to_dataframe()
    assert list(frame.columns) == ["step", "segment"] and frame["step"].tolist() == [r.step for r in records]
    assert len(History(records).to_dataframe("gradient")) == 0


def test_without_pandas_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A laptop without pandas can still read everything else."""
    real = builtins.__import__

    def without_pandas(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(ImportError, match=r"pip install 'holter\[parquet\]'"):
        History(a_training()).to_dataframe()
    assert History(a_training()).series("gradient", "norm")[0].size == 8


def test_a_series_is_stacked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty rules that ask for the same role read the records once."""
    history, calls = History(a_training()), []
    real = module._by_step
    monkeypatch.setattr(module, "_by_step", lambda records: calls.append(1) or real(records))
    for statistic in STATISTICS:
        history.series("gradient", statistic)
    assert len(calls) == 1
