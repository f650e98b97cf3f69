"""What an optimizer did to the weights: a sample against the whole, computed here in float64 from full copies."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import holter
from holter.samples import MOST, Sampler, Segments, stride_of
from holter.statistics.sketch import WIDTH

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}


def an_mlp() -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 10))
    generator = torch.Generator().manual_seed(1)
    return model, lambda step: model(torch.randn(32, 64, generator=generator)).log_softmax(1)[:, :5].mean().neg()


def a_convnet() -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.Flatten(), nn.LazyLinear(10)
    )
    generator = torch.Generator().manual_seed(1)
    model(torch.randn(2, 3, 8, 8, generator=generator))
    return model.to(
        memory_format=torch.channels_last
    ), lambda step: model(torch.randn(16, 3, 8, 8, generator=generator)).square().mean()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm, self.head = nn.Embedding(50, 32), nn.LSTM(32, 64), nn.Linear(64, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(tokens))[0])


def an_lstm() -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    model = Recurrent()
    generator = torch.Generator().manual_seed(1)

    def loss(step: int) -> Tensor:
        tokens = torch.randint(50, (12, 8), generator=generator)
        return nn.functional.cross_entropy(model(tokens[:-1]).flatten(0, 1), tokens[1:].flatten())

    return model, loss


def a_transformer() -> tuple[nn.Module, Callable[[int], Tensor]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    generator = torch.Generator().manual_seed(1)
    return model, lambda step: (model(torch.randn(4, 10, 64, generator=generator)) - 1).square().mean()


def a_gpt2() -> tuple[nn.Module, Callable[[int], Tensor]]:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=300, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    generator = torch.Generator().manual_seed(1)

    def loss(step: int) -> Tensor:
        tokens = torch.randint(300, (4, 16), generator=generator)
        return model(input_ids=tokens, labels=tokens).loss

    return model, loss


MODELS = {"mlp": an_mlp, "convnet": a_convnet, "lstm": an_lstm, "transformer": a_transformer, "gpt2": a_gpt2}
STEPS = 8


def train(
    build: Callable[[], tuple[nn.Module, Callable[[int], Tensor]]], optimizer_name: str, **options: Any
) -> tuple[holter.Monitor, list[dict[str, tuple[Tensor, Tensor, Tensor | None]]]]:
    """The monitor, and for each step and layer copies: weight before, weight after, gradient before the step."""
    model, loss_of = build()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    seen = []
    with holter.watch(
        model, optimizer, run=False, **{"updates": 1, "budget": None, "diagnose": False, **options}
    ) as monitor:
        for step in range(STEPS):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(step)  # noqa: B023
                loss.backward()
                return loss

            with_closure = optimizer_name == "LBFGS"
            if not with_closure:
                closure()
            before = {n: p.detach().double().clone() for n, p in model.named_parameters()}
            gradients = {n: p.grad.double().clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step(closure) if with_closure else optimizer.step()
            after = {n: p.detach().double().clone() for n, p in model.named_parameters()}
            seen.append({n: (before[n], after[n], gradients.get(n)) for n in before})
        _ = monitor.history
    return monitor, seen


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_the_update_is_that_of_the_whole_tensor(name: str, optimizer: str) -> None:
    """Exact for tensors that are their own sketch, within 3 % for larger ones."""
    if (name, optimizer) == ("convnet", "LBFGS"):
        pytest.skip("torch's LBFGS cannot read the gradients of this convolution")
    monitor, seen = train(MODELS[name], optimizer)
    assert monitor.findings == ()
    steps, layers, norms = monitor.history.series("update", "norm")
    _, _, ratios = monitor.history.series("update", "ratio")
    _, _, unchanged = monitor.history.series("update", "unchanged")
    assert len(steps) >= STEPS - 1 and len(layers) == len(seen[0])
    for line, step in enumerate(steps.tolist()):
        for place, layer in enumerate(layers):
            before, after, _ = seen[step][layer]
            change = after - before
            within = 1e-5 if before.numel() <= WIDTH else 0.03
            assert norms[line, place] == pytest.approx(change.norm().item(), rel=within, abs=1e-12), (step, layer)
            if before.norm() > 0:
                expected = (change.norm() / before.norm()).item()
                assert ratios[line, place] == pytest.approx(expected, rel=2 * within, abs=1e-12)
            share = (change == 0).double().mean().item()
            # of a sample of 3,000 and more, four times its error
            error = 0 if before.numel() <= MOST else 4 * math.sqrt(share * (1 - share) / (0.75 * MOST))
            assert unchanged[line, place] == pytest.approx(share, abs=error + 1e-9), (step, layer)


def test_a_sample_alone_would_miss_rows_that_alone_change() -> None:
    """The planted fault of the test above: an embedding under momentum, without its sketch."""

    def largest_error() -> float:
        monitor, seen = train(a_wide_table, "momentum")
        steps, layers, norms = monitor.history.series("update", "norm")
        exact = [(seen[step]["weight"][1] - seen[step]["weight"][0]).norm().item() for step in steps.tolist()]
        return float(np.abs(norms[:, layers.index("weight")] / exact - 1).max())

    assert largest_error() < 0.03
    with mock.patch("holter.statistics.measure.Measurer.fold", lambda *_: None):
        assert largest_error() > 0.1


def a_wide_table() -> tuple[nn.Module, Callable[[int], Tensor]]:
    """Of which each step sees a few rows, and one of them most of all."""
    torch.manual_seed(0)
    model, generator = nn.Embedding(5000, 64), torch.Generator().manual_seed(1)

    def loss(step: int) -> Tensor:
        rows = torch.randint(5000, (40,), generator=generator)
        return (model(rows).square().sum(1) * torch.logspace(-1, 1, 40)).sum()

    return model, loss


def test_the_formula_and_the_cosine_are_beside_it() -> None:
    """E2: lr x |g| / |w|; and the cosine with the gradients of the step before."""
    monitor, seen = train(an_mlp, "SGD")
    _, layers, planned = monitor.history.series("update", "planned_ratio")
    _, _, cosines = monitor.history.series("update", "cosine")
    assert np.isnan(cosines[0]).all()
    for step in range(1, STEPS):
        for place, layer in enumerate(layers):
            before, _, gradient = seen[step][layer]
            earlier = seen[step - 1][layer][2]
            assert gradient is not None and earlier is not None
            assert planned[step, place] == pytest.approx((0.1 * gradient.norm() / before.norm()).item(), rel=0.05)
            expected = nn.functional.cosine_similarity(gradient.flatten(), earlier.flatten(), dim=0).item()
            within = 1e-5 if gradient.numel() <= MOST else 0.1
            assert cosines[step, place] == pytest.approx(expected, abs=within)


def test_a_rate_that_is_a_tensor_on_the_host_is_known() -> None:
    model, loss_of = an_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
    with holter.watch(model, optimizer, run=False, updates=1, budget=None) as monitor:
        loss_of(0).backward()
        expected = 0.1 * model[0].bias.grad.norm() / model[0].bias.norm()
        optimizer.step()
    _, layers, planned = monitor.history.series("update", "planned_ratio")
    assert planned[0, layers.index("0.bias")] == pytest.approx(expected.item(), rel=1e-5)


def test_the_cosine_needs_no_update_at_the_step_before() -> None:
    """With a pace of four, gradients are sampled one step ahead of each update."""
    monitor, _ = train(an_mlp, "SGD", updates=4)
    steps, _, cosines = monitor.history.series("update", "cosine")
    assert steps.tolist() == [0, 4] and not np.isnan(cosines[1]).any()


def test_weights_whose_bits_do_not_change_are_seen() -> None:
    """bf16 weights and a small rate: most updates are lost."""
    model = nn.Linear(100, 100).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with holter.watch(model, optimizer, run=False, updates=1, budget=None) as monitor:
        before = model.weight.detach().clone()
        model(torch.ones(4, 100).bfloat16()).sum().backward()
        optimizer.step()
    share = (before == model.weight).double().mean().item()
    _, layers, unchanged = monitor.history.series("update", "unchanged")
    assert unchanged[0, layers.index("weight")] == pytest.approx(share, abs=0.03) and share > 0.5


def test_a_clip_of_holters_counts_for_the_formula() -> None:
    """Rows are of the gradients before the clip, the optimizer gets those after it."""
    model, loss_of = an_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=False, updates=1, budget=None) as monitor:
        loss_of(0).backward()
        assert monitor.clip_grad_norm_(1e-3) > 1e-3
        expected = 0.1 * model[2].weight.grad.norm() / model[2].weight.norm()
        optimizer.step()
    _, layers, planned = monitor.history.series("update", "planned_ratio")
    assert planned[0, layers.index("2.weight")] == pytest.approx(expected.item(), rel=0.03)


def test_a_loss_scale_that_the_optimizer_takes_out_does_not_count_for_the_formula() -> None:
    """A fused optimizer is given gradients that are still multiplied by it."""
    model, loss_of = an_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=1)
    expected = []
    with holter.watch(model, optimizer, run=False, updates=1, budget=None, scaler=scaler) as monitor:
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale(loss_of(step)).backward()
            expected.append((0.1 * model[2].weight.grad.norm() / scaler.get_scale() / model[2].weight.norm()).item())
            scaler.step(optimizer)
            scaler.update()
    _, layers, planned = monitor.history.series("update", "planned_ratio")
    np.testing.assert_allclose(planned[:, layers.index("2.weight")], expected, rtol=0.03)


@pytest.mark.parametrize("zero_grad", ["in the closure", "after the step"])
@pytest.mark.parametrize("updates", [1, 2])
def test_a_closure_computes_the_gradients_that_count(zero_grad: str, updates: int) -> None:
    """What lies there before such a step, if anything, is the gradient of the step before."""
    model, loss_of = an_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight, norms, gradients, planned = model[4].weight, [], [], []
    with holter.watch(model, optimizer, run=False, updates=updates, weights=None, budget=None) as monitor:
        for step in range(STEPS):

            def closure() -> Tensor:
                if zero_grad == "in the closure":
                    optimizer.zero_grad()
                loss = loss_of(step)  # noqa: B023
                loss.backward()
                return loss

            before = weight.detach().clone()
            optimizer.step(closure)
            assert weight.grad is not None
            norms.append((weight.detach() - before).norm().item())
            planned.append((0.1 * weight.grad.norm() / before.norm()).item())
            gradients.append(weight.grad.flatten().clone())
            if zero_grad == "after the step":
                optimizer.zero_grad()
        history = monitor.history
    assert monitor.findings == ()
    steps, layers, found = history.series("update", "norm")
    assert steps.tolist() == list(range(0, STEPS, updates))
    place = layers.index("4.weight")
    np.testing.assert_allclose(found[:, place], np.array(norms)[steps], rtol=1e-5)
    np.testing.assert_allclose(history.series("update", "planned_ratio")[2][:, place], np.array(planned)[steps], 1e-5)
    cosines = history.series("update", "cosine")[2][:, place]
    for step, cosine in zip(steps.tolist()[1:], cosines[1:].tolist(), strict=True):
        expected = nn.functional.cosine_similarity(gradients[step], gradients[step - 1], dim=0).item()
        assert cosine == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("updates", [1, 4])
def test_optimizers_that_take_turns_have_a_cosine_each(updates: int) -> None:
    """Of the gradients of their own steps: between two of them lies one of the other optimizer."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    optimizers = {name: torch.optim.SGD(model[name].parameters(), lr=0.1) for name in model}
    gradients: dict[int, Tensor] = {}
    with holter.watch(model, list(optimizers.values()), run=False, updates=updates, budget=None) as monitor:
        for _ in range(8):
            for name, optimizer in optimizers.items():  # a forward between them, or they were one training step
                model.zero_grad()
                model["b"](model["a"](torch.randn(2, 4))).square().sum().backward()
                gradients[len(gradients)] = model[name].weight.grad.flatten().clone()
                optimizer.step()
        steps, layers, cosines = monitor.history.series("update", "cosine")
    seen = 0
    for name in model:
        for step, cosine in zip(steps.tolist(), cosines[:, layers.index(f"{name}.weight")].tolist(), strict=True):
            if not math.isnan(cosine):
                expected = nn.functional.cosine_similarity(gradients[step], gradients[step - 2], dim=0).item()
                assert cosine == pytest.approx(expected, abs=1e-5)
                seen += 1
    assert seen == (14 if updates == 1 else 6)


