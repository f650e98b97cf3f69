"""The kernels, run on the CPU by Triton's interpreter, pass the contract of the plain torch backend.

They are the same kernels that a GPU runs; only their cut is smaller here, so that small tensors have many chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holter
from holter import gradient_reads
from holter.capture import Layers
from holter.statistics import histogram
from holter.statistics.device_rows import DeviceRows
from holter.statistics.histogram import Histograms
from holter.statistics.measure import Measurer
from holter.statistics.rows import COLUMNS, Rows
from tests.rows_contract import CASES, complaints, mixed, normal

if torch.cuda.is_available():
    pytest.skip("where there is a GPU, test_cuda.py runs the kernels on it", allow_module_level=True)
triton_kernels = pytest.importorskip("holter.statistics.triton_kernels", reason="Triton is for Linux only")
triton_rows = pytest.importorskip("holter.statistics.triton_rows")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state"),
    # The interpreter computes with numpy, which warns of what a GPU does without a word.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

SMALL = triton_rows.Shape(lines=4, width=64, tiles=2, parts=2, counted=64, sample=1)  # chunks of 512
LONGEST = 2_200  # elements: the interpreter is slow


class Fused(Measurer):
    """Measures by the kernels wherever the tensors are."""

    def __init__(self, shape: object = SMALL) -> None:
        super().__init__()
        self._torch = triton_rows.TritonRows(shape)


def on_host(rows: DeviceRows) -> Rows:
    dense = rows.histograms
    return Rows(rows.values.numpy(), Histograms.from_dense(dense.numpy()) if dense is not None else None)


def measured(tensors: Sequence[Tensor]) -> Rows:
    return on_host(Fused().measure(tensors, histograms=True))


def short_cases(kind: str) -> list[Tensor]:
    return [tensor for tensor in CASES[kind]() if tensor.numel() <= LONGEST]


@pytest.mark.parametrize("kind", CASES)
def test_the_kernels_pass_the_contract(kind: str) -> None:
    """P11: counts, extremes and histograms exact, sums within 1e-6, for every dtype, layout, size and value."""
    tensors = short_cases(kind)
    assert len(tensors) > 10
    assert complaints(tensors, measured(tensors)) == []


@pytest.mark.parametrize(
    "odd",
    [normal(9, 8)[:, ::2], torch._neg_view(normal(9)), torch.arange(-4, 5)],
    ids=["with gaps", "negated", "integers"],
)
def test_one_tensor_that_cannot_be_read_as_it_lies_is_read_right(odd: Tensor) -> None:
    tensors = [normal(40), odd, normal(50, seed=2)]
    assert complaints(tensors, measured(tensors)) == []


def unaligned(size: int, offset: int) -> Tensor:
    return normal(size + offset)[offset:]


def test_tensors_that_start_anywhere_are_measured_whole() -> None:
    """Views into a bucket start off the boundaries that wide loads need."""
    tensors = [unaligned(1500, offset) for offset in range(5)] + [unaligned(2000, 3).half(), mixed(1500)[1:]]
    assert complaints(tensors, measured(tensors)) == []


def test_one_set_of_tables_serves_until_tensors_move_or_change() -> None:
    backend = triton_rows.TritonRows(SMALL)
    tensors = [normal(700), normal(300).half()]

    def is_right() -> bool:
        return complaints(tensors, on_host(backend.measure(tensors, histograms=True))) == []

    assert is_right()
    (tables,) = backend._tables.values()
    cuts = tables._starts
    assert is_right() and tables._starts is cuts
    tensors = [tensor.clone() for tensor in tensors]
    assert is_right() and list(backend._tables.values()) == [tables] and tables._starts is cuts
    tensors = [unaligned(700, 1), tensors[1]]
    assert is_right() and len(backend._tables) == 2  # another cut
    tensors.append(normal(40))
    assert is_right() and len(backend._tables) == 3


def test_the_cache_of_tables_is_bounded_and_keeps_what_is_used() -> None:
    backend = triton_rows.TritonRows(SMALL)
    gradients = [normal(300), normal(20)]
    backend.measure(gradients, histograms=False)
    (tables,) = backend._tables.values()
    for size in range(20):  # batches of many lengths between the gradients of every step
        assert backend.measure([normal(size)], histograms=False).values[0, 0] == size
        backend.measure(gradients, histograms=False)
        assert len(backend._tables) <= triton_rows._REMEMBERED_TABLES and tables in backend._tables.values()


def test_nothing_is_measured_of_nothing() -> None:
    assert measured([]).values.shape == (0, len(COLUMNS))
    assert measured([torch.zeros(0), torch.zeros(0, 3)]).values[:, 0].tolist() == [0, 0]


def test_of_large_tensors_a_sample_is_counted_that_stands_for_all() -> None:
    """One block in four: the total is exact, quantiles are those of the whole within its sampling error."""
    shape = triton_rows.Shape(lines=4, width=64, tiles=2, parts=2, counted=64, sample=4)
    large, small = normal(40 * shape.chunk + 100), normal(15 * shape.chunk)
    large[::5] = 0
    rows = on_host(Fused(shape).measure([large, small], histograms=True))
    assert rows.histograms is not None
    assert complaints([small], Rows(rows.values[1:], Histograms.from_dense(rows.histograms.dense()[1:]))) == []
    counts = rows.histograms.dense()[0]
    assert counts.sum() == large.numel() and rows.histograms[0].count == large.numel()
    truth = Histograms.of([large.numpy()]).dense()[0]
    assert not np.array_equal(counts, truth)  # it is a sample
    assert np.abs(np.cumsum(counts) - np.cumsum(truth)).max() < 0.03 * large.numel()
    assert np.array_equal(rows.values[0], measured([large]).values[0])  # only the histogram is sampled


def test_a_sample_does_not_follow_a_regular_pattern() -> None:
    """Whole blocks of one kind, every fourth: a sample with the same stride would see one kind only."""
    shape = triton_rows.Shape(lines=4, width=64, tiles=2, parts=2, counted=64, sample=4)
    blocks = torch.ones(40 * shape.chunk // 64, 64)
    blocks[::4] = 2.0
    rows = on_host(Fused(shape).measure([blocks], histograms=True))
    assert rows.histograms is not None
    twos = rows.histograms.dense()[0][histogram.bucket_of(2.0)[0]] / blocks.numel()
    assert 0.1 < twos < 0.4


def test_a_nan_among_many_numbers_is_counted_exactly_in_a_sampled_tensor() -> None:
    shape = triton_rows.Shape(lines=4, width=64, tiles=2, parts=2, counted=64, sample=4)
    large = normal(20 * shape.chunk)
    large[[5, 777, 5000]] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    rows = on_host(Fused(shape).measure([large], histograms=True))
    assert rows.values[0, 2:5].tolist() == [1, 1, 1]
    assert rows.histograms is not None
    assert rows.histograms.dense()[0][~histogram.FINITE].sum() == 3


def test_measuring_again_gives_the_same_bits_with_and_without_histograms() -> None:
    """The norm of a clip must not depend on what else is recorded."""
    tensors = [normal(3000), mixed(900), normal(700).bfloat16()]
    first = Fused().measure(tensors).values
    assert torch.equal(first, Fused().measure(tensors).values)
    assert torch.equal(first, Fused().measure(tensors, histograms=True).values)
    assert not torch.equal(first, Fused().measure([tensors[0].flip(0) * 1.0000001, *tensors[1:]]).values)


# Clipping ---------------------------------------------------------------------------------------------------------


def parameters_with(gradients: Sequence[Tensor]) -> list[torch.nn.Parameter]:
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    return parameters


def clip_faults(gradients: Sequence[Tensor], max_norm: float) -> list[str]:
    """How the fused clip differs from torch's."""
    ours = [gradient.clone() for gradient in gradients]
    versions = [gradient._version for gradient in ours]
    _, norm = triton_rows.TritonRows(SMALL).measure_and_clip(ours, max_norm, histograms=False)
    theirs = parameters_with([gradient.double() for gradient in gradients])
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    faults = []
    if not torch.allclose(norm.double(), expected, rtol=1e-6, atol=0, equal_nan=True):
        faults.append(f"the norm is {norm}, not {expected}")
    for gradient, parameter in zip(ours, theirs, strict=True):
        precision = 1e-2 if gradient.dtype is torch.bfloat16 else 1e-6
        if not torch.allclose(gradient.double(), parameter.grad, rtol=precision, atol=0, equal_nan=True):
            faults.append(f"a gradient of {gradient.dtype} differs")
    if [gradient._version for gradient in ours] == versions:
        faults.append("autograd was not told")
    return faults


