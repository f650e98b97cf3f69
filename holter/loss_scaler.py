"""A loss scaler, seen: the steps that it skips, and what gradients are multiplied by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

Skipped = Callable[[Any], None]  # told of an optimizer whose step was not taken


class WatchedScaler:
    """Stands in for a GradScaler's `step`, to see the steps that it skips: then no optimizer hook is called."""

    def __init__(self, scaler: Any, inner: Callable[..., Any], skipped: Skipped | None) -> None:
        self._scaler, self._inner, self._skipped = scaler, inner, skipped
        self.stepped = False

    @classmethod
    def attach(cls, scaler: Any, skipped: Skipped) -> WatchedScaler:
        watched = cls(scaler, scaler.step, skipped)
        scaler.step = watched
        return watched

    def detach(self) -> None:
        self._skipped = None
        if self._scaler.__dict__.get("step") is not self:
            return  # another monitor stands in front: it takes this one away with itself
        if isinstance(self._inner, WatchedScaler):
            self._scaler.step = self._inner
            if self._inner._skipped is None:
                self._inner.detach()
        else:
            del self._scaler.step

    def has_unscaled(self, optimizers: Iterable[Any]) -> bool:
        """True also where it does not scale at all, or does not say."""
        states = getattr(self._scaler, "_per_optimizer_states", None)
        if states is None or not self._scaler.is_enabled():
            return True
        known = [states[id(one)] for one in optimizers if id(one) in states]  # else it was told of what wraps them
        return any(state["stage"].name == "UNSCALED" for state in known or states.values())

    def __call__(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        self.stepped = False
        result = self._inner(optimizer, *args, **kwargs)
        if not self.stepped and self._skipped is not None:
            self._skipped(optimizer)
        return result

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return WatchedScaler, (self._scaler, self._inner, None)  # a copy of the scaler is not watched


def gradient_scale_of(optimizer: Optimizer) -> Tensor | None:
    """What the gradients are still multiplied by while a fused optimizer steps under a GradScaler."""
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, Tensor) else None
