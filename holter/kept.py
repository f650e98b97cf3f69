"""Keep values as they are, with all that they hold, so that changes can be undone in place.

Copied are bindings (attributes, slots, closures, class attributes) and contents of containers, arrays and generators.
A cache of functools cannot be undone: another, empty one takes its place meanwhile.
"""

from __future__ import annotations

import io
import logging
import operator
import random
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from enum import Enum
from functools import lru_cache, partial
from itertools import chain
from types import BuiltinFunctionType, CellType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from holter.problems import Complaint
from holter.twin import CONTAINERS, PLAIN, SHARED

CACHED = type(lru_cache(lambda: None))
MISSING = object()
_MOST = 50_000  # values, at some 2 us each; a forward that names its trainer names the whole program
_MOST_BYTES = 64 << 20  # of arrays
_FOREIGN = {"torch", "torchgen", "triton", "numpy", "holter", *sys.stdlib_module_names} - {"__main__"}


class _Pair(NamedTuple):
    first: int


# They hold nothing that a forward changes.
_FIXED = (
    *(*SHARED, operator.itemgetter, operator.attrgetter, operator.methodcaller, Decimal, type(_Pair.first)),
    *(types.GetSetDescriptorType, MemberDescriptorType, types.MethodWrapperType, types.ClassMethodDescriptorType),
    *(logging.Filterer, io.TextIOBase),  # what a forward writes there cannot be undone, and changes no training
    *(types.CodeType, type(NotImplemented), CellType, type(vars(Mapping)["_abc_impl"])),
)
_LIVE = (threading.Thread, threading.Condition)  # other threads change what holds them


def is_foreign(name: object) -> bool:
    """Whether a module is of Python, torch or NumPy: their own variables are none of a model's."""
    return str(name).partition(".")[0] in _FOREIGN


# Bindings -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Names:
    """Names that are bound to values: `now`, and as they were."""

    now: MutableMapping[str, Any]
    before: dict[str, Any]

    def put_back(self, bound: set[str] | None) -> None:
        """Of these names; of all where None is given."""
        names = {*self.before, *self.now} if bound is None else bound & {*self.before, *self.now}
        for name in names:
            value = self.before.get(name, MISSING)
            if self.now.get(name, MISSING) is not value:
                if value is MISSING:
                    self.now.pop(name, None)
                else:
                    self.now[name] = value


class _Bindings(MutableMapping[str, Any]):
    """What is no dictionary, as if it were one."""

    def __init__(self, names: Callable[[], Iterable[str]], get: Any, put: Any, delete: Any) -> None:
        self._names, self._get, self._put, self._delete = names, get, put, delete

    def __getitem__(self, name: str) -> Any:
        try:
            return self._get(name)
        except (AttributeError, ValueError):  # a slot or a cell that is empty
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._put(name, value)

    def __delitem__(self, name: str) -> None:
        self._delete(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names() if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _of_class(kind: type) -> _Bindings:
    write, delete = partial(type.__setattr__, kind), partial(type.__delattr__, kind)
    return _Bindings(lambda: list(vars(kind)), lambda name: vars(kind)[name], write, delete)


def _of_slots(value: Any, slots: Mapping[str, MemberDescriptorType]) -> _Bindings:
    return _Bindings(
        lambda: slots,
        lambda name: slots[name].__get__(value),
        lambda name, one: slots[name].__set__(value, one),
        lambda name: slots[name].__delete__(value),
    )


def _of_closure(function: FunctionType) -> _Bindings:
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))

    def write(name: str, value: Any) -> None:
        cells[name].cell_contents = value

    def delete(name: str) -> None:
        del cells[name].cell_contents

    return _Bindings(lambda: cells, lambda name: cells[name].cell_contents, write, delete)


# Values -------------------------------------------------------------------------------------------------------


