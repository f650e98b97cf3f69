"""A network that gives targets to another beside it learns nothing, and is to: it is told from one that is cut off."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.wild_trainings import CLASSES, INPUTS, WORDS, Training, alarms, sentences, vectors


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def net(*widths: int) -> nn.Sequential:
    layers = [part for pair in itertools.pairwise(widths) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def reader(width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(WORDS, width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, WORDS)
    )


class Taught(nn.Module):
    """The teacher runs first; the one optimizer is given all parameters."""

    def __init__(self, teacher: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.teacher, self.student = teacher, student

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x).softmax(-1)
        return F.kl_div(self.student(x).log_softmax(-1), target, reduction="none").sum(-1)


class Line(nn.Module):
    """The second part reads what the first one puts out, or that beside the input."""

    def __init__(self, first: nn.Module, second: nn.Module, beside: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.beside = first, second, beside

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x).detach()
        return self.second(torch.cat((x, found), -1) if self.beside else found)


class Joined(nn.Module):
    """Two branches over one input; the first is cut off before the head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = net(INPUTS, 24), net(INPUTS, 32), nn.Linear(56, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat((self.first(x).detach(), self.second(x)), -1).relu())


def mean(output: Tensor, y: Tensor) -> Tensor:
    return output.mean()


def copied(student: nn.Module) -> nn.Module:
    return Taught(copy.deepcopy(student), student)


TAUGHT: dict[str, Callable[[], Training]] = {
    "a wider teacher": lambda: Training(Taught(net(INPUTS, 64, CLASSES), net(INPUTS, 16, CLASSES)), vectors(), mean),
    "a copy, as many numbers in as out": lambda: Training(copied(net(INPUTS, 32, INPUTS)), vectors(), mean),
    "a teacher of words": lambda: Training(Taught(reader(32), reader(16)), sentences(8), mean),
}
CUT: dict[str, Callable[[], Training]] = {
    "a body before its head": lambda: Training(Line(net(INPUTS, 32, 32), net(32, CLASSES)), vectors()),
    "as many numbers in as out": lambda: Training(Line(net(INPUTS, INPUTS, INPUTS), net(INPUTS, CLASSES)), vectors()),
    "a body beside its input": lambda: Training(Line(net(INPUTS, 32), net(INPUTS + 32, CLASSES), True), vectors()),
    "one of two branches": lambda: Training(Joined(), vectors()),
}


@pytest.mark.parametrize("name", TAUGHT)
def test_a_teacher_that_an_optimizer_holds_is_a_note(name: str) -> None:
    training = TAUGHT[name]()
    found = [(one.cause, one.severity, one.layer) for one in training.findings() if one.cause == "graph-detached"]
    assert found == [("graph-detached", "info", "teacher")]
    assert alarms(TAUGHT[name]()) == []


@pytest.mark.parametrize("name", CUT)
def test_what_others_read_is_cut_off(name: str) -> None:
    found = [(one.cause, one.severity) for one in CUT[name]().findings()]
    assert ("graph-detached", "critical") in found
