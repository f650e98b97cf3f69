"""P3: a monitor leaves no trace; P4: it does not grow; P26: the model may change under it."""

from __future__ import annotations

import copy
import gc
import importlib
import io
import pickle
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import holter
from tests.models import MODELS, Training, make, mlp


def _traces(training: Training) -> dict[str, Any]:
    """All that a monitor could leave behind: on the model, the optimizer, the scaler and in torch's globals."""
    modules = {
        name: {key: value for key, value in vars(module).items() if not isinstance(value, torch.Tensor)}
        for name, module in training.model.named_modules()
    }
    return {
        "hooks": {n: {k: dict(v) for k, v in d.items() if "hooks" in k} for n, d in modules.items()},
        "keys": {name: sorted(vars(module)) for name, module in training.model.named_modules()},
        "tensor hooks": {n: p._backward_hooks for n, p in training.model.named_parameters()},
        "optimizer": sorted(vars(training.optimizer)),
        "optimizer hooks": {k: dict(v) for k, v in vars(training.optimizer).items() if "hooks" in k},
        "scaler": sorted(vars(training.scaler)) if training.scaler is not None else None,
        "torch": [
            dict(torch_optimizer._global_optimizer_pre_hooks),
            dict(torch_optimizer._global_optimizer_post_hooks),
        ],
        "model bytes": pickle.dumps(training.model),
    }


def _watch(training: Training) -> holter.Monitor:
    return holter.watch(training.model, training.optimizer, run=False, scaler=training.scaler, budget=None)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_left_after_close(name: str) -> None:
    """P3: hook dicts, attributes and pickle bytes are as before, after 100 attach/detach cycles too."""
    gc.collect()
    training = make(name)
    _watch(training).close()  # takes away what models of earlier tests left when they were collected
    before = _traces(training)
    for _ in range(100):
        _watch(training).close()
    assert _traces(training) == before
    weights = copy.deepcopy(training.model.state_dict())
    training.monitor = _watch(training)
    for _ in range(3):
        training.step()
    training.monitor.close()
    training.model.load_state_dict(weights)  # steps change the weights: put back, the bytes must be the old ones
    assert _traces(training) == before


def test_the_check_sees_a_hook_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """P3, planted fault: a detach that forgets."""
    training = make("mlp")
    before = _traces(training)
    monkeypatch.setattr("holter.capture.Capture.detach", lambda self: None)
    _watch(training).close()
    with pytest.raises(AssertionError):
        assert {k: v for k, v in _traces(training).items() if k != "model bytes"} == before


@pytest.mark.parametrize("name", MODELS)
def test_a_watched_model_can_be_copied_pickled_and_saved(name: str) -> None:
    """P3: deepcopy, pickle, torch.save and state_dict keys work while attached."""
    training = make(name)
    keys = list(training.model.state_dict())
    monitor = _watch(training)
    training.step()
    file = io.BytesIO()
    torch.save(training.model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(training.model),
        pickle.loads(pickle.dumps(training.model)),
        torch.load(file, weights_only=False),
    ]
    for twin in copies:
        assert list(twin.state_dict()) == keys == list(training.model.state_dict())
        x, y = training.batch()
        training.loss(twin, x, y).backward()
    copy.deepcopy(training.optimizer)
    pickle.dumps(training.optimizer)
    if training.scaler is not None:
        copied = copy.deepcopy(training.scaler)
        assert copied.state_dict() == training.scaler.state_dict()
    assert len(monitor.history) == 1


