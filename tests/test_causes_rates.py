"""Rates and decays that are far too high, where the loss alone does not say so: real trainings, all rules asked."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import holter
from holter.diagnosis.causes import rates
from holter.diagnosis.doctor import Doctor
from holter.record import Record
from tests.layer_trainings import WORDS, sentences, train
from tests.test_chart import rows


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def causes(path: Path, model: nn.Module, **options: Any) -> list[str]:
    """Of all findings, the most important first; that this machine became slower is none of the training's."""
    train(path / "run", model, **options)
    return [finding.cause for finding in holter.diagnose(path / "run") if finding.where != "performance"]


class Encoder(nn.Module):
    """The norm behind the branch, as in the first transformers: it needs a warm-up."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(width, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        logits: Tensor = self.out(self.encoder(self.table(x), mask=mask))
        return logits


def digits() -> Iterator[tuple[Tensor, Tensor]]:
    images, labels = load_digits(return_X_y=True)
    x, y, random = torch.tensor(images).float() / 16, torch.tensor(labels), torch.Generator().manual_seed(3)
    while True:
        chosen = torch.randint(len(x), (64,), generator=random)
        yield x[chosen], y[chosen]


def readers(*widths: int) -> nn.Sequential:
    """Of digits."""
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise((64, *widths, 10))]
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.GELU()) for layer in layers[:-1]), layers[-1])


def test_a_first_step_that_leaves_no_gradient_is_the_rates_and_not_the_depths(tmp_path: Path) -> None:
    model = Encoder(width=128, layers=6)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    found = causes(tmp_path, model, optimizer=optimizer, data=sentences(), steps=120)
    assert found[:1] == ["lr-too-high"] and "vanishing-gradient" not in found


def test_nor_is_anything_found_at_a_rate_that_is_right(tmp_path: Path) -> None:
    model = Encoder()
    optimizer = torch.optim.Adam(model.parameters(), 5e-4)
    assert causes(tmp_path, model, optimizer=optimizer, data=sentences(), steps=160, warmup=20) == []


def test_a_loss_that_comes_down_and_does_not_stay_there(tmp_path: Path) -> None:
    """A momentum of 0.995 makes the steps two hundred times as long, little by little."""
    model = readers(128)
    optimizer = torch.optim.SGD(model.parameters(), 0.3, momentum=0.995)
    assert causes(tmp_path, model, optimizer=optimizer, data=digits(), steps=250)[:1] == ["lr-too-high"]


def test_the_rate_that_is_advised_leaves_room_for_the_momentum(tmp_path: Path) -> None:
    """With a momentum of 0.9 steps grow ten times as long as the first one, and so do gradients that have run away."""

    def trained(rate: float, name: str) -> holter.Run:
        torch.manual_seed(0)
        model = readers(128, 128)
        optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
        train(tmp_path / name, model, optimizer=optimizer, data=digits(), steps=120)
        return holter.open_run(tmp_path / name)

    sick = next(finding for finding in trained(3.0, "sick").findings if finding.cause == "lr-too-high")
    advised = float(sick.advice.split(" to about ")[1].split(". ")[0])
    mended = trained(advised, "mended")
    losses = mended.history.scalar("loss")[1]
    assert [finding for finding in mended.findings if finding.severity != "info"] == []
    assert losses[-10:].mean() < 0.5 * losses[0]


def test_a_decay_so_strong_that_it_is_over_after_a_few_looks(tmp_path: Path) -> None:
    """The weights fall to half of their size within twenty steps, and stay there."""
    model = readers(128, 128)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=20.0)
    assert causes(tmp_path, model, optimizer=optimizer, data=digits(), steps=150)[:1] == ["weight-decay-too-high"]


@pytest.mark.parametrize("rate", [0.03, 0.1, 0.3])
def test_a_training_that_has_come_to_its_end_was_not_knocked_out(tmp_path: Path, rate: float) -> None:
    """All examples at every step, and noise that nobody can learn: the gradient goes to zero, and the loss stays."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(256, 8, generator=random)
    y = x @ torch.randn(8, generator=random) + 2 * torch.randn(256, generator=random)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), rate)
    with holter.watch(model, optimizer, run=tmp_path / "run", budget=None) as monitor:
        for _ in range(200):
            loss = nn.functional.mse_loss(model(x)[:, 0], y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
    assert holter.diagnose(tmp_path / "run") == ()


def test_data_that_becomes_harder_is_not_the_rates_fault(tmp_path: Path) -> None:
    model, data = readers(64), digits()
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    with holter.watch(model, optimizer, run=tmp_path / "run", budget=None) as monitor:
        for step in range(220):
            x, y = next(data)
            hard = 1.0 if step < 120 else 3.0
            loss = nn.functional.mse_loss(model(x)[:, 0], hard * y / 3 + (hard - 1) * torch.randn(64))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
    assert "lr-too-high" not in [finding.cause for finding in holter.diagnose(tmp_path / "run")]


class TwoTasks(nn.Module):
    """A digit's class and its value, weighted as they are learnt: the gradient of what is learnt well grows."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.kind, self.value = readers(128, 64)[:4], nn.Linear(64, 10), nn.Linear(64, 1)
        self.doubt = nn.Parameter(torch.zeros(2))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        features, trust = self.trunk(x), (-self.doubt).exp()
        kind = nn.functional.cross_entropy(self.kind(features), y)
        value = nn.functional.mse_loss(self.value(features)[:, 0], y / 10)
        return trust[0] * kind + trust[1] * value + self.doubt.sum()


@pytest.mark.parametrize("seed", range(4))
def test_a_gradient_that_grows_while_the_loss_falls_does_not_outrun_its_second_moment(
    tmp_path: Path, seed: int
) -> None:
    torch.manual_seed(seed)
    model, data = TwoTasks(), digits()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    with holter.watch(model, optimizer, run=tmp_path / "run", budget=None) as monitor:
        for _ in range(120):
            loss = model.loss(*next(data))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
    assert holter.diagnose(tmp_path / "run") == ()


@pytest.mark.parametrize(("losses", "severity"), [((6.6, 5.9, 5.3, 3.5, 3.8), "info"), ((30.0,) * 8, "warning")])
def test_a_spike_that_a_few_steps_make_good_is_a_note(losses: tuple[float, ...], severity: str) -> None:
    """By hand: Adam's first step is a third of the weights, and the later ones a hundredth."""
    layers = ("a.weight", "b.weight")
    doctor = Doctor({"layers": [{"name": name, "shape": [8, 8]} for name in layers]}, [rates.no_warmup])
    for step, loss in enumerate([2.4, *losses, *np.geomspace(1.6, 0.1, 60)]):
        update = {"ratio": 0.3 if step < 2 else 0.01, "weight_norm": 2.0}
        told = {"update": rows(layers, **update), "second_moment": rows(layers, norm=1.0)} if step % 2 == 0 else {}
        doctor.take(Record(step, float(step), {"loss": float(loss), "learning_rate": 1e-3}, told))
    doctor.finish()
    assert [(one.cause, one.severity) for one in doctor.findings] == [("warmup-missing", severity)]
