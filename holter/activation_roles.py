"""Activations and attention as roles of a step: looked at in its forward, handed over before its update."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from holter.activations import PASSIVE, ActivationCapture, ActivationRows
from holter.attention import ATTENTION, LOGITS
from holter.draft import LateRows, NamedSums, RoleRows
from holter.problems import Problems
from holter.record import ACTIVATION_DTYPES
from holter.statistics.activation import SIGNALS, Window
from holter.statistics.device_rows import DeviceRows
from holter.statistics.measure import Measurer
from holter.statistics.rows import COLUMNS, MAX, MIN

_WINDOW = 3  # looks in a row at which a unit must be zero to be called dead for good


@dataclass(frozen=True, eq=False)
class Looked:
    """What one look found: rows, scalars of the model's output, and what is to be noted of the step."""

    rows: list[RoleRows] = field(default_factory=list)
    scalars: dict[str, Tensor] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


class ActivationRoles:
    """Looks at what the layers of one model put out, at the steps at which it is told to; `selected` says at which."""

    def __init__(self, model: nn.Module, problems: Problems, selected: Callable[[nn.Module], bool]) -> None:
        # A measurer of its own: the shapes of activations would push those of the gradients out of its plans.
        measurer = Measurer()
        self._histograms = False
        self._capture = ActivationCapture(
            model,
            problems,
            lambda tensors: measurer.measure(tensors, histograms=self._histograms),
            lambda _, module: not isinstance(module, PASSIVE) and selected(module),
        )
        self._window = Window(_WINDOW)
        self._dtypes: dict[str, str] = {}  # by layer, as they were noted
        self._joining = 0.0  # seconds, beside those of the capture

    @property
    def is_armed(self) -> bool:
        return self._capture.is_armed

    @property
    def observed(self) -> bool:
        """False where the model is compiled or scripted as a whole: its layers cannot be looked at."""
        return self._capture.observed

    @property
    def seconds(self) -> float:
        """That looking has taken of the training thread so far."""
        return self._capture.seconds + self._joining

    def arm(self, histograms: bool) -> None:
        """From the model's own forward pre-hook: this forward, and what else comes before the step."""
        self._histograms = histograms
        self._capture.arm(in_forward=True)

    def give_up(self) -> None:
        """What was seen belongs to no step."""
        self._capture.give_up()

    def restart(self) -> None:
        """The steps begin anew: what was noted of earlier ones is noted again."""
        self.give_up()
        self._dtypes = {}

    def collect(self) -> Looked:
        """What was seen; the hooks are gone."""
        seen = self._capture.collect()
        if seen is None:
            return Looked()
        began = time.perf_counter()
        rows = [self._role(part) for part in seen.parts]
        if seen.attention:
            rows += _attention_roles(dict(seen.attention))
        scalars = {} if seen.logits is None else dict(zip(LOGITS, seen.logits.unbind(), strict=True))
        notes = self._dtypes_noted(seen.dtypes)
        self._joining += time.perf_counter() - began
        return Looked(rows, scalars, notes)

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
        blank = torch.zeros(len(names), len(COLUMNS), dtype=torch.float64, device=device)
        blank[:, MIN].fill_(torch.inf)
        blank[:, MAX].fill_(-torch.inf)
        sums = torch.stack([found[name] for name in names])
        roles.append(RoleRows("attention", tuple(names), DeviceRows(blank), sums, NamedSums(ATTENTION)))
    return roles
