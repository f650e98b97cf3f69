"""Selection: which layers are measured, by shell patterns for torch's names or by a function of the user's."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from holter.modules import all_modules, all_parameters, parameters_in

Predicate = Callable[[str, Any], bool]  # of a name, and the parameter or module that has it
Asked = str | Sequence[str] | Predicate
Failed = Callable[[str, Exception], None]


@dataclass(frozen=True)
class Selected:
    """The ids of what is selected in a model as it is now."""

    parameters: frozenset[int]
    modules: frozenset[int]


class Selection:
    """What a user asked for, refused before training where it makes no sense.

    A pattern is matched, case and all, against the whole name of a parameter or module; `*` matches dots too. It
    takes what it matches and all that lies in a module that it matches. A module is taken besides where it has a
    parameter of its own that is, or where all parameters within it are. A function is asked of every parameter and
    every module, once, and again where the model was changed; if it holds the model, it keeps it alive.
    """

    def __init__(self, asked: Asked) -> None:
        self._patterns: dict[str, re.Pattern[str]] = {}
        self._predicate: Predicate | None = None
        patterns = [asked] if isinstance(asked, str) else asked
        if callable(patterns) and not isinstance(patterns, nn.Module):
            self._predicate = patterns
        elif isinstance(patterns, Sequence) and patterns and all(isinstance(one, str) and one for one in patterns):
            self._patterns = {one: re.compile(fnmatch.translate(one)) for one in patterns}
        else:
            raise ValueError(
                f"layers={asked!r}: give a pattern for names, such as 'h.*.attn.*', a list of them, or a function that "
                "says of a name and its parameter or module whether to measure it"
            )

    def check(self, model: nn.Module) -> None:
        """ValueError where something that was asked for is not there, or cannot be asked of this model."""

        def refuse(name: str, error: Exception) -> None:
            where = repr(name) if name else "the model itself"
            raise ValueError(
                f"the function given as layers= raised {type(error).__name__} for {where}: it is asked of the name "
                "of every parameter and of every module, with that parameter or module beside it"
            ) from error

        names = [name for name, _ in (*all_modules(model), *all_parameters(model)) if name]
        for pattern, expression in self._patterns.items():
            if not any(_matches(expression, name) for name in names):
                raise ValueError(f"layers={pattern!r} matches no name of this {type(model).__name__}. {_some(names)}")
        found = self.of(model, refuse)
        if not found.parameters and not found.modules:
            raise ValueError(f"layers= selects nothing of this {type(model).__name__}. {_some(names)}")

    def of(self, model: nn.Module, failed: Failed) -> Selected:
        """What is selected; a parameter or module that the user's function fails for is not, and is told of."""
        parameters = frozenset(id(one) for name, one in all_parameters(model) if self._takes(name, one, failed))
        modules = frozenset(
            id(one)
            for name, one in all_modules(model)
            if self._takes(name, one, failed) or (self._patterns and _is_made_of(one, parameters))
        )
        return Selected(parameters, modules)

    def _takes(self, name: str, thing: nn.Parameter | nn.Module, failed: Failed) -> bool:
        if self._predicate is None:
            return any(_matches(expression, name) for expression in self._patterns.values())
        try:
            return bool(self._predicate(name, thing))
        except Exception as error:
            failed(name, error)
            return False


def _matches(expression: re.Pattern[str], name: str) -> bool:
    """Whether it matches the name, or that of a module around it."""
    ends = [place for place, letter in enumerate(name) if letter == "."]
    return any(expression.match(name[:end]) for end in (*ends, len(name)))


def _is_made_of(module: nn.Module, parameters: frozenset[int]) -> bool:
    own = [id(parameter) in parameters for parameter in module._parameters.values() if parameter is not None]
    within = [id(parameter) in parameters for parameter in parameters_in(module)]
    return any(own) or (bool(within) and all(within))


def _some(names: Sequence[str]) -> str:
    """A few of the names that there are."""
    few = dict.fromkeys(names[place] for place in (0, len(names) // 2, len(names) - 1))
    return f"There are {len(names)} names, such as {', '.join(map(repr, few))}"
