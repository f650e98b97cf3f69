"""The first samples of what a model was given: of every tensor that has one row a sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_FEWEST, _MOST = 8, 128  # samples
_POSITIONS = 1024  # tokens or pixels that are enough: with them, few samples are


@dataclass(frozen=True)
class Samples:
    """Arguments of a forward: `taken` of its `of` samples; both are 0 where their number is not known."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    taken: int
    of: int

    def __str__(self) -> str:
        if not self.of:
            return "the whole batch"
        return f"the first {self.taken} of {self.of} samples" if self.taken < self.of else f"all {self.of} samples"


def first_samples(args: tuple[Any, ...], kwargs: dict[str, Any], is_batch_first: bool) -> Samples:
    """Return a few samples where it is plain which dimension counts them, else the whole batch.

    >>> first_samples((torch.zeros(64, 256, 16), torch.zeros(64)), {}, True).args[0].shape
    torch.Size([8, 256, 16])
    """
    tensors = list(_tensors_in((args, kwargs)))
    of = _number(tensors) if is_batch_first else 0
    if not of:
        return Samples(args, kwargs, 0, 0)
    positions = max(_positions(tensor) for tensor in tensors if tensor.ndim and tensor.shape[0] == of)
    taken = min(of, _MOST, max(_FEWEST, math.ceil(_POSITIONS / positions)))
    if taken == of:
        return Samples(args, kwargs, of, of)
    return Samples(_sliced(args, of, taken), _sliced(kwargs, of, taken), taken, of)


def _number(tensors: list[Tensor]) -> int:
    """Of samples; 0 where that is not plain. A dimension of 1 stands for any number; others must be the same."""
    sized = [tensor for tensor in tensors if tensor.ndim]
    if not sized or any(tensor.layout is not torch.strided or tensor.is_nested for tensor in sized):
        return 0
    firsts = {tensor.shape[0] for tensor in sized} - {1}
    of = firsts.pop() if len(firsts) == 1 else 0
    return 0 if len(sized) > 1 and any(of in tensor.shape[1:] for tensor in sized) else of


def _positions(tensor: Tensor) -> int:
    """Of one sample: what has a value, or a vector of features, of its own."""
    inner = tensor.shape[1:-1] if tensor.is_floating_point() or tensor.is_complex() else tensor.shape[1:]
    return max(1, math.prod(inner))


def _sliced(value: Any, of: int, taken: int) -> Any:
    if isinstance(value, Tensor):
        return value[:taken] if value.ndim and value.shape[0] == of else value
    if type(value) in (list, tuple):
        return type(value)(_sliced(one, of, taken) for one in value)
    if type(value) is dict:
        return {key: _sliced(one, of, taken) for key, one in value.items()}
    return value


def _tensors_in(value: Any) -> Iterator[Tensor]:
    """Of what `_sliced` can slice. Tensors in anything else count as one of an unknown number of samples."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in (list, tuple):
        for one in value:
            yield from _tensors_in(one)
    elif type(value) is dict:
        for one in value.values():
            yield from _tensors_in(one)
    elif value is not None and not isinstance(value, str | int | float | bool | torch.dtype | torch.device):
        yield torch.empty(0, 0)
