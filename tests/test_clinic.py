"""The clinic: every cause and every control as real trainings, with labels that can be trusted."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import holter
from holter.cli import main
from holter.clinic import storing
from holter.clinic.building import build
from holter.clinic.case import CAUSES, SPLITS, Case, Recipe
from holter.clinic.cases import all_cases
from holter.clinic.faults.lr import RateJump
from holter.clinic.processes import in_processes
from holter.clinic.training import Hooks, train

# Written down a second time, from the catalogue: what is forgotten in the code is found here.
CATALOGUE = (
    *("lr-too-high", "lr-jump", "lr-too-low", "scheduler-stepped-too-often", "warmup-missing"),
    *("clipping-missing", "clipping-too-tight", "zero-grad-missing", "accumulation-not-averaged"),
    *("optimizer-holds-other-parameters", "weight-not-written", "optimizer-state-lost"),
    *("adam-eps-dominates", "adam-second-moment-lag", "weight-decay-too-high", "vanishing-gradient"),
    *("init-too-large", "init-too-small", "init-symmetric", "dead-relu", "saturated-activation"),
    *("graph-detached", "layer-frozen", "representation-collapse", "residual-growth"),
    *("norm-batch-too-small", "batch-corrupt", "input-scale", "labels-corrupt", "batch-repeated"),
    *("data-not-shuffled", "nan-in-data", "double-softmax", "loss-sign", "loss-reduction", "fp16-overflow"),
    *("fp16-underflow", "bf16-update-lost", "attention-logit-growth", "output-logit-drift", "overfitting"),
    *("data-loading-bound", "memory-growth", "throughput-drop"),
)
CONTROLS = (
    *("warmup-cosine", "step-decay", "cyclical-rate", "warm-restarts", "sparse-rows", "tied-weights"),
    *("frozen-backbone", "backbone-not-held", "accumulation", "scaler-searching", "tiny-batches"),
    *("idle-experts", "lora", "zero-gains", "curriculum", "large-steps", "label-noise"),
    *("massive-activations", "dropout", "checkpointing", "ema-teacher", "batch-ramp", "end-of-training"),
)

LAG = 3  # steps after which a fault must have moved the loss: an update shows one step later, what it leaves behind two
SLOW_LAG = 10  # of a slow one, whose first traces are smaller than a float32 can tell


def case_of(name: str) -> Case:
    return next(case for case in all_cases() if case.id == name)


def losses(case: Case, steps: int) -> np.ndarray:
    """Of the first so many steps; schedules and plans stay those of the whole training."""
    stopped = _Stopping(case.hooks, steps)
    with pytest.raises(_Enough):
        train(replace(case, hooks=lambda: stopped.hooks()), run=False)
    return stopped.losses


class _Enough(Exception):
    """The training is stopped here."""


class _Stopping:
    """Hooks as they are, that also keep the losses and end the training."""

    def __init__(self, made: object, steps: int) -> None:
        self._made, self._steps = made, steps
        self._kept: list[float] = []

    @property
    def losses(self) -> np.ndarray:
        return np.array(self._kept)

    def hooks(self) -> Hooks:
        hooks: Hooks = self._made()  # type: ignore[operator]
        before, loss = hooks.before_step, hooks.loss

        def before_step(t: int) -> None:
            if t == self._steps:
                raise _Enough
            before(t)

        def loss_of(t: int, *batch: object) -> object:
            found = loss(t, *batch)  # type: ignore[arg-type]
            if len(self._kept) == t:  # of micro-batches the first
                self._kept.append(float(found.detach()) * hooks.share(t))
            return found

        hooks.before_step, hooks.loss = before_step, loss_of  # type: ignore[method-assign,assignment]
        return hooks


def first_difference(sick: Sequence[float], twin: Sequence[float]) -> int | None:
    same = (np.asarray(sick) == np.asarray(twin)) | (np.isnan(sick) & np.isnan(twin))
    return None if same.all() else int(np.argmin(same))


def onset_faults(case: Case) -> list[str]:
    """How the label of a case disagrees with its training and that of its twin, which knows nothing of it."""
    assert case.twin is not None
    lag = SLOW_LAG if case.slow else LAG
    steps = case.onset + lag + 1
    found = first_difference(losses(case, steps), losses(case_of(case.twin), steps))
    if not case.changes_losses:
        return [f"{case.id} differs from its twin at {found}"] if found is not None else []
    if found is None or not case.onset <= found <= case.onset + lag:
        return [f"{case.id} has its onset at {case.onset}, but differs from its twin at {found}"]
    return []


# Completeness -----------------------------------------------------------------------------------------------------


def test_the_clinic_knows_every_cause_of_the_catalogue() -> None:
    assert len(CATALOGUE) == 44
    assert set(CAUSES) == set(CATALOGUE)


@pytest.mark.parametrize("cause", CATALOGUE)
def test_every_cause_has_cases_of_several_kinds_in_both_halves(cause: str) -> None:
    for split in SPLITS:
        cases = [case for case in all_cases() if case.cause == cause and case.split == split]
        assert len({case.architecture for case in cases}) >= 2
        assert len({case.optimizer for case in cases}) >= 2
        assert {case.where for case in cases} == {CAUSES[cause]}


@pytest.mark.parametrize("control", CONTROLS)
def test_every_control_is_there_in_both_halves(control: str) -> None:
    cases = [case for case in all_cases() if case.id.startswith(f"control/{control}/")]
    assert {case.split for case in cases} == set(SPLITS)
    assert all(case.cause is None and case.kind == "control" for case in cases)


def test_there_is_no_control_that_nobody_asked_for() -> None:
    assert {case.id.split("/")[1] for case in all_cases() if case.kind == "control"} == set(CONTROLS)


def test_ids_are_unique_and_every_sick_case_has_its_healthy_twin() -> None:
    cases = {case.id: case for case in all_cases()}
    assert len(cases) == len(all_cases())
    for case in cases.values():
        if case.kind == "sick":
            assert case.twin is not None
            twin = cases[case.twin]
            assert twin.cause is None
            assert (twin.split, twin.seed, twin.recipe.steps) == (case.split, case.seed, case.recipe.steps)
            assert 0 <= case.onset <= case.shows < case.recipe.steps


def test_the_halves_have_nothing_in_common_that_could_be_learnt() -> None:
    """Neither seeds nor sizes nor rates; nor do faults come at the same steps."""
    sick = {split: [case for case in all_cases() if case.split == split and case.kind == "sick"] for split in SPLITS}
    seeds, shapes, onsets = (
        {split: {pick(case) for case in cases} for split, cases in sick.items()}
        for pick in (
            lambda case: case.seed,
            lambda case: (case.architecture, case.recipe.width, case.recipe.depth, case.recipe.batch),
            lambda case: (case.cause, case.onset) if case.onset else None,
        )
    )
    assert seeds["development"].isdisjoint(seeds["held-out"])
    assert shapes["development"].isdisjoint(shapes["held-out"])
    assert len(onsets["development"] & onsets["held-out"] - {None}) <= 2  # by chance


def test_every_layer_that_a_case_names_is_in_its_model() -> None:
    for case in all_cases():
        if case.layers:
            model, _ = build(case.recipe)
            names = {name for name, _ in (*model.named_modules(), *model.named_parameters())}
            assert set(case.layers) <= names, case.id


# Truth ------------------------------------------------------------------------------------------------------------


def test_a_case_is_the_same_every_time() -> None:
    case = case_of("lr-jump/lstm/rmsprop/dev-4")
    assert losses(case, 30).tolist() == losses(case, 30).tolist()


@pytest.mark.parametrize(
    "name",
    [
        "lr-jump/mlp/momentum/dev-1",
        "optimizer-state-lost/lstm/rmsprop/held-3",
        "accumulation-not-averaged/residual/sgd/dev-3",
        "weight-not-written/mlp/flat-adam/dev-1",
        "dead-relu/mlp/momentum/dev-1",
        "layer-frozen/residual/adam/held-3",
        "labels-corrupt/mlp/momentum/held-1",
        "data-loading-bound/mlp/momentum/held-1",
    ],
)
def test_a_fault_begins_where_its_label_says(name: str) -> None:
    """Bit for bit the twin's losses before the onset, others right after it; where only time suffers, none."""
    assert onset_faults(case_of(name)) == []


