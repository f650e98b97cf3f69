"""Seeing the order in which modules run: what cannot be seen is said, and the training does not notice (P2 P3 P7)."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import holter
from holter.capture import Layers
from holter.execution import ASSUMED, ExecutionOrder
from holter.hooks import ModuleHook
from holter.problems import Problems
from holter.record import EXECUTION_ORDER
from tests.models import MODELS, differences, make, mlp
from tests.test_execution import RUNS, Backwards, notes, order_of, sgd, step, watched

# What cannot be seen ----------------------------------------------------------------------------------------------


def test_a_model_whose_forward_is_never_called_is_not_observed_and_said_to_be() -> None:
    model = mlp()
    optimizer = sgd(model)
    monitor = holter.watch(model, optimizer, run=False)
    for _ in range(2):
        model[3](model[0](torch.randn(5, 12))).sum().backward()
        optimizer.step()
    assert notes(monitor) == {0: "not observed: no forward of the model was seen"} and monitor.history.depth == {}
    step(model, optimizer, torch.randn(5, 12))
    assert "0.weight" in monitor.history.depth


def _compiled_steps(attach: str) -> tuple[int, int, dict[int, str]]:
    """Graph breaks, compiled graphs, and what is noted, of three steps of a compiled model."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = sgd(model)
    monitor = None
    if attach == "before":
        monitor = holter.watch(model, optimizer, run=False, activations=None)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    if attach == "to the compiled":
        monitor = holter.watch(compiled, optimizer, run=False, activations=None)
    for _ in range(3):
        compiled(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = notes(monitor) if monitor is not None else {}
    return sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"], found


@pytest.mark.parametrize("attach", ["before", "to the compiled"])
def test_a_compiled_model_has_no_graph_break_and_no_compilation_more(attach: str) -> None:
    """P7: and what cannot be seen is said to be."""
    *plain, _ = _compiled_steps("never")
    *cost, told = _compiled_steps(attach)
    assert cost == plain
    assert told[0].startswith("not observed: ")


class Inner(nn.Module):
    """To be compiled within a larger model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()  # type: ignore[no-any-return]


# torch.compile looks at .grad of what goes into a compiled part, and torch warns of it.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_part_stays_where_torch_lists_it() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = nn.Sequential(nn.Linear(4, 4), Inner(), nn.Linear(4, 2))
    model[1].compile(backend="eager", fullgraph=True)
    monitor = watched(model, torch.ones(3, 4), steps=3, activations=None)
    order = [name for name in order_of(monitor.history.depth) if name.endswith("weight")]
    assert order == ["0.weight", "1.layer.weight", "2.weight"] and "2 parameters" in notes(monitor, ASSUMED)[0]
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_budget_of_nothing_looks_at_nothing() -> None:
    model = mlp()
    optimizer = sgd(model)
    monitor = holter.watch(model, optimizer, run=False, budget=0)
    model(torch.randn(2, 12)).sum()
    assert not any(hook for part in model for hook in part._forward_pre_hooks)
    optimizer.step()
    assert notes(monitor) == {}


# What the training notices: nothing -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_exact(name: str) -> None:
    """P2."""
    ours, theirs = make(name), make(name)
    ours.monitor = holter.watch(ours.model, ours.optimizer, run=False, scaler=ours.scaler, budget=None)
    for training in (ours, theirs):
        torch.manual_seed(1)
        for _ in range(3):
            training.step()
    assert differences(ours, theirs) == [] and ours.monitor.history.depth


def looking(model: nn.Module) -> ExecutionOrder:
    order = ExecutionOrder(model, Layers(model), Problems(lambda problem: None))
    order.look()
    return order


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_looked_at_can_be_copied_and_pickled_and_is_clean_afterwards(name: str) -> None:
    """P3."""
    training = make(name)
    before = pickle.dumps(training.model)
    order = looking(training.model)
    assert all(module._forward_pre_hooks for module in training.model.modules())
    for twin in (copy.deepcopy(training.model), pickle.loads(pickle.dumps(training.model))):
        x, y = training.batch()
        training.loss(twin, x, y)
    order.take()
    assert pickle.dumps(training.model) == before


def test_hooks_that_are_left_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3, planted fault."""
    monkeypatch.setattr(ExecutionOrder, "_remove_hooks", lambda self: None)
    model = mlp()
    before = pickle.dumps(model)
    looking(model).take()
    assert pickle.dumps(model) != before


def test_closing_in_the_middle_of_a_step_leaves_nothing() -> None:
    model = mlp()
    before = pickle.dumps(model)
    monitor = holter.watch(model, sgd(model), run=False)
    model(torch.randn(2, 12))
    assert pickle.dumps(model) != before
    monitor.close()
    assert pickle.dumps(model) == before


def quick_paths(monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How many layers of a frozen encoder in a training forward take torch's quick path: without and with a look."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(16, 2))
    model[0].requires_grad_(False).eval()
    honest, calls = torch._transformer_encoder_layer_fwd, []
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", lambda *args: (calls.append(0), honest(*args))[1])
    x = torch.randn(4, 6, 16)
    model(x)
    plain = len(calls)
    order = looking(model)
    model(x)
    names = json.loads(order.take()[EXECUTION_ORDER])
    assert names.index("0.layers.0") < names.index("0.layers.1") < names.index("1.weight")
    return plain, len(calls) - plain


def test_an_encoder_in_evaluation_takes_the_path_that_it_takes_without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: where it bears hooks it takes another, whose last bits may be others."""
    assert quick_paths(monkeypatch) == (2, 2)


def test_another_path_of_the_encoder_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2, planted fault: hooks that stay."""
    monkeypatch.setattr(ExecutionOrder, "_see", lambda self, name, module, args: self._ran.setdefault(name))
    assert quick_paths(monkeypatch) == (2, 0)


def test_recomputation_does_not_change_the_order() -> None:
    class Checkpointed(Backwards):
        def forward(self, x: Tensor) -> Tensor:
            x = checkpoint(self.inp, x, use_reentrant=False)
            for block in reversed(self.body):
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x) * self.scale  # type: ignore[no-any-return]

    assert [name for name in order_of(watched(Checkpointed()).history.depth) if name in RUNS] == RUNS


def test_a_hook_contains_what_fails_holds_nobody_and_goes_quiet_with_its_owner() -> None:
    """P1 P3."""
    problems = Problems(lambda problem: None)

    class Owner:
        calls = 0
        _problems = problems

        def see(self, name: str, module: nn.Module, args: Any) -> None:
            Owner.calls += 1
            raise ZeroDivisionError

    owner, model = Owner(), nn.Linear(2, 2)
    model.register_forward_pre_hook(ModuleHook(owner, "look", Owner.see, "x"))
    model(torch.ones(1, 2))
    assert [problem.where for problem in problems] == ["look"]
    del owner
    model(torch.ones(1, 2))
    assert Owner.calls == 1
