"""fastai: its Learner, with its own Optimizer, on images and on a table."""

from __future__ import annotations

from typing import Any

import fastai.tabular.all  # noqa: F401  # once, before the trainings are forked
from torch import nn

from zoo.data import digits
from zoo.trainee import Trainee
from zoo.training import Training


def fit(learner: Any, trainee: Trainee, epochs: int, rate: float) -> nn.Module:
    from fastai.callback import schedule  # noqa: F401  # gives the Learner fit_one_cycle
    from fastai.callback.core import Callback
    from fastai.callback.progress import ProgressCallback
    from fastai.learner import Recorder

    class Watch(Callback):  # type: ignore[misc]  # fastai is untyped
        def before_fit(self) -> None:
            self.monitor = trainee.watch(self.learn.model, self.learn.opt)

        def after_loss(self) -> None:
            if self.training:
                self.monitor.log(loss=self.learn.loss, targets=self.learn.yb[0])

    learner.remove_cbs([ProgressCallback, Recorder])
    learner.fit_one_cycle(epochs, rate, cbs=Watch())
    model: nn.Module = learner.model
    return model


def train_images(trainee: Trainee) -> nn.Module:
    from fastai.data.core import DataLoaders
    from fastai.layers import SimpleCNN
    from fastai.learner import Learner
    from torch.utils.data import DataLoader, TensorDataset

    images, classes = digits(16)
    parts = [TensorDataset(images[part], classes[part]) for part in (slice(0, 960), slice(960, 1200))]
    loaders = DataLoaders(DataLoader(parts[0], 64, shuffle=True, drop_last=True), DataLoader(parts[1], 64))
    model = SimpleCNN([1, 16, 32, 10])
    return fit(Learner(loaders, model, loss_func=nn.CrossEntropyLoss()), trainee, epochs=3, rate=3e-3)


def train_table(trainee: Trainee) -> nn.Module:
    import pandas
    from fastai.tabular.all import Categorify, Normalize, TabularDataLoaders, tabular_learner
    from sklearn.datasets import load_breast_cancer

    loaded = load_breast_cancer(as_frame=True)
    table = loaded.frame.sample(frac=1, random_state=0)
    measured = list(loaded.data.columns)
    table["large"] = pandas.Categorical(table["mean area"] > 600)
    table["target"] = table["target"].map({0: "malignant", 1: "benign"})
    loaders = TabularDataLoaders.from_df(
        table,
        procs=[Categorify, Normalize],
        cat_names=["large"],
        cont_names=measured,
        y_names="target",
        valid_idx=list(range(80)),
        bs=64,
    )
    return fit(tabular_learner(loaders, layers=[64, 32]), trainee, epochs=8, rate=3e-3)


TRAININGS = (
    Training("fastai/convolutions", train_images, 45),
    Training("fastai/tabular", train_table, 56),
)
