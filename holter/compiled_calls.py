"""Calls of a compiled model, seen from outside: hooks on the model itself become part of what is compiled, and vanish.

A model may be compiled after it was watched: `torch.compile(model)` makes a module around it, `model.compile()` leaves
a function in it. Both are called uncompiled. They are searched for where a step was taken and no forward was seen; what
is compiled stays as it is.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from holter.hooks import ModuleHook
from holter.modules import shells_of
from holter.problems import Problems

_SEARCHES = (0, 1, 8, 64)  # after so many steps without a forward; a search goes through all objects of the process


@dataclass(frozen=True, eq=False)
class Called:
    """What a model was called with, and whether compiled code runs it."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    is_compiled: bool = False


Tell = Callable[[tuple[Any, ...], dict[str, Any]], None]


class CompiledCalls:
    """Tells of the calls of one model, which it does not hold, once they are found."""

    def __init__(self, model: nn.Module, tell: Tell, ended: Callable[[], None], problems: Problems) -> None:
        self._model, self._tell, self._ended, self._problems = weakref.ref(model), tell, ended, problems
        self._handles: list[RemovableHandle] = []
        self._steps = 0  # without a forward
        self._stand_before(model)

    @property
    def stand_before(self) -> bool:
        """Whether calls are seen in front of what `model.compile()` left.

        Hooks on the model are superfluous then, and not harmless: a module of torch's own, such as `nn.Sequential`, is
        compiled by torch only if it has hooks.
        """
        model = self._model()
        call = model.__dict__.get("_compiled_call_impl") if model is not None else None
        return isinstance(call, _Call) and call.tells(self)

    @property
    def are_found(self) -> bool:
        """Whether the model is known to be called compiled."""
        model = self._model()
        return bool(self._handles) or (model is not None and "_compiled_call_impl" in model.__dict__)

    def search(self) -> None:
        """After a step in which no forward was seen."""
        model = self._model()
        if model is None:
            return
        self._stand_before(model)
        if self._steps in _SEARCHES and _has_compiled():
            self._remove_hooks()
            for around in _compiled_around(model):
                began = ModuleHook(self, "see a forward", CompiledCalls._see_begin)
                self._handles.append(around.register_forward_pre_hook(began, with_kwargs=True))
                ended = ModuleHook(self, "see a forward", CompiledCalls._see_end)
                self._handles.append(around.register_forward_hook(ended))
        self._steps += 1

    def _stand_before(self, model: nn.Module) -> None:
        call = model.__dict__.get("_compiled_call_impl")
        if call is not None and not isinstance(call, _Call):
            call = model._compiled_call_impl = _Call(call)
        if call is not None and not call.tells(self):
            call.told = (*call.told, weakref.ref(self))

    def remove(self) -> None:
        self._remove_hooks()
        model = self._model()
        call = model.__dict__.get("_compiled_call_impl") if model is not None else None
        if model is None or not isinstance(call, _Call):
            return
        call.told = tuple(one for one in call.told if one() not in (self, None))
        if not call.told:
            model._compiled_call_impl = call.inner

    def _remove_hooks(self) -> None:
        while self._handles:
            self._handles.pop().remove()

    def _see_begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._tell(args, kwargs)

    def _see_end(self, module: nn.Module, args: Any, output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._ended()


class _Call:
    """Stands before what `model.compile()` left in a model, for all monitors together. torch neither pickles nor copies
    it."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner, self.told = inner, tuple[weakref.ref[CompiledCalls], ...]()

    def tells(self, calls: CompiledCalls) -> bool:
        return any(one() is calls for one in self.told)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.inner(*args, **kwargs)
        told = self._told()
        for calls, model in told:
            with calls._problems.contained("see a forward"):
                calls._see_begin(model, args, kwargs)
        output = self.inner(*args, **kwargs)
        for calls, model in told:
            with calls._problems.contained("see a forward"):
                calls._see_end(model, args, output)
        return output

    def _told(self) -> list[tuple[CompiledCalls, nn.Module]]:
        alive = [calls for one in self.told if (calls := one()) is not None]
        return [(calls, model) for calls in alive if (model := calls._model()) is not None]


def _has_compiled() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    return utils is not None and bool(utils.counters.get("frames"))


def _compiled_around(model: nn.Module) -> list[nn.Module]:
    """Return what `torch.compile` has made of this model, or of a wrapper of it."""
    kind = sys.modules["torch._dynamo.eval_frame"].OptimizedModule
    made = [one for one in gc.get_objects() if type(one) is kind]
    return [one for one in made if any(inner is model for inner in shells_of(one))]
