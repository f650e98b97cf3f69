"""lightly: self-supervised learning of digits by its losses and its heads."""

from __future__ import annotations

import copy

import lightly.loss  # noqa: F401  # once, before the trainings are forked
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from zoo.batches import draw_batches
from zoo.data import digits
from zoo.trainee import Trainee
from zoo.training import Training

STEPS = 60


def make_backbone() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def view(images: Tensor) -> Tensor:
    """Return the images shifted, scaled in contrast and with noise, each in its own way."""
    padded = nn.functional.pad(images, (1, 1, 1, 1), value=float(images.min()))
    down, right = torch.randint(0, 3, (2, len(images), 1))
    rows, columns = down + torch.arange(8), right + torch.arange(8)
    shifted = padded[torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None, :]]
    contrast = 0.7 + 0.6 * torch.rand(len(images), 1, 1)
    return (shifted * contrast + 0.1 * torch.randn_like(shifted)).unsqueeze(1)


def train_simclr(trainee: Trainee) -> nn.Module:
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead

    model = nn.Sequential(make_backbone(), SimCLRProjectionHead(64, 64, 32))
    criterion = NTXentLoss(temperature=0.5)
    optimizer = Adam(model.parameters(), lr=2e-3)
    monitor = trainee.watch(model, optimizer)
    for (images,) in draw_batches(digits()[0], size=128, steps=STEPS):
        loss = criterion(model(view(images)), model(view(images)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, inputs=images)
    return model


class SimSiam(nn.Module):
    def __init__(self) -> None:
        from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead

        super().__init__()
        self.backbone = make_backbone()
        self.projection = SimSiamProjectionHead(64, 64, 64)
        self.prediction = SimSiamPredictionHead(64, 16, 64)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        projected = self.projection(self.backbone(images))
        return projected.detach(), self.prediction(projected)


def train_simsiam(trainee: Trainee) -> nn.Module:
    from lightly.loss import NegativeCosineSimilarity

    model = SimSiam()
    criterion = NegativeCosineSimilarity()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    monitor = trainee.watch(model, optimizer)
    for (images,) in draw_batches(digits()[0], size=128, steps=STEPS):
        (z0, p0), (z1, p1) = model(view(images)), model(view(images))
        loss = 0.5 * (criterion(z0, p1) + criterion(z1, p0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, inputs=images)
    return model


class MoCo(nn.Module):
    """Queries are trained; keys come from a copy that follows slowly and has no gradient."""

    def __init__(self) -> None:
        from lightly.models.modules import MoCoProjectionHead
        from lightly.models.utils import deactivate_requires_grad

        super().__init__()
        self.query = nn.Sequential(make_backbone(), MoCoProjectionHead(64, 64, 32))
        self.key = copy.deepcopy(self.query)
        deactivate_requires_grad(self.key)


def train_moco(trainee: Trainee) -> nn.Module:
    from lightly.loss import NTXentLoss
    from lightly.models.utils import update_momentum

    model = MoCo()
    criterion = NTXentLoss(temperature=0.2, memory_bank_size=(512, 32))
    optimizer = SGD(model.query.parameters(), lr=0.06, momentum=0.9)
    monitor = trainee.watch(model, optimizer)
    for (images,) in draw_batches(digits()[0], size=128, steps=STEPS):
        update_momentum(model.query, model.key, m=0.99)
        with torch.no_grad():
            keys = model.key(view(images))
        loss = criterion(model.query(view(images)), keys)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, inputs=images)
    return model


TRAININGS = (
    Training("lightly/simclr", train_simclr, STEPS),
    Training("lightly/simsiam", train_simsiam, STEPS),
    Training("lightly/moco", train_moco, STEPS),
)
