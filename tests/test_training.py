"""fine_tune, against a loop written out by hand, on real data: the 8 x 8 digits that scikit-learn brings."""

import doctest
import math
import threading
import time
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

import holter
import holter.training
from holter.gradients import advise_max_norm
from holter.remedies import get_linear_schedule_with_warmup
from holter.sinks import Memory
from holter.tracker import MetricsTracker
from holter.training import EarlyStopping, TrainingResult, fine_tune

Batch = tuple[Tensor, Tensor]


@cache
def digits() -> tuple[TensorDataset, TensorDataset]:
    images, labels = load_digits(return_X_y=True)
    data = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
    return TensorDataset(*(part[:1437] for part in data)), TensorDataset(*(part[1437:] for part in data))


def loaders(batch_size: int = 64) -> tuple[DataLoader[Batch], DataLoader[Batch]]:
    train, val = digits()
    # Generators of their own: a DataLoader otherwise draws from the global one, which dropout uses.
    order, other = torch.Generator().manual_seed(0), torch.Generator()
    return DataLoader(train, batch_size, shuffle=True, generator=order), DataLoader(val, 256, generator=other)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def few(n_batches: int = 3, size: int = 8) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(0, 2, (size,), generator=generator))
        for _ in range(n_batches)
    ]


def tiny_run(**options: Any) -> TrainingResult:
    torch.manual_seed(0)
    model = options.pop("model", None) or nn.Linear(4, 2)
    return fine_tune(model, *options.pop("data", (few(), few())), **{"progress": False, "n_epochs": 2, **options})


def steps_of_distribution(tracker: MetricsTracker, layer: str = "weight") -> list[int]:
    return tracker.scalar(f"gradients/{layer}/norm")[0].tolist()


def test_the_examples_in_the_docstrings_run() -> None:
    outcome = doctest.testmod(holter.training)
    assert outcome.attempted >= 4 and outcome.failed == 0


# The training itself


@pytest.fixture(scope="module")
def trained() -> SimpleNamespace:
    """Ten epochs on digits, and the same by hand."""
    model, sink = network(), Memory()
    tracker = MetricsTracker(sinks=[sink])
    torch.manual_seed(1)
    result = fine_tune(
        model, *loaders(), optimizer=sgd(model), tracker=tracker, log_histogram=True, progress=False, max_grad_norm=0.5
    )
    tracker.close()

    by_hand, losses, norms = network(), [], []
    optimizer = sgd(by_hand)
    torch.manual_seed(1)
    train, val = loaders()
    for _ in range(10):
        seen = []
        for x, y in train:
            optimizer.zero_grad()
            loss = F.cross_entropy(by_hand(x), y)
            loss.backward()
            before = nn.utils.clip_grad_norm_(by_hand.parameters(), 0.5).item()
            after = math.sqrt(sum(p.grad.double().square().sum().item() for p in by_hand.parameters()))
            norms.append((before, after))
            optimizer.step()
            seen += [loss.item()] * len(y)
        by_hand.eval()
        with torch.no_grad():
            val_loss = F.cross_entropy(by_hand(val.dataset.tensors[0]), val.dataset.tensors[1]).item()
        by_hand.train()
        losses.append((np.mean(seen), val_loss))
    return SimpleNamespace(
        model=model, result=result, tracker=tracker, sink=sink, by_hand=by_hand, losses=losses, norms=np.array(norms)
    )


def test_digits_are_learnt(trained: SimpleNamespace) -> None:
    """A real training: more than 9 of 10 unseen digits are read."""
    images, labels = digits()[1].tensors
    with torch.no_grad():
        accuracy = (trained.model.eval()(images).argmax(1) == labels).float().mean().item()
    assert accuracy > 0.9


def test_the_weights_are_those_of_the_loop_by_hand(trained: SimpleNamespace) -> None:
    """P2: bit for bit, dropout included: logging and validation have drawn no random number."""
    pairs = zip(trained.model.parameters(), trained.by_hand.parameters(), strict=True)
    assert all(torch.equal(mine, by_hand) for mine, by_hand in pairs)


