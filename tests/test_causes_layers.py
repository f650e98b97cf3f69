"""Faults of layers, on models of several kinds: the cause, the layer and the step are named."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.layer_trainings import CLASSES, Images, Words, at, points, replaced, scaled, sentences, stack, train

OFTEN = {"activations": 5, "weights": 10, "updates": 5}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def found(path: Path, model: nn.Module, **options: Any) -> tuple[str, str, int]:
    """Cause, layer and onset of the only finding."""
    findings = train(path / "run", model, **options)
    assert len(findings) == 1, findings
    assert findings[0].advice and findings[0].evidence
    return findings[0].cause, findings[0].layer or "", findings[0].since


def cut(module: nn.Module) -> Callable[[], object]:
    """Someone detaches what it puts out."""
    return lambda: module.register_forward_hook(lambda module, args, output: output.detach())


# Depth ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [3.0, 6.0])
def test_weights_that_are_too_large_from_the_start(tmp_path: Path, factor: float) -> None:
    assert found(tmp_path, scaled(stack(), factor), steps=40) == ("init-too-large", "0.weight", 0)


def test_an_embedding_that_is_too_large_for_the_output_it_is_tied_to(tmp_path: Path) -> None:
    model = Words(width=64, tied=True)
    nn.init.normal_(model.wte.weight)
    assert found(tmp_path, model, steps=40) == ("init-too-large", "wte.weight", 0)


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_weights_that_are_too_small_from_the_start(tmp_path: Path, activation: type[nn.Module]) -> None:
    assert found(tmp_path, scaled(stack(4, activation=activation), 0.15), steps=40) == (
        "init-too-small",
        "0.weight",
        0,
    )


def test_units_that_start_the_same(tmp_path: Path) -> None:
    model = stack(3)
    nn.init.constant_(model[2].weight, 0.1)
    assert found(tmp_path, model, steps=40) == ("init-symmetric", "2.weight", 0)


def test_channels_that_are_copies_of_one(tmp_path: Path) -> None:
    model = Images()
    with torch.no_grad():
        model.first.weight.copy_(model.first.weight[:1].expand_as(model.first.weight))
        model.first.bias.zero_()
    cause, layer, since = found(tmp_path, model, steps=40)
    assert (cause, layer, since) == ("init-symmetric", "first.weight", 0)


def test_weights_that_are_all_zero(tmp_path: Path) -> None:
    model = stack(3)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert found(tmp_path, model, steps=40)[:2] == ("init-symmetric", "0.weight")


@pytest.mark.parametrize("options", [{}, OFTEN, {"activations": None}])
def test_a_gradient_that_vanishes_through_sigmoids(tmp_path: Path, options: dict[str, Any]) -> None:
    model = nn.Sequential(*[part if not isinstance(part, nn.ReLU) else nn.Sigmoid() for part in stack(7)])
    for part in model:
        if isinstance(part, nn.Linear):
            nn.init.xavier_normal_(part.weight)
    assert found(tmp_path, model, steps=60, **options) == ("vanishing-gradient", "0.weight", 0)


class Gated(nn.Module):
    """Each layer puts out twice what it reads: values, and gates for them."""

    def __init__(self, width: int, depth: int = 10) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = nn.functional.glu(layer(x))
        logits: Tensor = self.head(x)
        return logits


def folded(make: Callable[..., nn.Module], depth: int = 8) -> nn.Sequential:
    """Convolutions over a sequence that has as many channels as each of them puts out."""
    parts = [part for _ in range(depth) for part in (make(16, 16, 3, padding=1), nn.Sigmoid())]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, CLASSES))


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: folded(nn.Conv1d), (16, 16)),
        (lambda: folded(nn.ConvTranspose1d), (16, 16)),
        (lambda: Gated(24), (24,)),
    ],
)
def test_a_gradient_vanishes_through_layers_that_all_read_as_many_numbers(
    tmp_path: Path, make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        centres = torch.randn(CLASSES, *shape)
        while True:
            labels = torch.randint(CLASSES, (32,))
            yield centres[labels] + torch.randn(32, *shape), labels

    assert found(tmp_path, make(), steps=60, data=batches())[0] == "vanishing-gradient"


# Units ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, OFTEN, {"activations": None}])
def test_units_that_die(tmp_path: Path, options: dict[str, Any]) -> None:
    model = stack(4)
    cause, layer, since = found(
        tmp_path, model, steps=150, before=at(63, lambda: model[4].bias.data.sub_(40)), **options
    )
    assert (cause, layer) == ("dead-relu", "4") and abs(since - 63) <= 2


def test_channels_that_die_behind_their_norm(tmp_path: Path) -> None:
    model = Images()
    norm = model.stages[1][1]
    cause, layer, since = found(tmp_path, model, steps=120, before=at(50, lambda: norm.bias.data.sub_(20)), **OFTEN)
    assert cause == "dead-relu" and layer == "stages.1.1" and abs(since - 50) <= 5


@pytest.mark.parametrize("options", [{}, OFTEN])
def test_values_at_the_bounds(tmp_path: Path, options: dict[str, Any]) -> None:
    model = stack(4, activation=nn.Tanh)
    cause, layer, since = found(
        tmp_path, model, steps=150, before=at(63, lambda: model[2].weight.data.mul_(30)), **options
    )
    assert (cause, layer) == ("saturated-activation", "3") and abs(since - 63) <= 2


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.out = nn.Embedding(40, 32), nn.RNN(32, 32, batch_first=True), nn.Linear(32, 40)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.rnn(self.table(x))[0])
        return logits


def test_a_recurrent_layer_at_its_bounds_is_not_called_dead(tmp_path: Path) -> None:
    """No gradient comes through there, as through units that are zero."""
    model = Recurrent()
    model.rnn.weight_hh_l0.data.mul_(40)
    cause, layer, _ = found(tmp_path, model, steps=60, data=sentences(), **OFTEN)
    assert (cause, layer) == ("saturated-activation", "rnn")


# Wiring -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 33])
def test_a_graph_that_is_cut(tmp_path: Path, step: int) -> None:
    model = stack(5)
    assert found(tmp_path, model, before=at(step, cut(model[5]))) == ("graph-detached", "4", step)


@pytest.mark.parametrize("step", [0, 33])
def test_a_stream_that_is_cut(tmp_path: Path, step: int) -> None:
    model = Words()
    cause, layer, since = found(tmp_path, model, before=at(step, cut(model.h[1])))
    assert (cause, since) == ("graph-detached", step) and layer.startswith("h.1")


def test_a_cut_branch_beside_the_stream(tmp_path: Path) -> None:
    model = Words()
    cause, layer, since = found(tmp_path, model, steps=120, before=at(33, cut(model.h[1].o_proj)))
    assert (cause, since) == ("graph-detached", 33) and layer.startswith("h.1")


@pytest.mark.parametrize("options", [{}, OFTEN])
def test_a_layer_that_is_frozen_on_the_way(tmp_path: Path, options: dict[str, Any]) -> None:
    model = stack(5)
    change = at(33, lambda: model[4].requires_grad_(False))
    assert found(tmp_path, model, before=change, **options) == ("layer-frozen", "4", 33)


def test_a_block_that_is_frozen_from_the_start(tmp_path: Path) -> None:
    model = Words()
    model.h[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    assert found(tmp_path, model, optimizer=optimizer, steps=40) == ("layer-frozen", "h.1", 0)


@pytest.mark.parametrize("step", [0, 33])
@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_a_head_that_was_replaced_after_the_optimizer(tmp_path: Path, step: int, kind: str) -> None:
    model = stack(4)
    parameters = model.parameters()
    optimizer = torch.optim.AdamW(parameters, 2e-3) if kind == "adam" else torch.optim.SGD(parameters, 0.05)
    change = at(step, lambda: replaced(model, "8"))
    cause, layer, since = found(tmp_path, model, optimizer=optimizer, before=change, steps=120)
    assert (cause, layer, since) == ("optimizer-holds-other-parameters", "8", step)


def test_a_model_that_was_replaced_as_a_whole(tmp_path: Path) -> None:
    model = stack(4)
    change = at(12, lambda: [replaced(model, name) for name, _ in list(model.named_children())])
    cause, _, since = found(tmp_path, model, before=change, steps=40, **OFTEN)
    assert (cause, since) == ("optimizer-holds-other-parameters", 12)


class Copying(torch.optim.SGD):
    """Writes to a copy of what is not contiguous."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.reshape(-1).sub_(group["lr"] * parameter.grad.reshape(-1))


