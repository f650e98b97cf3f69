"""A small byte-level GPT: pre-norm blocks, causal attention, and an output that shares the embedding's weights."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256
_STD = 0.02  # GPT-2's


class ByteGPT(nn.Module):
    """Predicts the next byte of each: bytes [batch, length] -> logits [batch, length, 256]."""

    def __init__(self, *, depth: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        blocks = [Block(width, heads) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(_initialise)
        # Every block adds twice to the residual stream: scaled so that its variance does not grow with depth.
        for block in blocks:
            for last in (block.attention.output, block.mlp.down):
                nn.init.normal_(last.weight, std=_STD / math.sqrt(2 * depth))

    def forward(self, tokens: Tensor) -> Tensor:
        stream: Tensor = self.embedding(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, stream: Tensor) -> Tensor:
        stream = stream + self.attention(self.attention_norm(stream))
        updated: Tensor = stream + self.mlp(self.mlp_norm(stream))
        return updated


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        split = self.query_key_value(x).unflatten(-1, (3, self.heads, -1))  # [batch, length, 3, heads, head width]
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)  # [batch, heads, length, head width]
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(F.gelu(self.up(x)))
        return down


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
