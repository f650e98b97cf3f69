"""What an optimizer really did to the weights, of any optimizer, seen in a sample before and after its step.

No copy of the model is kept. The sample stands for the whole tensor: its rows are scaled up to the tensor's size, and
where the gradient is known both in the sample and as a whole, that corrects for what the sample happened to miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holter.record import Floats, LayerRows
from holter.samples import Sampler
from holter.statistics.device_rows import DeviceRows
from holter.statistics.measure import Measurer
from holter.statistics.rows import COLUMNS, MAX, MIN, Rows

_SCALED = [place for place in range(len(COLUMNS)) if place not in (MIN, MAX)]  # counts and sums; extremes stay
_SQUARES, _FOURTHS = COLUMNS.index("sum_squares"), COLUMNS.index("sum_fourths")


@dataclass(frozen=True, eq=False)
class Before:
    """Samples taken just before a step: of the weights, and of the gradients where all of them have one."""

    names: tuple[str, ...]
    sampler: Sampler
    parameters: list[Tensor]
    weights: Tensor
    gradients: Tensor | None
    earlier_gradients: Tensor | None  # of the step before


class Updates:
    """Takes the samples of one list of parameters around a step, and of the gradients one step earlier."""

    def __init__(self) -> None:
        self._sampler: Sampler | None = None
        self._earlier: tuple[int, tuple[str, ...], Tensor] | None = None

    def remember_gradients(self, step: int, names: Sequence[str], gradients: Sequence[Tensor]) -> None:
        """For the cosine with those of the next step."""
        sampler = self._sampler_for(gradients)
        self._earlier = step, tuple(names), sampler.take(gradients)

    def before(self, step: int, names: Sequence[str], parameters: Sequence[Tensor]) -> Before:
        sampler = self._sampler_for(parameters)
        found = [parameter.grad for parameter in parameters]
        gradients = [gradient for gradient in found if gradient is not None and not gradient.is_sparse]
        taken = sampler.take(gradients) if len(gradients) == len(found) else None
        earlier = self._earlier
        is_last = earlier is not None and earlier[:2] == (step - 1, tuple(names))
        self._earlier = (step, tuple(names), taken) if taken is not None else None
        return Before(
            tuple(names),
            sampler,
            list(parameters),
            sampler.take(parameters),
            taken,
            earlier[2] if earlier is not None and is_last else None,
        )

    def after(self, before: Before, measurer: Measurer) -> tuple[DeviceRows, Tensor]:
        """Rows of the sampled updates, and the sums [tensors, 6] that `complete` needs; all still on the device."""
        update = before.sampler.take(before.parameters) - before.weights
        rows = measurer.measure(before.sampler.split(update))
        nothing = torch.full_like(update, torch.nan)
        gradient = before.gradients if before.gradients is not None else nothing
        earlier = before.earlier_gradients if before.earlier_gradients is not None else nothing
        of_gradient, of_update = gradient.double().square(), update.double().square()
        sums = before.sampler.sums(
            before.weights.double().square(),
            of_gradient,
            of_gradient.square(),
            of_gradient * of_update,
            gradient.double() * earlier.double(),
            earlier.double().square(),
        )
        return rows, sums

    def _sampler_for(self, tensors: Sequence[Tensor]) -> Sampler:
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        if self._sampler is None or self._sampler.shapes != shapes:
            self._sampler = Sampler(shapes, tensors[0].device)
        return self._sampler


@dataclass(frozen=True, eq=False)
class Completion:
    """Turns what was found in the samples into rows that stand for the whole tensors. Off the training thread."""

    sizes: tuple[int, ...]
    rates: tuple[float, ...]  # of the group that each parameter is in; NaN where it is not known on the host

    def __call__(
        self, layers: tuple[str, ...], rows: Rows, sums: Floats, gradients: LayerRows | None, factor: float
    ) -> LayerRows:
        """`gradients` are the rows of the whole ones, before a clip; those of the sample are so many times as large."""
        weight, gradient, gradient_fourths, common, agreement, earlier = sums.T
        size, count = np.array(self.sizes, dtype=np.float64), rows.column("count")
        with np.errstate(divide="ignore", invalid="ignore"):
            values = rows.values.copy()
            values[:, _SCALED] *= (size / np.maximum(count, 1))[:, None]
            whole_gradient = _squares_of(gradients, layers) * factor**2
            corrected = _corrected(rows, count, size, gradient, gradient_fourths, common, whole_gradient)
            ratio = corrected / np.where(values[:, _SQUARES] > 0, values[:, _SQUARES], 1)
            values[:, _SQUARES] = np.where(values[:, _SQUARES] > 0, corrected, 0)
            values[:, _FOURTHS] *= ratio**2
            weight_norm = np.sqrt(weight * size / np.maximum(count, 1))
            gradient_norm = np.sqrt(np.where(np.isnan(whole_gradient), gradient * size / count, whole_gradient))
            extras = {
                "ratio": np.sqrt(values[:, _SQUARES]) / weight_norm,
                "weight_norm": weight_norm,
                "planned_ratio": np.array(self.rates) * gradient_norm / weight_norm,
                "unchanged": rows.column("zeros") / count,
                "cosine": agreement / np.sqrt(gradient * earlier),
            }
        return LayerRows(layers, Rows(values), extras)


def _squares_of(rows: LayerRows | None, layers: tuple[str, ...]) -> Floats:
    """The sum of squares of the whole gradient of each layer; NaN where it was not measured."""
    known = {} if rows is None else dict(zip(rows.layers, rows.rows.column("sum_squares"), strict=True))
    return np.array([known.get(layer, np.nan) for layer in layers])


def _corrected(
    rows: Rows, count: Floats, size: Floats, gradient: Floats, fourths: Floats, common: Floats, whole_gradient: Floats
) -> Floats:
    """The sum of squares of the whole update.

    Squares of updates and of gradients go together, exactly so for plain SGD: by how much the sample misses the known
    sum of the gradient, it misses that of the update (a control variate). Few large values decide both.
    """
    squares = rows.column("sum_squares")
    plain = squares * size / np.maximum(count, 1)
    spread = fourths / count - (gradient / count) ** 2
    slope = (common / count - gradient * squares / count**2) / np.where(spread > 0, spread, np.nan)
    better = plain + slope * (whole_gradient - gradient * size / count)
    is_whole = count >= size
    usable = np.isfinite(better) & (better > 0.25 * plain) & (better < 4 * plain) & ~is_whole
    return np.where(usable, better, plain)
