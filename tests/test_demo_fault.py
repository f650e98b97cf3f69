"""The demonstration with a fault: it gets sick, is diagnosed, is run again as advised, and the verdict is honest."""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import holter
from holter.cli import main
from holter.clinic.case import CAUSES, Case
from holter.clinic.cases import all_cases
from holter.clinic.faults.lr import RateJump
from holter.clinic.training import Training, train
from holter.demo_bedside import Bedside, print_finding, steps_on
from holter.demo_comparison import Course, judge, lines
from holter.demo_fault import choose, introduction, missed, remark_on, show_fault
from holter.demo_remedies import remedy_for
from holter.demo_words import TOLD
from holter.diagnosis.finding import Finding
from holter.record import Record

FALLING = np.linspace(2.0, 0.5, 100)


def course(held: float, *causes: str, losses: np.ndarray = FALLING, time: float = 0.01, memory: float = 0.0) -> Course:
    return Course(losses, held, largest_norm=3.0, step_time=time, memory=memory, causes=causes)


def finding(cause: str, since: int, step: int, **more: object) -> Finding:
    return Finding(cause, CAUSES.get(cause, "layer"), since, step, **more)  # type: ignore[arg-type]


# The verdict ----------------------------------------------------------------------------------------------------


def test_a_fix_worked_where_the_cause_is_gone_and_the_loss_is_better() -> None:
    verdict = judge("lr-jump", course(2.1, "lr-jump"), course(0.3))
    assert verdict.worked
    assert verdict.sentence == (
        "The fix worked: lr-jump is gone, and the loss on unseen data is 0.3 (with the fault: 2.1)."
    )


@pytest.mark.parametrize("was", [math.nan, math.inf])
def test_a_loss_that_is_finite_again_is_better(was: float) -> None:
    assert judge("nan-in-data", course(was, "nan-in-data"), course(0.5)).worked
    assert not judge("nan-in-data", course(5.0, "nan-in-data"), course(was)).worked


def test_a_fix_did_not_work_where_the_cause_is_found_again() -> None:
    verdict = judge("lr-too-high", course(2.1, "lr-too-high"), course(0.3, "lr-too-high"))
    assert not verdict.worked and "did not work: lr-too-high is found again" in verdict.sentence


def test_a_fix_did_not_work_where_the_loss_is_worse() -> None:
    verdict = judge("dead-relu", course(0.30, "dead-relu"), course(0.40))
    assert (
        not verdict.worked
        and "did not work: dead-relu is gone, but the loss on unseen data is 0.4 (with the fault: 0.3)"
        in verdict.sentence
    )


def test_a_fix_did_not_work_where_the_model_still_learns_nothing() -> None:
    guessing = np.full(100, 2.3)
    verdict = judge("vanishing-gradient", course(2.3, "vanishing-gradient"), course(2.3, losses=guessing))
    assert not verdict.worked and "the model hardly learns" in verdict.sentence and "began at 2.3" in verdict.sentence


def test_a_loss_that_stays_is_enough_only_where_a_cause_went_away() -> None:
    assert judge("layer-frozen", course(0.300, "layer-frozen"), course(0.301)).worked
    missed = judge("layer-frozen", course(0.300), course(0.299))
    assert not missed.worked and missed.sentence.startswith("Without the fault the training is no better:")
    assert judge("layer-frozen", course(0.300), course(0.200)).worked


def test_a_cause_that_cannot_be_told_from_it_counts_as_found() -> None:
    before, after = course(1.0, "vanishing-gradient"), course(0.9, "vanishing-gradient")
    assert not judge("init-too-small", before, after, right=("vanishing-gradient",)).worked


def test_what_is_found_only_after_the_fix_is_told() -> None:
    verdict = judge("lr-jump", course(2.0, "lr-jump"), course(0.3, "overfitting"))
    assert verdict.worked and verdict.sentence.endswith("What is found now: overfitting.")
    verdict = judge("lr-jump", course(0.31, "lr-jump"), course(0.3, "overfitting"))
    assert not verdict.worked and "overfitting is found in its place" in verdict.sentence


