"""The order in which the modules of a model run: where a layer stands between input and output.

It is seen in the forwards of the first step, by a hook before every module, and again when the model was changed.
Every other step runs the model untouched.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Sequence

from torch import nn
from torch.utils.hooks import RemovableHandle

from holter.capture import Layers
from holter.hooks import ModuleHook
from holter.modules import all_parameters, is_compiled, named_parameters, parameters_in, walk
from holter.problems import Problems
from holter.record import EXECUTION_ORDER

ASSUMED = f"{EXECUTION_ORDER}_assumed"  # a note: of how many parameters the place could not be seen


class ExecutionOrder:
    """Watches one model, which it does not hold."""

    def __init__(self, model: nn.Module, layers: Layers, problems: Problems) -> None:
        self._model, self._layers, self._problems = weakref.ref(model), layers, problems
        self._handles: dict[str, RemovableHandle] = {}  # by the names of the modules
        self._ran: dict[str, None] = {}  # names of modules, in the order of their first call
        self._looked_at: int | None = None  # which of the model's states was last looked at
        self._told_at: int | None = None  # which of them was last told of
        self._has_told = False

    def look(self) -> None:
        """From the model's own forward pre-hook: at this forward and what else comes before the step, if need be."""
        model = self._model()
        if self._looked_at == self._layers.changes or model is None or is_compiled(model):
            return
        self._remove_hooks()
        self._looked_at, self._ran = self._layers.changes, {"": None}
        for name, module in walk(model):
            hook = ModuleHook(self, "see a module run", ExecutionOrder._see, name)
            self._handles[name] = module.register_forward_pre_hook(hook)

    def ran(self, names: Iterable[str]) -> None:
        """Told which modules ran, and in which order, where hooks cannot see it: in an uncompiled forward of a twin."""
        if self._told_at != self._layers.changes:
            self._told_at, self._ran = self._layers.changes, dict.fromkeys(("", *names))
            self._remove_hooks()

    def take(self) -> dict[str, str]:
        """Takes the hooks away; what is to be noted of the step: nothing, where nothing new was seen."""
        self._remove_hooks()
        model, ran = self._model(), list(self._ran)
        self._ran = {}
        if model is None or (self._has_told and not ran):
            return {}
        self._has_told = True
        if not ran:
            why = "the model is compiled" if is_compiled(model) else "no forward of the model was seen"
            return {EXECUTION_ORDER: f"not observed: {why}"}
        names, assumed = in_order(model, ran)
        if assumed and assumed == sum(1 for _ in parameters_in(model)):
            return {EXECUTION_ORDER: "not observed: no module with parameters was seen to run"}
        told = {EXECUTION_ORDER: json.dumps(names, separators=(",", ":"))}
        if assumed:
            told[ASSUMED] = f"{assumed} parameters, whose modules were not seen to run, follow their neighbours"
        return told

    def forget(self) -> None:
        """What was seen belongs to no step, or the steps begin anew: it is looked at again."""
        self._remove_hooks()
        self._looked_at, self._told_at, self._ran, self._has_told = None, None, {}, False

    def _see(self, name: str, module: nn.Module, args: object) -> None:
        self._ran.setdefault(name)
        # torch's encoder layers take another path in evaluation when they bear hooks, with other last bits.
        if isinstance(module, nn.TransformerEncoderLayer) and not module.training:
            self._remove_hooks(name)

    def _remove_hooks(self, within: str = "") -> None:
        """All of them, or those of a module and of what lies in it."""
        for name in list(self._handles):
            if not within or name == within or name.startswith(f"{within}."):
                self._handles.pop(name).remove()


def in_order(model: nn.Module, ran: Sequence[str]) -> tuple[list[str], int]:
    """The modules that ran, each followed by its own parameters; and how many parameters are of modules that did not.

    Those stay behind the one that comes before them in torch's order. A tied parameter is where it was used first.
    """
    place_of = {name: place for place, name in enumerate(ran)}
    first_used: dict[int, int] = {}
    for name, parameter in all_parameters(model):
        place = place_of.get(name.rpartition(".")[0])
        if place is not None:
            first_used[id(parameter)] = min(place, first_used.get(id(parameter), place))
    names: list[list[str]] = [[], *([name] for name in ran)]
    last = -1
    for name, parameter in named_parameters(model):
        last = first_used.get(id(parameter), last)
        names[last + 1].append(name)
    assumed = sum(id(parameter) not in first_used for parameter in parameters_in(model))
    return [name for part in names for name in part], assumed
