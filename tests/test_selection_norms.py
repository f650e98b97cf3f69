"""Norms where only some layers are selected: each says what it is of, and a clip clips everything (B6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import holter
from holter.capture import Layers
from holter.gradient_reads import GradientReads
from holter.statistics.device_rows import DeviceRows
from holter.statistics.measure import Measurer
from tests.test_selection import Tiny, Watched


def test_without_a_clip_the_norm_of_the_selected_says_that_it_is() -> None:
    watched = Watched("head")
    assert "gradient_norm" not in watched.monitor.history.scalars
    assert "gradient_nonfinite" not in watched.monitor.history.scalars
    expected = [np.hypot(norms["head.weight"], norms["head.bias"]) for norms in watched.norms]
    assert watched.scalar("gradient_norm_selected") == pytest.approx(expected, rel=1e-6)
    assert watched.scalar("gradient_nonfinite_selected") == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("every", [1, 2])
def test_a_clip_clips_everything_and_gives_the_norm_of_everything(every: int) -> None:
    """B6: selection or not, the same bits; the norms before and after are those of all gradients."""
    watched, whole = Watched("head", clip=0.01, every=every), Watched(clip=0.01, every=every)
    for mine, other in zip(watched.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert watched.seen("gradient") == {"head.weight", "head.bias"}
    assert watched.scalar("gradient_norm") == pytest.approx(watched.totals, rel=1e-6)
    assert watched.scalar("gradient_norm_clipped") == pytest.approx([0.01] * 3, rel=1e-3)


def test_the_update_is_set_against_the_gradient_that_the_clip_left() -> None:
    watched, whole = Watched("head", clip=0.01), Watched(clip=0.01)
    for statistic in ("planned_ratio", "ratio"):
        _, layers, values = watched.monitor.history.series("update", statistic)
        _, every, expected = whole.monitor.history.series("update", statistic)
        assert layers == ("head.weight", "head.bias")
        np.testing.assert_allclose(values, expected[:, [every.index(name) for name in layers]], rtol=1e-9)


def test_all_that_the_optimizer_uses_being_selected_is_no_selection() -> None:
    """LoRA and the like: what is left out is frozen, so the norm is that of all gradients."""
    torch.manual_seed(0)
    model = Tiny()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with holter.watch(model, optimizer, run=False, budget=None, layers=lambda name, _: "head" in name) as monitor:
        model(torch.randn(5, 4)).square().mean().backward()
        expected = torch.cat([p.grad.flatten() for p in model.head.parameters() if p.grad is not None]).norm()
        optimizer.step()
    assert monitor.history.scalar("gradient_norm")[1].tolist() == pytest.approx([float(expected)], rel=1e-6)
    assert "gradient_norm_selected" not in monitor.history.scalars


def test_a_clip_of_more_than_the_optimizer_holds_gives_no_norm_of_its_gradients() -> None:
    """Where layers are left out, what the optimizer uses of the clip's norm is unknown."""
    model = Tiny()
    optimizer = torch.optim.SGD(model.inp.parameters(), 0.1)
    with holter.watch(model, optimizer, run=False, budget=None, layers=["inp.weight"]) as monitor:
        model(torch.randn(5, 4)).square().mean().backward()
        monitor.clip_grad_norm_(1.0)
        optimizer.step()
    (record,) = monitor.history.records
    assert "gradient_norm_selected" in record.scalars and "gradient_norm" not in record.scalars


def test_a_clip_of_all_that_two_optimizers_hold_gives_the_norm_of_their_step() -> None:
    """They share a step, and so the norm of all gradients, though layers are left out."""
    model = Tiny()
    matrices, rest = ([one for one in model.parameters() if (one.ndim > 1) is wanted] for wanted in (True, False))
    optimizers = [torch.optim.SGD(matrices, 0.1), torch.optim.SGD(rest, 0.1)]
    with holter.watch(model, optimizers, run=False, budget=None, layers=["inp.weight", "head"]) as monitor:
        model(torch.randn(5, 4)).square().mean().backward()
        norm = monitor.clip_grad_norm_(1.0)
        for optimizer in optimizers:
            optimizer.step()
    (record,) = monitor.history.records
    assert "gradient_norm_selected" in record.scalars
    assert record.scalars["gradient_norm"] == pytest.approx(norm.item(), rel=1e-6)


# The clip in one pass, as on CUDA ---------------------------------------------------------------------------------


def clip_in_one_pass(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets the CPU measure and clip in one go, as the kernels of CUDA do; how many tensors each pass was given."""
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU, test_cuda.py clips in one pass on it")
    passes: list[int] = []

    def measure_and_clip(
        self: Measurer, tensors: list[Tensor], max_norm: float, *, histograms: bool = False
    ) -> tuple[DeviceRows, Tensor]:
        passes.append(len(tensors))
        rows = self.measure(tensors, histograms=histograms)
        norm = torch.nn.utils.get_total_norm(tensors)
        for tensor in tensors:
            tensor.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return rows, norm

    monkeypatch.setattr(Measurer, "can_clip", lambda self, tensors: True)
    monkeypatch.setattr(Measurer, "measure_and_clip", measure_and_clip)
    monkeypatch.setattr(Layers, "is_on_cuda", lambda self: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return passes


@pytest.mark.parametrize("every", [1, 2])
def test_a_clip_in_one_pass_takes_all_gradients_and_records_those_that_are_selected(
    every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = clip_in_one_pass(monkeypatch)
    watched, whole = Watched("head", clip=0.01, every=every), Watched(clip=0.01, every=every)
    assert passes == [len(list(watched.model.parameters()))] * 6
    for mine, other in zip(watched.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert watched.seen("gradient") == {"head.weight", "head.bias"}
    _, layers, norms = watched.monitor.history.series("gradient", "norm")
    for measured, truly in zip(norms, watched.norms[::every], strict=True):
        assert dict(zip(layers, measured, strict=True)) == pytest.approx({n: truly[n] for n in layers}, rel=1e-6)
    assert watched.scalar("gradient_norm") == pytest.approx(watched.totals, rel=1e-6)
    assert len(watched.scalar("gradient_norm_selected")) == len(norms)


def test_a_clip_of_the_selected_alone_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the pass is given only what is to be recorded."""
    clip_in_one_pass(monkeypatch)
    whole = Watched(clip=0.01)
    honest = GradientReads._gradients

    def selected(self: GradientReads, read: Any, held: Any = None) -> tuple[dict[str, int], list[Tensor]]:
        owners, tensors = honest(self, read, held)
        kept = [place for place, owner in enumerate(owners.values()) if owner not in read.left_out]
        return {list(owners)[place]: list(owners.values())[place] for place in kept}, [tensors[i] for i in kept]

    monkeypatch.setattr(GradientReads, "_gradients", selected)
    watched = Watched("head", clip=0.01)
    pairs = zip(watched.model.parameters(), whole.model.parameters(), strict=True)
    assert not all(torch.equal(mine, other) for mine, other in pairs)
