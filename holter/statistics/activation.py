"""What one activation tensor says beyond its row: dead units, saturation, nearness to overflow, effective rank.

Pure arithmetic on detached tensors: `measure_signals` takes what is small from an activation while it is there, and
`derive_signals` makes the signals of all layers together, in few calls for however many. Nothing here waits for a
device or draws a random number; only on the CPU is a value read. Results stay where the activations are.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from holter.statistics.device_rows import widest

# In the order of the columns of `Signals.values`:
# dead           share of units that are exactly zero on the whole batch
# saturated      share of values close to the bounds of a bounded activation; NaN where there are no bounds
# near_overflow  share of |y| >= half of the largest finite value of the dtype (fp16: 32752). Of all values on the CPU
#                and in float16 and float8; elsewhere, where that half is about 2e38, of the sample below
# rank           participation ratio of the units' covariance: 1 when one direction carries all, 0 when nothing varies
# spread         share of the squares that varies between rows: 0 when all tokens (or examples) have become the same
SIGNALS = ("dead", "saturated", "near_overflow", "rank", "spread")

SAMPLE_ROWS = SAMPLE_UNITS = 256  # what the rank is computed from
MARGIN = 0.02  # of half the range: |tanh| >= 0.98, sigmoid <= 0.01 or >= 0.99
MOST = 1 << 22  # values of an activation that are looked at
_PIECE = 1 << 24  # elements that are compared at a time: the comparison takes memory
_TOGETHER = 32 * SAMPLE_ROWS * SAMPLE_UNITS  # elements of a stack on a device: in float64 they take 16 MiB
_TOGETHER_ON_CPU = SAMPLE_ROWS * SAMPLE_UNITS  # calls are cheap there, and what leaves the cache takes twice as long
_NARROW = 1e6  # a format that ends below it overflows in trainings that are otherwise healthy


@dataclass(frozen=True, eq=False)
class Kept:
    """What is kept of one activation until the signals are derived: small, and nothing of its memory."""

    reach: Tensor  # max |y| of each unit, [units]; NaN where a unit holds one
    sample: Tensor  # [<= SAMPLE_ROWS, <= SAMPLE_UNITS]
    saturated: Tensor | None  # float32 []; None where there are no bounds
    near_overflow: Tensor | None  # float32 [], of all values; None where the sample tells


@dataclass(frozen=True, eq=False)
class Signals:
    """Of the activations of one device: values, float32 [n, len(SIGNALS)]; alive, bool [units] each, False where the
    whole batch is zero."""

    values: Tensor
    alive: tuple[Tensor, ...]


@dataclass(frozen=True)
class Bounds:
    """Where an activation saturates. `low` may be None: what a ReLU6 sets to zero is sparse, not saturated."""

    low: float | None
    high: float

    def thresholds(self) -> tuple[float, float]:
        """Values at or beyond these are saturated."""
        margin = MARGIN * self.high if self.low is None else MARGIN * (self.high - self.low) / 2
        return -math.inf if self.low is None else self.low + margin, self.high - margin


# In the hook ----------------------------------------------------------------------------------------------------


def portion(y: Tensor, unit_dim: int) -> Tensor:
    """A copy of an activation of up to MOST values; of a larger one, of every so many examples, tokens or lines of an
    image, whichever are most. All units are in it, and the first token, which is often unlike the others.

    A look at a large model is as dear as what it reads; and what millions of values do not show is not to be found
    once in a hundred steps either.
    """
    stride = -(-y.numel() // MOST)
    others = [dim for dim in range(y.ndim) if dim != unit_dim % y.ndim]
    if stride > 1 and others:
        most = max(others, key=lambda dim: y.shape[dim])
        y = y[(slice(None),) * most + (slice(None, None, stride),)]
    return y.clone()


def measure_signals(y: Tensor, unit_dim: int, bounds: Bounds | None = None) -> Kept:
    """Of a plain, detached, strided floating-point tensor that is not empty; `unit_dim` tells units apart."""
    if y.ndim < 2:
        y, unit_dim = y.reshape(1, -1), 1
    half = torch.finfo(y.dtype).max / 2
    if y.dtype.itemsize == 1:  # float8 has no arithmetic of its own
        y = y.to(torch.float32)
    reach = unit_reach(y, unit_dim)
    saturated = near_overflow = None
    if bounds is not None:
        low, high = bounds.thresholds()
        saturated = _share(y, lambda part: (part >= high) | (part <= low))
    if _may_overflow(reach, half):
        near_overflow = _share(y, lambda part: part.abs() >= half)
    # A copy even where all of it is taken: a view would keep all of the activation.
    taken = _sampled(y, unit_dim, SAMPLE_ROWS, SAMPLE_UNITS).clone(memory_format=torch.contiguous_format)
    return Kept(reach, taken.flatten(0, -2), saturated, near_overflow)


def unit_reach(y: Tensor, unit_dim: int) -> Tensor:
    """The largest |y| of each unit, [units]; NaN where a unit holds one."""
    others = [dim for dim in range(y.ndim) if dim != unit_dim % y.ndim]
    if y.is_cuda:  # one pass and one call; on the CPU it takes up to fifteen times as long as the two below
        largest: Tensor = torch.linalg.vector_norm(y, math.inf, others)
        return largest
    # Extremes take no memory, where y.abs() is as large as y.
    return torch.maximum(y.amax(others), -y.amin(others))


def _may_overflow(reach: Tensor, half: float) -> bool:
    """Whether all values must be compared with `half`: below it no sample holds one either."""
    if _can_be_read(reach):
        return not float(reach.amax()) < half  # a NaN hides what is beside it
    return half < _NARROW


def _can_be_read(tensor: Tensor) -> bool:
    """Whether a value can be had without waiting for a device."""
    return tensor.device.type == "cpu"


def _share(y: Tensor, test: Callable[[Tensor], Tensor]) -> Tensor:
    """The share of elements that pass, in pieces along the first dimension so that a large tensor needs little more."""
    rows = max(1, _PIECE * y.shape[0] // y.numel())
    counts = [torch.count_nonzero(test(part)) for part in (y.split(rows) if rows < y.shape[0] else [y])]
    count = counts[0] if len(counts) == 1 else torch.stack(counts).sum()
    return count.to(torch.float32) / y.numel()


def sample(y: Tensor, unit_dim: int, rows: int, units: int | None = None) -> Tensor:
    """A fixed strided sample as a matrix [<= rows, <= units]; every dimension but `unit_dim` adds to the rows.

    Slices only, so that just the sample is copied. The rows are shared out evenly between the dimensions: 256 rows of
    [batch, tokens] are 16 x 16 and not 256 sequences at their first token.
    """
    y = _sampled(y, unit_dim, rows, units)
    return y.reshape(-1, y.shape[-1])


def _sampled(y: Tensor, unit_dim: int, rows: int, units: int | None) -> Tensor:
    """The sample as a view with as many dimensions as y has, the units last."""
    if unit_dim % y.ndim != y.ndim - 1:
        y = y.movedim(unit_dim, -1)
    return y[_places(y.shape, rows, units)]


@lru_cache(maxsize=256)  # a model asks for the same few shapes at every look
def _places(shape: torch.Size, rows: int, units: int | None) -> tuple[slice, ...]:
    *others, last = shape
    takes = [1] * len(others)
    by_size = sorted(range(len(others)), key=lambda dim: others[dim])
    for place, dim in enumerate(by_size):
        takes[dim] = min(others[dim], max(1, int(rows ** (1 / (len(by_size) - place)) + 1e-9)))
        rows //= takes[dim]
    takes.append(last if units is None else units)
    return tuple(strided(size, take) for size, take in zip(shape, takes, strict=True))


def strided(size: int, take: int) -> slice:
    """At most `take` places out of `size`, evenly spaced about the middle: a first token is often unlike the others."""
    take = min(size, take)
    stride = size // take
    first = (size - 1 - (take - 1) * stride) // 2
    return slice(first, first + (take - 1) * stride + 1, stride)


# Of all layers --------------------------------------------------------------------------------------------------


def derive_signals(kept: Sequence[Kept]) -> Signals:
    """The signals of activations of one device, in their order."""
    alive = _by_stacks([one.reach for one in kept], lambda reach: reach != 0)  # a NaN is not zero
    dead = torch.stack(_by_stacks(alive, _dead_share))
    sampled = torch.stack(_by_stacks([one.sample for one in kept], _sample_signals))
    near_overflow, rank, spread = sampled.unbind(-1)
    columns = (
        dead,
        _replaced(torch.full_like(dead, math.nan), [one.saturated for one in kept]),
        _replaced(near_overflow, [one.near_overflow for one in kept]),
        *(rank, spread),
    )
    return Signals(torch.stack(columns, dim=-1), tuple(alive))


def _dead_share(alive: Tensor) -> Tensor:
    """Of masks [n, units], float32 [n]."""
    return 1 - alive.mean(-1, dtype=torch.float32)


def _by_stacks(tensors: Sequence[Tensor], work: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """What `work` makes of each tensor, in their order; it is given stacks [n, ...] of those of one shape and dtype."""
    groups: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.shape, tensor.dtype), []).append(place)
    made: dict[int, Tensor] = {}
    for (shape, _), places in groups.items():
        together = _TOGETHER_ON_CPU if tensors[places[0]].device.type == "cpu" else _TOGETHER
        most = max(1, together // shape.numel())
        for first in range(0, len(places), most):
            part = places[first : first + most]
            made.update(zip(part, work(torch.stack([tensors[place] for place in part])).unbind(), strict=True))
    return [made[place] for place in range(len(tensors))]


def _replaced(column: Tensor, known: Sequence[Tensor | None]) -> Tensor:
    """The column [n] with those values put in that are known."""
    if all(one is None for one in known):
        return column
    pairs = zip(column.unbind(), known, strict=True)
    return torch.stack([value if one is None else one for value, one in pairs])


def _sample_signals(samples: Tensor) -> Tensor:
    """near_overflow, rank and spread of samples [n, rows, units], float32 [n, 3]."""
    high = samples.abs() >= torch.finfo(samples.dtype).max / 2
    rank, spread = effective_rank(samples)
    columns = (high.mean((-2, -1), dtype=torch.float32), rank.to(torch.float32), spread.to(torch.float32))
    return torch.stack(columns, dim=-1)


def effective_rank(x: Tensor) -> tuple[Tensor, Tensor]:
    """(participation ratio, share of variance) of matrices [..., rows, units].

    The participation ratio of the covariance C, tr(C)² / tr(C²) = (Σλ)² / Σλ², is the number of directions that carry
    the variance: between 1 and min(rows - 1, units). It needs no decomposition, for which CUDA would make us wait, and
    like the entropy of the singular values it is n for n equal directions.
    """
    x = x.to(widest(x.device))  # squares of squares: float32 would overflow
    mean = x.mean(-2, keepdim=True)
    centred = x - mean
    turned = centred.mT
    # The same eigenvalues either way, but for zeros.
    gram = centred @ turned if x.shape[-2] <= x.shape[-1] else turned @ centred
    variance = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    energy = variance + x.shape[-2] * mean.square().sum((-2, -1))
    # Not torch.where with a number: that sends the number to the device and waits.
    rank = (variance / torch.linalg.matrix_norm(gram)).square().masked_fill(variance == 0, 0.0)
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
        full: dict[tuple[torch.Size, torch.device], list[str]] = {}
        for layer, mask in alive.items():
            masks = self._alive.setdefault(layer, deque(maxlen=self._length))
            if masks and (masks[-1].shape, masks[-1].device) != (mask.shape, mask.device):
                masks.clear()  # the layer was changed or moved: its units are others now
            masks.append(mask)
            if len(masks) == self._length:
                full.setdefault((mask.shape, mask.device), []).append(layer)
        shares: dict[str, Tensor] = {}
        for layers in full.values():  # all those of one size at once, [layers, length, units]
            stack = torch.stack([mask for layer in layers for mask in self._alive[layer]])
            ever = stack.unflatten(0, (-1, self._length)).any(1)
            shares.update(zip(layers, _dead_share(ever).unbind(), strict=True))
        return shares
