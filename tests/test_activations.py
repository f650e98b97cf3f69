"""Activations of armed steps, against plain torch in float64; the training does not notice (P1 P2 P3 P7 P27)."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from holter import activations
from holter.activations import ActivationCapture, Activations
from holter.attention import first_floating
from holter.problems import Problems
from holter.statistics.activation import SIGNALS, Bounds, Window, effective_rank, measure_signals, sample, strided
from holter.statistics.device_rows import DeviceRows
from holter.statistics.measure import Measurer, measure_rows


def watch(model: nn.Module, **options: Any) -> ActivationCapture:
    return ActivationCapture(model, Problems(lambda problem: None), Measurer().measure, **options)


def problems_of(capture: ActivationCapture) -> list[str]:
    return [problem.what for problem in capture._problems]


def armed(model: nn.Module, *inputs: Any, **options: Any) -> Activations:
    """What one armed training forward and backward shows."""
    capture = watch(model, **options)
    capture.arm()
    output = first_floating(model(*inputs))
    assert output is not None
    output.sum().backward()
    found = capture.collect()
    assert found is not None and problems_of(capture) == []
    return found


def signal(found: Activations, layer: str, name: str) -> float:
    for part in found.parts:
        if layer in part.layers:
            return float(part.signals[part.layers.index(layer), SIGNALS.index(name)])
    raise KeyError(layer)


@contextlib.contextmanager
def outputs_of(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The test's own capture: the first output of every module, float64."""
    kept: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, args: Any, output: Any) -> None:
        y = output[0] if isinstance(output, tuple) else output
        if isinstance(y, Tensor) and y.is_floating_point():
            kept.setdefault(name or "model", y.detach().clone().double())

    handles = [module.register_forward_hook(partial(keep, name)) for name, module in model.named_modules()]
    yield kept
    for handle in handles:
        handle.remove()


def reference(y: Tensor, unit_dim: int) -> dict[str, float]:
    """The signals by eigenvalues and loops, of a small activation."""
    flat = y.movedim(unit_dim, -1).reshape(-1, y.shape[unit_dim])
    values = torch.linalg.eigvalsh(torch.cov(flat.T)).clamp(min=0)
    return {
        "dead": sum(bool((unit == 0).all()) for unit in flat.T) / flat.shape[1],
        "near_overflow": 0.0,
        "rank": float(values.sum() ** 2 / values.square().sum()) if values.sum() > 0 else 0.0,
        "spread": float((flat - flat.mean(0)).square().sum() / flat.square().sum()),
    }


# Models -------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.1), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * 3 * 3, 4)),
    )


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7, num_layers=2, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (9, 6)),
    "cnn": (cnn, (5, 3, 15, 15)),
    "lstm": (Classifier, (4, 6, 5)),
    "encoder": (encoder, (3, 5, 16)),
}


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return build(), torch.randn(*shape)


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_what_plain_torch_says(name: str) -> None:
    model, x = make(name)
    with outputs_of(model) as kept:
        found = armed(model, x)
    assert len(found.parts) == 1 and found.parts[0].layers == found.order
    rows = found.parts[0].rows.values.double()
    for place, layer in enumerate(found.order):
        y = kept[layer]
        assert torch.allclose(rows[place], torch.as_tensor(measure_rows([y]).values[0]), rtol=1e-4, atol=1e-4), layer
        if y.ndim < 4:  # small enough for the sample to be all of it
            for one, value in reference(y, y.ndim - 1).items():
                assert signal(found, layer, one) == pytest.approx(value, rel=1e-4, abs=1e-6), (layer, one)
        else:
            assert found.parts[0].units[place] == y.shape[1]
            assert signal(found, layer, "dead") == reference(y, 1)["dead"]


def test_layers_come_in_the_order_in_which_they_ran() -> None:
    model, x = make("encoder")
    found = armed(model, x)
    first = ["layers.0.self_attn", "layers.0.norm1", "layers.0.linear1", "layers.0.linear2", "layers.0.norm2"]
    names = [*first, "layers.0"]
    assert found.order == (*names, *(name.replace(".0", ".1") for name in names))
    assert found.blocks == {"layers.0", "layers.1"} and set(found.attention) == {names[0], "layers.1.self_attn"}
    assert found.parts[0].calls == (1,) * 12


