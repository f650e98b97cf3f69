"""The TensorBoard sink, read back by tensorboard's own readers and compared with the journal."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holter
from holter.diagnosis.finding import Finding
from holter.history import History
from holter.record import LayerRows, Record
from holter.run import Run
from holter.send import send
from holter.sinks import Sink
from holter.sinks.panels import joined
from holter.sinks.tensorboard import TensorBoard
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows
from tests.models import make

Trained = tuple[Run, Path, tuple[Finding, ...]]

STEPS = 46
STATISTICS = {"gradient": ("norm", "mean", "std"), "weight": ("norm", "mean", "std"), "update": ("norm", "ratio")}


@dataclass
class Read:
    """What a directory of event files holds, by tag: (step, value), in the order of the file."""

    scalars: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    histograms: dict[str, list[tuple[int, Any]]] = field(default_factory=dict)
    texts: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    times: dict[str, list[float]] = field(default_factory=dict)
    plugins: set[str] = field(default_factory=set)


def read(directory: Path) -> Read:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    kinds = ("scalars", "histograms", "tensors", "compressedHistograms", "images", "audio")
    events = EventAccumulator(str(directory), size_guidance=dict.fromkeys(kinds, 0)).Reload()
    tags, found = events.Tags(), Read()
    for tag in tags["scalars"]:
        found.scalars[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
        found.times[tag] = [event.wall_time for event in events.Scalars(tag)]
    for tag in tags["histograms"]:
        found.histograms[tag] = [(event.step, event.histogram_value) for event in events.Histograms(tag)]
    for tag in tags["tensors"]:
        texts = events.Tensors(tag)
        found.texts[tag] = [(event.step, event.tensor_proto.string_val[0].decode()) for event in texts]
        found.plugins.add(events.SummaryMetadata(tag).plugin_data.plugin_name)
    return found


def single(values: np.ndarray) -> list[float]:
    return values.astype(np.float32).astype(float).tolist()


def expected_scalars(history: History) -> dict[str, list[tuple[int, float]]]:
    """Straight from the journal, of all layers."""
    expected = {}
    for name in history.scalars:
        steps, values = history.scalar(name)
        expected[name] = list(zip(steps.tolist(), single(values), strict=True))
    for role, statistics in STATISTICS.items():
        for statistic in statistics:
            steps, layers, matrix = history.series(role, statistic)
            for place, layer in enumerate(layers):
                known = ~np.isnan(matrix[:, place])
                pairs = zip(steps[known].tolist(), single(matrix[known, place]), strict=True)
                expected[f"{role}s/{layer}/{statistic}"] = list(pairs)
    return expected


def differences(found: Read, history: History) -> list[str]:
    """Where event files say something else than the journal; of layers only what they show."""
    expected = expected_scalars(history)
    names = [tag for tag in expected if tag in found.scalars or tag in history.scalars]
    faults = [tag for tag in names if found.scalars.get(tag) != expected[tag]]
    for tag, events in found.histograms.items():
        role, _, layer = tag.partition("s_hist/")
        if role in STATISTICS:
            steps, histograms = history.histogram(role, layer)
            edges = [one.edges() for one in histograms]
            buckets = [(step, [0, *counts], list(limits)) for step, (counts, limits) in zip(steps, edges, strict=True)]
            faults += [tag] if [(step, one.bucket, one.bucket_limit) for step, one in events] != buckets else []
    return faults


def layers_of(found: Read) -> set[str]:
    return {tag.split("/")[1] for tag in found.scalars if tag.startswith("gradients/")}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A real training whose rate is far too high, its event files and what was found in it."""
    directory = tmp_path_factory.mktemp("trained")
    training = make("transformer+dropout")
    training.optimizer.param_groups[0]["lr"] = 0.3
    sink = TensorBoard(directory / "events")
    settings: dict[str, Any] = {"run": directory / "run", "sinks": [sink], "budget": None, "histograms": 5}
    with holter.watch(training.model, training.optimizer, **settings) as monitor:
        training.monitor = monitor
        for _ in range(STEPS):
            training.step()
    return holter.open_run(directory / "run"), directory / "events", monitor.findings


@pytest.fixture(scope="module")
def live(trained: Trained) -> Read:
    return read(trained[1])


