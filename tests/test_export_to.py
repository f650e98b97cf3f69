"""`holter export --to wandb|mlflow|trackio`: a stored run in a tool, by the real command and the tool's own reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holter
from holter.diagnosis.finding import Finding
from holter.record import Record
from holter.send import NotSent, send
from holter.sinks import Memory, TensorBoard
from tests import wandb_file
from tests.models import make

FIRST, LAST = 3, 22
CANARY = "CANARY"
Series = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> holter.Run:
    """Its rate is far too high, which is found within the part that is sent."""
    path = tmp_path_factory.mktemp("stored") / "run"
    training = make("transformer+dropout")
    training.optimizer.param_groups[0]["lr"] = 0.3
    with holter.watch(training.model, training.optimizer, run=path, budget=None) as training.monitor:
        for _ in range(30):
            training.step()
    run = holter.open_run(path)
    assert [one for one in run.findings if FIRST <= one.step <= LAST], "nothing to be found in the tools"
    return run


def command(*arguments: str | Path, where: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """As a user calls it; everything a tool keeps goes to a directory of its own, and nothing to the network."""
    variables = {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(where),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{where}/mlflow.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
        "TRACKIO_DIR": str(where / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "HOME": str(where),
    }
    command = [sys.executable, "-m", "holter", "export", *map(str, arguments)]
    variables = {**os.environ, **variables, **environment}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=where, env=variables)


def expected(run: holter.Run) -> Series:
    """Straight from the journal, of the part that is sent."""
    history = run.history
    found = {"loss": history.scalar("loss")}
    steps, layers, norms = history.series("gradient", "norm")
    found |= {f"gradients/{layer}/norm": (steps, norms[:, place]) for place, layer in enumerate(layers)}
    pairs = {tag: zip(steps.tolist(), values.tolist(), strict=True) for tag, (steps, values) in found.items()}
    return {tag: [pair for pair in both if FIRST <= pair[0] <= LAST] for tag, both in pairs.items()}


# Sent to a tool ----------------------------------------------------------------------------------------------------


def in_wandb(where: Path, tags: list[str]) -> tuple[Series, int]:
    (file,) = where.glob("wandb/offline-run-*/run-*.wandb")
    found = wandb_file.read(where, file.stem.removeprefix("run-"))
    return {tag: found.of(tag) for tag in tags}, sum("over:" not in alert.title for alert in found.alerts)


def in_mlflow(where: Path, tags: list[str]) -> tuple[Series, int]:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{where}/mlflow.db")
    experiment = client.get_experiment_by_name("mine")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    histories = {tag: client.get_metric_history(run.info.run_id, tag) for tag in tags}
    series = {tag: sorted((one.step, one.value) for one in history) for tag, history in histories.items()}
    return series, sum(name.startswith("holter.finding.") for name in run.data.tags)


_READ_TRACKIO = """
import json
from trackio.sqlite_storage import SQLiteStorage as Store
(name,) = Store.get_runs("mine")
print(json.dumps([Store.get_logs("mine", name), Store.get_alerts("mine", name)]))
"""


def in_trackio(where: Path, tags: list[str]) -> tuple[Series, int]:
    """Trackio reads where its files are when it is imported."""
    variables = {**os.environ, "TRACKIO_DIR": str(where / "trackio")}
    read = subprocess.run([sys.executable, "-c", _READ_TRACKIO], capture_output=True, text=True, env=variables)
    assert read.returncode == 0, read.stderr
    rows, alerts = json.loads(read.stdout)
    series = {tag: sorted((row["step"], row[tag]) for row in rows if tag in row) for tag in tags}
    return series, sum(not alert["title"].startswith("over:") for alert in alerts)


READERS = {"wandb": in_wandb, "mlflow": in_mlflow, "trackio": in_trackio}


@pytest.mark.parametrize(("tool", "reader"), READERS.items(), ids=READERS)
def test_the_command_sends_a_part_of_a_run_to_a_tool(
    tool: str, reader: Callable[[Path, list[str]], tuple[Series, int]], stored: holter.Run, tmp_path: Path
) -> None:
    """E1: what the tool reads back is what the journal holds, and as many findings."""
    part = ("--steps", f"{FIRST}:{LAST}", "--layers", "all", "--project", "mine")
    done = command(stored.path.resolve(), "--to", tool, *part, where=tmp_path)
    assert done.returncode == 0, done.stderr
    count = sum(FIRST <= one.step <= LAST for one in stored.findings)
    assert f"{LAST - FIRST + 1} steps and {count} finding{'s' * (count != 1)} sent to {tool}\n" in done.stdout
    wanted = expected(stored)
    found, findings = reader(tmp_path, list(wanted))
    assert found == wanted and len(wanted["loss"]) == LAST - FIRST + 1 and len(wanted) > 10
    assert findings == count


# What a tool says no to --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tool", "environment", "told"),
    [
        ("wandb", {"WANDB_MODE": "online"}, "wandb failed with UsageError: `wandb login` first"),
        ("wandb", {"WANDB_MODE": CANARY}, "wandb failed with "),
        ("mlflow", {"MLFLOW_TRACKING_URI": f"http://me:{CANARY}@127.0.0.1:9"}, "mlflow failed with MlflowException"),
        ("mlflow", {"MLFLOW_TRACKING_URI": f"nothing://me:{CANARY}@host/runs"}, "cannot open nothing://host/runs"),
    ],
)
def test_a_tool_that_fails_is_one_line_without_secrets(
    tool: str, environment: dict[str, str], told: str, stored: holter.Run, tmp_path: Path
) -> None:
    """P24: its kind and the way out; addresses may hold passwords."""
    done = command(stored.path.resolve(), "--to", tool, where=tmp_path, **environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert told in line and ("MLFLOW_TRACKING_URI" in line or "WANDB_MODE=offline" in line)
    assert done.stderr.splitlines()[-1] == line and CANARY not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("form", "option"),
    [
        *(("csv", option) for option in (("--steps", "1:2"), ("--layers", "3"), ("--project", "mine"))),
        ("parquet", ("--steps", "1:2")),
        ("tensorboard", ("--project", "mine")),
        *((tool, ("-o", "out")) for tool in READERS),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    form: str, option: tuple[str, str], stored: holter.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from holter.cli import main

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["export", str(stored.path), "--to", form, *option])
    assert result.exit_code == 2 and f"{option[0]} is for --to " in result.output
    assert f"leave it out for {form}" in result.output
    assert not list(tmp_path.iterdir()) and not (stored.path / "export").exists()


# Findings that are over --------------------------------------------------------------------------------------------

OVER = Finding("lr-jump", "lr", 10, 12, "critical", until=95)
LASTS = Finding("dead-units", "layer", 30, 40, layer="a")


def sent(first: int = 0, last: int | None = None) -> tuple[list[tuple[str, int | None]], list[int | str], Any]:
    """What was told, among the steps at which it was, and how many."""
    order: list[int | str] = []

    class Ordered(Memory):
        def write(self, record: Record) -> None:
            order.append(record.step)

        def alert(self, finding: Finding) -> None:
            order.append(finding.cause)
            super().alert(finding)

    run: Any = SimpleNamespace(findings=[LASTS, OVER], records=[Record(step, 1e9 + step) for step in range(100)])
    sink = Ordered()
    counts = send(run, sink, first, last)
    return [(one.cause, one.until) for one in sink.findings], order, counts


def test_a_finding_that_is_over_is_told_when_it_came_and_when_it_went() -> None:
    """As while training: as bad as it was, at its step; then as over."""
    told, order, counts = sent()
    assert told == [("lr-jump", None), ("dead-units", None), ("lr-jump", 95)] and counts == (100, 2)
    places = [place for place, one in enumerate(order) if isinstance(one, str)]
    assert [(order[place - 1], order[place + 1]) for place in places] == [(12, 13), (40, 41), (95, 96)]


@pytest.mark.parametrize(
    ("first", "last", "told"),
    [
        (0, 20, [("lr-jump", None)]),
        (0, 94, [("lr-jump", None), ("dead-units", None)]),
        (0, 95, [("lr-jump", None), ("dead-units", None), ("lr-jump", 95)]),
        (13, None, [("dead-units", None)]),
        (41, 60, []),
    ],
)
def test_nothing_is_told_of_steps_that_were_not_asked_for(first: int, last: int | None, told: list[Any]) -> None:
    assert sent(first, last)[0] == told


def test_the_end_of_a_finding_stands_at_its_step_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run: Any = SimpleNamespace(findings=[OVER], records=[Record(step, 1e9, {"loss": 1.0}) for step in range(100)])
    for last, steps in ((20, [12]), (99, [12, 95])):
        send(run, TensorBoard(tmp_path / str(last)), 0, last)
        events = EventAccumulator(str(tmp_path / str(last)))
        events.Reload()
        texts = [(one.step, one.tensor_proto.string_val[0].decode()) for one in events.Tensors("findings")]
        assert [step for step, _ in texts] == steps
        assert ["**over**" in text for _, text in texts] == [step == 95 for step in steps]


@pytest.mark.parametrize("method", ["write", "alert", "close"])
def test_a_sink_that_fails_is_closed_and_its_first_error_is_told(method: str) -> None:
    """P24: by its kind."""

    class Failing(Memory):
        def close(self) -> None:
            assert not self.closed, "it is not asked twice"
            super().close()
            raise KeyError(CANARY)

    def fail(*_: Any) -> None:
        raise ConnectionError(CANARY)

    sink = Failing()
    if method != "close":
        setattr(sink, method, fail)
    run: Any = SimpleNamespace(findings=[OVER], records=[Record(step, 1e9) for step in range(30)])
    with pytest.raises(NotSent) as caught:
        send(run, sink)
    assert str(caught.value) == ("KeyError" if method == "close" else "ConnectionError") and sink.closed
