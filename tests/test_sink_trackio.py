"""The Trackio sink, read back by Trackio's own storage and API; nothing is served, and the network is not touched."""

from __future__ import annotations

import math
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import holter
from holter.diagnosis.finding import Finding
from holter.history import History
from holter.record import Record
from holter.sinks import Sink
from holter.sinks.panels import QUANTILES, joined
from holter.sinks.trackio import MOST_BINS, Trackio
from tests.models import make

EXPLODING = Finding("exploding-gradients", "layer", since=7, step=9, severity="critical", layer="0.weight", advice="x")
PROJECT = "holter"
STEPS = 12


@pytest.fixture(scope="module")
def trackio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Keeps its files in a directory of this module, also where another has imported it before."""
    directory = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(directory))
        patch.setenv("TRACKIO_STORAGE_MODE", "sqlite")
        for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WEBHOOK_URL"):
            patch.delenv(name, raising=False)
        import trackio

        parts = {"TRACKIO_DIR": directory, "MEDIA_DIR": directory / "media", "ARTIFACTS_DIR": directory / "artifacts"}
        for module in [module for name, module in sys.modules.items() if name.split(".")[0] == "trackio"]:
            for name, path in parts.items():
                if hasattr(module, name):
                    patch.setattr(module, name, path)
        yield trackio


@pytest.fixture(autouse=True)
def network(trackio: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was tried. Trackio asks Hugging Face for the user's name, where a token is kept: here none is."""
    tried: list[str] = []

    def refuse(what: str) -> Callable[..., None]:
        def refused(*arguments: Any) -> None:
            tried.append(f"{what} {arguments[1:]}")
            raise OSError("no network here")

        return refused

    def nobody() -> str:
        raise LookupError("no token")

    monkeypatch.setattr("trackio.run._get_default_namespace", nobody)
    for what in ("connect", "bind", "listen"):
        monkeypatch.setattr(socket.socket, what, refuse(what))
    yield tried
    assert tried == []


def rows_of(trackio: Any, run: Any) -> list[dict[str, Any]]:
    return list(trackio.SQLiteStorage.get_logs(run.project, run.name, run_id=run.id))


def series_of(trackio: Any, run: Any, name: str) -> list[tuple[int, Any]]:
    found = [(row["step"], row[name]) for row in rows_of(trackio, run) if name in row]
    return sorted(found, key=lambda pair: pair[0])


# A training, compared with its journal -----------------------------------------------------------------------------


class Seen:
    """Passes everything on, and tells when a step has been written and when the end has come."""

    def __init__(self, sink: Sink, step: int) -> None:
        self.sink, self.step = sink, step
        self.is_written, self.is_closed = threading.Event(), threading.Event()

    def write(self, record: Record) -> None:
        self.sink.write(record)
        if record.step >= self.step:
            self.is_written.set()

    def alert(self, finding: Finding) -> None:
        self.sink.alert(finding)

    def close(self) -> None:
        self.sink.close()
        self.is_closed.set()


def train(path: Path, sink: Sink) -> History:
    training = make("mlp")
    seen = Seen(sink, STEPS - 2)
    training.monitor = holter.watch(
        training.model, training.optimizer, run=path, weights=1, histograms=4, budget=None, sinks=[seen]
    )
    for _ in range(STEPS):
        training.step()
    assert seen.is_written.wait(60)
    training.monitor.close()
    assert seen.is_closed.wait(60) and not training.monitor.findings
    return holter.open_run(path).history


def expected(history: History) -> dict[str, list[tuple[int, float]]]:
    """By tag, straight from the journal's series."""
    tags: dict[str, list[tuple[int, float]]] = {}
    for name in history.scalars:
        tags[name] = list(zip(*map(np.ndarray.tolist, history.scalar(name)), strict=True))
    for role in ("gradient", "weight"):
        for statistic in ("norm", "mean", "std"):
            steps, layers, matrix = history.series(role, statistic)
            for place, layer in enumerate(layers):
                column = list(zip(steps.tolist(), matrix[:, place].tolist(), strict=True))
                tags[f"{role}s/{layer}/{statistic}"] = [pair for pair in column if not math.isnan(pair[1])]
        for layer in history.layers(role):
            steps, histograms = history.histogram(role, layer)
            for name, share in QUANTILES.items():
                values = [float(histogram.quantile(share)) for histogram in histograms]
                tags[f"{role}s_hist/{layer}/{name}"] = list(zip(steps.tolist(), values, strict=True))
    return tags


def faults(trackio: Any, run: Any, history: History) -> list[str]:
    return [tag for tag, pairs in expected(history).items() if series_of(trackio, run, tag) != pairs]


@pytest.fixture(scope="module")
def trained(trackio: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, History]:
    sink = Trackio(PROJECT, layers="all")
    history = train(tmp_path_factory.mktemp("runs") / "run", sink)
    return sink.run, history


