"""torch's own clip, called by the user or a framework: the norm before it is seen, of the right model, and torch is as
before once nobody watches."""

from __future__ import annotations

import copy
import inspect
import multiprocessing
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as imported_early

import holter
from holter import capture, clipping
from holter.cadence import Cadence
from tests.models import make

MAX_NORM = 1e-3  # far below what any step has: every one is clipped
CELLS = [clipping.cell_of(name) for name in (clipping._CLIP, clipping._NORM)]


def torchs_own() -> list[Any]:
    """What torch's functions call."""
    return [cell.cell_contents for cell in CELLS]


@pytest.fixture(autouse=True)
def torch_stays_as_it_was() -> Iterator[None]:
    for left_open in tuple(capture._listening):  # by another test
        capture._listen_no_more(left_open)
    before = torchs_own()
    yield
    assert torchs_own() == before


def norm_of(parameters: Sequence[Tensor]) -> float:
    squares = [parameter.grad.double().square().sum() for parameter in parameters if parameter.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


def small(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return model, torch.optim.SGD(model.parameters(), 0.1)


def backward(model: nn.Module, scale: float = 1.0) -> None:
    (scale * model(torch.randn(4, 6)).square().sum()).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Any, steps: int = 6) -> list[float]:
    """The norms before clipping, in float64."""
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        norms.append(norm_of(list(model.parameters())))
        clip(model)
        optimizer.step()
    return norms


CLIPS = {
    "by its name": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
    "imported before": lambda model: imported_early(list(model.parameters()), max_norm=MAX_NORM),
    "in two parts": lambda model: torch.nn.utils.clip_grads_with_norm_(
        (parameter for parameter in model.parameters()),  # can be gone through only once
        MAX_NORM,
        torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]),
    ),
}


@pytest.mark.parametrize("how", CLIPS)
def test_the_norm_before_the_clip_is_recorded(how: str) -> None:
    model, optimizer = small()
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        norms = train(model, optimizer, CLIPS[how])
    history = monitor.history
    for name in ("gradient_norm", "clip_norm"):
        assert history.scalar(name)[1].tolist() == pytest.approx(norms, rel=1e-6)
    assert set(history.scalar("clip_max_norm")[1].tolist()) == {MAX_NORM}
    layers = history.series("gradient", "norm")[2]
    assert np.sqrt((layers**2).sum(axis=1)).tolist() == pytest.approx(norms, rel=1e-6)
    assert {record.notes["gradients_read_at"] for record in monitor._writer.records if not record.late} == {"clip"}


def test_unseen_a_clipped_run_would_look_calm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: nobody stands before torch's clip."""
    monkeypatch.setattr(clipping.Stand, "_clip_stand_in", lambda _, inner: inner)
    model, optimizer = small()
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        norms = train(model, optimizer, CLIPS["by its name"])
    found = monitor.history.scalar("gradient_norm")[1]
    assert found.tolist() == pytest.approx([MAX_NORM] * 6, rel=1e-2) and min(norms) > 100 * MAX_NORM
    assert {record.notes["gradients_read_at"] for record in monitor._writer.records if not record.late} == {"step"}


def test_the_same_is_recorded_as_by_the_monitors_clip() -> None:
    recorded = []
    for is_own in (True, False):
        training = make("mlp")
        training.monitor = holter.watch(training.model, training.optimizer, run=False, budget=None)
        if not is_own:
            parameters = list(training.model.parameters())
            training.monitor.clip_grad_norm_ = lambda limit, held=parameters: imported_early(held, limit)
        for _ in range(8):
            training.step()
        training.monitor.close()
        history = training.monitor.history
        recorded.append(
            [history.scalar(name)[1] for name in ("gradient_norm", "clip_norm", "clip_max_norm")]
            + [history.series("gradient", "norm")[2]]
        )
    for own, torchs in zip(*recorded, strict=True):
        np.testing.assert_array_equal(own, torchs)


def test_two_models_in_one_process_see_their_own_clips() -> None:
    (one, first), (other, second) = small(1), small(2)
    with (
        holter.watch(one, first, run=False, budget=None) as watched,
        holter.watch(other, second, run=False, budget=None) as clipped,
    ):
        for _ in range(4):
            norms = []
            for model, optimizer in ((one, first), (other, second)):
                optimizer.zero_grad()
                backward(model, scale=3.0)
                norms.append(norm_of(list(model.parameters())))
            imported_early(other.parameters(), MAX_NORM)  # of one model only
            first.step()
            second.step()
            assert watched.history.scalar("gradient_norm")[1][-1] == pytest.approx(norms[0], rel=1e-6)
            assert clipped.history.scalar("gradient_norm")[1][-1] == pytest.approx(norms[1], rel=1e-6)
    assert "clip_norm" in clipped.history.scalars and "clip_norm" not in watched.history.scalars


