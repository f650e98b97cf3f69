"""Holter in Lightning's Trainer and in Fabric, against plain loops of torch."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset

import holter
from holter import clipping
from tests.lightning_trainings import (
    BATCH,
    MAX_NORM,
    STEPS,
    Truth,
    callable_regression,
    callback,
    check_against,
    critic_loss,
    data,
    fitted,
    generator_loss,
    lightning,
    loader,
    make_gan,
    net,
    optimizers_of,
    parts_of_a_gan,
    plain,
    regression,
    trainer,
)

ROOT = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="needs lightning"),
    pytest.mark.filterwarnings(
        "ignore:.*(Checkpoint directory|workers|GPU|isinstance|val_dataloader|logging interval).*"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


# Automatic optimisation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [regression, callable_regression])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_gradients_before_the_clip_and_losses_are_those_of_a_plain_loop(kind: Any, accumulate: int) -> None:
    """E3, P2: under accumulation and clipping by the trainer; and the weights are bit for bit what they would be."""
    truth, model = plain(accumulate)
    module = kind()()
    options = {"accumulate_grad_batches": accumulate, "gradient_clip_val": MAX_NORM}
    monitor = fitted(module, STEPS * accumulate, **options)
    check_against(truth, monitor)
    history = monitor.history
    assert min(truth.norms) > 2 * MAX_NORM, "the clip must have had something to do"
    assert history.scalar("clip_norm")[1].tolist() == pytest.approx(truth.norms, rel=1e-6)
    assert set(history.scalar("clip_max_norm")[1].tolist()) == {MAX_NORM}
    assert history.scalar("learning_rate")[1][[0, 20, 40]].tolist() == pytest.approx([0.1, 0.01, 0.001])
    assert set(history.scalar("batch/size")[1].tolist()) == {BATCH * accumulate}
    assert {"weight", "update", "activation", "batch"} <= set(history.roles)
    assert not [finding for finding in monitor.findings if finding.where == "monitor"]
    for mine, theirs in zip(module.net.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_without_the_stand_in_every_step_would_be_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault."""
    monkeypatch.setattr(clipping.Stand, "_clip_stand_in", lambda _, inner: inner)
    norms = fitted(regression()(), 12, gradient_clip_val=MAX_NORM).history.scalar("gradient_norm")[1]
    assert norms.tolist() == pytest.approx([MAX_NORM] * 12, rel=1e-4)


def test_batches_that_are_not_told_of_would_put_losses_on_other_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a training_step that does not call the module's forward is seen by no hook."""
    kind = type(callback())
    monkeypatch.setattr(kind, "on_train_batch_start", lambda *_: None)
    truth, _ = plain(3, clip=False, steps=12)
    with pytest.raises(AssertionError):
        check_against(truth, fitted(regression()(), 36, accumulate_grad_batches=3))


