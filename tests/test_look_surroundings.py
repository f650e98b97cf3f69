"""P2, P29: the look at a compiled model leaves the variables around the model as they were, or does not run it."""

from __future__ import annotations

import contextvars
import itertools
import random
import sys
import threading
import types
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holter
from holter import surroundings
from holter.eager_look import look
from holter.problems import Complaint

pytestmark = pytest.mark.filterwarnings("ignore")  # Dynamo warns of much
elsewhere: Any = types.ModuleType("elsewhere")
exec(  # another file, without a file
    "LOSSES, COUNT = [], 0\n"
    "class Registry:\n    losses, count = [], 0\n"
    "def note(loss):\n    LOSSES.append(loss)\n"
    "def count():\n    global COUNT\n    COUNT += 1\n",
    elsewhere.__dict__,
)


@pytest.fixture(autouse=True)
def _imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "elsewhere", elsewhere)


class Auxiliary:
    losses: ClassVar[list[Any]] = []
    count = 0

    @classmethod
    def add(cls, loss: Any) -> None:
        cls.losses.append(loss)


class Manager:
    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.count = 0
        self.inner: dict[str, tuple[list[Any]]] = {"deep": ([],)}

    def note(self, loss: Any) -> None:
        self.count += 1
        self.fresh = loss
        self.losses.append(loss)


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def counting(function: Callable[[Any], Any]) -> Any:
    calls = 0

    def counted(loss: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(loss)

    return counted


def remembering(loss: Any, seen: list[Any] = []) -> None:  # noqa: B006 - what trainings do
    seen.append(loss)
    remembering.last = loss  # type: ignore[attr-defined]


@counting
def counted(loss: Any) -> None:
    pass


@cache
def projection(width: int) -> Tensor:
    return torch.randn(width)


class Table:
    @staticmethod
    @lru_cache
    def row(width: int) -> Tensor:
        return torch.randn(width)


def caching(function: Callable[[int], Any]) -> Any:
    cached = lru_cache(function)

    def call(width: int) -> Any:
        return cached(width)

    return call


@caching
def drawn(width: int) -> Tensor:
    return torch.randn(width)


MANAGER, SLOTS, NOTE = Manager(), Slots(), elsewhere.note
STATE: dict[str, Any] = {"losses": [], "in": {"a": ([],)}}
LOCAL, VARIABLE = threading.local(), contextvars.ContextVar("VARIABLE", default=0)
CHANCE, NUMBERS, GENERATOR = random.Random(0), np.random.default_rng(0), torch.Generator().manual_seed(0)
LEGACY, ARRAY, BYTES = np.random.RandomState(0), np.zeros(3), bytearray(3)
LOCAL.losses = []


def by_import(loss: Any) -> None:
    from elsewhere import LOSSES  # type: ignore[import-not-found]

    LOSSES.append(loss)


def set_count(holder: Any) -> None:
    setattr(holder, "count", holder.count + 1)  # noqa: B010


CHANGES: dict[str, Callable[[Any], Any]] = {
    "class": lambda loss: Auxiliary.losses.append(loss),
    "attribute of a class": lambda loss: setattr(Auxiliary, "count", 1),
    "method of a class": Auxiliary.add,
    "class of another file": lambda loss: elsewhere.Registry.losses.append(loss),
    "object": lambda loss: MANAGER.losses.append(loss),
    "method of an object": lambda loss: MANAGER.note(loss),
    "within an object": lambda loss: MANAGER.inner["deep"][0].append(loss),
    "setattr": lambda loss: set_count(MANAGER),
    "slots": lambda loss: set_count(SLOTS),
    "nested": lambda loss: STATE["losses"].append(loss),
    "nested deeper": lambda loss: STATE["in"]["a"][0].append(loss),
    "function of another file": lambda loss: NOTE(loss),
    "name in another file": lambda loss: elsewhere.count(),
    "list in another file": lambda loss: elsewhere.LOSSES.append(loss),
    "attribute of another file": lambda loss: set_count_of_file(),
    "import within": by_import,
    "default": remembering,
    "closure": lambda loss: counted(loss),
    "thread local": lambda loss: LOCAL.losses.append(loss),
    "context variable": lambda loss: VARIABLE.set(VARIABLE.get() + 1),
    "generator of python": lambda loss: CHANCE.random(),
    "generator of numpy": lambda loss: NUMBERS.random(),
    "old generator of numpy": lambda loss: LEGACY.rand(),
    "generator of torch": lambda loss: torch.rand(1, generator=GENERATOR),
    "array": lambda loss: ARRAY.__iadd__(1),
    "bytes": lambda loss: BYTES.append(1),
    "cache": lambda loss: projection(4),
    "cache of a class": lambda loss: Table.row(4),
    "cache in a closure": lambda loss: drawn(4),
}


def set_count_of_file() -> None:
    elsewhere.COUNT += 1


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        change(self.kind, y.square().mean())
        return y


def change(kind: str, loss: Tensor) -> None:
    CHANGES[kind](loss)


def around() -> list[Any]:
    """All that a change may reach, as numbers."""
    lists = [Auxiliary.losses, elsewhere.Registry.losses, MANAGER.losses, MANAGER.inner["deep"][0], STATE["losses"]]
    lists += [STATE["in"]["a"][0], elsewhere.LOSSES, remembering.__defaults__[0], LOCAL.losses]  # type: ignore[index]
    counts = [Auxiliary.count, MANAGER.count, SLOTS.count, elsewhere.COUNT, VARIABLE.get()]
    counts += [counted.__closure__[0].cell_contents, hasattr(MANAGER, "fresh"), hasattr(remembering, "last")]
    states = [
        CHANCE.getstate(),
        str(NUMBERS.bit_generator.state),
        str(LEGACY.get_state()),
        ARRAY.tolist(),
        bytes(BYTES),
    ]
    caches = [projection.cache_info(), Table.row.cache_info(), drawn.__closure__[0].cell_contents.cache_info()]
    return [*map(len, lists), *counts, *states, *caches, GENERATOR.get_state().tolist()]


@pytest.mark.parametrize("kind", CHANGES)
def test_a_look_leaves_what_is_around_the_model_as_it_was(kind: str) -> None:
    model, x, earlier = Net(kind), torch.ones(2, 4), around()
    look(model, (x,), {}, lambda twin: None)
    assert around() == earlier and sys.getprofile() is None
    model(x)
    assert around() != earlier or "cache" in kind


def test_a_training_has_the_auxiliary_losses_of_its_own_forward_alone() -> None:
    torch._dynamo.reset()
    counts = []
    model = Net("method of an object")
    model.layer.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=False, machine=False, diagnose=False, activations=1) as monitor:
        for _ in range(3):
            MANAGER.losses.clear()
            loss = model(torch.ones(2, 4)).square().mean()
            counts.append(len(MANAGER.losses))
            torch.stack([loss, *MANAGER.losses]).sum().backward()
            optimizer.step()
    assert counts == [1, 1, 1]
    assert any("activation" in record.rows for record in monitor.history.records)


