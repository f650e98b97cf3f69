"""Batches: the tensors in them, how much they hold, a hash of every bit, the entropy of their labels."""

from __future__ import annotations

import math
import zlib
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import holter
from holter.batch import Amount, measurable_in, samples_in, tensors_in, tokens_in
from holter.statistics import content
from holter.statistics.content import content_hashes, contents, label_entropy
from tests.models import mlp


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hash_of(tensor: Tensor) -> float:
    return float(content_hashes([tensor])[0])


# The tensors of a batch -----------------------------------------------------------------------------------------


@dataclass
class Example:
    image: Tensor
    caption: str = "a heron"
    mask: Tensor | None = None


Pair = namedtuple("Pair", ["first", "second"])
X, Y = torch.zeros(4, 3), torch.ones(4)


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (X, ["inputs"]),
        ((X, Y), ["inputs/0", "inputs/1"]),
        ([X, (Y, {"z": X})], ["inputs/0", "inputs/1/0", "inputs/1/1/z"]),
        ({"input_ids": X, "labels": Y}, ["inputs/input_ids", "inputs/labels"]),
        (UserDict(input_ids=X), ["inputs/input_ids"]),  # as the BatchEncoding of transformers
        (Example(X, mask=None), ["inputs/image"]),
        (Pair(X, Y), ["inputs/first", "inputs/second"]),
        ({"text": ["a", "b"], "none": None, 3: X, "length": 7}, ["inputs/3"]),
        ({1: X, "1": Y}, ["inputs/1"]),  # one name, one row
        (np.zeros((2, 2)), ["inputs"]),
        ({"words": np.array(["a", "b"]), "numbers": np.arange(3)}, ["inputs/numbers"]),
        ("text", []),
        (None, []),
        (Example, []),
        (list(range(1_000_000)), []),
    ],
)
def test_tensors_are_found_by_their_path(batch: Any, names: list[str]) -> None:
    assert list(tensors_in(batch, "inputs")) == names


def test_a_packed_sequence_is_its_parts() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    assert list(tensors_in(packed, "inputs"))[:2] == ["inputs/data", "inputs/batch_sizes"]


def test_a_batch_that_holds_itself_ends() -> None:
    batch: list[Any] = []
    batch += [batch, batch]
    assert tensors_in(batch) == {} and samples_in(batch) is None


def test_arrays_that_torch_would_warn_of_are_copied() -> None:
    """Warnings are errors in these tests."""
    frozen = np.arange(6.0)
    frozen.flags.writeable = False
    (backwards,) = tensors_in(np.arange(6.0)[::-1]).values()
    assert tensors_in(frozen)[""].tolist() == list(range(6)) and backwards.tolist() == list(range(6))[::-1]
    shared = np.arange(6.0)
    shared[0] = 9.0
    assert tensors_in(shared)[""].data_ptr() == shared.ctypes.data


def test_what_cannot_be_measured_is_told_only_where_nothing_else_is_there() -> None:
    meta = torch.empty(3, device="meta")
    assert measurable_in({"a": meta, "b": X}, "inputs") == ({"inputs/b": X}, "")
    assert measurable_in(meta, "inputs") == ({}, "it is on the meta device and holds no values")
    assert measurable_in(["text"], "inputs") == ({}, "no tensor was found in it")


# How much it holds ----------------------------------------------------------------------------------------------

IDS, IMAGES, LABELS = torch.zeros(4, 7, dtype=torch.int64), torch.zeros(6, 3, 8, 8), torch.zeros(6, dtype=torch.int64)
MANY_HOT = torch.zeros(6, 10, dtype=torch.int64)


@pytest.mark.parametrize(
    ("batch", "samples", "tokens"),
    [
        (IMAGES, 6, None),
        ((IMAGES, LABELS), 6, None),
        ([LABELS, IMAGES], 6, None),
        ((IMAGES, MANY_HOT), 6, None),  # labels of several classes are no tokens
        ({"labels": MANY_HOT, "pixel_values": IMAGES}, 6, None),
        (IDS, 4, 28),
        ((IDS, IDS[:, :3]), 4, 28),
        (OrderedDict(index=LABELS[:4], input_ids=IDS.int(), attention_mask=IDS), 4, 28),
        ({"attention_mask": torch.zeros(4, 7), "input_ids": IDS, "position": torch.arange(7)}, 4, 28),
        ({"step": torch.tensor(3), "nested": {"ids": (IDS,)}}, 4, 28),
        ((IDS, torch.zeros(4, 9)), 4, None),  # beside other content it may be anything
        (torch.zeros(5, 9, dtype=torch.uint8), 5, None),  # bytes of an image
        (torch.zeros(0, 7, dtype=torch.int64), 0, 0),
        ((IMAGES, torch.zeros(5)), None, None),  # which of the two?
        ([torch.zeros(3, 8, 8), torch.zeros(3, 9, 7)], None, None),  # images, each by itself
        (torch.tensor(1), None, None),
        ("text", None, None),
        (None, None, None),
        (list(range(1_000_000)), None, None),
    ],
)
def test_how_much_a_batch_holds(batch: Any, samples: int | None, tokens: int | None) -> None:
    """E12."""
    assert (samples_in(batch), tokens_in(batch)) == (samples, tokens)


