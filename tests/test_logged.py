"""What is logged: on which step it lands, how much it held, validation apart, batches that were there before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holter
from holter.logged import OWN, OWN_PREFIXES
from holter.record import LayerRows, Record, is_validation
from holter.repeats import Repeats
from holter.statistics.content import content_hashes
from holter.statistics.measure import measure_rows
from tests.models import Training, differences, make, mlp


class Loop:
    """A training under a monitor, in pieces."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        self.monitor = holter.watch(self.model, self.optimizer, **{"run": False, "budget": None, **options})

    def forward(self, visible: bool = True) -> Tensor:
        x = torch.randn(4, 12)
        loss = (self.model(x) if visible else self.model[3](self.model[0](x))).square().mean()  # type: ignore[index]
        loss.backward()
        return loss.detach()

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            self.model(torch.randn(4, 12))
        self.model.train()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def scalar(self, name: str) -> dict[int, float]:
        steps, values = self.monitor.history.scalar(name)
        return dict(zip(steps.tolist(), values.tolist(), strict=True))


def batch(place: int, size: int = 8) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(place)
    return torch.randn(size, 12, generator=random), torch.randint(0, 4, (size,), generator=random)


# How much, how fast ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
def test_throughput_is_the_batch_over_the_time_of_its_step(when: str) -> None:
    """E12."""
    loop = Loop()
    ids = torch.ones(5, 7, dtype=torch.int64)
    for _ in range(4):
        loop.forward()
        if when == "before":
            loop.monitor.log(inputs={"input_ids": ids}, targets=ids)
        loop.update()
        if when == "after":
            loop.monitor.log(inputs={"input_ids": ids}, targets=ids)
    times = loop.scalar("step_time")
    assert loop.scalar("batch/size") == dict.fromkeys(range(4), 5.0)
    assert loop.scalar("samples_per_second") == pytest.approx({step: 5 / time for step, time in times.items()})
    assert loop.scalar("tokens_per_second") == pytest.approx({step: 35 / time for step, time in times.items()})


def test_images_have_samples_but_no_tokens_and_numbers_neither() -> None:
    loop = Loop()
    loop.forward()
    loop.monitor.log(inputs=torch.ones(6, 3, 4, 4), targets=torch.ones(6, 9, dtype=torch.int64))
    loop.update()
    loop.forward()
    loop.monitor.log(inputs=3.0)
    loop.update()
    assert loop.scalar("batch/size") == {0: 6} and loop.scalar("samples_per_second").keys() == {0}
    assert loop.scalar("tokens_per_second") == {} and loop.scalar("inputs") == {1: 3}


def test_micro_batches_add_up_and_the_first_stands_for_the_step() -> None:
    """E4."""
    loop = Loop()
    for step in range(3):
        for micro in range(4):
            loop.forward()
            inputs, targets = batch(10 * step + micro, size=8 - micro)
            loop.monitor.log(inputs=inputs, targets=targets)
        loop.update()
    assert loop.scalar("batch/size") == dict.fromkeys(range(3), 8.0 + 7 + 6 + 5)
    _, layers, hashes = loop.monitor.history.series("batch", "hash")
    assert layers == ("inputs", "targets")
    assert hashes.tolist() == [content_hashes(batch(10 * step)).tolist() for step in range(3)]
    assert loop.monitor.history.series("batch", "size")[2].tolist() == [[8, 8]] * 3


def test_micro_batches_that_are_logged_after_the_step_add_up_too() -> None:
    loop = Loop()
    loop.forward()
    loop.monitor.log(inputs=torch.ones(8, 12))
    loop.update()
    loop.monitor.log(inputs=torch.ones(4, 12))
    assert loop.scalar("batch/size") == {0: 12}
    assert loop.scalar("samples_per_second")[0] == pytest.approx(12 / loop.scalar("step_time")[0])
    assert loop.monitor.history.series("batch", "size")[2].tolist() == [[8]]


