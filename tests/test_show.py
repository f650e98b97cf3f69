"""What `holter show` says of a run as a whole and of each role, held against the history that it is read from."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from rich.cells import cell_len
from torch import nn
from torch.nn import functional as F

import holter
from holter.cli import main
from holter.history import History
from holter.journal import Journal
from holter.layer_tables import _some_in_depth
from holter.record import LayerRows, Record
from holter.statistics.rows import COLUMNS, Rows
from holter.statistics.shape import shape_of
from holter.summary import summarise
from holter.words import duration, number, share, size
from tests.models import Encoder


def show(run: Path, *options: str, width: int = 160) -> str:
    result = CliRunner().invoke(main, ["show", str(run), *options], env={"COLUMNS": str(width)})
    assert result.exit_code == 0, result.output
    return result.stdout


def header_line(text: str, title: str) -> str:
    """The line of the header with this title, with what was folded."""
    found = re.search(rf"^{title} .*(?:\n {{10,}}.*)*", text.split("\n\n")[0], re.MULTILINE)
    return " ".join(found[0].split()) if found else ""


def table(text: str, role: str) -> dict[str, dict[str, str]]:
    """The cells of a role's table, by layer and column."""
    block = next(part for part in text.split("\n\n") if part.startswith(f"{role}  measured"))
    head, *lines = (line for line in block.splitlines() if line.startswith(" ") and "--all" not in line)
    titles = re.split(r"\s{2,}", head.strip())
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    return {line[0]: dict(zip(titles, line, strict=True)) for line in cells}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A transformer with everything that can be recorded of it on a CPU."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("runs") / "run"
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    data = [(torch.randn(8, 6, 16), torch.randint(0, 4, (8,))) for _ in range(20)]
    often = {"weights": 2, "updates": 2, "activations": 2, "histograms": 4, "optimizer_state": 2}
    with holter.watch(model, optimizer, run=path, scheduler=schedule, budget=None, **often) as monitor:  # type: ignore[arg-type]
        for step, (x, y) in enumerate(monitor.batches(data)):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            monitor.log(loss=loss, inputs=x, targets=y)
            if step % 5 == 4:
                monitor.log(val_loss=1.5 - 0.01 * step, val_accuracy=0.3)
    return path


@pytest.fixture(scope="module")
def history(run: Path) -> History:
    return holter.open_run(run).history


# The header -----------------------------------------------------------------------------------------------------


def test_the_header_tells_the_rate_and_the_decay(run: Path, history: History) -> None:
    rates = history.scalar("learning_rate")[1]
    line = header_line(show(run), "optimizer")
    assert line.startswith("optimizer AdamW with CosineAnnealingLR, rate 0.003 → ")
    assert f"→ {number(rates[-1])}, weight decay 0.05" in line


def test_the_header_tells_where_the_time_of_a_step_goes(run: Path, history: History) -> None:
    """E15"""
    spent = {stage: history.scalar(f"time/{stage}")[1].sum() for stage in ("data", "forward", "backward", "optimizer")}
    whole = sum(spent.values()) + history.scalar("time/other")[1].sum()
    line = header_line(show(run), "time")
    assert f"{duration(float(np.median(history.scalar('step_time')[1])))} a step" in line
    for stage, seconds in spent.items():
        assert f"{stage} {share(seconds / whole)}" in line
    assert 0.99 < sum(summarise(holter.open_run(run)).scalars.stages.values()) < 1.01


def test_the_header_tells_throughput_and_memory(run: Path, history: History) -> None:
    """E12, E14"""
    text = show(run)
    speed = float(np.median(history.scalar("samples_per_second")[1]))
    assert header_line(text, "batch") == f"batch 8 examples, {number(speed)} samples a second"
    memory = history.scalar("machine/process_memory")[1][-1]
    assert f"process {size(int(memory))}" in header_line(text, "memory")


def test_validation_is_a_course_of_its_own(run: Path) -> None:
    text = show(run)
    assert header_line(text, "validation").startswith("validation 1.46 → 1.31")
    assert "val_accuracy 0.3 → 0.3" in text


def test_the_memory_of_a_gpu_and_a_loss_scale_are_told(tmp_path: Path) -> None:
    gibibyte = 2.0**30
    machine = {"gpu_memory": 3 * gibibyte, "gpu_memory_peak": 5 * gibibyte, "gpu_memory_total": 80 * gibibyte}
    journal = Journal(tmp_path / "rank-0.journal")
    for step in range(12):
        scalars = {f"machine/{name}": value for name, value in machine.items()}
        scalars |= {"loss": 1.0, "loss_scale": 2.0 ** (16 - step), "skipped": float(step < 3)}
        journal.append(Record(step, 0.0, {**scalars, "learning_rate": 0.1, "learning_rate/1": 0.01}))
    journal.close()
    text = show(tmp_path)
    assert "GPU 3 GiB, 5 GiB at most of 80 GiB" in header_line(text, "memory")
    assert header_line(text, "loss scale") == "loss scale 65,536 → 32, 25 % of the steps skipped"
    assert "rate 0.1, lower in 1 more group" in header_line(text, "optimizer")


def test_steps_that_only_some_optimizers_skipped_are_told_apart(tmp_path: Path) -> None:
    """`skipped` is the share of the optimizers that a scaler kept from their step."""
    journal = Journal(tmp_path / "rank-0.journal")
    for step, skipped in enumerate([1.0, 0.5, 0.5, *[0.0] * 17]):
        journal.append(Record(step, 0.0, {"loss_scale": 64.0, "skipped": skipped}))
    journal.close()
    told = header_line(show(tmp_path), "loss scale")
    assert told.endswith("15 % of the steps skipped, in 10 % by some of the optimizers alone")