def test_amounts_add_up_and_what_is_not_known_stays_unknown() -> None:
    assert Amount(1, 8, 80) + Amount(1, 4, 40) == Amount(2, 12, 120)
    assert Amount(1, 8, None) + Amount(2, None, 40) == Amount(3, None, None)


# The hash -------------------------------------------------------------------------------------------------------


def multipliers(count: int) -> np.ndarray:
    """SplitMix64 in Python's own integers, made odd."""
    found, mask = [], 2**64 - 1
    for i in range(1, count + 1):
        z = i * 0x9E3779B97F4A7C15 & mask
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        found.append((z ^ z >> 31) | 1)
    return np.array(found, dtype=np.uint64)


def sums(words: np.ndarray, odd: np.ndarray) -> np.ndarray:
    rows = [words[start : start + odd.size] for start in range(0, words.size, odd.size)]
    return np.array([(row * odd[: row.size]).sum() for row in rows], dtype=np.uint64)


def reference(tensor: Tensor) -> int:
    """The hash of a strided real tensor, by numpy's unsigned integers over its bytes."""
    odd = multipliers(1 << 14)
    data = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    words = np.frombuffer(data + bytes(-len(data) % 4), dtype="<i4").astype(np.int64).astype(np.uint64)
    words = sums(words, odd)
    while words.size > 1:
        words = sums(words, odd)
    golden = 0x9E3779B97F4A7C15
    make = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}".encode())
    total = golden * (2 * make + 1) + golden * int(words.sum() if words.size else 0)
    return (total % 2**64) >> 11


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", [0, 1, 3, 5, 4096, 16384, 16385, 70_001])
def test_the_hash_is_that_of_a_reference(dtype: torch.dtype, size: int) -> None:
    tensor = (normal(size) * 100).to(dtype)
    assert hash_of(tensor) == reference(tensor) < 2**53


def test_the_hash_is_the_same_in_every_run_and_version() -> None:
    """Runs are compared by it: a change of the algorithm is a change of the format."""
    assert hash_of(torch.arange(1000, dtype=torch.int64)) == 8_836_465_935_399_587


def one_bit(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8).view(-1)[-3] ^= 0x10
    return changed