def test_a_loader_tells_the_size_where_nothing_is_logged() -> None:
    """E12; an evaluation's batches are not trained on."""
    loop = Loop()
    for step, _ in enumerate(loop.monitor.batches([batch(0), batch(1), batch(2, size=5)])):
        loop.forward()
        if step == 0:  # accumulated
            continue
        loop.update()
        for _ in loop.monitor.batches([batch(9, size=100)]):
            loop.evaluate()
    assert loop.scalar("batch/size") == {0: 16, 1: 5}
    times = loop.scalar("step_time")
    assert loop.scalar("samples_per_second") == pytest.approx({0: 16 / times[0], 1: 5 / times[1]})


def test_what_is_logged_and_loaded_is_counted_once() -> None:
    loop = Loop()
    for inputs, _ in loop.monitor.batches([batch(0), batch(1)]):
        loop.forward()
        for half in inputs.split(4):
            loop.monitor.log(inputs=half)
        loop.update()
    assert loop.scalar("batch/size") == {0: 8, 1: 8}


def test_a_batch_that_goes_through_the_model_twice_is_counted_once() -> None:
    loop = Loop()
    for _ in loop.monitor.batches([batch(0), batch(1)]):
        loop.forward()
        loop.forward()
        loop.update()
    assert loop.scalar("batch/size") == {0: 8, 1: 8}


def test_logged_inputs_win_over_what_the_loader_gave() -> None:
    loop = Loop()
    for when, _ in enumerate(loop.monitor.batches([batch(0), batch(1)])):
        loop.forward()
        if when:
            loop.update()
        loop.monitor.log(inputs=torch.ones(24, 12))
        if not when:
            loop.update()
    assert loop.scalar("batch/size") == {0: 24, 1: 24}


def test_where_fewer_micro_batches_are_logged_than_loaded_the_loader_is_right() -> None:
    loop = Loop()
    for place, (inputs, _) in enumerate(loop.monitor.batches([batch(i) for i in range(8)])):
        loop.forward()
        if place % 4 == 3:
            loop.update()
            loop.monitor.log(inputs=inputs)
    assert loop.scalar("batch/size") == {0: 32, 1: 32}


def test_throughput_needs_no_budget() -> None:
    loop = Loop(budget=0)
    loop.forward()
    loop.monitor.log(inputs=torch.ones(6, 12))
    loop.update()
    assert loop.scalar("batch/size") == {0: 6} and loop.monitor.history.roles == ()


def test_a_value_under_a_name_of_holters_own_is_kept_apart() -> None:
    loop = Loop()
    loop.forward()
    mine = {"batch/size": 3.0, "samples_per_second": 1.0, "tokens_per_second": 2.0, "weight_decay": 4.0}
    loop.monitor.log(inputs=torch.ones(6, 12), **mine)
    loop.update()
    assert loop.scalar("batch/size") == {0: 6}
    assert {name: loop.scalar(f"logged/{name}") for name in mine} == {name: {0: value} for name, value in mine.items()}
    assert len(loop.monitor.findings) == 4


