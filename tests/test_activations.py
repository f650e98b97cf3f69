"""Activations of armed steps, against plain torch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from holter.attention import first_floating
from holter.statistics.activation import Window, effective_rank, sample, strided
from holter.statistics.measure import measure_rows
from tests.armed import MODELS, armed, make, outputs_of, reference, signal, watch


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_what_plain_torch_says(name: str) -> None:
    model, x = make(name)
    with outputs_of(model) as kept:
        found = armed(model, x)
    assert len(found.parts) == 1 and found.parts[0].layers == found.order
    rows = found.parts[0].rows.values.double()
    for place, layer in enumerate(found.order):
        y = kept[layer]
        assert torch.allclose(rows[place], torch.as_tensor(measure_rows([y]).values[0]), rtol=1e-4, atol=1e-4), layer
        if y.ndim < 4:  # small enough for the sample to be all of it
            for one, value in reference(y, y.ndim - 1).items():
                assert signal(found, layer, one) == pytest.approx(value, rel=1e-4, abs=1e-6), (layer, one)
        else:
            assert found.parts[0].units[place] == y.shape[1]
            assert signal(found, layer, "dead") == reference(y, 1)["dead"]


def test_layers_come_in_the_order_in_which_they_ran() -> None:
    model, x = make("encoder")
    found = armed(model, x)
    first = ["layers.0.self_attn", "layers.0.norm1", "layers.0.linear1", "layers.0.linear2", "layers.0.norm2"]
    names = [*first, "layers.0"]
    assert found.order == (*names, *(name.replace(".0", ".1") for name in names))
    assert found.blocks == {"layers.0", "layers.1"} and set(found.attention) == {names[0], "layers.1.self_attn"}
    assert found.parts[0].calls == (1,) * 12


def test_the_lstm_is_seen_by_its_sequence_and_a_packed_one_too() -> None:
    model, x = make("lstm")
    assert armed(model, x).parts[0].units == (7, 3)
    lstm = nn.LSTM(5, 7)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2, 1]), batch_first=True)
    found = armed(lstm, packed)
    assert found.order == ("model",) and found.parts[0].rows.values[0, 0] == 13 * 7


def test_units_of_convolutions_are_channels_and_those_of_their_activation_too() -> None:
    sequence = nn.Sequential(nn.Conv1d(3, 5, 3), nn.ReLU(), nn.Linear(22, 9), nn.GELU())
    assert armed(sequence, torch.randn(8, 3, 24)).parts[0].units == (5, 5, 9, 9)
    last = nn.Sequential(nn.Linear(6, 9), nn.GELU())  # channels last, as in ConvNeXt
    assert armed(last, torch.randn(2, 4, 4, 6)).parts[0].units == (9, 9)
    assert armed(nn.ReLU(), torch.randn(2, 3, 4, 4, requires_grad=True)).parts[0].units == (3,)


# Faults that must be plain ------------------------------------------------------------------------------------


def test_a_dead_layer_a_saturated_one_and_one_near_overflow_are_plain() -> None:
    model, x = make("mlp")
    healthy = armed(model, x)
    assert signal(healthy, "1", "dead") < 0.5 and signal(healthy, "4", "saturated") == 0
    assert math.isnan(signal(healthy, "1", "saturated"))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # type: ignore[union-attr, operator]
        model[3].bias.fill_(9.0)  # type: ignore[union-attr, operator]
    sick = armed(model, x)
    assert signal(sick, "1", "dead") == 1.0 and signal(sick, "4", "saturated") == 1.0
    assert signal(sick, "1", "rank") == 0.0 and signal(sick, "3", "spread") == 0.0
    scale = nn.Linear(2, 2, bias=False).half()
    with torch.no_grad():
        scale.weight.copy_(torch.tensor([[32752.0, 0.0], [32736.0, 0.0]]))
    assert signal(armed(scale, torch.ones(3, 2).half()), "model", "near_overflow") == 0.5


@pytest.mark.parametrize(
    ("module", "saturated"),
    [
        (nn.Tanh(), lambda y: y.abs() >= 0.98),
        (nn.Softsign(), lambda y: y.abs() >= 0.98),
        (nn.Sigmoid(), lambda y: (y <= 0.01) | (y >= 0.99)),
        (nn.Hardsigmoid(), lambda y: (y <= 0.01) | (y >= 0.99)),
        (nn.Hardtanh(-2.0, 1.0), lambda y: (y <= -1.97) | (y >= 0.97)),
        (nn.ReLU6(), lambda y: y >= 5.88),
    ],
)
def test_saturation_follows_the_bounds(module: nn.Module, saturated: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = (torch.randn(40, 30) * 30).requires_grad_()
    expected = float(saturated(module(x).double()).double().mean())
    assert 0 < expected < 1
    assert signal(armed(module, x), "model", "saturated") == pytest.approx(expected, rel=1e-6)


def test_a_unit_is_dead_over_a_window_only_if_it_was_in_every_step_of_it() -> None:
    window = Window(2)
    assert window.add({"a": torch.tensor([True, False, False, False])}) == {}
    shares = window.add({"a": torch.tensor([False, True, False, False]), "b": torch.tensor([True])})
    assert {name: float(share) for name, share in shares.items()} == {"a": 0.5}
    assert float(window.add({"a": torch.tensor([False, False, False, False])})["a"]) == 0.75
    assert window.add({"a": torch.tensor([True, True])}) == {}  # other units: it starts anew
    with pytest.raises(ValueError, match="at least 1"):
        Window(0)


# Arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("directions", [1, 3, 8])
def test_the_rank_is_the_number_of_equal_directions(directions: int) -> None:
    torch.manual_seed(0)
    rows = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0]
    rows = rows - rows.mean(0)
    left = torch.linalg.qr(rows)[0][:, :directions]
    left = torch.linalg.qr(left - left.mean(0))[0]
    x = left @ torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))[0][:directions]
    assert float(effective_rank(x)[0]) == pytest.approx(directions, rel=1e-6)
    assert float(effective_rank(1e30 * x.float())[0]) == pytest.approx(directions, rel=1e-3)


@pytest.mark.parametrize("shape", [(1, 1000, 300), (512, 4, 40), (8, 1024, 16), (2, 600), (3, 5, 7, 9, 11)])
def test_the_sample_is_small_fixed_and_from_everywhere(shape: tuple[int, ...]) -> None:
    y = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    taken = sample(y, len(shape) - 1, 256, 256)
    rows = math.prod(shape[:-1])
    assert min(rows, 100) <= taken.shape[0] <= 256 and taken.shape[1] == min(shape[-1], 256)
    assert taken.unique().numel() == taken.numel() and torch.equal(taken, sample(y, len(shape) - 1, 256, 256))
    for size in range(1, 70):
        places = list(range(size))[strided(size, 8)]
        assert len(places) == min(size, 8) and abs(places[0] - (size - 1 - places[-1])) <= 1


# Outputs of any make ------------------------------------------------------------------------------------------


@dataclass
class Answer:
    name: str
    ids: Tensor
    hidden: Tensor


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "dataclass", "nested"])
def test_the_first_floating_tensor_is_found_in_any_output(kind: str) -> None:
    ids, y = torch.arange(3), torch.randn(3, 4)
    made: dict[str, Any] = {
        "tuple": (ids, y),
        "list": [None, y, ids],
        "dict": {"ids": ids, "y": y},
        "dataclass": Answer("a", ids, y),
        "nested": ({"a": [ids, (y,)]}, torch.zeros(1)),
    }
    assert first_floating(made[kind]) is y
    assert first_floating((ids, "text", None)) is None


def test_an_output_that_holds_itself_is_left_alone() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert first_floating(loop) is None


class Asks(nn.Module):
    """A block whose output is a dataclass, and which asks one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Answer:
        return Answer("x", torch.arange(3), self.layer(self.layer(x)))


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Asks(), Asks()])

    def forward(self, x: Tensor) -> dict[str, Any]:
        for block in self.blocks:
            x = block(x).hidden
        return {"loss": x.sum(), "logits": x}


