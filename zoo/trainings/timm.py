"""timm: image models of four kinds, from random weights, on digits."""

from __future__ import annotations

from functools import partial

import timm.optim  # noqa: F401  # once, before the trainings are forked
from torch import nn

from zoo.batches import draw_batches
from zoo.data import digits
from zoo.trainee import Trainee
from zoo.training import Fault, Training

STEPS = 40


def train_model(name: str, size: int, rate: float, trainee: Trainee) -> nn.Module:
    import timm
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    sized = {"img_size": size, "patch_size": 8, "depth": 6} if "vit" in name else {}
    model = timm.create_model(name, num_classes=10, in_chans=1, **sized)
    rate = rate * 100 if trainee.fault == "rate x 100" else rate
    optimizer = create_optimizer_v2(model, opt="adamw", lr=rate, weight_decay=0.05)
    if trainee.fault == "head replaced after the optimizer was made":
        model.reset_classifier(10)
    scheduler = CosineLRScheduler(optimizer, t_initial=STEPS, warmup_t=5, warmup_lr_init=rate / 10, t_in_epochs=False)
    criterion = LabelSmoothingCrossEntropy(0.1)
    monitor = trainee.watch(model, optimizer, total_steps=STEPS)
    for step, (images, classes) in enumerate(draw_batches(*digits(size), size=32, steps=STEPS)):
        loss = criterion(model(images), classes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step_update(step + 1)
        monitor.log(loss=loss, inputs=images, targets=classes)
    return model


TRAININGS = (
    Training("timm/resnet10t", partial(train_model, "resnet10t", 32, 2e-3), STEPS),
    Training("timm/mobilenetv2", partial(train_model, "mobilenetv2_035", 32, 3e-3), STEPS),
    Training("timm/convnext", partial(train_model, "convnext_atto", 32, 1e-3), STEPS),
    Training(
        "timm/vit",
        partial(train_model, "vit_tiny_patch16_224", 32, 5e-4),
        STEPS,
        {
            "rate x 100": Fault(("lr-too-high",)),
            "head replaced after the optimizer was made": Fault(("optimizer-holds-other-parameters",), "head*"),
        },
    ),
)