@pytest.mark.gauntlet
@pytest.mark.parametrize("name", [case.id for case in all_cases() if case.kind == "sick"])
def test_every_fault_begins_where_its_label_says(name: str) -> None:
    assert onset_faults(case_of(name)) == []


def test_a_wrong_label_is_noticed() -> None:
    """The planted fault: the rate jumps 15 steps before the label says, or never."""
    case = case_of("lr-jump/mlp/momentum/dev-1")
    early = replace(case, hooks=partial(RateJump, case.onset - 15, 20.0))
    never = replace(case, hooks=Hooks)
    assert len(onset_faults(early)) == len(onset_faults(never)) == 1


# Storing ----------------------------------------------------------------------------------------------------------


def quick(name: str, hooks: object = Hooks) -> Case:
    return Case(name, "control", Recipe("mlp", "momentum", seed=1, steps=5, examples=64), hooks, "development")  # type: ignore[arg-type]


def test_a_case_is_stored_as_an_ordinary_run(tmp_path: Path) -> None:
    case = quick("control/quick/mlp/momentum/dev-1")
    storing.store(case, tmp_path)
    run = holter.open_run(tmp_path / case.id)
    assert run.state == "finished"
    assert len(run.history) == 5
    assert run.info["total_steps"] == 5
    assert {"loss", "gradient_norm", "time/data"} <= set(run.history.scalars)


