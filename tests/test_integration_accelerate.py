"""A loop with Accelerate, watched: what is recorded is what a plain loop in torch computes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import holter
from holter.sinks.memory import Memory
from tests.small_gpt import (
    ACCUMULATE,
    MAX_NORM,
    MICRO,
    RATE,
    STEPS,
    Trained,
    batch_of,
    examples,
    next_byte_loss,
    small_gpt,
    train_plainly,
)

pytest.importorskip("transformers")
pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def accelerators_start_anew() -> Iterator[None]:
    """Accelerate keeps its state for the whole process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def train(steps: int = STEPS, precision: str = "no", watched: bool = True, **options: Any) -> tuple[Any, Any]:
    """The model and its accelerator, after a training as Accelerate's own guide writes it."""
    from accelerate import Accelerator

    from holter.integrations.accelerate import watch

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, mixed_precision=precision)
    accelerator.init_trackers("bytes")
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    loader = DataLoader(examples(steps * MICRO * ACCUMULATE), MICRO, collate_fn=batch_of)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if watched:
        watch(accelerator, model, optimizer, **{"run": False, "budget": None, **options})
    for batch in loader:
        with accelerator.accumulate(model):
            loss, count = next_byte_loss(model(batch["input_ids"]).logits, batch["labels"])
            accelerator.backward(loss / count)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
            accelerator.log({"loss": (loss / count).detach(), "phase": "warm", "self": 1}, step=7)
    return model, accelerator


