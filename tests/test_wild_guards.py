"""Guards of the rules: trainings that are sound for a reason the rule must know, each beside a sick twin without it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from holter.diagnosis.causes import rates
from holter.diagnosis.doctor import Doctor
from holter.record import Record
from tests import odd_trainings as wild
from tests import wild_trainings as half
from tests.odd_trainings import Training, alarms, findings, regression
from tests.test_chart import rows

# A rate that the optimizer finds -----------------------------------------------------------------------------------


class DAdaptAdam(wild.Steps):
    """Take Adam's steps of length lr * d, where lr is 1 and d grows at every step, as D-Adaptation and Prodigy do."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] = min(group["growth"] * group["d"], group["most"])
        super().step(closure)

    def length(self, group: dict[str, Any], weight: Tensor, step: Tensor) -> float:
        return float(group["lr"] * group["d"])


def named(name: str) -> type[DAdaptAdam]:
    """Return the same optimizer under another name: by its name alone is known that it finds its rate."""
    return type(name, (DAdaptAdam,), {})


def _doubtful(kind: type[DAdaptAdam], first: float, growth: float) -> Training:
    """Learn classes two thirds of which are drawn at random: the loss comes down late."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model = wild.mlp(8, 64, 64, 4, act=nn.GELU)
        optimizer = kind(model.parameters(), 1.0, d=first, growth=growth, most=1.5e-2)

        def course() -> Iterator[wild.Logged]:
            while True:
                x = torch.randn(64, 8)
                y = torch.where(torch.rand(64) < 0.65, torch.randint(4, (64,)), x[:, :4].argmax(1))
                yield wild.stepped(optimizer, F.cross_entropy(model(x), y), inputs=x, targets=y)

        return model, optimizer, course()

    return begin


@pytest.mark.parametrize(("name", "steps"), [("DAdaptAdam", 60), ("DAdaptAdam", 150), ("Prodigy", 60), ("LDoG", 60)])
def test_an_optimizer_that_has_just_found_its_rate_has_none_that_is_too_high(name: str, steps: int) -> None:
    """At step 60 the steps are 0.2 of the weights, and the loss is still that of a guess."""
    assert findings(_doubtful(named(name), 1e-6, 1.25), steps) == []


def test_nor_has_an_optimizer_that_is_still_finding_it_one_that_is_too_low() -> None:
    assert findings(_doubtful(DAdaptAdam, 1e-7, 1.02), 60) == []


@pytest.mark.parametrize("name", ["ScheduledAdam", "Watchdog"])
@pytest.mark.parametrize(("first", "growth", "cause"), [(1e-6, 1.25, "lr-too-high"), (1e-7, 1.02, "lr-too-low")])
def test_the_same_steps_of_any_other_optimizer_are_named(name: str, first: float, growth: float, cause: str) -> None:
    assert alarms(_doubtful(named(name), first, growth), 60) == [cause]


# A sum that is meant -----------------------------------------------------------------------------------------------


def _variational() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
    """Sum the squared errors of all pixels of all images, as the usual example of an autoencoder does."""
    encoder, decoder = wild.mlp(64, 32, 16), wild.mlp(8, 32, 64)
    model = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    optimizer = Adam(model.parameters(), 1e-3)

    def course() -> Iterator[wild.Logged]:
        for step in itertools.count():
            x = torch.rand(16, 64)
            mean, log_variance = encoder(x).chunk(2, 1)
            out = decoder(mean + torch.randn_like(mean) * (log_variance / 2).exp())
            beside = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
            loss = F.mse_loss(out, x, reduction="sum") + min(1, step / 20) * beside
            yield wild.stepped(optimizer, loss, inputs=x, targets=x)

    return model, optimizer, course()


def test_a_sum_over_the_pixels_of_an_image_is_a_note() -> None:
    found = findings(_variational, 40)
    assert [(one.cause, one.severity) for one in found] == [("loss-reduction", "info")]


def test_a_sum_over_examples_of_one_number_each_is_a_warning() -> None:
    found = findings(regression(lambda p, y: F.mse_loss(p, y, reduction="sum"), size=1024), 12)
    assert [(one.cause, one.severity) for one in found] == [("loss-reduction", "warning")]


# A first loss that says little -------------------------------------------------------------------------------------


def _few_examples(rate: float) -> Training:
    """Learn from four examples per step, of which the first four are near zero and so is their loss."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model, weights = wild.mlp(8, 64, 64, 1, act=nn.GELU), torch.randn(8, 1) / 8**0.5
        optimizer = Adam(model.parameters(), rate)

        def course() -> Iterator[wild.Logged]:
            for step in itertools.count():
                x = torch.randn(4, 8) * (1.0 if step else 0.1)
                yield wild.stepped(optimizer, F.mse_loss(model(x), x @ weights), inputs=x, targets=x @ weights)

        return model, optimizer, course()

    return begin


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_first_loss_that_is_low_by_chance_is_no_start_to_come_down_from(seed: int) -> None:
    """Steps are 0.2 of the weights at first; the loss falls below what the first few dozen examples lose."""
    assert alarms(_few_examples(2e-2), 100, seed=seed) == []


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_rate_that_is_too_high_is_named_though_examples_are_few(seed: int) -> None:
    assert alarms(_few_examples(0.5), 100, seed=seed)[:1] == ["lr-too-high"]


