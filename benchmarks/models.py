"""The models that are measured: GPT-2 at two sizes, GPT-2 without biases, and a tiny one for a laptop."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from holter.demo_model import BYTES, ByteGPT

Shapes = dict[str, tuple[int, ...]]
Loss = Callable[[nn.Module, Tensor], Tensor]
GPT2_TOKENS, GPT2_CONTEXT = 50_257, 1024


@dataclass(frozen=True)
class Trainable:
    """A model to be trained, and its loss on a batch of tokens [batch, length]."""

    description: str
    build: Callable[[], nn.Module]
    loss: Loss
    tokens: int
    batch: int
    length: int


def gpt2_shapes(layers: int, width: int) -> Shapes:
    """Every parameter of a GPT-2, as transformers' GPT2LMHeadModel names them; the head shares the embedding."""
    shapes: Shapes = {"wte.weight": (GPT2_TOKENS, width), "wpe.weight": (GPT2_CONTEXT, width)}
    for layer in range(layers):
        within = {
            **_pair("ln_1", (width,)),
            **_pair("attn.c_attn", (width, 3 * width)),
            **_pair("attn.c_proj", (width, width)),
            **_pair("ln_2", (width,)),
            **_pair("mlp.c_fc", (width, 4 * width)),
            **_pair("mlp.c_proj", (4 * width, width)),
        }
        shapes |= {f"h.{layer}.{name}": shape for name, shape in within.items()}
    return shapes | _pair("ln_f", (width,))


def _pair(name: str, shape: tuple[int, ...]) -> Shapes:
    return {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}


def small_shapes() -> Shapes:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in _tiny().named_parameters()}


SHAPES: dict[str, Callable[[], Shapes]] = {
    "small": small_shapes,
    "gpt2": lambda: gpt2_shapes(12, 768),
    "gpt2-xl": lambda: gpt2_shapes(48, 1600),
}


def trainable(name: str, device: torch.device, batch: int | None, length: int | None) -> Trainable | None:
    """The model of this name as it is trained here; None where it is only measured."""
    if name == "small":
        return Trainable(
            "ByteGPT, 2 layers of 32", lambda: _tiny().to(device), _byte_loss, BYTES, batch or 4, min(length or 32, 32)
        )
    batch, length = batch or 16, length or GPT2_CONTEXT
    if name == "gpt2" and importlib.util.find_spec("transformers"):
        words = "transformers' GPT2LMHeadModel, random weights"
        return Trainable(words, lambda: _gpt2().to(device), _transformers_loss, GPT2_TOKENS, batch, length)
    if name in ("gpt2", "gpt2-plain"):
        words = "GPT-2 124M without biases, of demo_model's blocks"
        return Trainable(words, lambda: _plain_gpt2().to(device), _byte_loss, GPT2_TOKENS, batch, length)
    return None


def _tiny() -> ByteGPT:
    return ByteGPT(depth=2, width=32, heads=2, context=32)


def _plain_gpt2() -> ByteGPT:
    model = ByteGPT(depth=12, width=768, heads=12, context=GPT2_CONTEXT)
    model.embedding = nn.Embedding(GPT2_TOKENS, 768)
    nn.init.normal_(model.embedding.weight, std=0.02)
    model.head = nn.Linear(768, GPT2_TOKENS, bias=False)
    model.head.weight = model.embedding.weight
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    model: nn.Module = GPT2LMHeadModel(GPT2Config(use_cache=False))
    return model.train()


def _byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Tensor = model(tokens)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def _transformers_loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


class Branches(nn.Module):
    """Many small layers side by side, each with a gradient of its own; their sum is the output."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(parameters // 2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)
