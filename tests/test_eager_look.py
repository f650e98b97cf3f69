"""Activations of compiled models: they are those of plain torch on a few samples, and the training does not notice."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import operator
import random
import threading
import time
from collections import UserDict, deque
from collections.abc import Callable
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn
from torch._dynamo.utils import counters

import holter
from holter import eager_look
from holter.activations import ActivationCapture
from holter.eager_look import look
from holter.sampling import first_samples
from holter.twin import Twin

pytestmark = pytest.mark.filterwarnings("ignore")  # Dynamo warns of much
STEPS = 5
compiled = partial(torch.compile, backend="aot_eager")


class Net(nn.Module):
    """All that a forward may change: buffers, counters, lists and random numbers of three libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.relu, self.drop = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3)
        self.last = nn.Linear(16, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        y: Tensor = self.last(self.drop(self.relu(self.norm(self.first(x))))) * scale
        return y


def before(net: nn.Module, watch: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    model = compiled(net)
    return model, watch(model)


def after(net: nn.Module, watch: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    monitor = watch(net)
    return compiled(net), monitor


def in_place(net: nn.Module, watch: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    net.compile(backend="aot_eager")
    return net, watch(net)


def in_place_after(net: nn.Module, watch: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    monitor = watch(net)
    net.compile(backend="aot_eager")
    return net, monitor


def a_part(net: Any, watch: Callable[[nn.Module], Any]) -> tuple[nn.Module, Any]:
    net.norm = compiled(net.norm)
    return net, watch(net)


WAYS = {"before": before, "after": after, "in place": in_place, "in place, after": in_place_after, "a part": a_part}


def trained(
    way: str, watched: bool, autocast: bool = False, build: Callable[[], nn.Module] = Net, batch: int = 200
) -> tuple[list[Tensor], dict[str, int], Any]:
    """Everything that a training leaves, what the compiler captured, and the monitor."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    net = build()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)

    def watch(model: nn.Module) -> Any:
        options: dict[str, Any] = {"machine": False, "diagnose": False, "budget": None, "activations": 2}
        return holter.watch(model, optimizer, run=False, **options) if watched else None

    model, monitor = WAYS[way](net, watch)
    kept = []
    for _ in range(STEPS):
        x = torch.randn(batch, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(x, scale=2.0).float().square().mean()
        loss.backward()
        kept += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    kept += [*(value.clone() for value in net.state_dict().values()), torch.get_rng_state()]
    kept += [torch.tensor(random.random()), torch.tensor(np.random.rand())]  # noqa: NPY002 - as trainings use it
    captured = dict(counters["stats"])
    if monitor is not None:
        monitor.close()
    return kept, captured, monitor


def seen(monitor: Any) -> dict[int, tuple[str, ...]]:
    return {
        record.step: record.rows["activation"].layers
        for record in monitor.history.records
        if "activation" in record.rows
    }


# P2, P7 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_training_is_bit_exact_and_its_activations_are_seen(way: str, autocast: bool) -> None:
    bare, captured, _ = trained(way, False, autocast)
    watched, captured_again, monitor = trained(way, True, autocast)
    assert len(bare) == len(watched) and all(map(torch.equal, bare, watched))
    assert captured == captured_again and captured["unique_graphs"] == 1  # no recompilation
    found = seen(monitor)
    first = 1 if "after" in way else 0  # one step is needed to find what was compiled later
    assert list(found) == list(range(first, STEPS, 2)) and monitor.findings == ()
    assert set(found.popitem()[1]) == {"first", "norm", "relu", "last"}
    notes = [record.notes.get("activations", "") for record in monitor.history.records]
    assert notes[first] == "seen in an uncompiled forward of the first 128 of 200 samples, without gradients"
    assert list(monitor.history.depth)[:3] == ["", "first", "first.weight"]


def test_random_numbers_that_a_look_uses_up_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P2, planted fault."""
    bare, _, _ = trained("before", False)
    monkeypatch.setattr(torch, "set_rng_state", lambda state: None)
    watched, _, monitor = trained("before", True)
    assert seen(monitor) and not all(map(torch.equal, bare, watched))


# What is seen is what plain torch computes ----------------------------------------------------------------------


class Dying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.last = nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1)
        with torch.no_grad():
            self.first.bias[:40] -= 3.0

    def forward(self, x: Tensor, scale: float) -> Tensor:
        y: Tensor = self.last(self.relu(self.first(x))) * scale
        return y


def test_dead_units_are_those_of_the_samples_that_were_looked_at() -> None:
    torch.manual_seed(0)
    net = Dying()
    plain = copy.deepcopy(net)
    model, x = compiled(net), torch.randn(200, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=False, machine=False, diagnose=False) as monitor:
        model(x, scale=1.0).sum().backward()
        optimizer.step()
    row = monitor.history.records[0].rows["activation"]
    with torch.no_grad():
        dead = float((plain.relu(plain.first(x[:128])) == 0).all(0).double().mean())
    assert 0 < dead < 1 and row.extras["dead"][row.layers.index("relu")] == pytest.approx(dead, rel=1e-6)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.embed, self.body = nn.Embedding(11, 16), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 11)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"logits": self.head(self.body(self.embed(batch["ids"]), mask=batch["mask"]))}


def test_attention_of_a_compiled_transformer_is_that_of_the_plain_one() -> None:
    """The inputs come in a dictionary; a mask for all samples stays whole. The statistics are of two sequences."""
    torch.manual_seed(0)
    net = Encoder()
    ids, mask = torch.randint(11, (20, 128)), nn.Transformer.generate_square_subsequent_mask(128)
    found = []
    for wrap in (compiled, lambda model: model):
        model = wrap(copy.deepcopy(net))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with holter.watch(model, optimizer, run=False, machine=False, diagnose=False, budget=None) as monitor:
            model({"ids": ids, "mask": mask})["logits"].square().mean().backward()
            optimizer.step()
        found.append(monitor.history.records[0].rows["attention"])
    assert found[0].layers == found[1].layers == ("body.layers.0.self_attn", "body.layers.1.self_attn")
    for name in ("entropy", "max_logit"):
        assert found[0].extras[name] == pytest.approx(found[1].extras[name], rel=1e-4)


# P29: a look changes nothing ------------------------------------------------------------------------------------


class Counter:
    def __init__(self) -> None:
        self.count, self.kept = 0, [1]


class Changing(nn.Module):
    """Its forward changes all that a forward can, besides weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.act = nn.Linear(4, 4), nn.ReLU(inplace=True)
        self.register_buffer("mean", torch.zeros(4))
        self.plain, self.number, self.list, self.dict = torch.zeros(4), 0, [0], {"a": [1]}
        self.queue: deque[int] = deque(maxlen=3)
        self.counter, self.generator = Counter(), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2.0)
        self.mean.data.add_(x.detach().mean(0))
        self.plain += 1
        self.number += 1
        self.list.append(self.number)
        self.dict["a"].append(self.number)
        self.queue.append(self.number)
        self.counter.count += 1
        self.counter.kept.append(2)
        self.aux = self.layer(x).sum()
        noise = torch.rand(4, generator=self.generator) + torch.rand(4) + random.random() + np.random.rand()  # noqa: NPY002
        y: Tensor = self.act(self.layer(x) + noise)
        return y


def state(model: Any, x: Tensor) -> Any:
    """All that may be changed, and the versions by which autograd knows of writes."""
    tensors = [*model.parameters(), *model.buffers(), model.plain, x]
    return (
        [(tensor.detach().clone().tolist(), tensor._version) for tensor in tensors],
        (model.number, list(model.list), copy.deepcopy(model.dict), list(model.queue)),
        (model.counter.count, list(model.counter.kept), sorted(vars(model))),
        model.generator.get_state().tolist(),
        (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())),  # noqa: NPY002
        [parameter.grad for parameter in model.parameters()],
        [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
    )


def test_a_look_changes_nothing() -> None:
    model, x = Changing(), torch.randn(6, 4)
    features: list[Any] = []
    model.layer.register_forward_hook(lambda *args: features.append(args))
    earlier = state(model, x)
    ran = []
    samples = look(model, (x,), {}, lambda twin: ran.append(twin))
    assert str(samples) == "all 6 samples" and len(ran) == 1 and ran[0].has_dropped_hooks
    assert state(model, x) == earlier and features == []
    assert ran[0].module.number == 1 and ran[0].module.counter.count == 1  # it ran, on copies
    model(x)
    assert model.number == 1 and len(features) == 2


class Attributes(dict[str, int]):
    pass


class Slotted:
    __slots__ = ("__weakref__", "count")

    def __init__(self) -> None:
        self.count = 0


class Pair(NamedTuple):
    numbers: list[int]


class Holding(nn.Module):
    """Changes one of the things that it holds, and what it is given: not only plain containers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind, self.in_key, self.calls = nn.Linear(4, 4), kind, {nn.ReLU(): 0}, 0
        self.attributes, self.slotted, self.pair, self.told = Attributes(count=0), Slotted(), Pair([0]), [0]
        self.append, self.cached = self.told.append, lru_cache(self.called)
        ahead = {
            "count": itertools.count,
            "generator": lambda: (one for one in range(9)),
            "iterator": lambda: iter("ab"),
        }
        self.ahead = ahead.get(kind, lambda: None)()
        cell = 0

        def in_closure() -> int:
            nonlocal cell
            cell += 1
            return cell

        self.in_closure = in_closure

    def called(self) -> None:
        self.calls += 1

    def forward(self, batch: Any) -> Tensor:
        change: dict[str, Callable[[], Any]] = {
            "subclass of dict": lambda: self.attributes.update(count=1),
            "slots": lambda: setattr(self.slotted, "count", 1),
            "named tuple": lambda: self.pair.numbers.append(1),
            "method of a list": lambda: self.append(1),
            "cache": lambda: self.cached(),
            "closure": lambda: self.in_closure(),
            "module as key": lambda: next(iter(self.in_key)).train(False),
            "data of a weight": lambda: setattr(self.layer.weight, "data", torch.zeros(4, 4)),
            "attribute of a weight": lambda: setattr(self.layer.weight, "scale", 2.0),
        }
        next(self.ahead) if self.ahead is not None else change[self.kind]()
        batch.pop("labels")
        y: Tensor = self.layer(batch["x"])
        return y

    def state(self) -> list[Any]:
        cells: Any = self.in_closure.__closure__
        ahead = [
            repr(self.ahead),
            operator.length_hint(self.ahead),
            getattr(getattr(self.ahead, "gi_frame", 0), "f_lasti", 0),
        ]
        weight = [self.layer.weight.tolist(), dict(vars(self.layer.weight))]
        held = [dict(self.attributes), self.slotted.count, *self.pair.numbers, *self.told, self.calls]
        return [*ahead, *weight, *held, cells[0].cell_contents, next(iter(self.in_key)).training]


COPIED = ["subclass of dict", "slots", "named tuple", "method of a list", "cache", "closure", "module as key"]


@pytest.mark.parametrize("kind", [*COPIED, "data of a weight", "attribute of a weight"])
def test_a_look_changes_nothing_that_a_model_holds_or_is_given(kind: str) -> None:
    model, batch = Holding(kind), UserDict(x=torch.randn(6, 4), labels=torch.ones(6))
    earlier = model.state()
    look(model, (batch,), {}, lambda twin: None)
    assert model.state() == earlier and "labels" in batch
    model(batch)
    assert model.state() != earlier and "labels" not in batch


LOSSES: list[float] = []
CALLS = 0


def tell(loss: float) -> None:
    global CALLS, NEW
    CALLS, NEW = CALLS + 1, 1
    LOSSES.append(loss)


class Telling(nn.Linear):
    """As mixtures of experts collect the losses that balance them."""

    made, calls = [0], 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        tell(float(y.mean()))
        type(self).calls += 1
        self.made.append(1)
        return y


def test_a_look_changes_no_variable_of_a_file_and_no_attribute_of_a_class() -> None:
    def told() -> list[Any]:
        return [*LOSSES, CALLS, "NEW" in globals(), Telling.calls, *Telling.made]

    model, x, earlier = nn.Sequential(Telling(2, 2)), torch.ones(1, 2), told()
    look(model, (x,), {}, lambda twin: None)
    assert told() == earlier
    model(x)
    assert told() != earlier


@pytest.mark.parametrize("kind", ["count", "generator", "iterator"])
def test_a_model_that_holds_what_cannot_be_copied_is_not_run(kind: str) -> None:
    model, batch = Holding(kind), UserDict(x=torch.randn(6, 4), labels=torch.ones(6))
    earlier = model.state()
    with pytest.raises(holter.problems.Complaint, match="cannot be copied"):
        look(model, (batch,), {}, lambda twin: None)
    assert model.state() == earlier and "labels" in batch


def test_no_weight_of_a_twin_asks_for_gradients() -> None:
    """Autocast would cache its cast, and the training's forward, in the same autocast, would get no gradient by it."""
    net = nn.LSTM(4, 5)
    twin: Any = Twin(net)
    assert not any(weight.requires_grad for weight in twin.module.parameters())
    assert all(
        ref() is weight for ref, weight in zip(twin.module._flat_weight_refs, twin.module._flat_weights, strict=True)
    )
    assert all(weight.requires_grad for weight in net.parameters())


def test_statistics_of_a_batch_norm_that_are_no_buffers_are_not_written_to() -> None:
    """The schema of torch's operator does not say that it writes to them."""
    model = nn.BatchNorm1d(4)
    del model.running_mean
    model.running_mean = nn.Parameter(torch.zeros(4), requires_grad=False)
    with pytest.raises(holter.problems.Complaint, match="changes a tensor"):
        look(model, (torch.randn(6, 4),), {}, lambda twin: None)
    assert not model.running_mean.any()


def test_looks_in_two_threads_at_once_leave_compilers_as_they_were() -> None:
    both_ran = [threading.Lock(), threading.Lock()]  # not events, which a forward may not name
    for lock in both_ran:
        lock.acquire()

    class First(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert both_ran[0].acquire(timeout=10)
            return super().forward(x)

    class Second(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            both_ran[0].release()
            assert both_ran[1].acquire(timeout=10)
            return super().forward(x)

    def run(module: nn.Module) -> None:
        look(module, (torch.ones(2, 2),), {}, lambda twin: None)

    def stance() -> str:
        return torch._dynamo.eval_frame._stance.stance

    first, second = (threading.Thread(target=run, args=(kind(2, 2),)) for kind in (First, Second))
    first.start()
    while stance() == "default":
        time.sleep(0.001)
    second.start()
    first.join()
    within = stance()
    both_ran[1].release()
    second.join()
    assert (within, stance()) == ("force_eager", "default")


def test_twins_that_a_forward_keeps_are_not_made_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Keeping(Net):
        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            if not torch.compiler.is_compiling():
                torch.kept = self  # type: ignore[attr-defined] # where nothing is put back
            return super().forward(x, scale=scale)

    monkeypatch.setattr(torch, "kept", None, raising=False)
    _, _, monitor = trained("before", True, build=Keeping)
    assert sum(type(one) is Keeping for one in gc.get_objects()) <= 2
    assert "keeps the module that it ran on" in notes_of(monitor)[-1] and seen(monitor)


def test_a_cache_of_a_class_does_not_keep_the_twin() -> None:
    class Cached(Net):
        @cache  # noqa: B019
        def mask(self, size: int) -> int:
            return size

        def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
            self.mask(len(x))
            return super().forward(x, scale=scale)

    _, _, monitor = trained("before", True, build=Cached)
    assert sum(type(one) is Cached for one in gc.get_objects()) <= 1 and len(seen(monitor)) == 3


class Decorated(Net):
    @torch.compile(backend="eager")
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().forward(x, scale=scale)


def test_looks_at_a_compiled_forward_leave_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection takes long on the training thread: seconds, where a training holds millions of objects."""
    torch._dynamo.reset()
    net = Decorated()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    collected: list[int] = []
    options: dict[str, Any] = {"machine": False, "diagnose": False, "budget": None, "activations": 1}
    with holter.watch(net, optimizer, run=False, **options) as monitor:
        for _ in range(3):
            net(torch.randn(20, 8)).square().mean().backward()
            optimizer.step()
            monkeypatch.setattr(gc, "collect", lambda: collected.append(1))
    assert collected == [] and list(seen(monitor)) == [0, 1, 2]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_look_that_raises_changes_nothing(error: type[BaseException]) -> None:
    class Raising(Changing):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise error

    model, x = Raising(), torch.randn(6, 4)
    earlier = state(model, x)
    with torch.autocast("cpu"):
        with pytest.raises(error):
            look(model, (x,), {}, lambda twin: None)
        assert torch.is_autocast_cache_enabled()
    assert state(model, x) == earlier and torch.is_grad_enabled()


WEIGHT = torch.zeros(4)


class WritesWeight(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "weight":
            self.layer.weight.data.mul_(0.9)
        elif self.kind == "view":
            self.layer.weight.detach()[0].fill_(1.0)
        else:
            WEIGHT.add_(1.0)
        y: Tensor = self.layer(x)
        return y


@pytest.mark.parametrize("kind", ["weight", "view", "global"])
def test_a_write_to_a_tensor_of_the_trainings_is_refused_before_it_happens(kind: str) -> None:
    model = WritesWeight(kind)
    bits, versions = copy.deepcopy(model.state_dict()), WEIGHT._version
    with pytest.raises(holter.problems.Complaint, match="changes a tensor"):
        look(model, (torch.ones(3, 4),), {}, lambda twin: None)
    assert all(torch.equal(value, bits[name]) for name, value in model.state_dict().items())
    assert WEIGHT._version == versions


def test_an_embedding_that_renormalises_its_weight_is_looked_at_in_a_copy() -> None:
    model = nn.Embedding(5, 3, max_norm=0.1)
    bits = model.weight.detach().clone()
    look(model, (torch.tensor([0, 1, 2]),), {}, lambda twin: None)
    assert torch.equal(model.weight, bits)


def test_a_backward_that_comes_later_still_works() -> None:
    """A buffer that is needed for a backward must not count as written to by a look in between."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    output = model(torch.randn(6, 4))
    look(model, (torch.randn(6, 4),), {}, lambda twin: None)
    output.sum().backward()


@pytest.mark.parametrize(
    "model",
    [
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.LSTM(4, 5),
        nn.MultiheadAttention(4, 2),
        nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4))),
    ],
    ids=["spectral norm", "weight norm", "lstm", "attention", "batch norm"],
)
def test_the_twin_computes_what_the_model_does(model: nn.Module) -> None:
    x = torch.randn(6, 4)
    args = (x, x, x) if isinstance(model, nn.MultiheadAttention) else (x,)
    outputs: list[Any] = []
    bits = copy.deepcopy(model.state_dict())
    look(model, args, {}, lambda twin: twin.module.register_forward_hook(lambda m, a, y: outputs.append(y)))
    assert all(torch.equal(value, bits[name]) for name, value in model.state_dict().items())
    expected = model(*args)
    first = [one[0] if isinstance(one, tuple) else one for one in (outputs[0], expected)]
    assert torch.allclose(*first, atol=1e-6)  # without gradients an LSTM takes another path


# Where it cannot be -------------------------------------------------------------------------------------------


def notes_of(monitor: Any) -> list[str]:
    return [record.notes["activations"] for record in monitor.history.records if "activations" in record.notes]


class Refusing(Net):
    """Runs compiled, and raises when it is not."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        if not torch.compiler.is_compiling():
            raise ValueError("no")
        return super().forward(x, scale=scale)


def test_a_look_that_fails_is_told_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    inner = eager_look._run
    monkeypatch.setattr(eager_look, "_run", lambda *args: tried.append(1) or inner(*args))
    bare, _, _ = trained("before", False, build=Refusing, batch=20)
    watched, _, monitor = trained("before", True, build=Refusing, batch=20)
    assert all(map(torch.equal, bare, watched)) and len(tried) == 1
    assert seen(monitor) == {} and monitor.findings == ()
    assert notes_of(monitor)[0].startswith("not observed: the model is compiled, and cannot be run uncompiled")
    assert "ValueError" in notes_of(monitor)[0]


def test_several_processes_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert "several processes" in str(eager_look.refusal(nn.Linear(1, 1)))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert eager_look.refusal(nn.Linear(1, 1)) is None


def observed(step: Callable[[nn.Module], Any], model: nn.Module | None = None) -> Any:
    model = model or nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=False, machine=False, diagnose=False, budget=None) as monitor:
        for _ in range(2):
            step(model)
            optimizer.step()
            optimizer.zero_grad()
    assert seen(monitor) == {} and monitor.findings == ()
    return monitor


def in_a_compiled_function(model: nn.Module) -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: model(x).sum(), backend="eager")(torch.ones(2, 4)).backward()


def per_sample(model: nn.Module) -> None:
    weights = dict(model.named_parameters())

    def loss(given: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(model, given, (x,)).sum()
        return y

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, torch.ones(2, 4))
    for name, weight in weights.items():
        weight.grad = gradients[name].mean(0)


def checkpointed(model: nn.Module) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, x, use_reentrant=True).sum().backward()


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (in_a_compiled_function, "no training forward of the model was seen"),
        (per_sample, "torch.func"),
        (checkpointed, "within a backward"),
    ],
)
def test_what_is_not_seen_is_said(step: Callable[[nn.Module], Any], why: str) -> None:
    """P7: never as nothing at all, and never as 0."""
    monitor = observed(step)
    assert notes_of(monitor)[0].startswith("not observed: ") and why in notes_of(monitor)[0]
    assert monitor.history.activations_note == notes_of(monitor)[-1]


def test_a_scripted_model_is_said_not_to_be_observed() -> None:
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    monitor = observed(lambda model: model(torch.ones(2, 4)).sum().backward(), scripted)
    assert notes_of(monitor)[0].startswith("not observed: ")


def test_two_steps_on_one_forward_are_not_said_to_be_unseen() -> None:
    model = nn.Linear(2, 2)
    optimizers = [torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
    options: dict[str, Any] = {"machine": False, "diagnose": False, "budget": None, "activations": 1}
    with holter.watch(model, optimizers, run=False, **options) as monitor:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert notes_of(monitor) == [] and seen(monitor)


# Samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "told"),
    [
        ((torch.zeros(500, 7),), {}, "the first 128 of 500 samples"),
        ((torch.zeros(50, 512, dtype=torch.long),), {"mask": torch.zeros(50, 512)}, "the first 8 of 50 samples"),
        ((torch.zeros(64, 3, 32, 32),), {"labels": torch.zeros(64)}, "the first 11 of 64 samples"),
        ((torch.zeros(50, 512),), {"positions": torch.zeros(1, 512)}, "all 50 samples"),
        ((torch.zeros(5, 7),), {}, "all 5 samples"),
        ((torch.zeros(50, 512, 2), torch.zeros(512, 512)), {}, "the whole batch"),
        ((torch.zeros(50, 50), torch.zeros(50, 50)), {}, "the whole batch"),
        ((object(), torch.zeros(500, 2)), {}, "the whole batch"),
        ((3,), {}, "the whole batch"),
    ],
)
def test_samples_are_taken_where_it_is_plain_what_counts_them(args: Any, kwargs: Any, told: str) -> None:
    samples = first_samples(args, kwargs, True)
    assert str(samples) == told
    for given in (*samples.args, *samples.kwargs.values()):
        if isinstance(given, Tensor) and samples.taken < samples.of:
            assert given.shape[0] in (1, samples.taken)


def test_what_takes_samples_along_the_second_dimension_is_given_the_whole_batch() -> None:
    assert str(look(nn.LSTM(4, 2), (torch.zeros(300, 200, 4),), {}, lambda twin: None)) == "the whole batch"


def test_a_forward_that_cannot_take_fewer_samples_is_given_the_whole_batch() -> None:
    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.view(300, 4)

    assert str(look(Fixed(), (torch.zeros(300, 4),), {}, lambda twin: None)) == "the whole batch"


def test_a_look_that_is_left_in_the_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P29, planted fault: the model itself is run in place of its twin, and nothing stops it."""

    def itself(twin: Twin, module: nn.Module) -> nn.Module:
        twin.has_dropped_hooks = True
        return module

    monkeypatch.setattr(Twin, "_module", itself)
    monkeypatch.setattr(eager_look, "_Guard", lambda tensors: contextlib.nullcontext())
    with pytest.raises(AssertionError, match=r"assert \(\("):  # of the two states
        test_a_look_changes_nothing()


def test_nothing_of_it_stays() -> None:
    """P3: after close the compiled call of a model is what it was, and what it holds can be pickled meanwhile."""
    torch._dynamo.reset()
    net = Net()
    net.compile(backend="eager")
    call = net._compiled_call_impl
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with holter.watch(net, optimizer, run=False, machine=False, diagnose=False):
        assert net._compiled_call_impl is not call
        twin = copy.deepcopy(net)
        assert twin._compiled_call_impl is None
    assert net._compiled_call_impl is call


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_monitors_of_one_compiled_model_leave_in_any_order(order: tuple[int, int]) -> None:
    """P3, P4: nothing piles up where steps are taken without a forward, and after the last monitor nothing is left."""
    torch._dynamo.reset()
    net = Net()
    net.compile(backend="eager")
    call = net._compiled_call_impl
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    monitors = [holter.watch(net, optimizer, run=False, machine=False, diagnose=False) for _ in range(2)]
    stand_in = net._compiled_call_impl
    for _ in range(3):
        net(torch.randn(4, 8)).sum().backward()
        for _ in range(3):
            optimizer.step()
    assert net._compiled_call_impl is stand_in and stand_in.inner is call
    assert [len(monitor.history) for monitor in monitors] == [9, 9]
    monitors[order[0]].close()
    assert net._compiled_call_impl is stand_in
    monitors[order[1]].close()
    assert net._compiled_call_impl is call


def test_what_cannot_be_seen_is_tried_and_told_at_its_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[int] = []
    inner = ActivationCapture.arm
    monkeypatch.setattr(ActivationCapture, "arm", lambda *args, **options: armed.append(1) or inner(*args, **options))
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"machine": False, "diagnose": False, "budget": None, "activations": 3}
    with holter.watch(model, optimizer, run=False, **options) as monitor:
        for _ in range(7):
            checkpointed(model)
            optimizer.step()
    assert len(armed) == 3 and len(notes_of(monitor)) == 3
