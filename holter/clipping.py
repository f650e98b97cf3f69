"""torch's own clip, seen. Whoever calls `torch.nn.utils.clip_grad_norm_`, a user or a framework, scales gradients
before an optimizer takes them: who looks only then sees every step at the limit, and calm.

While monitors are open, stand-ins tell them of a clip right before the gradients are scaled. They stand where torch's
function looks its own parts up, so that it does not matter who imported the function, or when. Each monitor sees only
clips of its own parameters; after the last one torch is as it was.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Clip:
    """What is known of it: the norm of all that is clipped, the largest allowed, and the kind of norm, if known."""

    norm: Tensor | float
    max_norm: float
    norm_type: float | None


Told = Callable[[Sequence[Tensor], Clip | None], None]  # of parameters whose gradients are about to be clipped
Function = Callable[..., Any]

_PLACES = ((torch.nn.utils.clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_"))
_NORMS = ((torch.nn.utils.clip_grad, "_get_total_norm"), (torch.nn.utils, "get_total_norm"))

_logger = logging.getLogger("holter")
_last = threading.local()  # the last norm that torch computed on this thread, by a weak reference, and its kind


class Stand:
    """Puts stand-ins before torch's functions, and takes them away again."""

    def __init__(self, tell: Told) -> None:
        self._tell: Told | None = tell
        self._stood: list[tuple[Any, str, Function, Function]] = []
        for places, make in ((_NORMS, self._norm_stand_in), (_PLACES, self._clip_stand_in)):
            for module, name in places:
                inner = getattr(module, name, None)
                if inner is None:  # torch's own parts may have other names one day
                    _logger.warning("torch's clip_grad_norm_ is not seen: there is no %s in this torch", name)
                    continue
                outer = make(inner)
                setattr(module, name, outer)
                self._stood.append((module, name, inner, outer))

    def remove(self) -> None:
        """Where somebody else stands before one of them by now it stays there, and tells nobody."""
        self._tell = None
        for module, name, inner, outer in self._stood:
            if getattr(module, name, None) is outer:
                setattr(module, name, inner)
        self._stood.clear()

    def _norm_stand_in(self, inner: Function) -> Function:
        @functools.wraps(inner)
        def norm_of(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> Any:
            found = inner(tensors, norm_type, *args, **kwargs)
            if not torch.compiler.is_compiling() and self._tell is not None and isinstance(found, Tensor):
                _last.norm, _last.kind = weakref.ref(found), norm_type
            return found

        return norm_of

    def _clip_stand_in(self, inner: Function) -> Function:
        @functools.wraps(inner)
        def clip(parameters: Any, max_norm: Any, total_norm: Any, *args: Any, **kwargs: Any) -> Any:
            # A constant for the compiler: nothing of this stays in a graph.
            if not torch.compiler.is_compiling() and self._tell is not None:
                if not isinstance(parameters, Tensor | list | tuple) and isinstance(parameters, Iterable):
                    parameters = list(parameters)  # a generator can be gone through once
                try:
                    _tell(self._tell, parameters, max_norm, total_norm)
                except Exception:  # monitors contain what fails in them; nothing may keep torch from clipping
                    _logger.debug("a clip was not seen", exc_info=True)
            return inner(parameters, max_norm, total_norm, *args, **kwargs)

        return clip


def _tell(tell: Told, parameters: Any, max_norm: Any, total_norm: Any) -> None:
    last = getattr(_last, "norm", None)
    kind = _last.kind if last is not None and total_norm is not None and last() is total_norm else None
    concerned = [parameters] if isinstance(parameters, Tensor) else parameters
    if isinstance(concerned, list | tuple):
        # A sharded norm is read by all processes together: that is not ours to begin.
        is_plain = type(total_norm) is Tensor and isinstance(max_norm, int | float | Real)
        kind = float(kind) if isinstance(kind, int | float | Real) else None
        tell(concerned, Clip(total_norm, float(max_norm), kind) if is_plain else None)