def swapped(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    flat = changed.view(-1)
    flat[[5, 40_000]] = flat[[40_000, 5]]
    return changed


def rows_swapped(tensor: Tensor) -> Tensor:
    """Stretches of the length that the hash sums up first."""
    changed = tensor.clone().view(-1)
    first, second = changed[:16384].clone(), changed[16384:32768].clone()
    changed[:16384], changed[16384:32768] = second, first
    return changed.view(tensor.shape)


def two_signs(tensor: Tensor) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[[10, 20]] *= -1
    return changed


CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "one bit": one_bit,
    "two elements swapped": swapped,
    "two rows swapped": rows_swapped,
    "two signs": two_signs,
    "all signs": lambda tensor: -tensor,
    "the order": lambda tensor: tensor.flip(0),
    "the samples' order": lambda tensor: tensor[
        torch.randperm(len(tensor), generator=torch.Generator().manual_seed(0))
    ],
    "the same bytes in another shape": lambda tensor: tensor.reshape(128, 500),
    "the same bytes, taken for a transposed tensor": lambda tensor: tensor.reshape(tensor.t().shape),
    "the same bytes in another dtype": lambda tensor: tensor.view(torch.int32),
    "a sample less": lambda tensor: tensor[:-1],
    "a sample of zeros more": lambda tensor: torch.cat([tensor, torch.zeros(1, 640)]),
    "shifted by one": lambda tensor: tensor.view(-1).roll(1).view(tensor.shape),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_changes_the_hash(change: str) -> None:
    tensor = normal(100, 640)
    assert hash_of(CHANGES[change](tensor)) != hash_of(tensor)


def test_a_sum_of_values_would_not_see_these_changes() -> None:
    """The planted fault: what rows can tell is not enough."""
    tensor = normal(100, 640).to(torch.float64)
    same = [change for change in CHANGES.values() if float(change(tensor).double().sum()) == float(tensor.sum())]
    assert len(same) >= 3


def test_values_that_compare_equal_or_not_at_all_are_told_apart_by_their_bits() -> None:
    zero, nan = torch.zeros(8), torch.full((8,), torch.nan)
    assert hash_of(zero) != hash_of(-zero) and hash_of(nan) == hash_of(nan.clone()) != hash_of(-nan)


def test_every_bit_counts() -> None:
    tensor = normal(50_000)
    bits = tensor.view(torch.int32)
    found = {hash_of(tensor)}
    for place in torch.randint(50_000, (150,), generator=torch.Generator().manual_seed(1)).tolist():
        bit = place % 32
        bits[place] ^= 1 << bit if bit < 31 else -(1 << 31)
        found.add(hash_of(tensor))
    assert len(found) == 151


def test_small_batches_of_small_numbers_do_not_collide() -> None:
    pairs = [torch.tensor(pair) for a in range(100) for pair in ((a, b) for b in range(100))]
    assert len(set(content_hashes(pairs).tolist())) == len(pairs)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed twice": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "channels last": lambda t: t.to(memory_format=torch.channels_last),
    "part of a larger one": lambda t: torch.cat([t, t], dim=3)[..., : t.size(3)],
    "at an odd place": lambda t: torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape),
    "with a gradient": lambda t: t.clone().requires_grad_() if t.is_floating_point() or t.is_complex() else t,
    "negated twice, lazily": lambda t: torch._neg_view(-t) if t.is_floating_point() else t,
    "made in inference mode": lambda t: _in_inference_mode(t),
}


def _in_inference_mode(tensor: Tensor) -> Tensor:
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8, torch.bool, torch.complex64, torch.int64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_content_has_the_same_hash_wherever_it_lies(layout: str, dtype: torch.dtype) -> None:
    tensor = (normal(5, 3, 61, 41) * 10).to(dtype)
    laid = LAYOUTS[layout](tensor)
    assert torch.equal(laid, tensor)
    assert float(contents([laid], [False])[0, 0]) == hash_of(tensor)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32, torch.float16, torch.uint8])
def test_a_column_of_a_matrix_is_like_any_line(dtype: torch.dtype) -> None:
    """As the labels of `targets=tokens[:, 0]`: one dimension, and yet not in one piece."""
    matrix = (normal(700, 3) * 10).to(dtype)
    assert hash_of(matrix[:, 1]) == hash_of(matrix[:, 1].clone())


def test_an_expanded_tensor_is_what_it_shows() -> None:
    one = normal(1, 40_000)
    assert hash_of(one.expand(3, -1)) == hash_of(one.repeat(3, 1))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_sparse_tensors_are_hashed_as_they_are_stored() -> None:
    dense = normal(30, 40).relu()
    changed = dense.clone()
    changed[dense > 0] += 1
    for form in (lambda t: t.to_sparse(), lambda t: t.to_sparse_csr(), lambda t: t.to_sparse_csc()):
        assert hash_of(form(dense)) == hash_of(form(dense)) != hash_of(form(changed))
        assert hash_of(form(dense)) != hash_of(form(dense.flip(0)))


# On the device --------------------------------------------------------------------------------------------------


def test_nothing_reads_a_value_on_the_training_thread() -> None:
    """P5 without a GPU: on the meta device there are no values, and whoever asks for one fails."""
    dtypes = (torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.bfloat16)
    tensors = [torch.empty(65, 999, dtype=dtype, device="meta") for dtype in dtypes]
    content._multipliers.cache_clear()
    assert contents([*tensors, tensors[1].t()], [True] * 7).shape == (7, 2)
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.unique(tensors[1])  # the planted fault: it has to know how many there are


class Largest(TorchDispatchMode):
    """The largest new memory that any operation asks for."""

    def __init__(self, given: Tensor) -> None:
        super().__init__()
        self.bytes, self._given = 0, given.untyped_storage().data_ptr()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.untyped_storage().data_ptr() != self._given:
            self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