def test_losses_are_means_over_samples(trained: SimpleNamespace) -> None:
    """The last batch of 1437 samples holds 29, and counts for 29; validation is without dropout."""
    history = trained.result.history
    assert [epoch.number for epoch in history] == list(range(1, 11))
    found = [(epoch.metrics["train_loss"], epoch.metrics["val_loss"]) for epoch in history]
    np.testing.assert_allclose(found, trained.losses, rtol=1e-5)
    steps, values = trained.tracker.scalar("val_loss")
    assert steps.tolist() == list(range(1, 11))
    assert values.tolist() == [val_loss for _, val_loss in found]


def test_the_norms_before_and_after_clipping_are_logged(trained: SimpleNamespace) -> None:
    """B6: against norms measured by hand, in float64, after clip_grad_norm_ had scaled."""
    before, after = trained.norms.reshape(10, -1, 2).transpose(2, 0, 1)
    expected = {
        "norm_before_clipping": before.mean(1),
        "norm_after_clipping": after.mean(1),
        "norm_max": before.max(1),
        "clipped_share": (before > 0.5).mean(1),
    }
    for name, values in expected.items():
        steps, logged = trained.tracker.scalar(f"gradients/{name}")
        assert steps.tolist() == list(range(1, 11))
        np.testing.assert_allclose(logged, values, rtol=1e-5)
    assert 0 < expected["clipped_share"].mean() < 1  # both kinds of step were there
    assert (expected["norm_after_clipping"] < expected["norm_before_clipping"]).all()


def test_the_norm_of_every_batch_is_returned_for_advice(trained: SimpleNamespace) -> None:
    """C17: the share of clipped steps, and what follows from it."""
    norms = trained.result.gradient_norms
    np.testing.assert_allclose(norms, trained.norms[:, 0], rtol=1e-6)
    assert advise_max_norm(norms, 0.5).clipped_share == pytest.approx(np.mean(trained.norms[:, 0] > 0.5))


def test_ten_epochs_log_the_distribution_at_0_5_and_10(trained: SimpleNamespace) -> None:
    """A5: three times, not eleven, of every parameter."""
    for name, _ in trained.model.named_parameters():
        assert steps_of_distribution(trained.tracker, name) == [0, 5, 10]


