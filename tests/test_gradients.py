"""The gradients of a model, against float64 and against torch's own functions."""

import copy
import doctest
import math
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import holter.gradients
from holter.gradients import (
    check_gradient_flow_pattern,
    clip_gradients_with_monitoring,
    clip_on_device,
    compute_gradient_norm,
    compute_gradient_norms,
    diagnose_gradient_issues,
    log_gradient_distribution,
)
from holter.sinks import Memory
from holter.statistics.rows import Rows
from holter.tracker import MetricsTracker


def with_gradients(*gradients: torch.Tensor) -> nn.ParameterList:
    """A model whose parameters "0", "1", ... hold exactly these gradients."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(g.shape, dtype=g.dtype)) for g in gradients)
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = gradient
    return model


def twin_of(model: nn.ParameterList) -> nn.ParameterList:
    return with_gradients(*(parameter.grad.clone() for parameter in model))


def true_norm(model: nn.Module) -> float:
    """In float64, of plain dense copies."""
    squares = [p.grad.to_dense().double().square().sum().item() for p in model.parameters() if p.grad is not None]
    return math.sqrt(math.fsum(squares))


def gpt2_shaped(width: int = 64, layers: int = 4, vocabulary: int = 5000) -> nn.ModuleDict:
    """GPT-2's parameter names and shapes, with random gradients of very different sizes."""
    block = {"ln_1": nn.LayerNorm(width), "ln_2": nn.LayerNorm(width)}
    attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
    mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})
    blocks = nn.ModuleList(nn.ModuleDict({**block, "attn": attn, "mlp": mlp}) for _ in range(layers))
    parts = {"wte": nn.Embedding(vocabulary, width), "wpe": nn.Embedding(256, width)}
    body = nn.ModuleDict({**parts, "h": copy.deepcopy(blocks), "ln_f": nn.LayerNorm(width)})
    model = nn.ModuleDict({"transformer": body})
    torch.manual_seed(0)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.randn_like(parameter) * 10.0 ** (number % 7 - 4)
    return model


def test_the_examples_in_the_docstrings_run() -> None:
    """B5: a docstring with a runnable example."""
    outcome = doctest.testmod(holter.gradients)
    assert outcome.attempted > 10 and outcome.failed == 0


# B. The norm of all gradients


def test_the_norm_of_a_gpt2_shaped_model_is_torchs() -> None:
    """B1, B3: a Python float within 1e-6 of what clip_grad_norm_(params, 1e9) returns, and of float64."""
    model = gpt2_shaped()
    norm = compute_gradient_norm(model)
    assert type(norm) is float
    assert norm == pytest.approx(clip_grad_norm_(model.parameters(), 1e9).item(), rel=1e-6)
    assert norm == pytest.approx(true_norm(model), rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=8),
    exponent=st.integers(-12, 12),
    seed=st.integers(0, 2**16),
)
def test_the_norm_is_right_whatever_the_sizes(sizes: list[int], exponent: int, seed: int) -> None:
    """B1, B3: any number of parameters of any size and scale, empty ones too."""
    generator = torch.Generator().manual_seed(seed)
    model = with_gradients(*(torch.randn(size, generator=generator) * 10.0**exponent for size in sizes))
    assert compute_gradient_norm(model) == pytest.approx(true_norm(model), rel=1e-6, abs=0)
    assert compute_gradient_norm(model) == pytest.approx(clip_grad_norm_(list(model), 1e9).item(), rel=1e-6, abs=1e-30)


def test_the_norm_is_right_at_the_size_of_gpt2() -> None:
    """B3: equal to clip_grad_norm_ of the same gradients in float64. In float32, on the CPU, torch's own sum over an
    embedding of 38 million values drifts by more than the 1e-6 that is asked of ours."""
    shapes = [(50304, 768), (1024, 768), (768, 2304), (768, 3072), (3072, 768), (768,)]
    model = nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
    torch.manual_seed(0)
    for parameter in model:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    ours = compute_gradient_norm(model)
    exact = nn.ParameterList(nn.Parameter(torch.empty(shape, dtype=torch.float64)) for shape in shapes)
    for twin, parameter in zip(exact, model, strict=True):
        assert parameter.grad is not None
        twin.grad = parameter.grad.double()
    assert ours == pytest.approx(float(torch.nn.utils.clip_grad_norm_(exact.parameters(), 1e9)), rel=1e-6)


