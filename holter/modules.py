"""The modules of a model: which of them can be looked at from outside, and which are blocks or leaves."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules under torch's names, each once, but not what is inside compiled parts or makes up a weight."""
    seen: set[int] = set()
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) in seen or is_compiled(module):
            continue
        seen.add(id(module))
        yield name, module
        below = [(f"{name}.{key}" if name else key, child) for key, child in _children(module)]
        stack.extend(reversed(below))


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(key, child) for key, child in module.named_children() if key != "parametrizations"]


def is_leaf(module: nn.Module) -> bool:
    return not _children(module)


def blocks_in(module: nn.Module) -> list[nn.Module]:
    """The elements of a list of modules that repeats one type, where they are made of several modules each."""
    children = [child for _, child in _children(module)]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1
    return children if is_list and len(set(map(type, children))) == 1 and not any(map(is_leaf, children)) else []


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile or TorchScript runs this module, so that hooks inside it would not, or not for free."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or getattr(module, "_compiled_call_impl", None) is not None  # module.compile()
        or type(module).__name__ == "OptimizedModule"  # torch.compile(module); its class is slow to import
        or hasattr(module.forward, "_torchdynamo_orig_callable")  # a forward that was decorated
    )


def compiled_parts(model: nn.Module) -> tuple[str, ...]:
    """Names of what is not observed because it is compiled; the empty name stands for the whole model."""
    if is_compiled(model):
        return ("",)
    return tuple(
        f"{name}.{key}" if name else key
        for name, module in walk(model)
        for key, child in _children(module)
        if is_compiled(child)
    )


def all_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module under each of its names: a shared one has several."""
    try:
        return list(model.named_modules(remove_duplicate=False))
    except RecursionError:  # a module that holds its parent has no end of names
        return list(model.named_modules())


def all_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter under each of its names: a tied one, or one of a shared module, has several."""
    try:
        return list(model.named_parameters(remove_duplicate=False))
    except RecursionError:
        return list(model.named_parameters())
