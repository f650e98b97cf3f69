"""The optimizers that a user names: torch's own, in whatever they are wrapped, and others that look like them.

torch tells of every step of its own optimizers. One that is not torch's, or whose `__init__` has not called torch's,
is seen by a stand-in for its `step`, if it lists parameters. What it lists is read where torch's optimizers have it, in
`param_groups`, and else wherever its attributes hold parameters of the model.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from holter.imitations import Imitation, groups_of
from holter.modules import parameters_in

_DEPTH = 3  # levels of attributes and containers that are looked into
_MOST = 10_000  # things that are looked at
_PLAIN = (str, bytes, int, float, complex, Tensor, nn.Module, types.ModuleType, types.FunctionType, types.MethodType)
_CONTAINERS = (list, tuple, set, frozenset)


# What a user gives --------------------------------------------------------------------------------------------


def optimizers_in(given: Any, model: nn.Module) -> list[Any]:
    """Return the optimizers in what was given, torch's own or imitations, each once.

    ValueError where there is one whose steps cannot be seen, or none at all. An object that makes its optimizers while
    it trains, as pyro's do, has none yet: they are seen when they step.
    """
    own = {id(parameter): parameter for parameter in parameters_in(model)}
    several = _several(given)
    if several is None:
        several = [given]
    elif not several or all(isinstance(one, Tensor) for one in several):
        raise ValueError(
            _needs(given, " These are parameters: give the optimizer that was made for them" if several else "")
        )
    found: dict[int, Any] = {}
    for one in several:
        nested = _several(one)
        for optimizer in optimizers_in(one, model) if nested else _of_one(one, own, type(model).__name__):
            found.setdefault(_identity(optimizer), optimizer)
    return list(found.values())


def trainers_in(given: Any, model: nn.Module) -> list[Any]:
    """Return the optimizers in this one that train the model, as `optimizers_in` does, but none if it is another's."""
    return _found_in(given, {id(parameter): parameter for parameter in parameters_in(model)})


def imitation_of(optimizer: Any, model: nn.Module) -> Imitation | None:
    """Return what is read of an optimizer that is not torch's; None if it trains nothing of this model."""
    own = {id(parameter): parameter for parameter in parameters_in(model)}
    return _imitation(optimizer, own) if _has_parameters(optimizer, own) else None


def _several(given: Any) -> list[Any] | None:
    if isinstance(given, Mapping):
        # Such as Lightning's {"optimizer": ..., "lr_scheduler": ...}: a scheduler holds the optimizer that it is for.
        return list(given.values())
    return list(given) if isinstance(given, (*_CONTAINERS, Iterator)) else None


def _identity(optimizer: Any) -> int:
    return id(optimizer.optimizer()) if isinstance(optimizer, Imitation) else id(optimizer)


def is_same(one: Any, other: Any) -> bool:
    """Whether both are one optimizer, or imitations of one."""
    return _identity(one) == _identity(other)


def _found_in(given: Any, own: Mapping[int, Tensor]) -> list[Any]:
    if tells_of_steps(given) and _trains(given, own):
        return [given]
    inside = _torchs_in(given, own)
    if inside:
        return list(inside)
    if callable(getattr(given, "step", None)) and not isinstance(given, type) and _has_parameters(given, own):
        return [_imitation(given, own)]
    return []


def _of_one(given: Any, own: Mapping[int, Tensor], model: str) -> Iterable[Any]:
    found = _found_in(given, own)
    if found:
        return found
    if isinstance(given, Optimizer):
        raise ValueError(
            f"the {type(given).__name__} holds none of the parameters of this {model}. Was it built "
            "for another model, or before the model was copied? Build it from this model's parameters()"
        )
    if not isinstance(given, type | functools.partial) and _makes_optimizers(given):
        return []
    raise ValueError(_needs(given))


