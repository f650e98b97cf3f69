"""A step while it is being collected on the training thread, and the Record it becomes off it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from holter.record import LayerRows, Record
from holter.statistics.device_rows import DeviceRows
from holter.statistics.histogram import Histograms
from holter.statistics.rows import Rows
from holter.transfer import DeviceTimer, Parcel


@dataclass(frozen=True, eq=False)
class RoleRows:
    """Rows of one role on one device."""

    role: str
    layers: tuple[str, ...]
    rows: DeviceRows


@dataclass(eq=False)
class Draft:
    """What is known of a step so far. Values may be tensors still on their device; `seal` sends them off."""

    step: int = 0
    time: float = 0.0
    segment: int = 0
    late: bool = False
    values: dict[str, list[float | Tensor]] = field(default_factory=dict)
    rows: list[RoleRows] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    # Gradients of a fused optimizer under a loss scaler are still multiplied by this when they are read.
    gradient_scale: Tensor | None = None
    timers: list[DeviceTimer] = field(default_factory=list)  # of the measurements that it holds
    _parcel: Parcel | None = None

    def add(self, name: str, value: float | Tensor) -> None:
        self.values.setdefault(name, []).append(value)

    def set(self, name: str, value: float | Tensor) -> None:
        self.values[name] = [value]

    def seal(self) -> Draft:
        """Sends everything on its way to the host; the draft is not added to any more."""
        self._parcel = Parcel(self._tensors())
        return self

    @property
    def size(self) -> int:
        """Bytes that it holds while it is queued."""
        return 256 + sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        values = [value for many in self.values.values() for value in many if isinstance(value, Tensor)]
        rows = [rows.rows.values for rows in self.rows]
        histograms = [rows.rows.histograms for rows in self.rows if rows.rows.histograms is not None]
        scale = [self.gradient_scale] if self.gradient_scale is not None else []
        return [*values, *rows, *histograms, *scale]

    def has_arrived(self) -> bool:
        return self._parcel is not None and self._parcel.has_arrived()

    def device_seconds(self) -> float:
        """What its measurements took on their device, once everything has arrived."""
        return sum(timer.seconds() or 0.0 for timer in self.timers)

    def record(self, extra: Mapping[str, float]) -> Record:
        """The record, once everything has arrived; `extra` are scalars that only the writer knows."""
        assert self._parcel is not None
        host = iter(self._parcel.arrays())
        scalars = {
            name: _mean([float(next(host)) if isinstance(value, Tensor) else value for value in many])
            for name, many in self.values.items()
        }
        values = [np.asarray(next(host), dtype=np.float64) for _ in self.rows]
        histograms = [Histograms.from_dense(next(host)) if r.rows.histograms is not None else None for r in self.rows]
        factor = 1.0 / float(next(host)) if self.gradient_scale is not None else 1.0
        parts: dict[str, list[tuple[tuple[str, ...], Rows]]] = {}
        for role_rows, numbers, counts in zip(self.rows, values, histograms, strict=True):
            rows = Rows(numbers, counts)
            if role_rows.role == "gradient" and factor != 1.0:
                rows = rows.scaled(factor)
            parts.setdefault(role_rows.role, []).append((role_rows.layers, rows))
        by_role = {role: _join(found) for role, found in parts.items()}
        _add_gradient_scalars(scalars, by_role.get("gradient"))
        return Record(self.step, self.time, {**scalars, **extra}, by_role, dict(self.notes), self.segment, self.late)


def _mean(values: list[float]) -> float:
    """A value logged several times in a step (micro-batches) is its mean."""
    return values[0] if len(values) == 1 else math.fsum(values) / len(values) if _finite(values) else sum(values)


def _finite(values: list[float]) -> bool:
    return all(map(math.isfinite, values))


def _join(parts: list[tuple[tuple[str, ...], Rows]]) -> LayerRows:
    """Rows of a role from several devices, side by side."""
    if len(parts) == 1:
        return LayerRows(*parts[0])
    layers = tuple(name for names, _ in parts for name in names)
    histograms = [rows.histograms for _, rows in parts]
    joined = None
    if all(found is not None for found in histograms):
        joined = Histograms.from_dense(np.concatenate([found.dense() for found in histograms if found is not None]))
    return LayerRows(layers, Rows(np.concatenate([rows.values for _, rows in parts]), joined))


def _add_gradient_scalars(scalars: dict[str, float], gradients: LayerRows | None) -> None:
    """The global norm before clipping, and after it where Holter clipped."""
    clip_norm = scalars.pop("clip_norm", None)  # torch's own total norm, as the clip returned it
    if gradients is not None:
        total = gradients.rows.total()
        scalars["gradient_norm"] = float(total.derive("full_norm")[0])
        scalars["gradient_nonfinite"] = float(total.derive("nonfinite")[0])
    elif clip_norm is not None:
        scalars["gradient_norm"] = clip_norm
    if clip_norm is not None and "clip_max_norm" in scalars:
        # torch's coefficient: max_norm / (norm + 1e-6), never above 1
        coefficient = min(1.0, scalars["clip_max_norm"] / (clip_norm + 1e-6))
        scalars["gradient_norm_clipped"] = scalars["gradient_norm"] * coefficient
