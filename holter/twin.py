"""A twin of a model: its parameters lie on the same memory, and it has copies of all else that a forward may change.

A forward of the twin leaves no trace on the model: buffers, counters, caches and lists that it changes are the twin's.
Saving and restoring them in place would not do: autograd counts every write to a tensor, and a backward that still
needs the tensor would raise. Wrappers and compilation are left out, and so are hooks, save torch's own, which compute
weights (`weight_norm`, `prune`): a user's hook may collect what it sees.

What cannot be copied so that the model stays untouched is refused with a Complaint, which says why.
"""

from __future__ import annotations

import copy
import logging
import random
import re
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from datetime import date, timedelta
from enum import Enum
from functools import lru_cache, partial
from pathlib import PurePath
from types import BuiltinFunctionType, CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
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
_COPIED = (random.Random, np.random.Generator, np.random.RandomState, np.ndarray, bytearray)
PLAIN = (str, int, float, bool, bytes, complex, type(None), torch.dtype, torch.device, torch.Size)
# A forward does not change them, or should not be followed there. A lock is given back by who took it.
SHARED = (
    *(Optimizer, DataLoader, Dataset, Enum, logging.Logger, PurePath, re.Pattern, np.generic, np.dtype, np.ufunc),
    *(type, ModuleType, range, slice, date, timedelta, types.GenericAlias, types.UnionType, type(Ellipsis)),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, type(threading.Lock()), type(threading.RLock())),
)
_TORCHS_OWN = frozenset(vars(nn.Module()))  # attributes
CONTAINERS = (OrderedDict, defaultdict, dict, deque, list, set, frozenset, tuple)  # and classes made from them


