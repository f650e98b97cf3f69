"""Optimizers that are not torch's, or wrap one of torch's: their steps are seen, what they do stays the same to the
last bit, and what cannot be seen is refused before the training, with a way out."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import pickle
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import holter
from holter import imitations
from holter.monitor import Monitor
from holter.optimizers import tells_of_steps

STEPS = 5
Parameters = Iterable[nn.Parameter]


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


class Plain:
    """Written by hand: a list of parameters and a rate."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        self.params, self.lr = list(params), lr

    def step(self, closure: Callable[[], Tensor] | None = None) -> str:
        loss = closure() if closure is not None else None
        with torch.no_grad():
            for one in self.params:
                if one.grad is not None:
                    one -= self.lr * one.grad
        return f"stepped {loss is not None}"

    def zero_grad(self) -> None:
        for one in self.params:
            one.grad = None


class Fastai(Plain):
    """As fastai's own: lists of parameters, and groups that are made anew whenever they are asked for."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.param_lists, self.hypers = [self.params[:2], self.params[2:]], [{"lr": 0.1, "wd": 0.5}, {"lr": 0.2}]
        self.state: dict[Any, Any] = {one: {"grad_avg": torch.zeros_like(one), "step": 3} for one in self.params}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [{"params": list(own), **hyper} for own, hyper in zip(self.param_lists, self.hypers, strict=True)]


class Nested(Plain):
    """What it steps lies deeper."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.kept = {"all": [{"tensors": tuple(self.params)}]}
        self.buffers = {one: torch.zeros_like(one) for one in self.params}
        del self.params

    def step(self, closure: Any = None) -> str:
        self.params = list(self.kept["all"][0]["tensors"])
        told = super().step(closure)
        del self.params
        return told

    def zero_grad(self) -> None:
        for one in self.buffers:
            one.grad = None


class OddInit(torch.optim.Optimizer):
    """A subclass of torch's that does not call its `__init__`: torch's hooks never hear of it."""

    def __init__(self, params: Parameters) -> None:
        self.param_groups = [{"params": list(params), "lr": 0.1}]
        self.state, self.defaults = {}, {}  # type: ignore[assignment]

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return Plain.step(self, closure)  # type: ignore[arg-type]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for one in self.params:
            one.grad = None

    params = property(lambda self: self.param_groups[0]["params"])
    lr = property(lambda self: self.param_groups[0]["lr"])


class Wrapper:
    """Under any name, in any container."""

    def __init__(self, inner: Any, name: str) -> None:
        vars(self)[name] = inner
        self.name = name

    def step(self) -> None:
        inner = vars(self)[self.name]
        for one in inner if isinstance(inner, list) else inner.values() if isinstance(inner, dict) else [inner]:
            one.step()


class Accelerated(torch.optim.Optimizer):
    """As accelerate's: a subclass of torch's, without its `__init__`, whose step may do nothing."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.calls = 0

    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        if self.calls % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass


class Lookahead(Wrapper):
    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner, "base")
        self.slow = [one.detach().clone() for group in inner.param_groups for one in group["params"]]

    def step(self) -> None:
        super().step()
        with torch.no_grad():
            for slow, group in zip(self.slow, self.base.param_groups[0]["params"], strict=True):  # type: ignore[attr-defined]
                group.copy_(slow.lerp_(group, 0.5))


class LayerWise(torch.optim.Optimizer):
    """As in transformers: torch's class with a parameter of its own, which holds the optimizers of the layers."""

    def __init__(self, optimizers: dict[str, torch.optim.Optimizer]) -> None:
        super().__init__([torch.zeros(1)], {"lr": 0.1})
        self.optimizer_dict = optimizers

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.optimizer_dict.values():
            one.step()


class Lazy:
    """As pyro's: no step, and optimizers that are made when a parameter is first seen."""

    def __init__(self, kind: type[torch.optim.Optimizer]) -> None:
        self.kind = kind
        self.made: dict[Tensor, torch.optim.Optimizer] = {}

    def __call__(self, parameters: Parameters) -> None:
        for one in parameters:
            self.made.setdefault(one, self.kind([one], lr=0.1)).step()  # type: ignore[call-arg]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