def test_both_models_of_one_clip_are_seen() -> None:
    """As a GAN's trainer might: the norm is of both, and so no norm of either."""
    (one, first), (other, second) = small(1), small(2)
    with holter.watch(one, first, run=False, budget=None) as monitor:
        backward(one)
        backward(other)
        own = norm_of(list(one.parameters()))
        both = float(imported_early([*one.parameters(), *other.parameters()], MAX_NORM))
        first.step()
        second.step()
    history = monitor.history
    layers = history.series("gradient", "norm")[2]
    assert np.sqrt((layers**2).sum(axis=1)).tolist() == pytest.approx([own], rel=1e-6)
    assert history.scalar("gradient_norm")[1].tolist() == pytest.approx([own], rel=1e-6)
    assert history.scalar("clip_norm")[1].tolist() == pytest.approx([both], rel=1e-6)


def by_layer(model: nn.Module) -> None:
    for part in (model[0], model[2]):  # type: ignore[index]
        imported_early(part.parameters(), MAX_NORM)


@pytest.mark.parametrize("every", [1, 4])
def test_groups_that_are_clipped_one_after_the_other_are_read_before_the_first(every: int) -> None:
    model, optimizer = small()
    with holter.watch(model, optimizer, run=False, budget=None, every=every) as monitor:
        norms = train(model, optimizer, by_layer)
    history = monitor.history
    assert history.scalar("gradient_norm")[1].tolist() == pytest.approx(norms[::every], rel=1e-6)
    assert "clip_norm" not in history.scalars, "there is no norm of all"


def test_groups_that_cannot_be_paid_for_at_the_clip_are_not_measured_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scaled as they are by then, they would look calm."""
    wanted = Cadence.is_wanted
    monkeypatch.setattr(
        Cadence, "is_wanted", lambda self, kind, every: kind != "gradient" and wanted(self, kind, every)
    )
    model, optimizer = small()
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        train(model, optimizer, by_layer)
    assert monitor.history.scalar("step_time")[0].size == 6
    assert "gradient_norm" not in monitor.history.scalars and "gradient" not in monitor.history.roles


def test_a_clip_of_every_micro_batch_is_read_at_the_last() -> None:
    model, optimizer = small()
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        for _ in range(2):
            backward(model)
            last = norm_of(list(model.parameters()))
            imported_early(model.parameters(), MAX_NORM)
        optimizer.step()
    assert monitor.history.scalar("gradient_norm")[1].tolist() == pytest.approx([last], rel=1e-6)


def test_another_kind_of_norm_is_not_taken_for_the_gradients_length() -> None:
    model, optimizer = small()
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        backward(model)
        norm, largest = norm_of(list(model.parameters())), max(float(p.grad.abs().max()) for p in model.parameters())
        imported_early(model.parameters(), MAX_NORM, norm_type=float("inf"))
        optimizer.step()
    history = monitor.history
    assert history.scalar("gradient_norm")[1].tolist() == pytest.approx([norm], rel=1e-6)
    assert history.scalar("clip_norm")[1].tolist() == pytest.approx([largest], rel=1e-6)


def test_what_torch_does_is_the_same() -> None:
    """P2: bit for bit, with what it returns and what it raises."""
    results = []
    for is_watched in (True, False):
        model, optimizer = small()
        monitor = holter.watch(model, optimizer, run=False, budget=None) if is_watched else None
        torch.manual_seed(5)
        backward(model)
        returned = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False)
        results.append([returned, *(parameter.grad.clone() for parameter in model.parameters())])
        with pytest.raises(RuntimeError, match="non-finite"):
            next(model.parameters()).grad.fill_(float("nan"))
            imported_early(model.parameters(), 0.5, error_if_nonfinite=True)
        with pytest.raises(TypeError):
            imported_early(7, 0.5)
        if monitor is not None:
            monitor.close()
            assert not monitor.findings
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_whatever_fails_in_seeing_it_the_clip_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1."""
    model, optimizer = small()
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        monkeypatch.setattr(monitor._collector.gradients, "torch_clips", lambda *_: 1 / 0)
        backward(model)
        imported_early(model.parameters(), MAX_NORM)
        assert norm_of(list(model.parameters())) == pytest.approx(MAX_NORM, rel=1e-2)
        optimizer.step()
        assert [finding.cause for finding in monitor.findings] == ["monitor-degraded"]