# Roles ----------------------------------------------------------------------------------------------------------


def test_every_role_has_the_columns_that_say_something_of_it(run: Path) -> None:
    text = show(run, "--all")
    columns = {
        "gradient": {"norm", "vs siblings", "change", "trend", "zeros", "shape"},
        "update": {"ratio", "planned", "unchanged", "cosine", "trend"},
        "weight": {"norm", "vs siblings", "growth", "trend", "shape"},
        "momentum": {"norm", "vs siblings", "change", "shape"},
        "second moment": {"rms of g/√v", "below eps", "change"},
        "activation": {"rms", "flow", "mean", "std", "dead", "rank", "shape"},
        "attention": {"largest logit", "entropy", "change"},
        "batch": {"size", "label entropy", "mean", "std", "shape"},
    }
    for role, wanted in columns.items():
        for layer, cells in table(text, role).items():
            assert wanted <= cells.keys(), (role, layer)


def test_the_cells_are_the_numbers_of_the_history(run: Path, history: History) -> None:
    text = show(run, "--all")
    for role, column, statistic in (
        ("update", "ratio", "ratio"),
        ("update", "planned", "planned_ratio"),
        ("update", "cosine", "cosine"),
        ("second moment", "rms of g/√v", "rms_ratio"),
        ("activation", "rms", "rms"),
        ("activation", "rank", "rank"),
        ("attention", "largest logit", "max_logit"),
        ("attention", "entropy", "entropy"),
        ("batch", "std", "std"),
    ):
        _, layers, values = history.series(role.replace(" ", "_"), statistic)
        for layer, cells in table(text, role).items():
            known = values[:, layers.index(layer)]
            known = known[np.isfinite(known)]
            assert cells[column] == (number(known[-1]) if len(known) else "–"), (role, layer, column)


def test_growth_is_since_the_start(run: Path, history: History) -> None:
    """E6"""
    _, layers, norms = history.series("weight", "norm")
    for layer, cells in table(show(run, "--all"), "weight").items():
        first, last = norms[0, layers.index(layer)], norms[-1, layers.index(layer)]
        if first > 0:
            assert float(cells["growth"].removesuffix("×")) == pytest.approx(last / first, rel=0.06), layer
        else:
            assert cells["growth"] == "from 0", layer


def test_the_shape_is_that_of_the_newest_histogram(run: Path, history: History) -> None:
    """C16: recognised by the program."""
    shown = table(show(run, "--all"), "gradient")
    for layer, cells in shown.items():
        kind = shape_of(history.histogram("gradient", layer)[1][-1]).kind
        assert cells["shape"] == kind.replace("-", " ")
    assert len(shown) == len(history.layers("gradient"))


def test_activations_are_read_from_the_input_to_the_output(tmp_path: Path) -> None:
    """E10: in the order in which they run, whatever their names; a layer that is odd is never left out."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(30)]
    model = nn.Sequential(*blocks, nn.Linear(8, 2))
    nn.init.constant_(blocks[17][0].bias, -100.0)  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    with holter.watch(model, optimizer, run=tmp_path / "run", budget=None):
        model(torch.randn(16, 8)).sum().backward()
        optimizer.step()
    shown = list(table(show(tmp_path / "run"), "activation"))
    everything = list(table(show(tmp_path / "run", "--all"), "activation"))
    assert everything == list(holter.open_run(tmp_path / "run").history.layers("activation"))
    assert len(shown) == 15 and shown == [name for name in everything if name in shown]
    assert "17.1" in shown and (shown[0], shown[-1]) == ("0.0", "30")


def test_of_many_blocks_those_are_shown_that_make_a_flow(tmp_path: Path) -> None:
    names = ["in", *(f"h.{n}{part}" for n in range(8) for part in (".norm", ".attention", ".mlp", "")), "out"]
    row = [0.0 if name in ("nans", "infs_positive", "infs_negative") else 1.0 for name in COLUMNS]
    values = np.array([row] * len(names))
    journal = Journal(tmp_path / "rank-0.journal")
    journal.append(Record(0, 0.0, {}, {"activation": LayerRows(tuple(names), Rows(values))}))
    journal.close()
    (role,) = summarise(holter.open_run(tmp_path)).roles
    shown = [layer.layer for layer in _some_in_depth(role.layers, 15)]
    assert shown == ["in", *(f"h.{n}" for n in range(8)), "out"]
    assert len(_some_in_depth(role.layers, 5)) == 5


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_everything_fits_the_terminal(width: int, run: Path) -> None:
    for options in ([], ["--all"]):
        assert max(map(cell_len, show(run, *options, width=width).splitlines())) <= width


@pytest.mark.parametrize(
    ("step_time", "beside"), [(0.5, " 1.0 s, the first looks and their set-up among them"), (50, "")]
)
def test_of_a_short_run_the_seconds_are_told_that_monitoring_took(
    tmp_path: Path, step_time: float, beside: str
) -> None:
    """Where the advance of the budget is most of it; and that a loss is missing, with the way to have one."""
    journal = Journal(tmp_path / "rank-0.journal")
    for step in range(10):
        journal.append(Record(step, 0.0, {"step_time": step_time, "monitor_cost": 0.2}))
    journal.close()
    text = show(tmp_path)
    assert header_line(text, "monitoring") == f"monitoring 20 % of the time{beside}"
    assert header_line(text, "loss") == "loss not known: monitor.log(loss=loss) after each step"
