"""The modules and parameters of a model: which there are, under which names, and which are blocks or leaves.

All of it is read from the dictionaries that torch keeps. Models override `named_parameters`, `modules`, `children` and
their kin, with other results and other arguments: what an optimizer trains is there all the same.
"""

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
        below = [(_joined(name, key), child) for key, child in _children(module)]
        stack.extend(reversed(below))


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(key, child) for key, child in children_of(module) if key != "parametrizations"]


def children_of(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Each once, under its first name."""
    first: dict[int, tuple[str, nn.Module]] = {}
    for key, child in module._modules.items():
        if child is not None:
            first.setdefault(id(child), (key, child))
    return list(first.values())


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
        _joined(name, key) for name, module in walk(model) for key, child in _children(module) if is_compiled(child)
    )


def all_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every module under each of its names: a shared one has several."""
    found: list[tuple[str, nn.Module]] = []
    stack: list[tuple[str, nn.Module, frozenset[int]]] = [("", model, frozenset())]
    while stack:
        name, module, parents = stack.pop()
        if id(module) in parents:  # a module that holds its parent has no end of names
            return list(named_modules(model))
        found.append((name, module))
        around = parents | {id(module)}
        below = [(name, key, child) for key, child in module._modules.items() if child is not None]
        stack.extend((_joined(above, key), child, around) for above, key, child in reversed(below))
    return found


def all_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter under each of its names: a tied one, or one of a shared module, has several."""
    return [
        (_joined(name, key), parameter)
        for name, module in all_modules(model)
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


def modules_in(model: nn.Module) -> Iterator[nn.Module]:
    """Each once, in torch's order. Several times quicker than model.modules()."""
    seen: set[int] = set()  # modules may be shared, and may even hold their parents
    stack: list[nn.Module | None] = [model]
    while stack:
        module = stack.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield module
            stack.extend(reversed(module._modules.values()))


def parameters_in(model: nn.Module) -> Iterator[nn.Parameter]:
    """Each once, in torch's order."""
    seen: set[int] = set()
    for module in modules_in(model):
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each once, in torch's order, under its first name."""
    seen: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        name, module = stack.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield name, module
            below = [(_joined(name, key), child) for key, child in module._modules.items() if child is not None]
            stack.extend(reversed(below))


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each once, in torch's order, under its first name."""
    seen: set[int] = set()
    for name, module in named_modules(model):
        for key, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                yield _joined(name, key), parameter


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