def test_another_line_of_training_has_no_step_before_it() -> None:
    model, loss_of = an_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=False, updates=1, budget=None) as monitor:
        for step in range(4):
            if step == 2:
                monitor.load_state_dict({"step": 2})
            loss_of(step).backward()
            optimizer.step()
        cosines = monitor.history.series("update", "cosine")[2]
    assert np.isnan(cosines).all(axis=1).tolist() == [True, False, True, False]


def test_an_update_that_cannot_be_measured_costs_nothing_else_of_the_record() -> None:
    """It is measured late, in the writer's thread, where a failure would take the loss along."""
    model, loss_of = an_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=False, updates=1, budget=None) as monitor:
        with mock.patch("holter.updates.Change.measure", side_effect=MemoryError):
            for step in range(3):
                loss = loss_of(step)
                loss.backward()
                monitor.log(loss=loss)
                optimizer.step()
            history = monitor.history
        assert len(history) == len(history.scalar("loss")[0]) == 3 and monitor.dropped == 0
        assert "update" not in history.roles and "gradient" in history.roles
        assert [finding.evidence["where"] for finding in monitor.findings] == ["measure the update"]


def test_parameters_without_a_gradient_have_no_update() -> None:
    model, loss_of = an_mlp()
    model[2].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=False, updates=1) as monitor:
        loss_of(0).backward()
        optimizer.step()
    assert "2.weight" not in monitor.history.layers("update") and "0.weight" in monitor.history.layers("update")


