"""schedulefree: its own package, whose optimizers are put into training and evaluation mode."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.nn.functional import cross_entropy

from zoo.batches import draw_batches
from zoo.data import digits
from zoo.trainee import Trainee
from zoo.training import Training

STEPS = 66


def train_by(name: str, rate: float, trainee: Trainee) -> nn.Module:
    import schedulefree

    images, classes = digits()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = getattr(schedulefree, name)(model.parameters(), lr=rate, warmup_steps=5)
    monitor = trainee.watch(model, optimizer)
    for step, (x, y) in enumerate(draw_batches(images, classes, size=64, steps=STEPS)):
        if step % 22 == 0:  # an epoch: evaluation is by the averaged weights
            model.eval()
            optimizer.eval()
            monitor.log(val_loss=cross_entropy(model(images[-300:]), classes[-300:]).item())
            model.train()
            optimizer.train()
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        monitor.log(loss=loss, inputs=x, targets=y)
    return model


TRAININGS = (
    Training("schedulefree/adamw", partial(train_by, "AdamWScheduleFree", 5e-3), STEPS),
    Training("schedulefree/sgd", partial(train_by, "SGDScheduleFree", 1.0), STEPS),
)
