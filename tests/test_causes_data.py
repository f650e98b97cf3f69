"""Causes in the data: each on two architectures, with its sound twins and what only looks like it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import holter
from holter.diagnosis.causes import data, targets
from holter.diagnosis.finding import Finding
from tests.patients import CLASSES, Batch, Patient, examine

RULES = (*data.RULES, *targets.RULES)
AT = 70
DEFAULTS: dict[str, Any] = {}


def findings(patient: Patient, path: Path) -> tuple[Finding, ...]:
    found = examine(patient.train(path / "run"), RULES)
    assert not any(finding.cause == "monitor-degraded" for finding in found), found
    return found


def the_one(found: tuple[Finding, ...]) -> Finding:
    assert len(found) == 1, found
    assert found[0].advice and "It worked" in found[0].advice
    assert found[0].where == "data" and found[0].evidence
    return found[0]


def too_large(step: int, x: Tensor, y: Tensor) -> Batch:
    return (50 * x if step == AT else x), y


def padding_only(step: int, x: Tensor, y: Tensor) -> Batch:
    return (torch.zeros_like(x) if step == AT else x), y


def missing(step: int, x: Tensor, y: Tensor) -> Batch:
    x = x.clone()
    if step == AT:
        x.view(-1)[3] = torch.nan
    return x, y


def mispaired(step: int, x: Tensor, y: Tensor) -> Batch:
    random = torch.Generator().manual_seed(step)
    order = torch.randperm(y.numel(), generator=random)
    return x, (y.flatten()[order].view_as(y) if step >= AT else y)


def class_by_class(step: int, x: Tensor, y: Tensor) -> Batch:
    if step < AT:
        return x[:32], y[:32]
    chosen = torch.nonzero(y == (step // 9) % CLASSES)[:, 0][:16]
    return x[chosen], y[chosen]


FAULTS = {
    "batch-corrupt": [
        (Patient("mlp", batch=too_large, steps=100), 0),
        (Patient("reader", batch=too_large, steps=100, adaptive=False, rate=0.05), 0),
        (Patient("words", batch=padding_only, steps=100), 0),
    ],
    "nan-in-data": [
        (Patient("conv", batch=missing, steps=90), 0),
        (Patient("numbers", batch=missing, steps=90), 0),
    ],
    "labels-corrupt": [
        (Patient("mlp", batch=mispaired), 0),
        (Patient("words", batch=mispaired), 0),
    ],
    "batch-repeated": [
        (Patient("conv", drawn=lambda step: min(step, AT), steps=100), 1),
        (Patient("words", drawn=lambda step: min(step, AT), steps=100), 1),
    ],
    "data-not-shuffled": [
        (Patient("mlp", batch=class_by_class, size=160, steps=120), 0),
        (Patient("reader", batch=class_by_class, size=160, steps=120, adaptive=False, rate=0.1), 0),
    ],
}


@pytest.mark.parametrize(
    ("cause", "number"), [(cause, n) for cause, cases in FAULTS.items() for n in range(len(cases))]
)
def test_a_fault_is_named_with_its_onset(cause: str, number: int, tmp_path: Path) -> None:
    patient, late = FAULTS[cause][number]
    found = the_one(findings(patient, tmp_path))
    assert found.cause == cause
    assert abs(found.since - AT - late) <= 1


@pytest.mark.parametrize("kind", ["mlp", "numbers"])
def test_inputs_that_were_never_normalised(kind: str, tmp_path: Path) -> None:
    found = the_one(findings(Patient(kind, steps=40, batch=lambda step, x, y: (120 + 60 * x, y)), tmp_path))
    assert (found.cause, found.since) == ("input-scale", 0)
    assert "Normalise: x = (x - 1" in found.advice


@pytest.mark.parametrize("kind", ["mlp", "reader"])
def test_inputs_that_lose_their_normalisation(kind: str, tmp_path: Path) -> None:
    found = the_one(findings(Patient(kind, steps=110, batch=lambda t, x, y: (10 * x if t >= AT else x, y)), tmp_path))
    assert (found.cause, found.since) == ("input-scale", AT)


def test_inputs_that_drift(tmp_path: Path) -> None:
    def drifting(step: int, x: Tensor, y: Tensor) -> Batch:
        return x * 1.05 ** max(0, step - AT), y

    found = the_one(findings(Patient("numbers", steps=140, batch=drifting), tmp_path))
    assert found.cause == "input-scale" and abs(found.since - AT) <= 3


def test_a_stuck_batch_without_hashes_is_seen_in_the_gradients(tmp_path: Path) -> None:
    patient = Patient("mlp", drawn=lambda step: min(step, AT), logs_batch=False, steps=130)
    found = the_one(findings(patient, tmp_path))
    assert found.cause == "batch-repeated" and abs(found.since - AT) <= 10


@pytest.mark.parametrize("kind", ["mlp", "reader"])
def test_overfitting(kind: str, tmp_path: Path) -> None:
    """Three batches are learnt by heart; others come from the same source."""
    few = Patient(kind, drawn=lambda step: step % 3, steps=240, doubt=2.5)
    _, batch, criterion = few._parts()

    def validate(model: torch.nn.Module) -> float:
        with torch.no_grad():
            x, y = batch(9_999, 256)
            return float(criterion(model(x), y))

    few.validate = validate
    found = the_one(findings(few, tmp_path))
    assert found.cause == "overfitting" and "stop there" in found.advice


# Sound, though it may not look like it ----------------------------------------------------------------------------


def noisy_labels(step: int, x: Tensor, y: Tensor) -> Batch:
    random = torch.Generator().manual_seed(step)
    is_wrong = torch.rand(y.shape, generator=random) < 0.2
    return x, torch.where(is_wrong, torch.randint(CLASSES, y.shape, generator=random), y)


def more_classes(step: int, x: Tensor, y: Tensor) -> Batch:
    chosen = y < (3 if step < AT else CLASSES)
    return x[chosen], y[chosen]


def other_classes(step: int, x: Tensor, y: Tensor) -> Batch:
    chosen = y < 3 if step < AT else y >= 3
    return x[chosen], y[chosen]


def shuffled_epochs(step: int) -> int:
    order = torch.randperm(7, generator=torch.Generator().manual_seed(step // 7))
    return int(order[step % 7])


CONTROLS = {
    "sound": Patient("mlp"),
    "sound, convolutions": Patient("conv"),
    "sound, words": Patient("words", steps=120),
    "sound, numbers": Patient("numbers", adaptive=False, rate=0.05),
    "the default budget": Patient("reader", watch=DEFAULTS),
    "only the loss": Patient("mlp", logs_batch=False, watch={"budget": 0}),
    "tiny batches": Patient("conv", size=2, steps=250, rate=1e-3),
    "tiny batches of numbers": Patient("numbers", size=2, steps=250, rate=1e-3),
    "noisy labels": Patient("mlp", batch=noisy_labels, steps=200),
    "more classes": Patient("mlp", batch=more_classes, size=64),
    "other classes": Patient("conv", batch=other_classes, size=64),
    "harder examples": Patient("mlp", batch=lambda t, x, y: (x + (t >= AT) * 0.7 * torch.randn_like(x), y)),
    "growing batches": Patient("mlp", sized=lambda step: 8 * (1 + step // 40)),
    "accumulation": Patient("reader", accumulate=3, steps=100),
    "epochs in another order": Patient("mlp", drawn=shuffled_epochs),
    "epochs in the same order": Patient("mlp", drawn=lambda step: step % 5),
    "the whole data set at once": Patient("mlp", drawn=lambda step: 0),
    "each batch twice": Patient("conv", drawn=lambda step: step // 2, steps=120),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_sound_training_is_left_alone(name: str, tmp_path: Path) -> None:
    assert not [found for found in findings(CONTROLS[name], tmp_path) if found.severity != "info"]


def test_a_mask_of_infinities_is_meant(tmp_path: Path) -> None:
    def masked(step: int, x: Tensor, y: Tensor) -> Batch:
        return F.pad(x[:, 1:], (1, 0), value=-torch.inf), y

    class Sees(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(24, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.clamp(min=-5))

    assert not findings(Patient("mlp", model=Sees, batch=masked, steps=60), tmp_path)


def test_a_nan_in_a_later_micro_batch_is_named(tmp_path: Path) -> None:
    """The first stands for the step in all that is measured, and here it is clean."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    monitor = holter.watch(model, optimizer, run=tmp_path / "run", budget=None)
    for step in range(40):
        for micro in range(3):
            x, y = torch.randn(16, 8), torch.randint(4, (16,))
            if (step, micro) == (30, 2):
                x[5, 3] = torch.nan
            loss = torch.nn.functional.cross_entropy(model(x), y) / 3
            loss.backward()
            monitor.log(loss=3 * loss, inputs=x, targets=y)
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    steps, shares = monitor.history.scalar("batch/nonfinite")
    assert steps.tolist() == list(range(40)) and np.flatnonzero(shares).tolist() == [30]
    found = holter.diagnose(holter.open_run(tmp_path / "run"))
    assert [(one.cause, one.since) for one in found if one.severity != "info"] == [("nan-in-data", 30)]


