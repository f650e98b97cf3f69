"""Every sink keeps one contract, whatever it writes to; and what a sink may do wrong concerns nobody else."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holter
from holter.diagnosis.finding import Finding
from holter.record import LayerRows, Record
from holter.sinks import Background, Fanout, Memory, Sink
from holter.sinks.naming import NAMES, make
from holter.sinks.panels import Panels, histogram_tag, quantiles, tag
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows
from tests.dashboards import wait_for
from tests.models import make as make_training

RANDOM = np.random.default_rng(11)
FINDING = Finding("lr-jump", "lr", 3, 5, "critical", layer="b.weight", advice="Lower it.")
TOOLS = tuple(name for name in NAMES if name != "console")


def record(step: int, layers: int = 3) -> Record:
    names = tuple(f"{letter}.weight" for letter in "abcdefghijklmnop"[:layers])
    values = RANDOM.uniform(1.0, 2.0, size=(layers, len(COLUMNS)))
    values[:, COLUMNS.index("sum_squares")] = 10.0 ** np.arange(layers)
    rows = Rows(values, Histograms.of([RANDOM.normal(size=50) for _ in range(layers)]))
    return Record(step, 1e9 + step, {"loss": 1.0 / (step + 1)}, {"gradient": LayerRows(names, rows)})


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Everything a tool keeps goes to a directory of its own, and nothing to the network."""
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }.items():
        monkeypatch.setenv(name, value)
    return tmp_path


# Every sink -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_sink_takes_records_and_findings_and_is_closed_twice(name: str, offline: Path) -> None:
    sink = make(name, offline, project="contract")
    assert isinstance(sink, Sink)
    for step in range(3):
        sink.write(record(step))
    sink.alert(FINDING)
    sink.write(Record(1, 1e9, {"val_loss": 0.5}, late=True))
    sink.write(Record(4, 1e9, {"loss": float("nan"), "other": float("inf")}))
    sink.write(Record(5, 1e9))
    sink.close()
    sink.close()


@pytest.mark.parametrize("name", TOOLS)
def test_a_package_that_is_missing_is_told_at_once_with_the_way_out(name: str, offline: Path) -> None:
    code = f"import sys; sys.modules['{name}'] = None\nfrom pathlib import Path\nfrom holter.sinks.naming import make\n"
    code += f"try:\n    make('{name}', Path('x'))\nexcept ImportError as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0 and f"pip install 'holter[{name}]'" in done.stdout, done.stderr


def test_importing_holter_imports_none_of_them() -> None:
    packages = [*TOOLS, "apprise", "lightning", "transformers", "accelerate", "plotly", "starlette", "pandas"]
    code = f"import sys, holter, holter.sinks; print([name for name in {packages!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no sink 'prometheus': there are console, tensorboard, wandb"):
        make("prometheus", tmp_path)


# A sink that misbehaves --------------------------------------------------------------------------------------------


class Broken(Memory):
    def __init__(self, error: BaseException, at: str) -> None:
        super().__init__()
        self._error, self._at = error, at

    def write(self, record: Record) -> None:
        super().write(record)
        if self._at == "write":
            raise self._error

    def alert(self, finding: Finding) -> None:
        if self._at == "alert":
            raise self._error
        super().alert(finding)

    def close(self) -> None:
        if self._at == "close":
            raise self._error
        super().close()