def test_time_and_memory_are_judged_where_they_are_what_suffers() -> None:
    slow, fast = course(0.3, "throughput-drop", time=0.05), course(0.3, time=0.005)
    assert judge("throughput-drop", slow, fast).worked and not judge("throughput-drop", fast, slow).worked
    large, small = course(0.3, "memory-growth", memory=2.0**28), course(0.3, memory=2.0**20)
    assert judge("memory-growth", large, small).sentence.endswith("gained is 1 MiB (with the fault: 256 MiB).")
    assert not judge("memory-growth", small, large).worked


def test_raw_inputs_are_judged_by_the_loss_of_raw_inputs() -> None:
    high = course(0.1, "input-scale", losses=np.full(100, 2.0))
    assert (
        judge("input-scale", high, course(0.3)).worked
        and not judge("input-scale", course(0.3, "input-scale"), high).worked
    )
    assert not any("unseen" in line.name for line in lines("input-scale", high, course(0.3)))


def test_the_table_says_how_long_a_loss_took_and_what_cannot_be_compared() -> None:
    stuck = course(2.0, "lr-jump", losses=np.full(100, 2.0))
    table = {line.name: line for line in lines("lr-jump", stuck, course(0.5))}
    level = 1.1 * FALLING[-10:].mean()
    smooth = np.array([FALLING[i - 10 : i].mean() for i in range(10, 101)])
    took = next(i for i, loss in enumerate(smooth, 10) if loss <= level)
    assert table[f"steps to a training loss of {level:.3g}"][1:] == ("never", str(took))
    assert table["found by the diagnosis"][1:] == ("lr-jump", "nothing")
    other = [line.name for line in lines("loss-sign", stuck, course(0.5))]
    assert not any("steps to" in name for name in other) and any("not the same loss" in name for name in other)


# What is said ---------------------------------------------------------------------------------------------------


SHOWN = sorted({(case.cause, case.architecture) for case in all_cases() if case.cause})


@pytest.mark.parametrize(("cause", "architecture"), SHOWN)
def test_every_fault_is_told_with_its_step_and_has_a_remedy(cause: str, architecture: str) -> None:
    sick, twin = choose(cause, architecture)
    words = introduction(sick, twin)
    assert sick.architecture == architecture and f"({cause})." in words and "{" not in words
    assert f"At step {sick.onset} " in words if sick.onset else "From the first step on " in words
    remedy = remedy_for(sick, twin, None)
    assert remedy.case is twin and remedy.removes_fault and "{" not in remedy.words
    assert sick.recipe.validate and twin.recipe.validate == sick.recipe.validate


def test_no_words_are_left_over() -> None:
    assert set(TOLD) == set(CAUSES)


def test_a_finding_is_judged_by_what_was_planted() -> None:
    sick, _ = choose("lr-jump")
    at = sick.onset
    assert remark_on(sick, finding("lr-jump", at, at + 2)) == f"That is what was planted at step {at}."
    assert remark_on(sick, finding("lr-jump", at - 9, at - 3)).startswith("A false alarm")
    assert remark_on(sick, finding("lr-jump", at - 40, at + 2)).endswith(f"at step {at}, and is dated too early.")
    wrong = finding("batch-corrupt", at, at + 2)
    assert f"not what was planted: it was lr-jump at step {at}" in remark_on(sick, wrong)
    assert "only among its alternatives" in remark_on(sick, replace(wrong, alternatives=("lr-jump",)))
    like = choose("init-too-small")[0]
    assert remark_on(like, finding("vanishing-gradient", 0, 3, layer=like.layers[0])).startswith(
        "That is what was planted (init-too-small: the evidence"
    )
    cut = choose("layer-frozen")[0]
    assert f"though in {cut.layers[0]}" in remark_on(cut, finding("layer-frozen", cut.onset, cut.onset + 9, layer="x"))