def test_the_lstm_is_seen_by_its_sequence_and_a_packed_one_too() -> None:
    model, x = make("lstm")
    assert armed(model, x).parts[0].units == (7, 3)
    lstm = nn.LSTM(5, 7)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 4, 2, 1]), batch_first=True)
    found = armed(lstm, packed)
    assert found.order == ("model",) and found.parts[0].rows.values[0, 0] == 13 * 7


def test_units_of_convolutions_are_channels_and_those_of_their_activation_too() -> None:
    sequence = nn.Sequential(nn.Conv1d(3, 5, 3), nn.ReLU(), nn.Linear(22, 9), nn.GELU())
    assert armed(sequence, torch.randn(8, 3, 24)).parts[0].units == (5, 5, 9, 9)
    last = nn.Sequential(nn.Linear(6, 9), nn.GELU())  # channels last, as in ConvNeXt
    assert armed(last, torch.randn(2, 4, 4, 6)).parts[0].units == (9, 9)
    assert armed(nn.ReLU(), torch.randn(2, 3, 4, 4, requires_grad=True)).parts[0].units == (3,)


# Faults that must be plain ------------------------------------------------------------------------------------


def test_a_dead_layer_a_saturated_one_and_one_near_overflow_are_plain() -> None:
    model, x = make("mlp")
    healthy = armed(model, x)
    assert signal(healthy, "1", "dead") < 0.5 and signal(healthy, "4", "saturated") == 0
    assert math.isnan(signal(healthy, "1", "saturated"))
    with torch.no_grad():
        model[0].bias.fill_(-100.0)  # type: ignore[union-attr, operator]
        model[3].bias.fill_(9.0)  # type: ignore[union-attr, operator]
    sick = armed(model, x)
    assert signal(sick, "1", "dead") == 1.0 and signal(sick, "4", "saturated") == 1.0
    assert signal(sick, "1", "rank") == 0.0 and signal(sick, "3", "spread") == 0.0
    scale = nn.Linear(2, 2, bias=False).half()
    with torch.no_grad():
        scale.weight.copy_(torch.tensor([[32752.0, 0.0], [32736.0, 0.0]]))
    assert signal(armed(scale, torch.ones(3, 2).half()), "model", "near_overflow") == 0.5


