"""watch() and Monitor: what a user calls, and what is refused before training."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holter
from holter.budget import ADVANCE_SECONDS, Budget
from tests.models import MODELS, make, mlp


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1)


# Before training ----------------------------------------------------------------------------------------------


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"SGD holds none of the parameters of this Sequential.*parameters\(\)"):
        holter.watch(mlp(), _sgd(mlp()), run=False)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ReLU has no parameters.*before calling watch"):
        holter.watch(nn.ReLU(), _sgd(mlp()), run=False)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"every": 0}, "every=0: give a whole number of steps, at least 1"),
        ({"every": 2.5}, "every=2.5"),
        ({"histograms": -1}, "histograms=-1: give a whole number of steps, at least 1, or None"),
        ({"budget": -0.1}, "budget=-0.1 is the share"),
        ({"budget": 5}, "a number from 0 .* to 1"),
        ({"sinks": [object()]}, "object is not a sink: it needs write"),
        ({"scaler": object()}, "has no scale"),
        ({"run": 3}, "run=3: give a directory"),
        ({"run": ""}, "run='': give a directory"),
        ({"total_steps": 0}, "total_steps=0"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(more: dict[str, Any], told: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=told):
        holter.watch(model, _sgd(model), **{"run": False, **more})


@pytest.mark.parametrize("optimizer", [None, [], "SGD", [None]])
def test_what_is_no_optimizer_is_refused(optimizer: Any) -> None:
    with pytest.raises(ValueError, match=r"watch\(\) needs .*torch.optim.Optimizer"):
        holter.watch(mlp(), optimizer, run=False)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"needs the torch.nn.Module that is trained, got list"):
        holter.watch([], _sgd(mlp()), run=False)  # type: ignore[arg-type]


def test_a_refused_watch_leaves_no_hook_behind(tmp_path: Path) -> None:
    model = mlp()
    before = dict(model._forward_pre_hooks), list(tmp_path.iterdir())
    with pytest.raises(ValueError):
        holter.watch(model, _sgd(model), run=tmp_path / "run", budget=7)
    assert (dict(model._forward_pre_hooks), list(tmp_path.iterdir())) == before


def test_a_state_that_is_none_is_refused() -> None:
    model = mlp()
    monitor = holter.watch(model, _sgd(model), run=False)
    with pytest.raises(ValueError, match=r"not a monitor's state.*state_dict\(\)"):
        monitor.load_state_dict({"steps": 3})


# In training --------------------------------------------------------------------------------------------------


def test_run_none_makes_a_directory_named_by_date_time_and_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    paths = []
    for _ in range(3):
        model = mlp()
        with holter.watch(model, _sgd(model)) as monitor:
            assert monitor.path is not None
            paths.append(str(monitor.path))
    assert all(re.fullmatch(r"runs/\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[a-z]+", path) for path in paths)
    assert len(set(paths)) == 3 and len(holter.list_runs()) == 3


def test_run_false_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False)
    training.step()
    training.monitor.close()
    assert list(tmp_path.iterdir()) == [] and len(training.monitor.history) == 1


@pytest.mark.parametrize("name", MODELS)
def test_a_stored_run_equals_the_live_history(name: str, tmp_path: Path) -> None:
    training = make(name)
    training.monitor = holter.watch(
        training.model, training.optimizer, run=tmp_path / "run", budget=None, scaler=training.scaler, histograms=3
    )
    for _ in range(7):
        training.step()
    live = training.monitor.history
    training.monitor.close()
    stored = holter.open_run(tmp_path / "run").history
    assert len(stored) == 7
    for scalar in live.scalars:
        np.testing.assert_array_equal(stored.scalar(scalar)[1], live.scalar(scalar)[1])
    for role in ("gradient", "weight", "batch"):
        for mine, theirs in zip(stored.series(role, "norm"), live.series(role, "norm"), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    layer = stored.layers("gradient")[0]
    assert stored.histogram("gradient", layer)[0].tolist() == [0, 3, 6]


@pytest.mark.parametrize("name", [name for name in MODELS if name != "sparse embedding"])  # torch clips no sparse ones
def test_recorded_norms_are_those_of_plain_torch(name: str) -> None:
    """Per layer and globally, before clipping and after it, against float64 on the side."""
    training = make(name)
    monitor = holter.watch(
        training.model, training.optimizer, run=False, budget=None, weights=1, scaler=training.scaler
    )
    expected: list[dict[str, float]] = []
    totals: list[tuple[float, float]] = []

    class Clip:
        """Looks at the gradients where the training clips them."""

        def clip_grad_norm_(self, max_norm: float) -> None:
            gradients = {n: p.grad for n, p in training.model.named_parameters() if p.grad is not None}
            dense = {n: (g.to_dense() if g.is_sparse else g).double() for n, g in gradients.items()}
            expected.append({n: float(g[g.isfinite()].norm()) for n, g in dense.items()})
            before = float(monitor.clip_grad_norm_(max_norm))
            totals.append((before, float(torch.nn.utils.get_total_norm(list(gradients.values())))))

        def log(self, **values: Any) -> None:
            monitor.log(**values)

    training.monitor = Clip()
    for _ in range(6):
        training.step()
    _, layers, norms = monitor.history.series("gradient", "norm")
    for step, truth in enumerate(expected):
        assert dict(zip(layers, norms[step], strict=True)) == pytest.approx(truth, rel=1e-6)
    finite = [i for i, (before, _) in enumerate(totals) if np.isfinite(before)]
    before, after = (monitor.history.scalar(n)[1][finite] for n in ("gradient_norm", "gradient_norm_clipped"))
    np.testing.assert_allclose(before, [totals[i][0] for i in finite], rtol=1e-6)
    np.testing.assert_allclose(after, [totals[i][1] for i in finite], rtol=1e-5)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_our_clip_is_torchs_clip_to_the_bit(norm_type: float) -> None:
    """B6: the same scaling and the same return value."""
    ours, theirs = make("mlp"), make("mlp")
    monitor = holter.watch(ours.model, ours.optimizer, run=False)
    norms = []
    for training in (ours, theirs):
        torch.manual_seed(5)
        x, y = training.batch()
        training.loss(training.model, x, y).backward()
        clip = monitor.clip_grad_norm_ if training is ours else None
        if clip is not None:
            norms.append(clip(0.1, norm_type))
        else:
            norms.append(torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.1, norm_type))
    assert torch.equal(*norms)
    for mine, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None and torch.equal(mine.grad, other.grad)


def test_the_record_says_where_the_gradients_were_read() -> None:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False, budget=None)
    training.step()
    training.clip = False
    training.step()
    read_at = [record.notes.get("gradients_read_at") for record in training.monitor.history.records if not record.late]
    assert read_at == ["clip", "step"]


def test_cadences_are_kept() -> None:
    """D7, E35: how often is the user's choice."""
    training = make("mlp")
    training.monitor = holter.watch(
        training.model, training.optimizer, run=False, every=3, weights=4, histograms=None, budget=None
    )
    for _ in range(10):
        training.step()
    history = training.monitor.history
    assert history.steps.tolist() == list(range(10))
    assert history.series("gradient", "norm")[0].tolist() == [0, 3, 6, 9]
    assert history.series("weight", "norm")[0].tolist() == [0, 4, 8]
    assert history.histogram("gradient", "0.weight")[0].tolist() == []
    # Where rows are not due, the clip still gives the global norm of every step.
    assert history.scalar("gradient_norm")[0].tolist() == list(range(10))