def test_a_case_counts_as_stored_only_for_the_code_that_made_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = quick("control/quick/mlp/momentum/dev-1")
    assert not storing.is_stored(case, tmp_path)
    storing.store(case, tmp_path)
    assert storing.is_stored(case, tmp_path) and storing.is_current(case, tmp_path)
    monkeypatch.setattr(storing, "code_version", lambda: "another")
    assert storing.is_stored(case, tmp_path) and not storing.is_current(case, tmp_path)


class Breaks(Hooks):
    def after_backward(self, t: int) -> None:
        raise RuntimeError("the fault itself is at fault")


class Dies(Hooks):
    def after_backward(self, t: int) -> None:
        os._exit(3)


@pytest.mark.usefixtures("_forks_train")
def test_a_case_that_crashes_is_told_and_holds_up_nobody(tmp_path: Path) -> None:
    cases = [quick("a/breaks", Breaks), quick("b/dies", Dies), quick("c/fine")]
    done = {one.task.id: one for one in storing.store_all(cases, tmp_path, jobs=2)}
    assert "the fault itself is at fault" in done["a/breaks"].error
    assert "code 3" in done["b/dies"].error
    assert done["c/fine"].error == "" and done["c/fine"].result > 0
    assert [storing.is_stored(case, tmp_path) for case in cases] == [False, False, True]


def test_work_in_processes_shares_no_state() -> None:
    state = [0]

    def work(add: int) -> int:
        state[0] += add
        return state[0]

    assert sorted(done.result or 0 for done in in_processes(work, [1, 2, 3], jobs=2)) == [1, 2, 3]
    assert state == [0]


# The command line -------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["clinic", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_cases_are_listed_and_shown() -> None:
    assert "healthy/lr-jump/mlp/momentum/dev-1" in invoke("show", "lr-jump")
    shown = invoke("show", "lr-jump/mlp/momentum/dev-1")
    assert "RateJump" in shown and "onset" in shown


def test_a_pattern_that_fits_nothing_is_one_line() -> None:
    result = CliRunner().invoke(main, ["clinic", "show", "no-such-cause"])
    assert result.exit_code == 1
    assert "holter clinic show" in result.output and "Traceback" not in result.output


@pytest.mark.usefixtures("_forks_train")
def test_run_trains_what_is_missing_once_and_score_reads_it(tmp_path: Path) -> None:
    pattern, into = "nan-in-data/mlp/*", str(tmp_path)
    assert "4 trained" in invoke("run", "--only", pattern, "--into", into)  # two halves, with their twins
    assert "4 of 4 cases are there already" in invoke("run", "--only", pattern, "--into", into)
    document = tmp_path / "accuracy.md"
    told = invoke("score", "--only", pattern, "--from", into, "--as-stored", "--into", str(document))
    assert "Holter" in told and "ZClip" in told and "nan-in-data" in told
    assert document.read_text("utf-8").startswith("# Accuracy")
