"""Causes in the loss and in the precision, in real float16 and bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holter.diagnosis.causes import losses, precision
from holter.diagnosis.finding import Finding
from tests.patients import Batch, Patient, Reader, Words, conv, cross_entropy, examine, mlp

RULES = (*losses.RULES, *precision.RULES)
AT = 60
HALF = torch.float16


def findings(patient: Patient, path: Path) -> tuple[Finding, ...]:
    found = examine(patient.train(path / "run"), RULES)
    assert not any(finding.cause == "monitor-degraded" for finding in found), found
    return found


def scaler(scale: float, interval: int = 2000) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)


def ends_in_softmax(make: Callable[[], nn.Module], axis: int = -1) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(make(), nn.Softmax(axis))


def in_bfloat16(step: int, x: Tensor, y: Tensor) -> Batch:
    return x.bfloat16(), y


def minus(step: int, output: Tensor, y: Tensor) -> Tensor:
    return -cross_entropy(output, y)


def minus_later(step: int, output: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(output, y) * (-1 if step >= AT else 1)


def summed(step: int, output: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten(), reduction="sum")


def summed_later(step: int, output: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(output, y) * (y.numel() if step >= AT else 1)


def overflowing(step: int, output: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(output.half() * (1e6 if step >= AT else 1), y)


def tiny(step: int, output: Tensor, y: Tensor) -> Tensor:
    return 2e-5 * cross_entropy(output, y)


def tiny_later(step: int, output: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(output, y) * (1e-5 if step >= AT else 1)


FAULTS: dict[str, list[tuple[Patient, int]]] = {
    "double-softmax": [
        (Patient("conv", model=ends_in_softmax(conv), steps=40), 0),
        (Patient("reader", model=ends_in_softmax(Reader), steps=40, watch={}), 0),
        (Patient("conv", model=ends_in_softmax(conv, axis=0), steps=40), 0),
        (Patient("words", model=ends_in_softmax(Words), steps=40), 0),
        (Patient("mlp", steps=200, doubt=1.0, loss=lambda t, o, y: cross_entropy(o.softmax(-1), y)), 0),
    ],
    "loss-sign": [
        (Patient("mlp", loss=minus, steps=40), 0),
        (Patient("words", loss=minus, steps=40, adaptive=False, rate=0.03), 0),
        (Patient("conv", loss=minus_later, steps=100), AT),
        (Patient("numbers", loss=lambda step, output, y: -F.mse_loss(output, y), steps=40), 0),
    ],
    "loss-reduction": [
        (Patient("mlp", loss=summed, steps=40, rate=1e-4), 0),
        (Patient("words", loss=summed, steps=40), 0),
        (Patient("reader", loss=summed_later, steps=90, doubt=2.5), AT),
        (Patient("numbers", loss=lambda t, o, y: F.mse_loss(o, y, reduction="sum"), steps=40), 0),
    ],
    "fp16-overflow": [
        (Patient("mlp", autocast=HALF, scaler=scaler(2.0**16), loss=overflowing, steps=90), AT),
        (Patient("conv", autocast=HALF, scaler=scaler(2.0**16), loss=overflowing, steps=90), AT),
    ],
    "fp16-underflow": [
        (Patient("mlp", autocast=HALF, loss=tiny, steps=40), 0),
        (Patient("words", autocast=HALF, loss=tiny_later, steps=90), AT),
        (Patient("reader", autocast=HALF, loss=tiny_later, steps=90), AT),
    ],
    "bf16-update-lost": [
        (Patient("mlp", rate=1e-4, steps=40, prepare=nn.Module.bfloat16, batch=in_bfloat16), 0),
        (Patient("conv", rate=1e-3, adaptive=False, steps=40, prepare=nn.Module.bfloat16, batch=in_bfloat16), 0),
    ],
}


@pytest.mark.parametrize(
    ("cause", "number"), [(cause, n) for cause, cases in FAULTS.items() for n in range(len(cases))]
)
def test_a_fault_is_named_with_its_onset(cause: str, number: int, tmp_path: Path) -> None:
    patient, onset = FAULTS[cause][number]
    found = findings(patient, tmp_path)
    assert [finding.cause for finding in found] == [cause]
    assert abs(found[0].since - onset) <= 2
    assert found[0].where == ("loss" if cause in ("double-softmax", "loss-sign", "loss-reduction") else "precision")
    assert "It worked" in found[0].advice and found[0].evidence


def test_an_overflow_names_its_layer(tmp_path: Path) -> None:
    """The values of one layer come near the limit, which the norm behind it hides."""

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.wide = nn.Linear(24, 48), nn.Linear(48, 48, bias=False)
            self.norm, self.head = nn.LayerNorm(48), nn.Linear(48, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(self.wide(torch.relu(self.first(x)))))

    def enlarge(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter("wide.weight").mul_(6e4)

    patient = Patient("mlp", model=Hidden, prepare=enlarge, autocast=HALF, scaler=scaler(2.0**10), steps=90)
    patient.watch = {"budget": None, "activations": 10}
    found = findings(patient, tmp_path)
    assert (found[0].cause, found[0].layer) == ("fp16-overflow", "wide")


CONTROLS = {
    "a scaler that searches": Patient("mlp", autocast=HALF, scaler=scaler(2.0**24, 20), steps=120),
    "a scaler that searches long": Patient("conv", autocast=HALF, scaler=scaler(2.0**40, 15), steps=120),
    "a scaler, and words": Patient("words", autocast=HALF, scaler=scaler(2.0**24, 25), steps=90),
    "half precision without a scaler": Patient("mlp", autocast=HALF, steps=120),
    "bfloat16": Patient("conv", autocast=torch.bfloat16, steps=120),
    "large steps in bfloat16": Patient(
        "mlp", rate=0.2, adaptive=False, prepare=nn.Module.bfloat16, batch=in_bfloat16, steps=60
    ),
    "probabilities that are meant": Patient(
        "mlp", model=ends_in_softmax(mlp), doubt=1.0, loss=lambda t, o, y: F.nll_loss(o.log(), y), rate=1e-2
    ),
    "a likelihood": Patient("numbers", loss=lambda t, o, y: 0.5 * ((o - y) ** 2).mean().log(), steps=150),
    "a similarity": Patient("numbers", loss=lambda t, o, y: -F.cosine_similarity(o, y).mean(), steps=150),
    "a slow start": Patient("mlp", rate=1e-5, steps=100),
    "the loss of a regression": Patient("numbers", size=64, steps=60),
    "only the loss": Patient("reader", logs_batch=False, watch={"budget": 0}, steps=100),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_a_sound_training_is_left_alone(name: str, tmp_path: Path) -> None:
    assert not findings(CONTROLS[name], tmp_path)