class Hanging(Memory):
    """Hangs in the first call, until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_in, self.may_go = threading.Event(), threading.Event()

    def write(self, record: Record) -> None:
        self.is_in.set()
        self.may_go.wait(60)
        super().write(record)


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    sink = Hanging()
    yield sink
    sink.may_go.set()


def watched(tmp_path: Path, sinks: list[Sink], steps: int = 12) -> tuple[Any, list[float]]:
    training = make_training("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=tmp_path / "run", sinks=sinks)
    for _ in range(steps):
        training.step()
    assert training.monitor.flush(60)
    return training.monitor, training.losses


@pytest.mark.parametrize("at", ["write", "alert", "close"])
@pytest.mark.parametrize("error", [OSError(28, "full"), RuntimeError("secret"), SystemExit(3), MemoryError()])
def test_a_sink_that_raises_is_cut_off_and_the_others_go_on(at: str, error: BaseException) -> None:
    """P1: reported once, by its kind; others get everything."""
    reported: list[tuple[Sink, Exception]] = []
    broken, sound = Broken(error, at), Memory()
    sinks = [Background(sink, lambda sink, error: reported.append((sink, error))) for sink in (broken, sound)]
    for step in range(3):
        for sink in sinks:
            sink.write(record(step))
            sink.alert(FINDING)
            assert sink.flush(10)
    for sink in sinks:
        sink.close(10)
    assert [sink for sink, _ in reported] == [broken]
    assert len(broken.records) == (3 if at == "close" else 1)
    assert broken.closed == (at != "close"), "what it wrote before is to be whole"
    assert len(sound.records) == len(sound.findings) == 3 and sound.closed


def test_a_training_goes_on_without_a_sink_that_raises(tmp_path: Path) -> None:
    broken, sound = Broken(ValueError("token=canary"), "write"), Memory()
    monitor, losses = watched(tmp_path, [broken, sound])
    assert losses == watched(tmp_path / "other", [])[1]
    monitor.close()
    assert len(broken.records) == 1 and len([one for one in sound.records if not one.late]) == 12
    told = [finding for finding in monitor.findings if "write to Broken" in finding.advice]
    assert len(told) == 1 and "canary" not in told[0].advice


def test_a_sink_that_hangs_is_cut_off_and_holds_nobody_up(tmp_path: Path, hanging: Hanging) -> None:
    """P16: it may hold a lock that the next call would wait for."""
    reported: list[Exception] = []
    sink = Background(hanging, lambda _, error: reported.append(error), hangs_after=0.05)
    sink.write(record(0))
    assert hanging.is_in.wait(10)
    for step in range(1, 10_000):
        sink.write(record(step, layers=1))
        if reported:
            break
    assert len(reported) == 1 and "not answered" in str(reported[0]) and sink.is_cut_off
    sink.write(record(2))
    hanging.may_go.set()
    sink.close(10)
    assert len(hanging.records) == 1 and not hanging.closed, "after that it gets nothing"


@pytest.mark.hurried
def test_a_sink_that_hangs_loses_nothing_of_the_journals(tmp_path: Path, hanging: Hanging) -> None:
    sound = Memory()
    monitor, _ = watched(tmp_path, [hanging, sound], steps=40)
    wait_for(lambda: len([one for one in sound.records if not one.late]) == 40)
    monitor.close()
    assert len(holter.open_run(tmp_path / "run").history) == 40
    assert hanging.is_in.is_set() and not hanging.records


class Slow(Memory):
    """Every write takes until the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = threading.Semaphore(0)

    def write(self, record: Record) -> None:
        self.writes.acquire(timeout=30)
        super().write(record)


def test_a_slow_sink_is_closed_in_time_and_what_was_left_out_is_told() -> None:
    reported: list[Exception] = []
    slow = Slow()
    sink = Background(slow, lambda _, error: reported.append(error))
    for step in range(200):
        sink.write(record(step, layers=1))
    sink.stop(0.02)  # the time to write in is over before the first is written
    threading.Event().wait(0.05)
    slow.writes.release(200)
    sink.wait(10)
    assert slow.closed and len(slow.records) < 200
    assert len(reported) == 1 and f"{200 - len(slow.records)} records or findings are left out" in str(reported[0])


def test_a_full_queue_does_not_keep_a_sink_from_being_closed() -> None:
    slow = Slow()
    sink = Background(slow, lambda *_: None)
    for step in range(3000):
        sink.write(Record(step, 0.0))
    sink.stop(30)
    slow.writes.release(3000)
    sink.wait(30)
    assert slow.closed


def test_one_sink_of_several_that_raises_leaves_a_fanout() -> None:
    reported: list[Sink] = []
    broken, sound = Broken(ValueError(), "write"), Memory()
    fanout = Fanout([broken, sound], lambda sink, _: reported.append(sink))
    for step in range(3):
        fanout.write(record(step))
    fanout.close()
    assert reported == [broken] and len(sound.records) == 3 and sound.closed


# What is shown ----------------------------------------------------------------------------------------------------


def test_a_few_layers_are_shown_the_farthest_from_their_siblings() -> None:
    panels = Panels(layers=4)
    shown = {name.split("/")[1] for name in panels.of(record(0, layers=12)).scalars if "/" in name}
    assert shown == {"a.weight", "b.weight", "k.weight", "l.weight"}, "the smallest and the largest norms"
    again = {name.split("/")[1] for name in panels.of(record(1, layers=12)).scalars if "/" in name}
    assert again == shown, "and they stay"