GRADIENTS = {
    "ordinary": [normal(1500), normal(40, 30, seed=1), normal(7, seed=2)],
    "transposed": [normal(30, 40).T, normal(600)],
    "off the boundary": [unaligned(1000, 1), unaligned(900, 3)],
    "half and whole": [normal(700).bfloat16(), normal(600)],
    "with NaN": [normal(700), torch.tensor([1.0, torch.nan])],
    "with Inf": [normal(700), torch.tensor([1.0, torch.inf])],
    "zero": [torch.zeros(700), torch.zeros(3)],
}


@pytest.mark.parametrize("max_norm", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_clip_equals_torchs_in_float64(name: str, max_norm: float) -> None:
    assert clip_faults(GRADIENTS[name], max_norm) == []


def test_a_wrong_clip_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted twins: a scale that is not applied, and writing that autograd is not told of."""
    kernel = triton_kernels.scale_chunks
    monkeypatch.setattr(
        triton_kernels, "scale_chunks", {(4,): lambda *args, **kwargs: None, (6,): lambda *a, **k: None}
    )
    assert any("gradient" in fault for fault in clip_faults([normal(1500), normal(40)], 1e-3))
    monkeypatch.setattr(triton_kernels, "scale_chunks", kernel)
    monkeypatch.setattr(torch.autograd.graph, "increment_version", lambda tensor: None)
    assert clip_faults([normal(1500)], 1e-3) == ["autograd was not told"]


def test_what_is_within_the_norm_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is multiplied by one: the kernel that would write is not even begun."""
    scaled = []
    monkeypatch.setattr(triton_kernels, "_scale", lambda *args: scaled.append(args))
    triton_rows.TritonRows(SMALL).measure_and_clip([normal(3000)], 1e6, histograms=False)
    assert scaled == []
    triton_rows.TritonRows(SMALL).measure_and_clip([normal(3000)], 1.0, histograms=False)
    assert scaled


@pytest.fixture
def _fused_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor clips by the kernels, as it would on CUDA."""
    backend = triton_rows.TritonRows(SMALL)
    monkeypatch.setattr(Measurer, "_fused_backend", lambda self: backend)
    monkeypatch.setattr(Measurer, "can_clip", lambda self, tensors: backend.can_clip(tensors))
    monkeypatch.setattr(Layers, "is_on_cuda", lambda self: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def train(steps: int = 12, **options: Any) -> tuple[nn.Module, list[float], holter.Monitor]:
    torch.manual_seed(0)
    model = nn.Linear(12, 5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    norms = []
    with holter.watch(model, optimizer, run=False, diagnose=False, **options) as monitor:
        for step in range(steps):
            model(torch.randn(8, 12)).square().sum().backward()
            if step == 3:  # one that cannot be scaled where it lies
                model.weight.grad = torch.cat([model.weight.grad, model.weight.grad], 1)[:, :12]
            norms.append(float(monitor.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return model, norms, monitor


@pytest.mark.usefixtures("_fused_on_the_cpu")
def test_what_is_trained_does_not_depend_on_what_is_recorded() -> None:
    """P2: nor does what is recorded at every seventh step depend on the clip at the others."""
    model, norms, monitor = train(budget=None)
    assert len(monitor.history.series("gradient", "norm")[0]) == 12 and monitor.findings == ()
    for options in ({"budget": 0.0}, {"every": 5}, {"budget": None, "histograms": 1, "weights": 1}):
        other, other_norms, other_monitor = train(**options)
        assert torch.equal(model.weight, other.weight) and norms == other_norms
        if "every" in options:
            assert other_monitor.history.series("gradient", "norm")[0].tolist() == [0, 5, 10]


@pytest.mark.usefixtures("_fused_on_the_cpu")
def test_a_failure_after_the_clip_does_not_clip_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: whatever fails in noting the clip, the norm is that of the gradients as they were."""
    _, norms, _ = train()
    monkeypatch.setattr(gradient_reads.GradientReads, "_kept", lambda *_: 1 / 0)
    _, others, monitor = train()
    assert others == norms and monitor.findings


def test_only_what_can_be_scaled_where_it_lies_is_clipped() -> None:
    backend = triton_rows.TritonRows(SMALL)
    assert backend.can_clip([normal(5), normal(6, 4).T, normal(3).bfloat16(), normal(9).half()])
    for odd in (
        normal(3).double(),
        torch.complex(normal(9), normal(9)).conj().imag,
        normal(8)[::2],
        normal(1, 5).expand(4, 5),
        torch.arange(4),
        normal(4) + 0j,
        torch.eye(3).to_sparse(),
        torch.nn.Parameter(normal(3)),
        torch.zeros(3, device="meta"),
    ):
        assert not backend.can_clip([normal(5), odd])


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [("MOST", 3e38, "extreme"), ("LEAST", 0.0, "extreme"), ("INFINITE", 0x7FFFFFFF, "extreme"), ("SHIFT", 20, "sized")],
)
def test_the_contract_rejects_a_planted_fault(
    name: str, value: float, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums trusted where they overflow or vanish, NaN taken for a number, buckets off by a bit."""
    monkeypatch.setattr(triton_kernels, name, type(triton_kernels.MOST)(value))
    assert complaints(short_cases(kind), measured(short_cases(kind)))