class Twin:
    """`module` is the twin; what else belongs to a forward of it is copied by `copy`."""

    def __init__(self, model: nn.Module) -> None:
        self._known: dict[int, Any] = {}  # id -> copy
        self._held: list[Any] = []  # so that no id is given away meanwhile
        self._objects = self._bytes = 0
        self.tensors: list[Tensor] = []  # copies: the forward may write to them
        self.originals: dict[int, nn.Module] = {}  # of the twin's modules, by id
        self._undecorated: list[nn.Module] = []
        self.has_dropped_hooks = False
        self.module = self._module(model)

    def held(self) -> list[Any]:
        """Return what was copied, or is shared because a forward does not change it: one of each class suffices."""
        kinds = {type(one): one for one in self._held}
        return [*kinds.values(), *(one for one in self._held if isinstance(one, FunctionType | ModuleType | type))]

    def release(self) -> None:
        """Undo what would make the twin hold itself, so that it goes at once and not with the garbage."""
        for twin in self._undecorated:
            twin.__dict__.pop("forward", None)

    def copy(self, value: Any) -> Any:
        """Return a copy that shares nothing with `value` which a forward may change."""
        if isinstance(value, PLAIN):
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
        return self._object(value)

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
                twin._parameters["weight"] = nn.Parameter(self._tensor(module._parameters["weight"].detach()), False)  # type: ignore[union-attr]
        return self._known[id(module)]  # type: ignore[no-any-return]

    def _attribute(self, name: str, value: Any) -> Any:
        if name == "_parameters":
            if any(is_lazy(one) or hasattr(one, "to_local") for one in value.values() if one is not None):
                raise Complaint("its parameters are sharded, or have no shape yet")
            return {key: None if one is None else self._tensor(one) for key, one in value.items()}
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
        return type(value)() if name in _TORCHS_OWN and not value else self.copy(value)

    def _undecorate(self, module: nn.Module, twin: nn.Module) -> None:
        """A class may have `@torch.compile` on its forward."""
        inner = getattr(type(module).forward, "_torchdynamo_orig_callable", None)
        if inner is not None and "forward" not in twin.__dict__:
            twin.__dict__["forward"] = MethodType(inner, twin)
            self._undecorated.append(twin)

    def _tensor(self, value: Tensor) -> Tensor:
        if id(value) in self._known:
            return self._known[id(value)]  # type: ignore[no-any-return]
        if isinstance(value, nn.Parameter):
            return self._parameter(value)
        if hasattr(value, "to_local"):
            raise Complaint("it holds sharded tensors")
        self._bytes += value.nbytes
        if self._bytes > _MOST_BYTES:
            raise Complaint("its buffers are too large to be copied")
        made = value.detach().clone()
        self._known[id(value)] = made
        self.tensors.append(made)
        return made

    def _parameter(self, value: nn.Parameter) -> nn.Parameter:
        """Another parameter on the same memory: a forward may give it other data, or attributes.

        Without gradients, so that autocast never caches a cast of it which the training's forward would use.
        """
        if type(value) is not nn.Parameter:
            return value
        self._known[id(value)] = made = nn.Parameter(value.detach(), requires_grad=False)
        self._held.append(value)
        for name, one in vars(value).items():
            setattr(made, name, self.copy(one))
        return made

    def _object(self, value: Any) -> Any:
        made: Any
        if isinstance(value, SHARED):
            made = value
        elif isinstance(value, torch.Generator):
            made = value.clone_state()
        elif isinstance(value, _COPIED):
            made = copy.deepcopy(value)
        elif isinstance(value, MethodType):
            made = MethodType(value.__func__, self.copy(value.__self__))
        elif isinstance(value, BuiltinFunctionType):
            holder = getattr(value, "__self__", None)
            is_bound = not isinstance(holder, ModuleType | type | None)
            made = getattr(self.copy(holder), value.__name__) if is_bound else value
        elif isinstance(value, partial):
            keywords = {name: self.copy(one) for name, one in value.keywords.items()}
            made = partial(self.copy(value.func), *map(self.copy, value.args), **keywords)
        elif isinstance(value, weakref.ref):
            target = value()
            made = value if target is None else weakref.ref(self.copy(target))
        elif isinstance(value, _Cached):
            made = lru_cache(**value.cache_parameters())(self.copy(value.__wrapped__))
        else:
            return self._function(value) if isinstance(value, FunctionType) else self._parts(value)
        self._known[id(value)] = made
        return made

    def _parts(self, value: Any) -> Any:
        """Copy the attributes of an object, its slots, and what it holds as a container.

        Python itself refuses to make an empty one where there is more to an object: of a file, of a generator.
        """
        kind: Any = type(value)
        base: Any = next((one for one in CONTAINERS if isinstance(value, one)), object)
        content = map(self.copy, tuple(value)) if base in (tuple, frozenset) else None
        try:
            if hasattr(kind, "__del__"):
                raise TypeError
            made = base.__new__(kind) if content is None else base.__new__(kind, content)
        except TypeError:
            if kind.__module__.partition(".")[0] == "torch":  # streams, process groups, packed weights
                return value
            raise Complaint(f"it holds a {kind.__name__}, which cannot be copied") from None
        self._known[id(value)] = made
        for name, one in getattr(value, "__dict__", {}).items():
            made.__dict__[name] = self.copy(one)
        for slot in (one for above in kind.__mro__ for one in vars(above).values()):
            if isinstance(slot, MemberDescriptorType) and hasattr(value, slot.__name__):
                slot.__set__(made, self.copy(slot.__get__(value)))
        self._fill(base, made, value)
        return made

    def _fill(self, base: Any, made: Any, value: Any) -> None:
        if issubclass(base, dict):
            for key, one in base.items(value):
                base.__setitem__(made, self.copy(key), self.copy(one))
        elif base is deque:
            deque.__init__(made, map(self.copy, value), value.maxlen)
        elif base in (list, set):
            base.__init__(made, map(self.copy, tuple(value)))

    def _function(self, value: FunctionType) -> Any:
        """One that reads variables of the function around it is made anew, with copies of them."""
        inner = getattr(value, "_torchdynamo_orig_callable", None)
        if inner is not None:
            return self.copy(inner)
        if not value.__closure__:
            return value
        cells = tuple(map(self._cell, value.__closure__))
        made = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        self._known[id(value)] = made
        made.__kwdefaults__ = value.__kwdefaults__
        made.__dict__.update(value.__dict__)
        return made

    def _cell(self, cell: CellType) -> CellType:
        if id(cell) not in self._known:
            self._held.append(cell)
            self._known[id(cell)] = made = CellType()
            if _has_contents(cell):
                made.cell_contents = self.copy(cell.cell_contents)
        return self._known[id(cell)]  # type: ignore[no-any-return]


_Cached = type(lru_cache(lambda: None))


def _has_contents(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not Twin  # whatever it is
    except ValueError:  # it is not bound yet
        return False


def _is_torchs(hook: Any) -> bool:
    place = str(getattr(hook, "__module__", ""))
    return place.startswith("torch.nn.utils.")


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("holter.")
