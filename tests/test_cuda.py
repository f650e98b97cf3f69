"""On a GPU: the kernels pass the contract, nothing waits for the device, and the clip is torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holter
from holter.statistics.histogram import Histograms
from holter.statistics.measure import Measurer
from holter.statistics.rows import Rows
from tests.rows_contract import CASES, complaints, normal

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]

Clip = Callable[[holter.Monitor, nn.Module], Tensor]


def on_host(measurer: Measurer, tensors: list[Tensor]) -> Rows:
    rows = measurer.measure([tensor.cuda() for tensor in tensors], histograms=True)
    assert rows.histograms is not None
    return Rows(rows.values.cpu().numpy(), Histograms.from_dense(rows.histograms.cpu().numpy()))


@pytest.mark.parametrize("by", ["kernels", "plain torch"])
@pytest.mark.parametrize("kind", CASES)
def test_both_backends_pass_the_contract(kind: str, by: str) -> None:
    measurer = Measurer(sample=1)
    measurer._may_fuse = by == "kernels"
    tensors = list(CASES[kind]())
    assert complaints(tensors, on_host(measurer, tensors)) == []
    assert (measurer._fused is not None) == (by == "kernels")


def test_measuring_again_gives_the_same_bits_with_and_without_histograms() -> None:
    tensors = [normal(3_000_000).cuda(), normal(900, 77).cuda(), normal(50_000).bfloat16().cuda()]
    first = Measurer().measure(tensors).values
    for histograms in (False, True, True, False):
        assert torch.equal(first, Measurer().measure(tensors, histograms=histograms).values)


BASE = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
STEPS = 30


def train(clip: Clip, **options: Any) -> tuple[nn.Module, Tensor, holter.Monitor]:
    torch.manual_seed(0)
    model = copy.deepcopy(BASE).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    with holter.watch(model, optimizer, run=False, **options) as monitor:
        for _ in range(STEPS):
            inputs = torch.randn(32, 64, device="cuda")
            loss = model(inputs).square().mean()
            loss.backward()
            norms.append(clip(monitor, model))
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss, inputs=inputs)
    return model, torch.stack(norms), monitor


def own_clip(monitor: holter.Monitor, model: nn.Module) -> Tensor:
    return monitor.clip_grad_norm_(0.1)


def torchs_clip(monitor: holter.Monitor, model: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def are_equal(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_what_is_computed_does_not_depend_on_what_is_recorded() -> None:
    """P2: the clip gives the same bits with everything recorded, with nothing, and in between."""
    model, norms, monitor = train(own_clip, budget=None, histograms=1, weights=1)
    for options in ({"budget": 0.0}, {"budget": None}, {"every": 7}, {"histograms": None}):
        other, other_norms, recorded_by = train(own_clip, **options)
        assert are_equal(model, other) and torch.equal(norms, other_norms)
        if "every" in options:
            assert recorded_by.history.series("gradient", "norm")[0].tolist() == [0, 7, 14, 21, 28]
    steps, _, rows = monitor.history.series("gradient", "norm")
    assert len(steps) == STEPS and monitor.findings == ()
    recorded = monitor.history.scalar("gradient_norm")[1]
    assert recorded == pytest.approx(norms.tolist(), rel=1e-6) and (rows**2).sum(1) == pytest.approx(recorded**2)


def test_the_clip_is_torchs() -> None:
    model, norms, monitor = train(own_clip)
    theirs, their_norms, _ = train(torchs_clip)
    assert torch.allclose(norms, their_norms, rtol=1e-6)
    for ours, other in zip(model.parameters(), theirs.parameters(), strict=True):
        assert torch.allclose(ours, other, rtol=1e-4, atol=1e-5)
    clipped = monitor.history.scalar("gradient_norm_clipped")[1]
    assert (clipped <= 0.1 + 1e-6).all() and clipped.max() == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_the_norm_comes_back_as_torch_gives_it(dtype: torch.dtype) -> None:
    model = nn.Linear(300, 300).cuda().to(dtype)
    with holter.watch(model, torch.optim.SGD(model.parameters(), lr=1.0), run=False) as monitor:
        gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
        norms = []
        for clip in (monitor.clip_grad_norm_, lambda size: torch.nn.utils.clip_grad_norm_(model.parameters(), size)):
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone()
            norms.append(clip(1e9))
    assert norms[0].dtype == norms[1].dtype == dtype and norms[0].device.type == "cuda"
    assert torch.allclose(
        norms[0].double(), norms[1].double(), rtol={torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(dtype, 1e-6)
    )


DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_model_of_one_dtype_is_recorded_whole(dtype: torch.dtype) -> None:
    """torch's clip, a fused optimizer and a logged loss, all of the model's dtype."""
    torch.manual_seed(0)
    model = copy.deepcopy(BASE).cuda().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    losses, norms = [], []
    options: dict[str, Any] = {"weights": 1, "updates": 1, "optimizer_state": 1, "activations": 1, "histograms": 1}
    with holter.watch(model, optimizer, run=False, budget=None, **options) as monitor:
        for _ in range(5):
            loss = model(torch.randn(32, 64, device="cuda", dtype=dtype)).square().mean()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
            losses.append(loss.detach())
        history, problems = monitor.history, [one for one in monitor.findings if one.where == "monitor"]
    assert problems == [] and len(history) == 5
    assert history.scalar("loss")[1].tolist() == torch.stack(losses).tolist()
    assert history.scalar("clip_norm")[1].tolist() == torch.stack(norms).tolist()
    gradient_norms = history.scalar("gradient_norm")[1].tolist()
    assert gradient_norms == pytest.approx(torch.stack(norms).tolist(), rel=1e-2 if dtype == torch.bfloat16 else 2e-3)
    for role in ("gradient", "weight", "update", "momentum", "second_moment", "activation"):
        steps, layers, found = history.series(role, "norm")
        assert steps.tolist() == [0, 1, 2, 3, 4] and len(layers) >= 3 and np.isfinite(found).all(), role
    weights = dict(zip(history.layers("weight"), history.series("weight", "norm")[2][-1], strict=True))
    assert set(weights) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_of_any_dtype_on_the_device_is_recorded_or_told(dtype: torch.dtype) -> None:
    try:
        value = torch.ones((), device="cuda").to(dtype)
    except (RuntimeError, NotImplementedError):
        pytest.skip("torch cannot make one")
    model = nn.Linear(4, 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with holter.watch(model, optimizer, run=False, diagnose=False) as monitor:
        model(torch.ones(3, 4, device="cuda")).sum().backward()
        optimizer.step()
        monitor.log(loss=torch.ones((), device="cuda"), odd=value)
    scalars = monitor.history.scalar
    assert scalars("loss")[1].tolist() == [1.0]
    assert scalars("odd")[1].tolist() == ([] if dtype.is_complex else [1.0])
    assert len(monitor.findings) == dtype.is_complex


@pytest.fixture
def _no_waits() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.usefixtures("_no_waits")
def test_nothing_waits_for_the_device() -> None:
    """P5: with everything measured every other step; the planted fault is one .item()."""
    model = copy.deepcopy(BASE).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(32, 64, device="cuda")
    with holter.watch(model, optimizer, run=False, budget=None, histograms=2, weights=2) as monitor:
        for step in range(40):
            if step == 10:
                torch.cuda.set_sync_debug_mode("error")
            loss = model(inputs).square().mean()
            loss.backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss, inputs=inputs)
        with pytest.raises(RuntimeError, match="synchroniz"):
            loss.item()
        torch.cuda.set_sync_debug_mode("default")
        assert [finding for finding in monitor.findings if finding.severity != "info"] == []
    assert len(monitor.history.scalar("loss")[0]) == 40


def test_kernels_that_fail_are_replaced_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from holter.statistics import triton_rows

    monkeypatch.setattr(triton_rows.TritonRows, "measure", lambda *_: 1 / 0)
    monkeypatch.setattr(triton_rows.TritonRows, "prepare", lambda *_: None)
    model = copy.deepcopy(BASE).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        for _ in range(3):
            model(torch.ones(2, 64, device="cuda")).sum().backward()
            optimizer.step()
    assert len(monitor.history.series("gradient", "norm")[0]) == 3
    assert [finding.cause for finding in monitor.findings] == ["monitor-degraded"]


def train_in_a_graph(watched: bool) -> tuple[nn.Module, holter.Monitor | None, list[float]]:
    """The whole step is captured, as torch's notes on CUDA graphs show it; the norms are those of the replays."""
    torch.manual_seed(0)
    model = copy.deepcopy(BASE).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    inputs = torch.randn(32, 64, device="cuda")
    options: dict[str, Any] = {"updates": 1, "weights": 1, "optimizer_state": 1}
    monitor = holter.watch(model, optimizer, run=False, budget=None, **options) if watched else None

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=False)
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph, norms = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(STEPS):
        inputs.copy_(torch.randn(32, 64))
        graph.replay()
        norms.append(
            float(torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]))
        )
        if monitor is not None:
            monitor.log(loss=loss)
    if monitor is not None:
        monitor.close()
    return model, monitor, norms


