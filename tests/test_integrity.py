"""How much of a damaged run can be read: with the steps that are missing, and how serious that is, told everywhere."""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from holter.comparison.comparing import compare
from holter.comparison.reading import read_run
from holter.damage import Damage
from holter.dashboard.examinations import Examination
from holter.dashboard.listing import Lister
from holter.dashboard.shelf import Shelf
from holter.dashboard.worker import Practice
from holter.diagnosis.finding import SEVERITIES, from_problem
from holter.diagnosis.render import render_findings
from holter.following import Pulse
from holter.glance import check_for_damage, glance
from holter.integrity import Gaps, Integrity, gaps_in
from holter.record import Problem
from holter.report.reading import Follower
from holter.run import open_run
from tests.test_cli import call, parse
from tests.test_damage import Stored, stored


def journal_of(tmp_path: Path, name: str = "run") -> Path:
    return tmp_path / name / "rank-0.journal"


def without_steps(whole: Stored, lost: Sequence[int]) -> bytes:
    """The journal without the frames of all records of these steps."""
    kept = [
        frame
        for frame, entry in zip(whole.frames, whole.entries, strict=True)
        if entry is None or getattr(entry, "step", -1) not in lost
    ]
    return whole.header + b"".join(kept)


def told_everywhere(path: Path) -> dict[str, str]:
    """By each part that shows a run: what it says."""
    follower, pulse = Follower(path, examine=True), Pulse(path)
    follower.read_on()
    pulse.read_on()
    return {
        "show": " ".join(call("show", path).output.split()),
        "diagnose": " ".join(call("diagnose", path).output.split()),
        "findings": " ".join(one.advice for one in open_run(path).findings),
        "page": " ".join(one.advice for one in follower.examined().findings),
        "live": " ".join(pulse.vitals(time.time()).damage),
        "compared": " ".join(one.advice for one in read_run(path).findings),
    }


def severities(path: Path) -> set[str]:
    """Of the damage, by all that judge it: they agree if there is one."""
    follower, pulse = Follower(path, examine=True), Pulse(path)
    follower.read_on()
    pulse.read_on()
    judged = (open_run(path).findings, follower.examined().findings, read_run(path).findings)
    shown = (*judged, pulse.vitals(time.time()).findings)
    return {next((one.severity for one in found if "journals" in one.advice), "none") for found in shown}


# Which steps are missing ---------------------------------------------------------------------------------------------


