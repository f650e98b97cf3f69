"""The signals of activations: those of many layers derived together are those of each, and nearness to overflow."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from holter.statistics import activation
from holter.statistics.activation import (
    SIGNALS,
    Bounds,
    Signals,
    Window,
    derive_signals,
    measure_signals,
    portion,
    unit_reach,
)
from tests.armed import armed, reference, signal

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn)


def derived(y: Tensor, unit_dim: int, bounds: Bounds | None = None) -> dict[str, float]:
    return named(derive_signals([measure_signals(y, unit_dim, bounds)]), 0)


def named(signals: Signals, place: int) -> dict[str, float]:
    return dict(zip(SIGNALS, signals.values[place].tolist(), strict=True))


# Together -----------------------------------------------------------------------------------------------------


def _mixed() -> list[tuple[Tensor, int]]:
    """Activations of several shapes and dtypes, with dead units, ten of a make."""
    torch.manual_seed(0)
    made: list[tuple[Tensor, int]] = []
    for place in range(40):
        for shape, unit_dim in (((4, 5, 12), 2), ((3, 7, 4, 4), 1), ((9, 12), 1), ((30,), 0)):
            y = torch.randn(shape).relu() * (1 + place)
            y.select(unit_dim, place % shape[unit_dim]).zero_()
            made.append((y.to(DTYPES[place % 4]), unit_dim))
    return made


@pytest.mark.parametrize("elements", [1 << 16, 1000, 1])
def test_signals_derived_together_are_those_of_each_by_itself(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_TOGETHER_ON_CPU", elements)  # all of a make, a few, one at a time
    mixed = _mixed()
    together = derive_signals([measure_signals(y, unit_dim) for y, unit_dim in mixed])
    assert together.values.shape == (len(mixed), len(SIGNALS)) and together.values.dtype == torch.float32
    for place, (y, unit_dim) in enumerate(mixed):
        alone = derived(y, unit_dim)
        assert named(together, place) == pytest.approx(alone, rel=1e-6, nan_ok=True)
        # What has one dimension is a single row: nothing varies.
        expected = reference(y.double(), unit_dim) if y.ndim > 1 else {"rank": 0.0, "spread": 0.0}
        assert {name: alone[name] for name in expected} == pytest.approx(expected, rel=1e-5)
        assert together.alive[place].tolist() == [bool((unit != 0).any()) for unit in y.movedim(unit_dim, 0)]


def test_signals_derived_in_another_order_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault."""
    in_order = activation._by_stacks
    monkeypatch.setattr(activation, "_by_stacks", lambda tensors, work: in_order(tensors, work)[::-1])
    with pytest.raises(AssertionError):
        test_signals_derived_together_are_those_of_each_by_itself(1000, monkeypatch)


def test_a_bounded_layer_among_others_keeps_its_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Sigmoid())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(9.0)
    found = armed(model, torch.ones(3, 4))
    assert [signal(found, layer, "saturated") for layer in "13"] == [1.0, 1.0]
    assert all(math.isnan(signal(found, layer, "saturated")) for layer in "02")


