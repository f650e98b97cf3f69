"""D7, E35: what is measured, and how often, is the user's choice, role by role."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import holter
from holter import collector, machine, monitor
from holter.settings import HISTOGRAMS, Settings
from tests.models import Training, differences, make, mlp


def trained(steps: int = 7, **options: Any) -> Training:
    training = make("mlp")
    training.monitor = holter.watch(
        training.model, training.optimizer, **{"run": False, "budget": None, "weights": 1, "activations": 1, **options}
    )
    for _ in range(steps):
        training.step()
    return training


ALONE = {  # what is not measured at every step takes turns, so each role is looked at without the others
    "gradient": {"weights": None, "activations": None},
    "weight": {"activations": None},
    "activation": {"weights": None},
    "batch": {"weights": None, "activations": None},
}


def histogram_steps(training: Training, role: str) -> list[int]:
    history = training.monitor.history
    return history.histogram(role, history.layers(role)[0])[0].tolist()  # type: ignore[no-any-return]


def only(role: str, pace: int) -> dict[str, int | None]:
    """A pace for one role, none for the others."""
    return {**dict.fromkeys(HISTOGRAMS), role: pace}


# Histograms, role by role ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ALONE)
def test_every_role_has_its_own_pace(role: str) -> None:
    training = trained(histograms=only(role, 3), updates=None, optimizer_state=None, **ALONE[role])
    assert histogram_steps(training, role) == [0, 3, 6]
    others = [other for other in training.monitor.history.roles if other != role]
    assert others and not any(histogram_steps(training, other) for other in others)


def test_a_pace_that_is_not_the_roles_own_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: one pace for all of them."""
    monkeypatch.setattr(Settings, "histogram_pace", lambda self, kind: 3)
    assert histogram_steps(trained(histograms=only("weight", 3)), "gradient") != []


def test_one_pace_is_that_of_all_and_a_role_that_is_not_named_has_the_default() -> None:
    for kind in HISTOGRAMS:
        assert Settings(histograms=3).histogram_pace(kind) == 3
        assert Settings(histograms=None).histogram_pace(kind) is None
        assert Settings(histograms={}).histogram_pace(kind) == 100 == Settings().histogram_pace(kind)
    assert all(len(histogram_steps(trained(histograms=2), role)) > 1 for role in ("gradient", "weight"))


def test_several_optimizers_and_batches_are_of_their_role() -> None:
    settings = Settings(histograms={"gradient": 5, "batch": 7})
    assert [settings.histogram_pace(kind) for kind in ("gradient 140", "batch inputs", "weight")] == [5, 7, 100]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"histograms": {"gradients": 10}},
            "histograms: there is no role 'gradients' that has them; give a pace to 'g",
        ),
        ({"histograms": {"weight": 0}}, r"histograms\['weight'\]=0: give a whole number of steps, at least 1, or None"),
        ({"histograms": {"weight": True}}, r"histograms\['weight'\]=True: give a whole number"),
        ({"histograms": [100]}, r"histograms=\[100\]: give a whole number"),
        ({"stages": None}, "stages=None: give True or False"),
        ({"machine": 1}, "machine=1: give True or False"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], told: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=told):
        holter.watch(model, torch.optim.SGD(model.parameters(), 0.1), run=False, **options)


# Stages and machine ---------------------------------------------------------------------------------------------


def scalars(training: Training, prefix: str) -> list[str]:
    return [name for name in training.monitor.history.scalars if name.startswith(prefix)]


def test_both_are_on_unless_they_are_switched_off() -> None:
    training = trained(2)
    assert scalars(training, "time/") and scalars(training, "machine/")


def test_stages_that_are_off_take_no_times_and_hook_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("a stage was timed")

    monkeypatch.setattr(monitor, "Stages", forbidden)
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False, stages=False)
    assert not training.model._forward_hooks and len(training.model._forward_pre_hooks) == 1
    for x in training.monitor.batches([training.batch()[0]]):
        assert x.shape == (16, 12)
        training.step()
    assert scalars(training, "time/") == [] and training.monitor.findings == ()
    assert "step_time" in training.monitor.history.scalars


def test_a_machine_that_is_off_is_never_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("the machine was looked at")

    monkeypatch.setattr(monitor, "Machine", forbidden)
    monkeypatch.setattr(collector, "CollectiveClock", forbidden)
    training = trained(2, machine=False)
    assert scalars(training, "machine/") == [] and training.monitor.findings == ()


def test_the_machine_is_looked_at_off_the_training_thread_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, closed = [], []
    honest = machine.Machine.scalars
    monkeypatch.setattr(
        machine.Machine, "scalars", lambda self: (threads.append(threading.current_thread()), honest(self))[1]
    )
    monkeypatch.setattr(machine.Machine, "close", lambda self: closed.append(self))
    training = trained(2)
    training.monitor.close()
    assert threads and threading.main_thread() not in threads and len(closed) == 1


def test_words_about_the_machine_stand_in_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.Machine, "notes", lambda self: {"gpu_throttled": "power cap"})
    record = trained(1).monitor.history.records[0]
    assert record.notes["gpu_throttled"] == "power cap"


@pytest.mark.parametrize("options", [{"stages": False}, {"machine": False}, {"histograms": {"weight": 2}}])
def test_no_switch_changes_what_is_computed(options: dict[str, Any]) -> None:
    """P2."""
    plain, watched = make("mlp"), make("mlp")
    watched.monitor = holter.watch(watched.model, watched.optimizer, run=False, **options)
    for training in (plain, watched):
        torch.manual_seed(0)
        for _ in range(4):
            training.step()
    assert differences(plain, watched) == []


@pytest.mark.parametrize("stages", [True, False])
def test_a_closure_is_timed_or_not_as_it_was_asked_for(stages: bool) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 3)).square().mean()
        loss.backward()
        return loss

    with holter.watch(model, optimizer, run=False, stages=stages) as watching:
        optimizer.step(closure)
    assert ("time/forward" in watching.history.scalars) == stages and watching.findings == ()