def each(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    return {name: torch.optim.SGD([one], 0.1) for name, one in model.named_parameters()}


MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: Plain(model.parameters()),
    "fastai": lambda model: Fastai(model.parameters()),
    "nested": lambda model: Nested(model.parameters()),
    "odd init": lambda model: OddInit(model.parameters()),
    "lookahead": lambda model: Lookahead(sgd(model)),
    "layer-wise": lambda model: LayerWise(each(model)),
    "wrapper of an imitation": lambda model: Wrapper(Plain(model.parameters()), "optimizer"),
    "two wrappers": lambda model: Wrapper(Wrapper(sgd(model), "_optimizer"), "optimizer"),
    "wrapper of a list": lambda model: Wrapper(list(each(model).values()), "optimizers"),
    "wrapper of a dictionary": lambda model: Wrapper(each(model), "_opts"),
    **{
        f"wrapper.{name}": functools.partial(lambda name, model: Wrapper(sgd(model), name), name)
        for name in ("optimizer", "_optimizer", "base_optimizer", "opt", "inner", "whatever")
    },
}


def train(model: nn.Module, optimizer: Any, take: Callable[[], Any] | None = None) -> list[float]:
    """The norms of all gradients, in float64."""
    norms = []
    for _ in range(STEPS):
        model(torch.randn(4, 6)).square().mean().backward()
        gradients = [one.grad.double() for one in model.parameters() if one.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        (take or optimizer.step)()
        model.zero_grad()
    return norms


def watch(model: nn.Module, optimizer: Any, **more: Any) -> Monitor:
    return holter.watch(model, optimizer, run=False, budget=None, updates=1, weights=1, **more)


def assert_seen(monitor: Monitor, truth: list[float], model: nn.Module) -> None:
    history = monitor.history
    assert history.scalar("gradient_norm")[0].tolist() == list(range(len(truth))) == history.steps.tolist()
    assert history.scalar("gradient_norm")[1].tolist() == pytest.approx(truth, rel=1e-6)
    names = sorted(name for name, _ in model.named_parameters())
    for record in history.records:
        assert sorted(record.rows["update"].layers) == sorted(record.rows["gradient"].layers) == names
        assert (
            record.rows["weight"].extras["held"].all() and (record.rows["update"].rows.column("sum_squares") > 0).all()
        )
    assert not monitor.findings


@pytest.mark.parametrize("kind", MAKE)
def test_an_optimizer_that_is_not_torchs_is_seen(kind: str) -> None:
    weights = []
    for is_watched in (True, False):
        model = mlp()
        optimizer = MAKE[kind](model)
        before = dict(vars(optimizer))
        monitor = watch(model, optimizer) if is_watched else None
        truth = train(model, optimizer)
        weights.append([one.detach().clone() for one in model.parameters()])
        if monitor is not None:
            assert_seen(monitor, truth, model)
            monitor.close()
            assert vars(optimizer).keys() == before.keys()
            train(model, optimizer)
            assert len(monitor.history) == STEPS
    assert all(map(torch.equal, *weights))


def test_what_an_imitation_keeps_is_recorded_under_torchs_names() -> None:
    model = mlp()
    optimizer = Fastai(model.parameters())
    with watch(model, optimizer, optimizer_state=1) as monitor:
        train(model, optimizer)
    history = monitor.history
    assert set(history.scalar("learning_rate")[1]) == {0.1} and set(history.scalar("learning_rate/1")[1]) == {0.2}
    assert set(history.scalar("weight_decay")[1]) == {0.5} and set(history.scalar("optimizer_step")[1]) == {3}
    assert len(history.layers("momentum")) == 4
    model = mlp()
    with watch(model, Plain(model.parameters(), 0.25)) as monitor:
        train(model, None, Plain(model.parameters(), 0.5).step)  # another one, that trains the model all the same
    assert set(monitor.history.scalar("learning_rate")[1]) == {0.5}


def test_a_wrappers_call_that_takes_no_step_is_none() -> None:
    model = mlp()
    optimizer = Accelerated(sgd(model))
    assert not tells_of_steps(optimizer)
    monitor = watch(model, optimizer)
    for _ in range(6):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
    assert monitor.history.steps.tolist() == [0, 1, 2]


def test_optimizers_that_are_made_while_training_are_one_step() -> None:
    weights = []
    for is_watched in (True, False):
        model = mlp()
        lazy = Lazy(torch.optim.SGD)
        monitor = watch(model, lazy) if is_watched else None
        truth = train(model, lazy, lambda: lazy(model.parameters()))  # noqa: B023
        weights.append([one.detach().clone() for one in model.parameters()])
        if monitor is not None:
            assert_seen(monitor, truth, model)
    assert all(map(torch.equal, *weights))


GIVEN: dict[str, Callable[[nn.Module], Any]] = {
    "a dictionary": each,
    "a dictionary by parameters": lambda model: {one: torch.optim.SGD([one], 0.1) for one in model.parameters()},
    "a generator": lambda model: (torch.optim.SGD([one], 0.1) for one in model.parameters()),
    "a tuple": lambda model: tuple(each(model).values()),
    "lists in a list": lambda model: [[one] for one in each(model).values()],
    "wrappers in a list": lambda model: [Wrapper(one, "opt") for one in each(model).values()],
    "imitations in a dictionary": lambda model: {
        name: Plain(part.parameters()) for name, part in model.named_children() if list(part.parameters())
    },
    "one twice": lambda model: [one := sgd(model), one, Wrapper(one, "opt")],
    "Lightning's": lambda model: [
        {"optimizer": (one := sgd(model)), "lr_scheduler": torch.optim.lr_scheduler.StepLR(one, 1, 1.0)}
    ],
}


@pytest.mark.parametrize("kind", GIVEN)
def test_optimizers_are_taken_in_whatever_they_come(kind: str) -> None:
    model = mlp()
    given = GIVEN[kind](model)
    taken: list[Any] = []
    if isinstance(given, Iterator):
        taken = list(given)
        given = iter(taken)
    monitor = watch(model, given)

    def flat(one: Any) -> Iterator[Any]:
        if isinstance(one, dict):
            one = [value for value in one.values() if not isinstance(value, torch.optim.lr_scheduler.LRScheduler)]
        if isinstance(one, list | tuple):
            for inner in one:
                yield from flat(inner)
        else:
            yield one

    optimizers = {id(getattr(one, "opt", one)): one for one in flat(taken or given)}
    assert_seen(monitor, train(model, None, lambda: [one.step() for one in optimizers.values()]), model)


class Slotted:
    __slots__ = ("params",)

    def __init__(self, params: Parameters) -> None:
        self.params = [{"params": list(params)}]

    param_groups = property(lambda self: self.params)

    def step(self) -> None: ...


class NoStep:
    def __init__(self, params: Parameters) -> None:
        self.params = list(params)


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "parameters": (lambda model: model.parameters(), r"These are parameters: give the optimizer"),
    "a list of parameters": (lambda model: list(model.parameters()), r"These are parameters: give the optimizer"),
    "nothing": (lambda model: [], r"got a list"),
    "none": (lambda model: None, r"got a NoneType.*not made yet.*learn\.create_opt\(\).*HolterCallback"),
    "none of two": (lambda model: {"a": sgd(model), "b": None}, r"got a NoneType.*not made yet.*make it first"),
    "a name": (lambda model: "adam", r"got a str"),
    "a class": (lambda model: torch.optim.Adam, r"got Adam itself"),
    "a class to be": (lambda model: functools.partial(torch.optim.Adam, lr=0.1), r"got a partial"),
    "the model": (lambda model: model, r"got a Sequential.*param_groups.*list of them"),
    "no step": (lambda model: NoStep(model.parameters()), r"got a NoStep.*step\(\).*torch.optim.Optimizer"),
    "others' parameters": (lambda model: Plain(mlp().parameters()), r"got a Plain.*parameters of this model"),
    "another's of torch": (lambda model: sgd(mlp()), r"SGD holds none.*parameters\(\)"),
    "one of two": (lambda model: [sgd(model), sgd(mlp())], r"SGD holds none.*parameters\(\)"),
    "a wrapper of another's": (lambda model: Wrapper(sgd(mlp()), "optimizer"), r"got a Wrapper"),
    "slots": (lambda model: Slotted(model.parameters()), r"has slots.*torch.optim.Optimizer inside"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_seen_is_refused_with_a_way_out(kind: str) -> None:
    model = mlp()
    make, words = REFUSED[kind]
    given = make(model)
    with pytest.raises(ValueError, match=words):
        holter.watch(model, given, run=False)
    assert not isinstance(given, Plain) or "step" not in vars(given)


class Tight:
    __slots__ = ("__inner", "never_set", "x")

    def __init__(self, optimizer: Any) -> None:
        self.__inner, self.x = optimizer, 1

    def step(self) -> None:
        self.__inner.step()


class TightBelow(Tight):
    __slots__ = "more"


class LooseBelow(Tight):
    pass


@pytest.mark.parametrize("kind", [Tight, TightBelow, LooseBelow])
def test_a_wrapper_with_slots_is_looked_into(kind: type[Tight]) -> None:
    model = mlp()
    one = kind(sgd(model))
    monitor = watch(model, one)
    assert_seen(monitor, train(model, one), model)


# P3: no trace -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Plain, Fastai, Nested])
def test_copies_of_a_watched_imitation_step_alone(kind: Callable[[Parameters], Any]) -> None:
    model = mlp()
    optimizer = kind(model.parameters())
    with watch(model, optimizer) as monitor:
        for make in (copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))):
            twin = make(optimizer)
            assert type(twin) is type(optimizer)
            assert twin.step() == "stepped False"
        assert b"holter" not in pickle.dumps(optimizer)
        assert not len(monitor.history)
        assert_seen(monitor, train(model, optimizer), model)