def test_every_scalar_that_holter_records_is_a_name_of_its_own() -> None:
    """Otherwise a value of the user's would be averaged with it, or lost."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam([{"params": [one]} for one in model.parameters()], weight_decay=0.5)
    scaler = torch.amp.GradScaler("cpu")
    with holter.watch(model, optimizer, run=False, budget=None, activations=1, scaler=scaler) as monitor:
        for batch in monitor.batches([torch.ones(2, 4)] * 3):
            scaler.scale(model(batch).sum()).backward()
            scaler.unscale_(optimizer)
            monitor.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            monitor.log(inputs=batch)
        names = monitor.history.scalars
    assert {"weight_decay/1", "optimizer_step", "loss_scale", "clip_norm", "time/data"} <= set(names)
    assert [name for name in names if name not in OWN and not name.startswith(OWN_PREFIXES)] == []


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (torch.empty((), device="meta"), "meta device"),
        (torch.tensor(1 + 2j), "complex"),
    ],
)
def test_a_tensor_that_holds_no_number_does_not_cost_the_record(value: torch.Tensor, told: str) -> None:
    loop = Loop()
    loop.forward()
    loop.monitor.log(loss=1.0, odd=value)
    loop.update()
    assert loop.scalar("loss") == {0: 1.0} and loop.scalar("odd") == {}
    assert [told in finding.evidence["what"] for finding in loop.monitor.findings] == [True]


def test_a_loss_that_other_processes_hold_a_part_of_is_not_asked_for() -> None:
    """P8: to ask a DTensor for its number may be a collective, which the other ranks need not join."""
    from torch.distributed.tensor import DTensor, Partial, Replicate, init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        whole, part = (DTensor.from_local(torch.tensor(3.0), mesh, [kind]) for kind in (Replicate(), Partial()))
        loop = Loop()
        loop.forward()
        loop.monitor.log(whole=whole, part=part)
        loop.update()
        assert loop.scalar("whole") == {0: 3.0} and loop.scalar("part") == {}
        assert ["full_tensor" in finding.evidence["what"] for finding in loop.monitor.findings] == [True]
    finally:
        torch.distributed.destroy_process_group()


# Validation -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in ("val_loss", "valid_loss", "validation_loss", "eval_loss", "test_loss")),
        *((name, True) for name in ("val/loss", "val.loss", "eval/a/b", "Validation/Loss", "loss/val", "a/test_b")),
        *((name, False) for name in ("loss", "value", "values/mean", "evaluate", "tester", "latest", "interval_s")),
    ],
)
def test_validation_is_told_by_its_name(name: str, expected: bool) -> None:
    assert is_validation(name) is expected


@pytest.mark.parametrize("visible", [True, False])
@pytest.mark.parametrize("when", ["before", "after"])
def test_validation_lands_on_the_last_step_and_leaves_the_training_alone(when: str, visible: bool) -> None:
    """E19: whenever training values are logged, and whether or not forwards can be seen."""
    loop = Loop()
    losses, validation = {}, {}
    for step in range(8):
        loss = loop.forward(visible)
        losses[step] = float(loss)
        if when == "before":
            loop.monitor.log(loss=loss)
        loop.update()
        if when == "after":
            loop.monitor.log(loss=loss)
        if step % 2:
            loop.evaluate()
            loop.monitor.log(val_loss=torch.tensor(step + 0.5), **{"val/accuracy": 0.1 * step})
            validation[step] = step + 0.5
    assert loop.scalar("loss") == losses and loop.scalar("val_loss") == validation
    history = loop.monitor.history
    assert history.validation == ("val_loss", "val/accuracy")
    assert set(history.validation) < set(history.scalars) and "loss" not in history.validation
    assert len(history) == 8 and loop.monitor.findings == ()


def test_validation_in_the_middle_of_an_accumulation_is_of_the_step_before() -> None:
    loop = Loop()
    for step in range(3):
        for micro in range(2):
            loss = loop.forward()
            loop.monitor.log(loss=micro)
            if step == 2 and micro == 0:
                loop.evaluate()
                loop.monitor.log(val_loss=7.0, loss=100.0)
        loop.update()
        assert float(loss) > 0
    assert loop.scalar("val_loss") == {1: 7} and loop.scalar("loss") == {0: 0.5, 1: 0.5, 2: 101 / 3}


def test_validation_told_again_does_not_push_training_values_on() -> None:
    """Where forwards cannot be seen, a name that comes twice opens the next step: not a name of validation."""
    loop = Loop()
    loop.forward(visible=False)
    loop.update()
    loop.monitor.log(val_loss=1.0)
    loop.monitor.log(val_loss=3.0, loss=5.0)
    loop.monitor.log(val_loss=5.0)
    assert loop.scalar("val_loss") == {0: 3} and loop.scalar("loss") == {0: 5}


def test_each_evaluation_stands_for_itself() -> None:
    """Its batches are averaged, those of another step's are not."""
    loop = Loop()
    loop.monitor.log(val_loss=9.0)  # of the model as it was given
    assert loop.scalar("val_loss") == {}
    for step in range(3):
        loop.forward()
        loop.update()
        for value in (step, step + 1):
            loop.monitor.log(val_loss=float(value))
    assert loop.scalar("val_loss") == {0: 0.5, 1: 1.5, 2: 2.5}
    assert loop.monitor.history.records[0].scalars["val_loss"] == 9.0


def test_inputs_where_forwards_cannot_be_seen_land_like_other_values() -> None:
    loop = Loop()
    for step in range(4):
        loop.forward(visible=False)
        loop.monitor.log(inputs=torch.ones(step + 1, 12))
        loop.update()
    assert loop.scalar("batch/size") == {0: 1, 1: 2, 2: 3, 3: 4}