def test_a_saved_model_loads_where_holter_is_not_installed(tmp_path: Path) -> None:
    """P3: wandb #5573 made models unpicklable; ours do not even need Holter to be loaded."""
    model = nn.Linear(3, 2)
    holter.watch(model, torch.optim.SGD(model.parameters(), 0.1), run=False)
    torch.save(model, tmp_path / "model.pt")
    script = (
        "import sys, torch; sys.modules['holter'] = None\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        "print(model(torch.ones(1, 3)).shape)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0 and "[1, 2]" in done.stdout, done.stderr


def test_pickling_fails_with_a_lambda_hook() -> None:
    """P3, planted fault: the kind of hook that broke peers."""
    model = nn.Linear(3, 2)
    model.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(model)


@pytest.mark.parametrize("kept", ["monitor kept", "monitor dropped", "closed"])
def test_a_watched_model_can_be_garbage_collected(kept: str) -> None:
    """P3: a monitor holds neither the model nor the optimizer."""
    training = make("mlp")
    monitor: holter.Monitor | None = _watch(training)
    training.step()
    if kept == "closed":
        assert monitor is not None
        monitor.close()
    if kept == "monitor dropped":
        monitor = None
    model, optimizer = weakref.ref(training.model), weakref.ref(training.optimizer)
    del training
    gc.collect()
    assert model() is None and optimizer() is None
    if monitor is not None:
        assert monitor.state == "closed" and len(monitor.history) == 1


def test_a_run_whose_model_went_first_is_examined_to_its_end() -> None:
    """A function that trains and returns its monitor: close() and findings wait for what is left."""

    def train() -> holter.Monitor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        monitor = holter.watch(model, optimizer, run=False)
        for _ in range(300):
            inputs, targets = 40 * torch.randn(32, 8) + 133, torch.randint(3, (32,))
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss, inputs=inputs, targets=targets)
        return monitor

    for close in (True, False):
        monitor = train()
        gc.collect()
        if close:
            monitor.close()
        assert "input-scale" in [finding.cause for finding in monitor.findings] and len(monitor.history) == 300


def _growth(training: Training, steps: int) -> tuple[int, int]:
    """Resident bytes and live tensors that `steps` further steps add."""
    import psutil

    def now() -> tuple[int, int]:
        gc.collect()
        training.monitor.flush()
        training.monitor._examination.catch_up(30)  # its backlog is bounded, and now longer, now shorter
        training.losses.clear()
        training.random_states.clear()
        tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
        return psutil.Process().memory_info().rss, tensors

    before = now()
    for _ in range(steps):
        training.step()
        training.losses.clear()
        training.random_states.clear()
    after = now()
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.hurried
@pytest.mark.timeout(400)
@pytest.mark.parametrize("steps", [3000, pytest.param(10_000, marks=pytest.mark.gauntlet)])
def test_memory_does_not_grow_with_the_steps(steps: int, tmp_path: Path) -> None:
    """P4: after warm-up less than 1 MiB and no live tensor more."""
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run", budget=None)
    _growth(training, 2500)  # warm-up: allocator pools, caches, a full backlog of the diagnosis
    resident, tensors = _growth(training, steps)
    assert resident < 1 << 20 and tensors <= 0, (resident, tensors)
    assert training.monitor.step == 2500 + steps and training.monitor.dropped == 0
    training.monitor.close()


