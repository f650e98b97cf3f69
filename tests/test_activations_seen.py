"""Which calls of a layer are seen: each once (P27), and none inside what is compiled (P7)."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from holter import activations, modules
from holter.statistics.activation import Kept, measure_signals
from tests.armed import armed, make, problems_of, watch


@pytest.fixture(autouse=True)
def _products_in_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer multiplies in its hook here, as attentions do: selective checkpointing keeps products."""

    def multiply(y: Tensor, *rest: Any) -> Kept:
        torch.mm(y.flatten(0, -2), y.flatten(0, -2).T)
        return measure_signals(y, *rest)

    monkeypatch.setattr(activations, "measure_signals", multiply)


class Checkpointed(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.ReLU()) for _ in range(3)
        )
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.how) if self.how else block(x)
        return x


def _save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _save_products),
    },
}


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpointed_layers_are_counted_once(name: str, in_forward: bool) -> None:
    plain = Checkpointed()
    model = Checkpointed(**CHECKPOINTS[name])
    model.load_state_dict(plain.state_dict())
    x = torch.randn(5, 4)
    expected = armed(plain, x)
    if in_forward:  # armed by the model's own pre-hook, as the Monitor does
        capture = watch(model)
        handle = model.register_forward_pre_hook(lambda module, args: capture.arm(in_forward=True))
        model(x).sum().backward()
        handle.remove()
        found = capture.collect()
        assert found is not None
    else:
        found = armed(model, x)
    assert found.order == expected.order and found.parts[0].calls == (1,) * 13
    assert torch.equal(found.parts[0].rows.values, expected.parts[0].rows.values)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_capture_that_counts_recomputation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P27, planted fault."""
    monkeypatch.setattr(activations, "_recomputes", lambda: False)
    with pytest.raises(AssertionError):
        test_checkpointed_layers_are_counted_once("not reentrant", False)


def test_arithmetic_that_a_selective_checkpoint_sees_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2, planted fault: our products among those that it keeps for the backward."""
    monkeypatch.setattr(activations, "_disable_current_modes", contextlib.nullcontext)
    with pytest.raises((AssertionError, RuntimeError)):
        test_checkpointed_layers_are_counted_once("selective", False)


def test_evaluation_and_forwards_without_gradients_do_not_count() -> None:
    model, x = make("mlp")
    capture = watch(model)
    capture.arm()
    with torch.no_grad():
        model(x)
    assert capture.is_armed
    model.eval()(x)
    assert not capture.is_armed  # it stands aside: torch's encoder layers compute otherwise under hooks
    assert capture.collect() is None


def test_evaluation_of_an_encoder_is_bit_exact_while_armed() -> None:
    model, x = make("encoder")
    with torch.no_grad():
        expected = model.eval()(x)
        for part in (model, model.layers[0]):  # type: ignore[index]
            model.train()
            capture = watch(model)
            capture.arm()
            model(x)
            model.eval()
            result = part(x)
            assert torch.equal(result, expected if part is model else model.layers[0](x))  # type: ignore[index, operator]
            assert not capture.is_armed


def test_parts_called_without_the_model_are_seen() -> None:
    """As a LightningModule calls self.net(x) in its training_step."""
    model, x = make("mlp")
    outer = nn.ModuleDict({"net": model})
    capture = watch(outer)
    capture.arm()
    model(x).sum().backward()
    found = capture.collect()
    assert found is not None and found.order[0] == "net.0" and found.logits is None


# P7: compiled -------------------------------------------------------------------------------------------------


def _compiled_steps(attach: str) -> tuple[int, int]:
    """Graphs and graph breaks of six steps, armed as the Monitor does it: by a forward pre-hook that runs eagerly."""
    torch._dynamo.reset()
    counters.clear()
    model, x = make("mlp")
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    capture = watch(compiled if attach == "to the compiled" else model)

    def began(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            capture.arm(in_forward=True)

    hooked = compiled if attach == "to the compiled" else model
    for step in range(6):
        if (attach, step) in (("before", 0), ("after", 2), ("to the compiled", 0)):
            hooked.register_forward_pre_hook(began)
        compiled(x).sum().backward()
        assert capture.collect() is None
    assert capture.observed == (attach != "to the compiled")
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("attach", ["before", "after", "to the compiled"])
def test_a_compiled_model_has_no_graph_break_and_no_recompilation_more(attach: str) -> None:
    assert _compiled_steps(attach) == _compiled_steps("never") == (1, 0)


def test_hooks_that_the_compiler_meets_leave_the_graph_as_it_is_but_cost_a_second_compilation() -> None:
    """Why `arm` belongs into the model's own pre-hook: whoever arms from outside pays this once."""
    torch._dynamo.reset()
    counters.clear()
    model, x = make("mlp")
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    capture = watch(model)
    for step in range(4):
        if step % 2 == 0:
            capture.arm()
        compiled(x).sum().backward()
        assert capture.collect() is None and problems_of(capture) == []
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


# torch.compile looks at .grad of what goes into a compiled part, and torch warns of it.
IGNORE_GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Region(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.front, self.body = nn.Linear(4, 4), Body()
        if how == "torch.compile":
            self.body = torch.compile(self.body, backend="eager", fullgraph=True)  # type: ignore[assignment]
        elif how == "compile()":
            self.body.compile(backend="eager", fullgraph=True)
        elif how == "forward":
            self.body.forward = torch.compile(self.body.forward, backend="eager", fullgraph=True)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.front(x))


@IGNORE_GRAD
@pytest.mark.parametrize("how", ["torch.compile", "compile()", "forward"])
def test_a_compiled_part_is_not_observed_and_said_to_be(how: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = Region(how)
    capture = watch(model)
    for step in range(4):
        if step % 2 == 0:
            capture.arm()
        model(torch.ones(2, 4)).sum().backward()
        found = capture.collect()
        assert step % 2 or (found is not None and found.order == ("front",))
    assert capture.observed and capture.unobserved == ("body",) and problems_of(capture) == []
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@IGNORE_GRAD
def test_hooks_inside_a_compiled_part_would_cost_a_recompilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7, planted fault."""
    monkeypatch.setattr(modules, "is_compiled", lambda module: False)
    with pytest.raises(AssertionError):
        test_a_compiled_part_is_not_observed_and_said_to_be("compile()")
