"""The modules and parameters of a model: which there are, under which names, and which are blocks or leaves.

All of it is read from the dictionaries that torch keeps. Models override `named_parameters`, `modules`, `children` and
their kin, with other results and other arguments: what an optimizer trains is there all the same.

Names are those that the author of the model wrote. Wrappers are looked through: what DistributedDataParallel,
torch.compile, FSDP, checkpoint_wrapper and their like hold is named as if they were not there. A wrapper is known by
its class, or by a key that only wrappers use; a user's own attribute that is called `module` stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

# Keys of torch.compile, FSDP, checkpoint_wrapper and Fabric; Fabric keeps the module itself beside what it wraps it in.
_KEYS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
_BESIDE = {"_original_module"}
# Classes whose key is `module`. Those of other packages are known by name: importing them would take long.
_TYPES = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)
_FOREIGN = {("deepspeed", "DeepSpeedEngine"), ("apex", "DistributedDataParallel")}
Named = tuple[str, nn.Module]

_MOST_PARTS = 16  # between two optimizers a hook is put on each of them and taken off again


# Wrappers -----------------------------------------------------------------------------------------------------


def wrapped_in(module: nn.Module) -> nn.Module | None:
    """Return what a wrapper holds; None where the module does more than to hold another, as with weights of its own."""
    held = module._modules
    keys = set(held.keys())  # those of a scripted module cannot be iterated over otherwise
    if set(module._parameters.keys()) - {"_flat_param"}:  # that of FSDP stands for what it holds
        return None
    for key in _KEYS:
        if key in keys and keys <= {key} | _BESIDE:
            return held[key]
    return held["module"] if keys == {"module"} and _is_parallel(module) else None


def _is_parallel(module: nn.Module) -> bool:
    kinds = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(module).__mro__}
    return isinstance(module, _TYPES) or not kinds.isdisjoint(_FOREIGN)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that its author wrote, out of all its wrappers."""
    return shells_of(module)[-1]


def shells_of(module: nn.Module) -> list[nn.Module]:
    """Return a module's wrappers, the outermost first, and last what they hold."""
    found = [module]
    while (held := wrapped_in(found[-1])) is not None:
        found.append(held)
    return found


# What can be looked at ----------------------------------------------------------------------------------------


def walk(model: nn.Module) -> Iterator[Named]:
    """Modules under their names, each once, but not what is inside compiled parts or makes up a weight."""
    seen: set[int] = set()
    stack = [("", model)]
    while stack:
        name, module = stack.pop()
        if is_compiled(module):
            continue
        module = unwrapped(module)
        if id(module) in seen:
            continue
        seen.add(id(module))
        yield name, module
        below = [(_joined(name, key), child) for key, child in _children(module)]
        stack.extend(reversed(below))


def _children(module: nn.Module) -> list[Named]:
    return [(key, child) for key, child in children_of(module) if key != "parametrizations"]


def children_of(module: nn.Module) -> list[Named]:
    """Each once, under its first name; with its wrappers."""
    first: dict[int, Named] = {}
    for key, child in module._modules.items():
        if child is not None:
            first.setdefault(id(child), (key, child))
    return list(first.values())


def is_leaf(module: nn.Module) -> bool:
    return not _children(module)


def blocks_in(module: nn.Module) -> list[nn.Module]:
    """The elements of a list of modules that repeats one type, where they are made of several modules each."""
    children = [unwrapped(child) for _, child in _children(module)]
    is_list = isinstance(module, nn.ModuleList | nn.Sequential) and len(children) > 1
    return children if is_list and len(set(map(type, children))) == 1 and not any(map(is_leaf, children)) else []


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile or TorchScript runs this module, so that hooks inside it would not, or not for free."""
    return any(map(_is_compiled, shells_of(module)))


def _is_compiled(module: nn.Module) -> bool:
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


def parts_of(model: nn.Module) -> list[nn.Module]:
    """The modules down to the second level that a training may call by themselves, a few at most.

    Without those where a hook would change how torch computes in evaluation, by other last bits.
    """
    parts: list[nn.Module] = []
    level = [] if is_compiled(model) else [model]
    for _ in range(2):
        below = (child for module in level for child in module._modules.values() if child is not None)
        level = list(islice((child for child in below if not _minds_hooks(child)), _MOST_PARTS - len(parts)))
        parts += level
    return parts


def _minds_hooks(module: nn.Module) -> bool:
    kinds = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)
    return isinstance(module, kinds) or is_compiled(module)


# All that there is --------------------------------------------------------------------------------------------


def all_modules(model: nn.Module) -> list[Named]:
    """Every module under each of its names, a shared one has several; wrappers are left out."""
    return [(name, shells[-1]) for name, shells in _everywhere(model)]


def all_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Every parameter under each of its names: a tied one, or one of a shared module, has several."""
    return list(_parameters_of(_everywhere(model)))


def named_modules(model: nn.Module) -> Iterator[Named]:
    """Each once, in torch's order, under its first name; wrappers are left out."""
    return ((name, shells[-1]) for name, shells in _once(model))


def modules_and_wrappers(model: nn.Module) -> list[Named]:
    """Each once; a wrapper has the name of what it holds."""
    return [(name, shell) for name, shells in _once(model) for shell in shells]


def named_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each once, in torch's order, under its first name."""
    seen: set[int] = set()
    for name, parameter in _parameters_of(_once(model)):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def modules_in(model: nn.Module) -> Iterator[nn.Module]:
    """Each once, wrappers too, in torch's order. Several times quicker than model.modules()."""
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


def _everywhere(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Every module with its wrappers under each of its names."""
    found: list[tuple[str, list[nn.Module]]] = []
    stack: list[tuple[str, nn.Module, frozenset[int]]] = [("", model, frozenset())]
    while stack:
        name, module, parents = stack.pop()
        shells = shells_of(module)
        if id(shells[-1]) in parents:  # a module that holds its parent has no end of names
            return list(_once(model))
        found.append((name, shells))
        around = parents | {id(shells[-1])}
        below = [(_joined(name, key), child) for key, child in shells[-1]._modules.items() if child is not None]
        stack.extend((path, child, around) for path, child in reversed(below))
    return found


def _once(model: nn.Module) -> Iterator[tuple[str, list[nn.Module]]]:
    """Every module with its wrappers, in torch's order, under its first name."""
    seen: set[int] = set()
    stack: list[Named] = [("", model)]
    while stack:
        name, module = stack.pop()
        shells = shells_of(module)
        if id(shells[-1]) not in seen:
            seen.add(id(shells[-1]))
            yield name, shells
            below = [(_joined(name, key), child) for key, child in shells[-1]._modules.items() if child is not None]
            stack.extend(reversed(below))


def _parameters_of(found: Iterable[tuple[str, list[nn.Module]]]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, shells in found:
        for shell in shells:  # FSDP may keep parameters of its own
            for key, parameter in shell._parameters.items():
                if parameter is not None:
                    yield _joined(name, key), parameter


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