@pytest.mark.parametrize(
    ("module", "saturated"),
    [
        (nn.Tanh(), lambda y: y.abs() >= 0.98),
        (nn.Softsign(), lambda y: y.abs() >= 0.98),
        (nn.Sigmoid(), lambda y: (y <= 0.01) | (y >= 0.99)),
        (nn.Hardsigmoid(), lambda y: (y <= 0.01) | (y >= 0.99)),
        (nn.Hardtanh(-2.0, 1.0), lambda y: (y <= -1.97) | (y >= 0.97)),
        (nn.ReLU6(), lambda y: y >= 5.88),
    ],
)
def test_saturation_follows_the_bounds(module: nn.Module, saturated: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = (torch.randn(40, 30) * 30).requires_grad_()
    expected = float(saturated(module(x).double()).double().mean())
    assert 0 < expected < 1
    assert signal(armed(module, x), "model", "saturated") == pytest.approx(expected, rel=1e-6)


def test_a_unit_is_dead_over_a_window_only_if_it_was_in_every_step_of_it() -> None:
    window = Window(2)
    assert window.add({"a": torch.tensor([True, False, False, False])}) == {}
    shares = window.add({"a": torch.tensor([False, True, False, False]), "b": torch.tensor([True])})
    assert {name: float(share) for name, share in shares.items()} == {"a": 0.5}
    assert float(window.add({"a": torch.tensor([False, False, False, False])})["a"]) == 0.75
    assert window.add({"a": torch.tensor([True, True])}) == {}  # other units: it starts anew
    with pytest.raises(ValueError, match="at least 1"):
        Window(0)


# Arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_every_dtype_has_its_own_largest_value(dtype: torch.dtype) -> None:
    half = torch.finfo(dtype).max / 2
    y = torch.tensor([[half, -half], [half / 4, 0.0]], dtype=torch.float64).to(dtype)
    values = dict(zip(SIGNALS, measure_signals(y, 1).values.tolist(), strict=True))
    assert values["near_overflow"] == 0.5 and values["dead"] == 0.0


def test_not_a_number_is_neither_dead_nor_hidden() -> None:
    y = torch.tensor([[0.0, math.nan, 0.0], [0.0, 0.0, math.inf]])
    found = measure_signals(y, 1, Bounds(-1.0, 1.0))
    assert found.alive.tolist() == [False, True, True]
    values = dict(zip(SIGNALS, found.values.tolist(), strict=True))
    assert math.isnan(values["rank"]) and values["near_overflow"] == pytest.approx(1 / 6)


def test_a_large_tensor_in_pieces_counts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.randn(50, 7, 11).tanh()
    whole = measure_signals(y, 2, Bounds(-1.0, 1.0)).values
    monkeypatch.setattr("holter.statistics.activation._PIECE", 100)
    assert torch.equal(measure_signals(y, 2, Bounds(-1.0, 1.0)).values, whole)


@pytest.mark.parametrize("directions", [1, 3, 8])
def test_the_rank_is_the_number_of_equal_directions(directions: int) -> None:
    torch.manual_seed(0)
    rows = torch.linalg.qr(torch.randn(64, 64, dtype=torch.float64))[0]
    rows = rows - rows.mean(0)
    left = torch.linalg.qr(rows)[0][:, :directions]
    left = torch.linalg.qr(left - left.mean(0))[0]
    x = left @ torch.linalg.qr(torch.randn(32, 32, dtype=torch.float64))[0][:directions]
    assert float(effective_rank(x)[0]) == pytest.approx(directions, rel=1e-6)
    assert float(effective_rank(1e30 * x.float())[0]) == pytest.approx(directions, rel=1e-3)


@pytest.mark.parametrize("shape", [(1, 1000, 300), (512, 4, 40), (8, 1024, 16), (2, 600), (3, 5, 7, 9, 11)])
def test_the_sample_is_small_fixed_and_from_everywhere(shape: tuple[int, ...]) -> None:
    y = torch.arange(math.prod(shape), dtype=torch.float64).view(shape)
    taken = sample(y, len(shape) - 1, 256, 256)
    rows = math.prod(shape[:-1])
    assert min(rows, 100) <= taken.shape[0] <= 256 and taken.shape[1] == min(shape[-1], 256)
    assert taken.unique().numel() == taken.numel() and torch.equal(taken, sample(y, len(shape) - 1, 256, 256))
    for size in range(1, 70):
        places = list(range(size))[strided(size, 8)]
        assert len(places) == min(size, 8) and abs(places[0] - (size - 1 - places[-1])) <= 1


# Outputs of any make ------------------------------------------------------------------------------------------


@dataclass
class Answer:
    name: str
    ids: Tensor
    hidden: Tensor


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "dataclass", "nested"])
def test_the_first_floating_tensor_is_found_in_any_output(kind: str) -> None:
    ids, y = torch.arange(3), torch.randn(3, 4)
    made: dict[str, Any] = {
        "tuple": (ids, y),
        "list": [None, y, ids],
        "dict": {"ids": ids, "y": y},
        "dataclass": Answer("a", ids, y),
        "nested": ({"a": [ids, (y,)]}, torch.zeros(1)),
    }
    assert first_floating(made[kind]) is y
    assert first_floating((ids, "text", None)) is None


def test_an_output_that_holds_itself_is_left_alone() -> None:
    loop: list[Any] = []
    loop.append(loop)
    assert first_floating(loop) is None


