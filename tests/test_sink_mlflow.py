"""The MLflow sink against a real store in SQLite, read back by MLflow's own client."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holter.diagnosis.finding import Finding
from holter.history import History
from holter.record import Record
from holter.sinks import mlflow as sink_module
from holter.sinks.mlflow import FINDINGS_FILE, LONGEST_LINE, LONGEST_NAME, MLflow, metric_name
from tests.test_sink_trackio import STEPS, expected, train

EXPLODING = Finding("exploding-gradients", "layer", since=7, step=9, severity="critical", layer="0.weight", advice="x")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a new store; MLflow's own current store is the same one."""
    directory = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{directory}/mlflow.db")
        patch.delenv("MLFLOW_EXPERIMENT_ID", raising=False)
        patch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
        patch.chdir(directory)  # where the default experiment keeps its artifacts
        import mlflow

        client = mlflow.MlflowClient()
        client.create_experiment("holter", artifact_location=(directory / "artifacts").as_uri())
        yield client


@pytest.fixture
def sink(store: Any) -> MLflow:
    return MLflow(experiment="holter")


def history_of(store: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    found = store.get_metric_history(run_id, name)
    return [(metric.step, metric.value) for metric in sorted(found, key=lambda metric: metric.step)]


def names_in(store: Any, run_id: str) -> set[str]:
    return set(store.get_run(run_id).data.metrics)


def stored_findings(store: Any, run_id: str, directory: Path) -> Any:
    return json.loads(Path(store.download_artifacts(run_id, FINDINGS_FILE, str(directory))).read_text("utf-8"))


# A training, compared with its journal -----------------------------------------------------------------------------


def faults(store: Any, run_id: str, history: History) -> list[str]:
    return [tag for tag, pairs in expected(history).items() if history_of(store, run_id, metric_name(tag)) != pairs]


@pytest.fixture(scope="module")
def trained(store: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, History]:
    sink = MLflow(experiment="holter", layers="all")
    return sink.run_id, train(tmp_path_factory.mktemp("runs") / "run", sink)


def test_what_mlflow_reads_is_what_the_journal_holds(store: Any, trained: tuple[str, History]) -> None:
    """E1, E3, E5, E7: names, steps and values of scalars, layers and quantiles."""
    run_id, history = trained
    tags = expected(history)
    assert {"loss", "gradient_norm", "gradients/0.weight/norm", "weights_hist/3.bias/p99"} <= tags.keys()
    assert len(tags["gradients/0.weight/norm"]) == STEPS and tags["gradients_hist/0.weight/p50"]
    assert faults(store, run_id, history) == []


def test_the_times_are_those_of_the_records(store: Any, trained: tuple[str, History]) -> None:
    run_id, history = trained
    times = {record.step: int(record.time * 1000) for record in history.records if not record.late}
    assert {one.step: one.timestamp for one in store.get_metric_history(run_id, "gradient_norm")} == times


def test_a_sink_that_forgets_its_last_batch_is_found(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: what waits at the end is not sent."""
    monkeypatch.setattr(MLflow, "close", lambda self: None)
    sink = MLflow(experiment="holter", layers="all")
    assert "loss" in faults(store, sink.run_id, train(tmp_path / "run", sink))


def test_few_layers_are_shown_and_that_of_a_finding(store: Any, trained: tuple[str, History]) -> None:
    sink = MLflow(experiment="holter", layers=1)
    records = [record for record in trained[1].records if not record.late]
    for record in records[:4]:
        sink.write(record)
    before = set(sink._panels._chosen)
    other = next(name for name in records[0].rows["gradient"].layers if name not in before)
    sink.alert(replace(EXPLODING, layer=other))
    for record in records[4:]:
        sink.write(record)
    sink.close()
    shown = {name for name in names_in(store, sink.run_id) if name.startswith("gradients/")}
    assert {name.split("/")[1] for name in shown if name.endswith("/norm")} == before | {other}
    assert [step for step, _ in history_of(store, sink.run_id, f"gradients/{other}/norm")] == list(range(4, STEPS))


# Values and names --------------------------------------------------------------------------------------------------


def test_a_late_value_goes_to_its_step(store: Any, sink: MLflow) -> None:
    sink.write(Record(5, 50.0, {"loss": 1.0}))
    sink.write(Record(6, 60.0, {"loss": 0.5}))
    sink.write(Record(5, 61.0, {"val_loss": 2.0}, late=True))
    sink.close()
    assert history_of(store, sink.run_id, "val_loss") == [(5, 2.0)]
    assert history_of(store, sink.run_id, "loss") == [(5, 1.0), (6, 0.5)]


def test_values_that_are_not_finite_are_kept_as_mlflow_keeps_them(store: Any, sink: MLflow) -> None:
    """NaN as NaN; infinities as the largest numbers."""
    for step, value in enumerate((math.nan, math.inf, -math.inf)):
        sink.write(Record(step, 1.0 + step, {"loss": value}))
    sink.close()
    (_, nan), (_, high), (_, low) = history_of(store, sink.run_id, "loss")
    assert math.isnan(nan) and high > 1e308 and low < -1e308


ODD = ["acc@5", "acc#5", "acc_5", "a//b", "a/b", "/a/b", "../a", "a/", "..", "", "größe", "x:y", "tab\t", "end\n"]
ODD += ["x" * 300, "x" * 299 + "y", "a, b", "a (b)", "loss/train set", "-", "\ud800"]


def test_any_name_is_taken_and_stays_apart_from_others(store: Any, sink: MLflow) -> None:
    sink.write(Record(3, 1.0, {name: float(place) for place, name in enumerate(ODD)}))
    sink.close()
    assert len({metric_name(name) for name in ODD}) == len(ODD) == len(names_in(store, sink.run_id))
    for place, name in enumerate(ODD):
        assert len(metric_name(name)) <= LONGEST_NAME
        assert history_of(store, sink.run_id, metric_name(name)) == [(3, float(place))]
    assert [metric_name(name) for name in ("acc_5", "a/b", "größe", "loss/train set")] == [
        *("acc_5", "a/b", "größe", "loss/train set")
    ]


@pytest.mark.parametrize("name", ["acc@5", "a//b", "x" * 300])
def test_mlflow_would_refuse_such_a_name(name: str, sink: MLflow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: names as they are."""
    import mlflow

    monkeypatch.setattr(sink_module, "metric_name", lambda name: name)
    sink.write(Record(0, 1.0, {name: 1.0}))
    with pytest.raises(mlflow.MlflowException):
        sink.close()


MANY = {f"m{place}": float(place) for place in range(2500)}


def calls_of(sink: MLflow, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many metrics each call has, of so many in one record."""
    calls, log_batch = [], sink._client.log_batch

    def counted(run_id: str, metrics: list[Any], **others: Any) -> None:
        calls.append(len(metrics))
        log_batch(run_id, metrics, **others)

    monkeypatch.setattr(sink._client, "log_batch", counted)
    sink.write(Record(0, 1.0, MANY))
    sink.close()
    return calls


def test_no_call_has_more_metrics_than_mlflow_takes(store: Any, sink: MLflow, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.utils.validation import MAX_METRICS_PER_BATCH

    calls = calls_of(sink, monkeypatch)
    assert max(calls) <= MAX_METRICS_PER_BATCH and sum(calls) == len(MANY)
    assert store.get_run(sink.run_id).data.metrics == MANY


def test_a_call_that_has_more_is_seen(sink: MLflow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: all in one call."""
    monkeypatch.setattr(sink_module, "MOST_METRICS", 5000)
    assert calls_of(sink, monkeypatch) == [len(MANY)]


# Whose run ---------------------------------------------------------------------------------------------------------


def test_the_users_active_run_is_used_and_left_open(store: Any) -> None:
    """Written from another thread, where it is not active."""
    import mlflow

    place = store.get_experiment_by_name("holter").experiment_id
    with mlflow.start_run(experiment_id=place) as run:
        sink = MLflow()
        assert sink.run_id == run.info.run_id
        worker = threading.Thread(target=lambda: (sink.write(Record(1, 1.0, {"loss": 3.0})), sink.close()))
        worker.start()
        worker.join(60)
        mlflow.log_metric("loss", 1.0)
        assert store.get_run(run.info.run_id).info.status == "RUNNING"
        assert mlflow.active_run().info.run_id == run.info.run_id
    assert store.get_run(run.info.run_id).data.metrics == {"holter/loss": 3.0, "loss": 1.0}


def test_a_run_of_its_own_is_ended_and_becomes_nobodys_active_run(store: Any) -> None:
    import mlflow

    sink = MLflow(experiment="holter")
    sink.write(Record(1, 1.0, {"loss": 3.0}))
    assert mlflow.active_run() is None and store.get_run(sink.run_id).info.status == "RUNNING"
    sink.close()
    sink.close()
    assert store.get_run(sink.run_id).info.status == "FINISHED"


def test_a_process_that_shows_nothing_starts_no_run(store: Any) -> None:
    """Only one of a distributed training writes to its sinks."""
    MLflow(experiment="of nobody").close()
    assert store.get_experiment_by_name("of nobody") is None


def test_a_run_by_its_id_is_used_and_left_open(store: Any) -> None:
    run = store.create_run(store.get_experiment_by_name("holter").experiment_id)
    sink = MLflow(run.info.run_id, tracking_uri=store.tracking_uri)
    sink.write(Record(2, 1.0, {"loss": 3.0}))
    sink.close()
    assert history_of(store, run.info.run_id, "holter/loss") == [(2, 3.0)]
    assert store.get_run(run.info.run_id).info.status == "RUNNING"


def test_a_sink_that_took_the_users_run_for_its_own_would_end_it(store: Any) -> None:
    """Planted fault."""
    run = store.create_run(store.get_experiment_by_name("holter").experiment_id)
    sink = MLflow(run.info.run_id)
    sink._is_own = True
    sink.close()
    assert store.get_run(run.info.run_id).info.status == "FINISHED"


def test_a_new_run_starts_where_mlflow_would_start_it(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def place_of(**chosen: Any) -> str:
        sink = MLflow(**chosen)
        sink.write(Record(0, 1.0, {"loss": 1.0}))
        sink.close()
        return str(store.get_experiment(store.get_run(sink.run_id).info.experiment_id).name)

    assert place_of() == "Default"
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "named")
    assert (place_of(), place_of(experiment="asked for")) == ("named", "asked for")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", store.get_experiment_by_name("holter").experiment_id)
    assert place_of() == "holter", "where set_experiment leaves its choice"


# Findings ----------------------------------------------------------------------------------------------------------


def test_findings_are_tags_and_an_artifact(store: Any, sink: MLflow, tmp_path: Path) -> None:
    long = Finding(
        "dead-layer", "layer", 3, 20, layer="a.b", evidence={"share": math.nan}, advice="two\nlines\ud800 " * 900
    )
    for finding in (EXPLODING, long):
        sink.alert(finding)
    assert len(stored_findings(store, sink.run_id, tmp_path)) == 2, "before the end"
    sink.alert(replace(EXPLODING, until=30))  # the same incident, over
    sink.close()
    tags = {name: text for name, text in store.get_run(sink.run_id).data.tags.items() if "finding" in name}
    assert tags.keys() == {"holter.finding.1", "holter.finding.2"}
    assert tags["holter.finding.1"] == f"{EXPLODING} (over: last seen at step 30)"
    assert len(tags["holter.finding.2"]) == LONGEST_LINE and "\n" not in tags["holter.finding.2"]
    first, second = stored_findings(store, sink.run_id, tmp_path)
    assert (first["cause"], first["until"], second["until"]) == ("exploding-gradients", 30, None)
    assert second["advice"] == long.advice and second["evidence"] == {"share": None}


def test_a_finding_that_is_not_recognised_would_be_told_twice(
    store: Any, sink: MLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: it is taken for another when it is over."""
    monkeypatch.setattr(sink_module, "key_of", lambda finding: (finding.cause, finding.until))
    for until in (None, 30):
        sink.alert(replace(EXPLODING, until=until))
    assert "holter.finding.2" in store.get_run(sink.run_id).data.tags


def test_two_problems_of_one_step_are_two_findings(store: Any, sink: MLflow, tmp_path: Path) -> None:
    for words in ("could not write", "could not read"):
        sink.alert(Finding("monitor-degraded", "monitor", 4, 4, advice=words))
    sink.close()
    assert [one["advice"] for one in stored_findings(store, sink.run_id, tmp_path)] == [
        "could not write",
        "could not read",
    ]


def test_a_run_without_findings_says_so(store: Any, sink: MLflow, tmp_path: Path) -> None:
    sink.write(Record(0, 1.0, {"loss": 1.0}))
    sink.close()
    assert stored_findings(store, sink.run_id, tmp_path) == []


def test_a_resumed_run_keeps_its_names_and_earlier_findings(store: Any, sink: MLflow, tmp_path: Path) -> None:
    sink.write(Record(0, 1.0, {"loss": 2.0}))
    sink.alert(EXPLODING)
    sink.close()
    again = MLflow(sink.run_id)
    again.write(Record(1, 2.0, {"loss": 1.0}))
    again.alert(replace(EXPLODING, cause="dead-layer"))
    again.close()
    assert history_of(store, sink.run_id, "loss") == [(0, 2.0), (1, 1.0)]
    tags = store.get_run(sink.run_id).data.tags
    assert "exploding" in tags["holter.finding.1"] and "dead-layer" in tags["holter.finding.2"]
    causes = [one["cause"] for one in stored_findings(store, sink.run_id, tmp_path)]
    assert causes == ["exploding-gradients", "dead-layer"]


# Failures ----------------------------------------------------------------------------------------------------------


def test_artifacts_that_cannot_be_stored_cost_no_metrics(store: Any, tmp_path: Path) -> None:
    """It is told at the end, after all else is done."""
    (tmp_path / "file").touch()
    store.create_experiment(tmp_path.name, artifact_location=(tmp_path / "file" / "below").as_uri())
    sink = MLflow(experiment=tmp_path.name)
    sink.write(Record(0, 1.0, {"loss": 1.0}))
    sink.alert(EXPLODING)
    sink.write(Record(1, 2.0, {"loss": 2.0}))
    with pytest.raises(OSError):
        sink.close()
    run = store.get_run(sink.run_id)
    assert history_of(store, sink.run_id, "loss") == [(0, 1.0), (1, 2.0)]
    assert run.info.status == "FINISHED" and "holter.finding.1" in run.data.tags


def unreachable(*_: Any, **__: Any) -> None:
    raise ConnectionError


def test_a_second_close_sends_what_the_first_could_not(
    store: Any, sink: MLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink.write(Record(0, 1.0, {"loss": 1.0}))
    with monkeypatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr(sink._client, "log_batch", unreachable)
        sink.close()
    assert names_in(store, sink.run_id) == set()
    sink.close()
    assert history_of(store, sink.run_id, "loss") == [(0, 1.0)]


def test_what_a_write_could_not_send_is_sent_by_the_next(
    store: Any, sink: MLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sink_module, "FLUSH_SECONDS", -1.0)  # at every write
    with monkeypatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr(sink._client, "log_batch", unreachable)
        sink.write(Record(0, 1.0, {"loss": 1.0}))
    sink.write(Record(1, 2.0, {"loss": 0.5}))
    assert history_of(store, sink.run_id, "loss") == [(0, 1.0), (1, 0.5)]
    sink.close()


@pytest.mark.parametrize("is_own", [True, False])
def test_a_run_is_ended_also_where_its_last_metrics_cannot_be_sent(
    is_own: bool, store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would seem to train for ever. One of the user's stays open, and both have their findings."""
    run = store.create_run(store.get_experiment_by_name("holter").experiment_id)
    sink = MLflow(experiment="holter") if is_own else MLflow(run.info.run_id)
    sink.alert(EXPLODING)
    sink.write(Record(0, 1.0, {"loss": 1.0}))
    monkeypatch.setattr(sink._client, "log_batch", unreachable)
    with pytest.raises(ConnectionError):
        sink.close()
    assert store.get_run(sink.run_id).info.status == ("FINISHED" if is_own else "RUNNING")
    assert len(stored_findings(store, sink.run_id, tmp_path)) == 1


def test_a_run_that_could_not_be_started_is_not_tried_again_to_be_ended(
    sink: MLflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def refuse(*_: Any, **__: Any) -> None:
        tried.append(1)
        raise ConnectionError

    sink.write(Record(0, 1.0, {"loss": 1.0}))
    monkeypatch.setattr(sink._client, "create_run", refuse)
    with pytest.raises(ConnectionError):
        sink.close()
    assert len(tried) == 1, "each may take minutes"