def test_the_memory_check_sees_a_list_that_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P4, planted fault: every draft is kept."""
    from holter.writer import Writer

    kept: list[object] = []
    honest = Writer.post
    monkeypatch.setattr(Writer, "post", lambda self, draft: (kept.append(draft), honest(self, draft))[1])
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run", budget=None)
    _growth(training, 100)
    assert _growth(training, 500)[1] > 0
    training.monitor.close()


def test_layers_that_come_and_go_do_not_make_the_file_or_the_memory_grow(tmp_path: Path) -> None:
    """P4: experts; a new set of layers every step must not be a new table of names every step."""
    experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(40))
    optimizer = torch.optim.SGD(experts.parameters(), 0.01)
    random = np.random.default_rng(0)
    with holter.watch(experts, optimizer, run=tmp_path / "run", budget=None, weights=None, histograms=None) as monitor:
        for _ in range(200):
            active = [experts[i] for i in random.choice(40, 20, replace=False)]
            sum(expert(torch.ones(1, 2)).sum() for expert in active).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert len(monitor.history.layers("gradient")) == 80
        assert monitor._writer._journal._encoder._count < 20  # tables: names are added, not listed anew
    assert (
        np.isfinite(holter.open_run(tmp_path / "run").history.series("gradient", "norm")[2]).sum(axis=1).tolist()
        == [40] * 200
    )


# P26 ----------------------------------------------------------------------------------------------------------


class Changing:
    """A training whose model and optimizer are changed between steps; what the last record saw."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.monitor = holter.watch(self.model, self.optimizer, run=False, budget=None, weights=1)

    def step(self) -> None:
        self.model(torch.randn(4, 12)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seen(self, role: str = "gradient") -> set[str]:
        assert self.monitor.findings == ()
        _, layers, norms = self.monitor.history.series(role, "norm")
        return {name for name, norm in zip(layers, norms[-1], strict=True) if np.isfinite(norm)}


def test_an_added_parameter_is_seen_at_the_next_record() -> None:
    """P26: wandb #2625."""
    training = Changing()
    training.step()
    training.model.append(nn.Linear(4, 4))
    training.optimizer.add_param_group({"params": training.model[-1].parameters()})
    training.step()
    assert {"4.weight", "4.bias"} <= training.seen()


def test_a_removed_parameter_is_gone_from_the_next_record() -> None:
    training = Changing()
    training.model.append(nn.Linear(4, 4))
    training.optimizer.add_param_group({"params": training.model[-1].parameters()})
    training.step()
    assert "4.weight" in training.seen()
    del training.model[-1]
    training.step()
    assert "4.weight" not in training.seen() | training.seen("weight")


def test_a_frozen_parameter_has_no_gradient_in_the_next_record() -> None:
    training = Changing()
    training.step()
    training.model[0].requires_grad_(False)
    training.step()
    assert training.seen() == {"3.weight", "3.bias"}
    training.model[0].requires_grad_(True)
    training.step()
    assert "0.weight" in training.seen()


def test_tied_weights_are_one_layer() -> None:
    training = Changing()
    training.model.append(nn.Linear(4, 4))
    training.model.append(nn.Linear(4, 4))
    training.optimizer.add_param_group({"params": training.model[4].parameters()})
    training.model[5].weight = training.model[4].weight
    training.step()
    assert "4.weight" in training.seen() and "5.weight" not in training.seen()


def test_a_model_that_changes_its_dtype_is_measured_on() -> None:
    """Moved: .to() replaces every parameter's data."""
    training = Changing()
    training.step()
    training.model.double()
    training.model(torch.randn(4, 12, dtype=torch.float64)).square().mean().backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in training.model.parameters()]))
    training.optimizer.step()
    assert training.monitor.history.scalar("gradient_norm")[1][-1] == pytest.approx(norm, rel=1e-12)


class Adapter(nn.Module):
    """LoRA around a linear layer, as adapter libraries wrap it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.base_layer = inner.requires_grad_(False)
        self.lora_A = nn.Linear(inner.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, inner.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def test_a_wrapped_layer_and_a_new_optimizer_are_seen_at_the_next_record() -> None:
    training = Changing()
    training.step()
    training.model[0] = Adapter(training.model[0])
    training.optimizer = torch.optim.Adam([p for p in training.model.parameters() if p.requires_grad], 0.01)
    training.step()
    assert len(training.monitor.history) == 2
    assert {"0.lora_A.weight", "0.lora_B.weight"} <= training.seen() and "0.weight" not in training.seen()
    assert "0.base_layer.weight" in training.seen("weight")


def test_a_swapped_optimizer_is_seen_and_a_foreign_one_is_not() -> None:
    training = Changing()
    training.step()
    training.optimizer = torch.optim.AdamW(training.model.parameters(), 0.5)
    training.step()
    assert training.monitor.history.scalar("learning_rate")[1].tolist() == [0.01, 0.5]
    other = nn.Linear(2, 2)
    foreign = torch.optim.SGD(other.parameters(), 0.1)
    other(torch.ones(1, 2)).sum().backward()
    foreign.step()
    assert len(training.monitor.history) == 2


def test_a_change_goes_unseen_when_names_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """P26, planted fault: parameters listed once, at the start."""
    from holter.capture import Layers

    honest = Layers.everything
    first: dict[int, Any] = {}
    monkeypatch.setattr(Layers, "everything", lambda self: first.setdefault(id(self), honest(self)))
    training = Changing()
    training.step()
    training.model.append(nn.Linear(4, 4))
    training.optimizer.add_param_group({"params": training.model[-1].parameters()})
    training.step()
    assert "4.weight" not in training.seen()


class Pruned:
    """A training whose first layer is dropped, at a step at which nothing but updates is measured."""

    def __init__(self, **pace: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(4)])
        self.optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(self.model.parameters(), 0.01)]
        self.monitor = holter.watch(
            self.model, self.optimizers, run=False, every=7, weights=None, activations=None, budget=None, **pace
        )

    def step(self) -> dict[str, float]:
        """Return how far each parameter was moved."""
        before = {name: one.detach().clone() for name, one in self.model.named_parameters()}
        self.model(torch.randn(8, 4)).square().mean().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return {name: float((one.detach() - before[name]).norm()) for name, one in self.model.named_parameters()}


def test_layers_that_move_up_have_their_new_names_in_all_roles() -> None:
    """`del model[0]` brings no parameter that is new: all that are left have other names."""
    training, truth = Pruned(updates=1, optimizer_state=1), []
    for step in range(12):
        if step == 8:
            del training.model[0]
        truth.append(training.step())
    for record in training.monitor.history.records:
        rows = record.rows["update"]
        assert rows.layers == record.rows["second_moment"].layers == tuple(truth[record.step])
        np.testing.assert_allclose(rows.rows.derive("norm"), list(truth[record.step].values()), rtol=1e-4)


@pytest.mark.parametrize("count", [1, 4])
def test_names_are_looked_for_once_a_step_and_only_where_they_are_needed(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6: a walk through a large model takes longer than all else that is done at an ordinary step."""
    from holter import capture

    training, walks = Pruned(updates=5, optimizer_state=5), []
    if count > 1:
        training.optimizers[:] = [torch.optim.Adam([one], 0.01) for one in training.model.parameters()]
    for _ in range(8):
        training.step()
    walk = capture._walk

    def counted(model: nn.Module) -> Any:
        walks.append(training.monitor._collector.step)
        return walk(model)

    monkeypatch.setattr(capture, "_walk", counted)
    for _ in range(13):
        training.step()
    needed = {record.step for record in training.monitor.history.records if record.rows}
    needed |= {step - 1 for step in needed}  # gradients are sampled one step ahead of an update
    assert walks and len(walks) == len(set(walks)) and set(walks) <= needed
    assert len(needed & set(range(8, 21))) < 13


