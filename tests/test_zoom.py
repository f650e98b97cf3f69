"""Some steps of a run, looked at closely: what run.history says of them, and of steps that are too many a part."""

from __future__ import annotations

import base64
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import holter
from holter import journal_parts
from holter.dashboard.details import zoomed
from holter.history import History
from holter.journal import Journal
from holter.journal_parts import read_between
from holter.record import EXECUTION_ORDER, Ending, LayerRows, Problem, Record
from holter.run import Run, journal_path
from holter.statistics.rows import COLUMNS, Rows

Floats = npt.NDArray[np.float64]
LAYERS = ("b", "a", "c")
SPIKE, BEFORE = 137, 40.0  # where one gradient explodes; how far the line that ended lies from the one that went on

TWICE = 405  # a step that stands twice, the second time without rows


def _rows(sizes: Floats, layers: tuple[str, ...], **extras: Floats) -> LayerRows:
    values = np.zeros((len(layers), len(COLUMNS)))
    values[:, COLUMNS.index("count")] = 4
    values[:, COLUMNS.index("sum_squares")] = sizes**2
    return LayerRows(layers, Rows(values), extras)


def _record(step: int, segment: int, offset: float = 0.0) -> Record:
    sizes = np.array([1.0, 2.0, 3.0]) + step / 100 + offset
    layers = LAYERS[:2] if step < 50 else LAYERS  # one comes late
    rows = {"gradient": _rows((1e6 if step == SPIKE else 1.0) * sizes[: len(layers)], layers)}
    if step % 100 == 0:
        rows["weight"] = _rows(10 * sizes[: len(layers)], layers)
        rows["activation"] = _rows(sizes[:2], LAYERS[:2], dead=sizes[:2] / 10)
    notes = {EXECUTION_ORDER: '["a", "b", "c"]'} if step == 0 else {}
    return Record(step, 1.79e9 + step, {"loss": 1.0, "x" * 900: 2.0}, rows, notes, segment)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a training that went back twice: from step 450 to 120 in a new journal, and within it from 260 to 230 in a
    segment of its own, of which ten steps stand twice, one of them without rows. Among its records are endings,
    problems and values that were logged late."""
    path = tmp_path_factory.mktemp("runs") / "resumed"
    path.mkdir()
    again = [(range(230, 420), 2, 5.0), (range(400, 410), 2, 7.0)]
    lines = {0: [(range(450), 0, BEFORE)], 1: [(range(120, 260), 1, 0.0), *again]}
    for number, parts in lines.items():
        journal = Journal(journal_path(path, 0, number))
        for steps, segment, offset in parts:
            for step in steps:
                journal.append(_record(step, segment, offset))
                if step % 50 == 0:
                    journal.append(Problem(step, 1.79e9, "write", "no space"))
                    late = {"update": _rows(np.array([0.1]), ("a",), ratio=np.array([step / 7]))}
                    journal.append(Record(step, 1.79e9, {"accuracy": 0.5}, late, segment=segment, late=True))
        if number == 1:
            journal.append(Record(TWICE, 1.79e9, {"loss": 1.0}, segment=2))
        journal.append(Ending(1.79e9, "finished"))
        journal.close()
    return path


def _values(found: dict[str, Any]) -> Floats:
    shape = [int(number) for number in found["values"]["shape"].split(",")]
    return np.frombuffer(base64.b64decode(found["values"]["bdata"]), "<f4").reshape(shape).astype(np.float64)


def _expected(path: Path, wanted: str, first: int, last: int) -> tuple[list[int], list[str], Floats]:
    steps, layers, values = holter.open_run(path).history.latest().series(*wanted.split("/"))
    order = np.argsort(steps)
    inside = order[(steps[order] >= first) & (steps[order] <= last)]
    measured = ~np.isnan(values[inside]).all(axis=0)
    return steps[inside].tolist(), [layers[at] for at in np.flatnonzero(measured)], values[inside][:, measured].T


_MAPS = ("gradient/norm", "gradient/std", "weight/norm", "activation/rms", "activation/dead", "update/ratio")


@pytest.mark.parametrize(
    "span", [(0, 419), (100, 140), (119, 121), (137, 137), (180, 300), (225, 235), (400, 9999), (405, 405), (418, 440)]
)
@pytest.mark.parametrize("wanted", _MAPS)
def test_what_is_looked_at_closely_is_what_the_history_has(resumed: Path, wanted: str, span: tuple[int, int]) -> None:
    """P20: single spikes, what is measured rarely or late, and of repeated steps the newest alone."""
    steps, layers, values = _expected(resumed, wanted, *span)
    found = zoomed(resumed, wanted, *span)

    if not steps:
        assert found is None
        return
    assert found is not None and "thinned" not in found
    assert found["layers"] == layers
    drawn = np.isin(found["steps"], steps)
    assert [step for step, one in zip(found["steps"], drawn, strict=True) if one] == steps
    np.testing.assert_allclose(_values(found)[:, drawn], values, rtol=1e-6)
    assert np.isnan(_values(found)[:, ~drawn]).all()  # the ends of a gap


def test_a_span_of_more_steps_than_columns_still_shows_a_single_spike(tmp_path: Path) -> None:
    journal = Journal(journal_path(tmp_path, 0, 0))
    for step in range(2000):
        journal.append(Record(step, 0.0, {}, {"gradient": _rows(np.array([1e5 if step == 777 else 1.0]), ("a",))}))
    journal.close()
    found = zoomed(tmp_path, "gradient/norm", 0, 1999)

    assert found is not None and len(found["steps"]) < 1000 and "thinned" not in found
    seen = [step for step, value in zip(found["steps"], _values(found)[0], strict=True) if value > 1e4]
    assert len(seen) == 1 and 777 - 4 < seen[0] <= 777


def test_of_steps_that_are_too_many_a_part_from_everywhere_is_read_and_it_is_said(
    resumed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_between(Run(resumed).own_journals, "gradient", 0, 419)
    steps = sorted(record.step for record in whole.records)
    assert (whole.read, whole.there) == (419, 419) and steps == [step for step in range(420) if step != TWICE]
    monkeypatch.setattr(journal_parts, "_EACH", 0)
    part = read_between(Run(resumed).own_journals, "gradient", 0, 419, most=60_000)
    read = list(part.records)

    assert part.there == 419 and len(read) == part.read < 200
    assert max(np.diff(sorted(record.step for record in read))) <= 4 * 419 / part.read
    assert {record.segment for record in read if record.step >= 230} == {2}
    monkeypatch.setattr("holter.dashboard.details.read_between", partial(read_between, most=60_000))
    found = zoomed(resumed, "gradient/norm", 250, 330)
    assert found is not None and found["thinned"][1] == 81 and 20 < found["thinned"][0] == len(found["steps"]) < 81
    assert zoomed(resumed, "gradient/norm", 0, 419) is None  # the map of the whole run has the extremes of all steps


def test_a_map_that_there_is_not_is_none(resumed: Path) -> None:
    for wanted in ("gradient/nothing", "gradient", "", "nobody/norm", "gradient/ratio", "weight/norm/x"):
        assert zoomed(resumed, wanted, 0, 419) is None, wanted
    assert zoomed(resumed, "weight/norm", 401, 419) is None


def test_names_that_need_escapes_are_found(tmp_path: Path) -> None:
    """The words of an entry are JSON in JSON; roles are an open set."""
    journal = Journal(journal_path(tmp_path, 0, 0))
    for role in ('a"b', "back\\slash", "größe", "\U0001f600"):
        journal.append(Record(0, 0.0, {}, {role: _rows(np.array([1.0]), ("a",))}))
        assert read_between([journal.path], role, 0, 0).there == 1, role
    journal.close()


def test_a_damaged_journal_shows_what_is_left_of_it(resumed: Path, tmp_path: Path) -> None:
    """P18"""
    data = journal_path(resumed, 0, 0).read_bytes()
    for end in (0, 3, 8, 2000, len(data) // 2):
        copy = journal_path(tmp_path, 0, 0)
        copy.write_bytes(data[:end])
        records = list(read_between([copy], "gradient", 0, 999).records)
        assert [record.step for record in records] == list(range(len(records)))
    broken = bytearray(data)
    broken[len(data) // 2] ^= 255
    copy.write_bytes(broken)
    assert len(list(read_between([copy], "gradient", 0, 999).records)) in (449, 450)


def test_the_contract_sees_a_line_that_ended(resumed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its planted fault: without the rule for segments, or for steps, the zoom is not what the history has."""
    monkeypatch.setattr(journal_parts, "_survivors", lambda looked: [frame for one in looked for frame in one.frames])
    steps, _, values = _expected(resumed, "gradient/norm", 100, 140)
    found = zoomed(resumed, "gradient/norm", 100, 140)
    assert found is not None and not np.allclose(_values(found), values)
    assert isinstance(holter.open_run(resumed).history, History) and steps == found["steps"]
