"""What part a layer plays in its model: attention, ffn, embedding, norm, output, conv, recurrent or other.

The module's type speaks first, then the nearest word on its path, from the inside out: its own name, its parent's,
its parent's class, and so on. Roles group layers with their siblings; no measurement depends on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from holter.modules import all_modules, all_parameters, children_of, parameters_in, unwrapped

ROLES = ("attention", "ffn", "embedding", "norm", "output", "conv", "recurrent", "other")

# Sequential and ModuleList only hold layers: what is in them is as much on the main path as what the model holds.
_HOLDERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_TYPES: tuple[tuple[str, tuple[type[nn.Module], ...]], ...] = (
    ("embedding", (nn.Embedding, nn.EmbeddingBag)),
    ("norm", (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)),
    ("conv", (nn.modules.conv._ConvNd,)),
    ("recurrent", (nn.RNNBase, nn.RNNCellBase)),
    ("attention", (nn.MultiheadAttention,)),
)
_NORM_CLASS = re.compile(r"norm(\d?d)?(act)?(2d)?$", re.I)  # LlamaRMSNorm, T5LayerNorm, FrozenBatchNorm2d

# One part of a path, lower case. The first that matches decides, so embed_out is an output.
_WORDS = (
    (
        "output",
        re.compile(r"(^|_)(lm_head|heads?|classifier|score|logits|predictions|qa_outputs|embed_out)$|^(cls|out)$"),
    ),
    (
        "attention",
        re.compile(
            r"attn|attention|^(mha|sa|query|key|query_key_value|qkv|to_(q|k|v|qkv|out)|w[qkv])$"
            r"|^(q|k|v|o|qkv|query|key|value)_(proj|lin|proj_\w+)$"
        ),
    ),
    (
        "ffn",
        re.compile(
            r"mlp|ffn|feed_?forward|^(ff|moe|experts|c_fc|intermediate|densereludense)$"
            r"|^(up|down|gate|gate_up)_proj$|^dense_(h_to_4h|4h_to_h)$|^(fc|lin|linear|dense)_?\d+$"
        ),
    ),
    (
        "embedding",
        re.compile(r"(^|_)(emb|embed|embeds|embedding|embeddings|wte|wpe)($|_)|^(cls|mask|register)_tokens?$"),
    ),
    ("recurrent", re.compile(r"^(lstm|gru|rnn)(_|\d|$)")),
)
_CLASS_WORDS = (("attention", re.compile(r"attention", re.I)), ("ffn", re.compile(r"mlp$|feed_?forward|ffn", re.I)))


def role_of_module(name: str, module: nn.Module) -> str:
    """The role that a module's type and path tell; `module_roles` knows its parents and its place in the model too."""
    return _role_by_type(module) or _role_by_path(name, {name: module}) or "other"


def module_roles(model: nn.Module) -> dict[str, str]:
    """The role of every module of the model, by its name (the model's own is "")."""
    modules = dict(all_modules(model))
    roles = {name: _role_by_type(module) or _role_by_path(name, modules) for name, module in modules.items()}
    on_path = [name for name in _on_main_path(model, "") if name in modules]
    main = [name for name in on_path if next(parameters_in(modules[name]), None) is not None]
    for name in main:
        if _is_linear(modules[name]):
            roles[name] = roles[name] or "ffn"  # a hidden layer of a plain MLP
    # The last linear layer of the main path, unless a convolution or the like comes after it: then its output is inner.
    last = next((name for name in reversed(main) if roles[name] != "norm"), None)
    if last is not None and "output" not in roles.values() and _is_linear(modules[last]):
        roles[last] = "output"
    return {name: role or "other" for name, role in roles.items()}


def roles_of(model: nn.Module) -> dict[str, str]:
    """The role of every parameter, by each of its names.

    A tied parameter has one role under all its names: embedding if one of its owners is an embedding, else that of
    the first owner. `tied_parameters` tells which they are.
    """
    modules = module_roles(model)
    named = {name: id(parameter) for name, parameter in all_parameters(model)}
    role_of_tensor: dict[int, str] = {}
    for name, tensor in named.items():
        owner, _, own_name = name.rpartition(".")
        while owner not in modules:  # torchrl's parameters have names with dots of their own
            owner = owner.rpartition(".")[0]
        role = modules[owner]
        if role == "other":  # a parameter that hangs on a block or on the model: pos_embed, cls_token
            role = _role_by_word(own_name) or "other"
        if role == "embedding":
            role_of_tensor[tensor] = role
        role_of_tensor.setdefault(tensor, role)
    return {name: role_of_tensor[tensor] for name, tensor in named.items()}


def tied_parameters(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter that has several -> the first, under which torch lists it."""
    first: dict[int, str] = {}
    named = all_parameters(model)
    return {name: first[id(p)] for name, p in named if first.setdefault(id(p), name) != name}


def _role_by_type(module: nn.Module) -> str | None:
    for role, types in _TYPES:
        if isinstance(module, types):
            return role
    is_leaf = not any(True for _, child in children_of(module) for _ in parameters_in(child))
    if is_leaf and _NORM_CLASS.search(type(module).__name__):  # PreNorm(Attention(...)) is no norm
        return "norm"
    return None


def _role_by_path(name: str, modules: dict[str, nn.Module]) -> str | None:
    """The role that the nearest word tells; `modules` holds those whose class is known."""
    parts = name.split(".") if name else []
    for depth in range(len(parts), 0, -1):
        part, module = parts[depth - 1], modules.get(".".join(parts[:depth]))
        in_block = any(above.isdigit() for above in parts[: depth - 1])
        role = _role_by_word(part, depth > 1)
        if role is not None and not (role == "output" and in_block):  # blocks have outputs that are not the model's
            return role
        role = _matching(_CLASS_WORDS, type(module).__name__) if module is not None else None
        if role is not None:
            return role
    own = modules.get(name)
    if parts and parts[-1] in ("decoder", "output") and own is not None and _is_linear(own):
        return "output"
    # BERT's second feed-forward layer: encoder.layer.0.output.dense, beside encoder.layer.0.intermediate.dense
    return "ffn" if re.search(r"\.\d+\.output(\.|$)", name) else None


def _role_by_word(part: str, has_parent: bool = False) -> str | None:
    word = part.lower()
    if word == "value" and has_parent:  # alone it is more often what a critic estimates
        return "attention"
    return _matching(_WORDS, word)


def _matching(table: tuple[tuple[str, re.Pattern[str]], ...], text: str) -> str | None:
    return next((role for role, pattern in table if pattern.search(text)), None)


def _is_linear(module: nn.Module) -> bool:
    """Linear layers, transformers' Conv1D among them: the same thing with its weight transposed."""
    return isinstance(module, nn.Linear | nn.Bilinear) or type(module).__name__ == "Conv1D"


def _on_main_path(module: nn.Module, name: str, around: frozenset[int] = frozenset()) -> Iterator[str]:
    """Names of what the model holds itself or in plain holders, not within a block; wrappers are looked through.

    `around` are the ids of modules that it lies in: a module may hold its parent.
    """
    module = unwrapped(module)
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) or id(module) in around:
        return
    around = around | {id(module)}
    children = [(f"{name}.{key}" if name else key, unwrapped(child)) for key, child in children_of(module)]
    children = [(child_name, child) for child_name, child in children if id(child) not in around]
    wrapped = len(children) == 1 and not isinstance(module, _HOLDERS)
    for child_name, child in children:
        yield child_name
        if isinstance(child, _HOLDERS) or wrapped:
            yield from _on_main_path(child, child_name, around)