def test_steps_without_a_record_are_named_wherever_the_run_is_shown(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    whole = stored(path)
    path.write_bytes(without_steps(whole, [5, *range(10, 17), 20]))
    for part, text in told_everywhere(path.parent).items():
        assert "9 steps have no record: 5, 10 to 16, 20" in text, part
    assert parse(call("diagnose", path.parent, "--json"))["missing_steps"] == [[5, 5], [10, 16], [20, 20]]


def test_many_ranges_are_told_in_short(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    whole = stored(path)
    path.write_bytes(without_steps(whole, range(2, 30, 3)))
    for part, text in told_everywhere(path.parent).items():
        assert "10 steps have no record: 2, 5, 8 and 7 more ranges" in text, part


def test_no_step_is_missed_where_a_frame_without_a_step_is_gone(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    whole = stored(path)
    tables = [place for place, entry in enumerate(whole.entries) if entry is None and place]
    path.write_bytes(whole.header + b"".join(one for at, one in enumerate(whole.frames) if at != tables[1]))
    for part, text in told_everywhere(path.parent).items():
        assert "1 frame missing" in text and "no record" not in text, part


def test_steps_before_a_training_was_continued_in_a_run_of_its_own_are_not_missing() -> None:
    """It goes on counting where its checkpoint stopped; then a frame of it was lost."""
    found = Integrity(Damage(missing=2), steps=20, gaps=((0, 499), (510, 511)), size=9000)
    assert found.missing == ((510, 511),) and found.severity == "warning"
    assert Integrity(Damage(repeated=2), steps=20, gaps=((510, 511),), size=9000).missing == ()


@pytest.mark.parametrize(
    ("steps", "gaps"),
    [
        ([0, 1, 2], ()),
        ([3, 4, 9], ((0, 2), (5, 8))),
        ([0, 1, 8, 9, 4, 5], ((2, 3),)),  # a checkpoint of step 4 was loaded
        ([0, 5, 2, 3], ((1, 1),)),
        ([], ()),
    ],
)
def test_gaps_are_those_of_the_line_that_survived(steps: list[int], gaps: tuple[tuple[int, int], ...]) -> None:
    assert gaps_in(steps) == gaps


@pytest.mark.parametrize("steps", [[0, 1, 2], [3, 4, 9], [0, 1, 8, 9, 4, 5], [0, 5, 2, 3]])
def test_steps_of_the_line_that_survived_are_counted(steps: list[int]) -> None:
    gaps = Gaps()
    for step in steps:
        gaps.put(step)
    covered = {step for first, last in gaps.ranges for step in range(first, last + 1)}
    assert gaps.count == len(set(range(steps[-1] + 1)) - covered)


# How serious it is ---------------------------------------------------------------------------------------------------


def test_what_loses_more_is_told_more_severely(tmp_path: Path) -> None:
    """A torn end, frames out of place, a lost record, a lost half, nothing left: in this order, by all that judge."""
    path = journal_of(tmp_path)
    whole = stored(path)
    frames, half = whole.frames, len(whole.frames) // 2
    swapped = [*frames[:9], frames[20], *frames[10:20], frames[9], *frames[21:]]
    order: list[tuple[str, bytes]] = [
        ("none", whole.data),
        ("none", whole.data[:-40]),
        ("info", whole.header + b"".join(swapped)),
        ("info", whole.header + b"".join((*frames, frames[9]))),
        ("warning", whole.header + b"".join((*frames[:9], *frames[10:]))),
        ("warning", whole.header + b"".join((*frames[:9], bytes(len(frames[9])), *frames[10:]))),
        ("warning", b"".join((whole.header, *frames[:-9], bytes(sum(map(len, frames[-9:])))))),
        ("critical", b"".join((whole.header, *frames[:9], bytes(sum(map(len, frames[9:])))))),
        ("critical", b"".join((whole.header, *frames[:9], bytes(sum(map(len, frames[9:-9]))), *frames[-9:]))),
        ("critical", whole.header + b"".join((*frames[: half // 3], *frames[-half // 3 :]))),
        ("critical", bytes(len(whole.data))),
    ]
    ranks = [("none", *SEVERITIES).index(severity) for severity, _ in order]
    assert ranks == sorted(ranks)
    for severity, data in order:
        path.write_bytes(data)
        assert severities(path.parent) == {severity}


def test_a_run_of_which_half_is_lost_is_not_called_healthy(tmp_path: Path) -> None:
    path = journal_of(tmp_path)
    whole = stored(path, count=90)
    path.write_bytes(without_steps(whole, range(30, 80)))
    told = call("report", path.parent, "-o", tmp_path / "page.html").output
    assert "Not known" in told and "50 steps have no record: 30 to 79" in told and "Healthy" not in told


# Nothing can be read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [bytes(5000), b"x" * 5000, b"HOLTER" + bytes(700)])
def test_a_run_of_which_nothing_can_be_read_says_so_with_exit_code_1(data: bytes, tmp_path: Path) -> None:
    path, other = journal_of(tmp_path), journal_of(tmp_path, "other")
    stored(path), stored(other)
    path.write_bytes(data)
    run, follower = open_run(path.parent), Follower(path.parent)
    follower.read_on()
    assert run.state == "unreadable" == glance(run).state == follower.run_state == read_run(run).state
    for command in (
        ("show",),
        ("diagnose",),
        ("diagnose", "--json"),
        ("export", "--to", "csv"),
        ("top", "--once"),
        ("compare", other.parent),
    ):
        told = call(*command, path.parent, code=1)
        assert "Nothing in its journals can be read" in told.output and "goes on" not in told.output
    assert call("report", path.parent, code=1).output.startswith("Not known")
    assert "unreadable" in call("runs", path.parent, code=1).output
    listed = {one["path"].rsplit("/", 1)[-1]: one for one in parse(call("runs", tmp_path, "--json"))}
    assert listed["run"]["state"] == "unreadable" and "Nothing in its journals" in listed["run"]["trouble"]
    assert listed["other"]["state"] == "finished" and "journal" not in listed["other"]["trouble"]


def test_a_journal_whose_first_record_is_being_written_is_not_unreadable(tmp_path: Path) -> None:
    """P15: at whatever byte of its beginning a reader finds it."""
    path = journal_of(tmp_path)
    whole = stored(path)
    first = len(whole.header) + sum(map(len, whole.frames[: whole.entries.index(next(filter(None, whole.entries)))]))
    for size in range(0, first + len(whole.frames[2]), 7):
        path.write_bytes(whole.data[:size])
        run = open_run(path.parent)
        assert run.state == "running" == glance(run).state and not run.integrity.severity, size


# The list of runs ----------------------------------------------------------------------------------------------------


def test_the_list_of_runs_says_which_are_damaged(tmp_path: Path) -> None:
    for name in ("whole", "lost", "flipped", "torn"):
        whole = stored(journal_of(tmp_path, name))
    journal_of(tmp_path, "lost").write_bytes(without_steps(whole, [7]))
    flipped = bytearray(whole.data)
    flipped[len(flipped) // 2] ^= 1
    journal_of(tmp_path, "flipped").write_bytes(flipped)
    os.truncate(journal_of(tmp_path, "torn"), len(whole.data) - 40)
    told = {one["path"].rsplit("/", 1)[-1]: one["trouble"] for one in parse(call("runs", tmp_path, "--json"))}
    assert "missing" in told["lost"] and "1 frame damaged" in told["flipped"]
    assert "frame" not in told["whole"] + told["torn"], "an end torn by a kill is told by the state"
    assert "1 frame damaged" in " ".join(call("runs", tmp_path).output.split())


def test_runs_too_large_to_be_looked_through_at_once_are_counted(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        stored(journal_of(tmp_path, name))
        os.truncate(journal_of(tmp_path, name), 900)
    glances = [glance(open_run(tmp_path / name)) for name in ("a", "b", "c")]
    assert all(one.size for one in glances)
    _, left_out = check_for_damage(glances, most_bytes=2 * (glances[0].size or 0) + 1)
    assert left_out == 1 and check_for_damage(glances)[1] == 0


# Elsewhere -----------------------------------------------------------------------------------------------------------


def test_steps_to_a_loss_are_steps_though_records_are_missing(tmp_path: Path) -> None:
    """The step numbers count: of a run that lost its steps 3 to 12, and ends the same."""
    ours, theirs = journal_of(tmp_path, "ours"), journal_of(tmp_path, "theirs")
    whole = stored(ours, count=60)
    stored(theirs, count=60)
    theirs.write_bytes(without_steps(whole, range(3, 13)))
    found = compare(ours.parent, theirs.parent)
    first, second = (side.steps_to_level for side in found.sides)
    assert first is not None and second is not None and abs(second - first) <= 1, (first, second)


def test_a_training_crashed_after_its_last_step_though_records_before_it_are_missing(tmp_path: Path) -> None:
    ours, theirs = journal_of(tmp_path, "ours"), journal_of(tmp_path, "theirs")
    whole = stored(ours, count=60)
    stored(theirs, count=60)
    ours.write_bytes(without_steps(whole, range(3, 13))[:-40])
    os.utime(ours, (time.time() - 3600,) * 2)
    assert "gave no sign of life any more after 60 steps" in " ".join(call("diagnose", ours.parent).output.split())
    assert any("it crashed after 60 steps" in note for note in compare(theirs.parent, ours.parent).sides[1].notes)


def test_the_dashboard_lists_damage_in_the_same_order(tmp_path: Path) -> None:
    """What lost nothing is no trouble in a list; a lost half is more than one."""
    path = journal_of(tmp_path)
    whole = stored(path, count=60)
    (path.parent / "run.json").write_text('{"model": "MLP"}')
    twice = whole.header + b"".join((*whole.frames[:9], whole.frames[5], *whole.frames[9:]))
    seen = []
    for data in (whole.data, whole.data[:-40], twice, without_steps(whole, [7]), without_steps(whole, range(9, 50))):
        path.write_bytes(data)
        os.utime(path, (time.time() - 3600,) * 2)
        shelf = Shelf(tmp_path)
        (listed,) = shelf.runs().values()
        known = Examination((), "crashed", Practice().answer(str(path.parent)))
        (run,) = json.loads(Lister(shelf).body({listed.id: known}).plain)["runs"]
        seen.append((run["trouble"], run["is_lost_mostly"]))
    assert [("journals" in trouble, lost) for trouble, lost in seen] == [
        *[(False, False)] * 3,
        (True, False),
        (True, True),
    ]


@pytest.mark.parametrize("form", ["csv", "tensorboard"])
def test_an_export_of_a_damaged_run_says_what_was_not_there_to_be_exported(form: str, tmp_path: Path) -> None:
    """On stderr, so that what is exported can be piped; and the rest is exported."""
    if form == "tensorboard":
        pytest.importorskip("tensorboard")
    path = journal_of(tmp_path)
    whole = stored(path)
    path.write_bytes(without_steps(whole, [9]))
    told = call("export", path.parent, "--to", form, "-o", tmp_path / "out")
    assert "Its journals are torn or damaged: 1 frame missing" in told.stderr and "The rest was read" in told.stderr
    assert "torn" not in told.stdout and told.stdout
    path.write_bytes(whole.data)
    assert not call("export", path.parent, "--to", form, "-o", tmp_path / "again").stderr


def test_a_failure_of_holters_own_is_told_once_in_a_sentence() -> None:
    finding = from_problem(Problem(3, 1e9, "write a record", "OSError: no space"))
    screen = Console(file=io.StringIO(), width=160)
    screen.print(render_findings([finding], 9))
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("no space") == 1 and "Holter could not write a record: OSError: no space" in text
    assert "where" not in text and "what" not in text
