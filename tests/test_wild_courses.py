"""Healthy trainings whose course is unusual: a search that has converged, an optimizer made anew, fixed tables."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import holter
from holter.diagnosis.finding import Finding
from tests.wild_trainings import CLASSES, INPUTS, Training, alarms, vectors


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def warnings(monitor: holter.Monitor) -> list[Finding]:
    assert monitor.flush(30)
    return [finding for finding in monitor.findings if finding.severity != "info"]


def test_a_search_along_lines_that_has_converged_writes_its_weights() -> None:
    model = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=20, line_search_fn="strong_wolfe", tolerance_grad=0.05)
    x = torch.linspace(-1, 1, 64)[:, None]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), torch.sin(2 * x))
        loss.backward()
        return loss

    with holter.watch(model, optimizer, run=False) as monitor:
        losses = []
        for _ in range(40):
            losses.append(optimizer.step(closure).item())
            monitor.log(loss=losses[-1])
        assert losses[-1] == losses[-2] < 0.1 * losses[0]  # it stands still
        assert warnings(monitor) == []


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def pruned(model: nn.Sequential) -> None:
    for place in (0, 2):
        prune.l1_unstructured(model[place], "weight", amount=0.3)


def unfrozen(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)


def unchanged(model: nn.Sequential) -> None:
    pass


@pytest.mark.parametrize("change", [pruned, unfrozen, unchanged])
def test_an_optimizer_made_anew_has_lost_its_state_unless_it_has_other_layers(
    change: Callable[[nn.Sequential], None],
) -> None:
    model, batch = mlp(), vectors()
    model[0].requires_grad_(change is not unfrozen)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    with holter.watch(model, optimizer, run=False) as monitor:
        for step in range(60):
            if step == 30:
                change(model)
                optimizer = torch.optim.Adam(model.parameters(), 1e-3)
            x, y = batch(step)
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
        causes = [finding.cause for finding in warnings(monitor)]
    assert causes == (["optimizer-state-lost"] if change is unchanged else [])


class Positions(nn.Module):
    """A fixed table, kept as a parameter that does not learn."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(INPUTS, 32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class Positioned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.positions = nn.Linear(1, 32), Positions()
        self.mix, self.head = nn.Linear(32, 32), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.mix(self.positions(self.up(x[..., None])))).mean(1))


def test_a_fixed_table_in_a_module_of_its_own_is_not_frozen_by_mistake() -> None:
    assert alarms(Training(Positioned(), vectors(), steps=30)) == []


def test_weights_that_are_not_trained_are_not_judged_by_how_they_begin() -> None:
    """A frozen model has its weights from an earlier training."""
    base = [nn.Linear(INPUTS, INPUTS) for _ in range(4)]
    for layer in base:
        nn.init.normal_(layer.requires_grad_(False).weight, std=0.05)
    model = nn.Sequential(nn.Linear(INPUTS, INPUTS), *base, nn.Linear(INPUTS, CLASSES))
    optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], 1e-2)
    assert "init-too-small" not in [cause for cause, _ in alarms(Training(model, vectors(), optimizer=optimizer))]


def lazy_course(watched: bool) -> tuple[list[Tensor], list[float], list[float]]:
    """Weights, norms as torch has them, and norms as recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyConv1d(8, 3), nn.LazyBatchNorm1d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    monitor = holter.watch(model, optimizer, run=False, budget=None) if watched else None
    truth, recorded = [], []
    for step in range(10):
        x, y = vectors()(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x[:, None]), y).backward()
        truth.append(float(torch.cat([one.grad.flatten() for one in model.parameters()]).double().norm()))
        optimizer.step()
    if monitor is not None:
        assert warnings(monitor) == [] and monitor.state == "watching"
        assert monitor.history.series("gradient", "norm")[1] == tuple(name for name, _ in model.named_parameters())
        recorded = monitor.history.scalar("gradient_norm")[1].tolist()
        monitor.close()
    return [one.detach().clone() for one in model.parameters()], truth, recorded


def test_a_model_may_get_its_shapes_with_its_first_batch() -> None:
    (bare, _, _), (weights, truth, recorded) = lazy_course(False), lazy_course(True)
    assert recorded == pytest.approx(truth, rel=1e-6)
    assert all(torch.equal(one, other) for one, other in zip(bare, weights, strict=True))
