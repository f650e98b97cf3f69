"""The waist of Holter: what one step of a training looks like once it is measured. Frozen, versioned, numpy only.

Everything left of here (capture, statistics, transfer) makes Records; everything right of here (journal, history,
diagnosis, sinks, report) reads them and never needs torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from holter.statistics.rows import Rows

Floats = npt.NDArray[np.float64]

FORMAT = 2  # of the journal's entries; raised when an older reader would misread a newer one
MOST_STEPS = 1 << 53  # a step a nanosecond for a hundred days; float64 counts no farther without gaps
EXECUTION_ORDER = "execution_order"  # a note: modules and parameters as they first ran, a list in JSON
ACTIVATIONS = "activations"  # a note: how they were seen outside the training's own forward, or why they were not
ACTIVATION_DTYPES = "activation_dtypes"  # a note: dtype -> the layers whose output has it, in JSON; at each change
OPTIMIZER_SETTINGS = "optimizer_settings"  # a note: of which optimizers they are recorded, where not of all

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_VALIDATION = re.compile(r"(^|/)(val|valid|validation|eval|evaluation|test)([_./ -]|$)", re.IGNORECASE)


@lru_cache(maxsize=4096)  # asked at every step, of the same few names
def is_validation(scalar: str) -> bool:
    """Whether this is the name of a value from data that is not trained on.

    >>> [is_validation(name) for name in ("val_loss", "eval/accuracy", "Loss/test", "loss", "value", "latest/loss")]
    [True, True, True, False, False, False]
    """
    return _VALIDATION.search(scalar) is not None


@dataclass(frozen=True, eq=False)
class LayerRows:
    """Rows of one role: row i belongs to layers[i], torch's own name of it.

    `extras` are further numbers of each layer, float64 [n], that no row can hold: an open set of names.
    """

    layers: tuple[str, ...]
    rows: Rows
    extras: Mapping[str, Floats] = field(default_factory=lambda: _NOTHING)

    def __post_init__(self) -> None:
        if len(self.layers) != len(self.rows):
            raise ValueError(f"{len(self.layers)} layers but {len(self.rows)} rows")
        for name, values in self.extras.items():
            if values.shape != (len(self.layers),):
                raise ValueError(f"{len(self.layers)} layers but {name} of shape {values.shape}")


@dataclass(frozen=True, eq=False)
class Record:
    """All that is known of one training step.

    `rows` is keyed by role ("gradient", "weight", ...), an open set. `notes` are words about the step, such as
    where its gradients were read. A `late` record holds values that were logged for a step after its own record
    had been written; a step has one record that is not late. A `segment` is an unbroken stretch of training: a
    resume from a checkpoint begins a new one, and may repeat steps.
    """

    step: int
    time: float  # seconds since 1970
    scalars: Mapping[str, float] = field(default_factory=lambda: _NOTHING)
    rows: Mapping[str, LayerRows] = field(default_factory=lambda: _NOTHING)
    notes: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    segment: int = 0
    late: bool = False


@dataclass(frozen=True)
class Problem:
    """Something of Holter's own that failed and was contained: training went on."""

    step: int
    time: float
    where: str
    what: str


@dataclass(frozen=True)
class Ending:
    """How a segment ended: finished, failed, stopped, interrupted or ended, and what never reached the file."""

    time: float
    state: str
    # The exception's class; its message may hold what must not be kept. Of a stopped one, the finding.
    error: str = ""
    dropped: int = 0


Entry = Record | Problem | Ending


def size_of(record: Record) -> int:
    """Bytes of a record's arrays, for bounding queues."""
    total = 64 * (len(record.scalars) + len(record.notes) + 1)
    for layer_rows in record.rows.values():
        histograms = layer_rows.rows.histograms
        total += layer_rows.rows.values.nbytes + sum(extra.nbytes for extra in layer_rows.extras.values())
        total += histograms.buckets.nbytes + histograms.counts.nbytes if histograms is not None else 0
    return total
