"""torch's own clip, seen. Whoever calls `torch.nn.utils.clip_grad_norm_`, a user or a framework, scales gradients
before an optimizer takes them: who looks only then sees every step at the limit, and calm.

While monitors are open, stand-ins tell them of a clip right before the gradients are scaled. They stand where torch's
function looks its own parts up, so that it does not matter who imported the function, or when. Each monitor sees only
clips of its own parameters; after the last one torch is as it was.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """What is known of it: the norm of all that is clipped, the largest allowed, and the kind of norm, if known."""

    norm: Tensor
    max_norm: float
    norm_type: float | None


Told = Callable[[Sequence[Tensor], Clip | None], None]  # of parameters whose gradients are about to be clipped
Function = Callable[..., Any]

_PLACES = ((torch.nn.utils.clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_"))
_NORMS = ((torch.nn.utils.clip_grad, "_get_total_norm"), (torch.nn.utils, "get_total_norm"))

_last = threading.local()  # norm and kind: the last norm that torch computed on this thread


class Stand:
    """Puts stand-ins before torch's functions, and takes them away again."""

    def __init__(self, tell: Told) -> None:
        self._stood: list[tuple[Any, str, Function, Function]] = []
        for places, make in ((_NORMS, _norm_stand_in), (_PLACES, functools.partial(_clip_stand_in, tell))):
            for module, name in places:
                inner = getattr(module, name, None)
                if callable(inner):  # older torch computes all of it in one function: then nothing is seen
                    outer = make(inner)
                    setattr(module, name, outer)
                    self._stood.append((module, name, inner, outer))

    def remove(self) -> None:
        """Where somebody else stands before it by now, it stays, and tells those who still listen: nobody."""
        for module, name, inner, outer in self._stood:
            if getattr(module, name, None) is outer:
                setattr(module, name, inner)
        self._stood.clear()


def _norm_stand_in(inner: Function) -> Function:
    @functools.wraps(inner)
    def norm_of(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
        found = inner(tensors, norm_type, *args, **kwargs)
        if not torch.compiler.is_compiling():
            _last.norm, _last.kind = found, norm_type
        return found

    return norm_of


def _clip_stand_in(tell: Told, inner: Function) -> Function:
    @functools.wraps(inner)
    def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
        # A constant for the compiler: nothing of this stays in a graph.
        if not torch.compiler.is_compiling():
            if not isinstance(parameters, Tensor | list | tuple) and isinstance(parameters, Iterable):
                parameters = list(parameters)  # a generator can be gone through once
            _tell(tell, parameters, max_norm, total_norm)
        return inner(parameters, max_norm, total_norm, *args, **kwargs)

    return clip


def _tell(tell: Told, parameters: Any, max_norm: Any, total_norm: Any) -> None:
    kind = _last.kind if total_norm is not None and getattr(_last, "norm", None) is total_norm else None
    _last.norm = None  # which would keep it alive
    concerned = [parameters] if isinstance(parameters, Tensor) else parameters
    if isinstance(concerned, list | tuple):
        # A sharded norm is read by all processes together: that is not ours to begin.
        is_plain = type(total_norm) is Tensor and isinstance(max_norm, int | float)
        tell(concerned, Clip(total_norm, float(max_norm), kind) if is_plain else None)