def test_budget_zero_means_scalars_only() -> None:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False, budget=0)
    for _ in range(3):
        training.step()
    history = training.monitor.history
    assert history.roles == () and history.scalar("loss")[0].tolist() == [0, 1, 2]


def test_the_purse_never_spends_more_than_it_earned() -> None:
    """The cost stays below the advance and the share of the time, and the purse pays when it can."""
    budget = Budget(0.01)
    made = 0
    for _ in range(100_000):
        budget.earn(0.01)
        if budget.affords("gradient"):
            made += 1
            budget.learn("gradient", 0.002)
            budget.settle(0.002)
        assert budget.spent <= ADVANCE_SECONDS + 0.01 * budget.elapsed
    unspent = (1 - 0.3) * ADVANCE_SECONDS  # of the advance, the part that gradients have no use for: given back
    # A training feels more than our clocks see.
    assert made == pytest.approx((0.6 * 0.01 * 1000 - unspent) / 0.002, rel=0.02)
    assert Budget(None).affords("anything") and not Budget(0).affords("anything")


def test_what_another_thread_learns_while_work_is_settled_is_settled_next() -> None:
    budget = Budget(0.01)

    class Purse:
        """At whose change the other thread has its turn."""

        def __setattr__(self, name: str, value: float) -> None:
            if name == "holds" and "holds" in vars(self):
                budget.learn("weight", 0.25)
            vars(self)[name] = value

    purse = Purse()
    purse.holds = 1.0
    budget._purses["gradient"] = purse  # type: ignore[assignment]
    budget.learn("gradient", 0.5)
    budget.settle(0.5)
    assert vars(purse)["holds"] == 0.5 and budget._unsettled == {"weight": 0.25}


