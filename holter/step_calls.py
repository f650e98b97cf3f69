"""How the step of an optimizer was called: from which frame, and with which closure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import FrameType
from typing import Any

_NOTHING = (lambda: None).__code__
_BETWEEN = ("torch._compile", "torch._dynamo.eval_frame")  # of the wrappers that Dynamo puts around a function


def step_frame(frame: FrameType | None) -> FrameType | None:
    """Return the frame of torch's step, from that of the hook which it has called through Dynamo's wrappers."""
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back
    return frame


def has_closure(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return whether the step computes its gradients by a closure; `args` begin with the optimizer."""
    closure = kwargs.get("closure") if len(args) < 2 else args[1]
    return callable(closure) and not _does_nothing(closure)


def _does_nothing(closure: Any) -> bool:
    """Return whether a closure has no statement: Lightning passes one, in a partial, where its user steps by hand."""
    while isinstance(closure, functools.partial) and closure.args and callable(closure.args[-1]):
        closure = closure.args[-1]
    code = getattr(closure, "__code__", None)
    return code is not None and (code.co_code, code.co_consts[-1:]) == (_NOTHING.co_code, (None,))
