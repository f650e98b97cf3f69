"""A run that is followed for its page: quick first, whole then, on as it grows, whatever state its files are in."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

import holter
from benchmarks import long_runs
from holter.journal import Journal
from holter.journal_parts import read_sample
from holter.record import Ending, Record
from holter.report import reading
from holter.report.examining import Examined
from holter.report.reading import Follower
from holter.report.view import run_view
from holter.run import journal_path
from holter.summary import summarise
from holter.words import duration
from tests import sick_trainings


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sick_trainings.dead_relu(tmp_path_factory.mktemp("runs") / "dead")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return long_runs.make(tmp_path_factory.mktemp("runs") / "long", layers=12, steps=3000)


def _write(path: Path, steps: range, *, segment: int = 0, loss: float = 1.0, ending: str | None = None) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    journal = Journal(journal_path(path, 0, segment))
    for step in steps:
        journal.append(Record(step, 0.0, {"loss": loss}, segment=segment))
    if ending is not None:
        journal.append(Ending(0.0, ending))
    journal.close()
    return path


def _strict(view: object) -> object:
    return json.loads(json.dumps(view, allow_nan=False))


def test_what_is_found_is_what_the_run_itself_says(sick: Path) -> None:
    follower = Follower(sick, examine=True)
    follower.look()
    run, examined = holter.open_run(sick), follower.examined()

    assert examined.findings == run.findings and examined.findings
    assert follower.run_state == run.state and follower.digest.count == len(run.history)
    assert examined.sampled == 1.0


def test_a_first_look_at_a_long_run_has_every_role_and_its_whole_length(
    long: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_SMALL", 0)
    follower = Follower(long, buckets=100)
    follower.look()

    assert follower.is_sample and follower.run_state == "finished"
    assert {role for role, _ in follower.digest.strips} == {"gradient", "update", "momentum", "weight", "activation"}
    assert follower.digest.last_step == 2999 and 100 < follower.digest.count < 3000
    assert any("sample" in note for note in run_view(follower, Examined())["notes"])
    assert follower.read_on(0.0) is False and follower.is_sample  # no time: it goes on where it stopped
    assert follower.read_on() and not follower.is_sample and follower.digest.count == 3000
    assert not run_view(follower, Examined())["notes"]


def test_a_sample_is_true_to_the_journal(long: Path) -> None:
    whole = {record.step: record for record in holter.open_run(long).records}
    sampled = [entry for entry in read_sample(journal_path(long, 0, 0), 50) if isinstance(entry, Record)]

    assert [record.step for record in sampled] == sorted({record.step for record in sampled})
    for record in sampled:
        assert record.scalars == whole[record.step].scalars
        rows, other = record.rows["gradient"], whole[record.step].rows["gradient"]
        assert rows.layers == other.layers
        np.testing.assert_array_equal(rows.rows.values, other.rows.values)


def test_memory_does_not_grow_with_the_run(long: Path) -> None:
    short = long_runs.make(long.with_name("short"), layers=12, steps=1500)
    sizes = []
    for path in (short, long):
        follower = Follower(path, buckets=50)
        follower.read_on()
        digest = follower.digest
        sizes.append(sum(strip.buckets._arrays.nbytes for strip in digest.strips.values()))
        assert all(len(strip.buckets.steps) <= 100 for strip in digest.strips.values())
    assert sizes[0] == sizes[1]


def test_a_live_run_is_read_on_and_its_version_tells(tmp_path: Path) -> None:
    journal = Journal(journal_path(tmp_path, 0, 0))
    follower = Follower(tmp_path)
    follower.look()
    assert follower.run_state == "running" and follower.digest.count == 0
    before = follower.version
    for step in range(3):
        journal.append(Record(step, 0.0, {"loss": 1.0}))
    follower.read_on()
    assert follower.version > before and follower.digest.count == 3
    before = follower.version
    follower.read_on()
    assert follower.version == before
    journal.append(Ending(0.0, "failed", "ValueError"))
    follower.read_on()
    assert follower.version > before and follower.run_state == "failed"
    assert run_view(follower, Examined())["run"]["error"] == "ValueError"


def test_a_run_without_a_sign_of_life_has_crashed(tmp_path: Path) -> None:
    _write(tmp_path, range(3))
    old = time.time() - 1000
    os.utime(journal_path(tmp_path, 0, 0), (old, old))
    follower = Follower(tmp_path)
    follower.look()
    assert follower.run_state == "crashed"


@pytest.mark.parametrize("is_live", [False, True])
def test_of_a_resumed_run_the_line_that_survived_is_shown(tmp_path: Path, is_live: bool) -> None:
    """P17"""
    _write(tmp_path, range(100), loss=1.0)
    follower = Follower(tmp_path, examine=True)
    if is_live:
        follower.look()
        assert follower.digest.count == 100
    _write(tmp_path, range(60, 80), segment=1, loss=2.0, ending="finished")
    follower.read_on()
    follower.read_on()

    losses = follower.digest.scalars["loss"]
    assert losses.last[:, 0].tolist() == [1.0] * 60 + [2.0] * 20
    assert follower.digest.count == 80 == len(holter.open_run(tmp_path).history.latest())
    assert follower.run_state == "finished"


def test_a_journal_that_was_replaced_is_read_from_its_start(tmp_path: Path) -> None:
    _write(tmp_path, range(10), loss=1.0)
    follower = Follower(tmp_path)
    follower.look()
    journal_path(tmp_path, 0, 0).unlink()
    _write(tmp_path, range(5), loss=3.0)
    follower.read_on()
    follower.read_on()
    assert follower.digest.scalars["loss"].last[:, 0].tolist() == [3.0] * 5


_DAMAGES = ("torn", "noise", "no run.json", "empty journal", "nothing at all", "all roles gone")


@pytest.mark.parametrize("damage", _DAMAGES)
def test_a_damaged_run_shows_what_is_there_and_says_what_is_not(sick: Path, tmp_path: Path, damage: str) -> None:
    """P18"""
    copy = tmp_path / "copy"
    copy.mkdir()
    journal = journal_path(copy, 0, 0)
    data = journal_path(sick, 0, 0).read_bytes()
    info = (sick / "run.json").read_text()
    (copy / "run.json").write_text("{" if damage == "no run.json" else info)
    if damage == "torn":
        journal.write_bytes(data[: len(data) // 2])
    elif damage == "noise":
        journal.write_bytes(data[: len(data) // 2] + os.urandom(5000))
    elif damage == "no run.json":
        journal.write_bytes(data)
    elif damage == "empty journal":
        journal.write_bytes(b"")
    elif damage == "all roles gone":
        _write(copy, range(30))

    follower = Follower(copy, examine=True)
    follower.look()
    view = run_view(follower, follower.examined())
    _strict(view)
    whole = len(holter.open_run(sick).history)
    steps = {"torn": range(1, whole), "noise": range(1, whole), "no run.json": range(whole, whole + 1)}
    assert view["run"]["steps"] in steps.get(damage, [30] if damage == "all roles gone" else [0])
    expected = {
        "torn": "torn or damaged",
        "noise": "torn or damaged",
        "no run.json": "run.json is missing",
        "empty journal": "No step",
        "nothing at all": "No step",
    }
    if damage in expected:
        assert any(expected[damage] in note for note in view["notes"])
    else:
        assert any("Gradients were not measured" in one for one in view["unobserved"])


def test_the_view_tells_the_finding_with_charts_about_its_onset(sick: Path) -> None:
    follower = Follower(sick, examine=True)
    follower.look()
    examined = follower.examined()
    view = run_view(follower, examined)
    _strict(view)
    finding = view["findings"][0]

    assert view["verdict"]["state"] == "sick" and "step" in view["verdict"]["sentence"]
    assert finding["cause"] == examined.findings[0].cause and finding["charts"]
    for chart in finding["charts"]:
        assert len(chart["steps"]) == len(chart["values"]) >= 2
    assert [event["step"] for event in view["events"]] == sorted(event["step"] for event in view["events"])
    assert {"loss", "gradient_norm"} <= view["scalars"].keys()
    assert view["maps"][0]["id"] == "gradient/norm" and view["flow"][0]["id"] == "gradient"
    layers, steps = (int(number) for number in view["maps"][0]["values"]["shape"].split(","))
    assert layers == len(view["maps"][0]["layers"]) and steps == len(view["maps"][0]["steps"])


def test_of_a_live_page_only_the_strip_charts_that_are_looked_at_are_sent(sick: Path) -> None:
    follower = Follower(sick)
    follower.look()
    view = run_view(follower, Examined(), ["weight/norm"])

    assert [one["id"] for one in view["maps"]] == ["weight/norm"]
    assert "gradient/norm" in [one["id"] for one in view["more_maps"]]


def _matrix(packed: dict[str, str]) -> np.ndarray:
    rows, columns = (int(number) for number in packed["shape"].split(","))
    return np.frombuffer(base64.b64decode(packed["bdata"]), f"<{packed['dtype']}").reshape(rows, columns)


def test_what_a_page_shows_is_what_was_recorded(sick: Path) -> None:
    """Every scalar, every strip chart by the names of its layers, flows, time and figures."""
    follower = Follower(sick, examine=True)
    follower.look()
    view, run = run_view(follower, follower.examined()), holter.open_run(sick)
    history, summary = run.history, summarise(run)

    assert view["run"]["steps"] == len(history) and view["run"]["state"] == run.state
    assert view["run"]["seconds"] == pytest.approx(summary.scalars.seconds)
    assert view["run"]["monitor_cost"] == pytest.approx(summary.scalars.monitor_cost)
    assert view["machine"]["stages"] == pytest.approx(summary.scalars.stages)
    assert summary.scalars.step_time is not None
    figures = {one["name"]: one["text"] for one in view["machine"]["figures"]}
    assert figures["a step takes"] == duration(summary.scalars.step_time.median)
    assert set(view["scalars"]) == set(history.scalars)
    for name, line in view["scalars"].items():
        steps, values = history.scalar(name)
        assert line["steps"] == steps.tolist()
        np.testing.assert_allclose(np.array(line["values"], dtype=float), values, rtol=1e-5)
    for one in view["maps"]:
        steps, layers, values = history.series(one["role"], one["statistic"])
        assert one["layers"] == list(layers)
        drawn = _matrix(one["values"])[:, np.isin(one["steps"], steps)]
        np.testing.assert_allclose(drawn, values[np.isin(steps, one["steps"])].T, rtol=1e-5)
    for flow in view["flow"]:
        steps, layers, values = history.series(flow["id"], {"gradient": "norm", "activation": "rms"}[flow["id"]])
        for curve in flow["curves"]:
            expected = values[steps.tolist().index(curve["step"])]
            np.testing.assert_allclose(np.array(curve["values"], dtype=float), expected, rtol=1e-5)
    assert {curve["step"] for curve in view["flow"][0]["curves"]} >= {0, len(history) - 1}


def test_histograms_over_time_hold_the_values_that_were_counted(sick: Path) -> None:
    follower = Follower(sick)
    follower.look()
    drawn, history = run_view(follower, Examined())["histograms"]["gradient"], holter.open_run(sick).history
    edges = np.array(drawn["edges"])
    for layer, one in drawn["layers"].items():
        steps, histograms = history.histogram("gradient", layer)
        assert one["steps"] == steps.tolist()
        shares = (_matrix(one["counts"]) / 255.0) ** 2
        np.testing.assert_allclose(shares.sum(axis=1), 1, atol=0.1)
        for row, histogram in zip(shares, histograms, strict=True):
            place = int(np.searchsorted(edges, float(histogram.quantile(0.5)), side="right")) - 1
            assert row[:place].sum() <= 0.6 and row[: place + 1].sum() >= 0.4


def test_a_sample_of_a_long_run_says_how_long_it_is_and_that_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_SMALL", 0)
    monkeypatch.setattr(reading, "_SAMPLE", 20)
    journal = Journal(journal_path(tmp_path, 0, 0))
    for step in range(500):
        journal.append(Record(step, 0.0, {"loss": 1.0, "step_time": 0.5}))
    follower = Follower(tmp_path)
    follower.look()
    view = run_view(follower, Examined())

    assert follower.is_sample and view["run"]["state"] == "running"
    assert view["run"]["steps"] == 500 and view["run"]["seconds"] == pytest.approx(250)
    assert "500 steps" in view["verdict"]["sentence"]


def test_while_a_long_run_is_read_again_what_was_known_is_shown(tmp_path: Path) -> None:
    _write(tmp_path, range(100))
    follower = Follower(tmp_path)
    follower.look()
    _write(tmp_path, range(60, 62), segment=1)
    follower.read_on(0.0)

    assert follower.digest.count == 100 and follower.is_sample
    follower.read_on()
    assert follower.digest.count == 62 and not follower.is_sample


def test_what_was_late_for_a_line_that_ended_does_not_bring_it_back(tmp_path: Path) -> None:
    """An alert that was delivered after the checkpoint was loaded stands first in the new journal."""
    _write(tmp_path, range(100), loss=1.0)
    journal = Journal(journal_path(tmp_path, 0, 1))
    journal.append(Record(99, 0.0, {"delivered": 1.0}, late=True))
    for step in range(50, 60):
        journal.append(Record(step, 0.0, {"loss": 2.0}, segment=1))
    journal.append(Ending(0.0, "finished"))
    follower = Follower(tmp_path, examine=True)
    follower.look()

    assert follower.digest.count == 60 == len(holter.open_run(tmp_path).history.latest())
    assert follower.examined().findings == holter.open_run(tmp_path).findings


def test_a_journal_that_is_replaced_by_one_that_is_still_empty_is_noticed(tmp_path: Path) -> None:
    _write(tmp_path, range(10), loss=1.0)
    follower = Follower(tmp_path)
    follower.look()
    journal_path(tmp_path, 0, 0).unlink()
    journal = Journal(journal_path(tmp_path, 0, 0))
    follower.read_on()
    for step in range(5, 12):
        journal.append(Record(step, 0.0, {"loss": 9.0}))
    follower.read_on()

    assert follower.digest.scalars["loss"].steps.tolist() == list(range(5, 12))
    assert (follower.digest.scalars["loss"].last == 9.0).all()


def test_a_pipe_in_place_of_run_json_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.json")
    _write(tmp_path, range(3))
    assert holter.open_run(tmp_path).info == {}
