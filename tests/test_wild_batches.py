"""Batches that come again, and labels: what is meant, and what is not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Adam

from holter.diagnosis.causes import data, targets
from holter.diagnosis.doctor import Doctor
from holter.record import LayerRows, Record
from holter.series import Floats
from holter.statistics.rows import Rows
from tests import odd_trainings as wild
from tests.odd_trainings import alarms, regression


@pytest.mark.parametrize(
    ("size", "batch_of", "found"),
    [
        (16, lambda step: 0, ["batch-repeated"]),  # as small as those of a loader, learnt by heart
        (64, lambda step: min(step, 2), ["batch-repeated"]),
        (100, lambda step: 0, []),  # the whole data
        (64, lambda step: step % 2, []),  # an epoch of two batches
        (64, lambda step: step // 12, []),  # a few steps on each, as on the samples of a policy
    ],
)
def test_one_batch_again_and_again_is_told_within_fifty_steps(size: int, batch_of: object, found: list[str]) -> None:
    training = regression(batch_of=batch_of, size=size)  # type: ignore[arg-type]
    assert alarms(training, 40) == found


@pytest.mark.parametrize("size", [32, 100])
def test_that_there_was_never_another_batch_is_a_note_where_it_may_be_all_the_data(size: int) -> None:
    found = wild.findings(regression(batch_of=lambda step: 0, size=size), 140)
    assert [(one.cause, one.severity, one.since) for one in found] == [("batch-repeated", "info", 0)]
    assert found[0].step < 50 and found[0].until is None


def test_a_note_leads_nothing_that_is_worse() -> None:
    found = wild.findings(regression(batch_of=lambda step: 0, size=64, optimizer=lambda p: Adam(p, 0.5)), 60)
    assert found[0].cause == "lr-too-high" and "batch-repeated" in found[0].alternatives


def test_a_new_stage_of_a_curriculum_is_no_fault() -> None:
    stage = {"step": 0}

    def loss_of(p: wild.Tensor, y: wild.Tensor) -> wild.Tensor:
        stage["step"] += 1
        return F.cross_entropy(p, y)

    def labels(x: wild.Tensor, score: wild.Tensor) -> wild.Tensor:
        return x[:, : 2 if stage["step"] < 100 else 4].argmax(1)

    assert alarms(regression(loss_of, targets_of=labels, outputs=4), 180) == []


def test_weights_that_are_changed_by_hand_are_not_taken_for_labels() -> None:
    """The loss is thrown back, too, but weights and activations are others in the very step."""

    def training() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model, optimizer, course = regression(
            F.cross_entropy, lambda parameters: Adam(parameters, 1e-3), wild.classes, outputs=4
        )()

        def changed() -> Iterator[wild.Logged]:
            for step, logged in enumerate(course):
                if step == 79:
                    with torch.no_grad():
                        model.get_parameter("2.bias").sub_(1.5)
                        model.get_parameter("4.weight").mul_(-0.3)
                yield logged

        return model, optimizer, changed()

    options = {"weights": 1, "activations": 1, "updates": 1}
    assert "labels-corrupt" not in alarms(training, 112, **options)


def test_a_bias_that_was_changed_between_two_looks_is_not_taken_for_labels() -> None:
    """The loss is thrown back to a guess at once, and inputs and rate are as before; the model learns anew."""

    def training() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model = wild.mlp(8, 64, 64, 64, 64, 4, act=lambda: nn.LeakyReLU(0.1))
        optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)

        def course() -> Iterator[wild.Logged]:
            for step in itertools.count():
                x = torch.randn(32, 8)
                y = x[:, :4].argmax(1)
                yield wild.stepped(optimizer, F.cross_entropy(model(x), y), inputs=x, targets=y)
                if step == 121:
                    with torch.no_grad():
                        model.get_parameter("4.bias").sub_(21)

        return model, optimizer, course()

    assert "labels-corrupt" not in alarms(training, 170)


# Batches known by their rows alone --------------------------------------------------------------------------------

Draws = Callable[[int, np.random.Generator], dict[str, Floats]]
ODD = 90  # the step of a broken batch


def row(x: Floats) -> list[float]:
    x = np.asarray(x, dtype=np.float64)
    sums = [float((x**power).sum()) for power in (2, 4)]
    return [x.size, (x == 0).sum(), 0, 0, 0, x.sum(), np.abs(x).sum(), *sums, x.min(), x.max()]


def told(
    draws: Draws, steps: int = 400, seed: int = 0, spike: bool = False, costs: float = 0.0
) -> list[tuple[str, int]]:
    """Return the warnings about these batches. With `spike` the loss is ten times the usual at the odd step, and with
    `costs` the rare values make the loss."""
    random, doctor = np.random.default_rng(seed), Doctor({}, (*data.RULES, *targets.RULES))
    for step in range(steps):
        batch = draws(step, random)
        rows = Rows(np.array([row(x) for x in batch.values()]))
        unknown = np.full(len(batch), np.nan)
        extras = {"size": np.array([float(len(x)) for x in batch.values()]), "hash": unknown, "label_entropy": unknown}
        power = float(np.mean([np.square(x).mean() for x in batch.values()]))
        loss = (
            (0.1 + costs * power if costs else 1.0)
            * (1 + 0.03 * random.standard_normal())
            * (10 if spike and step == ODD else 1)
        )
        doctor.take(Record(step, float(step), {"loss": loss}, rows={"batch": LayerRows(tuple(batch), rows, extras)}))
    doctor.finish()
    return [(found.cause, found.since) for found in doctor.findings if found.severity != "info"]


def flags(share: float, size: int = 64) -> Draws:
    return lambda step, random: {"targets": (random.random(size) < share).astype(float)}


def clicks(step: int, random: np.random.Generator) -> dict[str, Floats]:
    """Mostly 0, at times 1, rarely many."""
    many = np.where(random.random((64, 4)) < 5e-3, random.integers(2, 40, (64, 4)), 1)
    return {"inputs": np.where(random.random((64, 4)) < 0.1, many, 0).astype(float)}


def amounts(step: int, random: np.random.Generator) -> dict[str, Floats]:
    return {"inputs": np.where(random.random(64) < 0.2, random.pareto(1.5, 64), 0.0)}


def masks(step: int, random: np.random.Generator) -> dict[str, Floats]:
    """Of four images, whose objects are all in one piece: pixels are no independent draws."""
    mask = np.zeros((4, 32, 32))
    for image in np.flatnonzero(random.random(4) < 0.5):
        mask[image, :16, : random.integers(8, 24)] = 1
    return {"targets": mask}


def words_in_bags(step: int, random: np.random.Generator) -> dict[str, Floats]:
    return {"inputs": random.poisson(0.3 / np.arange(1, 40), (8, 39)).astype(float)}


def residuals(step: int, random: np.random.Generator) -> dict[str, Floats]:
    """Both signs, and 0 nearly everywhere."""
    return {"targets": np.where(random.random(32) < 0.08, random.standard_normal(32), 0.0)}


RARE: dict[str, Draws] = {
    **{f"flags, {share:.1%}": flags(share) for share in (0.002, 0.02, 0.05, 0.1, 0.98)},
    "two classes, few examples": flags(0.5, size=8),
    "levels 1 and 2": lambda step, random: {"inputs": np.where(random.random(64) < 0.05, 2.0, 1.0)},
    "clicks": clicks,
    "amounts": amounts,
    "masks": masks,
    "bags of words": words_in_bags,
    "residuals": residuals,
}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", RARE)
def test_a_batch_without_the_rare_values_or_with_many_is_no_broken_one(name: str, seed: int) -> None:
    assert told(RARE[name], seed=seed) == []


@pytest.mark.parametrize("seed", range(100, 106))
@pytest.mark.parametrize("name", ["flags, 2.0%", "flags, 5.0%", "two classes, few examples", "clicks"])
def test_nor_is_it_broken_where_the_rare_values_make_the_loss(name: str, seed: int) -> None:
    """Nor are labels mixed up where some of them come together, nor inputs out of scale."""
    assert told(RARE[name], steps=600, seed=seed, costs=30) == []


def images(step: int, random: np.random.Generator) -> dict[str, Floats]:
    """Black but for some strokes, between 0 and 1."""
    return {"inputs": np.where(random.random((16, 64)) < 0.2, random.random((16, 64)), 0.0)}


def broken(draws: Draws, change: Callable[[Floats], Floats]) -> Draws:
    def changed(step: int, random: np.random.Generator) -> dict[str, Floats]:
        return {name: change(x) if step == ODD else x for name, x in draws(step, random).items()}

    return changed


def normal(step: int, random: np.random.Generator) -> dict[str, Floats]:
    return {"inputs": random.standard_normal((32, 16))}


def one_far_out(x: Floats) -> Floats:
    x = x.copy()
    x.flat[3] = 5_000.0
    return x


@pytest.mark.parametrize("change", [np.zeros_like, lambda x: 50 * x, lambda x: x / 255])
@pytest.mark.parametrize("draws", [normal, images])
def test_a_dense_batch_that_is_zero_or_out_of_scale_is_broken(draws: Draws, change: Callable[[Floats], Floats]) -> None:
    assert told(broken(draws, change)) == [("batch-corrupt", ODD)]


def test_flags_that_are_all_gone_are_broken_where_chance_does_not_take_them() -> None:
    assert told(broken(flags(0.3), np.zeros_like)) == [("batch-corrupt", ODD)]


@pytest.mark.parametrize("draws", [normal, clicks])
def test_one_value_far_out_counts_where_the_loss_shows_it(draws: Draws) -> None:
    """By itself it decides spread and largest value alike, and a click count may have it."""
    assert told(broken(draws, one_far_out), spike=True) == [("batch-corrupt", ODD)]
    assert told(broken(draws, one_far_out)) == []


# Order ------------------------------------------------------------------------------------------------------------


def growing(step: int, random: np.random.Generator) -> dict[str, Floats]:
    """Targets that a model makes up as it learns, of examples drawn at random."""
    return {"targets": 8 * (1 - np.exp(-step / 60)) * (1 + 0.25 * random.standard_normal(64))}


def stages(step: int, random: np.random.Generator) -> dict[str, Floats]:
    """A target network that is taken anew every 25 steps."""
    return {"targets": 1.0 + step // 25 + 0.4 * random.standard_normal(64)}


def wave(step: int, random: np.random.Generator) -> dict[str, Floats]:
    return {"targets": 3 * np.sin(step / 20) + random.standard_normal(64)}


@pytest.mark.parametrize("draws", [growing, stages, wave])
def test_targets_that_drift_are_not_sorted(draws: Draws) -> None:
    assert told(draws) == []


def sorted_once(step: int, random: np.random.Generator) -> dict[str, Floats]:
    """An epoch of 200 batches, by size."""
    place = (step % 200 + np.arange(64) / 64) / 200
    return {"targets": np.log(place / (1 - place) + 1e-9)}


def in_blocks(step: int, random: np.random.Generator) -> dict[str, Floats]:
    """User by user, five batches each, in no order of their levels."""
    return {"targets": 3 * np.random.default_rng(step // 5).standard_normal() + random.standard_normal(64)}


def one_class_first(step: int, random: np.random.Generator) -> dict[str, Floats]:
    return {"targets": np.full(64, float(step % 80 >= 40))}


def in_time(step: int, random: np.random.Generator) -> dict[str, Floats]:
    """Hours of a year as they come."""
    hour = 64 * step + np.arange(64)
    return {"targets": np.sin(hour / 300) + 0.3 * random.standard_normal(64)}


@pytest.mark.parametrize("draws", [sorted_once, in_blocks, one_class_first, in_time])
def test_targets_in_order_are_told(draws: Draws) -> None:
    assert [cause for cause, _ in told(draws)] == ["data-not-shuffled"]


# Labels and gradients that pile up --------------------------------------------------------------------------------


def digits_like(clears: bool, mispaired: int | None = None) -> wild.Training:
    def begin() -> tuple[nn.Module, torch.optim.Optimizer, Iterator[wild.Logged]]:
        model, centres = wild.mlp(64, 128, 128, 10), torch.randn(10, 64)
        optimizer = Adam(model.parameters(), 1e-3)

        def course() -> Iterator[wild.Logged]:
            for step in itertools.count():
                y = torch.randint(10, (64,))
                x = centres[y] + 1.5 * torch.randn(64, 64)
                y = y[torch.randperm(64)] if mispaired is not None and step >= mispaired else y
                loss = F.cross_entropy(model(x), y)
                if clears:
                    optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                yield {"loss": loss, "inputs": x, "targets": y}

        return model, optimizer, course()

    return begin


def test_labels_are_not_blamed_for_gradients_that_pile_up() -> None:
    found = alarms(digits_like(clears=False), 200)
    assert "zero-grad-missing" in found and "labels-corrupt" not in found


def test_labels_that_are_mixed_up_are_still_told() -> None:
    assert alarms(digits_like(clears=True, mispaired=90), 180)[:1] == ["labels-corrupt"]


# A state that comes again -----------------------------------------------------------------------------------------


def test_a_state_of_few_or_flags_that_are_all_zero_are_no_repeated_batch() -> None:
    doctor = Doctor({}, data.RULES)
    for step in range(60):
        x = np.zeros((1, 16)) if step < 40 else np.eye(16)[3:4]
        ago = float(step >= 40)
        rows = LayerRows(("inputs",), Rows(np.array([row(x)])), {"size": np.ones(1)})
        doctor.take(Record(step, float(step), {"batch/repeated": ago}, rows={"batch": rows}))
    doctor.finish()
    assert doctor.findings == ()
