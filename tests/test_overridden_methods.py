"""P1: a model may override what torch gives it, with other arguments and other results. Its layers are found all the
same, in the dictionaries that torch keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holter
from holter.gradients import compute_gradient_norm
from holter.layer_roles import roles_of
from holter.modules import all_modules, all_parameters, children_of, named_modules, named_parameters


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class OtherArguments(Plain):
    """As torchrl's LossModule."""

    def named_parameters(self, recurse: bool = True) -> Iterator[tuple[str, nn.Parameter]]:  # type: ignore[override]
        return super().named_parameters(recurse=recurse)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (parameter for _, parameter in self.named_parameters(recurse))


class Refuses(Plain):
    """Whatever is asked."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("not this one")

    named_parameters = parameters = named_modules = modules = named_children = children = state_dict = _refuse
    named_buffers = buffers = __len__ = __bool__ = __iter__ = __eq__ = _refuse
    __hash__ = nn.Module.__hash__


class HasOthersByTheirNames(Plain):
    """Where attributes hide the methods."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("parameters", "modules", "children", "buffers"):
            self.__dict__[name] = {"lr": 0.1}


def own(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for part in (model.body[0], model.head) for parameter in part._parameters.values()]


@pytest.mark.parametrize("kind", [OtherArguments, Refuses, HasOthersByTheirNames])
@pytest.mark.parametrize("layers", [None, "body", lambda name, thing: True])
def test_a_model_that_overrides_what_torch_gives_it_is_watched(kind: Callable[[], nn.Module], layers: Any) -> None:
    weights = []
    for is_watched in (True, False):
        torch.manual_seed(0)
        model = kind()
        optimizer = torch.optim.Adam(own(model), 0.01)
        paces = dict.fromkeys(("weights", "updates", "activations", "optimizer_state"), 1)
        monitor = holter.watch(model, optimizer, run=False, budget=None, layers=layers, **paces) if is_watched else None
        norms = []
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            norms.append(float(torch.stack([p.grad.double().square().sum() for p in own(model)]).sum().sqrt()))
            if monitor is not None and kind is OtherArguments:
                assert float(monitor.clip_grad_norm_(1e9)) == pytest.approx(norms[-1], rel=1e-5)
            else:
                torch.nn.utils.clip_grad_norm_(own(model), 1e9)
            optimizer.step()
        weights.append([parameter.detach().clone() for parameter in own(model)])
        if monitor is not None:
            monitor.close()
            assert not monitor.findings
            assert {"gradient", "weight", "update", "activation"} <= monitor.history.records[0].rows.keys()
            name = "gradient_norm" if layers != "body" else "clip_norm"
            np.testing.assert_allclose(monitor.history.scalar(name)[1], norms, rtol=1e-5)
            expected = ("body.0.weight", "body.0.bias", "head.weight", "head.bias")
            assert monitor.history.layers("gradient") == (expected if layers != "body" else expected[:2])
    assert all(map(torch.equal, *weights))


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model.add_module("again", model[0])
    model.register_module("none", None)
    model.register_parameter("loose", nn.Parameter(torch.zeros(2)))
    model.register_parameter("nothing", None)
    return model


def test_names_are_those_of_torch() -> None:
    for model in (tied(), Plain(), nn.TransformerEncoderLayer(8, 2), nn.LSTM(3, 4, 2)):
        assert list(named_modules(model)) == list(model.named_modules())
        assert all_modules(model) == list(model.named_modules(remove_duplicate=False))
        assert children_of(model) == list(model.named_children())
        for found, torchs in (
            (named_parameters(model), model.named_parameters()),
            (all_parameters(model), model.named_parameters(remove_duplicate=False)),
        ):
            assert [(name, id(one)) for name, one in found] == [(name, id(one)) for name, one in torchs]


def test_a_module_that_holds_its_parent_has_each_name_once() -> None:
    model = Plain()
    model.head.add_module("parent", model)
    assert all_modules(model) == list(model.named_modules())
    assert [name for name, _ in all_parameters(model)] == [name for name, _ in model.named_parameters()]
    assert roles_of(model)["body.0.weight"] == "ffn"


def test_a_parameter_with_dots_in_its_own_name_has_a_role_and_a_row() -> None:
    """As in torchrl's TensorDictParams, which shows parameters of many modules as its own."""

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._parameters["module.0.weight"] = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x * self._parameters["module.0.weight"]

    model = nn.Sequential(Flat())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        assert monitor.history.layers("gradient") == ("0.module.0.weight",)


def test_the_plain_functions_find_the_gradients_too() -> None:
    model = Refuses()
    model(torch.randn(4, 6)).square().mean().backward()
    truth = torch.nn.utils.get_total_norm([parameter.grad for parameter in own(model)])
    assert compute_gradient_norm(model) == pytest.approx(float(truth), rel=1e-6)