class Kept:
    """Values as they were when they were added, each with all that it holds."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # held, so that no id is given away meanwhile
        self._count = self._bytes = 0
        self._names: list[Names] = []
        self._waiting: dict[int, list[FunctionType]] = {}  # by the ids of their codes, until they are called
        self._contents: list[Callable[[], None]] = []
        self._fresh: dict[int, Any] = {}  # caches, by the ids of those in whose place they are
        self._others: dict[int, Any] = {}  # what took the place of something, by its own id
        self._replaced: list[tuple[MutableMapping[str, Any], str, Any]] = []

    def put_back(self, bound: set[str] | None) -> None:
        """Undo what changed. Of bindings those of the names in `bound`, or all."""
        for names in self._names:
            names.put_back(bound)
        for put_back in self._contents:
            put_back()
        for now, name, value in self._replaced:
            now[name] = value

    def add(self, value: Any) -> None:
        """Keep a value; raise a Complaint where it holds what cannot be put back."""
        stack = [value]
        while stack:
            one = stack.pop()
            if id(one) not in self._seen and not issubclass(type(one), PLAIN):
                self._seen[id(one)] = one
                within = list(self._keep(one))
                self._count += 1 + len(within)
                if self._count > _MOST:
                    raise Complaint("its forward reaches too much outside of the model to put it back")
                stack += within

    def add_shared(self, value: Any) -> None:
        """Keep what a twin shares with its model: the class of a value, and the defaults of a function."""
        if isinstance(value, FunctionType):
            self.add((value.__defaults__, value.__kwdefaults__))
        self.add(value if isinstance(value, type) else type(value))

    def enter(self, frame: FrameType) -> None:
        """Keep the defaults and the closure of the function that is called."""
        waiting = self._waiting.get(id(frame.f_code))
        for function in list(waiting or ()):
            closure = _of_closure(function)
            if waiting and all(frame.f_locals.get(name) is value for name, value in closure.items()):
                waiting.remove(function)
                self.add((function.__defaults__, function.__kwdefaults__, *self._keep_names(closure)))
                frame.f_locals  # noqa: B018 - read anew: until Python 3.13 it is written back to the closure

    def replace_caches(self, now: MutableMapping[str, Any], name: str) -> None:
        """Let another, empty cache take the place of one that is bound to this name, or is a method of that name."""
        value = now[name]
        caches = [one for one in (value, *_wrapped(value)) if isinstance(one, CACHED)]
        if not caches or id(value) in self._others:
            return
        for cache in caches:
            self.add(cache.__wrapped__)
            if id(cache) not in self._fresh:
                fresh: Any = lru_cache(**cache.cache_parameters())(cache.__wrapped__)
                self._fresh[id(cache)] = self._others[id(fresh)] = fresh
        parts = [self._fresh.get(id(one), one) for one in _wrapped(value)]
        other = type(value)(*parts) if parts else self._fresh[id(value)]
        self._others[id(other)] = other
        self._replaced.append((now, name, value))
        now[name] = other

    def _keep(self, value: Any) -> Iterable[Any]:
        """Keep one value, and return what it holds."""
        kind = type(value)
        if issubclass(kind, type):
            return self._keep_class(value)
        if issubclass(kind, Tensor | nn.Module):  # writes to the tensor itself are refused elsewhere
            return self._keep_names(vars(value))
        if issubclass(kind, _FIXED) or kind.__module__ == "typing":
            return ()
        if issubclass(kind, FunctionType):
            return self._keep_function(value)
        if issubclass(kind, CACHED):
            return self._keep_cache(value)
        for known, parts in _PARTS.items():
            if issubclass(kind, known):
                return parts(value)
        if self._keep_state(value, kind):
            return ()
        if issubclass(kind, threading.local | types.SimpleNamespace):
            return self._keep_names(vars(value))
        hashable: Any = kind
        if issubclass(kind, _LIVE) or not _is_python(hashable):
            if str(kind.__module__).startswith("torch."):  # streams, process groups, packed weights
                return ()
            raise Complaint(f"its forward reaches a {kind.__name__} outside of the model, which cannot be put back")
        return self._keep_object(value, kind)

    def _keep_state(self, value: Any, kind: type) -> bool:
        """Keep an array or a generator of random numbers, which hold no other values."""
        if issubclass(kind, torch.Generator):
            self._contents.append(partial(value.set_state, value.get_state()))
        elif issubclass(kind, random.Random):
            self._contents.append(partial(value.setstate, value.getstate()))
        elif issubclass(kind, np.random.RandomState):
            self._contents.append(partial(value.set_state, value.get_state()))
        elif issubclass(kind, np.random.Generator):
            self._contents.append(partial(setattr, value.bit_generator, "state", value.bit_generator.state))
        elif issubclass(kind, bytearray) or (issubclass(kind, np.ndarray) and not value.dtype.hasobject):
            self._bytes += memoryview(value).nbytes if issubclass(kind, bytearray) else value.nbytes
            if self._bytes > _MOST_BYTES:
                raise Complaint("its forward reaches arrays outside of the model that are too large to put back")
            self._contents.append(partial(_write_array, value, value.copy()))
        else:
            return False
        return True

    def _keep_object(self, value: Any, kind: Any) -> Iterable[Any]:
        """Keep the attributes of an object, its slots, its class, and what it holds as a container."""
        slots = _slots(kind)
        within = [kind, *self._keep_names(getattr(value, "__dict__", {}))]
        if slots:
            within += self._keep_names(_of_slots(value, slots))
        base = _base(kind)
        if base in (tuple, frozenset):
            return [*within, *value]
        if base is not object:
            content = _content(base, value)
            self._contents.append(partial(_write_content, base, value, content))
            within += chain.from_iterable(content) if issubclass(base, dict) else content
        return within

    def _keep_class(self, kind: type) -> Iterable[Any]:
        if is_foreign(kind.__module__) or issubclass(kind, Enum):
            return ()
        dunders = [one for name, one in vars(kind).items() if name.startswith("__") and isinstance(one, FunctionType)]
        return [*dunders, *kind.__bases__, type(kind), *self._keep_names(_of_class(kind))]

    def _keep_function(self, function: FunctionType) -> Iterable[Any]:
        """Keep its attributes; what it reads besides is kept when it is called, for most of a class is not."""
        if is_foreign(function.__module__):
            return ()
        self._waiting.setdefault(id(function.__code__), []).append(function)
        return self._keep_names(vars(function))

    def _keep_cache(self, cache: Any) -> Iterable[Any]:
        """One that is not bound to a name: none takes its place."""
        if not is_foreign(cache.__module__) and id(cache) not in self._others:
            raise Complaint("its forward reaches a cached function outside of the model, which cannot be put back")
        return ()

    def _keep_names(self, now: MutableMapping[str, Any]) -> list[Any]:
        names = Names(now, dict(now))
        self._names.append(names)
        for name in names.before:
            if name != "__wrapped__":
                self.replace_caches(now, name)
        return [one for one in names.before.values() if not is_cache(one)]


# A method, or what else stands for other values, is followed to them.
_PARTS: dict[Any, Callable[[Any], Iterable[Any]]] = {
    MethodType: lambda value: (value.__self__, value.__func__),
    BuiltinFunctionType: lambda value: () if isinstance(value.__self__, ModuleType) else (value.__self__,),
    partial: lambda value: (value.func, value.args, value.keywords),
    staticmethod: lambda value: (value.__func__,),
    classmethod: lambda value: (value.__func__,),
    property: lambda value: (value.fget, value.fset, value.fdel),
    types.MappingProxyType: lambda value: value.values(),
    ref: lambda value: (value(),),
    ContextVar: lambda value: (value.get(None),),
}


def _wrapped(value: Any) -> tuple[Any, ...]:
    """What a decorator of methods holds."""
    return tuple(_PARTS[type(value)](value)) if type(value) in (staticmethod, classmethod, property) else ()


def is_cache(value: Any) -> bool:
    """Whether a value is a cached function, or a method that is one."""
    return any(isinstance(one, CACHED) for one in (value, *_wrapped(value)))


@lru_cache(maxsize=4096)
def _slots(kind: Any) -> dict[str, MemberDescriptorType]:
    found = (one for above in kind.__mro__ for one in vars(above).values())
    return {one.__name__: one for one in found if isinstance(one, MemberDescriptorType)}


def _base(kind: type) -> Any:
    return next((one for one in CONTAINERS if issubclass(kind, one)), object)


@lru_cache(maxsize=4096)
def _is_python(kind: Any) -> bool:
    """Whether its objects hold nothing but attributes, slots and a container; where more, Python makes no empty one."""
    if kind in CONTAINERS:
        return True
    if hasattr(kind, "__del__"):
        return False
    try:
        _base(kind).__new__(kind)
    except TypeError:
        return False
    return True


def _content(base: Any, value: Any) -> tuple[Any, ...]:
    return tuple(base.items(value)) if issubclass(base, dict) else tuple(base.__iter__(value))


def _write_content(base: Any, value: Any, content: tuple[Any, ...]) -> None:
    """Where it changed: compared by identity, for what is held may not know what equal means."""
    now: Iterable[Any] = _content(base, value)
    before: Iterable[Any] = content
    if issubclass(base, dict):
        now, before = chain.from_iterable(now), chain.from_iterable(before)
    if len(content) != base.__len__(value) or not all(map(operator.is_, now, before)):
        base.clear(value)
        (base.extend if base in (list, deque) else base.update)(value, content)


def _write_array(value: Any, content: Any) -> None:
    if bytes(value) != bytes(content):
        value[slice(None) if isinstance(value, bytearray) else ...] = content
