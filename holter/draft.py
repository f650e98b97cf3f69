"""A step while it is being collected on the training thread, and the Record it becomes off it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from holter.record import Floats, LayerRows, Record
from holter.statistics.device_rows import DeviceRows
from holter.statistics.histogram import Histograms
from holter.statistics.rows import Rows
from holter.transfer import Arrived, Parcel

AnyArray = npt.NDArray[Any]
Failed = Callable[[str, BaseException], None]  # told what could not be done, and why


class Completion(Protocol):
    """Makes of rows, and sums [n, k] beside them, what is recorded; it may use the rows of the gradients, as they were
    before a clip of Holter's left so much of them."""

    def __call__(
        self, layers: tuple[str, ...], rows: Rows, sums: Floats, gradients: LayerRows | None, clipped: float
    ) -> LayerRows: ...


@dataclass(frozen=True)
class NamedSums:
    """What stands beside rows, under these names."""

    names: tuple[str, ...]

    def __call__(
        self, layers: tuple[str, ...], rows: Rows, sums: Floats, gradients: LayerRows | None, clipped: float
    ) -> LayerRows:
        return LayerRows(layers, rows, dict(zip(self.names, sums.T, strict=True)))


@dataclass(frozen=True, eq=False)
class LateRows:
    """Rows, and the sums beside them, that are made off the training thread of copies that it took: on the host, where
    many small calls would make one step a long one."""

    measure: Callable[[], tuple[DeviceRows, Tensor]]
    size: int  # bytes that are held until then
    has_histograms: bool = False


@dataclass(frozen=True, eq=False)
class RoleRows:
    """Rows of one role on one device; with sums beside them, `complete` makes the record's rows of both. What was
    measured is `scale` times what is recorded: gradients of a fused optimizer under a loss scaler are."""

    role: str
    layers: tuple[str, ...]
    rows: DeviceRows | LateRows
    sums: Tensor | None = None
    complete: Completion | None = None
    scale: Tensor | None = None

    @property
    def has_histograms(self) -> bool:
        return self.rows.has_histograms if isinstance(self.rows, LateRows) else self.rows.histograms is not None

    def tensors(self) -> list[Tensor]:
        """What must come to the host."""
        if not isinstance(self.rows, DeviceRows):
            return []
        parts = (self.rows.values, self.rows.histograms, self.sums, self.scale)
        return [tensor for tensor in parts if tensor is not None]

    def on_host(self, arrived: Sequence[Arrived]) -> tuple[Rows, Floats | None]:
        """The rows and the sums beside them, of what has come of `tensors`."""
        if isinstance(self.rows, LateRows):
            late, beside = self.rows.measure()
            made = replace(self, rows=late, sums=beside)
            return made.on_host(Parcel(made.tensors()).arrays())
        found = map(_whole, arrived)
        values = np.asarray(next(found), dtype=np.float64)
        histograms = Histograms.from_dense(next(found)) if self.rows.histograms is not None else None
        sums = np.asarray(next(found), np.float64) if self.sums is not None else None
        scale = float(next(found).item()) if self.scale is not None else 1.0
        rows = Rows(values, histograms)
        return rows.scaled(1.0 / scale) if scale != 1.0 else rows, sums


OnHost = tuple[RoleRows, Rows, Floats | None]  # what was sent, its rows and the sums beside them


_NO_ROWS: list[RoleRows] = []


