"""A real Trainer, watched: what is recorded is what a plain loop in torch computes; it stops, resumes and leaves no
trace."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holter
from holter import clipping
from holter.sinks.memory import Memory
from tests.small_gpt import ACCUMULATE, MAX_NORM, MICRO, RATE, STEPS, Trained, examples, small_gpt, train_plainly

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@dataclass
class Watched:
    """A Trainer's training and what watched it."""

    trainer: Any
    callback: Any
    model: Any


def trainer_of(place: Path, *callbacks: Any, **arguments: Any) -> Any:
    import transformers

    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "per_device_train_batch_size": MICRO,
        "gradient_accumulation_steps": ACCUMULATE,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch",
        "max_grad_norm": MAX_NORM,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "logging_steps": 10,
        "output_dir": str(place / "out"),
    }
    own = {name: arguments.pop(name) for name in ("compute_loss_func",) if name in arguments}
    return transformers.Trainer(
        small_gpt(),
        transformers.TrainingArguments(**{**settings, **arguments}),
        train_dataset=examples(),
        eval_dataset=examples(8, skip=500),
        callbacks=list(callbacks),
        **own,
    )


def callback_of(**options: Any) -> Any:
    from holter.integrations.transformers import HolterCallback

    return HolterCallback(**{"budget": None, "run": False, **options})


