"""What a user logs as inputs and targets: the tensors in it, how much they hold, what is measured of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from holter.draft import RoleRows
from holter.measuring import Measuring
from holter.record import Floats, LayerRows
from holter.statistics.content import contents, nothing_known
from holter.statistics.measure import unmeasurable
from holter.statistics.rows import Rows

INPUTS, TARGETS = "inputs", "targets"
_LABELS = ("targets", "target", "labels", "label")  # of a dictionary that holds inputs and labels together
_LOOKED_AT = 256  # things of a batch: a list of a million numbers is not walked through
MOST = 32  # tensors of a batch that are measured
_CHANNELS = (1, 3, 4)  # of an image

# The tensors of a batch -----------------------------------------------------------------------------------------


def tensors_in(batch: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors in tuples, lists, dictionaries and dataclasses, in their order and by their path.

    >>> import torch
    >>> list(tensors_in({"input_ids": torch.zeros(2, 3), "text": ["a", "b"], "more": (torch.ones(2), None)}, "inputs"))
    ['inputs/input_ids', 'inputs/more/0']
    """
    found: dict[str, Tensor] = {}
    stack: list[tuple[str, Any]] = [(name, batch)]
    for _ in range(_LOOKED_AT):
        if not stack:
            break
        path, thing = stack.pop()
        if isinstance(thing, np.ndarray):
            thing = _from_numpy(thing)
        if isinstance(thing, Tensor):
            found.setdefault(path, thing)
        else:
            parts = [(f"{path}/{key}" if path else str(key), part) for key, part in islice(_parts(thing), _LOOKED_AT)]
            stack.extend(reversed(parts))
    return found


def _parts(thing: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(thing, Mapping):
        return thing.items()
    if isinstance(thing, tuple) and hasattr(thing, "_fields"):
        return zip(thing._fields, thing, strict=False)
    if isinstance(thing, tuple | list):
        return enumerate(thing)
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return ((field.name, getattr(thing, field.name, None)) for field in dataclasses.fields(thing))
    return ()


def _from_numpy(array: np.ndarray[Any, Any]) -> Tensor | None:
    """Without a copy where that is possible; None where torch has no such dtype."""
    if not array.flags.writeable or any(
        stride < 0 for stride in array.strides
    ):  # torch warns of one, refuses the other
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        return None


# How much it holds, for throughput ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Amount:
    """So many batches, and the samples and tokens in all of them; None where that is not known of one of them."""

    batches: int = 0
    samples: int | None = 0
    tokens: int | None = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.batches + other.batches,
            None if self.samples is None or other.samples is None else self.samples + other.samples,
            None if self.tokens is None or other.tokens is None else self.tokens + other.tokens,
        )

    @classmethod
    def of(cls, batch: Any) -> Amount:
        return cls(1, samples_in(batch), tokens_in(batch))


NOTHING = Amount()


def samples_in(batch: Any) -> int | None:
    """The leading dimension that all tensors have which have one; None where they differ, and of a list of images.

    >>> import torch
    >>> samples_in({"step": torch.tensor(3), "inputs": [torch.zeros(8, 3), torch.zeros(8)]})
    8
    """
    tensors = tensors_in(batch)
    ids = _input_ids(tensors)
    if ids is not None:
        return ids.size(0)
    if isinstance(batch, tuple | list) and len(tensors) > 1 and all(map(_is_image, tensors.values())):
        return None
    leading = {tensor.size(0) for tensor in tensors.values() if tensor.dim() > 0}
    return leading.pop() if len(leading) == 1 else None


def tokens_in(batch: Any) -> int | None:
    """The elements of the tensor of batch x length token ids, padding included (to count it would be to wait).

    Ids are what an embedding takes: 32 or 64 bit integers. They are those called input_ids, or else the first of a
    batch in which everything with two dimensions is such integers: images with their 2-D labels have no tokens, None.
    """
    tensors = tensors_in(batch)
    ids = _input_ids(tensors)
    if ids is not None:
        return ids.numel()
    deep = [tensor for tensor in tensors.values() if tensor.dim() > 1]
    return deep[0].numel() if deep and all(map(_are_ids, deep)) else None


