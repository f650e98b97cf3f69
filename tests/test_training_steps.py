"""P27: one record a training step, however many optimizers take it; its numbers are those of plain torch."""

from __future__ import annotations

import copy
import functools
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import holter
from holter import modules
from holter.monitor import Monitor
from holter.report.document import view_of
from holter.training_steps import DESCRIBED
from tests.test_cli import call

STEPS = 6


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))


def watch(model: nn.Module, optimizers: Any, **more: Any) -> Monitor:
    paces: dict[str, Any] = dict.fromkeys(("weights", "updates", "activations", "optimizer_state"), 1)
    return holter.watch(model, optimizers, **{"run": False, "budget": None, **paces, **more})


def loss_of(model: nn.Module, scale: float = 1.0) -> Tensor:
    return scale * model(torch.randn(5, 6)).square().mean()


def norm_of(gradients: Iterator[Tensor | None]) -> float:
    """In float64, of all that there are."""
    return float(torch.nn.utils.get_total_norm([one.double() for one in gradients if one is not None]))


def split(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Matrices apart from the rest, as with Muon."""
    matrices = [one for one in model.parameters() if one.ndim == 2]
    others = [one for one in model.parameters() if one.ndim != 2]
    return [torch.optim.SGD(matrices, 0.05, momentum=0.9), torch.optim.AdamW(others, 0.01, weight_decay=0.1)]


def in_backward(model: nn.Module, norms: list[dict[str, Tensor]]) -> list[torch.optim.Optimizer]:
    """torch's tutorial: each parameter's optimizer steps as soon as its gradient is there, which is let go at once."""
    optimizers = {}
    for name, parameter in model.named_parameters():
        optimizers[name] = torch.optim.Adam([parameter], 0.01)

        def step(parameter: Tensor, name: str = name) -> None:
            assert parameter.grad is not None
            norms[-1][name] = parameter.grad.detach().clone()
            optimizers[name].step()
            optimizers[name].zero_grad()

        parameter.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def assert_whole(monitor: Monitor, truth: list[float], model: nn.Module) -> None:
    """One record a step, each with all layers in each role, and the norm of all gradients."""
    history, names = monitor.history, tuple(name for name, _ in model.named_parameters())
    assert history.steps.tolist() == list(range(len(truth)))
    assert history.scalar("gradient_norm")[0].tolist() == list(range(len(truth)))
    np.testing.assert_allclose(history.scalar("gradient_norm")[1], truth, rtol=1e-6)
    for record in history.records:
        for role in ("gradient", "weight", "update"):
            assert sorted(record.rows[role].layers) == sorted(names), role
        assert record.rows["weight"].extras["has_gradient"].all() and record.rows["weight"].extras["held"].all()


@pytest.mark.parametrize("told", ["both", "first", "second"])
def test_two_optimizers_of_one_backward_are_one_step(told: str) -> None:
    weights = []
    for is_watched in (True, False):
        model = mlp()
        optimizers = split(model)
        known = {"both": optimizers, "first": optimizers[0], "second": optimizers[1]}[told]
        monitor = watch(model, known) if is_watched else None
        truth = []
        for step in range(STEPS):
            loss_of(model, 10.0**step).backward()
            truth.append(norm_of(one.grad for one in model.parameters()))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if monitor is not None:
                assert monitor.step == step + 1
        weights.append([one.detach().clone() for one in model.parameters()])
        if monitor is not None:
            assert_whole(monitor, truth, model)
            monitor.close()
            assert len(monitor.history) == STEPS and not monitor.findings
    assert all(map(torch.equal, *weights))


def test_a_step_of_two_optimizers_is_recorded_at_once() -> None:
    model = mlp()
    optimizers = split(model)
    monitor = watch(model, optimizers)
    for step in range(3):
        loss_of(model).backward()
        for optimizer in optimizers:
            optimizer.step()
        monitor._writer.flush(2.0)  # which does not end a step, as the monitor's own does
        assert len([one for one in monitor._writer.records if not one.late]) == step + 1


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("is_checkpointed", [True, False])
def test_optimizers_that_step_within_the_backward_are_one_step(is_told: bool, is_checkpointed: bool) -> None:
    weights: list[list[Tensor]] = []
    for is_watched in (True, False):
        model, norms = mlp(), list[dict[str, Tensor]]()
        optimizers = in_backward(model, norms)
        monitor = watch(model, optimizers if is_told else optimizers[0]) if is_watched else None
        for _ in range(STEPS):
            norms.append({})
            x = torch.randn(5, 6, requires_grad=True)
            output = checkpoint(model, x, use_reentrant=False) if is_checkpointed else model(x)
            output.square().mean().backward()
        weights.append([one.detach().clone() for one in model.parameters()])
        if monitor is not None:
            assert_whole(monitor, [norm_of(iter(one.values())) for one in norms], model)
            assert not monitor.findings
    assert all(map(torch.equal, *weights))


def test_a_parameter_that_is_not_used_does_not_split_a_step() -> None:
    model, norms = mlp(), list[dict[str, Tensor]]()
    model.add_module("unused", nn.Linear(2, 2))
    optimizers = in_backward(model, norms)
    monitor = watch(model, optimizers)
    for step in range(STEPS):
        norms.append({})
        y = nn.Sequential.forward(model[:5], torch.randn(5, 6)) if step % 2 else model[:5](torch.randn(5, 6))
        y.square().mean().backward()
    truth = [norm_of(iter(one.values())) for one in norms]
    np.testing.assert_allclose(monitor.history.scalar("gradient_norm")[1], truth, rtol=1e-6)


def gan() -> tuple[nn.ModuleDict, dict[str, torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(3, 6), "d": nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))})
    return model, {name: torch.optim.Adam(part.parameters(), 0.01) for name, part in model.items()}


@pytest.mark.parametrize("critic_steps", [1, 3])
@pytest.mark.parametrize("logs", ["before", "after"])
def test_parts_that_are_trained_in_turn_have_a_record_each(critic_steps: int, logs: str) -> None:
    """Of a model whose own forward is never called: a forward of a part shows that another step has begun."""
    model, optimizers = gan()
    monitor = watch(model, list(optimizers.values()))
    truth: list[tuple[str, float, float]] = []

    def take(name: str, loss: Tensor) -> None:
        loss.backward()
        truth.append((name, norm_of(one.grad for one in model[name].parameters()), loss.item()))
        if logs == "before":
            monitor.log(**{f"{name}_loss": loss})
        optimizers[name].step()
        if logs == "after":
            monitor.log(**{f"{name}_loss": loss})
        model.zero_grad()

    for _ in range(4):
        for _ in range(critic_steps):
            fake = model["g"](torch.randn(5, 3)).detach()
            take("d", model["d"](fake).mean() - model["d"](torch.randn(5, 6)).mean())
        take("g", -model["d"](model["g"](torch.randn(5, 3))).mean())
    history = monitor.history
    assert history.steps.tolist() == list(range(len(truth)))
    for record, (name, norm, _) in zip(history.records, truth, strict=True):
        assert record.scalars["gradient_norm"] == pytest.approx(norm, rel=1e-6)
        assert {layer[0] for layer in record.rows["gradient"].layers} == {name}
    for part in "dg":
        steps, losses = history.scalar(f"{part}_loss")
        known = {step: loss for step, (name, _, loss) in enumerate(truth) if name == part}
        assert dict(zip(steps.tolist(), losses.tolist(), strict=True)) == pytest.approx(known)


def test_steps_are_told_apart_where_no_forward_is_seen() -> None:
    """By an optimizer that steps again; and a value of a name that was told is of the next step."""
    model = mlp()
    first, second = (torch.optim.SGD(model[place].parameters(), 0.01) for place in (0, 2))
    monitor = watch(model, [first, second])
    losses = []
    for step in range(STEPS):
        x = torch.randn(5, 6)
        for place in (0, 2):
            x = nn.functional.linear(x, model[place].weight, model[place].bias)
        losses.append(x.square().mean())
        losses[-1].backward()
        monitor.log(loss=losses[-1])
        first.step()
        if step % 2 == 0:
            second.step()
        model.zero_grad()
    assert monitor.history.steps.tolist() == list(range(STEPS))
    assert monitor.history.scalar("loss")[1].tolist() == pytest.approx([loss.item() for loss in losses])


def test_numbers_of_the_optimizers_groups_do_not_collide_and_do_not_move() -> None:
    model = mlp()
    groups = [{"params": [model[0].weight], "lr": 0.1}, {"params": [model[0].bias], "lr": 0.2}]
    first = torch.optim.SGD(groups, 0.1, weight_decay=0.5)
    second = torch.optim.AdamW(model[2].parameters(), 0.3, weight_decay=0.25)
    monitor = watch(model, [first, second])
    for step in range(STEPS):
        loss_of(model).backward()
        if step % 2 == 0:
            first.step()
        second.step()
        second.param_groups[0]["lr"] *= 0.5  # as a scheduler does, before the next forward
        if step == 3:
            second.add_param_group({"params": [model[4].bias], "lr": 0.7})
        if step % 3 == 0:
            first.step()
    scalar = monitor.history.scalar
    rates = [0.3 * 0.5**step for step in range(STEPS)]
    found = dict(zip(*(part.tolist() for part in scalar("learning_rate/2")), strict=True))
    assert sorted(found.values(), reverse=True) == pytest.approx(rates)
    assert set(scalar("learning_rate")[1]) == {0.1} and set(scalar("learning_rate/1")[1]) == {0.2}
    assert set(scalar("weight_decay")[1]) == {0.5} and set(scalar("weight_decay/2")[1]) == {0.25}
    assert scalar("learning_rate/3")[1].tolist() == [0.7] * 2
    assert scalar("optimizer_step/1")[1].tolist() == list(range(1, STEPS + 1))
    assert not scalar("optimizer_step")[1].size  # SGD keeps none


def test_an_optimizer_in_the_place_of_another_has_its_numbers() -> None:
    model = mlp()
    optimizers: list[torch.optim.Optimizer] = [torch.optim.SGD(model.parameters(), 0.1)]
    monitor = watch(model, optimizers[0])
    for step in range(STEPS):
        if step == 3:
            optimizers.append(torch.optim.Adam(model.parameters(), 0.2))
        loss_of(model).backward()
        optimizers[-1].step()
        model.zero_grad()
        monitor._writer.flush(2.0)
        assert len(monitor._writer.records) == step + 1  # at once, though the old one is still there
    assert monitor.history.scalar("learning_rate")[1].tolist() == [0.1] * 3 + [0.2] * 3


def test_many_optimizers_write_the_settings_of_the_first() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(DESCRIBED)))
    optimizers = [torch.optim.SGD([one], 0.1) for one in model.parameters()]
    with watch(model, optimizers) as monitor:
        model(torch.randn(3, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    names = [name for name in monitor.history.records[0].scalars if name.startswith("learning_rate")]
    assert len(names) == DESCRIBED


def test_of_many_optimizers_it_is_said_once_whose_settings_are_recorded(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(DESCRIBED)))
    optimizers = [torch.optim.SGD([one], 0.1) for one in model.parameters()]
    with holter.watch(model, optimizers, run=tmp_path) as monitor:
        for _ in range(3):
            model(torch.randn(3, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    notes = [note for one in monitor.history.records if (note := one.notes.get("optimizer_settings"))]
    assert notes == [f"recorded of the first {DESCRIBED} of {2 * DESCRIBED} optimizers"]
    assert f"settings {notes[0]}" in " ".join(call("show", tmp_path).output.split())
    assert f"Settings of optimizers were {notes[0]}." in json.dumps(view_of(tmp_path))


def test_of_as_many_as_are_recorded_nothing_is_said() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(DESCRIBED)))
    optimizers = [torch.optim.SGD([one], 0.1) for one in model.parameters()]
    with watch(model, optimizers) as monitor:
        model(torch.randn(3, 2)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert "optimizer_settings" not in monitor.history.records[0].notes


@pytest.mark.parametrize("skipped", ["first", "second", "both", "none"])
def test_a_scaler_that_skips_one_of_two_optimizers(skipped: str) -> None:
    model = mlp()
    optimizers = split(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    monitor = watch(model, optimizers, scaler=scaler)
    for step in range(3):
        scaler.scale(loss_of(model)).backward()
        if step == 1:
            for name, optimizer in zip(("first", "second"), optimizers, strict=True):
                if skipped in (name, "both"):
                    optimizer.param_groups[0]["params"][0].grad.fill_(float("inf"))
        truth = [norm_of(one.grad for one in model.parameters()) / scaler.get_scale()]
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        assert monitor.history.scalar("gradient_norm")[1][-1] == pytest.approx(truth[0], rel=1e-6)
    share = {"first": 0.5, "second": 0.5, "both": 1.0, "none": 0.0}[skipped]
    assert monitor.history.scalar("skipped")[1].tolist() == [0.0, share, 0.0]
    assert monitor.history.steps.tolist() == [0, 1, 2]


def test_a_fused_and_a_plain_optimizer_under_one_scaler() -> None:
    """What the fused one takes is still multiplied by the scale when it is read."""
    model = mlp()
    fused = torch.optim.Adam(model[0].parameters(), 0.01, fused=True)
    plain = torch.optim.SGD([*model[2].parameters(), *model[4].parameters()], 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    monitor = watch(model, [fused, plain], scaler=scaler)
    truth = []
    for _ in range(4):
        scaler.scale(loss_of(model)).backward()
        truth.append(norm_of(one.grad for one in model.parameters()) / scaler.get_scale())
        for optimizer in (fused, plain):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
    np.testing.assert_allclose(monitor.history.scalar("gradient_norm")[1], truth, rtol=1e-6)


@pytest.mark.parametrize("clip", ["monitor", "torch", "each"])
@pytest.mark.parametrize("every", [1, 3])
def test_the_norm_before_a_clip_is_that_of_all(clip: str, every: int) -> None:
    model = mlp()
    optimizers = split(model)
    monitor = watch(model, optimizers, every=every, diagnose=False)
    truth = []
    for _ in range(STEPS):
        loss_of(model, 100.0).backward()
        truth.append(norm_of(one.grad for one in model.parameters()))
        if clip == "monitor":
            monitor.clip_grad_norm_(0.5)
        elif clip == "torch":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimizer in optimizers:
            if clip == "each":
                torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.5)
            optimizer.step()
        model.zero_grad()
    steps, norms = monitor.history.scalar("gradient_norm")
    known = list(range(STEPS)) if clip != "each" else list(range(0, STEPS, every))
    assert steps.tolist() == known and len(monitor.history) == STEPS
    np.testing.assert_allclose(norms, [truth[step] for step in known], rtol=1e-6)
    clipped = monitor.history.scalar("gradient_norm_clipped")[1]
    assert clipped.tolist() == pytest.approx([0.5] * STEPS if clip != "each" else [], rel=1e-4)


def test_micro_batches_of_two_optimizers_are_one_step() -> None:
    model = mlp()
    optimizers = split(model)
    monitor = watch(model, optimizers)
    truth = []
    for micro in range(12):
        loss_of(model).backward()
        monitor.log(loss=float(micro))
        if micro % 4 == 3:
            truth.append(norm_of(one.grad for one in model.parameters()))
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
    assert_whole(monitor, truth, model)
    assert monitor.history.scalar("loss")[1].tolist() == [1.5, 5.5, 9.5]


def test_a_closure_that_does_nothing_begins_no_step() -> None:
    """Lightning steps each optimizer with one, in a partial, where its user steps by hand."""

    def do_nothing() -> None:
        return

    def wrap(model: nn.Module, closure: Callable[[], None]) -> None:
        closure()

    model = mlp()
    optimizers = split(model)
    monitor = watch(model, optimizers)
    truth = []
    for step in range(5):
        model.zero_grad()
        loss_of(model).backward()
        truth.append(norm_of(one.grad for one in model.parameters()))
        for optimizer in optimizers:
            optimizer.step(closure=functools.partial(wrap, model, do_nothing))  # type: ignore[arg-type]
        monitor.log(loss=float(step))
    assert_whole(monitor, truth, model)


def test_closures_of_two_optimizers_have_gradients_of_their_own() -> None:
    model = mlp()
    optimizers = [torch.optim.LBFGS(model[place].parameters(), 0.1, max_iter=3) for place in (0, 4)]
    monitor = watch(model, optimizers)
    truth = []
    for _ in range(3):
        x = torch.randn(5, 6)
        for optimizer in optimizers:

            def closure() -> Tensor:
                model.zero_grad()
                loss = model(x).square().mean()  # noqa: B023
                loss.backward()
                return loss

            optimizer.step(closure)
            truth.append(norm_of(one.grad for one in optimizer.param_groups[0]["params"]))
    np.testing.assert_allclose(monitor.history.scalar("gradient_norm")[1], truth, rtol=1e-6)


def test_a_checkpoint_between_two_steps_counts_those_that_were_taken() -> None:
    """Also where it is not known yet that a step is over."""
    model, optimizers = gan()
    monitor = watch(model, list(optimizers.values()))
    for step, name in enumerate("dgdg"):
        model["d"](model["g"](torch.randn(5, 3))).mean().backward()
        optimizers[name].step()
        assert monitor.state_dict() == {"step": step + 1} and monitor.step == step + 1
    monitor.load_state_dict({"step": 2})
    model["d"](model["g"](torch.randn(5, 3))).mean().backward()
    optimizers["d"].step()
    monitor.close()
    assert [(one.segment, one.step) for one in monitor.history.records] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2)]


@pytest.mark.parametrize("end", ["close", "model"])
def test_the_last_step_is_recorded_though_nothing_follows(end: str) -> None:
    model, optimizers = gan()
    monitor = watch(model, list(optimizers.values()))
    model["d"](model["g"](torch.randn(5, 3))).mean().backward()
    optimizers["d"].step()
    monitor.log(loss=3.0)
    if end == "close":
        monitor.close()
    else:
        del model
        monitor._writer.wait(2.0)
    assert [record.scalars["loss"] for record in monitor._writer.records] == [3.0]


def test_a_model_between_two_steps_is_copied_and_pickled_as_ever() -> None:
    """P3: what looks out for the next forward leaves with the step."""
    model, optimizers = gan()
    before = {name: dict(part._forward_pre_hooks) for name, part in model.named_modules()}
    monitor = watch(model, list(optimizers.values()))
    model["d"](model["g"](torch.randn(5, 3))).mean().backward()
    optimizers["d"].step()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin["d"](twin["g"](torch.randn(5, 3))).mean().backward()
    assert monitor.step == 1 and monitor._collector.steps.is_open
    with torch.no_grad():
        model["g"](torch.randn(5, 3))
    model["g"].eval()(torch.randn(5, 3))
    assert monitor._collector.steps.is_open
    model["g"].train()(torch.randn(5, 3))
    assert not monitor._collector.steps.is_open
    monitor.close()
    assert {name: dict(part._forward_pre_hooks) for name, part in model.named_modules()} == before


def test_encoder_layers_between_two_steps_evaluate_to_the_same_bits() -> None:
    """torch takes another path in evaluation where they bear hooks."""
    model, outputs = nn.ModuleDict(), []
    for is_watched in (True, False):
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        model = nn.ModuleDict({"body": nn.TransformerEncoder(layer, 2), "head": nn.Linear(8, 1)})
        first, second = (torch.optim.SGD(part.parameters(), 0.1) for part in model.values())
        monitor = watch(model, [first, second], activations=None) if is_watched else None
        model["head"](model["body"](torch.randn(2, 5, 8))).mean().backward()
        first.step()
        model.eval()
        with torch.no_grad():
            outputs.append(model["head"](model["body"](torch.randn(2, 5, 8, generator=torch.manual_seed(3)))))
        if monitor is not None:
            assert monitor._collector.steps.is_open
            monitor.close()
    assert torch.equal(*outputs)


def test_a_step_that_raises_leaves_the_others_of_its_training_step() -> None:
    class Moody(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> Any:  # type: ignore[override]
            raise ArithmeticError

    model = mlp()
    good = torch.optim.SGD([one for one in model.parameters() if one.ndim == 2], 0.01)
    bad = Moody([one for one in model.parameters() if one.ndim == 1], 0.01)
    monitor = watch(model, [good, bad])
    truth = []
    for _ in range(3):
        loss_of(model).backward()
        truth.append(norm_of(one.grad for one in good.param_groups[0]["params"]))
        good.step()
        with pytest.raises(ArithmeticError):
            bad.step()
        model.zero_grad()
    np.testing.assert_allclose(monitor.history.scalar("gradient_norm")[1], truth, rtol=1e-6)


def test_few_parts_of_a_large_model_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """P6: it happens at every step of two optimizers."""
    asked: list[nn.Module] = []
    monkeypatch.setattr(modules, "_minds_hooks", lambda part: asked.append(part) is not None)
    model = nn.Sequential(nn.ModuleList(nn.Linear(1, 1) for _ in range(1000)))
    assert len(modules.parts_of(model)) == modules._MOST_PARTS == len(asked)