# Batches that were there before ---------------------------------------------------------------------------------


def train_on(places: list[int], when: str = "before", **options: Any) -> Loop:
    loop = Loop(**options)
    for place in places:
        inputs, targets = batch(place)
        loop.forward()
        if when == "before":
            loop.monitor.log(inputs=inputs, targets=targets)
        elif when == "apart":
            loop.monitor.log(inputs=inputs)
        loop.update()
        if when == "after":
            loop.monitor.log(inputs={"x": inputs}, targets=[targets])
        elif when == "apart":
            loop.monitor.log(targets=targets)
    return loop


def ages(places: list[int]) -> dict[int, float]:
    """How long ago each was seen, by looking at all."""
    found = {}
    for step, place in enumerate(places):
        earlier = [step - before for before in range(step) if places[before] == place]
        found[step] = float(min(earlier, default=0))
    return found


STUCK, EPOCHS, MIXED = [1, 2, 3, 3, 3, 3], [1, 2, 3, 4, 1, 2, 3, 4], [1, 2, 1, 3, 2, 2, 4, 1]


@pytest.mark.parametrize("when", ["before", "after", "apart"])
@pytest.mark.parametrize("places", [STUCK, EPOCHS, MIXED])
def test_a_batch_that_comes_again_is_told(places: list[int], when: str) -> None:
    assert train_on(places, when).scalar("batch/repeated") == ages(places)


def test_a_stored_run_tells_it_too(tmp_path: Path) -> None:
    loop = train_on(STUCK, run=tmp_path / "run")
    loop.monitor.close()
    assert holter.open_run(tmp_path / "run").history.scalar("batch/repeated")[1].tolist() == [0, 0, 0, 1, 1, 1]


def test_only_batches_that_were_hashed_are_compared() -> None:
    found = train_on([1, 2, 3, 1, 1, 1, 2], every=3).scalar("batch/repeated")
    assert found == {0: 0, 3: 3, 6: 0}


@pytest.mark.parametrize("when", ["together", "apart"])
def test_the_same_inputs_with_other_targets_are_another_batch(when: str) -> None:
    loop = Loop()
    inputs, targets = batch(0)
    for shift in (0, 1, 0):
        loop.forward()
        if when == "apart":
            loop.monitor.log(inputs=inputs)
            loop.update()
            loop.monitor.log(targets=targets + shift)
        else:
            loop.monitor.log(inputs=inputs, targets=targets + shift)
            loop.update()
    assert loop.scalar("batch/repeated") == {0: 0, 1: 0, 2: 2}


def test_the_same_targets_alone_say_nothing() -> None:
    """Labels of a small batch are the same by chance."""
    loop = Loop()
    for _ in range(3):
        loop.forward()
        loop.monitor.log(targets=torch.zeros(8, dtype=torch.int64))
        loop.update()
    assert loop.scalar("batch/repeated") == {}


def test_a_resumed_training_repeats_nothing() -> None:
    loop = train_on([1, 2, 3])
    loop.monitor.load_state_dict({"step": 1})
    for place in (2, 3, 3):
        loop.forward()
        loop.monitor.log(inputs=batch(place)[0], targets=batch(place)[1])
        loop.update()
    assert loop.monitor.history.latest().scalar("batch/repeated")[1].tolist() == [0, 0, 0, 1]


def record(step: int, segment: int = 0, **hashes: float) -> Record:
    rows = measure_rows([torch.ones(1)] * len(hashes))
    extras = {"hash": np.array(list(hashes.values()))}
    return Record(step, 0.0, rows={"batch": LayerRows(tuple(hashes), rows, extras)}, segment=segment)


def told(repeats: Repeats, *records: Record) -> Iterator[float | None]:
    return (repeats.scalars(one).get("batch/repeated") for one in records)


def test_memory_of_batches_is_bounded_and_the_newest_stay() -> None:
    repeats = Repeats(most=3)
    assert list(told(repeats, *(record(step, inputs=step) for step in range(5)))) == [0] * 5
    assert list(told(repeats, record(5, inputs=1.0), record(6, inputs=4.0))) == [0, 2]
    assert {repeats._inputs.size, repeats._targets.size, repeats._steps.size} == {3}


