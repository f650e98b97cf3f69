"""The W&B sink, against the files that W&B itself stores offline."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holter
from holter.diagnosis.finding import Finding
from holter.record import LayerRows, Record
from holter.sinks import Background
from holter.sinks.panels import Panel, Panels, joined
from holter.sinks.wandb import FINDINGS, LEFT_OUT, MOST_BINS, MOST_WAITING, STEP, WandB
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows
from tests.models import make
from tests.wandb_file import Stored, offline, read

SCALARS = {"loss": 0.1, "lr": 3e-4}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    directory = tmp_path_factory.mktemp("wandb")
    with offline(directory) as wandb:
        yield SimpleNamespace(wandb=wandb, read=lambda run_id: read(directory, run_id), directory=directory)


@pytest.fixture
def run(place: SimpleNamespace) -> Iterator[Any]:
    """The user's, that goes on as `wandb.run`."""
    assert place.wandb.run is None
    run = place.wandb.init()
    assert place.wandb.run is run
    yield run
    run.finish()


def layered(step: int, layers: tuple[str, ...] = ("a.weight", "b.weight"), **scalars: float) -> Record:
    random = np.random.default_rng(step)
    values = random.uniform(1.0, 2.0, size=(len(layers), len(COLUMNS)))
    # Over so many powers of ten that there are more buckets than W&B takes.
    wide = [random.normal(size=4000) * 10.0 ** random.uniform(-30, 20, size=4000) for _ in layers]
    rows = {"gradient": LayerRows(layers, Rows(values, Histograms.of(wide)))}
    return Record(step, 1e9 + step, scalars or {"loss": 1 / (step + 1)}, rows)


def expected(panel: Panel, prefix: str = "", scalars: tuple[str, ...] = ("loss",)) -> dict[str, Any]:
    """The row of a step as W&B should have stored it."""
    row: dict[str, Any] = {(prefix if tag in scalars else "") + tag: value for tag, value in panel.scalars.items()}
    for tag, histogram in panel.histograms.items():
        counts, edges = joined(histogram, MOST_BINS)
        row[tag] = {"_type": "histogram", "values": counts.tolist(), "bins": edges.tolist()}
    return {**row, STEP: panel.step}


def ours(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith("user")}


# A run of its own -------------------------------------------------------------------------------------------------


class Counted(WandB):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.written = threading.Semaphore(0)

    def write(self, record: Record) -> None:
        super().write(record)
        self.written.release()