def test_scalars_and_histograms_are_those_of_the_journal(trained: Trained, live: Read) -> None:
    """C12, E1, E2, E3: names, steps, values, counts and edges; what is logged after a step belongs to it."""
    run = trained[0]
    assert differences(live, run.history) == []
    assert [step for step, _ in live.scalars["loss"]] == list(range(STEPS))
    assert len(layers_of(live)) >= 8 and len(live.histograms["gradients_hist/out.bias"]) == STEPS // 5 + 1
    assert live.scalars["updates/out.weight/ratio"], "nothing was compared"
    assert live.times["gradient_norm"] == [one.time for one in run.records if "gradient_norm" in one.scalars]


def test_moments_of_histograms_are_those_that_were_measured(trained: Trained, live: Read) -> None:
    history = trained[0].history
    events = live.histograms["gradients_hist/out.weight"]
    steps, layers, least = history.series("gradient", "min")
    place = layers.index("out.weight")
    rows = [list(steps).index(step) for step, _ in events]
    assert [one.min for _, one in events] == least[rows, place].tolist()
    assert [one.max for _, one in events] == history.series("gradient", "max")[2][rows, place].tolist()
    norms = history.series("gradient", "norm")[2][rows, place]
    assert np.sqrt([one.sum_squares for _, one in events]).tolist() == norms.tolist()
    count = history.series("gradient", "count")[2][rows, place]
    assert [one.num for _, one in events] == count.tolist() == [sum(one.bucket) for _, one in events]
    means = history.series("gradient", "mean")[2][rows, place]
    assert [one.sum / one.num for _, one in events] == means.tolist()


def test_quantiles_of_gradients_are_curves(trained: Trained, live: Read) -> None:
    """E3, E5."""
    steps, histograms = trained[0].history.histogram("gradient", "out.weight")
    for name, q in {"min": 0.0, "p25": 0.25, "p50": 0.5, "p75": 0.75, "p95": 0.95, "p99": 0.99, "max": 1.0}.items():
        values = single(np.array([float(one.quantile(q)) for one in histograms]))
        found = live.scalars[f"gradients_hist/out.weight/{name}"]
        assert found == list(zip(steps.tolist(), values, strict=True))


def test_findings_are_texts_at_their_step(trained: Trained, live: Read) -> None:
    """C12."""
    findings = [finding for finding in trained[2] if finding.until is None]
    assert findings and live.plugins == {"text"}
    texts = [one for texts in live.texts.values() for one in texts]
    for finding in findings:
        of_it = [text for step, text in texts if step == finding.step and finding.cause in text]
        assert len(of_it) == 1 and finding.advice in of_it[0] and f"since step {finding.since}" in of_it[0]


class Shifted(TensorBoard):
    def write(self, record: Record) -> None:
        super().write(replace(record, step=record.step + 1))