@dataclass(eq=False, slots=True)
class Draft:
    """What is known of a step so far. Values may be tensors still on their device; `seal` sends them off.

    A sealed one is made of few containers: thousands may wait for a slow disk, and the garbage collector goes through
    all of them now and then, in the midst of a training step.
    """

    step: int = 0
    time: float = 0.0
    segment: int = 0
    late: bool = False
    values: dict[str, list[float | Tensor]] = field(default_factory=dict)
    rows: list[RoleRows] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    gradients_are_partial: bool = False  # the optimizer uses others besides, which were not selected
    clip_is_unknown: bool = False  # they were read before a clip that may have left anything of them
    size: int = 0  # bytes that it holds while it is queued
    _parcel: Parcel | None = None
    _sealed: dict[str, float | Tensor | tuple[float | Tensor, ...]] = field(default_factory=dict)
    _later: Draft | None = None  # what was logged while this one waited to be written

    def add(self, name: str, value: float | Tensor) -> None:
        self.values.setdefault(name, []).append(value)

    def set(self, name: str, value: float | Tensor) -> None:
        self.values[name] = [value]

    def seal(self) -> Draft:
        """Sends everything on its way to the host; the draft is not added to any more."""
        tensors = self._tensors()
        self._parcel = Parcel(tensors)
        held = sum(rows.rows.size for rows in self.rows if not isinstance(rows.rows, DeviceRows))
        self.size = 256 + held + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        self._sealed = {name: many[0] if len(many) == 1 else tuple(many) for name, many in self.values.items()}
        self.values, self.rows = {}, self.rows or _NO_ROWS
        return self

    def _tensors(self) -> list[Tensor]:
        """In the order in which `record` takes them up."""
        values = [value for many in self.values.values() for value in many if isinstance(value, Tensor)]
        rows = [tensor for rows in self.rows for tensor in rows.tensors()]
        return [*values, *rows]

    def take_up(self, later: Draft) -> bool:
        """Whether what was logged after this step, sealed too, is recorded with it: values that are on the host are,
        once, and where they take the place of none. On their way from a device they would hold up the step's own."""
        is_of_this = later.late and not self.late and (later.step, later.segment) == (self.step, self.segment)
        is_plain = not later.rows and not later.notes and later.has_arrived()
        is_new = self._sealed.keys().isdisjoint(later._sealed)
        # Asked last: a signal's handler that logs may come before, and be taken up.
        if not (is_of_this and is_plain and is_new) or self._later is not None:
            return False
        self._later = later
        return True

    def has_arrived(self) -> bool:
        return self._parcel is not None and self._parcel.has_arrived()

    def record(self, extra: Mapping[str, float], failed: Failed) -> Record:
        """The record, once everything has arrived; `extra` are scalars that only the writer knows.

        What cannot be read, or measured now, costs itself and is told: the record is made without it.
        """
        assert self._parcel is not None
        host = iter(self._parcel.arrays())
        scalars = self._scalars(host, failed)
        found = list(self._on_host(host, failed))
        plain = [(sent.role, LayerRows(sent.layers, rows)) for sent, rows, _ in found if sent.complete is None]
        by_role = _joined(plain, failed)
        gradients = by_role.get("gradient")
        _add_gradient_scalars(scalars, gradients, "_selected" if self.gradients_are_partial else "")
        clipped = math.nan if self.clip_is_unknown else _clipped_to(scalars)
        by_role.update(_joined(_completed(found, gradients, clipped, failed), failed))
        if self._later is not None:
            assert self._later._parcel is not None
            scalars.update(self._later._scalars(iter(self._later._parcel.arrays()), failed))
        return Record(self.step, self.time, {**scalars, **extra}, by_role, dict(self.notes), self.segment, self.late)

    def _scalars(self, arrived: Iterator[Arrived], failed: Failed) -> dict[str, float]:
        scalars = {}
        for name, told in self._sealed.items():
            values = []
            for value in told if isinstance(told, tuple) else (told,):
                try:
                    values.append(float(_whole(next(arrived)).item()) if isinstance(value, Tensor) else value)
                except Exception as error:
                    failed(f"read {name}", error)
            if values:
                scalars[name] = _mean(values)
        return scalars

    def _on_host(self, arrived: Iterator[Arrived], failed: Failed) -> Iterator[OnHost]:
        for role_rows in self.rows:
            own = list(islice(arrived, len(role_rows.tensors())))
            try:
                rows, sums = role_rows.on_host(own)
            except Exception as error:
                failed(f"measure the {role_rows.role}", error)
            else:
                yield role_rows, rows, sums


def _whole(arrived: Arrived) -> AnyArray:
    if isinstance(arrived, Exception):
        raise arrived
    return arrived


def _completed(
    found: Iterable[OnHost], gradients: LayerRows | None, clipped: float, failed: Failed
) -> Iterator[tuple[str, LayerRows]]:
    for sent, rows, sums in found:
        if sent.complete is not None and sums is not None:
            try:
                made = sent.complete(sent.layers, rows, sums, gradients, clipped)
            except Exception as error:
                failed(f"work out the {sent.role}", error)
            else:
                yield sent.role, made


def _joined(parts: Iterable[tuple[str, LayerRows]], failed: Failed) -> dict[str, LayerRows]:
    """Rows of each role, those of several devices side by side."""
    by_role: dict[str, list[LayerRows]] = {}
    for role, rows in parts:
        by_role.setdefault(role, []).append(rows)
    joined = {}
    for role, several in by_role.items():
        try:
            joined[role] = _join(several)
        except Exception as error:
            failed(f"join the {role}", error)
    return joined


def _mean(values: list[float]) -> float:
    """A value logged several times in a step (micro-batches) is its mean."""
    try:
        return values[0] if len(values) == 1 else math.fsum(values) / len(values)
    except (OverflowError, ValueError):  # a sum above the largest number; infinities of both signs
        return sum(value / len(values) for value in values)


def _join(parts: list[LayerRows]) -> LayerRows:
    if len(parts) == 1:
        return parts[0]
    layers = tuple(name for part in parts for name in part.layers)
    histograms = [part.rows.histograms for part in parts]
    joined = None
    if all(found is not None for found in histograms):
        joined = Histograms.from_dense(np.concatenate([found.dense() for found in histograms if found is not None]))
    extras = {name: np.concatenate([part.extras[name] for part in parts]) for name in parts[0].extras}
    return LayerRows(layers, Rows(np.concatenate([part.rows.values for part in parts]), joined), extras)


def _clipped_to(scalars: Mapping[str, float]) -> float:
    """What a clip left of the gradients: torch's max_norm / (norm + 1e-6), never above 1. NaN if its norm could not
    be read."""
    if "clip_max_norm" not in scalars:
        return 1.0
    return min(1.0, scalars["clip_max_norm"] / (scalars["clip_norm"] + 1e-6)) if "clip_norm" in scalars else math.nan


def _add_gradient_scalars(scalars: dict[str, float], gradients: LayerRows | None, of: str) -> None:
    """The global norm of the gradients that the optimizer uses, before clipping, and after it where Holter clipped.

    `of` is added to the names where the rows are only of some of these gradients: then the norm of all of them is
    known only where a clip took it. The clip's own norm is of all gradients of the model, and of the kind that was
    asked for: it is kept beside it.
    """
    if gradients is not None:
        total = gradients.rows.total()
        scalars[f"gradient_norm{of}"] = float(total.derive("full_norm")[0])
        scalars[f"gradient_nonfinite{of}"] = float(total.derive("nonfinite")[0])
    if "clip_norm" in scalars and "gradient_norm" in scalars:
        scalars["gradient_norm_clipped"] = scalars["gradient_norm"] * _clipped_to(scalars)