def test_a_compiled_clip_has_no_break_in_its_graph() -> None:
    model, optimizer = small()
    with holter.watch(model, optimizer, run=False, budget=None):
        backward(model)
        parameters = list(model.parameters())
        compiled = torch.compile(lambda: imported_early(parameters, MAX_NORM), backend="eager", fullgraph=True)
        norm = norm_of(parameters)
        assert float(compiled()) == pytest.approx(norm, rel=1e-6)
        assert norm_of(parameters) == pytest.approx(MAX_NORM, rel=1e-2)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_monitors_leave_in_any_order(order: tuple[int, ...]) -> None:
    """P3: the last one to go leaves torch as it was."""
    before, pairs = torchs_own(), [small(seed) for seed in range(3)]
    monitors = [holter.watch(*pair, run=False) for pair in pairs]
    assert torchs_own() != before
    for place, following in pairwise((*order, None)):
        monitors[place].close()  # type: ignore[index]
        assert (torchs_own() == before) == (following is None)


def test_somebody_elses_stand_in_is_left_alone() -> None:
    model, optimizer = small()
    cell = CELLS[0]
    original = cell.cell_contents
    monitor = holter.watch(model, optimizer, run=False)
    inner = cell.cell_contents

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    cell.cell_contents = theirs
    monitor.close()
    assert cell.cell_contents is theirs
    backward(model)
    imported_early(model.parameters(), MAX_NORM)
    assert norm_of(list(model.parameters())) == pytest.approx(MAX_NORM, rel=1e-2)
    cell.cell_contents = original


# Several optimizers, groups and steps not taken ---------------------------------------------------------------------


def adversaries() -> tuple[nn.ModuleDict, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in "dg"})
    return model, [torch.optim.SGD(part.parameters(), 0.01) for part in model.values()]


@pytest.mark.parametrize("clipped", ["", "d", "g", "dg"])
@pytest.mark.parametrize("every", [1, 3])
def test_each_optimizer_has_its_own_gradients_whichever_are_clipped(clipped: str, every: int) -> None:
    """As in a GAN that is one module, whose halves take their steps in turn."""
    model, optimizers = adversaries()
    norms = []
    with holter.watch(model, optimizers, run=False, budget=None, every=every, diagnose=False) as monitor:
        for _ in range(3):
            for (name, part), optimizer in zip(model.items(), optimizers, strict=True):
                optimizer.zero_grad()
                (10 * part(torch.randn(2, 4)).square().sum()).backward()
                norms.append((name, norm_of(list(part.parameters()))))
                if name in clipped:
                    imported_early(part.parameters(), MAX_NORM)
                optimizer.step()
    for record, (name, norm) in zip([one for one in monitor._writer.records if not one.late], norms, strict=True):
        if "gradient" in record.rows or name in clipped:
            assert record.scalars["gradient_norm"] == pytest.approx(norm, rel=1e-6)
        assert ("clip_norm" in record.scalars) == (name in clipped)
        if "gradient" in record.rows:
            assert set(record.rows["gradient"].layers) == {f"{name}.weight", f"{name}.bias"}


def test_what_was_not_clipped_is_read_where_its_optimizer_takes_it() -> None:
    """The other half has gradients already when the first is clipped, and more are added to them in place."""
    model, (first, second) = adversaries()
    with holter.watch(model, [first, second], run=False, budget=None, diagnose=False) as monitor:
        for part in model.values():
            (10 * part(torch.randn(2, 4)).square().sum()).backward()
        imported_early(model["d"].parameters(), MAX_NORM)
        (10 * model["g"](torch.randn(2, 4)).square().sum()).backward()
        norm = norm_of(list(model["g"].parameters()))
        second.step()
    assert monitor.history.scalar("gradient_norm")[1].tolist() == pytest.approx([norm], rel=1e-6)