def test_no_large_temporary_is_made(layout: str) -> None:
    tensor = normal(64, 3, 64, 64)
    if layout == "channels last":
        tensor = tensor.to(memory_format=torch.channels_last)
    hash_of(tensor)  # makes the table of multipliers
    with Largest(tensor) as largest:
        hash_of(tensor)
    assert 0 < largest.bytes <= 1 << 18 < tensor.nbytes / 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_the_same_and_is_not_waited_for() -> None:
    """P5: hash and entropy, against the CPU's."""
    integers = torch.randint(0, 40_000, (64, 1025), generator=torch.Generator().manual_seed(0))
    tensors = [normal(64, 3, 300, 301), integers[:, :-1], normal(77).bfloat16(), integers % 7 == 0, integers.byte()]
    tensors += [torch.zeros(0), normal(999, 3).to(torch.complex64), normal(8, 3, 64, 64).contiguous().half()]
    tensors += [normal(8, 3, 65, 64).to(memory_format=torch.channels_last)]
    are_labels = [True] * len(tensors)
    there = [tensor.cuda() for tensor in tensors]
    contents(there, are_labels)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = contents(there, are_labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = contents(tensors, are_labels)
    assert found[:, 0].cpu().equal(expected[:, 0])
    np.testing.assert_allclose(found[:, 1].cpu().numpy(), expected[:, 1].numpy(), rtol=1e-5)


# Labels ---------------------------------------------------------------------------------------------------------


def entropy(labels: np.ndarray) -> float:
    """By numpy: of the shares of all classes."""
    _, counts = np.unique(labels, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def labels(kind: str) -> np.ndarray:
    random = np.random.default_rng(0)
    return {
        "ten classes": lambda: random.integers(0, 10, 64),
        "one class": lambda: np.full(64, 3),
        "all different": lambda: np.arange(100),
        "a language's tokens": lambda: (random.zipf(1.3, (64, 1024)) - 1) % 50_257,
        "up to the table's size": lambda: random.integers(0, 65_536, 10_000),
        "bytes": lambda: random.integers(0, 256, (9, 99)).astype(np.uint8),
        "two classes": lambda: random.random(1000) < 0.1,
        "small integers": lambda: random.integers(0, 5, (2, 3, 4)).astype(np.int16),
    }[kind]()


KINDS = ("ten classes", "one class", "all different", "a language's tokens", "up to the table's size", "bytes")


def entropies(labels: Tensor) -> list[float]:
    """As it is found on the host, and by what runs on other devices."""
    return [float(label_entropy(labels)), float(content._entropy_on_device(labels, 1))]


@pytest.mark.parametrize("kind", [*KINDS, "two classes", "small integers"])
def test_the_entropy_is_numpys(kind: str) -> None:
    found = labels(kind)
    assert entropies(torch.from_numpy(found)) == pytest.approx([entropy(found)] * 2, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", ["ten classes", "a language's tokens"])
def test_labels_that_the_loss_ignores_are_left_out(kind: str) -> None:
    found = labels(kind)
    ignored = np.where(np.random.default_rng(1).random(found.shape) < 0.4, -100, found)
    truth = entropy(ignored[ignored >= 0])
    assert entropies(torch.from_numpy(ignored)) == pytest.approx([truth] * 2)
    assert abs(truth - entropy(ignored)) > 0.05  # with them it would be another


def test_without_labels_there_is_no_entropy() -> None:
    for none in (torch.full((8,), -100), torch.zeros(0, dtype=torch.int64)):
        assert all(map(math.isnan, entropies(none)))


def test_of_very_many_labels_some_are_counted() -> None:
    found = np.random.default_rng(0).choice(5, size=(4, 512, 512), p=[0.6, 0.2, 0.1, 0.05, 0.05])
    counted = float(label_entropy(torch.from_numpy(found)))
    assert counted == pytest.approx(entropy(found), rel=0.01) and counted != pytest.approx(entropy(found), rel=1e-9)


def test_classes_are_told_apart_up_to_65_536() -> None:
    near, far = torch.tensor([0, 65_535]), torch.tensor([0, 65_536])
    assert entropies(near) == pytest.approx([math.log(2)] * 2) and entropies(far) == [0, 0]


def test_only_whole_numbers_called_labels_have_an_entropy() -> None:
    whole, real = torch.tensor([0, 1, 1, 0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    found = contents([whole, whole, real], [True, False, True])[:, 1]
    assert found[0] == pytest.approx(math.log(2)) and found[1:].isnan().all()


# As a role of a step --------------------------------------------------------------------------------------------


def watched(**options: Any) -> tuple[holter.Monitor, Callable[..., None]]:
    """A monitor, and a step that logs."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    monitor = holter.watch(model, optimizer, **{"run": False, "budget": None, **options})

    def step(**logged: Any) -> None:
        model(torch.ones(4, 12)).sum().backward()
        monitor.log(**logged)
        optimizer.step()
        optimizer.zero_grad()

    return monitor, step


def test_a_dictionary_is_measured_and_stored(tmp_path: Path) -> None:
    monitor, step = watched(run=tmp_path / "run")
    ids, targets = torch.arange(40).view(4, 10), torch.tensor([0, 0, 1, -100])
    for _ in range(3):
        step(inputs={"input_ids": ids, "text": ["a"] * 4, "labels": targets}, targets=targets)
    monitor.close()
    assert monitor.findings == ()
    history = holter.open_run(tmp_path / "run").history
    steps, layers, sizes = history.series("batch", "size")
    assert layers == ("inputs/input_ids", "inputs/labels", "targets") and steps.tolist() == [0, 1, 2]
    assert (sizes == 4).all()
    hashes = history.series("batch", "hash")[2]
    assert hashes.tolist() == [content_hashes([ids, targets, targets]).tolist()] * 3
    truth = entropy(np.array([0, 0, 1]))
    np.testing.assert_allclose(history.series("batch", "label_entropy")[2], [[np.nan, truth, truth]] * 3, rtol=1e-6)
    assert history.series("batch", "mean")[2][0, 0] == pytest.approx(19.5)


ODD: dict[str, Callable[[], Any]] = {
    "bool": lambda: torch.ones(4, 3, dtype=torch.bool),
    "bytes": lambda: torch.ones(4, 3, dtype=torch.uint8),
    "half": lambda: torch.ones(4, 3, dtype=torch.float16),
    "bfloat16": lambda: torch.ones(4, 3, dtype=torch.bfloat16),
    "float8": lambda: torch.ones(4, 3).to(torch.float8_e4m3fn),
    "complex": lambda: torch.ones(4, 3, dtype=torch.complex64).conj(),
    "sparse": lambda: torch.eye(4).to_sparse(),
    "empty": lambda: torch.zeros(0, 3),
    "a number": lambda: torch.tensor(3),
    "with a gradient": lambda: torch.ones(4, 3, requires_grad=True),
    "an array": lambda: np.ones((4, 3)),
    "unsigned": lambda: torch.ones(4, 3).to(torch.uint16),
    "with what has no values": lambda: {"a": torch.ones(4), "b": torch.empty(4, device="meta"), "c": "text", "d": None},
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_batches_are_measured_without_a_word(kind: str) -> None:
    """P11: warnings are errors in these tests."""
    monitor, step = watched()
    step(inputs=ODD[kind](), targets=ODD[kind]())
    _, layers, hashes = monitor.history.series("batch", "hash")
    assert monitor.findings == () and len(layers) == 2 and np.isfinite(hashes).all()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.*are deprecated:UserWarning")
@pytest.mark.parametrize(
    ("batch", "told"),
    [
        (lambda: ["a", "b"], "no tensor was found"),
        (lambda: None, "no tensor was found"),
        (lambda: torch.empty(3, device="meta"), "meta device"),
        (lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "quantized"),
    ],
)
def test_a_batch_without_anything_measurable_is_told_once(batch: Callable[[], Any], told: str) -> None:
    monitor, step = watched()
    step(inputs=batch(), loss=1.0)
    step(inputs=batch(), loss=2.0)
    assert [told in finding.advice for finding in monitor.findings] == [True]
    assert monitor.history.scalar("loss")[1].tolist() == [1, 2] and monitor.history.roles.count("batch") == 0


def test_a_batch_of_very_many_tensors_is_measured_in_part_and_told() -> None:
    monitor, step = watched()
    step(inputs=[torch.ones(2)] * 40)
    assert len(monitor.history.layers("batch")) == 32
    assert "first 32" in " ".join(finding.advice for finding in monitor.findings)


def test_hashes_are_left_out_where_the_budget_does_not_allow_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from holter.budget import Budget

    monkeypatch.setattr(Budget, "affords", lambda self, kind: not kind.startswith("batch contents"))
    monitor, step = watched()
    step(inputs=X, targets=Y)
    history = monitor.history
    assert np.isnan(history.series("batch", "hash")[2]).all() and history.series("batch", "size")[2].tolist() == [
        [4, 4]
    ]
    assert "batch/repeated" not in history.scalars and np.isfinite(history.series("batch", "norm")[2]).all()


def test_measuring_changes_nothing_in_the_batch() -> None:
    tensor = normal(64, 100)
    before = tensor.clone()
    contents([tensor], [True])
    assert torch.equal(tensor, before)