def acting(event: str, act: Any) -> Any:
    """A callback of the user's that does something at an event, given state, control and the Trainer's things."""
    from transformers import TrainerCallback

    def method(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        act(state, control, kwargs)

    return type("Acting", (TrainerCallback,), {event: method})()


@pytest.fixture(autouse=True)
def accelerate_stays_as_it_was() -> Iterator[None]:
    """P3."""
    import accelerate

    before = accelerate.Accelerator.backward
    yield
    assert accelerate.Accelerator.backward is before


@pytest.fixture(scope="module")
def plain() -> Trained:
    return train_plainly(is_weighted=True)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    place = tmp_path_factory.mktemp("watched")
    callback = callback_of(run=place / "run")
    trainer = trainer_of(place, callback, eval_strategy="steps", eval_steps=20)
    trainer.train()
    return Watched(trainer, callback, trainer.model)


@pytest.fixture(scope="module")
def history(watched: Watched) -> holter.History:
    return holter.open_run(watched.callback.monitor.path).history


# What is recorded -------------------------------------------------------------------------------------------------


def test_an_optimizer_step_is_one_record_whatever_is_accumulated(history: holter.History) -> None:
    """E4, P27."""
    assert history.steps.tolist() == list(range(STEPS))
    assert set(history.scalar("batch/size")[1].tolist()) == {MICRO * ACCUMULATE}


def test_the_norm_before_the_trainers_clip_is_that_of_a_plain_loop(history: holter.History, plain: Trained) -> None:
    """B6: and the norm after it."""
    assert min(plain.norms) > MAX_NORM, "every step is clipped"
    for name in ("gradient_norm", "clip_norm"):
        assert history.scalar(name)[1].tolist() == pytest.approx(plain.norms, rel=1e-6)
    assert history.scalar("gradient_norm_clipped")[1].tolist() == pytest.approx(plain.clipped, rel=1e-6)
    assert set(history.scalar("clip_max_norm")[1].tolist()) == {MAX_NORM}


def test_unseen_the_clip_would_make_every_step_look_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault of the test above."""
    monkeypatch.setattr(clipping.Stand, "_clip_stand_in", lambda _, inner: inner)
    callback = callback_of()
    trainer_of(tmp_path, callback, max_steps=4).train()
    assert callback.monitor.history.scalar("gradient_norm")[1].tolist() == pytest.approx([MAX_NORM] * 4, rel=1e-2)


def test_the_norm_of_every_layer_is_that_of_a_plain_loop(history: holter.History, plain: Trained) -> None:
    """C1, E1."""
    steps, layers, norms = history.series("gradient", "norm")
    assert steps.tolist() == list(range(STEPS)) and set(layers) == set(plain.layers)
    for place, layer in enumerate(layers):
        assert norms[:, place].tolist() == pytest.approx(plain.layers[layer], rel=1e-6), layer


def test_the_loss_of_every_step_is_that_of_a_plain_loop(history: holter.History, plain: Trained) -> None:
    """Micro-batches are weighed by their labels: a mean of their own means would be another number."""
    losses = history.scalar("loss")[1]
    assert losses.tolist() == pytest.approx(plain.losses, rel=1e-6)
    assert max(np.abs(losses - plain.naive)) > 1e-2


def test_the_mean_of_the_losses_is_what_the_trainer_logs(watched: Watched, history: holter.History) -> None:
    logged = [entry["loss"] for entry in watched.trainer.state.log_history if "loss" in entry]
    assert history.scalar("loss")[1].reshape(-1, 10).mean(axis=1).tolist() == pytest.approx(logged, rel=1e-5)
    assert "mean_loss" not in history.scalars and "train_loss" not in history.scalars


def test_evaluations_land_on_the_step_whose_weights_they_saw(watched: Watched, history: holter.History) -> None:
    logged = [entry["eval_loss"] for entry in watched.trainer.state.log_history if "eval_loss" in entry]
    steps, values = history.scalar("eval_loss")
    assert steps.tolist() == [19, 39, 59] and values.tolist() == pytest.approx(logged)
    assert [name for name in history.scalars if name.startswith("eval")] == ["eval_loss"]


def test_the_plan_the_rate_the_data_and_the_end_are_known(watched: Watched, history: holter.History) -> None:
    """E12, E15, E20."""
    run = holter.open_run(watched.callback.monitor.path)
    assert run.info["total_steps"] == STEPS and run.info["scheduler"] == "LambdaLR"
    assert run.info["model"] == "GPT2LMHeadModel" and run.info["optimizers"] == ["AdamW"]
    assert run.state == "finished" and not run.problems and not watched.callback.monitor.findings
    assert set(history.scalar("learning_rate")[1].tolist()) == {RATE}
    assert {"inputs/input_ids", "targets"} <= set(history.layers("batch"))
    for name in ("tokens_per_second", "time/data"):
        assert len(history.scalar(name)[0]) == STEPS and min(history.scalar(name)[1]) > 0


# What is not touched ----------------------------------------------------------------------------------------------


def test_the_training_is_the_same_to_the_bit_and_nothing_stays_on_the_model(watched: Watched, tmp_path: Path) -> None:
    """P2, P3."""
    trainer = trainer_of(tmp_path, eval_strategy="steps", eval_steps=20)
    trainer.train()
    for one, other in zip(trainer.model.parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(one, other)
    for module in watched.model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks


def test_whatever_fails_in_it_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: and the state says so."""
    from holter.integrations import transformers

    callback = callback_of()
    monkeypatch.setattr(transformers, "share_of_step", lambda *_: 1 / 0)
    monkeypatch.setattr(transformers, "_worth_recording", lambda *_: 1 / 0)
    trainer = trainer_of(tmp_path, callback, max_steps=4, logging_steps=1)
    trainer.train()
    assert trainer.state.global_step == 4 and len(callback.monitor.history) == 4
    assert [finding.cause for finding in callback.monitor.findings] == ["monitor-degraded"] * 2


# Losses that are not the model's own ------------------------------------------------------------------------------


def test_a_smoothed_loss_is_recorded_as_the_trainer_computes_it(tmp_path: Path) -> None:
    callback = callback_of()
    trainer = trainer_of(tmp_path, callback, max_steps=5, logging_steps=1, label_smoothing_factor=0.2)
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert callback.monitor.history.scalar("loss")[1].tolist() == pytest.approx(logged, rel=1e-6)


def test_a_loss_that_is_nan_is_recorded_though_the_trainer_leaves_it_out(tmp_path: Path) -> None:
    calls = []

    def sick_loss(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        calls.append(labels)
        return outputs.logits.mean() * (float("nan") if len(calls) == 5 else 1.0)

    callback = callback_of()
    trainer = trainer_of(tmp_path, callback, max_steps=3, logging_steps=3, compute_loss_func=sick_loss)
    trainer.train()
    assert np.isnan(callback.monitor.history.scalar("loss")[1]).tolist() == [False, False, True]
    assert not np.isnan(trainer.state.log_history[0]["loss"])


def test_where_no_loss_of_a_step_is_seen_the_trainers_mean_is_recorded_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = callback_of()
    trainer = trainer_of(tmp_path, callback, max_steps=4, logging_steps=2)
    monkeypatch.setattr(trainer.accelerator, "backward", lambda loss: loss.backward())  # past Accelerate's own
    trainer.train()
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    history = callback.monitor.history
    assert "loss" not in history.scalars
    assert history.scalar("mean_loss")[0].tolist() == [1, 3]
    assert history.scalar("mean_loss")[1].tolist() == pytest.approx(logged)


def test_a_training_in_bfloat16_is_recorded(tmp_path: Path) -> None:
    callback = callback_of()
    trainer_of(tmp_path, callback, max_steps=5, bf16=True).train()
    history = callback.monitor.history
    assert np.isfinite(history.scalar("loss")[1]).sum() == np.isfinite(history.scalar("gradient_norm")[1]).sum() == 5
    assert history.scalar("loss")[1][0] == pytest.approx(np.log(256), rel=0.05) and not callback.monitor.findings


def test_steps_that_a_loss_scaler_skips_are_seen(tmp_path: Path) -> None:
    """P27, D6. Trainers want fp16 on a GPU: here torch's scaler for the CPU is put in its place."""
    callback = callback_of()
    trainer = trainer_of(tmp_path, callback, max_steps=5)
    accelerator = trainer.accelerator
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)  # the largest loss overflows: it is halved
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"
    trainer.train()
    history = callback.monitor.history
    skipped = history.scalar("skipped")[1].astype(bool)
    assert history.steps.tolist() == list(range(5)) and skipped[0] and trainer.state.global_step == 5
    assert np.isfinite(history.scalar("loss")[1]).all(), "of skipped steps too, and not scaled"
    assert history.scalar("loss")[1][0] == pytest.approx(np.log(256), rel=0.05)
    assert (np.diff(history.scalar("loss_scale")[1]) < 0).any()


# Resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("restores", [False, True])
def test_a_resumed_training_goes_on_in_its_run_and_reads_like_one_in_one_go(
    tmp_path: Path, history: holter.History, restores: bool
) -> None:
    """P17. The Trainer may be asked to rebuild callbacks from the checkpoint: the user's options are kept."""

    def stop_at_half(state: Any, control: Any, kwargs: Any) -> None:
        if state.global_step == STEPS // 2:
            control.should_training_stop = control.should_save = True

    first = callback_of(run=tmp_path / "run")
    trainer_of(tmp_path, first, acting("on_step_end", stop_at_half)).train()
    assert first.monitor.step == STEPS // 2
    memory = Memory()
    second = callback_of(run=None, sinks=[memory])
    trainer = trainer_of(tmp_path, second, restore_callback_states_from_checkpoint=restores)
    trainer.train(resume_from_checkpoint=True)
    assert second.monitor.path == (tmp_path / "run").resolve()
    whole = holter.open_run(tmp_path / "run").history.latest()
    assert whole.steps.tolist() == list(range(STEPS)) and set(whole.segments.tolist()) == {0, 1}
    for name in ("loss", "gradient_norm", "learning_rate", "optimizer_step"):
        np.testing.assert_array_equal(whole.scalar(name)[1], history.scalar(name)[1])
    np.testing.assert_array_equal(whole.series("gradient", "norm")[2], history.series("gradient", "norm")[2])
    assert {record.step for record in memory.records} == set(range(STEPS // 2, STEPS))


def test_a_checkpoint_made_without_holter_is_counted_on_from(tmp_path: Path) -> None:
    trainer_of(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    callback = callback_of()
    trainer_of(tmp_path, callback, max_steps=4).train(resume_from_checkpoint=True)
    assert callback.monitor.history.steps.tolist() == [2, 3]


# Ending -----------------------------------------------------------------------------------------------------------

JUMP = 40


def trained_with_a_jump(place: Path, **options: Any) -> Watched:
    """The rate is raised a thousandfold. The user asks for findings, which waits a moment for the diagnosis."""
    callback = callback_of(run=place / "run", **options)

    def jump(state: Any, control: Any, kwargs: Any) -> None:
        if state.global_step == JUMP:
            kwargs["lr_scheduler"].base_lrs = [1000 * rate for rate in kwargs["lr_scheduler"].base_lrs]
        if state.global_step > JUMP:
            callback.monitor.findings  # noqa: B018

    trainer = trainer_of(place, callback, acting("on_step_end", jump), max_steps=120)
    trainer.train()
    return Watched(trainer, callback, trainer.model)


@pytest.mark.parametrize("options", [{"stop": True}, {"stop_on": "critical"}])
def test_a_jump_of_the_rate_stops_the_training_where_that_was_asked_for(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """E32: the Trainer ends as it always does, and the run says why."""
    watched = trained_with_a_jump(tmp_path, **options)
    assert JUMP < watched.trainer.state.global_step < 120
    run = holter.open_run(tmp_path / "run")
    assert run.state == "stopped" and run.ending is not None and run.ending.error.startswith("lr-jump")
    assert watched.trainer.state.log_history[-1]["train_loss"] is not None, "it came to its end"


def test_nothing_stops_a_training_where_nobody_asked(tmp_path: Path) -> None:
    """The twin of the test above."""
    watched = trained_with_a_jump(tmp_path)
    assert watched.trainer.state.global_step == 120 and watched.callback.monitor.should_stop
    assert holter.open_run(tmp_path / "run").state == "finished"


def test_a_training_that_raised_is_closed_as_failed_when_the_next_begins(tmp_path: Path) -> None:
    def fail_once(state: Any, control: Any, kwargs: Any) -> None:
        if state.global_step == 2 and not failed:
            failed.append(state)
            raise RuntimeError("planted")

    failed: list[Any] = []
    callback = callback_of(run=tmp_path / "run")
    trainer = trainer_of(tmp_path, callback, acting("on_step_end", fail_once), max_steps=3)
    with pytest.raises(RuntimeError, match="planted"):
        trainer.train()
    first = callback.monitor
    trainer.train()
    assert first.state == callback.monitor.state == "closed" and first is not callback.monitor
    run = holter.open_run(tmp_path / "run")
    assert [part.ending.state for part in run._parts.values() if part.ending] == ["failed", "finished"]


# Arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"total_steps": 10}, "known from the trainer"),
        ({"stop": "yes"}, "True or False"),
        ({"evry": 3}, "no option 'evry'.*every"),
        ({"every": 0}, "at least 1"),
        ({"stop_on": "info"}, "'warning' or 'critical'"),
        ({"stop": True, "diagnose": False}, "needs the live diagnosis"),
        ({"sinks": [3]}, "not a sink"),
        ({"sinks": ["prometheus"]}, "there is no sink"),
        ({"alerts": "slack://x"}, "give a list of addresses"),
        ({"alerts": ["nothing://x"]}, r"alerts\[0\]"),
        ({"layers": 3.5}, "give a pattern for names"),
    ],
)
def test_what_cannot_be_done_is_refused_at_once(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        callback_of(**options)


def test_every_other_option_of_watch_is_taken() -> None:
    """As new ones come: none is forgotten here."""
    defaults = {name: one.default for name, one in inspect.signature(holter.watch).parameters.items()}
    known = ("model", "optimizer", "scaler", "scheduler", "total_steps")
    callback_of(**{name: value for name, value in defaults.items() if name not in known})


def test_before_a_training_there_is_no_monitor() -> None:
    with pytest.raises(RuntimeError, match=r"made by Trainer\.train"):
        _ = callback_of().monitor