def test_an_advance_is_for_the_beginning() -> None:
    """Short steps use it up; of long ones few are taken in that time, and what they have not used is given back."""
    spent = {}
    for step_time in (0.005, 0.2):
        budget = Budget(0.01)
        while budget.elapsed < 60:
            budget.earn(step_time)
            for kind, cost in (("gradient", 0.002), ("batch inputs", 0.0005), ("update 1", 0.0005)):
                if budget.affords(kind):
                    budget.learn(kind, cost)
                    budget.settle(cost)
        spent[step_time] = budget.spent - 0.01 * budget.elapsed
    assert spent[0.2] < 0.1 * ADVANCE_SECONDS < 0.3 * ADVANCE_SECONDS < spent[0.005]


def test_an_expensive_kind_does_not_silence_the_others() -> None:
    """A look at activations that took ten seconds is paid off by looks at activations; all together keep the share."""
    budget = Budget(0.01)
    budget.learn("activation", 10.0)
    budget.settle(10.0)
    made = {"activation": 0, "gradient": 0, "update 7": 0}
    for _ in range(200_000):
        budget.earn(0.01)
        for kind, cost in (("gradient", 0.0001), ("update 7", 0.0005), ("activation", 0.005)):
            if budget.affords(kind):
                made[kind] += 1
                budget.learn(kind, cost)
                budget.settle(cost)
    assert made["gradient"] > 50_000 and made["update 7"] > 1000
    assert made["activation"] == 0, "its share of 20 s is 2 s so far, and it has cost 10"
    assert budget.spent - 10.0 <= 0.01 * budget.elapsed


def test_what_belongs_to_no_kind_is_paid_by_all() -> None:
    budget = Budget(0.01)
    budget.learn("weight", 0.001)
    budget.share_out(10.0)  # in the midst of a stretch whose kinds are not settled yet
    assert not any(budget.affords(kind) for kind in ("gradient", "weight", "batch inputs", "second_moment 3"))


def test_setting_up_is_counted_and_paid_by_no_purse() -> None:
    budget = Budget(0.01)
    budget.learn("second_moment 3", 1.0, sets_up=True)
    budget.share_out(0.001)
    budget.settle(1.0)
    budget.spend(1.0, None)
    assert budget.spent == pytest.approx(2.001)
    budget.earn(0.1)
    assert all(budget.affords(kind) for kind in ("gradient", "update 7", "batch inputs"))


def test_every_record_shows_what_monitoring_cost() -> None:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False, budget=None)
    for _ in range(5):
        training.step()
    cost = training.monitor.history.scalar("monitor_cost")[1]
    assert len(cost) == 5 and (cost > 0).all() and training.monitor.cost > 0