def test_what_was_not_hashed_contradicts_nothing() -> None:
    nan = float("nan")
    steps = [record(0, inputs=1.0, targets=2.0), record(1, inputs=1.0, targets=nan), record(2, inputs=nan, targets=2.0)]
    assert list(told(Repeats(), *steps, record(3, inputs=1.0, targets=3.0))) == [0, 1, None, 2]


def test_of_a_step_in_parts_the_last_word_is_that_of_all() -> None:
    parts = [record(1, inputs=1.0), record(1, targets=9.0)]
    assert list(told(Repeats(), record(0, inputs=1.0, targets=2.0), *parts)) == [0, 1, 0]


def test_records_without_a_batch_are_passed_over() -> None:
    repeats = Repeats()
    others = [Record(1, 0.0, {"loss": 1.0}), Record(0, 0.0, {"time/data": 1.0}, late=True)]
    assert list(told(repeats, record(0, inputs=1.0), *others, record(2, inputs=1.0))) == [0, None, None, 2]


# The promises ---------------------------------------------------------------------------------------------------


def train(watched: bool, log: Callable[[Training, Tensor, Tensor], dict[str, Any]]) -> Training:
    training = make("mlp")
    if watched:
        monitor = holter.watch(training.model, training.optimizer, run=False, budget=None, histograms=1)
    draw = training.batch

    def drawn() -> tuple[Tensor, Tensor]:
        x, y = draw()
        if watched:
            monitor.log(**log(training, x, y))
        return x, y

    training.batch = drawn
    for _ in range(60):
        training.step()
    if watched:
        assert monitor.findings == () and len(monitor.history.layers("batch")) == 4
    return training


def test_logging_dictionaries_changes_nothing_of_the_training() -> None:
    """P2."""

    def log(training: Training, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"inputs": {"x": x, "again": (x.t(),)}, "targets": [y, {"y": y}], "val_loss": 0.5}

    assert differences(train(False, log), train(True, log)) == []


def test_the_comparison_sees_a_batch_that_is_touched() -> None:
    """P2, planted fault: what is logged is changed in its last bits."""

    def log(training: Training, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {"inputs": {"x": x.mul_(1 + 2**-20), "again": x}, "targets": [y, {"y": y}]}

    assert "losses" in differences(train(False, log), train(True, log))


@pytest.mark.parametrize("name", ["train_loss", "Train/Loss", "loss/train", "training_loss"])
def test_a_loss_by_another_of_its_names_is_the_loss_too(name: str) -> None:
    loop = Loop()
    losses = _log_each_step(loop, lambda loss: loop.monitor.log(**{name: loss, "train_loss_smooth": 9.0}))
    assert loop.scalar("loss") == loop.scalar(name) == losses


def test_where_there_is_a_loss_by_that_name_others_are_what_they_are() -> None:
    loop = Loop()
    losses = _log_each_step(loop, lambda loss: (loop.monitor.log(loss=loss), loop.monitor.log(train_loss=7.0)))
    assert loop.scalar("loss") == losses and set(loop.scalar("train_loss").values()) == {7.0}


def _log_each_step(loop: Loop, log: Callable[[Tensor], object]) -> dict[int, float]:
    losses = {}
    for step in range(3):
        loss = loop.forward()
        loop.update()
        log(loss)
        losses[step] = float(loss)
    loop.monitor.close()
    return losses


@pytest.mark.parametrize(
    ("logs", "steps", "told"),
    [(60, False, True), (5, False, False), (60, True, False), (1100, True, True)],
    ids=["none at all", "hardly begun", "micro-batches of the first", "far too many before the first"],
)
def test_values_that_wait_for_a_step_in_vain_are_told(logs: int, steps: bool, told: bool) -> None:
    """As where optimizer.step() was forgotten, or another optimizer steps than the one that is watched."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with holter.watch(model, optimizer, run=False) as monitor:
        for _ in range(logs):
            monitor.log(loss=1.0)
        if steps:
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    said = [one.advice for one in monitor.findings if "no optimizer that it watches has taken a step" in one.advice]
    assert len(said) == told
