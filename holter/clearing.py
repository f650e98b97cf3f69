"""Whether gradients were cleared between two steps, seen where a backward adds to them.

After the backward a gradient that was set to zero cannot be told from one that still holds the step before. So one
small parameter carries a hook from a step to the next: torch calls it before it adds, while what was left lies there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle, unserializable_hook

from holter.problems import Problems
from holter.replays import is_captured

_MOST_ELEMENTS = 1 << 16  # of the parameter: to look at one is then a launch and no time
_MOST_ADDITIONS = 16  # between two steps, so that many micro-batches cost no more than that many launches


class Clearing:
    """One gradient of one optimizer. Hold it: once it is gone, its hook goes too."""

    def __init__(self, problems: Problems) -> None:
        self._problems = problems
        self._parameter: weakref.ref[Tensor] | None = None
        self._additions = 0  # since the step
        self._left: Tensor | None = None  # the least that lay there before any of them
        self._was_none = False  # before one of them
        self._remove: Callable[[], object] | None = None

    def watch(self, parameters: Sequence[Tensor]) -> None:
        """Look at each addition from now on: a step was taken."""
        self.leave()
        chosen = next((one for one in reversed(parameters) if _is_plain(one)), None)
        if chosen is None:
            return
        self._additions, self._left, self._was_none = 0, None, False
        self._parameter, had_none = weakref.ref(chosen), chosen._backward_hooks is None
        handle = chosen.register_hook(_hook_of(weakref.ref(self)))
        self._remove = weakref.finalize(self, _take_away, handle, self._parameter, had_none)

    def take(self) -> float | Tensor | None:
        """Return the least of the largest elements that lay there, 0 if it was cleared, None if that is not known; and
        look no more."""
        self.leave()
        additions, left, self._additions, self._left = self._additions, self._left, 0, None
        if not 0 < additions <= _MOST_ADDITIONS:
            return None
        return 0.0 if self._was_none else left

    def leave(self) -> None:
        """Take the hook away."""
        if self._remove is not None:
            self._remove()
        self._remove = None

    def look(self) -> None:
        """At what lies there now: a backward is about to add to it."""
        parameter = self._parameter() if self._parameter is not None else None
        self._additions += 1
        if parameter is None or self._was_none or self._additions > _MOST_ADDITIONS:
            return
        before = parameter.grad
        if before is None:
            self._was_none = True
            return
        with torch.no_grad():
            largest = torch.linalg.vector_norm(before, torch.inf)
            self._left = largest if self._left is None else torch.minimum(self._left, largest)


def _hook_of(clearing: weakref.ref[Clearing]) -> Callable[[Tensor], None]:
    def look(_: Tensor) -> None:
        one = clearing()
        # Compiled autograd traces hooks, and what is captured would become part of the user's graph.
        if one is not None and not torch.compiler.is_compiling() and not is_captured():
            with one._problems.contained("look at a gradient before a backward adds to it"):
                one.look()

    # Unmarked, torch would warn where the parameter is sent to another process.
    marked: Callable[[Tensor], None] = unserializable_hook(look)
    return marked


def _take_away(handle: RemovableHandle, parameter: weakref.ref[Tensor], had_none: bool) -> None:
    """Leave the parameter as it was: torch keeps an empty dictionary of hooks."""
    handle.remove()
    one = parameter()
    if one is not None and had_none and not one._backward_hooks:
        one._backward_hooks = None


def _is_plain(parameter: Tensor) -> bool:
    """Whether it is small, whole and on one device, and has a gradient that is."""
    gradient = parameter.grad
    return (
        type(parameter) in (Tensor, nn.Parameter)
        and parameter.is_leaf
        and parameter.requires_grad
        and type(gradient) is Tensor
        and gradient.layout is torch.strided
        and 0 < parameter.numel() <= _MOST_ELEMENTS
    )