@pytest.mark.parametrize("step", [0, 34])
def test_a_weight_that_is_never_written(tmp_path: Path, step: int) -> None:
    model = stack(4)

    def transpose() -> None:
        model[2].weight.data = model[2].weight.data.t().contiguous().t()

    optimizer = Copying(model.parameters(), 0.05)
    cause, layer, since = found(tmp_path, model, optimizer=optimizer, before=at(step, transpose))
    assert (cause, layer) == ("weight-not-written", "2.weight") and abs(since - step) <= 5


# Growth -----------------------------------------------------------------------------------------------------------


def test_a_branch_that_takes_over(tmp_path: Path) -> None:
    model = Words()

    def grow(step: int) -> None:
        if step >= 60:
            model.h[2].fc_out.weight.data.mul_(1.012)

    cause, layer, since = found(tmp_path, model, steps=220, after=grow)
    assert (cause, layer) == ("residual-growth", "h.2.fc_out") and abs(since - 60) <= 10


def test_queries_and_keys_that_grow(tmp_path: Path) -> None:
    model = Words()

    def grow(step: int) -> None:
        if step >= 60:
            for layer in (model.h[0].q_proj, model.h[0].k_proj):
                layer.weight.data.mul_(1.012)

    cause, layer, since = found(tmp_path, model, steps=220, after=grow)
    assert cause == "attention-logit-growth" and layer.startswith("h.0") and abs(since - 60) <= 10


def test_logits_that_drift_together(tmp_path: Path) -> None:
    model = stack(3)
    output = model[6]

    def drift(step: int) -> None:
        if step >= 60:
            output.bias.data.add_(0.06)

    cause, layer, since = found(tmp_path, model, steps=220, after=drift)
    assert (cause, layer) == ("output-logit-drift", "6") and abs(since - 60) <= 10


def test_a_norm_over_three_examples(tmp_path: Path) -> None:
    def batches() -> Any:
        for step, (x, y) in enumerate(points(24)):
            yield (x, y) if step < 40 else (x[:3], y[:3])

    cause, layer, since = found(tmp_path, Images(), data=batches(), steps=100)
    assert (cause, layer, since) == ("norm-batch-too-small", "bn", 40)


class Views(nn.Module):
    """Features whose differences are taken away from a step on."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = stack(4)[:8], nn.Linear(48, 6)
        self.pull = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def test_features_that_become_the_same(tmp_path: Path) -> None:
    model = Views()

    def collapse(step: int) -> None:
        if step >= 80:  # as a loss of similarity alone does it
            last = model.body[6]
            mean = last.weight.data.mean(0, keepdim=True)
            last.weight.data.lerp_(mean.expand_as(last.weight), 0.1).mul_(0.95)
            last.bias.data.add_(0.05)

    cause, layer, since = found(tmp_path, model, steps=200, after=collapse, **OFTEN)
    assert cause == "representation-collapse" and layer in ("body.6", "body.7") and 80 <= since <= 140