def test_no_update_is_recorded_of_a_step_that_raised() -> None:
    class Broken(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise RuntimeError("no")
            return super().step(closure)

    model, loss_of = an_mlp()
    optimizer = Broken(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=False, updates=1) as monitor:
        loss_of(0).backward()
        with pytest.raises(RuntimeError, match="no"):
            optimizer.step()
        optimizer.fails = False
        optimizer.step()
        assert len(monitor.history.series("update", "norm")[0]) == 1


def test_a_step_that_raised_does_not_keep_the_parameters() -> None:
    """P3: as after running out of memory, where the user drops the model and keeps the monitor."""

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise RuntimeError("no")

    model, loss_of = an_mlp()
    optimizer = Broken(model.parameters(), lr=0.1)
    monitor = holter.watch(model, optimizer, run=False, updates=1)
    loss_of(0).backward()
    with pytest.raises(RuntimeError, match="no"):
        optimizer.step()
    weight = weakref.ref(model[0].weight)
    del model, loss_of, optimizer
    gc.collect()
    assert weight() is None and monitor.state == "closed"


def test_a_sample_misses_no_column() -> None:
    """A stride that divides the width of a matrix would see the same columns in every row."""
    for width in (192, 512, 768, 1024, 2048, 4096):
        stride = stride_of(width * width)
        columns = {place % width for place in range(0, width * width, stride)}
        assert len(columns) == min(width, -(-width * width // stride))
    counts = Sampler([10, 4096, 4097, 1_000_000], torch.device("cpu")).segments.counts
    assert counts[:2] == [10, 4096] and all(count <= MOST for count in counts)


def test_a_step_without_a_look_costs_nothing() -> None:
    """P6: with ten thousand parameters, to ask for the rate of each at every step would take a millisecond."""
    model, _ = an_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=False, updates=None) as monitor:
        monitor._collector.after_update(None)  # type: ignore[arg-type]  # it would fail to look at that


def test_optimizers_that_are_gone_leave_no_samples() -> None:
    """P4: a training that makes a new optimizer again and again keeps the samples of the last one only."""
    model, loss_of = an_mlp()
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    with holter.watch(model, first, run=False, updates=1, budget=None) as monitor:
        for _ in range(4):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            loss_of(0).backward()
            optimizer.step()
        gc.collect()
        assert list(monitor._collector._updates._samples) == [optimizer]


@pytest.mark.parametrize("counts", [[1, 128, 129, 16_384, 0, 5], [4096] * 3, [7], [256, 0, 0]])
def test_sums_over_stretches_are_the_same_by_pieces(counts: list[int]) -> None:
    """As a device does it, against numpy on the host: no stretch loses its rest, and one without numbers is 0."""
    random = torch.Generator().manual_seed(0)
    first, second = (torch.randn(sum(counts), generator=random, dtype=torch.float64) for _ in range(2))
    segments = Segments(counts, torch.device("cpu"))
    expected = segments.dots((first, second), (second, second))
    segments._on_host = False
    torch.testing.assert_close(segments.dots((first, second), (second, second)), expected)
