"""A twin of a model: it has the model's own parameters, and copies of everything else that a forward may change.

A forward of the twin leaves no trace on the model: buffers, counters, caches and lists that it changes are the twin's.
Saving and restoring them in place would not do: autograd counts every write to a tensor, and a backward that still
needs the tensor would raise. Wrappers and compilation are left out, and so are hooks, save torch's own, which compute
weights (`weight_norm`, `prune`): a user's hook may collect what it sees.

What cannot be copied so that the model stays untouched is refused with a Complaint, which says why.
"""

from __future__ import annotations

import copy
import random
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from holter.modules import unwrapped
from holter.problems import Complaint

_MOST_OBJECTS = 50_000  # besides tensors; a model that holds its trainer holds the whole program
_MOST_BYTES = 256 << 20  # of tensors that are copied; more might not fit beside the training
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_COPIED = (random.Random, np.random.Generator, np.random.RandomState, np.ndarray)
_SHARED = (Optimizer, DataLoader, Dataset, type)  # a forward does not change them, or should not be followed there
_PLAIN = (str, int, float, bool, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)


class Twin:
    """`module` is the twin; what else belongs to a forward of it is copied by `copy`."""

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[int, Any] = {}  # id -> copy
        self._held: list[Any] = []  # so that no id is given away meanwhile
        self._objects = self._bytes = 0
        self.tensors: list[Tensor] = []  # copies: the forward may write to them
        self.originals: dict[int, nn.Module] = {}  # of the twin's modules, by id
        self.has_dropped_hooks = False
        self.module = self._module(model)

    def copy(self, value: Any) -> Any:
        """Return a copy that shares nothing with `value` which a forward may change."""
        if isinstance(value, _PLAIN):
            return value
        if id(value) in self._known:
            return self._known[id(value)]
        self._objects += 1
        if self._objects > _MOST_OBJECTS:
            raise Complaint("it holds too many objects to be copied")
        self._held.append(value)
        if isinstance(value, nn.Module):
            return self._module(value)
        if isinstance(value, Tensor):
            return self._tensor(value)
        return self._container(value) if type(value) in _CONTAINERS else self._object(value)

    def _module(self, wrapped: nn.Module) -> nn.Module:
        module = unwrapped(wrapped)
        if id(module) not in self._known:
            if isinstance(module, torch.jit.ScriptModule):
                raise Complaint("a part of it is scripted")
            if hasattr(module, "__del__"):
                raise Complaint(f"a {type(module).__name__} may give something back when its copy goes")
            self._known[id(module)] = twin = object.__new__(type(module))
            self._held.append(module)
            self.originals[id(twin)] = module
            for name, value in module.__dict__.items():
                twin.__dict__[name] = self._attribute(name, value)
            self._undecorate(module, twin)
            if getattr(module, "max_norm", None) is not None and "weight" in module._parameters:
                # An embedding that writes to its weight in its forward.
                twin._parameters["weight"] = nn.Parameter(self._tensor(module._parameters["weight"].detach()))  # type: ignore[union-attr]
        return self._known[id(module)]  # type: ignore[no-any-return]

    def _attribute(self, name: str, value: Any) -> Any:
        if name == "_parameters":
            if any(is_lazy(one) or hasattr(one, "to_local") for one in value.values() if one is not None):
                raise Complaint("its parameters are sharded, or have no shape yet")
            return dict(value)
        if name == "_modules":
            return {key: None if one is None else self._module(one) for key, one in value.items()}
        if name == "_compiled_call_impl":
            return None
        if name in _HOOKS:
            kept = {key: hook for key, hook in value.items() if _is_torchs(hook)}
            self.has_dropped_hooks |= any(not _is_torchs(hook) and not _is_ours(hook) for hook in value.values())
            return OrderedDict(kept)
        if name.endswith("_hooks"):
            return OrderedDict()
        return self.copy(value)

    def _undecorate(self, module: nn.Module, twin: nn.Module) -> None:
        """A class may have `@torch.compile` on its forward."""
        inner = getattr(type(module).forward, "_torchdynamo_orig_callable", None)
        if inner is not None and "forward" not in twin.__dict__:
            twin.__dict__["forward"] = MethodType(inner, twin)

    def _tensor(self, value: Tensor) -> Tensor:
        if isinstance(value, nn.Parameter):
            return value
        if hasattr(value, "to_local"):
            raise Complaint("it holds sharded tensors")
        self._bytes += value.nbytes
        if self._bytes > _MOST_BYTES:
            raise Complaint("its buffers are too large to be copied")
        made = value.detach().clone()
        self._known[id(value)] = made
        self.tensors.append(made)
        return made

    def _container(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(self.copy, value))
        if isinstance(value, set | frozenset):
            return type(value)(map(self.copy, value))
        made = copy.copy(value)  # keeps the factory of a defaultdict, the length of a deque
        self._known[id(value)] = made
        if isinstance(value, dict):
            for key, one in value.items():
                made[key] = self.copy(one)
        else:
            for place, one in enumerate(value):
                made[place] = self.copy(one)
        return made

    def _object(self, value: Any) -> Any:
        made = value
        if isinstance(value, torch.Generator):
            made = value.clone_state()
        elif isinstance(value, _COPIED):
            made = copy.deepcopy(value)
        elif isinstance(value, MethodType):
            made = MethodType(value.__func__, self.copy(value.__self__))
        elif isinstance(value, partial):
            made = partial(self.copy(value.func), *map(self.copy, value.args), **self._container(value.keywords))
        elif isinstance(value, weakref.ref):
            target = value()
            made = weakref.ref(self.copy(target)) if isinstance(target, nn.Module) else value
        elif isinstance(value, FunctionType):
            made = self._function(value)
        elif _is_simple(value):
            self._known[id(value)] = made = object.__new__(type(value))
            for name, one in vars(value).items():
                made.__dict__[name] = self.copy(one)
        self._known[id(value)] = made
        return made

    def _function(self, value: FunctionType) -> Any:
        inner = getattr(value, "_torchdynamo_orig_callable", None)
        if inner is not None:
            return self.copy(inner)
        cells = [cell.cell_contents for cell in value.__closure__ or () if _has_contents(cell)]
        held = [getattr(cell, "__self__", cell) for cell in cells]
        if any(isinstance(one, nn.Module | partial) for one in held):
            raise Complaint("one of its functions holds a module, which would run in place of its copy")
        return value


_CONTAINERS = {list, dict, tuple, set, frozenset, deque, OrderedDict, defaultdict, Counter}


def _has_contents(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # it is not bound yet
        return False


def _is_torchs(hook: Any) -> bool:
    place = str(getattr(hook, "__module__", ""))
    return place.startswith("torch.nn.utils.")


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("holter.")


def _is_simple(value: Any) -> bool:
    """Whether all that an object is stands in its `__dict__`, as in most classes that are written in Python."""
    kind: Any = type(value)
    return (
        not isinstance(value, _SHARED)
        and hasattr(value, "__dict__")
        and kind.__new__ is object.__new__
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not any(hasattr(kind, name) for name in ("__deepcopy__", "__copy__", "__setstate__", "__del__"))
        and not any(base.__dict__.get("__slots__") for base in kind.__mro__)
    )
