"""torch's own clip, called by the user or a framework: the norm before it is seen, of the right model, and torch is as
before once nobody watches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as imported_early

import holter
from holter import clipping
from tests.models import make

MAX_NORM = 1e-3  # far below what any step has: every one is clipped
PARTS = [(module, name) for module, name in (*clipping._PLACES, *clipping._NORMS)]


def torchs_own() -> list[Any]:
    return [getattr(module, name) for module, name in PARTS]


@pytest.fixture(autouse=True)
def torch_stays_as_it_was() -> Iterator[None]:
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
    monkeypatch.setattr(clipping, "_PLACES", ())
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


@pytest.mark.parametrize("watched", [True, False])
def test_what_torch_does_is_the_same(watched: bool) -> None:
    """P2: bit for bit, with what it returns and what it raises."""
    results = []
    for is_watched in (watched, False):
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
        monkeypatch.setattr(monitor._collector, "torch_clips", lambda *_: 1 / 0)
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


def test_somebody_elses_stand_in_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = small()
    module, name = PARTS[0]
    original = getattr(module, name)
    monitor = holter.watch(model, optimizer, run=False)
    inner = getattr(module, name)

    def theirs(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    setattr(module, name, theirs)
    monitor.close()
    assert getattr(module, name) is theirs
    backward(model)
    imported_early(model.parameters(), MAX_NORM)
    assert norm_of(list(model.parameters())) == pytest.approx(MAX_NORM, rel=1e-2)
    setattr(module, name, original)
