"""Activations and attention as roles of a step: looked at in its forward, handed over before its update."""

from __future__ import annotations

import gc
import json
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from holter.activations import PASSIVE, ActivationCapture, ActivationRows, Activations
from holter.attention import ATTENTION, LOGITS
from holter.compiled_calls import Called
from holter.draft import LateRows, NamedSums, RoleRows
from holter.eager_look import is_possible_now, look, refusal
from holter.modules import compiled_parts, walk
from holter.problems import Problems, describe
from holter.record import ACTIVATION_DTYPES, ACTIVATIONS
from holter.statistics.activation import SIGNALS, Window
from holter.statistics.device_rows import DeviceRows, widest
from holter.statistics.measure import Measurer
from holter.statistics.rows import COLUMNS, MAX, MIN
from holter.twin import Twin

_WINDOW = 3  # looks in a row at which a unit must be zero to be called dead for good


@dataclass(frozen=True, eq=False)
class Looked:
    """What one look found: rows, scalars of the model's output, and what is to be noted of the step."""

    rows: list[RoleRows] = field(default_factory=list)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    unseen: str = ""  # why nothing was found
    is_uncompiled: bool = False  # found in a forward of Holter's own


class ActivationRoles:
    """Looks at what the layers of one model put out, at the steps at which it is told to; `selected` says at which."""

    def __init__(self, model: nn.Module, problems: Problems, selected: Callable[[nn.Module], bool]) -> None:
        # A measurer of its own: the shapes of activations would push those of the gradients out of its plans.
        measurer = Measurer()
        self._histograms = False
        self._model, self._problems, self._selected = weakref.ref(model), problems, selected
        self._measure = lambda tensors: measurer.measure(tensors, histograms=self._histograms)
        self._capture = ActivationCapture(model, problems, self._measure, self._is_wanted)
        self._window = Window(_WINDOW)
        self._dtypes: dict[str, str] = {}  # by layer, as they were noted
        self._looked: Activations | None = None  # at the model, run uncompiled
        self._twin: Callable[[], nn.Module | None] = lambda: None  # the last that was run
        self.ran: dict[str, None] = {}  # the modules that ran in it, in the order of their first call
        self._how = ""  # it was looked at
        self._refused = ""  # why it is not run uncompiled any more
        self._unseen = ""  # why nothing was seen, where that is known
        self._joining = 0.0  # seconds, beside those of the capture

    def _is_wanted(self, name: str, module: nn.Module) -> bool:
        return not isinstance(module, PASSIVE) and self._selected(module)

    @property
    def is_armed(self) -> bool:
        """Whether this step is looked at, or was."""
        return self._capture.is_armed or bool(self._unseen) or self._looked is not None

    @property
    def seconds(self) -> float:
        """That looking has taken of the training thread so far."""
        return self._capture.seconds + self._joining

    def arm(self, histograms: bool, called: Called | None) -> float:
        """From the model's own forward pre-hook: this forward, and what else comes before the step.

        Of a model that is compiled, wholly or in part, in an uncompiled forward that is run now: then the seconds that
        it took are returned. `called` is None where it is not known with what the model is called.
        """
        model = self._model()
        if model is None:
            return 0.0
        self._histograms = histograms
        took = 0.0
        if called is not None and (called.is_compiled or compiled_parts(model)) and is_possible_now():
            began = time.perf_counter()
            self._look(model, called)
            took = time.perf_counter() - began
            self._joining += took
        if self._looked is None and not (called is not None and called.is_compiled):
            self._capture.arm(in_forward=True)  # what is not compiled can be seen as it runs
        return took

    def _look(self, model: nn.Module, called: Called) -> None:
        self._refused = self._refused or refusal(model) or self._kept() or ""
        self._unseen = self._refused
        if self._refused:
            return
        captures: list[ActivationCapture] = []

        def attach(twin: Twin) -> None:
            self._twin = weakref.ref(twin.module)

            def is_wanted(name: str, module: nn.Module) -> bool:
                return self._is_wanted(name, twin.originals[id(module)])

            captures.append(ActivationCapture(twin.module, self._problems, self._measure, is_wanted))
            captures[-1].arm(in_forward=True, needs_gradients=False)
            ran: dict[str, None] = {}
            self.ran = ran
            for name, module in walk(twin.module):
                module.register_forward_pre_hook(lambda *_, name=name: ran.setdefault(name))
            self._how = ", without the hooks of others" if twin.has_dropped_hooks else ""

        try:
            samples = look(model, called.args, called.kwargs, attach)
        except Exception as error:
            self._refused = f"the model is compiled, and cannot be run uncompiled unnoticed: {describe(error)}"
            self._unseen = self._refused
        else:
            self._looked = captures[-1].collect()
            self._how = f"seen in an uncompiled forward of {samples}, without gradients{self._how}"
            self._unseen = "" if self._looked is not None else "the model is compiled, and none of its layers ran"

    def _kept(self) -> str | None:
        """Say so where something still holds the last twin, such as a cache of its class: it would hold every one."""
        if self._twin() is not None:
            gc.collect()
        return "the model is compiled, and its forward keeps the module that it ran on" if self._twin() else None

    def give_up(self) -> None:
        """What was seen belongs to no step."""
        self._capture.give_up()
        self._looked, self._unseen = None, ""

    def restart(self) -> None:
        """The steps begin anew: what was noted of earlier ones is noted again."""
        self.give_up()
        self._dtypes = {}

    def collect(self) -> Looked:
        """What was seen, or a note why nothing was; the hooks are gone."""
        seen, how, why = self._looked, self._how, self._unseen
        uncounted, is_uncompiled = self._capture.uncounted, seen is not None
        found = self._capture.collect()
        self._looked, self._unseen = None, ""
        if seen is None:
            seen, how = found, why and f"of what is not compiled; {why}"
        unseen = why or "none of its layers was seen to run in a training forward" + uncounted
        if seen is None:
            return Looked(unseen=unseen)
        began = time.perf_counter()
        rows = [self._role(part) for part in seen.parts]
        if seen.attention:
            rows += _attention_roles(dict(seen.attention))
        scalars = {} if seen.logits is None else dict(zip(LOGITS, seen.logits.unbind(), strict=True))
        notes = self._dtypes_noted(seen.dtypes) | ({ACTIVATIONS: how} if how else {})
        self._joining += time.perf_counter() - began
        if not rows:  # only the output of the whole
            return Looked(rows, scalars, unseen=unseen, is_uncompiled=is_uncompiled)
        return Looked(rows, scalars, notes, is_uncompiled=is_uncompiled)

    def _dtypes_noted(self, found: Mapping[str, str]) -> dict[str, str]:
        """All that are known, where one is new or another than before: a reader needs only the newest note."""
        known = {**self._dtypes, **found}
        if known == self._dtypes:
            return {}
        self._dtypes = known
        layers: dict[str, list[str]] = {}
        for layer, dtype in known.items():
            layers.setdefault(dtype, []).append(layer)
        return {ACTIVATION_DTYPES: json.dumps(layers, separators=(",", ":"))}

    def _role(self, part: ActivationRows) -> RoleRows:
        names = NamedSums((*SIGNALS, "dead_lasting"))
        if part.rows.values.device.type != "cpu":
            return RoleRows("activation", part.layers, part.rows, self._sums(part), names)
        # What is kept are copies: the thread that makes the record has the time to work out the rest.
        has_histograms = part.rows.histograms is not None
        size = sum(one.sample.nbytes for one in part.kept)
        late = LateRows(lambda: (part.rows, self._sums(part)), size, has_histograms)
        return RoleRows("activation", part.layers, late, None, names)

    def _sums(self, part: ActivationRows) -> Tensor:
        shares = self._window.add(dict(zip(part.layers, part.alive, strict=True)))
        unknown = torch.full((), torch.nan, device=part.signals.device)
        lasting = torch.stack([shares.get(layer, unknown) for layer in part.layers])
        return torch.cat([part.signals, lasting[:, None].to(part.signals.dtype)], dim=1)


def _attention_roles(found: dict[str, Tensor]) -> list[RoleRows]:
    """A role without rows of its own: nothing was counted."""
    by_device: dict[torch.device, list[str]] = {}
    for name, numbers in found.items():
        by_device.setdefault(numbers.device, []).append(name)
    roles = []
    for device, names in by_device.items():
        blank = torch.zeros(len(names), len(COLUMNS), dtype=widest(device), device=device)
        blank[:, MIN].fill_(torch.inf)
        blank[:, MAX].fill_(-torch.inf)
        sums = torch.stack([found[name] for name in names])
        roles.append(RoleRows("attention", tuple(names), DeviceRows(blank), sums, NamedSums(ATTENTION)))
    return roles
