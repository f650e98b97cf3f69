"""Accelerate: a loop of one's own with accumulation and a clip."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_linear_schedule_with_warmup

from zoo.data import digits
from zoo.trainee import Trainee
from zoo.training import Fault, Training


def accumulation(trainee: Trainee) -> nn.Module:
    images, classes = digits()
    if trainee.fault == "a NaN in the images":
        images[700, 0, 3, 3] = float("nan")
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.GELU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.GELU(), nn.Flatten(), nn.Linear(512, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(TensorDataset(images, classes), batch_size=16, shuffle=True, drop_last=True)
    schedule = get_linear_schedule_with_warmup(optimizer, 5, 56)
    prepared = accelerator.prepare(model, optimizer, loader, schedule)
    wrapped, stepping, batches, scheduling = prepared
    monitor = trainee.watch_accelerator(accelerator, wrapped, stepping)
    wrapped.train()
    for x, y in batches:
        with accelerator.accumulate(wrapped):
            loss = cross_entropy(wrapped(x), y)
            if trainee.fault == "the sum of the losses":
                loss = cross_entropy(wrapped(x), y, reduction="sum")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0)
            stepping.step()
            scheduling.step()
            stepping.zero_grad()
        monitor.log(loss=loss.detach(), inputs=x, targets=y)
    accelerator.end_training()
    return model


TRAININGS = (
    Training(
        "accelerate/accumulation",
        accumulation,
        56,
        {"a NaN in the images": Fault(("nan-in-data",)), "the sum of the losses": Fault(("loss-reduction",))},
    ),
)
