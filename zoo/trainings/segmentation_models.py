"""segmentation-models-pytorch: a Unet and a Linknet from random weights; the pixels of a digit are found in noise."""

from __future__ import annotations

from functools import partial

import segmentation_models_pytorch  # once, before the trainings are forked
import torch
from torch import nn
from torch.optim import AdamW

from zoo.batches import draw_batches
from zoo.data import digits
from zoo.trainee import Trainee
from zoo.training import Fault, Training

STEPS = 30


def train_model(architecture: str, trainee: Trainee) -> nn.Module:
    images = digits(32)[0]
    masks = (images > 0.5).float()
    images = images + 0.5 * torch.randn_like(images)
    model: nn.Module = segmentation_models_pytorch.create_model(
        architecture, encoder_name="resnet18", encoder_weights=None, in_channels=1, classes=1
    )
    overlap = segmentation_models_pytorch.losses.DiceLoss("binary", from_logits=True)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    monitor = trainee.watch(model, optimizer)
    batches = list(draw_batches(images, masks, size=16, steps=STEPS))
    for step, (image, mask) in enumerate(batches):
        if trainee.fault == "the same batch at every step":
            image, mask = batches[0]
        if trainee.fault == "empty image" and step == 12:
            image[3] = torch.zeros(1) / torch.zeros(32, 32).std()  # standardised by its own deviation
        outputs = model(image)
        loss = overlap(outputs, mask) + nn.functional.binary_cross_entropy_with_logits(outputs, mask)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, inputs=image, targets=mask)
    return model


TRAININGS = (
    Training(
        "segmentation-models/unet",
        partial(train_model, "unet"),
        STEPS,
        {"empty image": Fault(("nan-in-data",)), "the same batch at every step": Fault(("batch-repeated",))},
    ),
    Training("segmentation-models/linknet", partial(train_model, "linknet"), STEPS),
)
