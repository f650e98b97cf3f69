"""The demonstration: a real training that learns, told truthfully; and the benchmark that stands on it."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner

import holter
from benchmarks import overhead
from holter.cli import main
from holter.demo import DemoSettings, Step, Training, batches, read_corpus, train
from holter.demo_model import ByteGPT

SMALL = DemoSettings(steps=12, batch=4, context=32, depth=2, width=32, heads=2, warmup_steps=2)


def small_model() -> ByteGPT:
    torch.manual_seed(0)
    return ByteGPT(depth=2, width=32, heads=2, context=16)


def test_the_model_sees_no_later_byte() -> None:
    model = small_model().eval()
    tokens = torch.randint(256, (3, 16))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_attention_is_that_of_the_textbook() -> None:
    """softmax(Q K^T / sqrt(d)) V over the bytes so far, head by head, in float64."""
    attention = small_model().double().blocks[0].attention
    x = torch.randn(2, 16, 32, dtype=torch.float64)
    query, key, value = (x @ part.T for part in attention.query_key_value.weight.chunk(3))
    mixed = []
    for head in range(2):
        q, k, v = (part[..., 16 * head : 16 * (head + 1)] for part in (query, key, value))
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf)
        mixed.append(scores.softmax(-1) @ v)
    torch.testing.assert_close(attention(x), torch.cat(mixed, -1) @ attention.output.weight.T)


def test_an_untrained_model_knows_nothing_and_starts_in_good_order() -> None:
    """D2: the loss is that of a guess among 256, the last layer of a branch starts smaller by 1/sqrt(2 depth)."""
    model = Training(DemoSettings()).model
    inputs, targets = next(batches(read_corpus(), DemoSettings()))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    assert abs(float(loss) - math.log(256)) < 0.3
    assert model.head.weight is model.embedding.weight
    stds = {
        name: float(parameter.detach().std()) for name, parameter in model.named_parameters() if parameter.ndim == 2
    }
    for name, std in stds.items():
        small = name.endswith(("attention.output.weight", "mlp.down.weight"))
        assert std == pytest.approx(0.02 / math.sqrt(12) if small else 0.02, rel=0.05), name


def test_it_learns_from_the_standard_library_and_nothing_else() -> None:
    corpus = bytes(read_corpus().numpy())
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    assert corpus == b"".join(file.read_bytes() for file in files) and len(corpus) > 1_000_000
    inputs, targets = next(batches(read_corpus(), SMALL))
    assert inputs.shape == targets.shape == (4, 32)
    for line, following in zip(inputs, targets, strict=True):
        window = bytes(line.tolist())
        assert window + bytes([int(following[-1])]) in corpus and window[1:] == bytes(following[:-1].tolist())


def test_the_loss_falls(tmp_path: Path) -> None:
    train(replace(SMALL, steps=60), run=tmp_path / "run")
    _, losses = holter.open_run(tmp_path / "run").history.scalar("loss")
    assert losses[-10:].mean() < 0.8 * losses[:3].mean()


def plain_losses(settings: DemoSettings) -> list[float]:
    """The same training with torch's own clip, and no monitor anywhere."""
    training = Training(settings)
    parameters = list(training.model.parameters())
    losses = []
    for _ in range(settings.steps):
        loss, _ = training.step(lambda limit: torch.nn.utils.clip_grad_norm_(parameters, limit))
        losses.append(float(loss))
    return losses


def test_what_is_recorded_is_what_a_plain_loop_would_have_seen(tmp_path: Path) -> None:
    """P2: bit for bit; and the seed decides everything."""
    steps: list[Step] = []
    train(SMALL, run=tmp_path / "run", on_step=lambda _, step: steps.append(step))
    history = holter.open_run(tmp_path / "run").history
    assert history.scalar("loss")[1].tolist() == [step.loss for step in steps] == plain_losses(SMALL)
    norms = [step.gradient_norm for step in steps]
    np.testing.assert_allclose(history.scalar("gradient_norm")[1], norms, rtol=1e-6)
    other = replace(SMALL, seed=1)
    assert plain_losses(SMALL) != plain_losses(other)
    assert not torch.equal(Training(SMALL).model.embedding.weight, Training(other).model.embedding.weight)


