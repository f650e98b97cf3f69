"""D7: which layers are measured is the user's choice; what is clipped is not touched by it."""

from __future__ import annotations

import copy
import gc
import weakref
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holter
from holter import selection
from holter.selection import Selection
from tests.models import Encoder, make, mlp


class Block(nn.Module):
    """Attention as GPT-2 names it, without parameters of its own, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.Module()
        self.attn.c_attn, self.attn.c_proj = nn.Linear(6, 6), nn.Linear(6, 6)
        self.mlp = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.attn.c_proj(self.attn.c_attn(x).tanh()))  # type: ignore[no-any-return]


class Tiny(nn.Module):
    """Blocks in a list, between an input and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(4, 6)
        self.h = nn.ModuleList(Block() for _ in range(11))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.h:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters()}


def fail(name: str, error: Exception) -> None:
    raise AssertionError(name) from error


def taken(model: nn.Module, asked: Any) -> tuple[set[str], set[str]]:
    """The names of the parameters and of the modules that are selected."""
    found = Selection(asked).of(model, fail)
    parameters = {name for name, one in model.named_parameters() if id(one) in found.parameters}
    return parameters, {name for name, one in model.named_modules() if id(one) in found.modules}


# What a pattern takes -------------------------------------------------------------------------------------------


def truth(model: nn.Module, patterns: list[str]) -> set[str]:
    """Every prefix of a name that ends at a dot, by the standard library's own matching."""
    found = set()
    for name in names(model):
        parts = name.split(".")
        prefixes = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
        if any(fnmatchcase(prefix, pattern) for prefix in prefixes for pattern in patterns):
            found.add(name)
    return found


@pytest.mark.parametrize(
    "asked",
    ["h.1", "h.*.attn.*", "h.?.mlp", "*.weight", "h.[02].mlp.0", "*", "head.bias", "h", ["inp", "h.10.*.2.bias"]],
)
def test_a_pattern_takes_what_it_matches_and_all_that_lies_in_it(asked: Any) -> None:
    model = Tiny()
    expected = truth(model, [asked] if isinstance(asked, str) else asked)
    assert taken(model, asked)[0] == expected and expected


def test_a_name_takes_the_whole_module_and_not_its_namesakes() -> None:
    parameters, modules = taken(Tiny(), "h.1")
    assert parameters == {name for name in names(Tiny()) if name.startswith("h.1.")}
    assert "h.1.mlp.1" in modules and not {name for name in modules if name.startswith("h.10")}


def test_a_pattern_that_matched_beginnings_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: h.1 that takes h.10."""
    monkeypatch.setattr(
        selection,
        "_matches",
        lambda expression, name: any(expression.match(name[:end]) for end in range(1, len(name) + 1)),
    )
    assert taken(Tiny(), "h.1")[0] != truth(Tiny(), ["h.1"])


def test_patterns_know_case() -> None:
    with pytest.raises(ValueError, match=r"'H.1' matches no name"):
        Selection("H.1").check(Tiny())


@pytest.mark.parametrize(
    ("asked", "modules"),
    [
        ("h.0.attn.*", {"h.0.attn", "h.0.attn.c_attn", "h.0.attn.c_proj"}),  # all of h.0.attn is
        ("head.weight", {"head"}),  # one of its own
        ("h.0.mlp.1", {"h.0.mlp.1"}),  # a layer without parameters
        ("h.0.mlp.0.*", {"h.0.mlp.0"}),  # part of h.0.mlp, which is not taken
    ],
)
def test_modules_are_taken_with_their_parameters(asked: str, modules: set[str]) -> None:
    assert taken(Tiny(), asked)[1] == modules


def test_a_function_is_asked_of_every_parameter_and_module() -> None:
    model, asked = Tiny(), []

    def select(name: str, thing: Any) -> bool:
        asked.append((name, thing))
        return isinstance(thing, nn.Linear) or (isinstance(thing, nn.Parameter) and thing.ndim == 1)

    parameters, modules = taken(model, select)
    assert parameters == {name for name in names(model) if name.endswith("bias")}
    assert modules == {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    expected = [*model.named_parameters(), *model.named_modules()]
    assert {(name, id(thing)) for name, thing in asked} == {(name, id(thing)) for name, thing in expected}


class Tied(nn.Module):
    """An output layer that shares its weight with the embedding, registered before it; and a shared module."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 9, bias=False)
        self.wte = nn.Embedding(9, 4)
        self.wte.weight = self.head.weight
        self.a = nn.Linear(4, 4)
        self.b = self.a

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(self.wte(x))))  # type: ignore[no-any-return]


