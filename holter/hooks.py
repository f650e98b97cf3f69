"""The one kind of hook that Holter puts on modules: it never raises, holds nobody and compiles to nothing."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ModuleHook:
    """Calls `see(owner, *told, module, ...)` with what torch gives a hook, as long as the owner lives.

    What fails in it is contained among the owner's `_problems`. A copied or pickled model carries a harmless stand-in
    from the standard library instead.
    """

    def __init__(self, owner: Any, purpose: str, see: Callable[..., None], *told: Any) -> None:
        self._owner, self._purpose, self._see, self._told = weakref.ref(owner), purpose, see, told

    def __call__(self, module: nn.Module, *what: Any) -> None:
        if torch.compiler.is_compiling():
            return  # a constant for the compiler: nothing of the hook stays in the graph
        if torch._C._get_tracing_state() is not None:
            return  # torch.jit.trace would take what is measured into its graph, and miss it in its check of that
        owner = self._owner()
        if owner is not None:
            try:
                self._see(owner, *self._told, module, *what)
            except Exception as error:
                owner._problems.add(self._purpose, error)

    @property
    def __name__(self) -> str:
        """Absent. torch.jit.script asks for it, as it compiles the hooks of a model too."""
        raise AttributeError(
            "torch.jit.script cannot compile the hooks of a model that Holter watches: script it before watch() or "
            "after close(), or use torch.jit.trace"
        )

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (contextlib.nullcontext(), "__exit__")  # takes any arguments, does nothing, needs no Holter