def test_replays_of_a_captured_step_are_recorded() -> None:
    """P2, P7: a CUDA graph holds the training's work only, and each replay is one record."""
    bare, _, norms = train_in_a_graph(watched=False)
    model, monitor, its_norms = train_in_a_graph(watched=True)
    assert monitor is not None and are_equal(bare, model) and norms == its_norms
    history = monitor.history
    assert [finding for finding in monitor.findings if finding.severity != "info"] == []
    assert history.scalar("gradient_norm")[1][3:].tolist() == pytest.approx(norms, rel=1e-5)
    assert history.scalar("loss")[0].tolist() == list(range(3, 3 + STEPS))
    weights, updates = (history.series(role, "norm") for role in ("weight", "update"))
    assert weights[0].tolist() == updates[0].tolist() == list(range(3 + STEPS))
    assert (updates[2] > 0).all() and set(updates[1]) == {name for name, _ in model.named_parameters()}
    assert set(history.layers("second_moment")) == set(updates[1])


def test_memory_does_not_grow() -> None:
    """P4 on the device: 1,000 steps, everything measured every tenth, after the three looks that tell for how long a
    unit has been dead: until then their masks come one by one."""
    model = copy.deepcopy(BASE).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(32, 64, device="cuda")
    held = []
    with holter.watch(model, optimizer, run=False, budget=None, histograms=10, weights=10, every=10) as monitor:
        for step in range(1400):
            model(inputs).square().mean().backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % 1000 == 399:
                monitor.flush(10.0)
                held.append(torch.cuda.memory_allocated())
    assert held[1] <= held[0]


def test_a_selection_is_recorded_alone_and_everything_is_clipped() -> None:
    """B6, D7: the pass that clips measures all gradients; the record has those that were selected."""
    whole, norms, _ = train(lambda monitor, _: monitor.clip_grad_norm_(0.05), budget=None)
    model, again, monitor = train(lambda monitor, _: monitor.clip_grad_norm_(0.05), budget=None, layers="2")
    assert torch.equal(norms, again)
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert monitor.history.layers("gradient") == ("2.weight", "2.bias") and monitor.findings == ()
    assert monitor.history.scalar("gradient_norm")[1].tolist() == pytest.approx(norms.tolist(), rel=1e-5)
    assert len(monitor.history.scalar("gradient_norm_selected")[1]) == STEPS