class Recurrent(nn.Module):
    def __init__(self, nonlinearity: str) -> None:
        super().__init__()
        self.rnn = nn.RNN(4, 16, nonlinearity=nonlinearity, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rnn(x)[0]
        return found


def test_a_recurrent_layer_is_bounded_by_its_tanh_and_only_by_that() -> None:
    torch.manual_seed(0)
    x, model = torch.randn(8, 5, 4), Recurrent("tanh")
    model.rnn.weight_ih_l0.data.mul_(8)
    expected = float((copy.deepcopy(model).double()(x.double()).abs() >= 0.98).double().mean())
    assert 0.1 < expected < 0.9 and signal(armed(model, x), "rnn", "saturated") == pytest.approx(expected, abs=1e-6)
    assert math.isnan(signal(armed(Recurrent("relu"), x), "rnn", "saturated"))


def test_windows_of_layers_of_several_sizes_are_those_of_each() -> None:
    torch.manual_seed(0)
    sizes = {"a": 5, "b": 7, "c": 5, "d": 1}
    looks = [{layer: torch.rand(size) > 0.6 for layer, size in sizes.items()} for _ in range(5)]
    window = Window(3)
    for last, look in enumerate(looks):
        shares = window.add(look)
        assert set(shares) == (set(sizes) if last >= 2 else set())
        for layer, share in shares.items():
            seen = torch.stack([one[layer] for one in looks[last - 2 : last + 1]])
            assert float(share) == pytest.approx(float((~seen.any(0)).double().mean()))


# Near overflow ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_has_its_own_largest_value(dtype: torch.dtype) -> None:
    half = torch.finfo(dtype).max / 2
    y = torch.tensor([[half, -half], [half / 4, 0.0]], dtype=torch.float64).to(dtype)
    values = derived(y, 1)
    assert values["near_overflow"] == 0.5 and values["dead"] == 0.0


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_half_of_the_largest_value_is_near_and_just_below_is_not(
    dtype: torch.dtype, sign: int, read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not read:  # as on a device
        monkeypatch.setattr(activation, "_can_be_read", lambda tensor: False)
    half = torch.tensor(torch.finfo(dtype).max / 2, dtype=dtype)
    below = torch.nextafter(half, torch.zeros_like(half))
    assert below < half
    for value, expected in ((half, 0.25), (below, 0.0), (half * 4, 0.25), (half * math.nan, 0.0)):
        y = torch.zeros(4, 4, dtype=dtype)
        y[0] = sign * value
        assert derived(y, 1)["near_overflow"] == expected, value


@pytest.mark.parametrize("dtype", DTYPES[:4])
def test_one_value_beside_what_is_not_a_number_counts_on_the_cpu_wherever_it_is(dtype: torch.dtype) -> None:
    y = torch.zeros(1000, 300, dtype=dtype)  # more than the sample
    y[0, 0], y[1, 0] = math.nan, -torch.finfo(dtype).max
    assert derived(y, 1)["near_overflow"] == pytest.approx(1 / y.numel())


def test_on_a_device_narrow_formats_are_counted_and_wide_ones_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "_can_be_read", lambda tensor: False)
    for dtype in DTYPES:
        kept = measure_signals(torch.zeros(3, 4).to(dtype), 1)
        assert (kept.near_overflow is not None) == (dtype in (torch.float16, torch.float8_e4m3fn))


# What is kept -------------------------------------------------------------------------------------------------


def test_not_a_number_is_neither_dead_nor_hidden() -> None:
    y = torch.tensor([[0.0, math.nan, 0.0], [0.0, 0.0, math.inf]])
    found = derive_signals([measure_signals(y, 1, Bounds(-1.0, 1.0))])
    assert found.alive[0].tolist() == [False, True, True]
    values = named(found, 0)
    assert math.isnan(values["rank"]) and values["near_overflow"] == pytest.approx(1 / 6)


def test_what_is_written_to_an_activation_later_is_not_seen() -> None:
    for shape in ((3, 4), (6,), (2, 3, 4), (500, 300)):
        y = torch.randn(shape)
        kept = measure_signals(y, y.ndim - 1)
        expected = derive_signals([measure_signals(y.clone(), y.ndim - 1)]).values
        y.fill_(7.0)
        assert torch.equal(derive_signals([kept]).values.nan_to_num(), expected.nan_to_num())


def test_the_reach_of_a_unit_is_its_largest_absolute_value() -> None:
    """As the CUDA kernel has it, which the CPU can run too."""
    for dtype in DTYPES[:4]:
        y = torch.randn(4, 5, 6).to(dtype)
        y[0, 0, 0], y[0, 1, 0], y[1, 1, 1] = math.nan, 9.0, -math.inf
        for dim in range(3):
            others = [other for other in range(3) if other != dim]
            expected = torch.linalg.vector_norm(y, math.inf, others)
            assert torch.equal(unit_reach(y, dim).nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_a_large_tensor_in_pieces_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.randn(50, 7, 11).tanh()
    whole = derived(y, 2, Bounds(-1.0, 1.0))
    monkeypatch.setattr(activation, "_PIECE", 100)
    assert derived(y, 2, Bounds(-1.0, 1.0)) == whole


# Of large ones a part -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "unit_dim"), [((4, 100, 8), 2), ((100, 4, 8), -1), ((3, 8, 20, 30), 1), ((60, 8), 1)]
)
def test_of_a_large_activation_a_part_is_taken_with_all_units(
    shape: tuple[int, ...], unit_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    y = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    assert torch.equal(portion(y, unit_dim), y) and portion(y, unit_dim).data_ptr() != y.data_ptr()
    monkeypatch.setattr(activation, "MOST", y.numel() // 7)
    part = portion(y, unit_dim)
    assert y.numel() // 9 <= part.numel() <= y.numel() // 5 and part.shape[unit_dim] == y.shape[unit_dim]
    assert part.flatten()[0] == y.flatten()[0] and set(part.flatten().tolist()) < set(y.flatten().tolist())
    by_unit = (one.movedim(unit_dim, 0).flatten(1) for one in (part, y))
    assert all(set(some.tolist()) < set(every.tolist()) for some, every in zip(*by_unit, strict=True))


def test_an_activation_without_examples_is_taken_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activation, "MOST", 10)
    y = torch.ones(100)
    assert torch.equal(portion(y, 0), y)


def test_a_look_at_a_large_layer_reads_a_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row says of how many values it is; dead units are those of the part."""
    monkeypatch.setattr(activation, "MOST", 64)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    with torch.no_grad():
        model[0].bias[:2], model[0].bias[2:] = -1e3, 1e3
    seen = armed(model, torch.randn(200, 4))
    (part,) = seen.parts
    assert part.rows.values[:, 0].tolist() == [8 * 8, 8 * 8]
    assert signal(seen, "1", "dead") == 0.25