def test_a_fault_that_was_missed_is_admitted() -> None:
    sick, _ = choose("lr-jump")
    assert missed(sick, ()) == f"The diagnosis missed what was planted, lr-jump at step {sick.onset}: it found nothing."
    assert missed(sick, (finding("dead-relu", 150, 152),)).endswith("it found dead-relu instead.")


# The remedies ---------------------------------------------------------------------------------------------------


def followed(cause: str, advice: str) -> Case:
    sick, twin = choose(cause)
    remedy = remedy_for(sick, twin, finding(cause, sick.onset, sick.onset, advice=advice))
    assert not remedy.removes_fault
    return remedy.case


def test_a_number_in_the_advice_is_followed() -> None:
    assert followed("lr-too-high", "lower the rate from 3.1 to about 0.0123.").recipe.rate == 0.0123
    assert followed("clipping-missing", "call monitor.clip_grad_norm_(1.7) before").recipe.clip == 1.7
    assert followed("clipping-too-tight", "raise it to about 2.5, the 90 % quantile").hooks().max_norm(300) == 2.5
    assert followed("fp16-underflow", "torch.amp.GradScaler(init_scale=2.0**13), or").recipe.scaler == 2.0**13
    assert followed("warmup-missing", "warm up over about 40 steps").recipe.warmup == 40
    assert followed("adam-second-moment-lag", "lower beta2 to 0.95, or clip").recipe.beta2 == 0.95
    assert vars(followed("weight-decay-too-high", "lower it from 3.2 to 0.32 or below").hooks())["decay"] == 0.32


def test_advice_without_its_number_falls_back_on_the_twin() -> None:
    sick, twin = choose("lr-too-high")
    assert remedy_for(sick, twin, finding("lr-too-high", 0, 9, advice="lower the rate")).removes_fault


def test_what_is_advised_is_done_to_the_model_and_to_the_batch() -> None:
    leaky = followed("dead-relu", "")
    training, hooks = Training(leaky.recipe), leaky.hooks()
    hooks.built(training)
    kinds = {type(module) for module in training.model.modules()}
    assert torch.nn.LeakyReLU in kinds and torch.nn.ReLU not in kinds
    x, y = torch.ones(6, 3), torch.arange(6)
    dropping = followed("nan-in-data", "")
    assert [len(part) for part in dropping.hooks().batch(dropping.onset, x, y)] == [5, 5]
    raw = choose("input-scale")[0].hooks().batch(0, x, y)[0][0, 0]
    mended = followed("input-scale", f"x = (x - {float(raw):g}) / 50.5.").hooks().batch(0, x, y)[0]
    assert torch.allclose(mended, torch.zeros(()), atol=1e-4)


# All of it, for real --------------------------------------------------------------------------------------------


