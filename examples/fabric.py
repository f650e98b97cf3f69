"""Holter in a Lightning Fabric loop. Watch the model and the optimizer that you built, after `fabric.setup`: Fabric's
wrappers call them, and `fabric.clip_gradients` is seen before it scales.

    python examples/fabric.py [directory of the run]
"""

from __future__ import annotations

import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holter

STEPS, BATCH, MAX_NORM = 60, 32, 0.5


def digits() -> TensorDataset:
    """Points around ten centres, to be told apart."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(STEPS * BATCH) % 10
    centres = torch.randn(10, 16, generator=generator)
    return TensorDataset(centres[labels] + 0.5 * torch.randn(len(labels), 16, generator=generator), labels)


def main(run: str | None = None) -> holter.Monitor:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(0, verbose=False)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 10))
    adam = torch.optim.Adam(net.parameters(), 3e-3)
    model, optimizer = fabric.setup(net, adam)
    loader = fabric.setup_dataloaders(DataLoader(digits(), BATCH))

    with holter.watch(net, adam, run=run, total_steps=STEPS) as monitor:
        for x, y in monitor.batches(loader):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=MAX_NORM)
            optimizer.step()
            monitor.log(loss=loss, inputs=x, targets=y)
    return monitor


if __name__ == "__main__":
    finished = main(*sys.argv[1:2])
    print(finished)
    print(*finished.findings, sep="\n")
