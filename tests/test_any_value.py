"""A value of any kind: recorded if it is a number, else told; it never costs the record or another value."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import holter
from holter.draft import Draft, NamedSums, RoleRows
from holter.record import Record
from holter.statistics.device_rows import DeviceRows
from holter.statistics.rows import COLUMNS
from holter.transfer import Parcel
from tests.test_logged import Loop

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


def one(dtype: torch.dtype) -> Tensor | None:
    """A 1 of this dtype; None if torch cannot make one."""
    try:
        return torch.ones((), dtype=torch.float32).to(dtype)
    except (RuntimeError, NotImplementedError):
        return None


def raw(dtype: torch.dtype) -> Tensor:
    """Of a dtype that only holds bits."""
    return torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype).view(())


# On their way to the host ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_that_torch_can_read_comes_to_the_host(dtype: torch.dtype) -> None:
    value = one(dtype)
    before, found, after = Parcel([torch.tensor(7.0), raw(dtype) if value is None else value, torch.tensor(8)]).arrays()
    assert isinstance(before, np.ndarray) and isinstance(after, np.ndarray) and (before, after) == (7.0, 8)
    if value is None:
        assert isinstance(found, Exception)
    else:
        assert isinstance(found, np.ndarray) and found.shape == () and complex(found) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_numpy_does_not_have_keeps_its_numbers(dtype: torch.dtype) -> None:
    values = torch.tensor([-1.5, 0.0, 0.0625, 448.0, math.nan]).to(dtype)
    (found,) = Parcel([values]).arrays()
    assert isinstance(found, np.ndarray) and np.array_equal(found, values.double().numpy(), equal_nan=True)


def test_views_that_are_negated_or_conjugated_are_read() -> None:
    number = torch.tensor([1 + 2j])
    conjugated, negated = Parcel([number.conj(), number.conj().imag]).arrays()
    assert isinstance(conjugated, np.ndarray) and conjugated.tolist() == [1 - 2j]
    assert isinstance(negated, np.ndarray) and negated.tolist() == [-2.0]


# A value that cannot be stored costs that value -----------------------------------------------------------------


def _rows(layers: int, values: Tensor | None = None) -> DeviceRows:
    return DeviceRows(torch.ones(layers, len(COLUMNS), dtype=torch.float64) if values is None else values)


def _made(draft: Draft) -> tuple[Record, list[str]]:
    told: list[str] = []
    return draft.seal().record({"extra": 1.0}, lambda purpose, error: told.append(purpose)), told


META = torch.empty((), device="meta")


def test_a_scalar_that_cannot_be_read_costs_itself() -> None:
    draft = Draft(values={"a": [1.0], "b": [META], "c": [torch.ones(2)], "d": [torch.tensor(4.0)]})
    draft.values["parts"] = [torch.tensor(1.0), META, torch.tensor(3.0)]
    record, told = _made(draft)
    assert record.scalars == {"a": 1.0, "d": 4.0, "parts": 2.0, "extra": 1.0}
    assert told == ["read b", "read c", "read parts"]


def _failing(*_: Any) -> Any:
    raise ValueError


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (RoleRows("bad", ("x",), _rows(1, META)), "measure the bad"),
        (
            RoleRows("bad", ("x", "y"), DeviceRows(torch.ones(2, len(COLUMNS)), torch.ones(3, 3, device="meta"))),
            "measure the bad",
        ),
        (RoleRows("bad", ("x",), _rows(1), torch.ones(1, 1), _failing), "work out the bad"),
        (RoleRows("bad", ("x",), _rows(1), META, NamedSums(("y",))), "measure the bad"),
    ],
)
def test_rows_that_cannot_be_read_cost_themselves(bad: RoleRows, told: str) -> None:
    good = [
        RoleRows("gradient", ("a",), _rows(1)),
        RoleRows("update", ("b",), _rows(1), torch.ones(1, 1), NamedSums(("z",))),
    ]
    record, problems = _made(Draft(values={"loss": [torch.tensor(2.0)]}, rows=[good[0], bad, good[1]]))
    assert set(record.rows) == {"gradient", "update"} and record.rows["update"].extras["z"].tolist() == [1.0]
    assert record.scalars["loss"] == 2.0 and "gradient_norm" in record.scalars and problems == [told]


def test_parts_that_do_not_fit_together_cost_their_role() -> None:
    parts = [RoleRows("update", (name,), _rows(1), torch.ones(1, 1), NamedSums((name,))) for name in "ab"]
    record, told = _made(Draft(rows=[*parts, RoleRows("weight", ("c",), _rows(1))]))
    assert set(record.rows) == {"weight"} and told == ["join the update"]


def test_gradients_of_an_unknown_scale_are_left_out_and_the_others_stay() -> None:
    rows = [RoleRows("gradient", ("a",), _rows(1), scale=META), RoleRows("weight", ("a",), _rows(1))]
    record, told = _made(Draft(rows=rows))
    assert set(record.rows) == {"weight"} and told == ["measure the gradient"]


def test_a_clip_whose_norm_cannot_be_read_leaves_an_unknown_part() -> None:
    values: dict[str, list[float | Tensor]] = {"clip_norm": [META], "clip_max_norm": [1.0]}
    record, told = _made(Draft(values=values, rows=[RoleRows("gradient", ("a",), _rows(1))]))
    assert told == ["read clip_norm"] and "gradient_norm" in record.scalars
    assert "gradient_norm_clipped" not in record.scalars


def test_values_that_add_up_to_more_than_a_float_have_a_mean() -> None:
    record, told = _made(Draft(values={"a": [1e308, 1e308], "b": [math.inf, -math.inf], "c": [math.nan, 1.0]}))
    assert record.scalars["a"] == 1e308 and math.isnan(record.scalars["b"]) and math.isnan(record.scalars["c"])
    assert told == []


# What a user logs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_logged_value_of_any_dtype_is_recorded_or_told(dtype: torch.dtype) -> None:
    loop, value = Loop(), one(dtype)
    loop.forward()
    loop.monitor.log(loss=2.0, odd=raw(dtype) if value is None else value)
    loop.update()
    is_number = value is not None and not dtype.is_complex
    assert loop.scalar("loss") == {0: 2.0} and loop.scalar("odd") == ({0: 1.0} if is_number else {})
    assert len(loop.monitor.findings) == (not is_number)


def _fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(())


NUMBERS: dict[str, tuple[Any, float]] = {
    "numpy float32": (np.float32(0.5), 0.5),
    "numpy float16": (np.float16(0.5), 0.5),
    "numpy int": (np.int32(3), 3.0),
    "numpy bool": (np.bool_(True), 1.0),
    "decimal": (Decimal("0.25"), 0.25),
    "fraction": (Fraction(1, 4), 0.25),
    "array of one": (np.array([0.5]), 0.5),
    "array of no dimension": (np.array(0.5), 0.5),
    "tensor of one": (torch.tensor([[0.5]]), 0.5),
    "tensor with a gradient": (torch.tensor(0.5, requires_grad=True) * 1, 0.5),
    "parameter": (nn.Parameter(torch.tensor(0.5)), 0.5),
    "negated view": (torch.tensor([1 + 2j]).conj().imag, -2.0),
    "boolean": (True, 1.0),
    "large integer": (10**300, 1e300),
}
OTHERS: dict[str, Any] = {
    "meta": torch.empty((), device="meta"),
    "fake": _fake(),
    "several": torch.ones(3),
    "none at all": torch.ones(0),
    "array of several": np.ones(3),
    "complex": 1 + 2j,
    "numpy complex": np.complex64(1 + 2j),
    "huge integer": 10**400,
    "huge fraction": Fraction(10**400),
    "text": "fine",
    "None": None,
    "list": [0.5],
    "date": np.datetime64("2020-01-01"),
    "sparse": torch.ones(3).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_number_of_any_kind_is_recorded(kind: str) -> None:
    loop, (value, expected) = Loop(), NUMBERS[kind]
    loop.forward()
    loop.monitor.log(loss=2.0, odd=value)
    loop.update()
    assert loop.scalar("odd") == {0: expected} and loop.monitor.findings == ()


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_number_is_told_in_words_and_costs_nothing_else(kind: str) -> None:
    loop = Loop()
    loop.forward()
    loop.monitor.log(odd=OTHERS[kind], loss=2.0)
    loop.update()
    assert loop.scalar("loss") == {0: 2.0} and loop.scalar("odd") == {} and loop.scalar("gradient_norm")
    (told,) = loop.monitor.findings
    assert "odd" in told.evidence["where"] and "Error" not in told.evidence["what"]


# What an optimizer and a clip hold ------------------------------------------------------------------------------


class Odd(torch.optim.SGD):
    """Holds a setting that is no number, as an optimizer with a rate for each weight does."""

    def __init__(self, model: nn.Module, value: Any) -> None:
        super().__init__(model.parameters(), 0.01)
        self.value = value

    def step(self, closure: Any = None) -> Any:
        done = super().step()
        self.param_groups[0]["weight_decay"] = self.value
        return done


@pytest.mark.parametrize("value", [torch.ones(3), META, torch.tensor(1 + 2j), torch.ones(3).to_sparse()], ids=str)
def test_a_setting_that_is_no_number_costs_itself(value: Tensor) -> None:
    model = nn.Linear(4, 2)
    optimizer = Odd(model, value)
    monitor = holter.watch(model, optimizer, run=False, budget=None, machine=False, diagnose=False)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    names = set(monitor.history.scalars)
    assert {"learning_rate", "gradient_norm", "step_time", "monitor_cost", "time/forward"} <= names
    assert "weight_decay" not in names and len(monitor.findings) == 1


def test_a_rate_that_is_a_number_of_numpys_is_recorded() -> None:
    loop = Loop()
    loop.optimizer.param_groups[0]["lr"] = np.float32(0.5)
    loop.forward()
    loop.update()
    assert loop.scalar("learning_rate") == {0: 0.5}


def _clip_with(norm: Any) -> Callable[[nn.Module], None]:
    return lambda model: torch.nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm, foreach=False)


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one.is_floating_point and one.itemsize > 1], ids=str)
def test_the_norm_of_a_clip_may_be_of_any_dtype(dtype: torch.dtype) -> None:
    loop = Loop()
    loop.forward()
    _clip_with(torch.tensor(2.0, dtype=dtype))(loop.model)
    loop.update()
    assert loop.scalar("clip_norm") == {0: 2.0} and loop.monitor.findings == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_model_of_any_dtype_has_the_norm_of_torchs_clip(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    monitor = holter.watch(model, optimizer, run=False, budget=None)
    norms = []
    for _ in range(3):
        loss = model(torch.randn(3, 4, dtype=dtype)).square().mean()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
    assert monitor.history.scalar("clip_norm")[1].tolist() == norms
    assert len(monitor.history.scalar("loss")[0]) == len(monitor.history.series("gradient", "norm")[0]) == 3


@pytest.mark.parametrize("norm", [torch.full((4, 1), 2.0), torch.full((4, 2), 2.0)], ids=str)
def test_a_norm_that_is_no_number_is_told_and_the_step_is_recorded(norm: Tensor) -> None:
    """torch's clip takes what multiplies with the gradients."""
    loop = Loop()
    loop.model = nn.Sequential(nn.Linear(2, 4, bias=False))
    plain = copy.deepcopy(loop.model)
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), 0.01)
    monitor = holter.watch(loop.model, loop.optimizer, run=False, budget=None)
    for model in (loop.model, plain):
        model(torch.ones(3, 2)).sum().backward()
        _clip_with(norm)(model)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(loop.model.parameters(), plain.parameters(), strict=True))  # type: ignore[arg-type]
    loop.optimizer.step()
    assert monitor.history.scalar("clip_norm")[0].size == 0 and len(monitor.history.series("gradient", "norm")[0]) == 1
    assert len(monitor.findings) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_loss_of_any_dtype_costs_no_value_beside_it(dtype: torch.dtype) -> None:
    """Whether the loss is finite is asked before the batch is looked at."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = one(dtype)
    with holter.watch(model, optimizer, run=False, machine=False) as monitor:
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        monitor.log(loss=raw(dtype) if loss is None else loss, inputs=torch.ones(2, 3), accuracy=0.5)
    assert monitor.history.scalar("accuracy")[1].tolist() == [0.5] and "batch" in monitor.history.roles