def test_on_step_has_the_training_at_hand_to_make_it_sick(tmp_path: Path) -> None:
    def break_it(training: Training, step: Step) -> None:
        if step.number == 4:
            training.model.blocks[1].mlp.up.weight.data.fill_(math.nan)

    train(SMALL, run=tmp_path / "run", on_step=break_it)
    losses = holter.open_run(tmp_path / "run").history.scalar("loss")[1]
    assert np.isfinite(losses[:5]).all() and np.isnan(losses[5:]).all()


def test_the_rate_warms_up_and_comes_down(tmp_path: Path) -> None:
    train(SMALL, run=tmp_path / "run")
    _, rates = holter.open_run(tmp_path / "run").history.scalar("learning_rate")
    assert rates[0] == 0 and rates.argmax() == 2 and rates[2] == SMALL.learning_rate
    assert (np.diff(rates[2:]) < 0).all()


def test_the_command_trains_and_tells_what_it_recorded(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    result = CliRunner().invoke(main, ["demo", "--steps", "3", "--run", str(run), "--seed", "5"])
    assert result.exit_code == 0, result.output
    history = holter.open_run(run).history
    losses, norms = history.scalar("loss")[1], history.scalar("gradient_norm")[1]
    for step in range(3):
        line = f"step   {step + 1}/3  loss {losses[step]:5.3f}  gradient norm {norms[step]:5.3f}"
        assert line in result.stdout
    assert f"{losses[0]:.3g} → {losses[-1]:.3g}" in result.stdout
    _, layers, values = history.series("gradient", "norm")
    matrices = [norm for layer, norm in zip(layers, values[-1], strict=True) if "norm" not in layer]
    # On a busy machine the budget may leave only the first step, where they are less than 10 times apart.
    shown = re.search(r"26 matrices, norms ([\d.]+)× apart", result.stdout)
    assert shown and float(shown[1]) == pytest.approx(max(matrices) / min(matrices), rel=0.06)
    assert re.search(r"monitoring  [\d.]+ % of the time", result.stdout)
    assert f"holter show '{run}'" in result.stdout and f"holter export '{run}' --to csv" in result.stdout
    assert "\x1b" not in result.stdout, "no bar where there is no terminal"


def test_a_demo_that_is_interrupted_still_tells_what_it_recorded(tmp_path: Path) -> None:
    """P15: Ctrl-C ends it with exit code 1, no traceback, and a run that says so."""
    command = [sys.executable, "-m", "holter", "demo", "--run", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    heard = signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job would be born with it ignored
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        signal.signal(signal.SIGINT, heard)
        assert process.stdout is not None and process.stderr is not None
        first = process.stdout.readline()
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        rest, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 1 and errors.strip() == "Aborted!", errors
    assert first.startswith("step   1/200") and "interrupted" in rest and "holter show" in rest
    run = holter.open_run(tmp_path / "run")
    assert run.state == "interrupted" and len(run.history) > 0


def test_the_benchmark_finds_a_known_difference() -> None:
    random = np.random.default_rng(0)
    drift = random.uniform(0.1, 0.2, 400)  # the machine gets slower and faster: both sides alike
    clock = np.stack([drift, 1.03 * drift * random.normal(1, 0.01, 400)], axis=1)
    processor = np.tile([2.0, 2.1], (400, 1))
    result = overhead.compare("planted", np.stack([clock, processor], axis=2), None, None)
    assert result.processor_percent == pytest.approx(5)
    low, high = result.interval_percent
    middle_low, middle_high = result.middle_interval_percent
    assert low < 3 < high and low < result.added_percent < high
    assert middle_low < 3 < middle_high and middle_low < result.middle_percent < middle_high
    assert middle_high - middle_low < (high - low) / 4, "what both sides share falls out of a pair"


def test_the_benchmark_measures_every_step_with_rows() -> None:
    result = overhead.measure("rows every step", pairs=2, settings=SMALL)
    assert result.pairs == 2 and result.rows_share == 1.0
    assert result.without_ms > 0 and result.own_account_percent is not None