def test_a_clip_by_value_is_no_clip_by_norm() -> None:
    """The gradients are read as the optimizer takes them."""
    model, truth = net(), Truth()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for x, y in loader(12):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        truth.losses.append(loss.item())
        truth.see(model.parameters())
        optimizer.step()
    monitor = fitted(regression()(), 12, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    check_against(truth, monitor)
    assert "clip_norm" not in monitor.history.scalars


def test_the_forward_is_timed_although_it_runs_inside_the_step() -> None:
    """E12."""
    pause = 0.01

    class Slow(regression()):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Any:
            time.sleep(pause)
            return super().training_step(batch, index)

    history = fitted(Slow(), 6).history
    assert min(history.scalar("time/forward")[1]) >= pause
    assert min(history.scalar("time/backward")[1]) > 0


def test_no_trace_is_left() -> None:
    """P3."""
    cells = [clipping.cell_of(name) for name in (clipping._CLIP, clipping._NORM)]
    module, called = regression()(), [cell.cell_contents for cell in cells]
    watching = callback()
    training = trainer(watching)
    training.fit(module, loader(4))
    for hooks in (module._forward_hooks, module._forward_pre_hooks, training.optimizers[0]._optimizer_step_pre_hooks):
        assert not hooks
    assert [cell.cell_contents for cell in cells] == called


# Precision ----------------------------------------------------------------------------------------------------


def test_bf16_mixed() -> None:
    model, truth = net(), Truth()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for x, y in loader(10):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        truth.losses.append(loss.item())
        truth.see(model.parameters())
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
    check_against(truth, fitted(regression()(), 10, precision="bf16-mixed", gradient_clip_val=MAX_NORM))


def test_a_step_that_the_loss_scaler_skips_is_a_record() -> None:
    """The scaler is the precision plugin's; gradients are unscaled."""

    class Overflows(regression()):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Any:
            return super().training_step(batch, index) * (float("inf") if index == 3 else 1.0)

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    mixed = lightning().plugins.MixedPrecision("16-mixed", "cpu", scaler)
    history = fitted(Overflows(), 8, plugins=[mixed], gradient_clip_val=MAX_NORM).history
    assert history.scalar("skipped")[1].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]
    assert history.scalar("loss_scale")[1].tolist() == [8.0] * 4 + [4.0] * 4
    truth, _ = plain(steps=3)
    assert history.scalar("gradient_norm")[1][:3].tolist() == pytest.approx(truth.norms, rel=2e-3)
    assert "step" not in vars(scaler)


# Manual optimisation ------------------------------------------------------------------------------------------


def test_parts_that_are_trained_in_turn_have_a_record_each() -> None:
    """As in the plain loop, where the generator's gradients are clipped and the critic's are not."""
    generator, critic = parts_of_a_gan()
    first, second = optimizers_of(generator, critic)
    norms, layers = [], []
    for x, y in loader(30):
        for optimizer, part in ((first, generator), (second, critic)):
            first.zero_grad()
            second.zero_grad()
            is_first = optimizer is first
            (generator_loss(generator, critic, y) if is_first else critic_loss(generator, critic, x, y)).backward()
            truth = Truth()
            truth.see(part.parameters())
            norms.append(truth.norms[0])
            layers.append([*truth.layers[0], *[np.nan] * 4] if is_first else [*[np.nan] * 4, *truth.layers[0]])
            if is_first:
                torch.nn.utils.clip_grad_norm_(generator.parameters(), MAX_NORM)
            optimizer.step()
    monitor = fitted(make_gan(), 30)
    history = monitor.history
    assert history.scalar("gradient_norm")[0].tolist() == list(range(60))
    assert history.scalar("gradient_norm")[1].tolist() == pytest.approx(norms, rel=1e-6)
    np.testing.assert_allclose(history.series("gradient", "norm")[2], layers, rtol=1e-6)
    for name, first_step, rate in (("learning_rate", 0, 1e-2), ("learning_rate/1", 1, 0.1)):  # in a series each
        steps, rates = history.scalar(name)
        assert steps.tolist() == list(range(first_step, 60, 2)) and set(rates) == {rate}
    assert not [finding for finding in monitor.findings if finding.where == "monitor"]


# Beginning and end --------------------------------------------------------------------------------------------


