"""What the models of the clinic learn: data made by a seed, or bytes of the standard library; nothing is downloaded."""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

IMAGE, SERIES, CHANNELS, FEATURES, BYTES = 12, 20, 3, 32, 256
CONTEXT = 24  # bytes that the transformer sees at once


@dataclass(frozen=True, eq=False)
class Examples:
    """A data set, and one like it that is not trained on; targets are classes or, of a regression, numbers."""

    inputs: Tensor
    targets: Tensor
    held_inputs: Tensor
    held_targets: Tensor
    outputs: int

    @property
    def is_classes(self) -> bool:
        return not self.targets.is_floating_point()


def _split(inputs: Tensor, targets: Tensor, outputs: int, held: int) -> Examples:
    return Examples(inputs[held:], targets[held:], inputs[:held], targets[:held], outputs)


def points(seed: int, examples: int, classes: int, held: int = 512) -> Examples:
    """Three clouds of points a class in 32 dimensions, close enough that a little doubt always remains."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(3 * classes, FEATURES, generator=random) * 0.75
    cloud = torch.randint(3 * classes, (examples + held,), generator=random)
    inputs = centres[cloud] + torch.randn(len(cloud), FEATURES, generator=random)
    return _split(inputs / inputs.std(), cloud % classes, classes, held)


def images(seed: int, examples: int, classes: int, held: int = 512) -> Examples:
    """Smooth patterns, a few a class, shifted by up to two pixels and noisy."""
    random = torch.Generator().manual_seed(seed)
    coarse = torch.randn(2 * classes, 1, 5, 5, generator=random)
    patterns = torch.nn.functional.interpolate(coarse, IMAGE + 4, mode="bicubic", align_corners=True)[:, 0]
    kind = torch.randint(2 * classes, (examples + held,), generator=random)
    down, right = torch.randint(5, (2, len(kind)), generator=random)
    pixels = torch.arange(IMAGE)
    rows, columns = (down[:, None] + pixels)[:, :, None], (right[:, None] + pixels)[:, None]
    inputs = patterns[kind[:, None, None], rows, columns]
    inputs = inputs + 0.8 * torch.randn(inputs.shape, generator=random)
    return _split((inputs / inputs.std())[:, None], kind % classes, classes, held)


def series(seed: int, examples: int, classes: int, held: int = 512) -> Examples:
    """Waves whose frequencies, and a little their level, tell the class; of any phase: [examples, time, channels]."""
    random = torch.Generator().manual_seed(seed)
    frequencies = 0.15 + 0.85 * torch.rand(classes, CHANNELS, generator=random)
    levels = 0.5 * torch.randn(classes, CHANNELS, generator=random)
    kind = torch.randint(classes, (examples + held,), generator=random)
    phase = 2 * math.pi * torch.rand(len(kind), 1, CHANNELS, generator=random)
    waves = torch.sin(frequencies[kind][:, None] * torch.arange(SERIES)[None, :, None] + phase)
    inputs = waves + levels[kind][:, None] + 0.3 * torch.randn(waves.shape, generator=random)
    return _split(inputs / inputs.std(), kind, classes, held)


def function(seed: int, examples: int, outputs: int, held: int = 512) -> Examples:
    """What a random network makes of its inputs, with a little noise: a regression."""
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(examples + held, FEATURES, generator=random)
    first = torch.randn(FEATURES, 24, generator=random) * FEATURES**-0.5 * 1.5
    second = torch.randn(24, outputs, generator=random) * 24**-0.5
    targets = torch.tanh(inputs @ first) @ second
    targets = targets / targets.std() + 0.2 * torch.randn(len(inputs), outputs, generator=random)
    return _split(inputs, targets, outputs, held)


@cache
def _library() -> Tensor:
    """Half a million bytes of the standard library's sources, uint8."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) > 500_000:
            break
    if not text:
        raise ValueError(f"the clinic learns from the Python standard library, but {folder} holds no source files")
    return torch.frombuffer(text, dtype=torch.uint8)


def text(seed: int, examples: int, outputs: int = BYTES, held: int = 256) -> Examples:
    """Windows of Python source and the byte that follows each: int64 [examples, CONTEXT]."""
    random = torch.Generator().manual_seed(seed)
    corpus = _library()
    starts = torch.randint(len(corpus) - CONTEXT - 1, (examples + held, 1), generator=random)
    windows = corpus[starts + torch.arange(CONTEXT + 1)].long()
    return _split(windows[:, :-1], windows[:, 1:], outputs, held)