def test_any_name_of_a_tied_parameter_and_of_a_shared_module_will_do() -> None:
    assert taken(Tied(), "wte") == ({"head.weight"}, {"head", "wte"})
    assert taken(Tied(), "b.*") == ({"a.weight", "a.bias"}, {"a"})


def test_a_model_that_holds_itself_can_be_selected_from() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].parent = model
    assert taken(model, "0.weight") == ({"0.weight"}, {"0"})


# What is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("h.11", r"layers='h.11' matches no name of this Tiny. There are \d+ names, such as 'inp', "),
        (["inp", "nothing.*"], "layers='nothing.*' matches no name"),
        ("", "layers='': give a pattern for names, such as"),
        ([], r"layers=\[\]: give a pattern"),
        (3, "layers=3: give a pattern"),
        ([3], r"layers=\[3\]: give a pattern"),
        (nn.Linear(1, 1), "layers=Linear.*: give a pattern"),
        (lambda name, thing: False, r"layers= selects nothing of this Tiny. There are \d+ names, such as 'inp'"),
        (lambda name, thing: thing.ndim > 1, "raised AttributeError for the model itself.*every module"),
        (lambda name: True, "raised TypeError for"),
        (lambda name, thing: torch.ones(2), "raised RuntimeError for"),
    ],
)
def test_a_selection_that_makes_no_sense_is_refused_before_training(asked: Any, told: str, tmp_path: Path) -> None:
    model = Tiny()
    before = copy.copy(model._forward_pre_hooks)
    with pytest.raises(ValueError, match=told):
        holter.watch(model, torch.optim.SGD(model.parameters(), 0.1), run=tmp_path / "run", layers=asked)
    assert not (tmp_path / "run").exists() and model._forward_pre_hooks == before


# What is measured -----------------------------------------------------------------------------------------------