@pytest.mark.parametrize("kind", ["cache", "cache of a class", "cache in a closure"])
def test_what_a_look_would_leave_in_a_cache_is_drawn_by_the_training(kind: str) -> None:
    """A cached tensor of random numbers: its numbers, and those that come later, are those without the look."""
    numbers = []
    for is_looked_at in (False, True):
        projection.cache_clear()
        Table.row.cache_clear()
        drawn.__closure__[0].cell_contents.cache_clear()
        torch.manual_seed(0)
        model = Net(kind)
        for _ in range(2):
            if is_looked_at:
                look(model, (torch.ones(2, 4),), {}, lambda twin: None)
            model(torch.ones(2, 4))
        numbers.append(torch.rand(3))
    assert torch.equal(*numbers)


# What cannot be kept ------------------------------------------------------------------------------------------

AHEAD, LINES, WORKER = itertools.count(), iter("abc"), threading.Thread(target=print)
CACHES = [lru_cache(lambda: None)]
LARGE = list(range(60_000))


class Ends:
    def __del__(self) -> None: ...


ENDS = Ends()
REFUSED: dict[str, Callable[[], Any]] = {
    "count": lambda: next(AHEAD),
    "iterator": lambda: next(LINES),
    "thread": lambda: WORKER.name,
    "cache in a list": lambda: CACHES[0](),
    "large": lambda: LARGE.pop(),
    "what has an end": lambda: ENDS,
    "new thread": lambda: threading.Thread(target=int).start(),
}


