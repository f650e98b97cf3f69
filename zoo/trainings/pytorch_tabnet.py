"""pytorch-tabnet: its classifier and its regressor, which have training loops of their own."""

from __future__ import annotations

from typing import Any

import numpy
from torch import nn

from zoo.trainee import Trainee
from zoo.training import Training


def fit(model: Any, features: Any, targets: Any, trainee: Trainee) -> nn.Module:
    """TabNet makes network and optimizer in fit(), so they are watched from a callback."""
    from pytorch_tabnet.callbacks import Callback

    class Watch(Callback):  # type: ignore[misc]  # pytorch-tabnet is untyped
        def on_train_begin(self, logs: Any = None) -> None:
            self.monitor = trainee.watch(self.trainer.network, self.trainer._optimizer)

        def on_batch_end(self, batch: int, logs: Any = None) -> None:
            self.monitor.log(loss=logs["loss"])

    model.fit(
        features, targets, max_epochs=8, batch_size=128, virtual_batch_size=64, drop_last=True, callbacks=[Watch()]
    )
    network: nn.Module = model.network
    return network


def train_classifier(trainee: Trainee) -> nn.Module:
    from pytorch_tabnet.tab_model import TabNetClassifier
    from sklearn.datasets import load_digits

    features, targets = load_digits(return_X_y=True)
    return fit(
        TabNetClassifier(verbose=0, device_name="cpu"), features.astype(numpy.float32)[:1024], targets[:1024], trainee
    )


def train_regressor(trainee: Trainee) -> nn.Module:
    from pytorch_tabnet.tab_model import TabNetRegressor
    from sklearn.datasets import make_friedman1

    features, targets = make_friedman1(1024, random_state=0)
    scaled = ((targets - targets.mean()) / targets.std()).astype(numpy.float32)
    return fit(TabNetRegressor(verbose=0, device_name="cpu"), features.astype(numpy.float32), scaled[:, None], trainee)


TRAININGS = (
    Training("pytorch-tabnet/classifier", train_classifier, 64),
    Training("pytorch-tabnet/regressor", train_regressor, 64),
)
