"""Optimizers whose steps torch does not tell of: what Holter reads of one, and a stand-in that tells of its steps."""

from __future__ import annotations

import contextlib
import functools
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
        self.imitation, self._before, self._after, self.adopt = imitation, before, after, adopt
        optimizer: Any = imitation.optimizer()
        self._stand_in = _StandIn.at(optimizer if _has_own_step(optimizer) else type(optimizer))
        self._stand_in.watchers.append(self)

    def detach(self) -> None:
        self._stand_in.watchers.remove(self)
        self._stand_in.leave()

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._before(self.imitation, args, kwargs)

    def after(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._after(self.imitation, args, kwargs)


_stand_ins: list[_StandIn] = []


def _has_own_step(optimizer: Any) -> bool:
    """Whether it has one that stands before its class's, or its class's is no function that another can stand for."""
    if not isinstance(getattr(type(optimizer), "step", None), types.FunctionType):
        return True
    return "step" in getattr(optimizer, "__dict__", {})


class _StandIn:
    """For the `step` of a class or of one optimizer, of all monitors together."""

    def __init__(self, place: Any) -> None:
        self.watchers: list[WatchedStep] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers that somebody was asked about
        self._place, self._inner = place, place.step
        self._had_own = "step" in vars(place)
        self._function = self._of_class() if isinstance(place, type) else types.MethodType(self._of_one(place), place)
        place.step = self._function
        _stand_ins.append(self)

    @staticmethod
    def at(place: Any) -> _StandIn:
        """Return the one that stands there; where somebody has put theirs before it, another comes before that."""
        known = (one for one in _stand_ins if one._place is place and vars(place).get("step") is one._function)
        return next(known, None) or _StandIn(place)

    def leave(self) -> None:
        """After the last monitor, unless somebody has put theirs before it: then it stays, and tells nobody."""
        if self.watchers or vars(self._place).get("step") is not self._function:
            return
        if self._had_own:
            self._place.step = self._inner
        else:
            del self._place.step
        _stand_ins.remove(self)

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

    def _of_one(self, optimizer: Any) -> Callable[..., Any]:
        inner, place = self._inner, weakref.ref(optimizer)

        @functools.wraps(inner)
        def step(own: Any, *args: Any, **kwargs: Any) -> Any:
            told = list(self.watchers) if own is place() else []
            for one in told:
                one.before((own, *args), kwargs)
            result = inner(*args, **kwargs)
            for one in told:
                one.after((own, *args), kwargs)
            return result

        return step


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