class Asks(nn.Module):
    """A block whose output is a dataclass, and which asks one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Answer:
        return Answer("x", torch.arange(3), self.layer(self.layer(x)))


class Answers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Asks(), Asks()])

    def forward(self, x: Tensor) -> dict[str, Any]:
        for block in self.blocks:
            x = block(x).hidden
        return {"loss": x.sum(), "logits": x}


def test_the_first_call_of_a_shared_layer_stands_and_calls_are_counted() -> None:
    model = Answers()
    x = torch.randn(3, 4)
    with outputs_of(model) as kept:
        found = armed(model, x)
    assert found.order == ("blocks.0.layer", "blocks.0", "blocks.1.layer", "blocks.1")
    assert found.parts[0].calls == (2, 1, 2, 1) and found.blocks == {"blocks.0", "blocks.1"}
    assert float(found.parts[0].rows.values[0, 5]) == pytest.approx(float(kept["blocks.0.layer"].sum()), abs=1e-5)


def test_micro_batches_are_counted_and_the_first_stands() -> None:
    model, x = make("mlp")
    capture = watch(model)
    capture.arm()
    with outputs_of(model) as kept:
        for part in (x, 2 * x, 3 * x):
            model(part).sum().backward()
    found = capture.collect()
    assert found is not None and found.parts[0].calls == (3,) * 5
    assert float(found.parts[0].rows.values[0, 5]) == pytest.approx(float(kept["0"].sum()), abs=1e-5)


def test_weight_norm_is_part_of_its_layer_and_selection_is_the_users() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Dropout(0.5))
    x = torch.randn(2, 4)
    assert armed(model, x).order == ("0",)
    assert armed(model, x, selected=lambda name, module: isinstance(module, nn.Dropout)).order == ("1",)


# P27: counted once --------------------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False), nn.ReLU()) for _ in range(3)
        )
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.how) if self.how else block(x)
        return x


def _save_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "reentrant": {"use_reentrant": True},
    "not reentrant": {"use_reentrant": False},
    "selective": {
        "use_reentrant": False,
        "context_fn": partial(create_selective_checkpoint_contexts, _save_products),
    },
}


@pytest.mark.parametrize("in_forward", [False, True])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_checkpointed_layers_are_counted_once(name: str, in_forward: bool) -> None:
    plain = Checkpointed()
    model = Checkpointed(**CHECKPOINTS[name])
    model.load_state_dict(plain.state_dict())
    x = torch.randn(5, 4)
    expected = armed(plain, x)
    if in_forward:  # armed by the model's own pre-hook, as the Monitor does
        capture = watch(model)
        handle = model.register_forward_pre_hook(lambda module, args: capture.arm(in_forward=True))
        model(x).sum().backward()
        handle.remove()
        found = capture.collect()
        assert found is not None
    else:
        found = armed(model, x)
    assert found.order == expected.order and found.parts[0].calls == (1,) * 13
    assert torch.equal(found.parts[0].rows.values, expected.parts[0].rows.values)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None and torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_capture_that_counts_recomputation_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P27, planted fault."""
    monkeypatch.setattr(activations, "_recomputes", lambda: False)
    with pytest.raises(AssertionError):
        test_checkpointed_layers_are_counted_once("not reentrant", False)


def test_arithmetic_that_a_selective_checkpoint_sees_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2, planted fault: our products among those that it keeps for the backward."""
    monkeypatch.setattr(activations, "_disable_current_modes", contextlib.nullcontext)
    with pytest.raises((AssertionError, RuntimeError)):
        test_checkpointed_layers_are_counted_once("selective", False)


def test_evaluation_and_forwards_without_gradients_do_not_count() -> None:
    model, x = make("mlp")
    capture = watch(model)
    capture.arm()
    with torch.no_grad():
        model(x)
    assert capture.is_armed
    model.eval()(x)
    assert not capture.is_armed  # it stands aside: torch's encoder layers compute otherwise under hooks
    assert capture.collect() is None


def test_evaluation_of_an_encoder_is_bit_exact_while_armed() -> None:
    model, x = make("encoder")
    with torch.no_grad():
        expected = model.eval()(x)
        for part in (model, model.layers[0]):  # type: ignore[index]
            model.train()
            capture = watch(model)
            capture.arm()
            model(x)
            model.eval()
            result = part(x)
            assert torch.equal(result, expected if part is model else model.layers[0](x))  # type: ignore[index, operator]
            assert not capture.is_armed


def test_parts_called_without_the_model_are_seen() -> None:
    """As a LightningModule calls self.net(x) in its training_step."""
    model, x = make("mlp")
    outer = nn.ModuleDict({"net": model})
    capture = watch(outer)
    capture.arm()
    model(x).sum().backward()
    found = capture.collect()
    assert found is not None and found.order[0] == "net.0" and found.logits is None


# P2: bit-exact ------------------------------------------------------------------------------------------------


def _train(name: str, every: int | None, autocast: bool) -> list[Tensor]:
    model, x = make(name)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    capture, kept = watch(model), []
    for step in range(6):
        if every and step % every == 0:
            capture.arm()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(x)
        output.float().square().mean().backward()
        if every and step % every == 0:
            assert capture.collect() is not None and problems_of(capture) == []
        kept += [output.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return [*kept, *(v.clone() for v in model.state_dict().values()), torch.get_rng_state()]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_exact_and_random_numbers_are_the_same(name: str, autocast: bool) -> None:
    plain, watched = _train(name, None, autocast), _train(name, 2, autocast)
    assert len(plain) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.parametrize("fault", ["random", "in place"])
def test_a_hook_that_touches_the_training_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2, planted faults."""

    def touch(y: Tensor, *rest: Any) -> Any:
        _ = torch.rand(1) if fault == "random" else y.mul_(1.001)
        return measure_signals(y, *rest)

    monkeypatch.setattr(activations, "measure_signals", touch)
    with pytest.raises((AssertionError, RuntimeError)):
        test_training_is_bit_exact_and_random_numbers_are_the_same("mlp", False)