def _input_ids(tensors: Mapping[str, Tensor]) -> Tensor | None:
    named = (tensor for name, tensor in tensors.items() if name.rpartition("/")[2] == "input_ids")
    return next(filter(_are_ids, named), None)


def _are_ids(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.dtype in (torch.int32, torch.int64)


def _is_image(tensor: Tensor) -> bool:
    return tensor.dim() == 3 and tensor.size(0) in _CHANNELS


# As a role of a step --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contents:
    """Size, hash and label entropy of each tensor, beside its row."""

    sizes: tuple[float, ...]

    def __call__(
        self, layers: tuple[str, ...], rows: Rows, sums: Floats, gradients: LayerRows | None, clipped: float
    ) -> LayerRows:
        extras = {"size": np.array(self.sizes), "hash": sums[:, 0], "label_entropy": sums[:, 1]}
        return LayerRows(layers, rows, extras)


class BatchRole:
    """Rows, hashes and label entropies of what is logged as inputs or targets."""

    def __init__(self, measuring: Measuring, every: int) -> None:
        self._measuring, self._every = measuring, every

    def measure(self, name: str, tensors: Mapping[str, Tensor]) -> list[RoleRows]:
        """A part a device. The kinds are those of inputs and of targets: either may be logged without the other."""
        cadence, looked_at = self._measuring.cadence, dict(islice(tensors.items(), MOST))
        if not looked_at or not cadence.is_wanted(f"batch {name}", self._every):
            return []
        has_contents = cadence.is_wanted(f"batch contents {name}", self._every)
        parts = []
        for names, rows in self._measuring.measure(
            f"batch {name}", list(looked_at), list(looked_at.values()), self._every
        ):
            found = [looked_at[one] for one in names]
            sums = nothing_known(len(found), found[0].device)
            if has_contents:
                with cadence.account(f"batch contents {name}", False, found):
                    sums = contents(found, [_may_be_labels(one) for one in names])
            sizes = tuple(float(tensor.size(0)) if tensor.dim() else np.nan for tensor in found)
            parts.append(RoleRows("batch", tuple(names), rows, sums, Contents(sizes)))
        return parts

    def holds_nonfinite(self, name: str, tensors: Mapping[str, Tensor], is_urgent: bool) -> float | Tensor | None:
        """Return whether a micro-batch without rows holds NaN or infinity; None where that is not looked at: what is
        urgent is, whatever the budget says."""
        kind, cadence = f"batch {name} again", self._measuring.cadence
        plain = [one for one in map(_own_part, islice(tensors.values(), MOST)) if _may_be_nonfinite(one)]
        alike = [one for one in plain if one.device == plain[0].device]
        if not alike or not (is_urgent or cadence.is_wanted(kind, self._every)):
            return None
        with cadence.account(kind, False, alike):
            found = torch.stack([torch.isfinite(one).all() for one in alike]).all().logical_not().float()
            return float(found) if found.device.type == "cpu" else found


def _own_part(tensor: Tensor) -> Tensor:
    """Return what this process holds: the whole would have to be asked for."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _may_be_nonfinite(tensor: Tensor) -> bool:
    """Return whether torch can tell: it cannot of sparse tensors and of floats of eight bits."""
    return tensor.is_floating_point() and tensor.layout is torch.strided and tensor.element_size() > 1


def measurable_in(batch: Any, name: str) -> tuple[dict[str, Tensor], str]:
    """The tensors of a batch that can be measured, or why there are none."""
    found = tensors_in(batch, name)
    refused = {path: unmeasurable(tensor) for path, tensor in found.items()}
    usable = {path: tensor for path, tensor in found.items() if refused[path] is None}
    why = next(filter(None, refused.values()), "no tensor was found in it")
    return usable, "" if usable else why


def _may_be_labels(path: str) -> bool:
    parts = path.split("/")
    return parts[0] == TARGETS or parts[-1] in _LABELS