@pytest.mark.parametrize("budget", [None, 0])
def test_one_clip_of_all_is_that_of_the_step_that_both_optimizers_take(budget: float | None) -> None:
    """They share a backward: one training step, and its norm is that of all gradients, measured or not."""
    model, optimizers = adversaries()
    with holter.watch(model, optimizers, run=False, budget=budget, diagnose=False) as monitor:
        for part in model.values():
            (10 * part(torch.randn(2, 4)).square().sum()).backward()
        norm = norm_of(list(model.parameters()))
        imported_early(model.parameters(), MAX_NORM)
        for optimizer in optimizers:
            optimizer.step()
    history = monitor.history
    for name in ("gradient_norm", "clip_norm"):
        assert history.scalar(name)[1].tolist() == pytest.approx([norm], rel=1e-6)
    assert history.scalar("gradient_norm_clipped")[1].tolist() == pytest.approx([MAX_NORM], rel=1e-3)


def test_a_parameter_without_a_gradient_does_not_hide_the_clip_of_the_others() -> None:
    model, optimizer = small()
    model[0].requires_grad_(False)  # type: ignore[index]
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        norms = train(model, optimizer, lambda model: imported_early(model[2].parameters(), MAX_NORM))
    assert [record.notes["gradients_read_at"] for record in monitor.history.records] == ["clip"] * 6
    assert monitor.history.scalar("clip_norm")[1].tolist() == pytest.approx(norms, rel=1e-6)


def test_a_clip_whose_step_is_not_taken_leaves_nothing_to_the_next() -> None:
    """Also where nobody calls the model itself, so that no forward of it is seen."""
    model, optimizer = small()
    with holter.watch(model, optimizer, run=False, budget=None, diagnose=False) as monitor:
        for scale, is_taken in ((1000.0, False), (1.0, True)):
            optimizer.zero_grad()
            (scale * model[2](torch.tanh(model[0](torch.randn(4, 6)))).square().sum()).backward()  # type: ignore[index]
            norm = norm_of(list(model.parameters()))
            if is_taken:
                optimizer.step()
            else:
                imported_early(model.parameters(), 1e9)
    assert monitor.history.scalar("gradient_norm")[1].tolist() == pytest.approx([norm], rel=1e-6)
    assert "clip_norm" not in monitor.history.scalars


