"""The zoo's own judgement: what Holter may get wrong in a training fails it, and only that. No package is needed."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zoo.judging import judge, judge_planted
from zoo.reference import Reference, Track
from zoo.result import Result, Seen, Told, read, write
from zoo.table import document, failures
from zoo.training import Fault

WARNING = Told("dead-relu", "layer", "warning", "net.0", since=3, alternatives=("init-too-large", "lr-too-high"))
NORMS = {0: 1.0, 1: 0.5, 2: 0.25}
BARE = Result(seen=(Seen(3, NORMS, NORMS),), hashes={"0.weight": "ab"}, seconds=2.0)
WATCHED = Result(
    seen=(Seen(3, NORMS, losses=(2.0, 1.5, 1.0), own=("activations: not observed: compiled",), state="finished"),),
    hashes={"0.weight": "ab"},
    seconds=2.5,
)


def watched(**changes: object) -> Result:
    return replace(WATCHED, seen=(replace(WATCHED.seen[0], **changes),))


def test_a_training_that_was_watched_well_passes() -> None:
    row = judge("a/b", 3, BARE, WATCHED)
    assert row.faults == () and failures([row], []) == []
    assert (row.norm_error, row.measured) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("bare", "seen", "words"),
    [
        (BARE, watched(findings=(WARNING,)), "false alarm, warning: dead-relu in net.0"),
        (BARE, watched(findings=(replace(WARNING, severity="critical", live=True),)), "false alarm, critical"),
        (BARE, watched(steps=2), "2 of 3 steps recorded"),
        (replace(BARE, seen=(Seen(4, NORMS),)), WATCHED, "torch counts 4 steps"),
        (BARE, watched(norms={0: 1.0 + 3e-5}), "a norm is off by 3.0e-05"),
        (BARE, watched(clipped={2: 0.26}), "a norm is off"),
        (BARE, watched(norms={0: math.nan}), "a norm is off by inf"),
        (BARE, watched(norms={7: 1.0}), "a norm is off by inf"),
        (BARE, watched(norms={}), "no gradient norm"),
        (BARE, replace(WATCHED, hashes={"0.weight": "ac"}), "weights differ"),
        (BARE, replace(WATCHED, hashes={}), "weights differ"),
        (BARE, watched(dropped=1), "1 records were dropped"),
        (BARE, watched(state="failed"), "ended as 'failed'"),
        (BARE, watched(own=("warning: could not look",)), "of itself: warning: could not look"),
        (BARE, Result(error="Traceback\nTypeError: no"), "the watched run failed: TypeError: no"),
        (Result(error="ImportError: gone"), WATCHED, "the bare run failed: ImportError: gone"),
    ],
)
def test_each_mistake_fails_it(bare: Result, seen: Result, words: str) -> None:
    row = judge("a/b", 3, bare, seen)
    assert any(words in fault for fault in row.faults), row.faults
    assert failures([row], [])


def test_a_note_is_no_alarm() -> None:
    assert judge("a/b", 3, BARE, watched(findings=(replace(WARNING, severity="info"),))).faults == ()


def test_a_fault_is_named_by_the_first_incident() -> None:
    note, other = replace(WARNING, cause="lr-too-high", severity="info"), replace(WARNING, cause="input-scale")
    told = watched(findings=(note, WARNING, other))
    right = judge_planted("a/b", "all dead", Fault(("dead-relu",), "net.*"), told)
    assert right.is_named and right.is_among_three and right.is_placed
    near = judge_planted("a/b", "rate x 100", Fault(("lr-too-high",), "head"), told)
    assert not near.is_named and near.is_among_three and not near.is_placed
    late = judge_planted("a/b", "scale", Fault(("input-scale",)), told)
    assert not late.is_named and not late.is_among_three
    none = judge_planted("a/b", "scale", Fault(("input-scale",)), watched())
    assert none.answer is None and not none.is_named


def test_too_few_named_faults_fail_the_zoo() -> None:
    told = watched(findings=(WARNING,))
    named = [judge_planted("a/b", "dead", Fault(("dead-relu",)), told)] * 4
    missed = [judge_planted("a/b", "sign", Fault(("loss-sign",)), told)]
    assert failures([], named + missed) == []
    assert failures([], named[:3] + missed) == ["75 % of the planted faults are named, less than 80%"]
    broken = judge_planted("a/b", "dead", Fault(("dead-relu",)), Result(error="OSError: disk"))
    assert "a/b with dead: OSError: disk" in failures([], [*named, *named, broken])


def test_the_document_shows_what_went_wrong() -> None:
    row = judge("a/b", 3, BARE, watched(findings=(WARNING,), steps=2))
    planted = judge_planted("a/b", "a | b", Fault(("dead-relu",)), watched(findings=(WARNING,)))
    text = document([row], [planted])
    assert "**warning: dead-relu**" in text and "| 3, 3, 2 |" in text and "0 of 1 trainings pass" in text


def test_the_document_begins_with_what_came_of_it_and_explains_each_column() -> None:
    good, bad = judge("a/b", 3, BARE, WATCHED), judge("a/c", 3, BARE, watched(findings=(WARNING,)))
    named = judge_planted("a/b", "dead", Fault(("dead-relu",)), watched(findings=(WARNING,)))
    missed = judge_planted("a/b", "sign", Fault(("loss-sign",)), watched())
    text = document([good, bad], [named, missed])
    top = text[: text.index("## ")]
    for words in (
        "- 1 of 2 trainings pass",
        "- 2 of 2 bit-equal",
        "- norms of 2 of 2 within 1e-05",
        "- 1 false alarm",
        "- 1 of 2 planted faults named, 1 among three answers, 1 not noticed",
    ):
        assert f"{words}" in top, words
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    explained = {name for line in cells if len(line) in (2, 3) for name in line[0].split(", ")}
    heads = [line for line in cells if line[0] == "training" and len(line) > 3]
    assert len(heads) == 2 and {name for head in heads for name in head} <= explained
    assert "slowdown" not in text, "one reading of a busy machine: benchmarks measure speed"


def test_a_training_that_did_not_run_has_a_line_of_as_many_cells() -> None:
    text = document([judge("a/b", 3, BARE, Result(error="TypeError: no")), judge("a/c", 3, BARE, WATCHED)], [])
    lines = [line for line in text.splitlines() if line.startswith("| a/")]
    assert len({line.count("|") for line in lines}) == 1 and "TypeError: no" in lines[0]


def test_a_result_comes_back_as_it_was_written(tmp_path: Path) -> None:
    result = watched(findings=(WARNING,), clipped={1: 0.5})
    write(result, tmp_path / "result.json")
    assert read(tmp_path / "result.json") == result


# The reference: torch's own hooks ---------------------------------------------------------------------------------


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reference]:
    """Hooks and stand-ins of this process are taken back after the test."""
    for home in (torch.nn.utils, torch.nn.utils.clip_grad):
        monkeypatch.setattr(home, "clip_grad_norm_", home.clip_grad_norm_)
    found = Reference(measures=True)
    yield found
    found.stop()


def losses(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(6.0).reshape(2, 3)).square().sum()


def test_steps_and_norms_are_torchs(reference: Reference) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    track = reference.follow(model, optimizer)
    expected = []
    for _ in range(3):
        for _ in range(2):  # micro-batches
            losses(model).backward()
        expected.append(float(torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    assert track.norms == pytest.approx(expected, rel=1e-12)
    assert track.clipped == pytest.approx([0.5] * 3, rel=1e-5)


def test_optimizers_between_two_forwards_are_one_step(reference: Reference) -> None:
    model = nn.Linear(3, 1)
    both = [torch.optim.SGD([one], 1e-3) for one in model.parameters()]
    track = reference.follow(model, both)
    for _ in range(2):
        losses(model).backward()
        whole = float(torch.cat([p.grad.double().flatten() for p in model.parameters()]).norm())
        for one in both:
            one.step()
        assert track.norms[-1] == pytest.approx(whole, rel=1e-12)
    both[0].step()  # without a forward, one that steps again begins a new one
    both[0].step()
    assert track.steps == 4


def test_closures_and_optimizers_that_are_not_torchs_are_seen(reference: Reference) -> None:
    class Plain:
        def __init__(self, model: nn.Module) -> None:
            self.model = model

        def step(self) -> None: ...

    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    plain = Plain(model)
    tracks: list[Track] = [reference.follow(model, optimizer), reference.follow(model, plain)]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = losses(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert tracks[0].steps == 1
    losses(model).backward()
    plain.step()
    assert tracks[0].steps == 1 and tracks[1].steps == 2 and tracks[1].norms[-1] > 0


def test_what_an_optimizer_steps_inside_of_its_own_step_is_that_step(reference: Reference) -> None:
    class Within(torch.optim.Optimizer):
        """Runs its closure and has another make the step, as SAM does."""

        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner
            self.param_groups = inner.param_groups

        def step(self, closure: Any = None) -> None:
            closure()
            self.inner.step()

    model = nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), 1e-3)
    outer = Within(inner)
    tracks = [reference.follow(model, optimizer) for optimizer in (outer, inner)]
    for _ in range(3):
        outer.step(lambda: losses(model).backward())
    assert [track.steps for track in tracks] == [3, 3]