def _needs(given: Any, why: str = "") -> str:
    if given is None:
        return f"watch() needs torch.optim.Optimizer objects, got a NoneType.{_NOT_MADE_YET}"
    shown = given.__name__ + " itself" if isinstance(given, type) else f"a {type(given).__name__}"
    return f"watch() needs torch.optim.Optimizer objects, got {shown}.{why or _WAY_OUT}"


_WAY_OUT = (
    " It has neither one inside, nor a step() and param_groups with parameters of this model: "
    "give the torch.optim.Optimizer that trains the model, or a list of them"
)
_NOT_MADE_YET = (
    " The optimizer is probably not made yet: make it first, and then watch. With fastai: learn.create_opt(), then "
    "holter.watch(learn.model, learn.opt). With Lightning or a transformers Trainer, which make it as they begin: "
    "HolterCallback of holter.integrations in place of watch()"
)


def _imitation(given: Any, own: Mapping[int, Tensor]) -> Imitation:
    try:
        if not isinstance(getattr(type(given), "step", None), types.FunctionType):
            vars(given)  # where a stand-in can be put
        listed = () if groups_of(given) else dict.fromkeys(_held_in(given, own))
        return Imitation(given, [own[one] for one in listed])
    except TypeError as error:
        raise ValueError(
            f"the steps of a {type(given).__name__} cannot be seen: its class has slots, and none for weak references. "
            "Give the torch.optim.Optimizer inside it, or add '__weakref__' to its __slots__"
        ) from error


def tells_of_steps(optimizer: Any) -> bool:
    """Whether torch tells of its steps: it has wrapped the `step` of the class, when one was made."""
    return isinstance(optimizer, Optimizer) and bool(getattr(type(optimizer).step, "hooked", False))


def _trains(optimizer: Any, own: Mapping[int, Tensor]) -> bool:
    return any(id(one) in own for group in groups_of(optimizer) for one in group["params"])


def _has_parameters(optimizer: Any, own: Mapping[int, Tensor]) -> bool:
    return _trains(optimizer, own) or next(iter(_held_in(optimizer, own)), None) is not None


# What is inside -----------------------------------------------------------------------------------------------


def _levels(thing: Any) -> Iterator[list[Any]]:
    """What its attributes and containers hold, level by level, each once."""
    seen, level, count = {id(thing)}, [thing], 0
    for _ in range(_DEPTH):
        below = []
        for one in level:
            for inner in _within(one):
                if id(inner) not in seen and inner is not None:
                    seen.add(id(inner))
                    below.append(inner)
        count += len(below)
        if not below or count > _MOST:
            return
        yield below
        level = [one for one in below if not isinstance(one, (*_PLAIN, type))]


def _within(thing: Any) -> Iterable[Any]:
    if isinstance(thing, Mapping):
        return list(thing.values())
    if isinstance(thing, _CONTAINERS):
        return list(thing)
    if isinstance(thing, functools.partial):
        return [thing.func]
    return [*getattr(thing, "__dict__", {}).values(), *_in_slots(thing)]


def _in_slots(thing: Any) -> Iterator[Any]:
    for kind in type(thing).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for slot in vars(kind).values():  # not by the names in `__slots__`: Python mangles private ones
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # nothing was assigned to it
                    yield slot.__get__(thing)


def _torchs_in(given: Any, own: Mapping[int, Tensor]) -> list[Optimizer]:
    """The nearest that train the model: a wrapper may know of others further away."""
    for level in _levels(given):
        found = [one for one in level if tells_of_steps(one) and _trains(one, own)]
        if found:
            return found
    return []


def _held_in(given: Any, own: Mapping[int, Tensor]) -> Iterator[int]:
    """The ids of the model's parameters that it holds; what it keeps by them in dictionaries counts too."""
    for level in _levels(given):
        for one in level:
            if isinstance(one, Tensor) and id(one) in own:
                yield id(one)
            if isinstance(one, Mapping):
                yield from (id(key) for key in one if isinstance(key, Tensor) and id(key) in own)


def _makes_optimizers(given: Any) -> bool:
    return any(isinstance(one, type) and issubclass(one, Optimizer) for level in _levels(given) for one in level)