@pytest.mark.parametrize("where", ["same process", "new process"])
def test_a_resumed_training_goes_on_counting_in_a_new_segment(
    tmp_path: Path, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    """P17: resumed from an earlier step, everything is kept and the surviving line can be told."""
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run")
    state: dict[str, Any] = {}
    for step in range(8):
        if step == 5:
            state = training.monitor.state_dict()
        training.step()
    if where == "new process":
        training.monitor.close()
        training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run")
    training.monitor.load_state_dict(state)
    for _ in range(6):
        training.step()
    training.monitor.close()
    history = holter.open_run(tmp_path / "run").history
    assert history.steps.tolist() == [*range(8), *range(5, 11)]
    assert len(set(history.segments[:8])) == 1 and len(set(history.segments)) == 2
    assert history.latest().steps.tolist() == list(range(11))
    assert history.latest().scalar("loss")[0].tolist() == list(range(11))
    assert history.latest().scalar("loss")[1].tolist() == [*training.losses[:5], *training.losses[8:]]
    assert not [words for words in caplog.messages if "earlier training" in words]


def test_a_training_that_takes_the_place_of_another_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A script that is started again with the same run, or goes on from a checkpoint without the monitor's state."""
    for steps, told in ((0, 0), (3, 0), (2, 1)):  # the first took no step: nothing is hidden by the second
        training = make("mlp")
        training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run", diagnose=False)
        for _ in range(steps):
            training.step()
        if steps:
            training.monitor.close()
        else:
            training.monitor._capture.detach()  # it is left without an ending
        found = [words for words in caplog.messages if "holds an earlier training" in words]
        assert len(found) == told
    assert "run=" in found[0] and "load_state_dict" in found[0]


def test_run_json_tells_what_is_trained_and_nothing_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P24: no environment, no command line."""
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2-in-the-environment")
    monkeypatch.setattr("sys.argv", ["train.py", "--key=hunter2-in-argv"])
    model = mlp()
    with holter.watch(model, _sgd(model), run=tmp_path / "run", total_steps=7):
        pass
    stored = holter.open_run(tmp_path / "run")
    assert [(layer["name"], layer["shape"]) for layer in stored.layers] == [
        (name, list(parameter.shape)) for name, parameter in model.named_parameters()
    ]
    assert stored.info["total_steps"] == 7 and stored.info["optimizers"] == ["SGD"]
    assert "hunter2" not in (tmp_path / "run" / "run.json").read_text()


def test_the_monitor_outlives_its_own_name(tmp_path: Path) -> None:
    """One line is enough: what watch() returned need not be kept."""
    training = make("mlp")
    holter.watch(training.model, training.optimizer, run=tmp_path / "run")
    for _ in range(5):
        training.step()
    del training
    gc.collect()
    assert [record.step for record in holter.open_run(tmp_path / "run").tail(0.01) if not record.late] == list(range(5))


def test_after_close_the_training_goes_on_without_it() -> None:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=False)
    training.step()
    training.monitor.close()
    training.monitor.close()
    training.step()  # clips and logs through the closed monitor
    assert len(training.monitor.history) == 1 and training.monitor.state == "closed"


def test_a_clip_of_gradients_that_are_still_scaled_is_told() -> None:
    """D6: torch's clip has the same trap, and says nothing."""
    for unscale in (True, False):
        model = mlp()
        optimizer, scaler = _sgd(model), torch.amp.GradScaler("cpu")
        monitor = holter.watch(model, optimizer, run=False, scaler=scaler)
        scaler.scale(model(torch.randn(4, 12)).square().mean()).backward()
        if unscale:
            scaler.unscale_(optimizer)
        monitor.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        assert any("call scaler.unscale_(optimizer)" in finding.advice for finding in monitor.findings) is not unscale


def test_a_value_without_a_name_is_told_and_costs_nothing_else() -> None:
    training = make("mlp")
    monitor = holter.watch(training.model, training.optimizer, run=False)
    monitor.log(torch.ones(()), accuracy=0.5)
    training.step()
    assert monitor.history.scalar("accuracy")[1].tolist() == [0.5]
    assert any("log(loss=loss)" in finding.advice for finding in monitor.findings)


def test_a_watched_optimizer_that_is_watched_again_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """A notebook's cell that is run again."""
    model = mlp()
    optimizer = _sgd(model)
    first = holter.watch(model, optimizer, run=False)
    assert caplog.messages == []
    holter.watch(model, optimizer, run=False).close()
    assert "close()" in caplog.messages[0]
    first.close()
    holter.watch(model, optimizer, run=False).close()
    assert len(caplog.messages) == 1


def test_a_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = mlp()
    with holter.watch(model, _sgd(model)) as monitor:
        assert monitor.path is not None
        name = monitor.path.name
    assert holter.open_run(name).path == monitor.path


@pytest.mark.parametrize("attach", ["before", "after", "to the compiled"])
def test_a_compiled_model_has_no_graph_break_more(attach: str) -> None:
    """P7: fullgraph compilation raises at a graph break; values still land on their steps."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = mlp()
    optimizer = _sgd(model)
    monitor = holter.watch(model, optimizer, run=False, budget=None) if attach == "before" else None
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    x = torch.randn(4, 12)
    if attach == "after":
        compiled(x)
    monitor = monitor or holter.watch(compiled if attach == "to the compiled" else model, optimizer, run=False)
    losses = []
    for _ in range(4):
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.log(loss=loss)
        losses.append(loss.item())
    steps, values = monitor.history.scalar("loss")
    assert steps.tolist() == [0, 1, 2, 3] and values.tolist() == losses
    assert monitor.findings == ()
    torch._dynamo.reset()
