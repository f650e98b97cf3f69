"""From the JSON of a run's page to the arrays that its pictures draw; None where it is not what it should be."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from holter.report.picture import RANGE, readable

Floats = npt.NDArray[np.float64]

_NORM = re.compile(r"norm|(^|[._])(ln|bn)", re.IGNORECASE)
_FAR = 1e15  # steps; beyond, two of them are the same number


class Series(NamedTuple):
    steps: Floats
    values: Floats
    low: Floats
    high: Floats


class Map(NamedTuple):
    """values [layers, steps]; NaN where a layer was not measured, infinite where something in it was not finite."""

    title: str
    layers: list[str]
    steps: Floats
    values: Floats
    log: bool


def entries(view: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = view.get(name)
    return [one for one in found if isinstance(one, Mapping)] if isinstance(found, list) else []


def floats(found: object) -> Floats | None:
    if not isinstance(found, list):
        return None
    try:
        read = np.array([np.nan if value is None else float(value) for value in found], dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return np.where(np.isfinite(read), np.clip(read, -RANGE[1], RANGE[1]), np.nan)


def strings(found: object) -> list[str]:
    return [str(one) for one in found] if isinstance(found, list) else []


def _growing(steps: Floats) -> bool:
    return bool(len(steps)) and bool((np.abs(steps) < _FAR).all()) and bool((np.diff(steps) > 0).all())


def read_series(found: object) -> Series | None:
    if not isinstance(found, Mapping):
        return None
    steps, values = floats(found.get("steps")), floats(found.get("values"))
    if steps is None or values is None or len(steps) != len(values) or not _growing(steps):
        return None
    ends = [floats(found.get(end)) for end in ("low", "high")]
    low, high = (end if end is not None and len(end) == len(values) else values for end in ends)
    return Series(steps, values, low, high)


def read_map(found: Mapping[str, Any]) -> Map | None:
    layers, steps = strings(found.get("layers")), floats(found.get("steps"))
    if steps is None or not layers or not _growing(steps):
        return None
    values = _matrix(found.get("values"), (len(layers), len(steps)))
    if values is None or np.isnan(values).all():
        return None
    return Map(title_of(found), layers, steps, values, bool(found.get("log")))


def comparable(layers: Sequence[str]) -> list[int]:
    """The places of weights without norms and biases, whose gradients have sizes of their own: as the page tells them.
    Of all layers, where there are no two such."""
    found = [place for place, name in enumerate(layers) if name.endswith(".weight") and not _NORM.search(name)]
    return found if len(found) > 1 else list(range(len(layers)))


def title_of(found: Mapping[str, Any]) -> str:
    title = readable(found.get("title") or found.get("id", ""), 60)
    return title[:1].upper() + title[1:]


def _matrix(found: object, shape: tuple[int, int]) -> Floats | None:
    """A typed array as plotly writes it."""
    if not isinstance(found, Mapping) or found.get("dtype") not in ("f4", "f8"):
        return None
    try:
        data = base64.b64decode(found.get("bdata", ""), validate=True)
        return np.frombuffer(data, f"<{found['dtype']}").astype(np.float64).reshape(shape)
    except (TypeError, ValueError, binascii.Error):
        return None