# The moment at which a monitor is closed, and what else may run the model --------------------------------------


_JIT = pytest.mark.filterwarnings("ignore:.torch.jit.(trace|trace_method|script). is deprecated:DeprecationWarning")


def test_the_garbage_collector_may_close_a_monitor_while_another_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the `__del__` of a trainer, on the same thread: that must not wait for itself, nor be undone."""
    from holter import capture

    class Collecting(list[Any]):
        def __iter__(self) -> Any:
            yield from tuple(super().__iter__())
            collect()

        def remove(self, one: Any) -> None:
            super().remove(one)
            collect()

    def collect() -> None:
        if inner:
            inner.pop().close()

    trainings = [make("mlp") for _ in range(2)]
    outer, second = map(_watch, trainings)
    inner: list[holter.Monitor] = []
    monkeypatch.setattr(capture, "_listening", Collecting(capture._listening))
    inner.append(second)
    thread = threading.Thread(target=outer.close, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and not inner
    assert not {outer._capture, second._capture} & set(capture._listening)


@pytest.mark.parametrize("module", ["capture", "replays"])
def test_no_lock_is_waited_for_by_the_thread_that_holds_it(module: str) -> None:
    training = make("mlp")
    monitor = _watch(training)

    def close() -> None:
        with importlib.import_module(f"holter.{module}")._changing:
            monitor.close()

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@_JIT
def test_a_watched_model_is_traced_as_one_that_is_not() -> None:
    """Also when activations are due: what measures them is none of the model's."""
    graphs = []
    for is_watched in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        monitor = holter.watch(model, optimizer, run=False, budget=None, activations=1) if is_watched else None
        graphs.append(str(torch.jit.trace(model, torch.ones(1, 4)).inlined_graph).count("aten::"))  # type: ignore[no-untyped-call]
        if monitor is not None:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            assert monitor.history.layers("activation") and monitor.findings == ()
    assert graphs[0] == graphs[1]


@_JIT
def test_scripting_a_watched_model_is_refused_with_a_way_out() -> None:
    training = make("mlp")
    training.monitor = _watch(training)
    with pytest.raises(AttributeError, match=r"torch.jit.script.*before watch\(\) or after close\(\)"):
        torch.jit.script(training.model)
    training.monitor.close()
    torch.jit.script(training.model)