def test_the_first_call_of_a_shared_layer_stands_and_calls_are_counted() -> None:
    model = Answers()
    x = torch.randn(3, 4)
    with outputs_of(model) as kept:
        found = armed(model, x)
    assert found.order == ("blocks.0.layer", "blocks.0", "blocks.1.layer", "blocks.1")
    assert found.parts[0].calls == (2, 1, 2, 1) and found.blocks == {"blocks.0", "blocks.1"}
    assert float(found.parts[0].rows.values[0, 5]) == pytest.approx(float(kept["blocks.0.layer"].sum()), abs=1e-5)


def test_micro_batches_are_counted_and_the_first_stands() -> None:
    model, x = make("mlp")
    capture = watch(model)
    capture.arm()
    with outputs_of(model) as kept:
        for part in (x, 2 * x, 3 * x):
            model(part).sum().backward()
    found = capture.collect()
    assert found is not None and found.parts[0].calls == (3,) * 5
    assert float(found.parts[0].rows.values[0, 5]) == pytest.approx(float(kept["0"].sum()), abs=1e-5)


def test_weight_norm_is_part_of_its_layer_and_selection_is_the_users() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Dropout(0.5))
    x = torch.randn(2, 4)
    assert armed(model, x).order == ("0",)
    assert armed(model, x, selected=lambda name, module: isinstance(module, nn.Dropout)).order == ("1",)