def test_a_training_gets_sick_is_diagnosed_and_is_cured(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    result = CliRunner().invoke(main, ["demo", "--fault", "lr-jump", "--run", str(run)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    sick, _ = choose("lr-jump")
    told = " ".join(result.stdout.split())
    assert f"At step {sick.onset} the learning rate is multiplied by" in told
    assert f"That is what was planted at step {sick.onset}." in told
    assert "Now with the advice followed: the schedule without the jump" in told
    assert "The fix worked: lr-jump is gone" in told
    shown = [f"holter show {shlex.quote(str(path))}" for path in (run, f"{run}-fixed")]
    *story, first, second = result.stdout.splitlines()
    assert [first, second] == shown and max(map(len, story)) <= 80 and "\x1b" not in result.stdout
    before, after = holter.open_run(run).history, holter.open_run(tmp_path / "a run-fixed").history
    losses, cured = before.scalar("loss")[1], after.scalar("loss")[1]
    assert (losses[: sick.onset] == cured[: sick.onset]).all(), "the same training until the fault"
    assert not losses[-10:].mean() < cured[-10:].mean()
    again = CliRunner().invoke(main, ["demo", "--fault", "lr-jump", "--run", str(run)])
    assert again.exit_code == 1 and "holds a run already" in again.output


@pytest.mark.parametrize("architecture", ["mlp", "residual"])
def test_units_that_are_brought_back_to_life_are_well(tmp_path: Path, architecture: str) -> None:
    """The demo trains them again with the activations that its advice names: nothing alarms there any more."""
    sick, twin = choose("dead-relu", architecture)
    remedy = remedy_for(sick, twin, finding("dead-relu", sick.onset, sick.onset + 8))
    assert not remedy.removes_fault
    alarms = {}
    for name, case in (("sick", sick), ("mended", remedy.case)):
        train(case, tmp_path / name)
        found = holter.diagnose(tmp_path / name)
        alarms[name] = [one.cause for one in found if one.severity != "info" and one.where != "performance"]
    assert alarms == {"sick": ["dead-relu"], "mended": []}


def test_a_remedy_that_does_nothing_does_not_work(tmp_path: Path) -> None:
    """The planted twin of the gate: the fault is "fixed" by the very same training."""
    long, _ = choose("lr-jump")
    recipe = replace(long.recipe, steps=100, validate=100, schedule="constant", warmup=0)
    sick = replace(long, recipe=recipe, hooks=partial(RateJump, 70, 20.0), onset=70)
    console = Console(file=StringIO(), width=80, record=True)
    assert not show_fault(console, sick, sick, tmp_path / "run", tmp_path / "fixed")
    assert "The fix did not work: lr-jump is found again" in " ".join(console.export_text().split())


def test_findings_are_told_once_and_what_the_sink_missed_is_read_back(tmp_path: Path) -> None:
    """The doctor's last word is that of `holter diagnose`, however little came through the sink."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps: list[int] = []
    bedside = Bedside(tmp_path, lambda step, scalars: steps.append(step), lambda finding, when: None)
    with holter.watch(model, optimizer, run=tmp_path, budget=None) as monitor:
        for _ in range(6):
            loss = model(torch.ones(3, 4)).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
    run = holter.open_run(tmp_path)
    for record in run.records[:3]:
        bedside.write(record)
    bedside.close()
    bedside.write(Record(step=99, time=0.0))
    assert bedside.finish() == run.findings
    assert sorted(set(steps)) == list(range(6))


def test_a_terminal_gets_a_frame_and_a_bar() -> None:
    file = StringIO()
    console = Console(file=file, force_terminal=True, width=80)
    with steps_on(console, 4) as on_step:
        on_step(3, {"loss": 0.5, "gradient_norm": 1.0})
        print_finding(console, finding("lr-jump", 2, 3, advice="Look " * 40), "at step 3", "Right.")
    text = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", file.getvalue())
    assert "╭─ Holter, at step 3 ─" in text and "Right." in text and "loss    0.5" in text and "4/4" in text


# The command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--fault", "lr-jmp"], ["'lr-jmp'", *CAUSES]),
        (["--fault", "lr-jump", "--on", "gru"], ["--on", "mlp, transformer, residual, lstm"]),
        (["--fault", "lr-jump", "--steps", "5"], ["--steps and --seed are fixed"]),
        (["--on", "mlp"], ["--on needs a --fault"]),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_way_out(arguments: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(main, ["demo", *arguments])
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output
    assert not Path("runs/lr-jmp").exists()


def test_all_faults_can_be_listed() -> None:
    result = CliRunner().invoke(main, ["demo", "--fault", "list"])
    assert result.exit_code == 0 and result.stdout.split() == list(CAUSES)
    assert "--fault list" in CliRunner().invoke(main, ["demo", "--help"]).stdout