def test_the_layer_of_a_finding_is_shown_from_then_on() -> None:
    panels = Panels(layers=0)
    assert set(panels.of(record(0)).scalars) == {"loss"}
    panels.note(FINDING)
    assert tag("gradient", "b.weight", "norm") in panels.of(record(1)).scalars
    assert set(panels.of(record(1)).histograms) == {histogram_tag("gradient", "b.weight")}
    panels.note(Finding("dead-relu", "layer", 0, 1, layer="c"))  # a module, with its parameters
    assert tag("gradient", "c.weight", "std") in panels.of(record(2)).scalars


def test_all_layers_are_shown_where_that_is_asked() -> None:
    shown = record(0, layers=12)
    panel = Panels(layers="all").of(shown)
    rows = shown.rows["gradient"].rows
    for place, layer in enumerate(shown.rows["gradient"].layers):
        for statistic in ("norm", "mean", "std"):  # E1
            assert panel.scalars[f"gradients/{layer}/{statistic}"] == rows.derive(statistic)[place]
        assert rows.histograms is not None
        assert panel.histograms[f"gradients_hist/{layer}"].count == rows.histograms[place].count
    assert (panel.step, panel.time, panel.scalars["loss"]) == (0, 1e9, 1.0)


def test_scalars_are_shown_at_every_step_and_layers_at_some() -> None:
    panels = Panels(every=3)
    counts = [len(panels.of(record(step)).scalars) for step in range(7)]
    assert [count == 1 for count in counts] == [False, True, True, False, True, True, False]


def test_quantiles_are_those_of_the_values() -> None:
    """E3."""
    values = RANDOM.normal(size=2000)
    found = quantiles(Histograms.of([values])[0])
    assert list(found) == ["min", "p25", "p50", "p75", "p95", "p99", "max"]
    expected = np.quantile(values, [0, 0.25, 0.5, 0.75, 0.95, 0.99, 1], method="inverted_cdf")
    np.testing.assert_allclose(list(found.values()), expected, rtol=0.126, atol=0.01)
    assert quantiles(Histograms.of([np.full(3, np.nan)])[0]) == {}


@pytest.mark.parametrize("bad", [-1, 1.5, True, "some", None])
def test_a_number_of_layers_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(ValueError, match="how many layers to show"):
        Panels(layers=bad)
    with pytest.raises(ValueError, match="number of steps"):
        Panels(every=0)


# Stored runs -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stored")
    monitor, _ = watched(path, [], steps=20)
    monitor.close()
    return path / "run"


def command(*arguments: str) -> tuple[int, str]:
    from click.testing import CliRunner

    from holter.cli import main

    result = CliRunner().invoke(main, ["export", *arguments])
    return result.exit_code, result.output


def test_a_stored_run_is_sent_whole_or_in_part(stored: Path) -> None:
    from holter.send import send

    run, whole, part = holter.open_run(stored), Memory(), Memory()
    assert send(run, whole)[0] == 20 and whole.closed
    assert [one.step for one in whole.records] == [one.step for one in run.records]
    assert send(run, part, 5, 9)[0] == 5
    assert {one.step for one in part.records} == set(range(5, 10))


def test_the_command_sends_it_to_tensorboard(stored: Path, tmp_path: Path) -> None:
    code, said = command(str(stored), "--to", "tensorboard", "-o", str(tmp_path), "--layers", "all", "--steps", "3:12")
    assert code == 0 and said.startswith("10 steps and ") and str(tmp_path / "tensorboard") in said, said
    event_accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    read = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    read.Reload()
    history = holter.open_run(stored).history
    steps, values = history.scalar("loss")
    inside = (steps >= 3) & (steps <= 12)
    assert [event.step for event in read.Scalars("loss")] == steps[inside].tolist()
    np.testing.assert_allclose([event.value for event in read.Scalars("loss")], values[inside], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--steps", "7"), "give the first and the last step"),
        (("--steps", "a:b"), "give the first and the last step"),
        (("--layers", "many"), "give a number, or all"),
        (("--steps", "12:5"), "the run has steps 0 to 19"),
        (("--steps", "500:900"), "the run has steps 0 to 19"),
    ],
)
def test_a_part_that_is_none_is_refused(arguments: tuple[str, ...], told: str, stored: Path, tmp_path: Path) -> None:
    code, said = command(str(stored), "--to", "tensorboard", "-o", str(tmp_path / "none"), *arguments)
    assert code == 1 and told in said and not list(tmp_path.rglob("events*"))