# Zeros that float16 did not make -----------------------------------------------------------------------------------


class Bag(nn.Module):
    """Take the mean over the words of a long text; a batch uses few of the words that the table has."""

    def __init__(self, words: int = 20_000, width: int = 32) -> None:
        super().__init__()
        self.table, self.hidden = nn.Embedding(words, width), nn.Linear(width, 64)
        self.head = nn.Linear(64, half.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(torch.tanh(self.hidden(self.table(x).mean(1))))
        return logits


def _texts(step: int) -> half.Batch:
    random = torch.Generator().manual_seed(step)
    y = torch.randint(half.CLASSES, (32,), generator=random)
    return half.CLASSES * torch.randint(3000, (32, 240), generator=random) + y[:, None], y


class Attentive(nn.Module):
    """Read a short series with attention whose keys have a bias."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(16, width), half.Block(width), nn.Linear(width, half.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.block(self.first(x)).mean(1))
        return logits


def _series(step: int) -> half.Batch:
    centres = torch.randn(half.CLASSES, 8, 16, generator=torch.Generator().manual_seed(1))
    random = torch.Generator().manual_seed(1000 + step)
    y = torch.randint(half.CLASSES, (16,), generator=random)
    return centres[y] + torch.randn(16, 8, 16, generator=random), y


def _in_float16(kind: str, factor: float = 1.0) -> half.Training:
    torch.manual_seed(0)
    model, batch = {"rows that no text uses": (Bag, _texts), "the bias of the keys": (Attentive, _series)}[kind]
    return half.Training(
        model(), batch, lambda o, y: factor * half.cross_entropy(o, y), autocast=torch.float16, steps=20
    )


KINDS = ("rows that no text uses", "the bias of the keys")


def test_rows_of_a_table_that_a_batch_does_not_use_have_lost_nothing_in_float16() -> None:
    assert half.alarms(_in_float16("rows that no text uses"), budget=None) == []


def test_nor_has_a_bias_whose_gradient_is_zero_by_symmetry() -> None:
    """Of a tenth of the loss, so that what rounding leaves of it is often nothing."""
    assert half.alarms(_in_float16("the bias of the keys", 0.1), budget=None) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_float16_cannot_follow_is_named_in_the_same_models(kind: str) -> None:
    found = half.alarms(_in_float16(kind, 1e-5), budget=None)
    assert [cause for cause, _ in found] == ["fp16-underflow"]
    assert found[0][1] not in ("table.weight", "block.k.bias")


# Second moments that are zero --------------------------------------------------------------------------------------


class Towers(nn.Module):
    """Read a user and an item, each one of many as a row of zeros and a one."""

    def __init__(self, count: int = 300, width: int = 16) -> None:
        super().__init__()
        self.user, self.item, self.head = nn.Linear(count, width), nn.Linear(count, width), nn.Linear(2 * width, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        sides = self.user(user), self.item(item)
        rating: Tensor = self.head(torch.tanh(torch.cat(sides, 1)))
        return rating


def _ratings(seen: int, eps: float) -> Training:
    """Learn ratings of the first of 300 items by the first of 300 users; the others have weights without a gradient."""

    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model, tastes = Towers(), torch.randn(2, 300)
        optimizer = Adam(model.parameters(), 3e-3, eps=eps)

        def course() -> Iterator[wild.Logged]:
            while True:
                chosen = torch.randint(seen, (2, 64))
                user, item = F.one_hot(chosen, 300).float()
                y = (tastes[0, chosen[0]] + tastes[1, chosen[1]])[:, None]
                yield wild.stepped(optimizer, F.mse_loss(model(user, item), y), targets=y)

        return model, optimizer, course()

    return begin


def test_second_moments_of_what_was_never_seen_are_not_below_eps() -> None:
    assert alarms(_ratings(60, 1e-8), 60) == []


@pytest.mark.parametrize("seen", [60, 300])
def test_an_eps_that_is_too_large_is_named_however_much_was_seen(seen: int) -> None:
    assert alarms(_ratings(seen, 1.0), 60) == ["adam-eps-dominates"]


# First steps that no warm-up would mend ----------------------------------------------------------------------------


def _small_targets() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
    """Train a plain MLP by Adam on targets so small that a step of 0.03 of the weights overshoots them for a while."""
    model, weights = wild.mlp(8, 64, 64, 1), torch.randn(8, 1) / 8**0.5
    for parameter in model[-1].parameters():
        nn.init.zeros_(parameter)
    optimizer = Adam(model.parameters(), 3e-3)

    def course() -> Iterator[wild.Logged]:
        while True:
            x = torch.randn(64, 8)
            y = 3e-3 * (x @ weights)
            yield wild.stepped(optimizer, F.mse_loss(model(x), y), inputs=x, targets=y)

    return model, optimizer, course()


def test_a_plain_mlp_whose_first_steps_are_short_needs_no_warm_up() -> None:
    assert findings(_small_targets, 80) == []


@pytest.mark.parametrize(
    ("first", "later", "causes"),
    [
        (0.3, 0.01, ["warmup-missing"]),
        (0.03, 0.001, []),  # too short to have thrown the loss up
        (0.9, 0.01, []),  # all of the weights: the rate is wrong, not its start
        (0.3, 0.06, []),  # the later ones are too long as well
        (0.15, 0.045, []),  # hardly longer than the later ones
    ],
)
def test_a_warm_up_is_missing_if_the_first_steps_alone_were_long(first: float, later: float, causes: list[str]) -> None:
    """By hand: the loss is ten times its start for eight steps, and comes back."""
    layers = ("a.weight", "b.weight")
    doctor = Doctor({"layers": [{"name": name, "shape": [8, 8]} for name in layers]}, [rates.no_warmup])
    for step, loss in enumerate([2.4, *[24.0] * 8, *np.geomspace(1.6, 0.1, 60)]):
        update = {"ratio": first if step < 2 else later, "weight_norm": 2.0}
        told = {"update": rows(layers, **update), "second_moment": rows(layers, norm=1.0)} if step % 2 == 0 else {}
        doctor.take(Record(step, float(step), {"loss": float(loss), "learning_rate": 1e-3}, told))
    doctor.finish()
    assert [finding.cause for finding in doctor.findings] == causes