class Hiding(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            REFUSED_ONE[0]()
        except Exception:  # what it hides must be known all the same
            MANAGER.count += 1
        y: Tensor = self.layer(x)
        return y


REFUSED_ONE: list[Any] = []


@pytest.mark.parametrize("kind", REFUSED)
def test_a_model_whose_surroundings_cannot_be_kept_is_not_looked_at(kind: str) -> None:
    REFUSED_ONE[:] = [REFUSED[kind]]
    earlier = repr(AHEAD), len(LARGE), MANAGER.count, LINES.__length_hint__(), threading.active_count()  # type: ignore[attr-defined]
    with pytest.raises(Complaint, match="outside"):
        look(Hiding(kind), (torch.ones(2, 4),), {}, lambda twin: None)
    assert earlier == (repr(AHEAD), len(LARGE), MANAGER.count, LINES.__length_hint__(), threading.active_count())  # type: ignore[attr-defined]
    assert sys.getprofile() is None


def test_a_profiler_of_the_users_is_not_replaced() -> None:
    def mine(*event: Any) -> None: ...

    sys.setprofile(mine)
    try:
        with pytest.raises(Complaint, match="profiler"):
            look(nn.Linear(4, 4), (torch.ones(2, 4),), {}, lambda twin: None)
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)


def test_losses_that_a_look_leaves_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """P29, planted fault: nothing is put back."""
    monkeypatch.setattr(surroundings.Surroundings, "put_back", lambda self: None)
    with pytest.raises(AssertionError, match=r"assert \(\["):
        test_a_look_leaves_what_is_around_the_model_as_it_was("object")
    MANAGER.losses.clear()


# Other threads ------------------------------------------------------------------------------------------------

COUNT = 0


def counting_on() -> None:
    """As a thread that loads data does, in the middle of a look."""
    global COUNT
    COUNT += 1
    MANAGER.count += 1


class Reads(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        thread_of(counting_on)
        return super().forward(x) * (1.0 if COUNT >= 0 and MANAGER.count >= 0 else 0.0)


def thread_of(work: Callable[[], None]) -> None:
    """Let the other thread work, and wait for it."""
    begin, done = STEPS
    begin.set()
    done.wait(10)


class Signal:
    """An event that a forward may name: a lock is none of the state of a model."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.lock.acquire()

    def set(self) -> None:
        self.lock.release()

    def wait(self, seconds: float) -> None:
        assert self.lock.acquire(timeout=seconds)


STEPS = Signal(), Signal()


def test_what_another_thread_counts_meanwhile_is_not_lost() -> None:
    def work() -> None:
        STEPS[0].wait(10)
        counting_on()
        STEPS[1].set()

    thread, earlier = threading.Thread(target=work), (COUNT, MANAGER.count)
    thread.start()
    look(Reads(4, 4), (torch.ones(2, 4),), {}, lambda twin: None)
    thread.join()
    assert (COUNT, MANAGER.count) == (earlier[0] + 1, earlier[1] + 1)


# Ordinary models are looked at --------------------------------------------------------------------------------


def built(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    size = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    size |= {"intermediate_size": 64, "max_position_embeddings": 64}
    made: nn.Module
    if name == "gpt2":
        made = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4))
    elif name == "llama":
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**size))
    else:
        made = transformers.BertForMaskedLM(transformers.BertConfig(**size))
    return made


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_models_of_transformers_are_looked_at(name: str) -> None:
    torch._dynamo.reset()
    model: Any = built(name)
    model.compile(backend="eager")
    ids = torch.randint(50, (4, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"machine": False, "diagnose": False, "budget": None, "activations": 1}
    with holter.watch(model, optimizer, run=False, **options) as monitor:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
    rows = [record.rows["activation"].layers for record in monitor.history.records if "activation" in record.rows]
    assert len(rows) == 2 and len(rows[0]) > 10, [record.notes["activations"] for record in monitor.history.records]