class OwnStep(Plain):
    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.step = self.descend  # type: ignore[method-assign]

    def descend(self, closure: Callable[[], Tensor] | None = None) -> str:
        return Plain.step(self, closure)


@pytest.mark.parametrize(
    "make", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copied", "pickled"]
)
def test_a_copy_of_an_optimizer_with_a_step_of_its_own_steps_its_own_weights(make: Callable[[Any], Any]) -> None:
    """P2: as where a teacher, or the best model so far, is copied with its optimizer while it is watched."""
    model = mlp()
    optimizer = OwnStep(model.parameters())
    with watch(model, optimizer) as monitor:
        train(model, optimizer)
        twin, twins_optimizer = make((model, optimizer))
        before, twins_before = (copy.deepcopy(one.state_dict()) for one in (model, twin))
        twin(torch.ones(3, 6)).square().mean().backward()
        twins_optimizer.step()
        assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
        assert not all(torch.equal(one, twins_before[name]) for name, one in twin.state_dict().items())
        assert len(monitor.history) == STEPS and b"holter" not in pickle.dumps(optimizer)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_monitors_of_one_imitation_leave_in_any_order(order: tuple[int, ...]) -> None:
    model = mlp()
    optimizer = Plain(model.parameters())
    monitors = [watch(model, optimizer) for _ in range(3)]
    truth = train(model, optimizer)
    for monitor in monitors:
        assert monitor.history.scalar("gradient_norm")[1].tolist() == pytest.approx(truth, rel=1e-6)
    for place in order:
        monitors[place].close()
    assert "step" not in vars(optimizer) and optimizer.step() == "stepped False"


