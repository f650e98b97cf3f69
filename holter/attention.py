"""Attention and output logits: the largest logit and the entropy of the heads, from q and k of a few tokens.

Fused attention never shows its weights, so they are computed once more for a small sample. The functions here are
given what a module took and what its projections made; the hooks that catch it live in activations.py. Nothing waits
for the device.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from holter.problems import Complaint
from holter.statistics.activation import sample, strided

ATTENTION = ("max_logit", "entropy")  # the largest logit of an allowed key; nats, mean over heads and queries
LOGITS = ("logit_mean", "logit_log_sum_exp")  # means over a sample of positions

_SEQUENCES, _QUERIES, _POSITIONS = 2, 64, 256
_DEPTH = 4  # outputs within outputs that are looked into
_MOST_LOGITS = 1 << 22  # of one attention module; long contexts with many heads get fewer queries


@dataclass(frozen=True, eq=False)
class Heads:
    """Queries [batch, tokens, heads, width] and keys [batch, tokens, key heads, width] before they meet.

    `biases` are added to the logits [batch, heads, queries, keys]; -inf forbids a key.
    """

    queries: Tensor
    keys: Tensor
    scale: float
    biases: Sequence[Tensor] = field(default_factory=list)
    is_causal: bool = False


@dataclass(frozen=True)
class Kind:
    """How one class of attention is read: the projections whose outputs are needed, and what to make of them."""

    projections: tuple[str, ...]
    read: Callable[[nn.Module, Mapping[str, Any], Sequence[Tensor]], Heads]


def kind_of(module: nn.Module) -> Kind | None:
    """How to read this module, or None where it is not an attention that is known here."""
    if isinstance(module, nn.MultiheadAttention):
        known = module.bias_k is None and not module.add_zero_attn
        return KINDS["MultiheadAttention"] if known else None
    if getattr(module, "is_cross_attention", False):
        return None
    kind = KINDS.get(type(module).__name__)  # by name: transformers need not be installed, nor imported
    return kind if kind and all(hasattr(module, name) for name in kind.projections) else None


def attention_statistics(
    kind: Kind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], projected: Sequence[Tensor]
) -> Tensor:
    """float32 [len(ATTENTION)] of one call of an attention module."""
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    return summarise(kind.read(module, given, [output.detach() for output in projected]))


def summarise(heads: Heads) -> Tensor:
    """The largest logit and the mean entropy of a sample of queries over all their keys, float32 [2]."""
    logits = _logits(heads)
    allowed = logits != -math.inf
    log_share = logits - logits.logsumexp(-1, keepdim=True)
    # -Σ p log p; a forbidden key adds nothing, where 0 · -inf would be NaN
    entropy = -(log_share.exp() * log_share).masked_fill(~allowed, 0.0).sum(-1)
    sees = allowed.any(-1)  # padding may leave a query nothing to look at
    mean = entropy.masked_fill(~sees, 0.0).sum() / sees.sum()
    return torch.stack([logits.amax(), mean])


def _logits(heads: Heads) -> Tensor:
    """Logits of the sampled queries, float32 [batch, heads, queries, keys]."""
    queries, keys = heads.queries[:_SEQUENCES], heads.keys[:_SEQUENCES]
    batch, count, number, _ = queries.shape
    groups = number // keys.shape[2]  # query heads that share a key head
    chosen = strided(count, max(1, min(_QUERIES, _MOST_LOGITS // (batch * number * keys.shape[1]))))
    queries = queries[:, chosen].float().unflatten(2, (keys.shape[2], groups))
    logits = torch.einsum("bqhgd,bkhd->bhgqk", queries, keys.float()).flatten(1, 2) * heads.scale
    for bias in heads.biases:
        logits = (
            logits
            + (bias[:_SEQUENCES] if bias.shape[0] > 1 else bias)[:, :, chosen if bias.shape[2] > 1 else slice(None)]
        )
    if heads.is_causal:
        place = torch.arange(count, device=logits.device)[chosen]
        logits = logits.masked_fill(torch.arange(keys.shape[1], device=logits.device) > place[:, None], -math.inf)
    return logits


# The kinds ----------------------------------------------------------------------------------------------------


def _read_torch(module: nn.Module, given: Mapping[str, Any], projected: Sequence[Tensor]) -> Heads:
    """nn.MultiheadAttention projects without a submodule: its weights are applied to the sequences of the sample."""
    assert isinstance(module, nn.MultiheadAttention)
    query, key = (_batch_first(given[name], module.batch_first) for name in ("query", "key"))
    size = module.embed_dim
    if module.in_proj_weight is not None:
        weights = module.in_proj_weight.detach()[: 2 * size].split(size)
    else:
        weights = (module.q_proj_weight.detach(), module.k_proj_weight.detach())
    offsets = module.in_proj_bias.detach()[: 2 * size].float().split(size) if module.in_proj_bias is not None else ()
    heads = [
        functional.linear(x.float(), weight.float(), offset).unflatten(2, (module.num_heads, module.head_dim))
        for x, weight, offset in zip((query, key), weights, offsets or (None, None), strict=True)
    ]
    return Heads(heads[0], heads[1], module.head_dim**-0.5, _torch_masks(module, given))


def _batch_first(x: Tensor, batch_first: bool) -> Tensor:
    """A few sequences as [batch, tokens, width]."""
    if x.is_nested:
        raise Complaint("attention on nested tensors is not observed")
    x = x.detach()
    if x.ndim == 2:
        return x[None]
    return (x if batch_first else x.transpose(0, 1))[:_SEQUENCES]


def _torch_masks(module: nn.MultiheadAttention, given: Mapping[str, Any]) -> list[Tensor]:
    biases = []
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if mask is not None:
        bias = _as_bias(mask, keeps=False)
        biases.append(bias[None, None] if bias.ndim == 2 else bias.unflatten(0, (-1, module.num_heads)))
    if padding is not None:
        biases.append(_as_bias(padding, keeps=False).view(-1, 1, 1, padding.shape[-1]))
    return biases


def _read_gpt2(module: Any, given: Mapping[str, Any], projected: Sequence[Tensor]) -> Heads:
    queries, keys, _ = projected[0].split(module.split_size, dim=2)
    return _of_transformers(module, given, queries, keys)


def _read_separate(module: Any, given: Mapping[str, Any], projected: Sequence[Tensor]) -> Heads:
    return _of_transformers(module, given, *projected)


def _of_transformers(module: Any, given: Mapping[str, Any], queries: Tensor, keys: Tensor) -> Heads:
    width = module.attention_head_size if hasattr(module, "attention_head_size") else module.head_dim
    queries, keys = (x[:_SEQUENCES].unflatten(2, (-1, width)) for x in (queries, keys))
    turns = given.get("position_embeddings")
    if turns is not None:
        queries, keys = (_rotated(x, *turns) for x in (queries, keys))
    mask = given.get("attention_mask")
    biases = [_transformers_mask(mask)] if mask is not None else []
    # As its own attention does: a mask of four dimensions holds the causal one already.
    is_causal = bool(getattr(module, "is_causal", False)) and (mask is None or mask.ndim == 2)
    return Heads(queries, keys, getattr(module, "scaling", width**-0.5), biases, is_causal)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [batch, tokens, heads, width] by cos and sin [batch or 1, tokens, width]."""
    cos, sin = (turn.detach()[:_SEQUENCES, :, None] for turn in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _transformers_mask(mask: Any) -> Tensor:
    if not isinstance(mask, Tensor) or mask.ndim not in (2, 4):
        raise Complaint(f"attention with a mask of {type(mask).__name__} is not observed")
    bias = _as_bias(mask.bool() if mask.ndim == 2 else mask, keeps=True)
    return bias[:, None, None] if mask.ndim == 2 else bias


def _as_bias(mask: Tensor, *, keeps: bool) -> Tensor:
    """A mask as what is added to logits; in a boolean one True keeps a key, or forbids it."""
    mask = mask.detach()
    if mask.dtype == torch.bool:
        forbidden, bias = (~mask if keeps else mask), torch.zeros(mask.shape, device=mask.device)
    else:  # some write the most negative number where others write -inf
        forbidden, bias = mask <= torch.finfo(mask.dtype).min / 2, mask.float()
    return bias.masked_fill(forbidden, -math.inf)


_LLAMA, _BERT = Kind(("q_proj", "k_proj"), _read_separate), Kind(("query", "key"), _read_separate)
KINDS = {
    "MultiheadAttention": Kind((), _read_torch),
    "GPT2Attention": Kind(("c_attn",), _read_gpt2),
    "LlamaAttention": _LLAMA,
    "MistralAttention": _LLAMA,
    "Qwen2Attention": _LLAMA,
    "BertSelfAttention": _BERT,
    "RobertaSelfAttention": _BERT,
}


# The output ---------------------------------------------------------------------------------------------------


def logit_statistics(logits: Tensor) -> Tensor | None:
    """Mean and mean log-sum-exp over a sample of positions, float32 [len(LOGITS)]; None where there are no classes.

    Classes are the last dimension, or the second of images: [batch, classes, height, width].
    """
    if logits.ndim < 2 or not logits.numel():
        return None
    class_dim = 1 if logits.ndim > 3 else logits.ndim - 1
    if logits.shape[class_dim] < 2:
        return None
    positions = sample(logits.detach(), class_dim, _POSITIONS).float()
    return torch.stack([positions.mean(), positions.logsumexp(-1).mean()])


def first_floating(output: Any, depth: int = _DEPTH) -> Tensor | None:
    """The first floating-point tensor in a tensor, a tuple, list, dict or dataclass, and what these hold."""
    if isinstance(output, Tensor):
        return output if output.is_floating_point() else None
    if not depth:
        return None
    found = (first_floating(part, depth - 1) for part in _parts_of(output))
    return next((part for part in found if part is not None), None)


def _parts_of(output: Any) -> Iterator[Any]:
    if isinstance(output, Mapping):
        yield from output.values()
    elif isinstance(output, tuple | list):
        yield from output
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from (getattr(output, one.name) for one in dataclasses.fields(output))


def logits_in(output: Any) -> Tensor | None:
    """What is called logits, or else the first tensor: beside a loss, which has no dimensions, it is the second."""
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if named is None and isinstance(output, tuple | list):
        output = [part for part in output if not (isinstance(part, Tensor) and not part.ndim)]
    return first_floating(output if named is None else named)