class Watched:
    """Some steps of a small model with everything measured at each, beside plain torch."""

    def __init__(self, layers: Any = None, clip: float | None = None, **more: Any) -> None:
        torch.manual_seed(0)
        self.model = Tiny()
        self.optimizer = torch.optim.SGD(more.pop("parameters", list)() or self.model.parameters(), 0.1)
        options = {"run": False, "budget": None, "weights": 1, "updates": 1, "activations": 1, "histograms": 1}
        self.monitor = holter.watch(self.model, self.optimizer, layers=layers, diagnose=False, **{**options, **more})
        self.norms: list[dict[str, float]] = []
        self.totals: list[float] = []
        for _ in range(3):
            self.step(clip)

    def step(self, clip: float | None = None) -> None:
        self.model(torch.randn(5, 4)).square().mean().backward()
        gradients = {n: p.grad.double() for n, p in self.model.named_parameters() if p.grad is not None}
        self.norms.append({name: float(gradient.norm()) for name, gradient in gradients.items()})
        self.totals.append(float(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm()))
        if clip is not None:
            self.monitor.clip_grad_norm_(clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seen(self, role: str) -> set[str]:
        assert self.monitor.findings == ()
        return set(self.monitor.history.layers(role))

    def scalar(self, name: str) -> list[float]:
        return self.monitor.history.scalar(name)[1].tolist()


def test_only_what_is_selected_is_measured_in_every_role() -> None:
    watched = Watched("h.*.attn.*")
    expected = truth(watched.model, ["h.*.attn.*"])
    for role in ("gradient", "weight", "update"):
        assert watched.seen(role) == expected
    assert watched.seen("activation") == {f"h.{i}.attn.{part}" for i in range(11) for part in ("c_attn", "c_proj")}
    _, layers, norms = watched.monitor.history.series("gradient", "norm")
    for measured, truly in zip(norms, watched.norms, strict=True):
        assert dict(zip(layers, measured, strict=True)) == pytest.approx({n: truly[n] for n in layers}, rel=1e-6)


def test_a_selection_that_is_ignored_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: layers that are measured whatever was asked for."""
    nothing = property(lambda self: frozenset(), lambda self, ids: None)
    monkeypatch.setattr("holter.capture.Layers.left_out", nothing, raising=False)
    assert Watched("h.*.attn.*").seen("gradient") == names(Tiny())


def test_attention_is_seen_where_all_of_it_is_selected() -> None:
    training = make("transformer+dropout")
    monitor = holter.watch(
        training.model, training.optimizer, run=False, budget=None, layers="body.layers.1.self_attn.*"
    )
    training.step()
    assert monitor.history.layers("attention") == ("body.layers.1.self_attn",)
    assert isinstance(training.model, Encoder) and monitor.findings == ()


def test_dropout_and_its_like_are_left_out_whatever_is_selected() -> None:
    training = make("mlp")
    monitor = holter.watch(training.model, training.optimizer, run=False, budget=None, layers="*")
    training.step()
    assert set(monitor.history.layers("activation")) == {"0", "1", "3"}


def test_run_json_says_what_was_selected(tmp_path: Path) -> None:
    model = Tiny()
    holter.watch(model, torch.optim.SGD(model.parameters(), 0.1), run=tmp_path / "run", layers="head").close()
    selected = {layer["name"]: layer["selected"] for layer in holter.open_run(tmp_path / "run").layers}
    assert {name for name, is_it in selected.items() if is_it} == {"head.weight", "head.bias"}
    assert selected.keys() == names(model)


# A model that changes -------------------------------------------------------------------------------------------


def test_what_is_added_later_is_selected_by_the_same_patterns() -> None:
    """P26."""
    watched = Watched("h.*.attn.*")
    for _ in range(2):
        watched.model.h.append(Block())
        watched.optimizer.add_param_group({"params": watched.model.h[-1].parameters()})
        watched.step()
    expected = truth(watched.model, ["h.*.attn.*"])
    assert watched.seen("gradient") == expected and "h.12.attn.c_attn.weight" in expected
    assert {"h.12.attn.c_attn", "h.12.attn.c_proj"} <= watched.seen("activation")


def test_a_function_that_fails_later_is_told_of_and_the_rest_is_measured() -> None:
    def select(name: str, thing: Any) -> bool:
        if name.startswith("h.11"):
            raise KeyError(name)
        return name.startswith("h.1")

    watched = Watched(select)
    watched.model.h.append(Block())
    watched.optimizer.add_param_group({"params": watched.model.h[-1].parameters()})
    watched.step()
    assert len(watched.monitor.history) == 4 and watched.monitor.state == "degraded"
    (finding,) = watched.monitor.findings
    assert "ask the function given as layers= about a layer, which is not measured: KeyError" in finding.advice
    _, layers, norms = watched.monitor.history.series("gradient", "norm")
    assert set(layers) == {name for name in names(watched.model) if name.startswith(("h.1.", "h.10."))}
    assert np.isfinite(norms[-1]).all()


def test_a_selected_model_can_be_garbage_collected() -> None:
    """P3: patterns and functions that do not refer to the model."""
    for asked in ("head", lambda name, thing: "head" in name):
        watched = Watched(asked)
        model = weakref.ref(watched.model)
        watched.model = watched.optimizer = None  # type: ignore[assignment]
        gc.collect()
        assert model() is None


def test_a_model_without_a_selection_is_measured_whole() -> None:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False, budget=None, layers=None)
    training.step()
    assert set(training.monitor.history.layers("gradient")) == names(mlp())
