"""What an optimizer really did to the weights, of any optimizer, seen before and after its step.

No copy of the model is kept. Of each tensor there is a sample, which stands for the whole of it: its rows are scaled
up to the tensor's size. Large tensors are folded into a sketch besides, which gives the norms of all elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from holter.record import Floats, LayerRows
from holter.samples import MOST, Sampler, Segments, in_line
from holter.statistics.device_rows import DeviceRows, sent
from holter.statistics.measure import Measurer
from holter.statistics.rows import COLUMNS, MAX, MIN, Rows
from holter.statistics.sketch import width_of

_SCALED = [place for place in range(len(COLUMNS)) if place not in (MIN, MAX)]  # counts and sums; extremes stay
_SQUARES, _FOURTHS = COLUMNS.index("sum_squares"), COLUMNS.index("sum_fourths")


class Plan:
    """What depends only on the sizes of the tensors, made once."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        self.sampler = Sampler(sizes, device)
        self.large = [place for place, size in enumerate(sizes) if size > MOST]  # those that are folded besides
        self.places = sent(self.large, device)
        self.folded = Segments([width_of(sizes[place]) for place in self.large], device)

    def sketch(self, lines: Sequence[Tensor], measurer: Measurer) -> Tensor | None:
        return measurer.fold([lines[place] for place in self.large]) if self.large else None


@dataclass(frozen=True, eq=False)
class Before:
    """What is known just before a step: samples and sketches of weights."""

    plan: Plan
    parameters: list[Tensor]
    weights: Tensor
    sketch: Tensor | None


@dataclass(frozen=True, eq=False)
class Gradients:
    """Samples of those that a step uses, where all parameters have one, and of those of the step before."""

    now: Tensor | None
    earlier: Tensor | None


@dataclass(frozen=True, eq=False)
class Change:
    """What a step has changed in the sample and in the sketch, and what that is compared with. All of it copies, so
    that it can be measured later, and the model need not live until then."""

    plan: Plan
    sampled: Tensor
    weights: Tensor
    gradients: Gradients
    folded: Tensor | None
    sketch: Tensor | None

    @property
    def size(self) -> int:
        """Bytes that are held."""
        gradients = self.gradients
        lines = (self.sampled, self.weights, gradients.now, gradients.earlier, self.folded, self.sketch)
        return sum(line.numel() * line.element_size() for line in lines if line is not None)

    def measure(self, measurer: Measurer) -> tuple[DeviceRows, Tensor]:
        """Rows of the sampled updates, and the sums [tensors, 6] that `Completion` needs; all still on the device."""
        weights, gradients, earlier, nothing = self.weights, self.gradients.now, self.gradients.earlier, (None, None)
        rows = measurer.measure(self.plan.sampler.split(self.sampled))
        sums = self.plan.sampler.segments.dots(
            (weights, weights), (gradients, gradients), (gradients, earlier), (earlier, earlier), nothing, nothing
        )
        if self.folded is not None:
            found = self.plan.folded.dots((self.sketch, self.sketch), (self.folded, self.folded))
            sums[:, 4:].index_copy_(0, self.plan.places, found)
        return rows, sums


class Updates:
    """Looks at one list of parameters around a step, and at the gradients of that step and of the one before."""

    def __init__(self) -> None:
        self._plan: Plan | None = None
        self._earlier: tuple[int, tuple[str, ...], Tensor] | None = None

    def gradients(
        self, step: int, last: int, names: Sequence[str], parameters: Sequence[Tensor], scale: Tensor | None
    ) -> Gradients:
        """As they are now, divided by the `scale` that they still bear; `last` is the step before this one."""
        found, key = [parameter.grad for parameter in parameters], tuple(names)
        lines = in_line([gradient for gradient in found if gradient is not None and not gradient.is_sparse])
        taken = None
        if len(lines) == len(found):
            taken = self._plan_for(lines).sampler.take(lines)
            taken = taken if scale is None else taken / scale.detach().to(taken.device, non_blocking=True)
        earlier, self._earlier = self._earlier, (step, key, taken) if taken is not None else None
        return Gradients(taken, earlier[2] if earlier is not None and earlier[:2] == (last, key) else None)

    def before(self, parameters: Sequence[Tensor], measurer: Measurer) -> Before:
        lines = in_line(parameters)
        plan = self._plan_for(lines)
        return Before(plan, list(parameters), plan.sampler.take(lines), plan.sketch(lines, measurer))

    def after(self, before: Before, gradients: Gradients, measurer: Measurer) -> Change:
        lines, plan = in_line(before.parameters), before.plan
        sketch = plan.sketch(lines, measurer)
        return Change(
            plan,
            plan.sampler.take(lines) - before.weights,
            before.weights,
            gradients,
            sketch - before.sketch if sketch is not None and before.sketch is not None else None,
            before.sketch,
        )

    def _plan_for(self, lines: Sequence[Tensor]) -> Plan:
        sizes = tuple([line.numel() for line in lines])
        if self._plan is None or self._plan.sampler.sizes != sizes:
            self._plan = Plan(sizes, lines[0].device)
        return self._plan


@dataclass(frozen=True, eq=False)
class Completion:
    """Turns what was found into rows that stand for the whole tensors. Off the training thread."""

    sizes: tuple[int, ...]
    rates: tuple[float, ...]  # of the group that each parameter is in; NaN where it is not known on the host

    def __call__(
        self, layers: tuple[str, ...], rows: Rows, sums: Floats, gradients: LayerRows | None, clipped: float
    ) -> LayerRows:
        """`gradients` are the rows of the whole ones, before a clip; those of the sample are `clipped` times them."""
        weight, gradient, agreement, earlier, whole_weight, whole_update = sums.T
        count = rows.column("count")
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = np.array(self.sizes) / np.maximum(count, 1)
            values = rows.values.copy()
            values[:, _SCALED] *= scale[:, None]
            squares = _known(whole_update, values[:, _SQUARES])
            values[:, _FOURTHS] *= np.where(squares > 0, squares / values[:, _SQUARES], 1) ** 2
            values[:, _SQUARES] = squares
            weight_norm = np.sqrt(_known(whole_weight, weight * scale))
            gradient_norm = np.sqrt(_known(_squares_of(gradients, layers) * clipped**2, gradient * scale))
            length = np.where(weight_norm > 0, weight_norm, np.nan)  # biases begin at zero: no ratio to that
            extras = {
                "ratio": np.sqrt(squares) / length,
                "weight_norm": weight_norm,
                "planned_ratio": np.array(self.rates) * gradient_norm / length,
                "unchanged": rows.column("zeros") / count,
                "cosine": agreement / np.sqrt(gradient * earlier),
            }
        return LayerRows(layers, Rows(values), extras)


def _known(whole: Floats, estimate: Floats) -> Floats:
    """What is known of the whole, and where nothing is, what the sample lets expect."""
    return np.where(np.isnan(whole), estimate, whole)


def _squares_of(rows: LayerRows | None, layers: tuple[str, ...]) -> Floats:
    """The sum of squares of the whole gradient of each layer; NaN where it was not measured."""
    known = {} if rows is None else dict(zip(rows.layers, rows.rows.column("sum_squares"), strict=True))
    return np.array([known.get(layer, np.nan) for layer in layers])