@pytest.mark.parametrize("size", [1e20, 1e-30])
def test_the_norm_is_right_where_float32_squares_leave_their_range(size: float) -> None:
    """B3: torch itself gives inf for 1e20 and 0 for 1e-30."""
    model = with_gradients(torch.full((50, 40), size), torch.full((7,), -size))
    assert compute_gradient_norm(model) == pytest.approx(size * math.sqrt(2007), rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [300.0, 60000.0, 1e-4])
def test_half_precision_gradients_are_summed_in_more(dtype: torch.dtype, size: float) -> None:
    """B4: 300^2 already overflows float16, 1e-4 squared underflows it, and 10,000 ones do not add up in either."""
    model = with_gradients(torch.full((100, 100), size, dtype=dtype), torch.ones(10_000, dtype=dtype))
    assert compute_gradient_norm(model) == pytest.approx(true_norm(model), rel=1e-6)


def test_without_gradients_the_norm_is_zero() -> None:
    """B2, C1: no parameter has a gradient, or there is no parameter."""
    for model in (nn.Linear(2, 2), nn.ReLU()):
        assert compute_gradient_norm(model) == 0.0
        assert compute_gradient_norms(model) == {}


def test_missing_and_frozen_gradients_count_for_nothing() -> None:
    """B2: the norm is that of the gradients there are."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[0].requires_grad_(False)
    model(torch.ones(1, 3)).sum().backward()
    model[1].bias.grad = None
    assert compute_gradient_norms(model) == pytest.approx({"1.weight": model[1].weight.grad.norm().item()})
    assert compute_gradient_norm(model) == pytest.approx(true_norm(model))


def test_a_tied_weight_counts_once_under_its_first_name() -> None:
    """B3, C1: as torch counts it."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model(torch.ones(1, 4)).sum().backward()
    assert list(compute_gradient_norms(model)) == ["0.weight"]
    assert compute_gradient_norm(model) == pytest.approx(clip_grad_norm_(model.parameters(), 1e9).item(), rel=1e-6)


def test_a_sparse_gradient_is_summed_before_it_is_squared() -> None:
    """B1: index 1 comes twice, so its gradient is 2, not two of 1."""
    model = nn.Embedding(9, 3, sparse=True)
    model(torch.tensor([1, 1, 5])).sum().backward()
    assert model.weight.grad.is_sparse and not model.weight.grad.is_coalesced()
    assert compute_gradient_norm(model) == pytest.approx(math.sqrt(3 * (4 + 1)), rel=1e-6)


@pytest.mark.parametrize("bad", [[math.nan], [math.inf], [-math.inf], [math.nan, math.inf]])
def test_what_is_not_finite_is_not_hidden(bad: list[float]) -> None:
    """B3: NaN and infinity come out as torch gives them, in the total and in their layer, not in the others."""
    model = with_gradients(torch.tensor([3.0, 4.0]), torch.tensor([1.0, *bad]))
    torchs = clip_grad_norm_(list(twin_of(model)), 1e9).item()
    assert compute_gradient_norm(model) == pytest.approx(torchs, nan_ok=True)
    assert compute_gradient_norms(model) == pytest.approx({"0": 5.0, "1": torchs}, nan_ok=True)


def test_the_norm_has_the_same_bits_every_time() -> None:
    """B5: deterministic under a fixed seed, whatever else was measured in between."""
    first = compute_gradient_norm(gpt2_shaped())
    compute_gradient_norm(with_gradients(torch.randn(12345)))
    assert compute_gradient_norm(gpt2_shaped()) == first


def test_norms_by_layer_are_torchs_under_torchs_names() -> None:
    """C1, A2: a mapping from parameter names to norms, in the model's order."""
    model = gpt2_shaped(layers=2)
    expected = {name: p.grad.double().norm().item() for name, p in model.named_parameters()}
    norms = compute_gradient_norms(model)
    assert "transformer.h.0.attn.c_attn.weight" in norms
    assert list(norms) == list(expected)
    assert norms == pytest.approx(expected, rel=1e-6)
    assert all(type(norm) is float for norm in norms.values())


