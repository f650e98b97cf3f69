"""Layers have the names that their author wrote, whatever the model was wrapped in."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel

import holter
from holter.gradients import compute_gradient_norms
from holter.layer_roles import roles_of
from holter.modules import all_modules, all_parameters, compiled_parts, named_parameters, walk
from holter.remedies import replace_activations

# DataParallel and Fabric train on a GPU where there is one, and round otherwise there.
ROUNDING = 1e-4 if torch.cuda.is_available() else 0.0
WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.act(self.up(x)))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.h:
            x = block(x)
        y: Tensor = self.head(x)
        return y


class Fabric(nn.Module):
    """As the module of Lightning's Fabric holds a model: wrapped, and as it is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._forward_module, self._original_module = nn.DataParallel(model), model

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self._forward_module(x)
        return y


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def with_block(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[Net], nn.Module]:
    def of(model: Net) -> nn.Module:
        model.h[0] = wrap(model.h[0])
        return model

    return of


def in_one_process(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


WRAPPED: dict[str, Callable[[Any], nn.Module]] = {
    "data parallel": nn.DataParallel,
    "distributed": in_one_process,
    "compiled": compiled,
    "compiled and distributed": lambda model: in_one_process(compiled(model)),
    "distributed and compiled": lambda model: compiled(in_one_process(model)),
    "averaged": AveragedModel,
    "fabric": Fabric,
    "twice": lambda model: nn.DataParallel(nn.DataParallel(model)),
    "checkpointed block": with_block(checkpoint_wrapper),
    "compiled block": with_block(compiled),
    "checkpointed and compiled block": with_block(lambda block: compiled(checkpoint_wrapper(block))),
    "fully sharded": lambda model: _as("_fsdp_wrapped_module", model),
}


def _as(key: str, model: nn.Module) -> nn.Module:
    """A module that holds another under this key, and only that."""
    holder = nn.Sequential()
    holder.register_module(key, model)
    return holder


@pytest.fixture(autouse=True)
def _one_process(tmp_path: Path) -> Any:
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def trained(model: nn.Module, path: Path, **options: Any) -> holter.Run:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=path, machine=False, budget=None, activations=1, **options) as monitor:
        for _ in range(2):
            loss = model(torch.randn(6, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
    return holter.open_run(path)


def names_in(run: holter.Run) -> set[str]:
    """All names of layers and modules that the run holds anywhere."""
    found = {layer["name"] for layer in run.info["layers"]}
    for record in run.history.records:
        for rows in record.rows.values():
            found |= set(rows.layers)
        order = record.notes.get("execution_order", "[]")
        found |= set(json.loads(order)) if order.startswith("[") else set()
    return found


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_model_has_the_names_of_the_plain_one(kind: str, tmp_path: Path) -> None:
    plain = Net()
    wrapped = WRAPPED[kind](copy.deepcopy(plain))
    expected = trained(plain, tmp_path / "plain")
    run = trained(wrapped, tmp_path / "wrapped")
    parts = {part for name in names_in(run) for part in name.split(".")}
    assert parts.isdisjoint(WRAPPERS)
    for role in ("gradient", "weight", "update"):
        assert run.history.layers(role) == expected.history.layers(role)
    described = [{key: layer[key] for key in ("name", "part", "module")} for layer in run.info["layers"]]
    assert described == [{key: layer[key] for key in ("name", "part", "module")} for layer in expected.info["layers"]]
    assert run.info["model"] == "Net"
    pair = holter.compare(expected, run).pairs[0]
    assert pair.ratios is not None and pair.ratios.layers == expected.history.layers("gradient")
    assert pair.ratios.values == pytest.approx(0, abs=ROUNDING)  # each layer beside itself, at every step
    if not ROUNDING:
        assert pair.partings.layer_difference is None


@pytest.mark.parametrize("kind", WRAPPED)
def test_a_selection_matches_in_all_of_them(kind: str, tmp_path: Path) -> None:
    run = trained(WRAPPED[kind](Net()), tmp_path / "run", layers="h.0")
    assert run.history.layers("gradient") == ("h.0.up.weight", "h.0.up.bias", "h.0.down.weight", "h.0.down.bias")


@pytest.mark.parametrize("kind", WRAPPED)
def test_every_list_of_names_is_that_of_the_plain_model(kind: str) -> None:
    plain = Net()
    wrapped = WRAPPED[kind](copy.deepcopy(plain))
    assert [name for name, _ in named_parameters(wrapped)] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in all_modules(wrapped)] == [name for name, _ in plain.named_modules()]
    assert roles_of(wrapped) == roles_of(plain)
    if not compiled_parts(wrapped):
        assert [name for name, _ in walk(wrapped)] == [name for name, _ in plain.named_modules()]
    wrapped(torch.ones(2, 8)).sum().backward()
    assert list(compute_gradient_norms(wrapped)) == [name for name, _ in plain.named_parameters()]
    assert replace_activations(wrapped) == ["h.0.act", "h.1.act"]


def test_what_is_compiled_is_known_by_its_name() -> None:
    assert compiled_parts(WRAPPED["compiled block"](Net())) == ("h.0",)
    assert compiled_parts(WRAPPED["checkpointed and compiled block"](Net())) == ("h.0",)
    assert compiled_parts(WRAPPED["compiled and distributed"](Net())) == ("",)
    assert compiled_parts(WRAPPED["distributed and compiled"](Net())) == ("",)


class Own(nn.Module):
    """A user's own attributes may have any name."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(()))
        self._orig_mod = nn.Linear(2, 2)


def test_an_attribute_of_a_users_own_keeps_its_name() -> None:
    assert [name for name, _ in named_parameters(Own())] == [name for name, _ in Own().named_parameters()]
    holder = _as("module", nn.Linear(2, 2))
    assert [name for name, _ in named_parameters(holder)] == ["module.weight", "module.bias"]
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(2, 2)))
    assert [name for name, _ in all_parameters(model)] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("base", [nn.Module, nn.DataParallel])
def test_no_two_parameters_share_a_name(base: Any) -> None:
    """What has parameters of its own is no mere wrapper."""
    model = base(nn.Linear(2, 2)) if base is nn.DataParallel else base()
    setattr(model, "module" if base is nn.DataParallel else "_orig_mod", nn.Linear(2, 2))
    model.weight = nn.Parameter(torch.ones(2))
    assert [name for name, _ in named_parameters(model)] == [name for name, _ in model.named_parameters()]


def test_shared_modules_and_one_that_holds_its_parent_have_torchs_names() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared, nn.ReLU())})
    expected = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert [name for name, _ in all_parameters(model)] == expected
    model["b"].add_module("up", model)  # type: ignore[operator]
    assert [name for name, _ in all_modules(model)] == [name for name, _ in model.named_modules()]
