"""What a forward may change outside its model: variables of the Python files of its classes, and their attributes.

Auxiliary losses are collected in such lists, and calls counted in such numbers. Kept and put back is what the methods
of the classes name, by themselves or in functions of the same file: what else is there may be of other threads.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from holter.modules import modules_in

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)
_MISSING = object()


@dataclass(frozen=True, eq=False)
class _Variable:
    read: Callable[[], Any]
    write: Callable[[Any], None]
    delete: Callable[[], None]
    value: Any
    content: Any  # a copy, where it is a container

    def put_back(self) -> None:
        now = self.read()
        if now is not self.value:
            self.delete() if self.value is _MISSING else self.write(self.value)
        if self.content is not None and _parts(self.value) != _parts(self.content):
            self.value.clear()
            (self.value.extend if isinstance(self.value, list | deque) else self.value.update)(self.content)


class Surroundings:
    """As they are when it is made."""

    def __init__(self, model: nn.Module) -> None:
        kinds = {kind for module in modules_in(model) for kind in type(module).__mro__ if _is_own(kind)}
        files = {(id(file), name): (file, name) for kind in kinds for file, name in _named_by(kind)}
        self._variables = [_of_file(file, name) for file, name in files.values()]
        self._variables += [_of_class(kind, name) for kind in kinds for name in vars(kind) if not name.startswith("__")]

    def put_back(self) -> None:
        for variable in self._variables:
            variable.put_back()


def _is_own(kind: type) -> bool:
    return kind is not object and kind.__module__.partition(".")[0] not in ("torch", "builtins", "typing")


def _of_file(file: dict[str, Any], name: str) -> _Variable:
    value = file.get(name, _MISSING)
    return _Variable(
        partial(file.get, name, _MISSING), partial(file.__setitem__, name), partial(file.pop, name), value, _kept(value)
    )


def _of_class(kind: type, name: str) -> _Variable:
    value, write = vars(kind)[name], partial(setattr, kind, name)
    return _Variable(lambda: vars(kind).get(name, _MISSING), write, partial(delattr, kind, name), value, _kept(value))


def _kept(value: Any) -> Any:
    return copy.copy(value) if type(value) in _CONTAINERS else None


def _parts(container: Any) -> list[int]:
    """By identity: what is held may not know what equal means."""
    items = container.items() if isinstance(container, Mapping) else ((one,) for one in container)
    return [id(one) for item in items for one in item]


def _named_by(kind: type) -> Iterator[tuple[dict[str, Any], str]]:
    """Return the variables of its file that the methods of a class name, and those that such functions do."""
    seen: set[FunctionType] = set()
    stack = [one for one in vars(kind).values() if isinstance(one, FunctionType)]
    while stack:
        function = stack.pop()
        if function not in seen:
            seen.add(function)
            file = function.__globals__
            for name in _names(function.__code__):
                value = file.get(name)
                if isinstance(value, FunctionType) and value.__globals__ is file:
                    stack.append(value)
                elif not isinstance(value, type):
                    yield file, name
            inner = getattr(function, "__wrapped__", None)
            stack += [inner] if isinstance(inner, FunctionType) else []


def _names(code: CodeType) -> set[str]:
    within = (one for one in code.co_consts if isinstance(one, CodeType))
    return set(code.co_names).union(*map(_names, within))