def test_imitations_may_be_watched_on_several_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(weakref.WeakSet[Any]):
        def __iter__(self) -> Iterator[Any]:
            for one in super().__iter__():
                if threading.current_thread() is threading.main_thread():
                    threads.append(threading.Thread(target=watch_another))
                    threads[-1].start()
                    threads[-1].join(0.3)  # where it may, it begins in between
                yield one

    def watch_another() -> None:
        model = mlp()
        kept.append((model, type("Other", (Plain,), {})(model.parameters())))
        monitors.append(watch(*kept[-1]))

    monkeypatch.setattr(imitations, "_stand_ins", Slow())
    threads: list[threading.Thread] = []
    kept: list[Any] = []
    monitors: list[Monitor] = []
    watch_another()
    watch_another()  # looks through those that are there
    for thread in threads:
        thread.join()
    assert threads and len(monitors) == 2 + len(threads)
    for monitor in monitors:
        monitor.close()


def test_a_step_that_somebody_put_there_is_put_back() -> None:
    model = mlp()
    optimizer = Plain(model.parameters())
    calls = []
    theirs = lambda: calls.append(Plain.step(optimizer))  # noqa: E731
    optimizer.step = theirs  # type: ignore[assignment, method-assign]
    with watch(model, optimizer) as monitor:
        assert_seen(monitor, train(model, optimizer), model)
    assert vars(optimizer)["step"] is theirs and len(calls) == STEPS
    monitor = watch(model, optimizer)
    optimizer.step = theirs  # type: ignore[assignment, method-assign]
    monitor.close()
    assert vars(optimizer)["step"] is theirs


