"""Looking at activations: the training does not notice (P1 P2 P3 P5)."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from holter import activations
from holter.activations import ActivationCapture
from holter.problems import Problems
from holter.statistics import activation
from holter.statistics.activation import SAMPLE_ROWS, SAMPLE_UNITS, Window, portion
from holter.statistics.device_rows import DeviceRows
from tests.armed import MODELS, armed, make, problems_of, watch

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


def _refusal(name: str) -> str | None:
    """Why torch itself cannot run this model under autocast on this processor; None where it can."""
    model, x = make(name)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
    except RuntimeError as error:
        return str(error).partition(". ")[0]
    return None


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_training_is_bit_exact_and_random_numbers_are_the_same(name: str, autocast: bool) -> None:
    if autocast and (refusal := _refusal(name)) is not None:
        pytest.skip(f"torch on this processor: {refusal}")
    plain, watched = _train(name, None, autocast), _train(name, 2, autocast)
    assert len(plain) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


@pytest.mark.parametrize("fault", ["random", "in place"])
def test_a_hook_that_touches_the_training_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2, planted faults."""

    def touch(y: Tensor, *rest: Any) -> Any:
        _ = torch.rand(1) if fault == "random" else y.mul_(1.001)
        return portion(y, *rest)

    monkeypatch.setattr(activations, "portion", touch)
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


def test_what_is_kept_until_collecting_is_small_and_none_of_the_activations_memory() -> None:
    model = nn.Sequential(nn.Linear(6, 300), nn.ReLU(inplace=True), nn.Linear(300, 5))
    capture = watch(model)
    capture.arm()
    kept: list[Tensor] = []
    handles = [m.register_forward_hook(lambda m, a, y: kept.append(y)) for m in model]
    model(torch.randn(1000, 6)).sum().backward()
    for handle in handles:
        handle.remove()
    memory = {y.untyped_storage().data_ptr() for y in kept}
    for seen in capture._step.layers.values():
        for part in (seen.kept.reach, seen.kept.sample):
            assert part.untyped_storage().data_ptr() not in memory
            assert part.untyped_storage().nbytes() <= 4 * SAMPLE_ROWS * SAMPLE_UNITS
    assert list(capture._step.waiting) == ["2"]  # those before were measured when there was a lot of them
    assert not memory & {copy.untyped_storage().data_ptr() for copy in capture._step.waiting.values()}
    capture.collect()


@pytest.mark.parametrize("name", ["mlp", "cnn"])
def test_a_few_at_a_time_are_measured_as_each_by_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for held in (0, 1 << 30):
        monkeypatch.setattr(activations, "_HELD_ON_CPU", held)
        model, x = make(name)
        found.append(armed(model, x))
    (one,), (other,) = found[0].parts, found[1].parts
    assert one.layers == other.layers == found[0].order and len(one.layers) > 2
    assert torch.equal(one.rows.values, other.rows.values)


def test_the_seconds_of_a_look_hold_those_of_collecting(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make("mlp")
    capture = watch(model)
    capture.arm()
    model(x)
    before, join = capture.seconds, activations._joined

    def slowly(*seen: Any) -> Any:
        time.sleep(0.05)
        return join(*seen)

    monkeypatch.setattr(activations, "_joined", slowly)
    assert capture.collect() is not None and capture.seconds - before >= 0.05


def test_giving_up_takes_the_hooks_away_and_what_was_seen() -> None:
    model, x = make("mlp")
    capture = watch(model)
    capture.arm()
    model(x)
    capture.give_up()
    assert not capture.is_armed and capture.collect() is None


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
    assert found is not None and found.parts == () and found.logits is not None and problems_of(capture)
    torch.manual_seed(1)
    assert torch.equal(output, model(x))


def test_the_users_interrupt_passes_and_a_failing_selection_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = make("mlp")
    monkeypatch.setattr(activations, "_HELD_ON_CPU", 0)  # measured in the hook

    def interrupt(*args: Any) -> Any:
        raise KeyboardInterrupt

    capture = ActivationCapture(model, Problems(lambda problem: None), interrupt)
    capture.arm()
    with pytest.raises(KeyboardInterrupt):
        model(x)
    found = capture.collect()
    assert found is not None and found.parts == () and found.logits is None
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
    monkeypatch.setattr(activation, "_can_be_read", lambda tensor: False)  # as on a device
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
