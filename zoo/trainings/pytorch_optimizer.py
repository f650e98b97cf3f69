"""pytorch_optimizer: a small convolutional net on digits by optimizers that are not torch's."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytorch_optimizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, AdamW

from zoo.batches import draw_batches
from zoo.data import digits
from zoo.trainee import Trainee
from zoo.training import Training

STEPS = 60
# The rates that their papers or their authors advise, where one fits a net as small as this one.
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdaBelief": {"lr": 1e-3},
    "AdaBound": {"lr": 1e-3, "final_lr": 0.1},
    "AdaFactor": {"lr": None},
    "AdaHessian": {"lr": 0.05},
    "AdamP": {"lr": 1e-3, "weight_decay": 1e-2},
    "AdEMAMix": {"lr": 1e-3},
    "Adan": {"lr": 2e-3, "weight_decay": 0.02, "weight_decouple": True},
    "CAME": {"lr": 2e-3},
    "DAdaptAdam": {"lr": 1.0},
    "Lamb": {"lr": 1e-2, "weight_decay": 0.01},
    "Lion": {"lr": 3e-4, "weight_decay": 0.1},
    "MADGRAD": {"lr": 1e-3},
    "NovoGrad": {"lr": 1e-2},
    "PAdam": {"lr": 0.1},
    "Prodigy": {"lr": 1.0, "safeguard_warmup": True},
    "QHAdam": {"lr": 2e-3},
    "RAdam": {"lr": 2e-3},
    "Ranger21": {"lr": 3e-3, "num_iterations": STEPS},
    "ScheduleFreeAdamW": {"lr": 5e-3, "warmup_steps": 5},
    "Shampoo": {"lr": 0.05, "momentum": 0.9},
    "SOAP": {"lr": 3e-3},
    "SophiaH": {"lr": 1e-2},
    "StableAdamW": {"lr": 2e-3},
    "Tiger": {"lr": 1e-3},
    "Yogi": {"lr": 1e-2},
}
SECOND_ORDER = {"AdaHessian", "SophiaH"}


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def train_with(name: str, trainee: Trainee) -> nn.Module:
    model = make_model()
    optimizer = getattr(pytorch_optimizer, name)(model.parameters(), **OPTIMIZERS[name])
    if hasattr(optimizer, "train"):
        optimizer.train()
    monitor = trainee.watch(model, optimizer)
    for inputs, targets in draw_batches(*digits(), size=64, steps=STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward(create_graph=name in SECOND_ORDER)
        optimizer.step()
        monitor.log(loss=loss, inputs=inputs, targets=targets)
    return model


def train_muon(trainee: Trainee) -> nn.Module:
    model = make_model()
    matrices = [weight for weight in model[3:8].parameters() if weight.ndim > 1]
    rest = [weight for weight in model.parameters() if not any(weight is matrix for matrix in matrices)]
    groups = [{"params": matrices, "use_muon": True, "lr": 0.02}, {"params": rest, "use_muon": False, "lr": 3e-3}]
    optimizer = pytorch_optimizer.Muon(groups)
    monitor = trainee.watch(model, optimizer)
    for inputs, targets in draw_batches(*digits(), size=64, steps=STEPS):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss, inputs=inputs, targets=targets)
    return model


def train_lookahead(trainee: Trainee) -> nn.Module:
    model = make_model()
    optimizer = pytorch_optimizer.Lookahead(AdamW(model.parameters(), lr=2e-3), k=5, alpha=0.5)
    monitor = trainee.watch(model, optimizer)
    for inputs, targets in draw_batches(*digits(), size=64, steps=STEPS):
        optimizer.zero_grad()
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, inputs=inputs, targets=targets)
    return model


def train_sam_in_two_steps(trainee: Trainee) -> nn.Module:
    """Sharpness-aware minimisation: climb to the worst weights nearby, then step by the gradient found there."""
    model = make_model()
    optimizer = pytorch_optimizer.SAM(model.parameters(), SGD, lr=0.05, momentum=0.9)
    monitor = trainee.watch(model, optimizer)
    for inputs, targets in draw_batches(*digits(), size=64, steps=STEPS):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.first_step(zero_grad=True)
        cross_entropy(model(inputs), targets).backward()
        optimizer.second_step(zero_grad=True)
        monitor.log(loss=loss, inputs=inputs, targets=targets)
    return model


def train_sam_by_closure(trainee: Trainee) -> nn.Module:
    model = make_model()
    optimizer = pytorch_optimizer.SAM(model.parameters(), SGD, lr=0.05, momentum=0.9)
    monitor = trainee.watch(model, optimizer)
    for inputs, targets in draw_batches(*digits(), size=64, steps=STEPS):

        def find_loss(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            loss = cross_entropy(model(inputs), targets)
            loss.backward()
            return loss

        loss = find_loss()
        optimizer.step(find_loss)
        optimizer.zero_grad()
        monitor.log(loss=loss.detach(), inputs=inputs, targets=targets)
    return model


TRAININGS = (
    *(Training(f"pytorch-optimizer/{name.lower()}", partial(train_with, name), STEPS) for name in OPTIMIZERS),
    Training("pytorch-optimizer/muon", train_muon, STEPS),
    Training("pytorch-optimizer/lookahead", train_lookahead, STEPS),
    Training("pytorch-optimizer/sam", train_sam_in_two_steps, STEPS),
    Training("pytorch-optimizer/sam-closure", train_sam_by_closure, STEPS),
)
