"""A device without float64, as MPS: nothing there is made in it. Torch's meta device, which has dtypes and no values,
stands for one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holter.activation_roles import _attention_roles
from holter.optimizer_state import _Sample
from holter.samples import Sampler
from holter.statistics import device_rows
from holter.statistics.activation import effective_rank
from holter.statistics.torch_rows import TorchRows

MPS = torch.device("meta")


class _NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = operator(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and one.device == MPS and one.dtype is torch.float64:
                raise TypeError(f"there is no float64, which {operator} made")
        return found


@pytest.fixture(autouse=True)
def _on_mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(device_rows, "WITHOUT_FLOAT64", {"mps", "meta"})
    with _NoFloat64():
        yield


def _tensors() -> list[Tensor]:
    return [torch.randn(300, 40, device=MPS), torch.randn(7, device=MPS).half()]


def test_what_would_raise_there_is_found() -> None:
    """The planted fault."""
    with pytest.raises(TypeError, match="no float64"):
        torch.randn(3, device=MPS).double()


def test_rows_are_merged_in_float32() -> None:
    assert TorchRows().measure(_tensors(), False).values.dtype is torch.float32


def test_products_of_samples_are_summed_in_float32() -> None:
    lines = [tensor.reshape(-1) for tensor in _tensors()]
    sampler = Sampler([line.numel() for line in lines], MPS)
    taken = sampler.take(lines)
    assert sampler.segments.dots((taken, taken), (taken, None)).dtype is torch.float32


@pytest.mark.parametrize("steps", [[1.0, 1.0], None])
def test_moments_are_compared_in_float32(steps: list[float] | None) -> None:
    lines = [tensor.reshape(-1) for tensor in _tensors()]
    sampler = Sampler([line.numel() for line in lines], MPS)
    taken = sampler.take(lines)
    known = torch.ones(2, device=MPS) if steps is None else steps
    sums = _Sample(sampler.segments, taken, taken, [0.999, 0.999], [1e-8, 1e-8], known).sums()
    assert sums.dtype is torch.float32 and sums.shape == (2, 2)


def test_attention_and_the_rank_of_activations_too() -> None:
    (role,) = _attention_roles({"a": torch.ones(2, device=MPS)})
    assert role.rows.values.dtype is torch.float32  # type: ignore[union-attr]
    assert effective_rank(nn.functional.relu(torch.randn(8, 4, device=MPS)))[0].device == MPS