class Coarse(TensorBoard):
    def _histogram(self, histogram: Any, row: Any) -> Any:
        proto = super()._histogram(histogram, row)
        counts, edges = joined(histogram, max(1, len(proto.bucket) // 2))
        return self._summary.HistogramProto(bucket=[0, *counts.tolist()], bucket_limit=edges.tolist())


class Rounded(TensorBoard):
    def write(self, record: Record) -> None:
        super().write(replace(record, scalars={name: round(value, 3) for name, value in record.scalars.items()}))


class WithoutLate(TensorBoard):
    def write(self, record: Record) -> None:
        if not record.late:
            super().write(record)


@pytest.mark.parametrize(
    ("planted", "tag"),
    [
        (TensorBoard, None),
        (Shifted, "gradients/out.bias/norm"),
        (Coarse, "gradients_hist/out.weight"),
        (Rounded, "loss"),
        (WithoutLate, "loss"),
    ],
)
def test_a_planted_fault_is_found(
    trained: Trained, tmp_path: Path, planted: type[TensorBoard], tag: str | None
) -> None:
    """The stored run, sent again: faithfully there is no difference, with a fault there is."""
    send(trained[0], planted(tmp_path))
    faults = differences(read(tmp_path), trained[0].history)
    assert faults == [] if tag is None else tag in faults


@pytest.mark.parametrize(("layers", "count"), [(8, 8), (3, 3), (0, 0), ("all", 26)])
def test_as_many_layers_are_shown_as_asked_for(trained: Trained, tmp_path: Path, layers: int | str, count: int) -> None:
    replay(trained[0], TensorBoard(tmp_path, layers=layers))
    found = read(tmp_path)
    assert differences(found, trained[0].history) == []
    gradients = {tag.removeprefix("gradients_hist/") for tag in found.histograms if tag.startswith("gradients_hist/")}
    norms = {tag.split("/")[1] for tag in found.scalars if tag.startswith("gradients/")}
    assert len(norms) == count and gradients == norms


def replay(run: Run, sink: Sink) -> None:
    """Without its findings, whose layers would join."""
    for record in run.records:
        sink.write(record)
    sink.close()


def test_the_layer_of_a_finding_joins(trained: Trained, tmp_path: Path) -> None:
    sink, layer = TensorBoard(tmp_path, layers=1), "body.layers.1.linear2.weight"
    for record in trained[0].records:
        if record.step == 20 and not record.late:
            sink.alert(Finding("dead-units", "layer", 11, 19, layer=layer))
        sink.write(record)
    sink.close()
    found = read(tmp_path)
    steps = [step for step, _ in found.scalars[f"gradients/{layer}/norm"]]
    assert len(layers_of(found)) == 2 and steps == list(range(20, STEPS))


def test_every_so_many_steps_have_layers_and_all_have_scalars(trained: Trained, tmp_path: Path) -> None:
    replay(trained[0], TensorBoard(tmp_path, every=10))
    found = read(tmp_path)
    assert [step for step, _ in found.scalars["gradients/out.bias/norm"]] == [0, 10, 20, 30, 40]
    assert [step for step, _ in found.scalars["loss"]] == list(range(STEPS))


# Findings -------------------------------------------------------------------------------------------------------

SERVER = """
import json, sys, time
from tensorboard import context
from tensorboard.data import server_ingester
from tensorboard.util.grpc_util import ChannelCredsType
try:
    binary = server_ingester.get_server_binary()
except server_ingester.NoDataServerError:
    sys.exit(77)
server = server_ingester.SubprocessServerDataIngester(
    binary, logdir=sys.argv[1], reload_interval=0, channel_creds_type=ChannelCredsType.LOCAL,
    samples_per_plugin={"text": 100})
server.start()
asked, deadline, texts = context.RequestContext(), time.time() + 30, {}
while sum(map(len, texts.values())) < int(sys.argv[2]) and time.time() < deadline:
    runs = server.data_provider.read_tensors(asked, experiment_id="", plugin_name="text", downsample=100)
    texts = {tag: [(one.step, one.numpy.item().decode()) for one in found] for tag, found in runs.get(".", {}).items()}
print(json.dumps(texts))
"""


def served(directory: Path, count: int) -> list[tuple[int, str]]:
    """The texts as tensorboard's own server hands them to the page."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER, str(directory), str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    if done.returncode == 77:
        pytest.skip("tensorboard has no data server on this machine")
    assert done.returncode == 0, done.stderr
    return [(step, text) for texts in json.loads(done.stdout).values() for step, text in texts]


def test_no_finding_is_lost_to_another_whatever_their_steps(tmp_path: Path) -> None:
    """The server takes an earlier step, or the same, for a resume, and drops what it had of that tag."""
    first = Finding("dead-units", "layer", 5, 12, layer="a", advice="Do `this`.", evidence={"share_dead": 0.9})
    second = Finding("lr-too-high", "lr", 3, 12, severity="critical", alternatives=("bad-data",))
    findings = [first, second, Finding("bad-data", "data", 1, 7), replace(first, until=12), replace(second, until=40)]
    sink = TensorBoard(tmp_path)
    for finding in findings:
        sink.alert(finding)
    sink.close()
    written = read(tmp_path)
    texts = [one for of_tag in written.texts.values() for one in of_tag]
    assert sorted(step for step, _ in texts) == [7, 12, 12, 12, 40] and "findings" in written.texts
    assert sorted(texts) == sorted(served(tmp_path, len(findings)))
    assert sum("**over**" in text for _, text in texts) == 2
    told = next(text for _, text in texts if "dead-units" in text and "over" not in text)
    assert all(words in told for words in ("warning", "`a`", "since step 5", "Do `this`.", "share dead 0.9"))
    assert any("critical: lr-too-high" in text and "or: bad-data" in text for _, text in texts)


def test_a_finding_can_be_read_before_the_sink_is_closed(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink.write(Record(3, 1e9, {"loss": 1.0}))
    sink.alert(Finding("lr-too-high", "lr", 3, 3))
    found = read(tmp_path)
    assert found.scalars == {"loss": [(3, 1.0)]} and len(found.texts["findings"]) == 1
    sink.close()


# The edges ------------------------------------------------------------------------------------------------------


def one_layer(name: str, values: list[float]) -> dict[str, LayerRows]:
    finite = np.array([value for value in values if np.isfinite(value)])
    row = dict.fromkeys(COLUMNS, 0.0) | {"count": len(values), "nans": float(np.isnan(values).sum())}
    row |= {"sum": finite.sum(), "sum_squares": (finite**2).sum()}
    row |= {"min": finite.min(initial=np.inf), "max": finite.max(initial=-np.inf)}
    rows = Rows(np.array([list(row.values())]), Histograms.of([np.array(values, np.float32)]))
    return {"gradient": LayerRows((name,), rows)}


def test_a_record_without_anything_writes_nothing(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = TensorBoard(tmp_path)
    sink.write(Record(0, 0.0))
    sink.close()
    (file,) = tmp_path.iterdir()
    assert [event.WhichOneof("what") for event in EventFileLoader(str(file)).Load()] == ["file_version"]


def test_values_that_are_not_finite_are_told_and_harm_no_histogram(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    nan = float("nan")
    sink.write(Record(0, 0.0, {"loss": nan, "huge": 1e300, "inf": float("-inf")}, one_layer("a", [nan, nan])))
    sink.write(Record(1, 0.0, rows=one_layer("a", [nan, 0.0, 1.5, -3.0])))
    sink.close()
    found = read(tmp_path)
    assert np.isnan(found.scalars["loss"][0][1])
    assert found.scalars["huge"] == [(0, np.inf)] and found.scalars["inf"] == [(0, -np.inf)]
    ((step, histogram),) = found.histograms["gradients_hist/a"]
    assert (step, histogram.num, histogram.min, histogram.max) == (1, 3, -3.0, 1.5)


def test_names_that_no_event_file_can_hold_are_written_out(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink.write(Record(0, 0.0, {"\ud800loss\x1b[31m": 1.0}, one_layer("a\x00\u202e", [1.0])))
    sink.alert(Finding("dead-units", "layer", 0, 0, layer="a`\x00\ud800", advice="\ud800"))
    sink.close()
    found = read(tmp_path)
    assert found.scalars["\\ud800loss\\x1b[31m"] == [(0, 1.0)]
    assert list(found.histograms) == ["gradients_hist/a\\x00\\u202e"]
    assert "`a \\x00\\ud800`" in found.texts["findings"][0][1]


def test_a_resume_takes_the_place_of_the_steps_that_it_takes_again(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    for segment, steps in ((0, range(5)), (1, range(3, 6))):
        for step in steps:
            sink.write(Record(step, 0.0, {"loss": 10.0 * segment + step}, segment=segment))
    sink.close()
    assert read(tmp_path).scalars["loss"] == [(0, 0.0), (1, 1.0), (2, 2.0), (3, 13.0), (4, 14.0), (5, 15.0)]


def test_closing_twice_is_fine_and_writing_afterwards_raises(tmp_path: Path) -> None:
    sink = TensorBoard(tmp_path)
    sink.close()
    sink.close()
    with pytest.raises(OSError, match="closed"):
        sink.write(Record(0, 0.0, {"loss": 1.0}))


def test_arguments_that_cannot_work_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    makes: list[Callable[[], Sink]] = [
        lambda: TensorBoard(tmp_path, layers=-1),
        lambda: TensorBoard(tmp_path, layers="some"),
        lambda: TensorBoard(tmp_path, every=0),
        lambda: TensorBoard(""),
        lambda: TensorBoard(7),  # type: ignore[arg-type]
        lambda: TensorBoard(tmp_path / "file" / "below"),
    ]
    for make_sink in makes:
        with pytest.raises(ValueError, match="give"):
            make_sink()


def test_without_the_package_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ImportError, match=r"pip install 'holter\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_tensorboard_is_imported_only_for_a_sink_and_torch_never(tmp_path: Path) -> None:
    code = (
        "import sys, holter.sinks.tensorboard as module\n"
        "assert 'tensorboard' not in sys.modules\n"
        f"module.TensorBoard({str(tmp_path)!r}).close()\n"
        "assert 'tensorboard' in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=110)