@pytest.mark.parametrize("kind", [Plain, Fastai])
def test_one_that_takes_the_place_of_an_imitation_is_seen_at_its_first_step(kind: Callable[[Parameters], Any]) -> None:
    """P26: as fastai's Learner makes a new one for a second fit; others of the class stay unwatched."""
    model, other = mlp(), mlp()
    monitor = watch(model, kind(model.parameters()))
    for fit in range(2):
        optimizer, aside = kind(model.parameters()), kind(other.parameters())
        for _ in range(STEPS):
            for net, one in ((model, optimizer), (other, aside)):
                net(torch.ones(3, 6)).square().mean().backward()
                one.step()
                one.zero_grad()
            monitor.log(fit=fit)
    monitor.close()
    assert monitor.findings == ()
    assert monitor.history.scalar("fit")[1].tolist() == [0.0] * STEPS + [1.0] * STEPS


def test_a_scheduler_finds_the_step_that_it_wraps() -> None:
    """torch's take the function of a bound method."""
    model = mlp()
    optimizer = OddInit(model.parameters())
    monitor = watch(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(3):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    assert monitor.history.scalar("learning_rate")[1].tolist() == [0.1, 0.05, 0.025]


def test_an_imitation_whose_step_raises_takes_the_next_one() -> None:
    model = mlp()
    optimizer = Plain(model.parameters())
    monitor = watch(model, optimizer)
    params = optimizer.params
    model(torch.randn(4, 6)).square().mean().backward()
    del optimizer.params
    with pytest.raises(AttributeError):
        optimizer.step()
    optimizer.params = params
    model.zero_grad()
    assert_seen(monitor, train(model, optimizer), model)


def test_an_imitation_returns_what_it_returns_and_takes_a_closure() -> None:
    model = mlp()
    optimizer = Plain(model.parameters())
    monitor = watch(model, optimizer)
    truth = []

    def closure() -> Tensor:
        model.zero_grad()
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        truth.append(float(torch.nn.utils.get_total_norm([one.grad.double() for one in model.parameters()])))
        return loss

    for _ in range(3):
        assert optimizer.step(closure) == "stepped True"
    assert monitor.history.scalar("gradient_norm")[1].tolist() == pytest.approx(truth, rel=1e-6)


@pytest.mark.parametrize("kind", ["imitation", "wrapper"])
def test_a_scalers_skipped_step_is_that_of_the_optimizer_inside(kind: str) -> None:
    model = mlp()
    inner = sgd(model)
    optimizer: Any = Plain(model.parameters()) if kind == "imitation" else inner
    if kind == "imitation":
        optimizer.param_groups = [{"params": optimizer.params}]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monitor = watch(model, optimizer if kind == "imitation" else Wrapper(inner, "optimizer"), scaler=scaler)
    for step in range(3):
        scaler.scale(model(torch.randn(4, 6)).square().mean()).backward()
        if step == 1:
            model[0].weight.grad.fill_(float("inf"))
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        model.zero_grad()
    assert monitor.history.scalar("skipped")[1].tolist() == [0, 1, 0]
    assert not monitor._problems


def test_model_and_imitation_can_be_collected() -> None:
    model = mlp()
    optimizer = Plain(model.parameters())
    watch(model, optimizer)
    train(model, optimizer)
    gone = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)
    del model, optimizer
    gc.collect()
    holter.watch(one := mlp(), sgd(one), run=False).close()  # hooks of the other are taken away by now
    gc.collect()
    assert [one() for one in gone] == [None] * 3


