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

    def fit(self) -> bool:
        """Whether the shapes are as said above."""
        if self.queries.ndim != 4 or self.keys.ndim != 4:
            return False
        (batch, count, number, width), (others, seen, shared, size) = self.queries.shape, self.keys.shape
        whole = (batch, number, count, seen)
        return (
            (batch, width) == (others, size)
            and 0 not in whole
            and shared > 0
            and number % shared == 0
            and (count == seen or not self.is_causal)
            and all(bias.ndim == 4 for bias in self.biases)
            and all(one in (1, full) for bias in self.biases for one, full in zip(bias.shape, whole, strict=True))
        )


@dataclass(frozen=True)
class Kind:
    """How one class of attention is read: what a module must have and its forward must take to be one, and what to make
    of the outputs of its projections; None if they do not fit together."""

    projections: tuple[str, ...]
    sizes: tuple[str, ...]  # attributes that are whole numbers
    takes: tuple[str, ...]  # parameters of its forward
    read: Callable[[nn.Module, Mapping[str, Any], Sequence[Tensor]], Heads | None]

    def fits(self, module: nn.Module) -> bool:
        """Whether this module is made so: others may have the same name, and other ways."""
        sizes = (getattr(module, name, None) for name in self.sizes)
        return (
            all(isinstance(getattr(module, name, None), nn.Module) for name in self.projections)
            and all(isinstance(size, int) and size > 0 for size in sizes)
            and inspect.signature(module.forward).parameters.keys() >= set(self.takes)
        )


def kind_of(module: nn.Module) -> Kind | None:
    """How to read this module, or None where it is not an attention that is known here."""
    if isinstance(module, nn.MultiheadAttention):
        is_torchs = type(module).forward is nn.MultiheadAttention.forward
        return _TORCH if is_torchs and module.bias_k is None and not module.add_zero_attn else None
    if getattr(module, "is_cross_attention", False):
        return None
    kind = KINDS.get(type(module).__name__)  # by name: transformers need not be installed, nor imported
    return kind if kind is not None and kind.fits(module) else None


def attention_statistics(
    kind: Kind, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], projected: Sequence[Tensor]
) -> Tensor | None:
    """float32 [len(ATTENTION)] of one call of an attention module; None where it was not called as its kind is."""
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    heads = kind.read(module, given, [output.detach() for output in projected])
    return summarise(heads) if heads is not None and heads.fit() else None


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


def _read_torch(module: nn.Module, given: Mapping[str, Any], projected: Sequence[Tensor]) -> Heads | None:
    """nn.MultiheadAttention projects without a submodule: its weights are applied to the sequences of the sample."""
    assert isinstance(module, nn.MultiheadAttention)
    if any(not isinstance(given.get(name), Tensor) or given[name].is_nested for name in ("query", "key")):
        return None
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


def _read_gpt2(module: Any, given: Mapping[str, Any], projected: Sequence[Tensor]) -> Heads | None:
    both = projected[0]
    if both.ndim != 3 or both.shape[2] != 3 * module.split_size:
        return None
    queries, keys, _ = both.split(module.split_size, dim=2)
    return _of_transformers(module, given, [queries, keys], module.head_dim)


def _read_llama(module: Any, given: Mapping[str, Any], projected: Sequence[Tensor]) -> Heads | None:
    turns = given.get("position_embeddings")
    if not isinstance(turns, tuple | list) or len(turns) != 2 or not _all_turn(turns, projected, module.head_dim):
        return None
    return _of_transformers(module, given, projected, module.head_dim, turns)


def _read_bert(module: Any, given: Mapping[str, Any], projected: Sequence[Tensor]) -> Heads | None:
    if getattr(module, "position_embedding_type", None) not in (None, "absolute"):  # those add to the logits
        return None
    return _of_transformers(module, given, projected, module.attention_head_size)


def _of_transformers(
    module: Any, given: Mapping[str, Any], projected: Sequence[Tensor], width: int, turns: Sequence[Tensor] = ()
) -> Heads | None:
    mask, scale = given.get("attention_mask"), getattr(module, "scaling", width**-0.5)
    window = getattr(module, "sliding_window", None)
    if any(x.ndim != 3 or x.shape[2] % width for x in projected) or not isinstance(scale, int | float):
        return None
    count = projected[1].shape[1]
    if not (mask is None or (isinstance(mask, Tensor) and mask.ndim in (2, 4))) or _has_others(module, given, count):
        return None
    # As its own attention does: a mask of four dimensions holds the causal one already, and the window.
    is_whole = mask is not None and mask.ndim == 4
    if not is_whole and window is not None and not (isinstance(window, int) and count <= window):
        return None
    queries, keys = (x[:_SEQUENCES].unflatten(2, (-1, width)) for x in projected)
    if turns:
        queries, keys = (_rotated(x, *turns) for x in (queries, keys))
    biases = [_transformers_mask(mask)] if mask is not None else []
    return Heads(queries, keys, scale, biases, bool(getattr(module, "is_causal", False)) and not is_whole)


def _all_turn(turns: Sequence[Any], projected: Sequence[Tensor], width: int) -> bool:
    """Whether cos and sin are of every token and all of a head's width."""
    shapes = [(batch, *x.shape[1:2], width) for x in projected for batch in (1, x.shape[0])]
    return all(isinstance(turn, Tensor) and tuple(turn.shape) in shapes for turn in turns)


def _has_others(module: Any, given: Mapping[str, Any], count: int) -> bool:
    """Whether there may be keys besides those that were projected now, as of a prefix that was learnt."""
    caches = (given.get(name) for name in ("past_key_values", "past_key_value", "layer_past"))
    for cache in (cache for cache in caches if cache is not None):
        layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
        place = getattr(module, "layer_idx", None)
        layer = layers[place] if isinstance(place, int) and place < len(layers) else None
        ask = getattr(layer, "get_seq_length", None)
        seen = ask() if callable(ask) else None
        if not isinstance(seen, int) or seen != count:  # some keep it on the device
            return True
    return False


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [batch, tokens, heads, width] by cos and sin [batch or 1, tokens, width]."""
    cos, sin = (turn.detach()[:_SEQUENCES, :, None] for turn in (cos, sin))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _transformers_mask(mask: Tensor) -> Tensor:
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


_TORCH = Kind((), (), (), _read_torch)
_GPT2 = Kind(("c_attn",), ("split_size", "head_dim"), ("attention_mask",), _read_gpt2)
_LLAMA = Kind(("q_proj", "k_proj"), ("head_dim",), ("position_embeddings", "attention_mask"), _read_llama)
_BERT = Kind(("query", "key"), ("attention_head_size",), ("attention_mask",), _read_bert)
KINDS = {
    "GPT2Attention": _GPT2,
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
