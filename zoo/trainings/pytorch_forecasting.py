"""pytorch-forecasting: its networks by Lightning on series with seasons, and Holter's own callback."""

from __future__ import annotations

from typing import Any

import numpy
import pytorch_forecasting  # noqa: F401  # once, before the trainings are forked
from torch import nn

from zoo.trainee import Trainee
from zoo.training import Training

STEPS = 40


def make_series(count: int = 12, length: int = 120) -> Any:
    import pandas

    generator = numpy.random.default_rng(0)
    time = numpy.tile(numpy.arange(length), count)
    group = numpy.repeat(numpy.arange(count), length)
    level = generator.normal(3, 1, count)[group]
    value = level + numpy.sin(2 * numpy.pi * (time + 3 * group) / 12) + 0.2 * generator.normal(size=len(time))
    return pandas.DataFrame({"time": time, "group": group.astype(str), "value": value.astype(numpy.float32)})


def fit(model: Any, loader: Any, trainee: Trainee, **options: Any) -> nn.Module:
    from lightning.pytorch import Trainer

    trainer = Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[trainee.callback("lightning")],
        **options,
    )
    trainer.fit(model, loader)
    trained: nn.Module = model
    return trained


def train_tft(trainee: Trainee) -> nn.Module:
    from pytorch_forecasting import QuantileLoss, TemporalFusionTransformer, TimeSeriesDataSet

    data = TimeSeriesDataSet(
        make_series(),
        time_idx="time",
        target="value",
        group_ids=["group"],
        static_categoricals=["group"],
        max_encoder_length=24,
        max_prediction_length=6,
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["value"],
    )
    model = TemporalFusionTransformer.from_dataset(
        data,
        learning_rate=0.01,
        hidden_size=16,
        attention_head_size=2,
        dropout=0.1,
        hidden_continuous_size=8,
        loss=QuantileLoss(),
        log_interval=-1,
    )
    return fit(model, data.to_dataloader(train=True, batch_size=32), trainee, gradient_clip_val=0.1)


def train_nbeats(trainee: Trainee) -> nn.Module:
    from pytorch_forecasting import NBeats, TimeSeriesDataSet

    data = TimeSeriesDataSet(
        make_series(),
        time_idx="time",
        target="value",
        group_ids=["group"],
        max_encoder_length=24,
        max_prediction_length=6,
        time_varying_unknown_reals=["value"],
    )
    model = NBeats.from_dataset(data, learning_rate=1e-2, widths=[32, 256], log_interval=-1)
    return fit(model, data.to_dataloader(train=True, batch_size=32), trainee, gradient_clip_val=1.0)


TRAININGS = (
    Training("pytorch-forecasting/tft", train_tft, STEPS),
    Training("pytorch-forecasting/nbeats", train_nbeats, STEPS),
)
