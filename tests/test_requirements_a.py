"""Requirements A, end to end: a 12-layer GPT-2, trained by fine_tune, logged to W&B and read back from its file.

Parts of it have tests of their own in test_gradients.py, test_training.py and test_tracker.py.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holter
from holter.tracker import MetricsTracker
from tests.wandb_file import Stored, offline, read

LAYERS, WIDTH, EPOCHS, SMALLER = 12, 32, 10, 100
FROZEN = "transformer.wpe.weight"
WEAK = "transformer.h.5."  # its gradients are 100 times too small
STEPS = [0, 5, 10]


def gpt2() -> nn.Module:
    transformers = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=WIDTH, n_layer=LAYERS, n_head=2)
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    return model


def smaller(gradient: Tensor) -> Tensor:
    return gradient / SMALLER


def batches() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 64, (8, 16), generator=generator) for _ in range(2)]
    return [{"input_ids": each, "labels": each} for each in tokens]


def noting(model: nn.Module, seen: list[dict[str, Tensor]]) -> Callable[..., None]:
    """Copies the gradients that the optimizer is about to use."""

    def hook(*_: Any) -> None:
        named = model.named_parameters()
        seen.append({name: p.grad.detach().clone() for name, p in named if p.grad is not None})

    return hook


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    model = gpt2()
    parameters = dict(model.named_parameters())
    parameters[FROZEN].requires_grad_(False)
    for name, parameter in parameters.items():
        if name.startswith(WEAK):
            parameter.register_hook(smaller)
    optimizer = torch.optim.SGD([p for p in parameters.values() if p.requires_grad], lr=1e-3)
    seen: list[dict[str, Tensor]] = []
    optimizer.register_step_pre_hook(noting(model, seen))
    directory = tmp_path_factory.mktemp("wandb")
    with offline(directory) as wandb:
        with MetricsTracker(use_wandb=True) as tracker:
            data = batches()
            holter.fine_tune(
                model,
                data,
                data,
                n_epochs=EPOCHS,
                tracker=tracker,
                optimizer=optimizer,
                log_histogram=True,
                progress=False,
            )
            assert tracker._sinks[0].flush(30)
            run_id = wandb.run.id
        stored = read(directory, run_id)
    # Steps 0 and 5 show the first batch of the epoch that follows, 10 the last of all.
    assert len(seen) == EPOCHS * len(data)
    logged = dict(zip(STEPS, (seen[0], seen[5 * len(data)], seen[-1]), strict=True))
    return SimpleNamespace(stored=stored, tracker=tracker, gradients=logged, model=model)


def test_the_norm_of_every_parameter_is_in_wandb_three_times(trained: SimpleNamespace) -> None:
    """A1, A2, A5: at steps 0, 5 and 10, not eleven times, by torch's names of parameters; against float64."""
    stored: Stored = trained.stored
    for name in trained.gradients[0]:
        found = stored.of(f"gradients/{name}/norm")
        assert [step for step, _ in found] == STEPS, name
        expected = [trained.gradients[step][name].double().norm().item() for step in STEPS]
        assert [value for _, value in found] == pytest.approx(expected, rel=1e-5), name
    assert "transformer.h.0.attn.c_attn.weight" in trained.gradients[0]
    # fine_tune has norms of the whole model, too: gradients/norm_max and the like.
    tags = {tag for _, row in stored.rows for tag in row if tag.startswith("gradients/") and tag.endswith("/norm")}
    assert tags == {f"gradients/{name}/norm" for name in trained.gradients[0]}


def test_wandb_has_what_the_tracker_has(trained: SimpleNamespace) -> None:
    """A1: every name, every step, every value to its last bit; a row a step."""
    stored: Stored = trained.stored
    frame = trained.tracker.to_dataframe()
    for name in frame.columns.drop("step"):
        steps, values = trained.tracker.scalar(name)
        assert stored.of(name) == list(zip(steps.tolist(), values.tolist(), strict=True)), name
    assert [row["holter/step"] for _, row in stored.rows] == list(range(EPOCHS + 1))
    assert [step for step, _ in stored.of("train_loss")] == list(range(1, EPOCHS + 1))


def test_the_histogram_holds_every_gradient_value(trained: SimpleNamespace) -> None:
    """A3, A8: as many as the gradients have elements, each in its bin, in no more bins than W&B takes."""
    found = trained.stored.of("gradients/histogram")
    assert [step for step, _ in found] == STEPS
    for step, histogram in found:
        values = torch.cat([gradient.flatten() for gradient in trained.gradients[step].values()]).double().numpy()
        counts, edges = np.array(histogram["values"]), np.array(histogram["bins"])
        assert histogram["_type"] == "histogram" and len(counts) <= 512
        assert counts.sum() == values.size
        np.testing.assert_array_equal(counts, np.histogram(values, edges)[0])


def test_the_histogram_of_a_healthy_training_is_a_bell(trained: SimpleNamespace) -> None:
    """A7: centred at 0, most values within [-0.1, 0.1], as W&B stores it."""
    for _, histogram in trained.stored.of("gradients/histogram"):
        counts, edges = np.array(histogram["values"]), np.array(histogram["bins"])
        within = counts[(edges[:-1] >= -0.1) & (edges[1:] <= 0.1)].sum() / counts.sum()
        below = counts[edges[1:] <= 0].sum() / counts.sum()
        assert within > 0.95
        assert 0.4 < below < 0.6


def test_a_layer_with_a_hundredth_of_its_siblings_is_plain_to_see(trained: SimpleNamespace) -> None:
    """A6: in the norms that the charts are drawn from; all other layers lie together."""

    def norms(layer: int, of: str) -> np.ndarray:
        return np.array([value for _, value in trained.stored.of(f"gradients/transformer.h.{layer}.{of}/norm")])

    weak = int(WEAK.split(".")[2])
    for of in ("attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"):
        siblings = np.array([norms(layer, of) for layer in range(LAYERS) if layer != weak])
        typical = np.median(siblings, axis=0)
        ratio = typical / norms(weak, of)
        assert ((ratio > SMALLER / 2) & (ratio < SMALLER * 2)).all(), of
        assert (np.abs(np.log(siblings / typical)) < np.log(5)).all(), of


def test_frozen_parameters_are_passed_over(trained: SimpleNamespace) -> None:
    """A4: no error, and no name of theirs; the tied head counts once."""
    tags = {tag for _, row in trained.stored.rows for tag in row}
    assert not any(FROZEN in tag or "lm_head" in tag for tag in tags)
    trainable = {name for name, p in trained.model.named_parameters() if p.requires_grad}
    assert trainable == trained.gradients[0].keys() and FROZEN not in trainable


def test_the_histogram_is_off_unless_asked_for() -> None:
    """A3, A5: with all else left to fine_tune, and W&B not asked for."""
    result = holter.fine_tune(
        nn.Linear(4, 2), [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))], None, progress=False
    )
    assert isinstance(result.tracker, MetricsTracker)
    names = result.tracker.to_dataframe().columns
    assert "gradients/weight/norm" in names and "gradients/histogram" not in names
    assert result.tracker.scalar("gradients/weight/norm")[0].tolist() == STEPS