def test_what_trackio_reads_is_what_the_journal_holds(trackio: Any, trained: tuple[Any, History]) -> None:
    """E1, E3, E5, E7: names, steps and values of scalars, layers and quantiles."""
    run, history = trained
    assert len(series_of(trackio, run, "gradients/0.weight/norm")) == STEPS
    assert faults(trackio, run, history) == []


def test_histograms_hold_every_value(trackio: Any, trained: tuple[Any, History]) -> None:
    """E3, E7."""
    run, history = trained
    for role, elements in (("gradient", 12 * 24), ("weight", 12 * 24)):
        steps, histograms = history.histogram(role, "0.weight")
        found = series_of(trackio, run, f"{role}s_hist/0.weight")
        assert [step for step, _ in found] == steps.tolist() != []
        for (_, stored), histogram in zip(found, histograms, strict=True):
            counts, edges = joined(histogram, MOST_BINS)
            assert stored["_type"] == trackio.Histogram.TYPE and sum(stored["values"]) == elements
            assert (stored["values"], stored["bins"]) == (counts.tolist(), edges.tolist())
            assert len(stored["bins"]) == len(stored["values"]) + 1 <= MOST_BINS + 1
            assert all(one < other for one, other in pairwise(stored["bins"]))


def test_a_sink_that_leaves_the_steps_to_trackio_is_found(
    trackio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: a late record would move all that follow."""
    log = trackio.Run.log
    monkeypatch.setattr(trackio.Run, "log", lambda self, metrics, step: log(self, metrics))
    sink = Trackio(PROJECT, layers="all")
    sink.run.log({"other": 1.0}, step=0)
    assert "loss" in faults(trackio, sink.run, train(tmp_path / "run", sink))


def test_few_layers_are_shown_and_that_of_a_finding(trackio: Any, trained: tuple[Any, History]) -> None:
    sink = Trackio(PROJECT, layers=0)
    records = [record for record in trained[1].records if not record.late]
    for record in records[:4]:
        sink.write(record)
    sink.alert(EXPLODING)
    for record in records[4:]:
        sink.write(record)
    sink.close()
    names = {name for row in rows_of(trackio, sink.run) for name in row if name.startswith("gradients/")}
    assert {name.split("/")[1] for name in names} == {"0.weight"}
    shown = series_of(trackio, sink.run, "gradients/0.weight/norm")
    assert [step for step, _ in shown] == list(range(4, STEPS))


# Values and names --------------------------------------------------------------------------------------------------


def test_a_late_value_goes_to_its_step(trackio: Any) -> None:
    sink = Trackio(PROJECT)
    for record in (
        Record(5, 50.0, {"loss": 1.0}),
        Record(6, 60.0, {"loss": 0.5}),
        Record(5, 61.0, {"val_loss": 2.0}, late=True),
        Record(7, 70.0, {"loss": 0.2}),
    ):
        sink.write(record)
    sink.close()
    assert series_of(trackio, sink.run, "val_loss") == [(5, 2.0)]
    assert series_of(trackio, sink.run, "loss") == [(5, 1.0), (6, 0.5), (7, 0.2)]


def test_values_that_are_not_finite_come_back(trackio: Any) -> None:
    sink = Trackio(PROJECT)
    for step, value in enumerate((math.nan, math.inf, -math.inf)):
        sink.write(Record(step, 1.0, {"loss": value}))
    sink.close()
    (_, nan), (_, high), (_, low) = series_of(trackio, sink.run, "loss")
    assert math.isnan(nan) and (high, low) == (math.inf, -math.inf)


ODD = {"time": 1.0, "step": 2.0, "__x": 3.0, "größe@5": 4.0, "broken\ud800": 5.0, "run": 6.0}


def odd_names(trackio: Any) -> dict[str, Any]:
    sink = Trackio(PROJECT)
    sink.write(Record(3, 1.0, ODD))
    sink.close()
    rows = rows_of(trackio, sink.run)
    return {name: value for row in rows for name, value in row.items() if isinstance(value, float)}


def test_no_name_is_refused_or_taken_for_trackios_own(trackio: Any) -> None:
    kept = {"holter/time": 1.0, "holter/step": 2.0, "holter/__x": 3.0, "holter/run": 6.0}
    assert odd_names(trackio) == {**kept, "größe@5": 4.0, "broken\\ud800": 5.0}


def test_trackio_would_rename_them(trackio: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: names as they are. It warns of it; where that is an error, it prints."""
    monkeypatch.setattr(Trackio, "_name", lambda self, tag: tag)
    assert odd_names(trackio).keys() & {"holter/time", "time", "broken\\ud800"} == set()


# Whose run ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def users(trackio: Any) -> Iterator[Any]:
    run = trackio.init(PROJECT, embed=False, auto_log_cpu=False, config={"rate": 0.1})
    yield run
    if trackio.context_vars.current_run.get() is not None:
        trackio.finish()


def test_the_users_run_is_used_and_left_open(trackio: Any, users: Any) -> None:
    sink = Trackio(PROJECT)
    assert sink.run is users
    sink.write(Record(4, 1.0, {"loss": 3.0}))
    sink.close()
    sink.close()
    trackio.log({"loss": 1.0}, step=5)  # it goes on
    trackio.finish()
    assert series_of(trackio, users, "loss") == [(5, 1.0)]
    assert series_of(trackio, users, "holter/loss") == [(4, 3.0)], "two writers, two curves"


def test_a_sink_that_took_the_users_run_for_its_own_would_finish_it(users: Any) -> None:
    """Planted fault."""
    sink = Trackio(PROJECT)
    sink.close()
    assert not users._stop_flag.is_set()
    sink = Trackio(PROJECT)
    sink._is_own = True
    sink.close()
    assert users._stop_flag.is_set()


@pytest.mark.parametrize("chosen", [{"project": "another"}, {"name": "mine"}, {"group": "g"}])
def test_a_run_of_its_own_leaves_the_users_alone(trackio: Any, users: Any, chosen: dict[str, Any]) -> None:
    sink = Trackio(**{"project": PROJECT, **chosen})
    sink.write(Record(4, 1.0, {"loss": 3.0}))
    assert trackio.context_vars.current_run.get() is users and trackio.config["rate"] == 0.1
    assert not users._stop_flag.is_set() and sink.run.id != users.id
    sink.close()
    trackio.log({"theirs": 1.0})
    trackio.finish()
    assert series_of(trackio, sink.run, "loss") == [(4, 3.0)]
    assert series_of(trackio, users, "theirs") == [(0, 1.0)] and not series_of(trackio, users, "loss")


def test_trackio_itself_would_finish_the_users_run(trackio: Any, users: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: started where the user's is the current one."""
    here = SimpleNamespace(run=lambda call, **arguments: call(**arguments))
    monkeypatch.setattr("holter.sinks.trackio.contextvars", SimpleNamespace(Context=lambda: here))
    sink = Trackio("another")
    assert sink.run is trackio.context_vars.current_run.get() and users._stop_flag.is_set()


def test_a_process_that_shows_nothing_starts_no_run(trackio: Any) -> None:
    """Only one of a distributed training writes to its sinks."""
    Trackio("of-nobody").close()
    assert "of-nobody" not in trackio.SQLiteStorage.get_projects()


def test_a_server_or_a_call_would_be_seen(network: list[str]) -> None:
    """Planted fault: somebody connects."""
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("127.0.0.1", 9))
    with socket.socket() as server, pytest.raises(OSError, match="no network"):
        server.bind(("127.0.0.1", 0))
    assert [what.split()[0] for what in network] == ["connect", "bind"]
    network.clear()


# Findings and refusals ---------------------------------------------------------------------------------------------


def test_findings_are_alerts_told_again_when_they_are_over(trackio: Any) -> None:
    sink = Trackio("findings")
    sink.write(Record(9, 1.0, {"loss": 3.0}))
    mild = Finding("slow-loader", "performance", 3, 5, severity="info", advice="y\x1b[31m")
    for finding in (EXPLODING, mild, replace(EXPLODING, until=30)):
        sink.alert(finding)
    sink.close()
    found = {(one["title"], one["level"], one["step"]): one["text"] for one in trackio.Api().alerts("findings")}
    assert found == {
        ("exploding-gradients in 0.weight", "error", 9): str(EXPLODING),
        ("slow-loader in performance", "info", 5): str(mild).replace("\x1b", "\\x1b"),
        ("over: exploding-gradients in 0.weight", "info", 30): str(EXPLODING),
    }


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"project": ""}, "give the name of a project"),
        ({"project": None}, "give the name of a project"),
        ({"layers": "some"}, 'or "all"'),
        ({"every": 0}, "1 for all"),
        ({"colour": "red"}, "trackio.init takes other arguments"),
    ],
)
def test_bad_arguments_are_refused_with_the_way_out(chosen: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Trackio(**{"project": PROJECT, **chosen})


@pytest.mark.parametrize("found", [None, SimpleNamespace(__version__="0.0.6", init=None)])
def test_without_a_trackio_that_will_do_the_way_out_is_named(found: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", found)
    with pytest.raises(ImportError, match=r"pip install 'holter\[trackio\]'"):
        Trackio(PROJECT)


def test_a_directory_that_takes_no_files_is_told(trackio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: Trackio itself would go on as if it stored everything."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(trackio.utils, "TRACKIO_DIR", tmp_path / "file" / "below")
    with pytest.raises(OSError, match="file"):
        Trackio("mine", name="new").write(Record(0, 1e9, {"loss": 1.0}))
