"""Rows measured with plain torch equal plain float64 arithmetic, for any tensor a training can hand over.

The checks return their complaints as sentences: none for the real measurer, some for every planted fault.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import holter
from holter.measuring import is_part
from holter.statistics import cpu_rows as on_cpu
from holter.statistics import measure
from holter.statistics import torch_rows as anywhere
from holter.statistics.blocks import SMALL_MODEL, Make, Pack, Stretch, plan_layout
from holter.statistics.device_rows import DeviceRows
from holter.statistics.histogram import Histograms
from holter.statistics.measure import Measurer, measure_rows, unmeasurable
from holter.statistics.rows import COLUMNS, Rows
from holter.statistics.torch_rows import TorchRows
from tests.rows_contract import CASES, complaints, mixed, normal, numbers_in, sparse_cases, strided_cases, uncoalesced

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state", "ignore:.*quantize")

Measure = Callable[[Sequence[Tensor]], Rows]


def measured(tensors: Sequence[Tensor]) -> Rows:
    return measure_rows(tensors, histograms=True)


@pytest.mark.parametrize("kind", CASES)
def test_rows_equal_a_float64_reference_whatever_the_tensor(kind: str) -> None:
    """P11: every dtype, layout, size and value: counts and extremes exact, sums within 1e-6 of the sum of |terms|."""
    tensors = list(CASES[kind]())
    assert complaints(tensors, measured(tensors)) == []
    assert [one for tensor in tensors[:60] for one in complaints([tensor], measured([tensor]))] == []


def take_care_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices that cannot be asked whether a tensor needs care."""
    monkeypatch.setattr(anywhere, "CpuRows", lambda careful: careful)


@pytest.mark.parametrize("kind", CASES)
def test_rows_measured_with_care_from_the_start_equal_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P11: as on devices other than the CPU."""
    take_care_from_the_start(monkeypatch)
    tensors = list(CASES[kind]())
    assert complaints(tensors, measured(tensors)) == []


def on_host(rows: DeviceRows) -> Rows:
    dense = None if rows.histograms is None else Histograms.from_dense(rows.histograms.numpy())
    return Rows(rows.values.numpy(), dense)


def test_care_is_taken_where_it_is_needed_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with huge, tiny or non-finite values among ordinary ones, on one plan."""
    asked: list[list[int]] = []
    original = anywhere.CarefulRows.measure

    def listen(self: anywhere.CarefulRows, tensors: Sequence[Tensor], histograms: bool) -> DeviceRows:
        asked.append([tensor.numel() for tensor in tensors])
        return original(self, tensors, histograms)

    monkeypatch.setattr(anywhere.CarefulRows, "measure", listen)
    measurer = TorchRows()
    ordinary, odd = [normal(70_000), normal(300), normal(9)], [normal(70_000), normal(300) * 1e20, normal(9)]
    odd[0][5], odd[0][60_000] = torch.nan, 1e30
    for tensors in (ordinary, odd, odd, ordinary, ordinary):
        assert complaints(tensors, on_host(measurer.measure(tensors, True))) == []
    assert asked == [[70_000], [70_000]]


def wrap(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, after: Callable[..., None]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: object, **kwargs: object) -> object:
        result = original(*args, **kwargs)
        after(*args)
        return result

    monkeypatch.setattr(owner, name, wrapped)


def plant_squares_that_overflow(monkeypatch: pytest.MonkeyPatch) -> None:
    take_care_from_the_start(monkeypatch)
    monkeypatch.setattr(anywhere, "_scale_for", lambda largest, scale: scale.fill_(1.0))


def plant_squares_that_overflow_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu._Plan, "sum_again", lambda plan, flat, rows, largest: None)


def plant_padding_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_up(block: anywhere._PlacedBlock, *_: object) -> None:
        block.valid = torch.full_like(block.valid, block._work.shape[1])

    take_care_from_the_start(monkeypatch)
    wrap(monkeypatch, anywhere._PlacedBlock, "__init__", fill_up)


