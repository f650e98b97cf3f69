"""The models of the clinic: small, each of another kind, and each learns its task when nothing is wrong."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

ATTENDING = ("transformer", "patches", "tied", "massive")

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


GAINS: dict[str, Literal["relu", "tanh", "sigmoid"]] = {
    "relu": "relu",
    "gelu": "relu",
    "tanh": "tanh",
    "sigmoid": "sigmoid",
}


def linear(inputs: int, outputs: int, activation: str) -> nn.Linear:
    """A layer whose outputs keep their variance behind this activation."""
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_normal_(layer.weight, nn.init.calculate_gain(GAINS[activation]))
    nn.init.zeros_(layer.bias)
    return layer


class Mlp(nn.Module):
    """Hidden layers in a row, optionally with batch norm between a layer and its activation."""

    def __init__(
        self, inputs: int, width: int, depth: int, outputs: int, activation: str = "relu", norm: bool = False
    ) -> None:
        super().__init__()
        sizes = [inputs] + [width] * depth
        self.layers = nn.ModuleList(linear(a, b, activation) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) if norm else nn.Identity() for _ in range(depth))
        self.activations = nn.ModuleList(ACTIVATIONS[activation]() for _ in range(depth))
        self.head = nn.Linear(width, outputs)

    def features(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer, norm, activation in zip(self.layers, self.norms, self.activations, strict=True):
            x = activation(norm(layer(x)))
        return x

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(x))
        return logits


def plain(inputs: int, width: int, depth: int, outputs: int, activation: str = "tanh") -> nn.Sequential:
    """A deep stack without norms or skips, its layers named one by one: fc1, act1, fc2, ..., out."""
    parts: list[tuple[str, nn.Module]] = [("flat", nn.Flatten())]
    for i in range(1, depth + 1):
        layer = linear(inputs if i == 1 else width, width, activation)
        parts += [(f"fc{i}", layer), (f"act{i}", ACTIVATIONS[activation]())]
    return nn.Sequential(OrderedDict([*parts, ("out", nn.Linear(width, outputs))]))


class ConvNet(nn.Module):
    """Convolution, batch norm, activation, repeated; every second stage halves the image."""

    def __init__(self, channels: int, depth: int, outputs: int, activation: str = "relu", norm: bool = True) -> None:
        super().__init__()
        stages: list[nn.Module] = []
        for i in range(depth):
            conv = nn.Conv2d(1 if i == 0 else channels, channels, 3, stride=1 + i % 2, padding=1, bias=not norm)
            nn.init.kaiming_normal_(conv.weight)
            parts = [conv, nn.BatchNorm2d(channels)] if norm else [conv]
            stages.append(nn.Sequential(*parts, ACTIVATIONS[activation]()))
        self.stages = nn.ModuleList(stages)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Linear(4 * channels, outputs)

    def features(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        pooled: Tensor = self.pool(x).flatten(1)
        return pooled

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x))
        return logits


class Recurrent(nn.Module):
    """Reads a series [batch, time, channels] and names its class from the mean of its states."""

    def __init__(self, channels: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(channels, width, depth, batch_first=True)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        logits: Tensor = self.head(states.mean(1))
        return logits


class TransformerBlock(nn.Module):
    """Pre-norm: attention and a two-layer network, each added to the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.up, self.gelu, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, stream: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(stream)
        stream = stream + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0]
        updated: Tensor = stream + self.down(self.gelu(self.up(self.norm2(stream))))
        return updated


class Transformer(nn.Module):
    """A language model over bytes: [batch, length] -> logits [batch, length, outputs]."""

    def __init__(self, width: int, depth: int, context: int, outputs: int, heads: int = 4) -> None:
        super().__init__()
        self.embedding, self.position = nn.Embedding(outputs, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)
        for table in (self.embedding, self.position, self.head):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool).triu(1)
        stream: Tensor = self.embedding(tokens) + self.position.weight[:length]
        for block in self.blocks:
            stream = block(stream, mask)
        logits: Tensor = self.head(self.norm(stream))
        return logits


class Patches(nn.Module):
    """A vision transformer of torch's own layers: an image cut into patches of 3 x 3."""

    def __init__(self, image: int, width: int, depth: int, outputs: int, heads: int = 4) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, width, 3, stride=3)
        self.position = nn.Parameter(0.02 * torch.randn((image // 3) ** 2, width))
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(depth)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        stream: Tensor = self.cut(x).flatten(2).transpose(1, 2) + self.position
        for layer in self.encoder:
            stream = layer(stream)
        logits: Tensor = self.head(self.norm(stream).mean(1))
        return logits


class ResidualBlock(nn.Module):
    def __init__(self, width: int, depth: int, activation: str, skip: bool) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, width), ACTIVATIONS[activation](), nn.Linear(width, width)
        self.skip = skip
        nn.init.kaiming_normal_(self.up.weight, nonlinearity="relu")
        # So that the stream's variance does not grow with depth; without a skip nothing else carries the signal.
        nn.init.xavier_normal_(self.down.weight, depth**-0.5 if skip else 1.0)
        for layer in (self.up, self.down):
            nn.init.zeros_(layer.bias)

    def forward(self, stream: Tensor) -> Tensor:
        branch: Tensor = self.down(self.act(self.up(stream)))
        return stream + branch if self.skip else branch


class ResidualMlp(nn.Module):
    """Blocks of two layers beside a skip, no norm."""

    def __init__(
        self, inputs: int, width: int, depth: int, outputs: int, activation: str = "relu", skip: bool = True
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(ResidualBlock(width, depth, activation, skip) for _ in range(depth))
        self.out = nn.Linear(width, outputs)

    def features(self, x: Tensor) -> Tensor:
        stream: Tensor = self.stem(x.flatten(1))
        for block in self.blocks:
            stream = block(stream)
        return stream

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.out(self.features(x))
        return result
