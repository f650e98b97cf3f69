"""torch's own clip, seen. Whoever calls `torch.nn.utils.clip_grad_norm_`, a user or a framework, scales gradients
before an optimizer takes them: who looks only then sees every step at the limit, and calm.

While monitors are open, stand-ins report a clip right before the gradients are scaled. They stand inside torch's
functions, in the cell where `_no_grad` keeps what it calls. The functions stay the same objects, so it does not
matter who imported one, or when; and pickle, `is`, copies and started processes find what they know. Each monitor
sees only clips of its own parameters; after the last one torch is as it was.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from types import CellType
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

_CLIP, _NORM = "clip_grads_with_norm_", "get_total_norm"

_logger = logging.getLogger("holter")
_last = threading.local()  # the last norm that torch computed on this thread, by a weak reference, and its kind


def cell_of(name: str) -> CellType:
    """Return the cell that holds what this function of torch.nn.utils calls under no_grad.

    LookupError if this torch is built in another way, or if somebody has put another function in its place.
    """
    function = getattr(torch.nn.utils, name, None)
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "func" not in names:
        raise LookupError(f"torch's clip_grad_norm_ is not seen: there is no {name} of torch's own in this torch")
    cell: CellType = function.__closure__[names.index("func")]  # type: ignore[union-attr]
    return cell


class Stand:
    """Puts stand-ins into torch's functions, and takes them away again."""

    def __init__(self, tell: Told) -> None:
        self._tell: Told | None = tell
        self._stood: list[tuple[CellType, Function, Function]] = []
        for name, make in ((_NORM, self._norm_stand_in), (_CLIP, self._clip_stand_in)):
            try:
                cell = cell_of(name)
            except LookupError as error:
                _logger.warning("%s", error)
                continue
            inner = cell.cell_contents
            outer = make(inner)
            cell.cell_contents = outer
            self._stood.append((cell, inner, outer))

    def remove(self) -> None:
        """If somebody else has put theirs around one of them by now, it stays there and reports nothing."""
        self._tell = None
        for cell, inner, outer in self._stood:
            if cell.cell_contents is outer:
                cell.cell_contents = inner
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