class Keeper(Plain):
    """Has a `step` of its own, which holds it."""

    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.step = lambda: Plain.step(self)  # type: ignore[assignment, method-assign, misc]


@pytest.mark.parametrize("end", ["left open", "closed", "wrapped and closed", "wrapped and left open"])
def test_an_optimizer_whose_own_step_holds_it_can_be_collected(end: str) -> None:
    """With its weights: the monitor that is kept holds neither."""
    model = mlp()
    optimizer = Keeper(model.parameters())
    monitor = watch(model, optimizer)
    train(model, optimizer)
    if end.startswith("wrapped"):  # as by a scheduler or a profiler
        theirs = optimizer.step
        optimizer.step = lambda: theirs()  # type: ignore[assignment, method-assign, misc]
        train(model, optimizer)
        del theirs
    if end.endswith("closed"):
        monitor.close()
    gone = weakref.ref(model), weakref.ref(optimizer), weakref.ref(model[0].weight)
    del model, optimizer
    gc.collect()
    assert [one() for one in gone] == [None] * 3
    assert len(monitor.history) == STEPS * (1 + end.startswith("wrapped"))


def test_optimizers_that_each_step_makes_anew_do_not_pile_up() -> None:
    """P4: what told of the steps of those that are gone goes with them."""
    model = mlp()
    with watch(model, Plain(model.parameters())) as monitor:
        for _ in range(30):
            train(model, Plain(model.parameters()))
        assert len(monitor._capture._stand_ins) <= 2
    assert len(monitor.history) == 30 * STEPS
    assert Plain.step.__qualname__ == "Plain.step" and not hasattr(Plain.step, "__wrapped__")


class LateMaker(Plain):
    """Not torch's, but steps one of torch's inside, which it makes at its first step."""

    inner: torch.optim.Optimizer | None = None

    def step(self, closure: Any = None) -> str:
        self.inner = self.inner or torch.optim.SGD(self.params, self.lr)
        self.inner.step(closure)
        return "stepped"


class LateWithOwnStep(LateMaker):
    def __init__(self, params: Parameters) -> None:
        super().__init__(params)
        self.step = functools.partial(LateMaker.step, self)  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", [LateMaker, LateWithOwnStep])
def test_a_step_of_torchs_inside_that_of_an_imitation_is_part_of_it(kind: type[LateMaker]) -> None:
    """P27: exactly one record for each."""
    model = mlp()
    optimizer = kind(model.parameters())
    monitor = watch(model, optimizer)
    assert_seen(monitor, train(model, optimizer), model)


@pytest.mark.parametrize(
    "other", [sgd, lambda model: Plain(model.parameters()), lambda model: Wrapper(sgd(model), "o")]
)
def test_a_skipped_step_of_another_models_optimizer_is_none_of_ours(other: Callable[[nn.Module], Any]) -> None:
    """As of a GAN, whose two optimizers step under one scaler."""
    model, theirs = mlp(), mlp()
    optimizers = (sgd(model), other(theirs))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with watch(model, optimizers[0], scaler=scaler) as monitor:
        for step in range(3):
            for net, optimizer in zip((model, theirs), optimizers, strict=True):
                scaler.scale(net(torch.randn(4, 6)).square().mean()).backward()
                if step == 1 and net is theirs:
                    theirs[0].weight.grad.fill_(float("inf"))
                if not isinstance(optimizer, torch.optim.Optimizer):
                    optimizer.param_groups = [{"params": list(theirs.parameters())}]  # a scaler asks for them
                scaler.step(optimizer)
                net.zero_grad()
            scaler.update()
        assert monitor.findings == () and not monitor._problems
    assert monitor.history.scalar("skipped")[1].tolist() == [0, 0, 0]