def test_the_distribution_is_of_the_gradients_that_the_optimizer_used(trained: SimpleNamespace) -> None:
    """A1: the total of the layers is the norm after clipping, of the first batch of all and of the last of all."""
    totals = np.sqrt(
        sum(trained.tracker.scalar(f"gradients/{name}/norm")[1] ** 2 for name, _ in trained.model.named_parameters())
    )
    np.testing.assert_allclose(totals[[0, 2]], trained.norms[[0, -1], 1], rtol=1e-5)
    np.testing.assert_allclose(totals[1], trained.norms[len(trained.norms) // 2, 1], rtol=1e-5)


def test_healthy_training_shows_a_bell_about_zero(trained: SimpleNamespace) -> None:
    """A3, A7: centred, most values within [-0.1, 0.1], a thick middle and thin tails on both sides."""
    histograms = [record for record in trained.sink.records if record.rows]
    assert [record.step for record in histograms] == [0, 5, 10]
    for record in histograms:
        rows = record.rows["histogram"].rows
        low, lower, median, upper, high = rows.histograms[0].quantile(np.array([0.01, 0.2, 0.5, 0.8, 0.99]))
        assert rows.histograms[0].count == sum(p.numel() for p in trained.model.parameters())
        assert low > -0.1 and high < 0.1
        assert abs(median) < 0.1 * (high - low)
        assert lower - low > median - lower > 0 and high - upper > upper - median > 0


# When the distribution is logged


@pytest.mark.parametrize(
    ("n_epochs", "every", "steps"),
    [(1, 5, [0, 1]), (5, 5, [0, 5]), (6, 5, [0, 5, 6]), (4, 1, [0, 1, 2, 3, 4]), (3, 2, [0, 2, 3]), (2, 100, [0, 2])],
)
def test_the_end_of_training_counts(n_epochs: int, every: int, steps: list[int]) -> None:
    """A5: and no step twice."""
    tracker = MetricsTracker()
    tiny_run(tracker=tracker, n_epochs=n_epochs, log_grad_dist_every=every)
    assert steps_of_distribution(tracker) == steps


def test_the_default_is_ten_epochs_and_every_fifth() -> None:
    """A5: with nothing said."""
    result = fine_tune(nn.Linear(4, 2), few(), few(), progress=False)
    assert len(result.history) == 10
    assert steps_of_distribution(result.tracker) == [0, 5, 10]


@pytest.mark.parametrize(("stop_after", "steps"), [(1, [0, 1]), (5, [0, 5]), (7, [0, 5, 7])])
def test_an_early_stop_is_the_end(stop_after: int, steps: list[int]) -> None:
    """A5, E22: the hook gets the epoch and its metrics."""
    seen = []

    def hook(epoch: int, metrics: Any) -> bool:
        seen.append((epoch, metrics["val_loss"]))
        return epoch == stop_after

    tracker = MetricsTracker()
    result = tiny_run(tracker=tracker, n_epochs=10, early_stopping=hook)
    assert result.stopped_early and len(result.history) == stop_after
    assert steps_of_distribution(tracker) == steps
    assert seen == [(epoch.number, epoch.metrics["val_loss"]) for epoch in result.history]


def test_early_stopping_waits_for_its_patience() -> None:
    """E22: an improvement of no more than min_delta is none, and neither is NaN."""

    def stops_at(losses: list[float], **options: Any) -> int | None:
        hook = EarlyStopping(**options)
        return next((i for i, loss in enumerate(losses, start=1) if hook(i, {"val_loss": loss})), None)

    assert stops_at([1.0, 0.9, 0.8, 0.7], patience=1) is None
    assert stops_at([1.0, 1.1, 1.2, 1.3], patience=3) == 4
    assert stops_at([1.0, 1.1, 1.2, 0.9, 1.0, 1.0], patience=3) is None
    assert stops_at([1.0, 0.95, 0.91, 0.8], patience=2, min_delta=0.1) == 3
    assert stops_at([math.nan, math.nan], patience=2) == 2
    with pytest.raises(ValueError, match=r"'f1'.*val_loss"):
        EarlyStopping(metric="f1")(1, {"val_loss": 1.0})


def test_the_best_epoch_is_that_of_the_lowest_validation_loss() -> None:
    """And NaN is never the best."""
    losses = iter([math.nan, 2.0, 1.0, 3.0])

    class Scripted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if self.training else x.new_full((), next(losses))

    def loss_fn(output: Tensor, y: Tensor) -> Tensor:
        return output if output.ndim == 0 else F.cross_entropy(output, y)

    result = tiny_run(model=Scripted(4, 2), data=(few(), few(1)), n_epochs=4, loss_fn=loss_fn)
    assert (result.best.number, result.best.metrics["val_loss"]) == (3, 1.0)
    without = tiny_run(data=(few(), None), optimizer=None, lr=0.1, n_epochs=3)
    assert "val_loss" not in without.best.metrics and without.best.number == 3


# What it does to the model


class Spy(nn.Module):
    """Notes the mode it was called in."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen, self.seen = nn.Linear(4, 2), nn.BatchNorm1d(4), []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append((self.training, self.frozen.training, torch.is_grad_enabled()))
        return self.linear(self.frozen(x))


def test_validation_is_in_eval_mode_without_gradients_and_modes_come_back() -> None:
    """Also the eval mode of a part that the caller had put into it."""
    model = Spy()
    model.frozen.eval()
    tiny_run(model=model, data=(few(2), few(1)))
    training, validating = (True, False, True), (False, False, False)
    assert model.seen == [training, training, validating] * 2
    assert model.training and not model.frozen.training


def test_a_model_that_comes_in_eval_mode_is_trained_in_training_mode() -> None:
    model = Spy()
    model.eval()
    tiny_run(model=model, data=(few(1), None), n_epochs=1)
    assert model.seen == [(True, True, True)]


def test_modes_come_back_when_validation_fails() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(RuntimeError):
        tiny_run(model=model, data=(few(), [(torch.ones(2, 3), torch.zeros(2))]))
    assert model.training


def test_gradients_do_not_pile_up_where_the_optimizer_does_not_hold_the_parameter() -> None:
    """B6: the norm of a batch is that of its own gradients."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    result = tiny_run(model=model, data=(few(1) * 4, None), optimizer=sgd(model[1], lr=1e-9), n_epochs=1)
    assert result.gradient_norms == pytest.approx(np.full(4, result.gradient_norms[0]), rel=1e-4)


def test_without_clipping_norms_are_logged_all_the_same() -> None:
    """B6: with max_grad_norm=None the gradients stay as they are."""
    big = [(x * 100, y) for x, y in few()]
    for limit, clipped in ((None, 0.0), (1e-3, 1.0)):
        metrics = tiny_run(data=(big, None), max_grad_norm=limit, n_epochs=1).history[0].metrics
        before, after = (metrics[f"gradients/norm_{when}_clipping"] for when in ("before", "after"))
        assert before > 1
        assert after == pytest.approx(before if limit is None else limit, rel=1e-2)
        assert metrics["gradients/clipped_share"] == clipped


def test_a_loss_that_is_not_finite_is_logged_and_training_goes_on() -> None:
    tracker = MetricsTracker()
    result = tiny_run(data=([(x * math.nan, y) for x, y in few()], None), tracker=tracker)
    assert len(result.history) == 2 and math.isnan(result.history[0].metrics["train_loss"])
    assert tracker.scalar("gradients/clipped_share")[1].tolist() == [1.0, 1.0]


def test_sparse_gradients_are_trained_clipped_and_logged() -> None:
    """B6: torch's clip_grad_norm_ refuses them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(20, 8, sparse=True), nn.Linear(8, 2))
    data = [(torch.randint(0, 20, (8, 3)), torch.randint(0, 2, (8,))) for _ in range(4)]
    result = tiny_run(model=model, data=(data, data), optimizer=sgd(model), n_epochs=10, max_grad_norm=0.5)
    assert result.history[-1].metrics["train_loss"] < result.history[0].metrics["train_loss"]
    assert steps_of_distribution(result.tracker, "0.weight") == [0, 5, 10]


# Batches, losses, schedules


class HuggingFaceLike(nn.Module):
    """Takes keywords and returns an object, or a mapping, that has a loss."""

    def __init__(self, as_mapping: bool) -> None:
        super().__init__()
        self.linear, self.as_mapping = nn.Linear(4, 2), as_mapping

    def forward(self, input_values: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.linear(input_values)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits} if self.as_mapping else SimpleNamespace(loss=loss, logits=logits)


@pytest.mark.parametrize("as_mapping", [True, False])
def test_mappings_train_as_tuples_do(as_mapping: bool) -> None:
    """Batches by keyword, the loss from the model's output."""
    batches = [{"input_values": x, "labels": y} for x, y in few()]
    torch.manual_seed(0)
    model = HuggingFaceLike(as_mapping)
    by_mapping = fine_tune(model, batches, batches, n_epochs=3, lr=0.1, progress=False)
    torch.manual_seed(0)
    by_tuple = fine_tune(nn.Linear(4, 2), few(), few(), n_epochs=3, lr=0.1, progress=False)
    assert [e.metrics["val_loss"] for e in by_mapping.history] == [e.metrics["val_loss"] for e in by_tuple.history]


def test_a_loss_function_of_the_callers_is_used() -> None:
    """It gets the output and the target, or the output and the whole batch."""
    calls = []

    def loss_fn(output: Any, target: Any) -> Tensor:
        calls.append(target)
        return (output if isinstance(output, Tensor) else output.logits).square().mean()

    tiny_run(data=(few(1), None), loss_fn=loss_fn, n_epochs=1)
    batch = {"input_values": few(1)[0][0]}
    tiny_run(model=HuggingFaceLike(False), data=([batch], None), loss_fn=loss_fn, n_epochs=1)
    assert torch.equal(calls[0], few(1)[0][1])
    assert calls[1].keys() == batch.keys()


def test_several_inputs_come_before_the_target() -> None:
    x, y = few(1)[0]
    assert tiny_run(model=nn.Bilinear(4, 4, 2), data=([[x, x, y]], None), n_epochs=1).gradient_norms > 0


def test_batches_go_to_the_device() -> None:
    """The meta device plays the second one: it computes nothing, but refuses a mixture. Nested parts move too."""
    moved = holter.training._to(torch.device("meta"), {"a": torch.ones(1), "b": [torch.ones(2), ("text", 3)]})
    assert moved["a"].is_meta and moved["b"][0].is_meta and moved["b"][1] == ["text", 3]
    model = nn.Linear(4, 2)
    with pytest.raises(Exception, match="meta"):  # the loss has no value to read
        tiny_run(model=model, device="meta")
    assert model.weight.is_meta


def test_a_schedule_steps_after_every_batch() -> None:
    """C20: three batches an epoch, two epochs, down to zero."""
    model = nn.Linear(4, 2)
    optimizer = sgd(model, lr=1.0)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 6)
    tracker = MetricsTracker()
    tiny_run(model=model, optimizer=optimizer, scheduler=scheduler, tracker=tracker)
    assert tracker.scalar("lr")[1].tolist() == pytest.approx([0.75, 0.0])


def test_a_plateau_schedule_steps_with_the_validation_loss() -> None:
    model = nn.Linear(4, 2)
    optimizer = sgd(model, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    seen = []
    step = scheduler.step
    scheduler.step = lambda metric: (seen.append(metric), step(metric))
    result = tiny_run(model=model, optimizer=optimizer, scheduler=scheduler)
    assert seen == [epoch.metrics["val_loss"] for epoch in result.history]


def test_adamw_with_the_given_rate_trains_what_requires_a_gradient() -> None:
    """The default; frozen parameters stay as they are."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    before = [parameter.clone() for parameter in model.parameters()]
    result = tiny_run(model=model, lr=0.25)
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert moved == [False, False, True, True]
    assert result.history[0].metrics["lr"] == 0.25


# A monitor, the terminal, and no waiting


def test_a_monitor_clips_and_logs() -> None:
    """B6: holter's own, which then has a record with the loss of every batch."""
    model = network()
    optimizer = sgd(model)
    with holter.watch(model, optimizer, run=False) as monitor:
        torch.manual_seed(1)
        result = fine_tune(model, *loaders(), n_epochs=1, optimizer=optimizer, monitor=monitor, progress=False)
    plain = network()
    torch.manual_seed(1)
    expected = fine_tune(plain, *loaders(), n_epochs=1, optimizer=sgd(plain), progress=False)
    assert result.gradient_norms.tolist() == expected.gradient_norms.tolist()
    steps, losses = monitor.history.scalar("loss")
    assert steps.tolist() == list(range(23))
    assert np.isfinite(losses).all()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_monitor_is_asked_to_clip_only_where_there_is_a_limit() -> None:
    calls = []

    class Fake:
        def clip_grad_norm_(self, max_norm: float) -> Tensor:
            calls.append(("clip", max_norm))
            return torch.tensor(2.0)

        def log(self, **values: Any) -> None:
            calls.append(("log", list(values)))

    tiny_run(monitor=Fake(), data=(few(1), None), n_epochs=1, max_grad_norm=0.5)
    tiny_run(monitor=Fake(), data=(few(1), None), n_epochs=1, max_grad_norm=None)
    assert calls == [("clip", 0.5), ("log", ["loss"]), ("log", ["loss"])]


def test_progress_is_quiet_unless_there_is_a_terminal(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    tiny_run(progress=True)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes the stream for a terminal
    tiny_run(progress=False)
    assert capfd.readouterr() == ("", "")
    result = tiny_run(progress=True)
    out, shown = capfd.readouterr()
    assert out == ""
    for epoch in result.history:
        line = f"epoch {epoch.number}/2  train {epoch.metrics['train_loss']:.4g}  val {epoch.metrics['val_loss']:.4g}"
        assert line in shown
    assert "━" in shown


def test_an_interrupted_epoch_leaves_no_bar_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the threads that draw it, while the traceback keeps its frame alive, as a notebook does."""
    monkeypatch.setenv("FORCE_COLOR", "1")

    def interrupt(output: Tensor, target: Tensor) -> Tensor:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt) as kept:
        tiny_run(progress=True, loss_fn=interrupt)
    deadline = time.monotonic() + 2  # rich tells one of them to stop and does not wait for it
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before
    assert kept.tb is not None


class Reads(TorchFunctionMode):
    """Counts what makes the host wait for a device."""

    waiting = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__array__")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.waiting
        return func(*args, **(kwargs or {}))


def reads(n_batches: int, loss_fn: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy) -> int:
    model = nn.Linear(4, 2)
    with Reads() as mode:
        tiny_run(model=model, data=(few(n_batches), few(n_batches)), optimizer=sgd(model), loss_fn=loss_fn)
    return mode.count


def test_no_batch_waits_for_the_device() -> None:
    """P5: two thousand batches read as often as two; losses and norms come once an epoch."""
    assert 0 < reads(2) == reads(1100)

    def impatient(output: Tensor, target: Tensor) -> Tensor:
        loss = F.cross_entropy(output, target)
        loss.item()
        return loss

    assert reads(4, impatient) > reads(2, impatient)  # the gate sees one that waits


# Refused before training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_epochs": 0}, "n_epochs must be at least 1, got 0"),
        ({"log_grad_dist_every": 0}, "log_grad_dist_every must be at least 1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
        ({"max_grad_norm": math.nan}, "max_grad_norm must be positive"),
        ({"model": nn.Linear(4, 2).requires_grad_(False)}, "nothing to train"),
        ({"optimizer": sgd(nn.Linear(4, 2))}, "none of the model's parameters"),
        ({"data": (iter(few()), None)}, "read only once"),
        ({"data": (few(), (batch for batch in few()))}, "read only once"),
        ({"data": ([], None)}, "no batches"),
        ({"data": ([torch.ones(3, 4)], None)}, "got Tensor"),
        ({"data": ([(torch.ones(3, 4),)], None)}, "inputs..., target"),
        ({"model": HuggingFaceLike(True), "data": ([{"input_values": torch.ones(3, 4)}], None)}, "has no loss"),
        ({"early_stopping": EarlyStopping(), "data": (few(), None)}, "'val_loss'"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_reason(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_run(**options)


def test_an_iterator_will_do_for_one_epoch_and_a_stream_needs_no_length() -> None:
    class Stream(torch.utils.data.IterableDataset[Batch]):
        def __iter__(self) -> Any:
            yield from zip(*few(1)[0], strict=True)

    assert len(tiny_run(data=(iter(few()), iter(few())), n_epochs=1).gradient_norms) == 3
    assert len(tiny_run(data=(DataLoader(Stream(), 4), None)).gradient_norms) == 4
    assert math.isnan(tiny_run(data=(few(), [])).history[0].metrics["val_loss"])