def plant_padding_that_is_not_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    def leave_rubbish(block: anywhere._PlacedBlock, _: list[Tensor]) -> None:
        block._work[block._tails] = block._work[block._tails].masked_fill(block._padding, 0.5)

    take_care_from_the_start(monkeypatch)
    wrap(monkeypatch, anywhere._PlacedBlock, "_copy", leave_rubbish)


def plant_nan_that_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    wrap(monkeypatch, anywhere._PlacedBlock, "_copy", lambda block, flat: block._work.nan_to_num_(nan=0.0))


def plant_implicit_zeros_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_add_implicit_zeros", lambda rows, implicit: None)


def plant_duplicates_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "coalesce", lambda self: self.clone()._coalesced_(True))


def plant_merging_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    def narrow(plan: anywhere._Plan, *_: object) -> None:
        plan._accumulator = torch.float32

    take_care_from_the_start(monkeypatch)
    wrap(monkeypatch, anywhere._Plan, "__init__", narrow)


def plant_sums_that_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(left: np.ndarray, right: np.ndarray, out: np.ndarray) -> None:
        out[:] = np.cumsum(left * right.swapaxes(-1, -2), axis=-1, dtype=out.dtype)[..., -1:]

    monkeypatch.setattr(np, "matmul", one_by_one)


def plant_integers_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu, "_WIDE", (torch.float64,))


def plant_tensors_that_are_never_suspected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_cpu._Plan, "is_sound", lambda plan, largest: np.ones(len(largest), dtype=bool))


def plant_ends_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_ends(sizes: list[tuple[int, int]], in_parallel: bool) -> tuple[list[Stretch], list[Pack]]:
        stretches, packs = plan_layout(sizes, in_parallel)
        whole = [Pack([piece for piece in pack.pieces if not piece.start]) for pack in packs]
        return stretches, [pack for pack in whole if pack.pieces]

    monkeypatch.setattr(on_cpu, "plan_layout", without_ends)


def plant_pieces_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_early(pack: on_cpu._PlacedPack, *_: object) -> None:
        pack._starts[1:] -= 1

    wrap(monkeypatch, on_cpu._PlacedPack, "__init__", begin_early)


def plant_zeros_in_long_tensors_overlooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "count_nonzero", lambda is_zero: 0)


