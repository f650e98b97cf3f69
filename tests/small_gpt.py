"""A tiny GPT-2 that learns Python's own sources byte by byte, and its training in plain torch: the truth that a
framework's training is held to."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STEPS, MICRO, ACCUMULATE = 60, 4, 2
RATE, MAX_NORM = 1e-3, 0.5
_LENGTH = 32

Example = dict[str, Tensor]


def examples(count: int = STEPS * MICRO * ACCUMULATE, skip: int = 0) -> list[Example]:
    """Pieces of source. Each has another number of labels, so that micro-batches do not weigh the same."""
    text = Path(argparse.__file__).read_bytes()
    found = []
    for place in range(skip, skip + count):
        tokens = torch.tensor(list(text[place * _LENGTH : (place + 1) * _LENGTH]))
        labels = tokens.clone()
        labels[: 1 + place * 5 % 28] = -100  # the first byte has nothing to be foretold from
        found.append({"input_ids": tokens, "labels": labels})
    return found


def batch_of(found: list[Example]) -> Example:
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}


def small_gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_positions": _LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    return GPT2LMHeadModel(GPT2Config(**sizes, **ends, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def next_byte_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The sum over all bytes that are to be learnt, and how many they are."""
    wanted = labels[:, 1:].reshape(-1)
    loss = nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 256), wanted, reduction="sum")
    return loss, int((wanted != -100).sum())


@dataclass
class Trained:
    """What a training was like, step by step; norms in float64, before the clip."""

    losses: list[float] = field(default_factory=list)
    naive: list[float] = field(default_factory=list)  # losses as the mean of the micro-batches' own
    norms: list[float] = field(default_factory=list)
    layers: dict[str, list[float]] = field(default_factory=dict)
    clipped: list[float] = field(default_factory=list)  # norms after the clip


def train_plainly(is_weighted: bool) -> Trained:
    """No Trainer, no Accelerate. Weighted: every byte of a step counts the same, as a Trainer has it; else every
    micro-batch does, as in an ordinary loop."""
    model, found = small_gpt(), examples()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.0)
    trained = Trained(layers={name: [] for name, _ in model.named_parameters()})
    for step in range(STEPS):
        start = step * MICRO * ACCUMULATE
        batches = [batch_of(found[start + MICRO * i : start + MICRO * (i + 1)]) for i in range(ACCUMULATE)]
        parts = [next_byte_loss(model(batch["input_ids"]).logits, batch["labels"]) for batch in batches]
        means = [loss / count for loss, count in parts]
        total = sum(count for _, count in parts)
        shares = [loss / total for loss, _ in parts] if is_weighted else [mean / ACCUMULATE for mean in means]
        for share in shares:
            share.backward()
        trained.losses.append(sum(float(share.detach()) for share in shares))
        trained.naive.append(sum(float(mean.detach()) for mean in means) / ACCUMULATE)
        _note_norms(trained, model)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        trained.clipped.append(_norm([parameter.grad for parameter in model.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    return trained


def _note_norms(trained: Trained, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        trained.layers[name].append(_norm([parameter.grad]))
    trained.norms.append(_norm([parameter.grad for parameter in model.parameters()]))


def _norm(tensors: list[Any]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())