# P3: no trace -------------------------------------------------------------------------------------------------


def _traces(model: nn.Module) -> Any:
    modules = list(model.named_modules())
    hooks = {n: {k: dict(v) for k, v in vars(m).items() if "hooks" in k} for n, m in modules}
    return hooks, {name: sorted(vars(module)) for name, module in modules}, pickle.dumps(model)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_left_after_collecting(name: str) -> None:
    model, x = make(name)
    buffers = copy.deepcopy(model.state_dict())
    before = _traces(model)
    capture = watch(model)
    for _ in range(20):
        capture.arm()
        capture.arm()  # a second time is harmless
        model(x)
        assert capture.collect() is not None and capture.collect() is None
    model.load_state_dict(buffers)
    assert _traces(model) == before


def test_a_hook_that_is_left_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3, planted fault."""
    monkeypatch.setattr(ActivationCapture, "_remove_hooks", lambda self: None)
    with pytest.raises(AssertionError):
        test_nothing_is_left_after_collecting("mlp")


@pytest.mark.parametrize("name", MODELS)
def test_an_armed_model_can_be_copied_and_pickled_and_copies_are_not_watched(name: str) -> None:
    model, x = make(name)
    capture = watch(model)
    capture.arm()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(x)
        assert b"holter" not in pickle.dumps(model) and capture._step.layers == {}
    model(x)
    assert capture.collect() is not None


def test_neither_model_nor_activations_are_held() -> None:
    model, x = make("mlp")
    capture = watch(model)
    capture.arm()
    kept: list[weakref.ref[Tensor]] = []
    handles = [m.register_forward_hook(lambda m, a, y: kept.append(weakref.ref(y))) for m in model.modules()]
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    gc.collect()
    assert len(kept) == 7 and all(one() is None for one in kept)
    found = capture.collect()
    assert found is not None
    assert all(not t.requires_grad and t.grad_fn is None for t in (found.parts[0].signals, *found.parts[0].alive))
    gone = weakref.ref(model)
    del model, handles
    gc.collect()
    assert gone() is None and not capture.observed
    capture.arm()
    assert capture.collect() is None


# P1: contained ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, OSError, ValueError])
def test_a_hook_that_fails_stays_a_problem(error: type[Exception]) -> None:
    model, x = make("mlp")

    def fail(tensors: list[Tensor]) -> Any:
        raise error

    capture = ActivationCapture(model, Problems(lambda problem: None), fail)
    capture.arm()
    torch.manual_seed(1)
    output = model(x)
    found = capture.collect()
    assert found is not None and found.order == () and found.logits is not None and problems_of(capture)
    torch.manual_seed(1)
    assert torch.equal(output, model(x))


def test_the_users_interrupt_passes_and_a_failing_selection_does_not() -> None:
    model, x = make("mlp")

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    capture = ActivationCapture(model, Problems(lambda problem: None), interrupt)
    capture.arm()
    with pytest.raises(KeyboardInterrupt):
        model(x)
    assert capture.collect() is None
    refusing = watch(model, selected=lambda name, module: 1 / 0)
    refusing.arm()
    model(x)
    refusing.collect()
    assert problems_of(refusing)


def test_what_is_no_plain_tensor_is_reported_and_not_measured() -> None:
    model = nn.Identity()
    capture = watch(model, selected=lambda name, module: True)
    capture.arm()
    model(torch.randn(3, 3).to_sparse())
    assert capture.collect() is None and any("sparse" in what for what in problems_of(capture))
    capture.arm()
    torch.func.vmap(model)(torch.randn(3, 3))  # type: ignore[no-untyped-call]
    assert capture.collect() is None


# P5: no device waits ------------------------------------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Notes operators that make the host wait for a device; `where` does when it is given a number."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name in {f"aten::{name}" for name in ("_local_scalar_dense", "nonzero", "equal", "where")}:
            self.found.add(func._schema.name)
        return func(*args, **(kwargs or {}))


def _waits(name: str, measure: Callable[[list[Tensor]], DeviceRows], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    model, x = make(name)
    capture = ActivationCapture(model, Problems(lambda problem: None), measure)
    monkeypatch.setattr(activations, "_disable_current_modes", contextlib.nullcontext)  # or it would see nothing
    capture.arm()
    with Waits() as mode:
        model(x)
        assert capture.collect() is not None
    assert problems_of(capture) == []
    return mode.found


@pytest.mark.parametrize("name", MODELS)
def test_nothing_that_waits_for_a_device_is_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _waits(name, lambda tensors: DeviceRows(torch.zeros(1, 11)), monkeypatch) == set()


def test_a_number_read_from_the_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P5, planted fault: one .item()."""

    def wait(tensors: list[Tensor]) -> DeviceRows:
        return DeviceRows(torch.full((1, 11), tensors[0].sum().item()))

    assert _waits("mlp", wait, monkeypatch) == {"aten::_local_scalar_dense"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", MODELS)
def test_cuda_is_never_waited_for(name: str) -> None:
    model, x = make(name)
    model, x = model.cuda(), x.cuda()
    armed(model, x)  # libraries and kernels are loaded once
    capture, window = watch(model), Window(1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        capture.arm()
        model(x)
        found = capture.collect()
        assert found is not None
        window.add(dict(zip(found.order, found.parts[0].alive, strict=True)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert problems_of(capture) == []


# P7: compiled -------------------------------------------------------------------------------------------------


def _compiled_steps(attach: str) -> tuple[int, int]:
    """Graphs and graph breaks of six steps, armed as the Monitor does it: by a forward pre-hook that runs eagerly."""
    torch._dynamo.reset()
    counters.clear()
    model, x = make("mlp")
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    capture = watch(compiled if attach == "to the compiled" else model)

    def began(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            capture.arm(in_forward=True)

    hooked = compiled if attach == "to the compiled" else model
    for step in range(6):
        if (attach, step) in (("before", 0), ("after", 2), ("to the compiled", 0)):
            hooked.register_forward_pre_hook(began)
        compiled(x).sum().backward()
        assert capture.collect() is None
    assert capture.observed == (attach != "to the compiled")
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("attach", ["before", "after", "to the compiled"])
def test_a_compiled_model_has_no_graph_break_and_no_recompilation_more(attach: str) -> None:
    assert _compiled_steps(attach) == _compiled_steps("never") == (1, 0)


def test_hooks_that_the_compiler_meets_leave_the_graph_as_it_is_but_cost_a_second_compilation() -> None:
    """Why `arm` belongs into the model's own pre-hook: whoever arms from outside pays this once."""
    torch._dynamo.reset()
    counters.clear()
    model, x = make("mlp")
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    capture = watch(model)
    for step in range(4):
        if step % 2 == 0:
            capture.arm()
        compiled(x).sum().backward()
        assert capture.collect() is None and problems_of(capture) == []
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


# torch.compile looks at .grad of what goes into a compiled part, and torch warns of it.
IGNORE_GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


class Region(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.front, self.body = nn.Linear(4, 4), Body()
        if how == "torch.compile":
            self.body = torch.compile(self.body, backend="eager", fullgraph=True)  # type: ignore[assignment]
        elif how == "compile()":
            self.body.compile(backend="eager", fullgraph=True)
        elif how == "forward":
            self.body.forward = torch.compile(self.body.forward, backend="eager", fullgraph=True)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.front(x))


@IGNORE_GRAD
@pytest.mark.parametrize("how", ["torch.compile", "compile()", "forward"])
def test_a_compiled_part_is_not_observed_and_said_to_be(how: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    model = Region(how)
    capture = watch(model)
    for step in range(4):
        if step % 2 == 0:
            capture.arm()
        model(torch.ones(2, 4)).sum().backward()
        found = capture.collect()
        assert step % 2 or (found is not None and found.order == ("front",))
    assert capture.observed and capture.unobserved == ("body",) and problems_of(capture) == []
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@IGNORE_GRAD
def test_hooks_inside_a_compiled_part_would_cost_a_recompilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """P7, planted fault."""
    monkeypatch.setattr(activations, "is_compiled", lambda module: False)
    with pytest.raises(AssertionError):
        test_a_compiled_part_is_not_observed_and_said_to_be("compile()")