@pytest.mark.parametrize(
    ("plant", "kind"),
    [
        (plant_squares_that_overflow, "extreme"),
        (plant_squares_that_overflow_on_the_cpu, "extreme"),
        (plant_padding_that_counts, "sized"),
        (plant_padding_that_is_not_cleared, "sized"),
        (plant_nan_that_is_dropped, "extreme"),
        (plant_implicit_zeros_forgotten, "sparse"),
        (plant_duplicates_not_added, "sparse"),
        (plant_merging_in_float32, "extreme"),
        (plant_sums_that_drift, "strided"),
        (plant_integers_in_float32, "strided"),
        (plant_tensors_that_are_never_suspected, "extreme"),
        (plant_ends_forgotten, "sized"),
        (plant_pieces_that_overlap, "sized"),
        (plant_zeros_in_long_tensors_overlooked, "sized"),
    ],
)
def test_the_reference_rejects_a_planted_fault(
    plant: Callable[[pytest.MonkeyPatch], None], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P11: the twins of the test above."""
    tensors = list(CASES[kind]())
    plant(monkeypatch)
    assert complaints(tensors, measured(tensors))


@settings(max_examples=200, deadline=None)
@given(
    values=st.lists(st.floats(width=32), min_size=1, max_size=40),
    sizes=st.lists(st.integers(0, 1200), min_size=1, max_size=6),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
)
def test_rows_equal_the_reference_for_any_values_and_sizes(
    values: list[float], sizes: list[int], dtype: torch.dtype
) -> None:
    """P11: found by hypothesis, NaN, Inf and denormals among them."""
    tensors = [torch.tensor(values).repeat(size // len(values) + 1)[:size].to(dtype) for size in sizes]
    assert complaints(tensors, measured(tensors)) == []


def changing_lists() -> list[list[Tensor]]:
    """Lists of tensors as a training that changes hands them over: twenty makes, then the first ones again."""
    lists = [[normal(n), normal(2 * n, 3, seed=1).double(), mixed(70 + n)] for n in range(20)]
    return [*lists, *lists[::-3], [], [normal(9)], [normal(9) + 1]]


def remembers_rightly(measurer: TorchRows) -> bool:
    for tensors in changing_lists():
        rows = measurer.measure(tensors, len(tensors) % 2 == 1)
        if rows.values.shape != (len(tensors), len(COLUMNS)) or complaints(tensors, on_host(rows)):
            return False
    return True


def test_one_measurer_measures_lists_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """P11, P26: a remembered plan is used for lists of its own make only, and not all of them are remembered."""
    measurer = TorchRows()
    assert remembers_rightly(measurer)
    assert len(measurer._on_cpu._plans) <= on_cpu._REMEMBERED_PLANS
    assert len(measurer._anywhere._plans) <= anywhere._REMEMBERED_PLANS

    def by_number(self: on_cpu.CpuRows, tensors: list[Tensor]) -> on_cpu._Plan:  # the planted fault
        makes = [Make(tensor.numel(), tensor.dtype is torch.float64) for tensor in tensors]
        return self._plans.setdefault(len(tensors), on_cpu._Plan(makes))

    monkeypatch.setattr(on_cpu.CpuRows, "_plan_for", by_number)
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        assert remembers_rightly(TorchRows())


def is_repeatable(measure: Measure) -> bool:
    tensors = [normal(9000), normal(SMALL_MODEL + 5, seed=1), mixed(300), normal(700).half()]
    first, second = measure(tensors), measure(tensors)
    return first.values.tobytes() == second.values.tobytes()


def test_measuring_again_gives_the_same_bits() -> None:
    """P2: the order of summing does not change from call to call, nor from measurer to measurer."""
    one = Measurer()
    assert is_repeatable(measured)
    assert is_repeatable(lambda tensors: Rows(one.measure(tensors).values.numpy()))

    def in_any_order(tensors: Sequence[Tensor]) -> Rows:  # the planted fault
        return measured([tensor[torch.randperm(len(tensor))] for tensor in tensors])

    assert not is_repeatable(in_any_order)


def leaves_alone(measure: Callable[[Sequence[Tensor]], object]) -> bool:
    """Whether inputs, their version counters and the random state are as before."""
    tensors = [tensor for cases in (strided_cases, sparse_cases) for tensor in cases()]
    tensors += [normal(700).requires_grad_(), mixed(5000), normal(3, 4).double()]
    before = [(tensor._version, tensor.requires_grad, numbers_in(tensor).tobytes()) for tensor in tensors]
    random = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # noqa: NPY002
    measure(tensors)
    after = [(tensor._version, tensor.requires_grad, numbers_in(tensor).tobytes()) for tensor in tensors]
    same_random = torch.equal(random[0], torch.get_rng_state()) and random[1] == np.random.get_state()[1].tobytes()  # noqa: NPY002
    return before == after and same_random


def test_measuring_leaves_tensors_and_random_numbers_alone() -> None:
    """P2: not a bit of an input, no version counter and no random state changes."""
    assert leaves_alone(measured)
    assert not leaves_alone(lambda tensors: torch.rand(1))
    assert not leaves_alone(lambda tensors: tensors[0].mul_(1))
    assert not leaves_alone(lambda tensors: tensors[-1].data.add_(1))


def test_what_cannot_be_measured_says_why() -> None:
    """P11: unsupported is reported, with a reason, and nothing else is refused."""
    refused = {
        "meta": torch.zeros(3, device="meta"),
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "mkldnn": torch.ones(3).to_mkldnn(),
        "float4_e2m1fn_x2": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "bits8": torch.zeros(4, dtype=torch.uint8).view(torch.bits8),
    }
    for word, tensor in refused.items():
        assert word in (unmeasurable(tensor) or "")
    for cases in CASES.values():
        assert [tensor.dtype for tensor in cases() if unmeasurable(tensor)] == []


def test_a_distributed_tensor_is_measured_by_its_shard() -> None:
    """P11: a DTensor's row is that of the part this process holds; here there is one process, so the whole."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        whole = mixed(60).view(6, 10)
        sharded = distribute_tensor(whole, init_device_mesh("cpu", (1,)), [Shard(0)])
        assert complaints([whole], measured([sharded])) == []
        assert not is_part(sharded), "this process holds all of it, as of a model in fully_shard on one GPU"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("processes", "kind", "expected"), [(2, "shard", True), (2, "replicate", False), (1, "shard", False)]
)
def test_who_holds_a_part_is_known_by_mesh_and_placements(processes: int, kind: str, expected: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard

    placements = (Shard(0) if kind == "shard" else Replicate(),)
    tensor: Any = SimpleNamespace(device_mesh=SimpleNamespace(size=lambda: processes), placements=placements)
    assert is_part(tensor) is expected


@pytest.mark.parametrize("size", [50, 50_000])
def test_a_tensor_that_wraps_others_is_measured_by_its_values(size: int) -> None:
    """P11: a subclass without memory of its own, as quantized and distributed training use them."""
    from torch.testing._internal.two_tensor import TwoTensor

    values = normal(size)
    assert complaints([values], measured([TwoTensor(values, values.clone())])) == []


class Strange(torch.nn.Module):
    """Parameters whose gradients are of every kind at once."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.short = (torch.nn.Parameter(normal(5).to(dtype)) for dtype in (torch.float32, torch.float16))
        self.complex, self.empty = torch.nn.Parameter(torch.ones(4) + 1j), torch.nn.Parameter(torch.zeros(0, 3))
        self.single, self.unused = torch.nn.Parameter(torch.tensor(2.0)), torch.nn.Parameter(torch.ones(2))
        self.table, self.broken = torch.nn.Embedding(9, 4, sparse=True), torch.nn.Parameter(torch.ones(3))
        self.meta = torch.nn.Parameter(torch.ones(3, device="meta"))


def test_a_step_with_every_kind_of_gradient_is_recorded_whole() -> None:
    """P11: each gradient has its row, the one that cannot be read is reported, none is missing without a word."""

    class Still(torch.optim.SGD):
        """Holds everything and steps with nothing: not all of these could be stepped."""

        def step(self, closure: object = None) -> None:  # type: ignore[override]
            return None

    model = Strange()
    optimizer = Still(model.parameters(), lr=0.0)
    with holter.watch(model, optimizer, run=False, budget=None) as monitor:
        for parameter in (model.plain, model.short, model.complex, model.empty, model.single, model.meta):
            parameter.grad = torch.full_like(parameter, 2)
        model.table.weight.grad = uncoalesced()
        model.broken.grad = torch.tensor([torch.nan, torch.inf, 1.0])
        optimizer.step()
        steps, layers, counts = monitor.history.series("gradient", "count")
        nonfinite = monitor.history.series("gradient", "nonfinite")[2]
        told = [finding for finding in monitor.findings if "meta" in str(finding)]
    assert steps.tolist() == [0]
    row = dict(zip(layers, counts[0].tolist(), strict=True))
    assert row == {"plain": 5, "short": 5, "complex": 8, "empty": 0, "single": 1, "table.weight": 36, "broken": 3}
    assert dict(zip(layers, nonfinite[0].tolist(), strict=True))["broken"] == 2
    assert told
