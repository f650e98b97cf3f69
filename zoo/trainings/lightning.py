"""Lightning: a classifier with validation and a schedule, and a GAN that steps its optimizers by hand."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from zoo.data import digits
from zoo.trainee import Trainee
from zoo.training import Fault, Training


class Classifier(LightningModule):
    def __init__(self, steps: int, fault: str | None) -> None:
        super().__init__()
        self.steps, self.fault = steps, fault
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Flatten(), nn.Dropout(0.2)),
        )
        self.head = nn.Linear(512, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images)
        logits = self.head(features.detach() if self.fault == "features detached" else features)
        return logits.softmax(-1) if self.fault == "softmax before the loss" else logits

    def training_step(self, batch: Any, place: int) -> Tensor:
        loss = cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, place: int) -> None:
        self.log("val_loss", cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=self.steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Gan(LightningModule):
    """Two optimizers, stepped by hand in each training_step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(16, 64), nn.BatchNorm1d(64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1)
        )

    def training_step(self, batch: Any, place: int) -> None:
        real = batch[0].flatten(1)
        first, second = self.optimizers()  # type: ignore[misc]
        noise = torch.randn(len(real), 16)
        self.toggle_optimizer(first)
        truth, fake = self.discriminator(real), self.discriminator(self.generator(noise).detach())
        loss = _loss(truth, 0.9) + _loss(fake, 0.0)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        loss = _loss(self.discriminator(self.generator(noise)), 1.0)
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)

    def configure_optimizers(self) -> Any:
        options = {"lr": 2e-4, "betas": (0.5, 0.999)}
        return [
            torch.optim.Adam(self.discriminator.parameters(), **options),
            torch.optim.Adam(self.generator.parameters(), **options),
        ]


class Auxiliary(LightningModule):
    """A second head with an optimizer of its own: both are stepped by hand after one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU())
        self.head, self.auxiliary = nn.Linear(64, 10), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x)
        return self.head(hidden), self.auxiliary(hidden.detach())

    def training_step(self, batch: Any, place: int) -> None:
        digit, parity = self(batch[0])
        loss = cross_entropy(digit, batch[1]) + cross_entropy(parity, batch[1] % 2)
        self.log("loss", loss)
        optimizers = self.optimizers()
        for optimizer in optimizers:  # type: ignore[union-attr]
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:  # type: ignore[union-attr]
            optimizer.step()

    def configure_optimizers(self) -> Any:
        main = torch.optim.Adam([*self.body.parameters(), *self.head.parameters()], lr=2e-3)
        return [main, torch.optim.SGD(self.auxiliary.parameters(), lr=0.1)]


def _loss(logits: Tensor, truth: float) -> Tensor:
    return binary_cross_entropy_with_logits(logits, torch.full_like(logits, truth))


def fit(trainee: Trainee, module: LightningModule, loaders: Any, **options: Any) -> nn.Module:
    warnings.simplefilter("ignore")
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=trainee.directory,
        callbacks=[trainee.callback("lightning")],
        **options,
    )
    trainer.fit(module, *loaders)
    return module


def classifier(trainee: Trainee) -> nn.Module:
    images, classes = digits()
    train = DataLoader(TensorDataset(images[:1280], classes[:1280]), batch_size=32, shuffle=True)
    held = DataLoader(TensorDataset(images[1280:], classes[1280:]), batch_size=128)
    module = Classifier(80, trainee.fault)
    return fit(trainee, module, (train, held), max_epochs=2, gradient_clip_val=1.0)


def gan(trainee: Trainee) -> nn.Module:
    images, classes = digits()
    images = images / images.abs().max()
    train = DataLoader(TensorDataset(images, classes), batch_size=64, shuffle=True, drop_last=True)
    return fit(trainee, Gan(), (train,), max_epochs=2)


def two_optimizers(trainee: Trainee) -> nn.Module:
    images, classes = digits()
    train = DataLoader(TensorDataset(images[:1280], classes[:1280]), batch_size=32, shuffle=True)
    return fit(trainee, Auxiliary(), (train,), max_epochs=2)


TRAININGS = (
    Training(
        "lightning/classifier",
        classifier,
        80,
        {
            "softmax before the loss": Fault(("double-softmax",)),
            "features detached": Fault(("graph-detached",), "body*"),
        },
    ),
    Training("lightning/manual-gan", gan, 2 * 2 * 28),
    Training("lightning/two-optimizers", two_optimizers, 80),
)
