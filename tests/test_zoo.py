"""P31: what the zoo lets pass and what it fails, on results made by hand; each fault of Holter's planted once."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from zoo.judging import Planted, Row, judge, judge_planted
from zoo.result import Result, Seen, Told, read, write
from zoo.sight import hashes
from zoo.table import document, failures, healthy_table
from zoo.training import Fault

ALARM = Told("lr-too-high", "lr", "warning", None, 3, ("clipping-missing", "warmup-missing"))
NOTE = replace(ALARM, severity="info")
BARE = Result(seen=(Seen(3, norms={0: 1.0, 1: 2.0, 2: 3.0}),), hashes={"weight": "a"}, seconds=2.0)
WATCHED = Result(
    seen=(
        Seen(
            3,
            norms={0: 1.0, 2: 3.0 * (1 + 9e-6)},
            losses=(3.0, 2.0, 1.0),
            findings=(NOTE,),
            own=("note: not observed",),
            state="finished",
            attached="watch()",
        ),
    ),
    hashes={"weight": "a"},
    seconds=3.0,
)


def judged(bare: Result = BARE, watched: Result = WATCHED) -> Row:
    return judge("package/training", 3, bare, watched)


def changed(**values: object) -> Result:
    return replace(WATCHED, seen=(replace(WATCHED.seen[0], **values),))  # type: ignore[arg-type]


def test_a_training_that_is_watched_rightly_passes() -> None:
    row = judged()
    assert row.faults == () and failures([row], []) == []
    assert row.norm_error == pytest.approx(9e-6) and row.measured == pytest.approx(2 / 3)
    line = "| package/training | watch() | 3 | equal | 9e-06 | 67 % | 3 | 1 | 1 note | 1.50 |"
    assert healthy_table([row]).splitlines()[-1] == line


@pytest.mark.parametrize(
    ("bare", "watched", "words"),
    [
        (BARE, changed(findings=(ALARM,)), "false alarm, warning: lr-too-high in lr since step 3"),
        (BARE, changed(norms={0: 1.0, 2: 3.0 * (1 + 2e-5)}), "a norm is off by 2.0e-05"),
        (BARE, changed(norms={0: math.nan}), "a norm is off by inf"),
        (BARE, changed(norms={7: 1.0}), "a norm is off by inf"),
        (BARE, changed(clipped={0: 0.5}), "a norm is off by inf"),
        (BARE, changed(norms={}), "no gradient norm was recorded"),
        (BARE, changed(steps=2), "2 of 3 steps recorded"),
        (BARE, changed(dropped=1), "1 records were dropped"),
        (BARE, changed(state="running"), "the run ended as 'running'"),
        (BARE, changed(own=("warning: disk",)), "of itself: warning: disk"),
        (BARE, replace(WATCHED, hashes={"weight": "b"}), "weights differ from those of the bare run"),
        (replace(BARE, hashes={}), replace(WATCHED, hashes={}), "weights differ from those of the bare run"),
        (replace(BARE, seen=(replace(BARE.seen[0], steps=4),)), WATCHED, "torch counts 4 steps, its author 3"),
        (BARE, Result(error="Traceback\nValueError: no"), "the watched run failed: ValueError: no"),
    ],
)
def test_what_is_wrong_fails_it(bare: Result, watched: Result, words: str) -> None:
    row = judged(bare, watched)
    assert words in row.faults
    assert f"package/training: {words}" in failures([row], [])


def answered(told: Told | None, *causes: str, layer: str | None = None) -> Planted:
    return judge_planted("p/t", "fault", Fault(causes, layer), changed(findings=(NOTE, told) if told else (NOTE,)))


def test_a_planted_fault_is_named_by_the_first_incident_alone() -> None:
    right, among, wrong = (
        answered(ALARM, "lr-too-high"),
        answered(ALARM, "warmup-missing"),
        answered(ALARM, "dead-relu"),
    )
    assert [one.is_named for one in (right, among, wrong)] == [True, False, False]
    assert [one.is_among_three for one in (right, among, wrong)] == [True, True, False]
    unseen = answered(None, "lr-too-high")
    assert unseen.answer is None and not unseen.is_named
    there = replace(ALARM, layer="h.1.mlp.weight")
    assert answered(there, "lr-too-high", layer="h.1.*").is_placed
    assert not answered(there, "lr-too-high", layer="h.0.*").is_placed
    assert not answered(ALARM, "lr-too-high", layer="h.0.*").is_placed


def test_four_of_five_planted_faults_must_be_named() -> None:
    right, wrong = answered(ALARM, "lr-too-high"), answered(ALARM, "dead-relu")
    assert failures([], [right] * 4 + [wrong]) == []
    assert failures([], [right] * 3 + [wrong]) == ["75 % of the planted faults are named, less than 80%"]
    assert "3 of 4 planted faults named" in document([judged()], [right] * 3 + [wrong])


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    full = changed(findings=(ALARM,), clipped={1: 0.5})
    write(full, tmp_path / "result.json")
    assert read(tmp_path / "result.json") == full


def test_a_buffer_without_strides_has_a_hash() -> None:
    """torch calls it contiguous, and cannot view it as bytes."""
    module, plain = nn.Module(), nn.Module()
    module.register_buffer("scale", torch.tensor(0.5).expand(1))
    plain.register_buffer("scale", torch.tensor([0.5]))
    assert hashes([module]) == hashes([plain])
