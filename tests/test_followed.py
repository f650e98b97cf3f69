"""What a reader that follows a run keeps, tells and leaves out: endings, problems, resumes, and the order of events."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import holter
from holter.diagnosis.events import Event
from holter.diagnosis.finding import Finding
from holter.following import Pulse
from holter.journal import Journal
from holter.record import Ending, Problem, Record
from holter.report import reading
from holter.report.digest import Digest
from holter.report.examining import Examined
from holter.report.reading import Follower
from holter.report.told import order_of_events, told_findings
from holter.report.view import run_view
from holter.run import journal_path, write_info
from holter.tail import Tail
from tests import sick_trainings


def _journal(path: Path, steps: range, segment: int = 0) -> Journal:
    path.mkdir(parents=True, exist_ok=True)
    journal = Journal(journal_path(path, 0, segment))
    for step in steps:
        journal.append(Record(step, 0.0, {"loss": 1.0}, segment=segment))
    return journal


def test_problems_of_holters_own_are_findings_as_the_run_itself_has_them(tmp_path: Path) -> None:
    journal = _journal(tmp_path, range(30))
    for step in (3, 7):
        journal.append(Problem(step, 0.0, "measure a step", f"ValueError at x.py:{step}"))
    follower = Follower(tmp_path, examine=True)
    follower.look()

    findings = follower.examined().findings
    assert findings == holter.open_run(tmp_path).findings and len(findings) == 2
    assert [card["since"] for card in run_view(follower, follower.examined())["findings"]] == [3, 7]
    assert Follower(tmp_path).examined().findings == ()
    before = follower.version
    journal.append(Problem(9, 0.0, "measure a step", "KeyError"))
    follower.read_on()
    assert follower.version > before


def test_problems_beyond_those_that_are_kept_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MOST_PROBLEMS", 2)
    monkeypatch.setattr("holter.following._MOST_PROBLEMS", 2)
    journal = _journal(tmp_path, range(30))
    follower, pulse = Follower(tmp_path, examine=True), Pulse(tmp_path)
    expected = {2: None, 3: "1 more problem of Holter's own", 1500: "1,498 more problems of Holter's own"}
    for count in range(1, 1501):
        journal.append(Problem(count, 0.0, "measure a step", str(count)))
        if count in expected:
            follower.read_on()
            pulse.read_on()
            for told in (run_view(follower, follower.examined())["notes"], pulse.vitals(0.0).damage):
                assert [line for line in told if line.startswith(expected[count] or "0 more")] == [
                    line for line in told if "more problem" in line
                ]
                assert any("more problem" in line for line in told) == (expected[count] is not None)
    assert len(follower.problems) == 2


def test_what_is_only_known_at_the_end_is_found_when_the_run_is_over(tmp_path: Path) -> None:
    """A training that ends with the step in which its illness is seen: nothing came after it."""
    sick = holter.open_run(sick_trainings.dead_relu(tmp_path / "sick"))
    known = sick.findings[0].step
    (tmp_path / "cut").mkdir()
    write_info(tmp_path / "cut", dict(sick.info))
    journal = Journal(journal_path(tmp_path / "cut", 0, 0))
    for record in sick.records:
        if record.step <= known:
            journal.append(record)
    follower = Follower(tmp_path / "cut", examine=True)
    follower.look()
    assert follower.run_state == "running" and follower.examined().findings == ()  # more may be said of this step
    journal.append(Ending(0.0, "finished"))
    follower.read_on()

    assert follower.examined().findings == holter.open_run(tmp_path / "cut").findings
    assert [finding.cause for finding in follower.examined().findings] == [sick.findings[0].cause]


def test_a_run_that_goes_on_after_its_ending_is_not_over(tmp_path: Path) -> None:
    """As a monitor does that is used again after it was closed: what was said of the end does not hold any more."""
    journal = _journal(tmp_path, range(5))
    tail = Tail(tmp_path, lambda: None)
    for entry, state in ((Ending(0.0, "failed", "ValueError"), "failed"), (Record(5, 0.0), "running")):
        journal.append(entry)
        list(tail.read())
        assert tail.state(0.0) == state and (tail.ending is not None) == (state == "failed")
    follower = Follower(tmp_path)
    follower.look()
    assert follower.run_state == "running" and follower.ending is None
    journal.append(Ending(0.0, "finished"))
    follower.read_on()
    assert follower.run_state == "finished"


def test_how_much_was_read_counts_what_was_not_opened_as_unread(tmp_path: Path) -> None:
    _journal(tmp_path, range(50))
    _journal(tmp_path, range(50, 400), segment=1)
    sizes = [journal_path(tmp_path, 0, segment).stat().st_size for segment in (0, 1)]
    follower = Follower(tmp_path)
    assert follower.read_share == 0
    shares = []
    while not follower.read_on(0.0):
        shares.append(follower.read_share)

    assert shares == sorted(shares) and len(set(shares)) == len(shares) == 400
    assert shares[49] == pytest.approx(sizes[0] / sum(sizes), abs=1e-9) and follower.read_share == 1
    _journal(tmp_path, range(400, 500), segment=2)
    third = journal_path(tmp_path, 0, 2).stat().st_size
    assert follower.read_share == pytest.approx(sum(sizes) / (sum(sizes) + third)) and follower.unreadable_bytes == 0


def test_the_view_tells_with_which_steps_training_was_resumed(tmp_path: Path) -> None:
    """Not those of a line that ended, and not the first segment."""
    lines = {0: range(100), 1: range(60, 80), 2: range(70, 90), 3: range(90, 95)}
    for segment, steps in lines.items():
        _journal(tmp_path, steps, segment)
    follower = Follower(tmp_path)
    follower.look()
    assert run_view(follower, Examined())["run"]["resumed"] == [60, 70, 90]

    digest = Digest()  # the same with all lines, as a sample of a long run is read
    for segment, steps in {**lines, 4: range(65, 70)}.items():
        for step in steps:
            digest.take(Record(step, 0.0, segment=segment))
    assert digest.resumed == [60, 65]


def _digest(values: dict[str, np.ndarray]) -> Digest:
    digest = Digest()
    for step in range(len(next(iter(values.values())))):
        digest.take(Record(step, 0.0, {name: float(line[step]) for name, line in values.items()}))
    return digest


def test_a_series_is_compared_with_its_past_and_not_with_what_came_after() -> None:
    """One that is wild up to the onset and quiet then has not left its past; one that goes the other way has."""
    noise = np.random.default_rng(0).normal(size=100)
    calm = 1 + 0.01 * noise
    before, after = np.arange(100) < 50, np.arange(100) >= 50
    digest = _digest({"wild_first": np.where(before, 5 * noise, 0.01 * noise), "wild_then": np.where(after, 9, calm)})
    finding = Finding("overfitting", "data", 50, 55, "warning")

    assert [chart["title"] for chart in told_findings([finding], digest)[0]["charts"]] == ["wild then"]


def test_what_failed_of_holters_own_is_no_event_of_the_training_and_has_no_charts() -> None:
    digest = _digest({"loss": np.where(np.arange(100) >= 50, 9.0, 1.0)})
    finding = Finding("monitor-degraded", "monitor", 50, 50, "warning")

    assert order_of_events([finding], [Event("loss", None, 50, None, 9, 1, 9.0, 9.0)]) == []
    assert told_findings([finding], digest)[0]["charts"] == []