@pytest.mark.parametrize("where", ["inputs", "targets"])
@pytest.mark.parametrize("as_number", [False, True])
def test_a_nan_is_named_though_the_budget_left_out_its_batch(tmp_path: Path, where: str, as_number: bool) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with holter.watch(model, optimizer, run=tmp_path / "run", budget=0) as monitor:
        for step in range(40):
            batch = {"inputs": torch.randn(16, 8), "targets": torch.randn(16, 1)}
            if step == 30:
                batch[where][5, 0] = torch.nan
            loss = torch.nn.functional.mse_loss(model(batch["inputs"]), batch["targets"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(**batch, loss=loss.item() if as_number else loss)
    found = holter.diagnose(holter.open_run(tmp_path / "run"))
    assert [(one.cause, one.since) for one in found if one.severity != "info"] == [("nan-in-data", 30)]
    assert "The batch held NaN" in found[0].advice


def test_weights_that_are_lost_are_no_batch_that_is_bad(tmp_path: Path) -> None:
    """The loss is lost for another reason: every batch is looked at from then on, and each is clean."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with holter.watch(model, optimizer, run=tmp_path / "run", budget=0) as monitor:
        for step in range(40):
            if step == 30:
                torch.nn.init.constant_(model.weight, torch.nan)
            inputs = torch.randn(16, 8)
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(inputs=inputs, loss=loss)
    steps, held = monitor.history.scalar("batch/first_nonfinite")
    assert steps.tolist() == list(range(30, 40)) and not held.any()
    found = holter.diagnose(holter.open_run(tmp_path / "run"))
    assert "nan-in-data" not in [one.cause for one in found] and "may have held NaN" not in found[0].advice


def test_lengths_beside_numbers_are_not_features(tmp_path: Path) -> None:
    """The loss starts far above that of zeros, so that an input of an odd size would be blamed for it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    torch.nn.init.constant_(model.bias, 10.0)
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    lengths = torch.full((32,), 24)
    with holter.watch(model, optimizer, run=tmp_path / "run") as monitor:
        for _ in range(20):
            x = torch.randn(32, 8)
            y = x.sum(1)
            loss = F.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss, inputs={"series": x, "lengths": lengths}, targets=y)
    assert examine(tmp_path / "run", RULES) == ()