@pytest.mark.parametrize("budget", [None, 0])
def test_a_group_without_gradients_loses_no_record(budget: float | None) -> None:
    """One that is frozen, and clipped last; and where no rows are taken, a part's norm is not that of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with holter.watch(model, optimizer, run=False, budget=budget, every=4, diagnose=False) as monitor:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(2, 4)).square().sum().backward()
            for part in model:
                imported_early(part.parameters(), MAX_NORM)
            optimizer.step()
    assert not monitor.findings
    assert monitor.history.scalar("learning_rate")[0].tolist() == list(range(6))
    assert "clip_norm" not in monitor.history.scalars
    assert monitor.history.scalar("gradient_norm")[0].tolist() == ([] if budget == 0 else [0, 4])


@pytest.mark.parametrize("how", ["none", "whole", "by layer"])
def test_the_planned_ratio_is_that_of_what_the_clip_left(how: str) -> None:
    """E2: plain SGD changes weights by exactly rate times gradient."""
    model, optimizer = small()
    with holter.watch(model, optimizer, run=False, budget=None, updates=1, diagnose=False) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            if how == "whole":
                imported_early(model.parameters(), 1e-2)
            elif how == "by layer":
                by_layer(model)
            optimizer.step()
    ratios, planned = (monitor.history.series("update", name)[2] for name in ("ratio", "planned_ratio"))
    weights = [0, 2]
    np.testing.assert_allclose(planned[:, weights], ratios[:, weights], rtol=1e-3)


def test_a_stand_in_that_stays_tells_no_later_monitor() -> None:
    """Somebody wraps it, the monitor closes, another one opens: gradients are read once."""
    model, optimizer = small()
    cell = CELLS[0]
    original = cell.cell_contents
    holter_one = holter.watch(model, optimizer, run=False)
    inner = cell.cell_contents
    cell.cell_contents = lambda *args, **kwargs: inner(*args, **kwargs)
    holter_one.close()
    seen = []
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        read = monitor._collector.gradients.torch_clips
        monitor._collector.gradients.torch_clips = lambda *told: seen.append(told) or read(*told)  # type: ignore[func-returns-value]
        backward(model)
        imported_early(model.parameters(), MAX_NORM)
    assert len(seen) == 1
    cell.cell_contents = original


def test_a_clip_of_another_model_costs_no_walk_through_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    (one, first), (other, _) = small(1), small(2)
    with holter.watch(one, first, run=False, budget=None) as monitor:
        walks = []
        monkeypatch.setattr(monitor._collector._layers, "everything", lambda: walks.append(1))
        backward(other)
        for parameter in other.parameters():
            imported_early(parameter, MAX_NORM)
        assert not walks


def test_a_step_that_is_not_measured_costs_no_walk_and_has_its_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small()
    options = dict.fromkeys(("updates", "weights", "activations", "optimizer_state"))
    with holter.watch(model, optimizer, run=False, budget=None, every=100, **options) as monitor:
        norms = train(model, optimizer, lambda model: imported_early(model.parameters(), MAX_NORM), steps=1)
        monkeypatch.setattr(capture, "_walk", lambda model: pytest.fail("a walk"))
        norms += train(model, optimizer, lambda model: imported_early(model.parameters(), MAX_NORM))
    assert monitor.history.scalar("gradient_norm")[1].tolist() == pytest.approx(norms, rel=1e-6)
    assert not monitor._problems


class Asked(nn.Parameter):
    """Counts who asks for its gradient."""

    asked = 0

    @property
    def grad(self) -> Tensor | None:  # type: ignore[override]
        Asked.asked += 1
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_that_is_not_measured_hardly_asks_for_gradients(clips: bool) -> None:
    """Of 10,000 parameters that takes ten milliseconds. At a clip, which asks for all of them, it may be done once."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    for part in (model[0], model[2]):
        part.weight, part.bias = Asked(part.weight.data), Asked(part.bias.data)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def asked_in_a_step() -> int:
        optimizer.zero_grad()
        backward(model)
        before = Asked.asked
        if clips:
            imported_early(model.parameters(), MAX_NORM)
        optimizer.step()
        return Asked.asked - before

    alone = asked_in_a_step()
    options = dict.fromkeys(("updates", "weights", "activations", "optimizer_state"))
    with holter.watch(model, optimizer, run=False, budget=None, every=100, **options) as monitor:
        asked_in_a_step()
        watched = [asked_in_a_step() for _ in range(3)]
    assert alone > 0 and not monitor._problems
    # Of each once, and of the first whether it is still the same.
    assert watched == [alone + (6 if clips else 0)] * 3


def test_a_torch_whose_parts_have_other_names_is_told_and_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(torch.nn.utils, "get_total_norm")
    model, optimizer = small()
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        backward(model)
        imported_early(model.parameters(), MAX_NORM)
        optimizer.step()
        monitor.flush()
        assert len(monitor.history) == 1
    assert "no get_total_norm of torch's own in this torch" in caplog.text
    assert not hasattr(torch.nn.utils, "get_total_norm")


# What else is done with torch's functions -------------------------------------------------------------------------

FUNCTIONS = (
    *("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "get_total_norm"),
    *("clip_grad._clip_grads_with_norm_", "clip_grad._get_total_norm", "clip_grad.clip_grad_norm_"),
)
BEFORE = {name: attrgetter(name)(torch.nn.utils) for name in FUNCTIONS}


def looks(function: Any) -> list[Any]:
    """As Python shows it."""
    return [
        inspect.signature(function),
        inspect.getsource(function),
        *(getattr(function, name) for name in ("__module__", "__qualname__", "__doc__", "__code__", "__wrapped__")),
    ]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_torchs_functions_are_the_same_objects_while_a_monitor_is_open(name: str) -> None:
    """P3: for pickle, copies, comparisons and inspection, imported before or after."""
    before, pair = looks(BEFORE[name]), small()
    with holter.watch(*pair, run=False):
        function = attrgetter(name)(torch.nn.utils)
        assert function is BEFORE[name]
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(function, protocol)) is function
        assert copy.copy(function) is copy.deepcopy(function) is function
        assert copy.deepcopy(partial(function, max_norm=1.0)).func is function
        assert looks(function) == before


def test_a_started_process_gets_torchs_functions() -> None:
    pair = small()
    with (
        holter.watch(*pair, run=False),
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
    ):
        parameter = nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        assert pool.submit(torch.nn.utils.get_total_norm, [parameter.grad.clone()]).result().item() == 2.0
        assert pool.submit(torch.nn.utils.clip_grads_with_norm_, parameter, 1.0, torch.tensor(2.0)).result() is None
