"""skorch: a classifier and a regressor with the interface of scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy
import skorch  # noqa: F401  # once, before the trainings are forked
import torch
from torch import nn

from zoo.data import digits
from zoo.trainee import Trainee
from zoo.training import Fault, Training


def watching(trainee: Trainee) -> Any:
    """Return a callback for skorch that watches from the first batch on."""
    from skorch.callbacks import Callback

    class Watch(Callback):  # type: ignore[misc]  # skorch is untyped
        def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **others: Any) -> None:
            self.monitor = trainee.watch(net.module_, net.optimizer_)

        def on_batch_end(
            self, net: Any, batch: Any = None, training: bool = False, loss: Any = None, **others: Any
        ) -> None:
            if training:
                self.monitor.log(loss=loss, inputs=batch[0], targets=batch[1])

    return Watch()


def train_classifier(trainee: Trainee) -> nn.Module:
    from skorch import NeuralNetClassifier
    from skorch.callbacks import EpochScoring, GradientNormClipping

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    if trainee.fault == "softmax before cross-entropy":
        model.append(nn.Softmax(dim=1))
    longest = 1e-4 if trainee.fault == "clipped at 0.0001" else 5.0
    images, classes = digits()
    net = NeuralNetClassifier(
        model,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.SGD,
        optimizer__momentum=0.9,
        lr=0.05,
        batch_size=128,
        max_epochs=6,
        iterator_train__shuffle=True,
        verbose=0,
        callbacks=[EpochScoring("accuracy"), GradientNormClipping(longest), watching(trainee)],
    )
    net.fit(images.numpy(), classes.numpy())
    trained: nn.Module = net.module_
    return trained


def train_regressor(trainee: Trainee) -> nn.Module:
    from sklearn.datasets import load_diabetes
    from sklearn.preprocessing import StandardScaler
    from skorch import NeuralNetRegressor

    features, targets = load_diabetes(return_X_y=True)
    scaled = StandardScaler().fit_transform(targets[:, None])
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1))
    net = NeuralNetRegressor(
        model,
        optimizer=torch.optim.AdamW,
        lr=3e-3,
        batch_size=32,
        max_epochs=6,
        iterator_train__shuffle=True,
        verbose=0,
        callbacks=[watching(trainee)],
    )
    net.fit(StandardScaler().fit_transform(features).astype(numpy.float32), scaled.astype(numpy.float32))
    trained: nn.Module = net.module_
    return trained


TRAININGS = (
    Training(
        "skorch/classifier",
        train_classifier,
        72,
        {
            "softmax before cross-entropy": Fault(("double-softmax",)),
            "clipped at 0.0001": Fault(("clipping-too-tight",)),
        },
    ),
    Training("skorch/regressor", train_regressor, 72),
)
