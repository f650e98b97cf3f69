"""Half precision as people use it: what looks like numbers lost in float16, and that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.wild_trainings import CLASSES, INPUTS, Gpt, Training, Vit, adapted, alarms, cross_entropy, images, sentences
from tests.wild_trainings import vectors as points

HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def scaler(power: int) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**power)


def net() -> nn.Sequential:
    hidden = [nn.Linear(INPUTS, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(64, CLASSES))


def faint(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda output, y: factor * cross_entropy(output, y)


HEALTHY: dict[str, Callable[[], Training]] = {
    "bfloat16, accumulated": lambda: Training(
        net(), points(noise=0.1), faint(1e-3), autocast=BRAIN, accumulate=2, steps=60
    ),
    "words in bfloat16": lambda: Training(Gpt(unused=200), sentences(4), autocast=BRAIN, accumulate=2, steps=20),
    "adapters in bfloat16": lambda: Training(adapted(Gpt()), sentences(8), autocast=BRAIN, steps=20),
    "words in float16, most of them unused": lambda: Training(
        Gpt(unused=300), sentences(8), autocast=HALF, scaler=scaler(14), steps=15
    ),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_what_is_healthy_is_not_warned_of(name: str) -> None:
    assert alarms(HEALTHY[name](), budget=None) == []


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_nor_where_processes_take_the_mean_of_bfloat16() -> None:
    model = nn.parallel.DistributedDataParallel(net(), gradient_as_bucket_view=True)
    training = Training(model, points(noise=0.1), faint(1e-3), autocast=BRAIN, accumulate=2, steps=60)
    assert alarms(training, budget=None) == []


FAULTS: dict[str, Callable[[], Training]] = {
    "images": lambda: Training(Vit(), images(), faint(1e-4), autocast=HALF, steps=20),
    "words": lambda: Training(Gpt(), sentences(8), faint(1e-5), autocast=HALF, steps=15),
    "a recurrent layer": lambda: Training(Reader(), points(width=64), faint(1e-5), autocast=HALF, steps=15),
}


class Reader(nn.Module):
    """Under autocast it computes in float16, and puts out float32."""

    def __init__(self) -> None:
        super().__init__()
        self.reader, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.reader(x.unflatten(1, (-1, 8)))[0][:, -1])


@pytest.mark.parametrize("name", FAULTS)
def test_gradients_that_float16_cannot_hold_are_named(name: str) -> None:
    found = alarms(FAULTS[name](), budget=None)
    assert found and found[0][0] == "fp16-underflow"


def brain(rate: float, noise: float) -> Training:
    """All in bfloat16, and no master weights."""
    model, drawn = net().to(BRAIN), points(noise=noise)

    def batch(step: int) -> tuple[Tensor, Tensor]:
        x, y = drawn(step)
        return x.to(BRAIN), y

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(output.float(), y)

    return Training(model, batch, loss, torch.optim.AdamW(model.parameters(), rate), steps=150)


def test_updates_that_are_lost_once_all_is_learnt_are_a_note() -> None:
    """Before, the same share of them is a warning: a loss that has not come down all the way may stay where it is."""
    learnt = [one.severity for one in brain(1e-3, 0.1).findings(budget=None) if one.cause == "bf16-update-lost"]
    stuck = [one.severity for one in brain(3e-5, 0.1).findings(budget=None) if one.cause == "bf16-update-lost"]
    assert learnt == ["info"] and stuck == ["warning"]