@pytest.fixture(scope="module")
def trained(place: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    training = make("transformer+dropout")
    path = tmp_path_factory.mktemp("journal") / "run"
    sink = Counted(id="trained", layers="all")
    training.monitor = holter.watch(training.model, training.optimizer, run=path, sinks=[sink])
    for _ in range(12):
        training.step()
    assert training.monitor.flush(30)
    for _ in holter.open_run(path).records:
        assert sink.written.acquire(timeout=30)  # to start a run may take longer than close() waits
    training.monitor.close()
    return SimpleNamespace(stored=place.read("trained"), run=holter.open_run(path))


def test_what_a_training_logs_is_what_the_journal_has(trained: SimpleNamespace) -> None:
    """C13, E1, E3: names, steps, every number to its last bit, and the counts of every histogram."""
    stored: Stored = trained.stored
    panels, wanted = Panels("all"), set()
    for record in trained.run.records:
        panel = panels.of(record)
        for tag, value in panel.scalars.items():
            assert [found for step, found in stored.of(tag) if step == record.step] == [value], tag
        for tag, histogram in panel.histograms.items():
            counts, edges = joined(histogram, MOST_BINS)
            assert len(counts) <= MOST_BINS and counts.sum() == histogram.count
            (found,) = [found for step, found in stored.of(tag) if step == record.step]
            assert (found["values"], found["bins"]) == (counts.tolist(), edges.tolist()), tag
        wanted |= panel.scalars.keys() | panel.histograms.keys()
    assert {tag for _, row in stored.rows for tag in row} == wanted | {STEP}
    assert {"loss", "gradients/out.weight/norm", "gradients_hist/out.weight"} <= wanted
    assert stored.is_finished


def test_a_step_is_a_row_and_its_own_axis(trained: SimpleNamespace) -> None:
    """C13: all charts of ours are drawn over holter/step, which has none itself."""
    stored: Stored = trained.stored
    assert [row[STEP] for _, row in stored.rows] == list(range(12))
    assert [number for number, _ in stored.rows] == list(range(12))
    metrics = stored.metrics
    assert metrics[STEP].options.hidden
    for pattern in ("loss", "gradients/*", "gradients_hist/*"):
        assert metrics[pattern].step_metric == STEP and not metrics[pattern].options.step_sync


def test_records_of_one_step_share_a_row_until_a_name_comes_again(place: SimpleNamespace) -> None:
    """P17: steps repeated and out of order are kept; NaN and infinity, too."""
    sink = WandB(id="repeated")
    logged = [
        (4, {"a": 1.0}),
        (4, {"b": math.nan}),
        (4, {"a": 2.0}),
        (2, {"a": 3.0}),
        (2, {"b": math.inf}),
        (4, SCALARS),
    ]
    for step, scalars in logged:
        sink.write(Record(step, 1e9, scalars))
    sink.write(Record(5, 1e9))
    sink.close()
    rows = [row for _, row in place.read("repeated").rows]
    np.testing.assert_equal(
        rows,
        [{"a": 1, "b": math.nan, STEP: 4}, {"a": 2, STEP: 4}, {"a": 3, "b": math.inf, STEP: 2}, {**SCALARS, STEP: 4}],
    )


def test_names_of_any_kind_are_stored(place: SimpleNamespace) -> None:
    """P22: also those that W&B can make no metric of."""
    names = ["", "a*b", "c*", "x\x00\ud800", "y" * 65536, "é/中", "../z", "<script>"]
    sink = WandB(id="names")
    sink.write(Record(0, 1e9, dict.fromkeys(names, 1.0)))
    sink.write(Record(0, 1e9, {"plain": 2.0}))
    sink.close()
    ((_, row),) = place.read("names").rows
    assert row["plain"] == 2.0 and row["x\\x00\\ud800"] == 1.0
    assert {name for name in names[1:] if name.isprintable()} <= row.keys()


def test_a_run_of_its_own_leaves_the_users_alone(place: SimpleNamespace, run: Any) -> None:
    """It is neither finished, nor replaced as `wandb.run`, nor written to."""
    sink = WandB(id="beside", group="both")
    sink.write(Record(0, 1e9, SCALARS))
    assert place.wandb.run is run
    sink.close()
    run.log({"user": 1})
    run.finish()
    assert place.read("beside").rows == [(0, {**SCALARS, STEP: 0})]
    assert place.read(run.id).rows == [(0, {"user": 1})]


def test_a_new_run_is_started_by_the_first_record_and_finished(place: SimpleNamespace) -> None:
    """Where none goes on; and without a record there is none."""
    before = set(place.directory.glob("wandb/offline-run-*"))
    WandB().close()
    assert set(place.directory.glob("wandb/offline-run-*")) == before
    sink = WandB()
    sink.write(Record(7, 1e9, SCALARS))
    assert place.wandb.run is not None  # whoever asks for one now shares it
    sink.close()
    sink.close()
    (new,) = set(place.directory.glob("wandb/offline-run-*")) - before
    stored = place.read(new.name.rpartition("-")[2])
    assert stored.rows == [(0, {**SCALARS, STEP: 7})] and stored.is_finished
    assert place.wandb.run is None


# In a run of the user's -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("explicit", [True, False])
def test_the_users_own_calls_keep_their_steps_and_values(
    place: SimpleNamespace, run: Any, explicit: bool, given: bool
) -> None:
    """C13, P1: before, between and after ours, whether the user counts the steps or W&B does; ours are all there."""

    def log(step: int) -> None:
        # The last would be overwritten if ours had their names.
        run.log({"user": step, "user/half": step / 2, "user_loss": -1.0}, **({"step": step} if explicit else {}))

    def failed(*_: object) -> None:
        raise AssertionError("cut off")

    sink = WandB(run if given else None)
    background = Background(sink, failed)
    log(0)
    panels, wanted = Panels(), []
    for step in range(1, 9):
        record = layered(step)
        wanted.append(expected(panels.of(record), "holter/"))
        background.write(record)
        assert background.flush(10)
        log(step)
    background.close(10)
    log(9)  # it is still open
    run.finish()
    rows = place.read(run.id).rows
    assert [(number, row["user"], row["user/half"]) for number, row in rows] == [(n, n, n / 2) for n in range(10)]
    assert [ours(row) for _, row in rows if STEP in row] == wanted


def test_rows_of_two_threads_are_never_mixed(place: SimpleNamespace, run: Any) -> None:
    """P1: no waiting for each other: the user's are all there, and what is there of ours is whole and in its order."""
    sink, panels = WandB(), Panels()
    # Of two kinds: what is left of one under the other would show.
    records = {step: layered(step) if step % 2 else Record(step, 1e9, {"loss": 0.5}) for step in range(200)}
    wanted = {step: expected(panels.of(record), "holter/") for step, record in records.items()}
    thread = threading.Thread(target=lambda: [sink.write(record) for record in records.values()])
    thread.start()
    count = 0
    while thread.is_alive() or count < 60:
        thread.join(0.003)  # some of ours come between two of the user's
        run.log({"user/a": count}, commit=False)
        run.log({"user/b": count})
        count += 1
    sink.close()
    run.finish()
    stored = place.read(run.id)
    users = [(n, row.get("user/a"), row.get("user/b")) for n, row in stored.rows if "user/b" in row]
    assert users == [(n, n, n) for n in range(count)]
    found = [ours(row) for _, row in stored.rows if STEP in row]
    assert found == [wanted[row[STEP]] for row in found]
    assert len(found) + stored.summary.get(LEFT_OUT, 0) == len(records)
    assert [row[STEP] for row in found] == sorted(row[STEP] for row in found) and found


def test_the_richest_since_the_users_last_row_goes_with_the_next_and_the_rest_is_counted(
    place: SimpleNamespace, run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """P4, P17: bounded, in order, up to date, told once with the way out, and counted in the summary."""
    sink = WandB()
    with caplog.at_level(logging.WARNING, "holter"):
        for step in range(400):
            sink.write(layered(step) if step % 20 == 7 else Record(step, 1e9, SCALARS))
            sink.write(Record(step, 1e9, {"accuracy": 0.5}, late=True))
            if step % 10 == 0 and step >= 100:
                run.log({"user": step})
    assert len(sink._opened()._waiting) <= MOST_WAITING
    (told,) = caplog.messages
    assert "own_rows=True" in told
    sink.close()
    run.finish()
    stored = place.read(run.id)
    ours = [(row.get("user"), row[STEP]) for _, row in stored.rows if STEP in row]
    assert [row["user"] for _, row in stored.rows if "user" in row] == list(range(100, 400, 10))
    assert all("holter/accuracy" in row for _, row in stored.rows if STEP in row)
    steps = [step for _, step in ours]
    assert steps == sorted(set(steps)) and steps[-1] == 387  # it waits in the row that the user had begun
    assert set(range(107, 390, 20)) <= set(steps)  # those with layers
    assert all(user - step <= 30 for user, step in ours[2:-1])  # none of long ago
    assert stored.summary[LEFT_OUT] == 400 - len(steps)


def test_with_own_rows_every_step_is_there_but_the_counter_moves(place: SimpleNamespace, run: Any) -> None:
    """What the sink is a guest for: W&B drops what comes with a step below the counter."""
    sink = WandB(own_rows=True)
    for step in range(10):
        sink.write(Record(step, 1e9, {"loss": float(step)}))
    run.log({"user": "implicit"})
    run.log({"user": "explicit"}, step=1)
    sink.close()
    run.finish()
    stored = place.read(run.id)
    assert stored.of("holter/loss") == [(step, step) for step in range(10)]
    assert "loss" not in stored.metrics  # whose axis is the user's
    assert [(n, row["user"]) for n, row in stored.rows if "user" in row] == [(9, "implicit")]


def test_where_wandb_is_switched_off_nothing_happens(place: SimpleNamespace) -> None:
    run = place.wandb.init(mode="disabled")
    for own_rows in (True, False):
        sink = WandB(own_rows=own_rows)
        for step in range(3):
            sink.write(layered(step))
        sink.alert(Finding("lr-jump", "lr", 0, 0))
        sink.close()
    assert place.wandb.run is run
    run.finish()


# Findings ---------------------------------------------------------------------------------------------------------


def test_findings_are_alerts_and_lines_of_the_summary(place: SimpleNamespace) -> None:
    """C13, P22: one each, and one when it is over; of the same cause, too, within the minute that W&B would wait."""
    layer = "transformer.h.11.attn.\x1b[31m" + "deep." * 20 + "weight"
    first = Finding("lr-too-high", "lr", 3, 9, "critical", advice="Lower it to 1e-4.")
    told = [
        first,
        Finding("vanishing", "layer", 4, 10, "warning", layer=layer),
        Finding("vanishing", "layer", 4, 10, "info", layer="b.weight"),
        Finding("lr-too-high", "lr", 3, 9, "critical", advice="Lower it to 1e-4.", until=20),
    ]
    sink = WandB(id="findings")
    for finding in told:
        sink.alert(finding)
    sink.close()
    stored = place.read("findings")
    assert [alert.level for alert in stored.alerts] == ["ERROR", "WARN", "INFO", "INFO"]
    assert [alert.wait_duration for alert in stored.alerts] == [1] * 4
    titles = [alert.title for alert in stored.alerts]
    assert (titles[0], titles[2], titles[3]) == (
        "lr-too-high in lr",
        "vanishing in b.weight",
        "over: lr-too-high in lr",
    )
    assert titles[1].startswith("vanishing in transformer.h.11.attn.\\x1b") and len(titles[1]) < 64
    assert stored.alerts[0].text == str(first)
    lines = stored.summary[FINDINGS].splitlines()
    assert len(lines) == 3 and lines[0] == f"{first} (over: last seen at step 20)"
    assert stored.rows == []


def test_the_layer_of_a_finding_is_shown_from_then_on(place: SimpleNamespace) -> None:
    sink = WandB(id="noted", layers=0)
    sink.write(layered(0))
    sink.alert(Finding("vanishing", "layer", 0, 0, layer="b.weight"))
    sink.write(layered(1))
    sink.close()
    (_, before), (_, after) = place.read("noted").rows
    assert before.keys() == {"loss", STEP}
    assert {"gradients/b.weight/norm", "gradients_hist/b.weight"} <= after.keys()
    assert "gradients/a.weight/norm" not in after


def test_a_finding_in_the_users_run_moves_no_step(place: SimpleNamespace, run: Any) -> None:
    run.log({"user": 0}, step=5)
    WandB().alert(Finding("lr-jump", "lr", 0, 0))
    run.log({"user": 1}, step=6)
    run.finish()
    stored = place.read(run.id)
    assert stored.rows == [(5, {"user": 0}), (6, {"user": 1})]
    assert len(stored.alerts) == 1 and "lr-jump" in stored.summary[FINDINGS]


# Arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"layers": -1}, "give how many layers"),
        ({"every": 0}, "give a number of steps"),
        ({"run": "mine"}, "give what wandb.init"),
        ({"projekt": "x"}, "projekt"),
    ],
)
def test_arguments_that_are_none_are_refused(place: SimpleNamespace, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        WandB(**arguments)


def test_a_run_and_arguments_for_a_new_one_are_refused(place: SimpleNamespace, run: Any) -> None:
    with pytest.raises(ValueError, match="leave out project"):
        WandB(run, project="x")


def test_a_directory_of_wandbs_files_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A3: ./wandb, left by an earlier run, can be imported."""
    import importlib
    import sys

    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ImportError, match=r"pip install 'holter\[wandb\]'"):
        WandB()