def test_gradients_on_several_devices_keep_the_models_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """C1: one device is measured at a time; here the meta device plays the second one, and its norm is its size."""
    model = nn.ParameterList(nn.Parameter(torch.zeros(n, device=d)) for n, d in ((4, "cpu"), (9, "meta"), (16, "cpu")))
    for parameter in model:
        parameter.grad = torch.ones_like(parameter)
    measured = []

    def measure_rows(tensors: list[torch.Tensor], *, histograms: bool = False) -> Rows:
        measured.append([tensor.device.type for tensor in tensors])
        return real([torch.ones(tensor.shape) for tensor in tensors], histograms=histograms)

    real = holter.gradients.measure_rows
    monkeypatch.setattr(holter.gradients, "measure_rows", measure_rows)
    assert list(compute_gradient_norms(model).items()) == [("0", 2.0), ("1", 3.0), ("2", 4.0)]
    assert compute_gradient_norm(model) == pytest.approx(math.sqrt(29))
    assert measured[:2] == [["cpu", "cpu"], ["meta"]]


# A. Logging the distribution


class Recorder:
    """A tracker that takes scalars only."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, float, int]] = []

    def log_scalar(self, name: str, value: float, *, step: int) -> None:
        self.calls.append((name, value, step))


def test_the_norm_of_every_parameter_is_logged_by_its_name() -> None:
    """A1, A2: gradients/{parameter name}/norm, a float, at the step."""
    model, tracker = gpt2_shaped(layers=1), Recorder()
    log_gradient_distribution(model, tracker, step=7)
    expected = {f"gradients/{name}/norm": p.grad.double().norm().item() for name, p in model.named_parameters()}
    assert {name: value for name, value, _ in tracker.calls} == pytest.approx(expected, rel=1e-6)
    assert len(tracker.calls) == len(expected)
    assert {step for _, _, step in tracker.calls} == {7}
    assert all(type(value) is float for _, value, _ in tracker.calls)


def test_frozen_parameters_and_those_without_gradient_are_passed_over() -> None:
    """A4: also one that was frozen after its gradient was made."""
    model, tracker = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)), Recorder()
    model[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    model[1].weight.requires_grad_(False)
    model[2].bias.grad = None
    log_gradient_distribution(model, tracker, 0)
    assert [name for name, _, _ in tracker.calls] == ["gradients/1.bias/norm", "gradients/2.weight/norm"]


def test_a_model_without_gradients_logs_nothing() -> None:
    """A4: no error either, with the histogram asked for."""
    sink = Memory()
    with MetricsTracker(sinks=[sink]) as tracker:
        log_gradient_distribution(nn.Linear(2, 2), tracker, 0, log_histogram=True)
    assert sink.records == []


def test_the_histogram_is_of_all_values_and_only_when_asked_for() -> None:
    """A3: off by default; all gradients in one, exactly as many values as there are, in the right places."""
    sink, model = Memory(), gpt2_shaped(layers=1)
    with MetricsTracker(sinks=[sink]) as tracker:
        log_gradient_distribution(model, tracker, 3)
    assert sink.records and not any(record.rows for record in sink.records)
    with MetricsTracker(sinks=[sink]) as tracker:
        log_gradient_distribution(model, tracker, 3, log_histogram=True)
    (record,) = [record for record in sink.records if record.rows]
    (layer_rows,) = record.rows.values()
    assert (record.step, layer_rows.layers) == (3, ("gradients/histogram",))
    values = torch.cat([p.grad.flatten() for p in model.parameters()]).numpy()
    counts, edges = layer_rows.rows.histograms[0].edges()
    assert counts.sum() == values.size
    assert counts.tolist() == np.histogram(values, edges)[0].tolist()


def test_a_tracker_without_histograms_gets_the_norms_only() -> None:
    """A3: skipped quietly."""
    tracker = Recorder()
    log_gradient_distribution(with_gradients(torch.ones(4)), tracker, 0, log_histogram=True)
    assert tracker.calls == [("gradients/0/norm", 2.0, 0)]


class LargestOnHost(TorchFunctionMode):
    """The most elements that one call has brought to the host or into Python objects, views of the gradient aside."""

    def __init__(self, gradient: torch.Tensor) -> None:
        super().__init__()
        self.elements, self.gradient = 0, gradient.untyped_storage().data_ptr()

    leaving = ("cpu", "numpy", "tolist", "item", "__array__", "__iter__")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in self.leaving and isinstance(args[0], torch.Tensor):
            is_view = name == "numpy" and args[0].untyped_storage().data_ptr() == self.gradient
            self.elements = max(self.elements, 0 if is_view else args[0].numel())
        return func(*args, **(kwargs or {}))


class LargestMade(TorchDispatchMode):
    """The most elements of a tensor that was allocated, views of the gradient aside."""

    def __init__(self, gradient: torch.Tensor) -> None:
        super().__init__()
        self.elements, self.gradient = 0, gradient.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != self.gradient:
            self.elements = max(self.elements, made.numel())
        return made


class NumpyPeak:
    """The most memory that numpy, and Python, have held at a time."""

    def __enter__(self) -> "NumpyPeak":
        tracemalloc.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()


def test_gradients_never_come_to_the_host_as_a_whole() -> None:
    """A8: norms and histogram of four million values bring a few thousand numbers to the host, and copy little."""
    model, tracker = with_gradients(torch.randn(4_000_000)), MetricsTracker(sinks=[Memory()])
    gradient = model[0].grad

    def use_all() -> None:
        compute_gradient_norm(model)
        diagnose_gradient_issues(model)
        check_gradient_flow_pattern(model)
        log_gradient_distribution(model, tracker, 0, log_histogram=True)

    with LargestOnHost(gradient) as host, LargestMade(gradient) as made:
        use_all()
    with NumpyPeak() as numpys:
        use_all()
    assert 0 < host.elements <= 2**16  # the histogram's buckets, and a workspace
    assert made.elements <= 2**20 and numpys.bytes < 8 << 20
    with LargestOnHost(gradient) as host, LargestMade(gradient) as made:  # what the gates would have seen
        gradient.clone().tolist()
    with NumpyPeak() as numpys:
        np.abs(gradient.numpy())
    assert host.elements == made.elements == 4_000_000 and numpys.bytes >= 16_000_000


# C. Diagnosis and clipping


def test_layers_are_sorted_by_their_norms() -> None:
    """C6: below 1e-7 vanishing, above 10 exploding, the rest healthy; NaN and infinity are not healthy."""
    sizes = {"0": 0.0, "1": 9e-8, "2": 2e-7, "3": 9.9, "4": 10.1, "5": math.inf, "6": math.nan}
    issues = diagnose_gradient_issues(with_gradients(*(torch.tensor([size]) for size in sizes.values())))
    assert issues.vanishing == pytest.approx({"0": 0.0, "1": 9e-8})
    assert issues.healthy == pytest.approx({"2": 2e-7, "3": 9.9})
    assert issues.exploding == pytest.approx({"4": 10.1, "5": math.inf, "6": math.nan}, nan_ok=True)


def test_the_thresholds_of_the_diagnosis_are_the_callers() -> None:
    """C6: threshold_vanish and threshold_explode."""
    model = with_gradients(torch.tensor([0.5]), torch.tensor([1.0]), torch.tensor([2.0]))
    issues = diagnose_gradient_issues(model, threshold_vanish=0.6, threshold_explode=1.5)
    assert [list(part) for part in (issues.vanishing, issues.healthy, issues.exploding)] == [["0"], ["1"], ["2"]]


def flow(*norms: float) -> str:
    return check_gradient_flow_pattern(with_gradients(*(torch.full((1, 1), norm) for norm in norms))).pattern


def test_the_flow_is_first_third_over_last_third() -> None:
    """C8: mean norms 0.002 and 4 of six weights; the vector before them is a bias and does not count."""
    gradients = [torch.tensor([[size]]) for size in (0.001, 0.003, 1.0, 1.0, 3.0, 5.0)]
    found = check_gradient_flow_pattern(with_gradients(torch.tensor([1e9]), *gradients))
    assert (found.first_third, found.last_third) == pytest.approx((0.002, 4.0))
    assert found.ratio == pytest.approx(0.0005)
    assert found.pattern == "vanishing"


def test_the_flow_pattern_is_named() -> None:
    """C8: < 0.01 vanishing, > 100 exploding; zero, NaN and too few weights get an honest answer."""
    assert flow(0.009, 1.0, 1.0) == "vanishing"
    assert flow(0.011, 1.0, 1.0) == "healthy"
    assert flow(99.0, 1.0, 1.0) == "healthy"
    assert flow(101.0, 1.0, 1.0) == "exploding"
    assert flow(0.001, 1.0) == "vanishing"
    assert flow(1.0, 1.0, 0.0) == "exploding"
    assert flow(1.0, 1.0, math.inf) == flow(math.nan, 1.0, 1.0) == flow(1.0, math.inf, 1.0) == "nonfinite"
    assert flow(0.0, 0.0, 0.0) == flow(1.0) == flow() == "unknown"


def test_saturated_sigmoids_vanish_and_a_plain_stack_does_not() -> None:
    """C8, D4: on real gradients of real networks."""
    torch.manual_seed(0)
    patterns = {}
    for activation in (nn.Sigmoid, nn.ReLU):
        layers = [module for _ in range(10) for module in (nn.Linear(32, 32), activation())]
        model = nn.Sequential(*layers, nn.Linear(32, 1))
        for layer in model[::2]:
            nn.init.kaiming_normal_(layer.weight)
        model(torch.randn(64, 32)).square().mean().backward()
        patterns[activation] = check_gradient_flow_pattern(model).pattern
    assert patterns == {nn.Sigmoid: "vanishing", nn.ReLU: "healthy"}


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1.0, 1e9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_clipping_is_torchs_bit_for_bit(max_norm: float, dtype: torch.dtype) -> None:
    """C17: returns the norm before and whether it clipped."""
    torch.manual_seed(1)
    model = with_gradients(torch.randn(64, 33, dtype=dtype), torch.randn(33, dtype=dtype))
    twin = twin_of(model)
    expected = clip_grad_norm_(list(twin), max_norm)
    assert clip_gradients_with_monitoring(model, max_norm) == (expected.item(), max_norm < 1e9)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model, twin, strict=True))


def test_a_norm_that_is_not_finite_counts_as_clipped() -> None:
    """C17: torch has scaled the gradients by zero or NaN, so they are not what they were."""
    for bad in (math.nan, math.inf):
        norm, clipped = clip_gradients_with_monitoring(with_gradients(torch.tensor([1.0, bad])))
        assert not math.isfinite(norm)
        assert clipped is True
    assert clip_gradients_with_monitoring(nn.Linear(1, 1)) == (0.0, False)


@pytest.mark.parametrize("max_norm", [0.25, 1e9])
def test_sparse_gradients_are_clipped_as_dense_ones_are(max_norm: float) -> None:
    """C17: torch refuses them; the twin has the same gradients, dense."""
    sparse, dense = nn.Embedding(9, 3, sparse=True), nn.Embedding(9, 3)
    for model in (sparse, dense):
        model(torch.tensor([1, 1, 5])).sum().backward()
    norm, clipped = clip_gradients_with_monitoring(sparse, max_norm)
    assert norm == pytest.approx(clip_grad_norm_(dense.parameters(), max_norm).item(), rel=1e-6)
    assert clipped is (max_norm < 1)
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)


def test_without_a_limit_the_norm_is_measured_and_nothing_changes() -> None:
    """B6: dense, sparse, none at all, and infinite."""
    for model in (with_gradients(torch.full((9,), 2.0), torch.ones(28).half()), nn.Linear(1, 1)):
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        assert clip_on_device(model, None).item() == pytest.approx(true_norm(model))
        after = [p.grad for p in model.parameters() if p.grad is not None]
        assert all(map(torch.equal, before, after))
    model = with_gradients(torch.tensor([1.0, math.inf]))
    assert clip_on_device(model, None).item() == math.inf
    assert model[0].grad.tolist() == [1.0, math.inf]
    sparse = with_gradients(torch.eye(3).to_sparse() * 5)
    assert clip_on_device(sparse, None).item() == pytest.approx(5 * math.sqrt(3))
    assert sparse[0].grad.to_dense().tolist() == (torch.eye(3) * 5).tolist()