@pytest.fixture(scope="module")
def plain() -> Trained:
    return train_plainly(is_weighted=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    """The model, its monitor and the accelerator, whose training is at its end."""
    model, accelerator = train(run=tmp_path_factory.mktemp("accelerate") / "run")
    monitor = accelerator.get_tracker("holter", unwrap=True)
    assert monitor.state == "watching"
    accelerator.end_training()
    return model, monitor, accelerator


@pytest.fixture(scope="module")
def history(trained: tuple[Any, Any, Any]) -> holter.History:
    return holter.open_run(trained[1].path).history


def test_an_optimizer_step_is_one_record_whatever_is_accumulated(history: holter.History) -> None:
    """E4, P27."""
    assert history.steps.tolist() == list(range(STEPS))


def test_the_norms_before_and_after_the_accelerators_clip_are_those_of_a_plain_loop(
    history: holter.History, plain: Trained
) -> None:
    """B6."""
    assert min(plain.norms) > MAX_NORM, "every step is clipped"
    for name in ("gradient_norm", "clip_norm"):
        assert history.scalar(name)[1].tolist() == pytest.approx(plain.norms, rel=1e-6)
    assert history.scalar("gradient_norm_clipped")[1].tolist() == pytest.approx(plain.clipped, rel=1e-6)


def test_the_norm_of_every_layer_is_that_of_a_plain_loop(history: holter.History, plain: Trained) -> None:
    """C1, E1."""
    _, layers, norms = history.series("gradient", "norm")
    assert set(layers) == set(plain.layers)
    for place, layer in enumerate(layers):
        assert norms[:, place].tolist() == pytest.approx(plain.layers[layer], rel=1e-6), layer


def test_what_the_accelerator_logs_is_recorded_on_its_step_as_the_mean_of_the_micro_batches(
    history: holter.History, plain: Trained
) -> None:
    assert history.scalar("loss")[1].tolist() == pytest.approx(plain.losses, rel=1e-6)
    assert not {"phase", "self", "step"} & set(history.scalars)


def test_the_end_of_the_training_closes_the_run_and_nothing_stays(trained: tuple[Any, Any, Any]) -> None:
    """P3, P15."""
    model, monitor, accelerator = trained
    assert monitor.state == "closed" and not monitor.findings
    assert holter.open_run(monitor.path).state == "finished"
    assert not model._forward_pre_hooks and not model._forward_hooks
    accelerator.log({"loss": 1.0})  # after the end: nobody is harmed


def test_the_training_is_the_same_to_the_bit(trained: tuple[Any, Any, Any]) -> None:
    """P2."""
    unwatched, _ = train(watched=False)
    for one, other in zip(unwatched.parameters(), trained[0].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_training_in_bfloat16_is_recorded_and_sinks_get_it() -> None:
    memory = Memory()
    _, accelerator = train(4, precision="bf16", sinks=[memory])
    accelerator.end_training()
    history = holter.History(memory.records)
    assert history.steps.tolist() == [0, 1, 2, 3]
    assert history.scalar("loss")[1][0] == pytest.approx(np.log(256), rel=0.05)
    assert np.isfinite(history.scalar("gradient_norm")[1]).all()


def test_whoever_wants_losses_of_accelerators_leaves_them_as_they_were() -> None:
    """P3."""
    from accelerate import Accelerator

    from holter.integrations.accelerate import listen_to_backwards

    before, heard = Accelerator.backward, []
    ends = [listen_to_backwards(lambda _, loss, who=who: heard.append((who, float(loss.detach())))) for who in "ab"]
    Accelerator(cpu=True).backward(torch.tensor(2.0, requires_grad=True))
    ends[0]()
    assert heard == [("a", 2.0), ("b", 2.0)] and Accelerator.backward is not before
    ends[1]()
    ends[1]()
    assert Accelerator.backward is before


def test_a_step_that_the_loss_scaler_skips_is_recorded_and_gradients_are_unscaled() -> None:
    """P27, D6. Accelerate gives a CPU no scaler: torch's own for the CPU is put in its place."""
    from accelerate import Accelerator

    from holter.integrations.accelerate import watch

    accelerator, model = Accelerator(cpu=True), torch.nn.Linear(3, 1)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    accelerator.native_amp, accelerator.state._mixed_precision = True, "fp16"  # so that a clip unscales
    monitor, norms = watch(accelerator, model, optimizer, run=False, budget=None), []
    for step in range(4):
        accelerator.backward(model(torch.ones(2, 3)).sum() * (float("inf") if step == 2 else 1.0))
        norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    history = monitor.history
    assert history.scalar("skipped")[1].tolist() == [0, 0, 1, 0]
    assert history.scalar("loss_scale")[1].tolist()[0] == 1024.0
    healthy = [0, 1, 3]
    assert norms[0] == pytest.approx(2 * 2.0)  # of three weights and a bias, each 2
    assert history.scalar("gradient_norm")[1][healthy].tolist() == pytest.approx(np.array(norms)[healthy].tolist())
    assert not [finding for finding in monitor.findings if finding.where == "monitor"]


def test_a_monitor_is_part_of_the_accelerators_checkpoints(tmp_path: Path) -> None:
    """P17."""
    for at in (3, 0):  # saved after three steps, loaded before the first
        _, accelerator = train(at, run=tmp_path / "run")
        monitor = accelerator.get_tracker("holter", unwrap=True)
        accelerator.register_for_checkpointing(monitor)
        if at:
            accelerator.save_state(str(tmp_path / "checkpoint"))
        else:
            accelerator.load_state(str(tmp_path / "checkpoint"))
        assert monitor.step == 3
        accelerator.end_training()


def test_an_agreed_directory_is_the_one_that_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from holter.integrations.accelerate import agreed_directory

    monkeypatch.chdir(tmp_path)
    assert (
        agreed_directory("runs/mine", is_main=False) == "runs/mine" and agreed_directory(False, is_main=True) is False
    )
    made = Path(agreed_directory(None, is_main=True))
    assert made.is_dir() and made.is_absolute() and made.parent == tmp_path / "runs"
    assert agreed_directory(True, True, known=str(made)) == str(made)


@pytest.mark.parametrize("name", ["accelerate", "transformers"])
def test_without_the_package_the_way_out_is_named(name: str) -> None:
    hidden = f"import sys; sys.modules[{name!r}] = None; import holter.integrations.{name}"
    ended = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert ended.returncode == 1 and f"ImportError: this integration needs {name}: pip install" in ended.stderr


def test_holter_itself_imports_neither() -> None:
    asked = "import sys, holter; holter.watch; print(*{'accelerate', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True).stdout == "\n"
