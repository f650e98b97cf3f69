"""What one activation tensor says beyond its row: dead units, saturation, nearness to overflow, effective rank.

Pure arithmetic on detached tensors. Nothing here waits for the device, draws a random number or branches on a value:
results are small tensors that stay where the activation is.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# In the order of `Signals.values`:
# dead           share of units that are exactly zero on the whole batch
# saturated      share of values close to the bounds of a bounded activation; NaN where there are no bounds
# near_overflow  share of |y| >= half of the largest finite value of the dtype (fp16: 32752)
# rank           participation ratio of the units' covariance: 1 when one direction carries all, 0 when nothing varies
# spread         share of the squares that varies between rows: 0 when all tokens (or examples) have become the same
SIGNALS = ("dead", "saturated", "near_overflow", "rank", "spread")

SAMPLE_ROWS = SAMPLE_UNITS = 256  # what the rank is computed from
MARGIN = 0.02  # of half the range: |tanh| >= 0.98, sigmoid <= 0.01 or >= 0.99
_PIECE = 1 << 24  # elements that are compared at a time: the comparison takes memory


@dataclass(frozen=True, eq=False)
class Signals:
    """Of one activation: values, float32 [len(SIGNALS)]; alive, bool [units], False where the whole batch is zero."""

    values: Tensor
    alive: Tensor


@dataclass(frozen=True)
class Bounds:
    """Where an activation saturates. `low` may be None: what a ReLU6 sets to zero is sparse, not saturated."""

    low: float | None
    high: float

    def thresholds(self) -> tuple[float, float]:
        """Values at or beyond these are saturated."""
        margin = MARGIN * self.high if self.low is None else MARGIN * (self.high - self.low) / 2
        return -math.inf if self.low is None else self.low + margin, self.high - margin


def measure_signals(y: Tensor, unit_dim: int, bounds: Bounds | None = None) -> Signals:
    """The signals of a plain, strided floating-point tensor that is not empty; `unit_dim` tells units apart."""
    y = y.detach()
    if y.ndim < 2:
        y, unit_dim = y.reshape(1, -1), 1
    if y.dtype.itemsize == 1:  # float8 has no arithmetic of its own
        half, y = torch.finfo(y.dtype).max / 2, y.to(torch.float32)
    else:
        half = torch.finfo(y.dtype).max / 2
    alive = alive_units(y, unit_dim)
    saturated = torch.full((), math.nan, device=y.device)
    if bounds is not None:
        low, high = bounds.thresholds()
        saturated = _share(y, lambda part: (part >= high) | (part <= low))
    rank, spread = effective_rank(sample(y, unit_dim, SAMPLE_ROWS, SAMPLE_UNITS))
    values = (1 - _mean(alive), saturated, _share(y, lambda part: part.abs() >= half), rank, spread)
    return Signals(torch.stack([value.to(torch.float32) for value in values]), alive)


def alive_units(y: Tensor, unit_dim: int) -> Tensor:
    """Whether a unit is anything but zero anywhere, bool [units]. A NaN is not zero."""
    others = [dim for dim in range(y.ndim) if dim != unit_dim % y.ndim]
    # Extremes are quick and take no memory, where (y != 0).any() writes a mask as large as y.
    return (y.amax(others) != 0) | (y.amin(others) != 0)


def _mean(mask: Tensor) -> Tensor:
    return mask.mean(dtype=torch.float32)


def _share(y: Tensor, test: Callable[[Tensor], Tensor]) -> Tensor:
    """The share of elements that pass, in pieces along the first dimension so that a large tensor needs little more."""
    rows = max(1, _PIECE * y.shape[0] // y.numel())
    counts = [torch.count_nonzero(test(part)) for part in y.split(rows)]
    return torch.stack(counts).sum().to(torch.float32) / y.numel()


def sample(y: Tensor, unit_dim: int, rows: int, units: int | None = None) -> Tensor:
    """A fixed strided sample as a matrix [<= rows, <= units]; every dimension but `unit_dim` adds to the rows.

    Slices only, so that just the sample is copied. The rows are shared out evenly between the dimensions: 256 rows of
    [batch, tokens] are 16 x 16 and not 256 sequences at their first token.
    """
    y = y.movedim(unit_dim, -1)
    takes = [1] * (y.ndim - 1)
    left = rows
    by_size = sorted(range(y.ndim - 1), key=lambda dim: y.shape[dim])
    for place, dim in enumerate(by_size):
        takes[dim] = min(y.shape[dim], max(1, int(left ** (1 / (len(by_size) - place)) + 1e-9)))
        left //= takes[dim]
    for dim, take in enumerate([*takes, *([] if units is None else [units])]):
        y = y[(slice(None),) * dim + (strided(y.shape[dim], take),)]
    return y.reshape(-1, y.shape[-1])


def strided(size: int, take: int) -> slice:
    """At most `take` places out of `size`, evenly spaced about the middle: a first token is often unlike the others."""
    take = min(size, take)
    stride = size // take
    first = (size - 1 - (take - 1) * stride) // 2
    return slice(first, first + (take - 1) * stride + 1, stride)


def effective_rank(x: Tensor) -> tuple[Tensor, Tensor]:
    """(participation ratio, share of variance) of a matrix [rows, units].

    The participation ratio of the covariance C, tr(C)² / tr(C²) = (Σλ)² / Σλ², is the number of directions that carry
    the variance: between 1 and min(rows - 1, units). It needs no decomposition, for which CUDA would make us wait, and
    like the entropy of the singular values it is n for n equal directions.
    """
    x = x.to(torch.float32 if x.device.type == "mps" else torch.float64)  # squares of squares: float32 would overflow
    centred = x - x.mean(0)
    gram = centred @ centred.T if x.shape[0] <= x.shape[1] else centred.T @ centred  # same eigenvalues, but for zeros
    variance, energy = centred.square().sum(), x.square().sum()
    # Not torch.where with a number: that sends the number to the device and waits.
    rank = (variance.square() / gram.square().sum()).masked_fill(variance == 0, 0.0)
    return rank, (variance / energy).masked_fill(energy == 0, 0.0)


class Window:
    """Units that were dead in each of the last `length` armed steps: one batch may leave a healthy unit at zero."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"a window needs a length of at least 1, got {length}")
        self._length = length
        self._alive: dict[str, deque[Tensor]] = {}

    def add(self, alive: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Takes an armed step's masks; gives the dead share, float32 [], of each layer that has filled its window."""
        shares = {}
        for layer, mask in alive.items():
            masks = self._alive.setdefault(layer, deque(maxlen=self._length))
            if masks and (masks[-1].shape, masks[-1].device) != (mask.shape, mask.device):
                masks.clear()  # the layer was changed or moved: its units are others now
            masks.append(mask)
            if len(masks) == self._length:
                shares[layer] = 1 - _mean(torch.stack(list(masks)).any(0))
        return shares