def test_a_resumed_fit_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P17: the checkpoint is of step 6, the run had come to step 12."""
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        watching = callback(run=None)
        keeping = lightning().callbacks.ModelCheckpoint(tmp_path / "kept", every_n_epochs=1, save_top_k=-1)
        found = next((tmp_path / "kept").glob("*step=6.ckpt"), None)
        training = trainer(watching, keeping, enable_checkpointing=True, max_epochs=2)
        training.fit(regression()(), loader(6), ckpt_path=found)
    (path,) = (tmp_path / "runs").iterdir()
    history = holter.open_run(path).history
    assert history.steps.tolist() == [*range(12), *range(6, 12)]
    losses = history.scalar("loss")[1].tolist()
    assert losses[6:12] == losses[12:] and losses[:6] != losses[6:12]
    assert history.latest().steps.tolist() == list(range(12))


def test_the_same_trainer_fits_on_in_the_same_run(tmp_path: Path) -> None:
    watching = callback(run=tmp_path / "run")
    training = trainer(watching)
    training.fit(regression()(), loader(4))
    training.fit_loop.max_epochs = 2
    training.fit(training.lightning_module, loader(4))
    assert holter.open_run(tmp_path / "run").history.steps.tolist() == list(range(8))


def test_a_run_whose_training_raised_says_so(tmp_path: Path) -> None:
    watching = callback(run=tmp_path / "run")
    with pytest.raises(ArithmeticError, match="planted"):
        trainer(watching).fit(regression()(raises_at=5), loader(10))
    run = holter.open_run(tmp_path / "run")
    assert (run.state, run.ending.error if run.ending else "") == ("failed", "ArithmeticError")
    assert run.history.steps.tolist() == list(range(5))


def test_a_run_that_came_to_its_end_says_so_and_knows_its_plan(tmp_path: Path) -> None:
    fitted(regression()(), 9, {"run": tmp_path / "run"}, accumulate_grad_batches=2, max_epochs=3)
    run = holter.open_run(tmp_path / "run")
    assert run.state == "finished" and len(run.history) == run.info["total_steps"] == 15
    assert run.info["scheduler"] == "StepLR" and run.info["optimizers"] == ["SGD"]


def test_the_loss_of_a_manual_step_that_returns_nothing_is_seen() -> None:
    losses = []

    class Manual(regression()):  # type: ignore[misc]
        automatic_optimization = False

        def training_step(self, batch: Any, index: int) -> None:
            optimizer = self.optimizers()
            loss = super().training_step(batch, index)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    assert fitted(Manual(), 4).history.scalar("loss")[1].tolist() == losses


@pytest.mark.parametrize("kind", ["manual", "endless"])
def test_a_number_of_steps_that_is_not_known_is_not_told(tmp_path: Path, kind: str) -> None:
    module = make_gan() if kind == "manual" else regression()()
    watching = callback(run=tmp_path / "run")
    if kind == "endless":
        watching.on_train_batch_end = lambda trainer, *_: setattr(trainer, "should_stop", True)
    trainer(watching, max_epochs=1 if kind == "manual" else -1).fit(module, loader(4))
    assert holter.open_run(tmp_path / "run").info["total_steps"] is None


@pytest.mark.parametrize(
    ("asked", "state"), [({"stop": True}, "stopped"), ({"stop_on": "critical"}, "stopped"), ({}, "finished")]
)
def test_a_training_that_is_lost_ends_where_the_user_asked_for_it(
    tmp_path: Path, asked: dict[str, Any], state: str
) -> None:
    """With stop the trainer ends in its own way, with stop_on by an exception."""
    watching = callback(run=tmp_path / "run", **asked)

    class Lost(regression()):  # type: ignore[misc]
        def training_step(self, batch: Any, index: int) -> Any:
            loss = super().training_step(batch, index)
            if index > 40:
                assert watching.monitor.findings  # waits for the diagnosis
            return loss * float("nan") if index > 30 else loss

    with pytest.raises(holter.TrainingStopped) if "stop_on" in asked else contextlib.nullcontext():
        trainer(watching).fit(Lost(), loader(STEPS))
    run = holter.open_run(tmp_path / "run")
    assert run.state == state
    assert 31 < len(run.history) < STEPS if asked else len(run.history) == STEPS


# Validation ---------------------------------------------------------------------------------------------------


def test_validation_lands_on_the_step_before_it_and_training_values_are_not_taken_for_it() -> None:
    """Metrics of one name in training and validation are told apart; the sanity check is none."""
    watching = callback()
    module = regression()()
    expected = []

    class Look(lightning().Callback):  # type: ignore[misc]
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                with torch.no_grad():
                    losses = [nn.functional.mse_loss(module(x), y) for x, y in loader(2)]
                expected.append(float(sum(losses) / 2))

    training = trainer(watching, Look(), val_check_interval=5, max_epochs=2, num_sanity_val_steps=2)
    training.fit(module, loader(10), loader(2))
    history = watching.monitor.history
    steps, values = history.scalar("val_loss")
    assert steps.tolist() == [4, 9, 14, 19] and values.tolist() == pytest.approx(expected, rel=1e-6)
    assert history.scalar("val_error")[1].tolist() == pytest.approx([3 * value for value in expected], rel=1e-6)
    assert not {"error", "of_training", "val_of_training"} & set(history.scalars)
    assert len(history.scalar("loss")[0]) == len(history) == 20


# What is refused, and imported --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "way_out"),
    [
        ({"evry": 2}, "no option 'evry'; it has run, layers, every"),
        ({"budget": 7}, "give a number from 0"),
        ({"stop": "critical"}, "give True or False"),
        ({"stop": True, "diagnose": False}, "leave out diagnose=False"),
        ({"sinks": [object()]}, "is not a sink"),
        ({"alerts": ["nothing://x"]}, r"alerts\[0\]"),
    ],
)
def test_a_bad_option_is_refused_at_once(options: dict[str, Any], way_out: str) -> None:
    with pytest.raises(ValueError, match=way_out):
        callback(**options)


def test_a_batch_is_not_measured_where_nobody_wants_it() -> None:
    history = fitted(regression()(), 4, {"batch": False}).history
    assert "batch" not in history.roles and history.scalar("batch/size")[1].tolist() == [BATCH] * 4


def python(code: str, *args: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code, *args]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_holter_imports_lightning_only_when_asked() -> None:
    found = python("import sys, holter; holter.watch; print(*{name.split('.')[0] for name in sys.modules})").split()
    assert "torch" in found and not {"lightning", "pytorch_lightning"} & set(found)


TWO_PROCESSES = """
import os, sys, pytorch_lightning
from tests.lightning_trainings import callback, loader, regression, trainer
os.chdir(sys.argv[1])
watching = callback(run=None, stop=True)
assert isinstance(watching, pytorch_lightning.Callback) and "lightning.pytorch" not in sys.modules
trainer(watching, strategy="ddp_fork", devices=2, log_every_n_steps=5).fit(regression()(), loader(20))
"""


@pytest.mark.skipif(importlib.util.find_spec("pytorch_lightning") is None, reason="needs pytorch_lightning")
def test_two_processes_of_pytorch_lightning_share_a_run(tmp_path: Path) -> None:
    """P8: who uses the other package gets a callback of it; the gradients are those of both processes' batches."""
    python(TWO_PROCESSES, str(tmp_path))
    model, truth = net(), Truth()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    shuffled = torch.randperm(20 * BATCH, generator=torch.Generator().manual_seed(0)).tolist()  # as Lightning does
    for x, y in DataLoader(Subset(data(20), shuffled), 2 * BATCH):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        truth.see(model.parameters())
        optimizer.step()
    (path,) = (tmp_path / "runs").iterdir()
    for rank in range(2):
        run = holter.Run(path, rank)
        assert run.state == "finished"
        assert run.history.scalar("gradient_norm")[1].tolist() == pytest.approx(truth.norms, rel=1e-5)


# Fabric -------------------------------------------------------------------------------------------------------


def test_the_fabric_example_runs(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("fabric_example", ROOT / "examples" / "fabric.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monitor = example.main(tmp_path / "run")
    run = holter.open_run(tmp_path / "run")
    norms = run.history.scalar("gradient_norm")[1]
    assert run.state == "finished" and len(run.history) == example.STEPS
    assert norms.tolist() == pytest.approx(run.history.scalar("clip_norm")[1].tolist(), rel=1e-6)
    assert max(norms) > 1.1 * example.MAX_NORM, "seen before the clip"
    losses = run.history.scalar("loss")[1]
    assert losses[-1] < losses[0] / 2 and not monitor.findings
    assert run.history.series("gradient", "norm")[1][0] == "0.weight", "the names are the model's own"
