"""Optimizers whose steps torch does not tell of: what Holter reads of one, and a stand-in that tells of its steps."""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from typing import Any

from torch import Tensor

Told = Callable[[Any, Sequence[Any], dict[str, Any]], None]  # of an optimizer, and the arguments of its step


class Imitation:
    """An optimizer whose steps torch does not tell of, with what Holter reads of one. Does not hold it."""

    def __init__(self, optimizer: Any, listed: Iterable[Tensor]) -> None:
        """`listed` are its parameters, if it has no groups of them."""
        self.optimizer = weakref.ref(optimizer)
        self.name = type(optimizer).__name__
        self._listed = [weakref.ref(one) for one in listed]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        optimizer = self.optimizer()
        if optimizer is None or not self._listed:
            return groups_of(optimizer)
        rate = next((getattr(optimizer, name) for name in ("lr", "learning_rate") if hasattr(optimizer, name)), None)
        listed = [parameter for one in self._listed if (parameter := one()) is not None]
        return [{"params": listed, **({} if rate is None else {"lr": rate})}]

    @property
    def state(self) -> Mapping[Any, Any]:
        state = getattr(self.optimizer(), "state", None)
        return state if isinstance(state, Mapping) else {}

    def __getattr__(self, name: str) -> Any:
        """What a GradScaler leaves on an optimizer while it steps."""
        if name not in ("grad_scale", "found_inf"):
            raise AttributeError(name)
        return getattr(self.optimizer(), name)


class WatchedStep:
    """Tells before and after each step of one optimizer, by a stand-in for the `step` of its class, as torch has for
    its own: so copies and pickles of the optimizer bear nothing of it. A `step` that is an attribute of the optimizer
    gets a stand-in there. `adopt` is asked once about every other optimizer of the class."""

    def __init__(self, imitation: Imitation, before: Told, after: Told, adopt: weakref.WeakMethod[Any]) -> None:
        self.imitation, self.adopt = imitation, adopt
        # Partials have no frame of their own. So `before` is called from one that lasts as long as the step, and a step
        # of torch's inside this one is known to be part of it.
        self.before, self.after = functools.partial(before, imitation), functools.partial(after, imitation)
        optimizer: Any = imitation.optimizer()
        stand_in = _StandIn.at(optimizer if _has_own_step(optimizer) else type(optimizer))
        stand_in.watchers.append(self)
        self._stand_in = weakref.ref(stand_in)

    def detach(self) -> None:
        stand_in = self._stand_in()
        if stand_in is not None and self in stand_in.watchers:
            stand_in.watchers.remove(self)
            stand_in.leave()


_stand_ins: weakref.WeakSet[_StandIn] = weakref.WeakSet()
_changing = threading.RLock()  # two threads may begin to watch; the garbage collector may run while it is held


def _has_own_step(optimizer: Any) -> bool:
    """Whether it has one that stands before its class's, or its class's is no function that another can stand for."""
    if not isinstance(getattr(type(optimizer), "step", None), types.FunctionType):
        return True
    return "step" in getattr(optimizer, "__dict__", {})


class _StandIn:
    """For the `step` of a class or of one optimizer, of all monitors together.

    Only the `step` that stands in its place holds it, or who has wrapped that: it holds the `step` behind it, which may
    hold the optimizer and its weights.
    """

    def __init__(self, place: Any) -> None:
        self.watchers: list[WatchedStep] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that somebody was asked about
        self._place, self._inner = weakref.ref(place), place.step
        self._had_own = "step" in vars(place)
        self._function = self._of_class() if isinstance(place, type) else _OwnStep(self, place, self._inner)
        place.step = self._function
        _stand_ins.add(self)

    @staticmethod
    def at(place: Any) -> _StandIn:
        """Return the one that stands there; where somebody has put theirs before it, another comes before that."""
        with _changing:
            stands = vars(place).get("step")
            known = (one for one in _stand_ins if one._place() is place and stands is one._function)
            return next(known, None) or _StandIn(place)

    def leave(self) -> None:
        """After the last monitor, unless somebody has put theirs before it: then it stays, and tells nobody."""
        place = self._place()
        if self.watchers or place is None or vars(place).get("step") is not self._function:
            return
        if self._had_own:
            place.step = self._inner
        else:
            del place.step

    def _of_class(self) -> Callable[..., Any]:
        inner = self._inner

        @functools.wraps(inner)
        def step(own: Any, *args: Any, **kwargs: Any) -> Any:
            told = self._watchers_of(own)
            for one in told:
                one.before((own, *args), kwargs)
            result = inner(own, *args, **kwargs)
            for one in told:
                one.after((own, *args), kwargs)
            return result

        return step

    def _watchers_of(self, optimizer: Any) -> list[WatchedStep]:
        """Of this optimizer of the class; one that is new is offered to all monitors that watch another."""
        with contextlib.suppress(TypeError):  # one that cannot be hashed stays unwatched
            if self.watchers and optimizer not in self._known:
                self._known.add(optimizer)
                known = any(one.imitation.optimizer() is optimizer for one in self.watchers)
                for adopt in () if known else {one.adopt() for one in self.watchers}:
                    if adopt is not None:
                        adopt(optimizer)
        return [one for one in self.watchers if one.imitation.optimizer() is optimizer]


class _OwnStep:
    """Stands for a `step` that is an attribute of one optimizer. Copies and pickles are of the one behind it: a copied
    optimizer must step its own weights, and the stand-in knows only those of the first."""

    def __init__(self, stand_in: _StandIn, optimizer: Any, inner: Callable[..., Any]) -> None:
        functools.update_wrapper(self, inner)
        self._stand_in, self._place, self._inner = stand_in, weakref.ref(optimizer), inner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        told, own = list(self._stand_in.watchers), self._place()
        for one in told:
            one.before((own, *args), kwargs)
        result = self._inner(*args, **kwargs)
        for one in told:
            one.after((own, *args), kwargs)
        return result

    @property
    def __func__(self) -> Callable[..., Any]:
        """What a bound method has: torch's schedulers wrap it."""
        return functools.wraps(self._inner)(lambda own, *args, **kwargs: self(*args, **kwargs))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return operator.getitem, ((self._inner,), 0)


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Its parameter groups, if they are such; a generator would be used up by looking."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(groups, list | tuple) and not (isinstance(groups, Iterable) and isinstance(groups, Sized)):
        return []
    return [
        group
        for group in groups
        if isinstance(group, dict) and isinstance(group.get("params"), Sized) and isinstance(group["params"], Iterable)
    ]


def name_of(optimizer: Any) -> str:
    return optimizer.name if isinstance(optimizer, Imitation) else type(optimizer).__name__
