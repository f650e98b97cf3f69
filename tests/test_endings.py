"""When a finding is over: only if it was looked for again and has gone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from holter.diagnosis.causes import RULES
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding
from holter.record import Record
from tests.odd_histories import rows_of
from tests.wild_trainings import CLASSES, INPUTS, Training, vectors


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Cut(nn.Module):
    """Its stem has no gradient before a step."""

    def __init__(self, until: int) -> None:
        super().__init__()
        self.stem, self.middle, self.head = nn.Linear(INPUTS, 32), nn.Linear(32, 32), nn.Linear(32, CLASSES)
        self.calls, self.until = 0, until

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = torch.relu(self.stem(x))
        return self.head(torch.relu(self.middle(x.detach() if self.calls <= self.until else x)))


def symmetric() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    nn.init.constant_(model.get_submodule("2").get_parameter("weight"), 0.1)
    return model


def summed(output: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output, y, reduction="sum")


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(INPUTS, 32), nn.ReLU(), nn.Linear(32, CLASSES))


GO_ON: dict[str, Callable[[], Training]] = {
    "graph-detached": lambda: Training(Cut(10**6), vectors(), steps=290),
    "init-symmetric": lambda: Training(symmetric(), vectors(), steps=110),
    "loss-reduction": lambda: Training(plain(), vectors(noise=3.0), summed, steps=180),
}


def leading(training: Training) -> Finding:
    return training.findings(budget=None)[0]


@pytest.mark.parametrize("cause", GO_ON)
def test_a_fault_that_goes_on_is_not_over_because_nobody_looks_any_more(cause: str) -> None:
    found = leading(GO_ON[cause]())
    assert (found.cause, found.until) == (cause, None)


def test_a_fault_that_was_mended_is_over() -> None:
    found = leading(Training(Cut(60), vectors(), steps=220))
    assert found.cause == "graph-detached" and found.until is not None


def test_a_layer_that_lost_its_gradient_is_still_lost_when_its_past_is_no_longer_kept() -> None:
    """A series keeps its last few hundred values: what it had before is no longer in it."""
    doctor = Doctor({"layers": [{"name": name, "shape": [4]} for name in ("a.bias", "b.bias")]}, rules=RULES)
    for step in range(900):
        gradients = {"a.bias": [1.0 + step % 3], "b.bias": [2.0 + step % 5]}
        if step >= 40:
            del gradients["a.bias"]
        doctor.take(Record(step, float(step), {"loss": 1.0}, {"gradient": rows_of(gradients)}))
    doctor.finish()
    (found,) = doctor.findings
    assert found.cause in ("layer-frozen", "graph-detached") and found.since == 40 and found.until is None


@pytest.mark.parametrize("changes", [False, True])
def test_the_same_batch_goes_on_though_not_every_one_is_hashed(changes: bool) -> None:
    doctor = Doctor({"parameters": 1000}, rules=RULES)
    for step in range(240):
        is_hashed = step < 60 or step % 7 == 0
        ago = 0.0 if not step or (changes and step > 100) else 1.0 if step < 60 else 4.0 if step == 63 else 7.0
        seen = {"batch": rows_of({"inputs": [1.0, 2.0]}, {"size": np.array([64.0])})}
        scalars = {"loss": 1.0} | ({"batch/repeated": ago} if is_hashed else {})
        doctor.take(Record(step, float(step), scalars, seen if is_hashed else {}))
    doctor.finish()
    (found,) = doctor.findings
    assert found.cause == "batch-repeated" and (found.until is None) == (not changes)
