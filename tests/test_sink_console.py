"""The console sink: findings as they come, lines of layers, and nothing in a name that a terminal would obey."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable

import numpy as np
import pytest

import holter
from holter.diagnosis.finding import Finding
from holter.history import History
from holter.record import LayerRows, Record
from holter.run import Run
from holter.send import send
from holter.sinks import Sink
from holter.sinks.console import Console
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows
from holter.words import number
from tests.models import make

STEPS = 46
DEAD = Finding("dead-units", "layer", 5, 12, layer="a.weight", advice="Lower the rate.", evidence={"share_dead": 0.9})
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


class Terminal(io.StringIO):
    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.writes.append(text)
        return super().write(text)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = tmp_path_factory.mktemp("console") / "run"
    training = make("transformer+dropout")
    training.optimizer.param_groups[0]["lr"] = 0.3  # updates that are out of proportion
    with holter.watch(
        training.model, training.optimizer, run=path, budget=None, histograms=5, diagnose=False
    ) as monitor:
        training.monitor = monitor
        for _ in range(STEPS):
            training.step()
    return holter.open_run(path)


def printed(run: Run, **arguments: int | str | None) -> str:
    stream = io.StringIO()
    sink = Console(stream, **arguments)  # type: ignore[arg-type]
    for record in run.records:
        sink.write(record)
    sink.close()
    return stream.getvalue()


def tables(text: str) -> dict[int, dict[str, list[str]]]:
    """By step and layer: the cells of its line."""
    found: dict[int, dict[str, list[str]]] = {}
    is_summary = False
    for line in text.splitlines():
        if header := re.match(r"holter  step ([\d,]+)", line):
            step, is_summary = int(header[1].replace(",", "")), False
            found[step] = {}
        is_summary = is_summary or line.startswith(" quantiles")
        cells = re.split(r"\s{2,}", line.strip())
        if line.startswith(" ") and not is_summary and cells[0] not in ("gradients", ""):
            found[step][cells[0]] = cells[1:]
    return found


def differences(text: str, history: History) -> list[str]:
    """Where the lines say something else than the journal."""
    steps, layers, norms = history.series("gradient", "norm")
    columns = [norms, history.series("gradient", "mean")[2], history.series("gradient", "std")[2]]
    looks, updated, ratios = history.series("update", "ratio")
    faults = []
    for step, lines in tables(text).items():
        at, last = list(steps).index(step), int(np.searchsorted(looks, step, side="right")) - 1
        for layer, cells in lines.items():
            ratio = ratios[last, updated.index(layer)]
            values = [number(float(column[at, layers.index(layer)])) for column in columns]
            mark = " !" if ratio > 0.1 or ratio < 1e-7 else ""
            expected = [*values, "–" if np.isnan(ratio) else number(float(ratio)) + mark]
            faults += [f"{step} {layer}: {cells}"] if cells[:4] != expected else []
            faults += [f"{step} {layer}: no word"] if mark and cells[4:] != ["update above 0.1"] else []
    return faults


def test_there_is_a_line_a_layer_every_so_many_steps(run: Run) -> None:
    """E1, E2: norm, mean, std and update ratio are the journal's; a ratio out of proportion is marked and named."""
    text = printed(run, every=20, layers="all")
    found = tables(text)
    assert list(found) == [0, 20, 40] and {len(lines) for lines in found.values()} == {26}
    assert differences(text, run.history) == [] and "update above 0.1" in text


@pytest.mark.parametrize(
    ("pattern", "planted"), [(r"step 20", "step 21"), (" !", "  "), ("above", "below"), ("0", "1")]
)
def test_lines_that_are_wrong_are_found(run: Run, pattern: str, planted: str) -> None:
    assert differences(printed(run, every=20, layers="all").replace(pattern, planted), run.history)


def test_lines_tell_the_loss_of_their_own_step_though_it_is_logged_after_it(run: Run) -> None:
    losses = dict(zip(*(column.tolist() for column in run.history.scalar("loss")), strict=True))
    found = re.findall(r"step (\d+)  loss (\S+)", printed(run, every=15))
    assert found == [(str(step), number(losses[step])) for step in (0, 15, 30, 45)]


def test_few_layers_are_shown_and_those_that_are_out_of_proportion(run: Run) -> None:
    """E2: the layer and the value are named, whichever layers were chosen."""
    found = tables(printed(run, every=20, layers=2))
    updated, ratios = run.history.series("update", "ratio")[1:]
    outside = {layer for layer, ratio in zip(updated, ratios[0].tolist(), strict=True) if ratio > 0.1}
    assert len(outside & found[0].keys()) >= 8 and "… and" in printed(run, every=20, layers=2)
    usual = [layer for layer, cells in found[40].items() if len(cells) == 4]
    assert len(found[40]) <= 10 and len(usual) <= 2


def test_the_layer_of_a_finding_joins(run: Run) -> None:
    stream = io.StringIO()
    sink = Console(stream, every=20, layers=0)
    sink.alert(Finding("dead-units", "layer", 1, 1, layer="body.layers.0.norm1.weight"))
    for record in run.records:
        sink.write(record)
    sink.close()
    assert all("body.layers.0.norm1.weight" in lines for lines in tables(stream.getvalue()).values())


def test_quantiles_are_summed_up_every_thousand_steps() -> None:
    """E3."""
    stream = io.StringIO()
    sink = Console(stream, every=100)
    values = np.linspace(-1, 3, 400)
    for step in range(0, 2101, 50):
        sink.write(Record(step, 0.0, rows=one_layer("a.weight", values)))
    sink.close()
    blocks = stream.getvalue().split("holter  step ")[1:]
    assert [block.split()[0] for block in blocks if "quantiles" in block] == ["0", "1,000", "2,000"]
    head, line = (line.split() for line in blocks[0].splitlines()[-3:-1])
    assert head == ["quantiles", "min", "p25", "p50", "p75", "p95", "p99", "max"] and line[0] == "a.weight"
    exact = np.quantile(values, [0, 0.25, 0.5, 0.75, 0.95, 0.99, 1], method="inverted_cdf")
    np.testing.assert_allclose([float(cell) for cell in line[1:]], exact, rtol=0.18)


def one_layer(name: str, values: np.ndarray, ratio: float | None = None) -> dict[str, LayerRows]:
    finite = values[np.isfinite(values)]
    row = dict.fromkeys(COLUMNS, 0.0) | {"count": len(values), "nans": float(np.isnan(values).sum())}
    row |= {"sum": finite.sum(), "sum_squares": (finite**2).sum(), "min": finite.min(), "max": finite.max()}
    rows = Rows(np.array([list(row.values())]), Histograms.of([values.astype(np.float32)]))
    updates = {} if ratio is None else {"update": LayerRows((name,), rows, {"ratio": np.array([ratio])})}
    return {"gradient": LayerRows((name,), rows), **updates}


@pytest.mark.parametrize(("ratio", "word"), [(0.11, "above"), (0.1, ""), (1e-7, ""), (9e-8, "below"), (0.0, "below")])
def test_updates_are_marked_beyond_the_limits_only(ratio: float, word: str) -> None:
    """E2."""
    stream = io.StringIO()
    sink = Console(stream, every=1)
    sink.write(Record(0, 0.0, rows=one_layer("a.weight", np.ones(3), ratio)))
    sink.close()
    line = next(line for line in stream.getvalue().splitlines() if "a.weight" in line)
    assert number(ratio) in line and (f"update {word}" in line and "!" in line if word else "!" not in line)


def test_values_that_are_not_finite_are_told() -> None:
    stream = io.StringIO()
    sink = Console(stream, every=1, layers=0)
    sink.write(Record(0, 0.0, {"loss": float("nan")}, one_layer("a.weight", np.array([np.nan, 1.0, np.nan]))))
    sink.close()
    assert "loss nan" in stream.getvalue() and re.search(r"a\.weight .* 2 not finite", stream.getvalue())


# Findings -------------------------------------------------------------------------------------------------------


def test_findings_are_printed_as_they_come_and_when_they_are_over() -> None:
    stream = io.StringIO()
    sink = Console(stream)
    sink.alert(DEAD)
    told = stream.getvalue()
    words = ("holter  dead-units in a.weight since step 5", "warning", "step 12", "Lower the rate.", "share dead 0.9")
    assert all(word in told for word in words) and "over" not in told
    sink.alert(Finding("dead-units", "layer", 5, 12, layer="a.weight", until=1030))
    assert "over: dead-units in a.weight since step 5, last seen at step 1,030\n" in stream.getvalue()
    sink.close()


def test_without_every_there_are_findings_only(run: Run) -> None:
    assert printed(run) == ""


def test_a_training_prints_what_is_wrong_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    training = make("mlp")
    training.optimizer.param_groups[0]["lr"] = 1.0
    with holter.watch(training.model, training.optimizer, run=False, budget=None, sinks=[Console()]) as monitor:
        training.monitor = monitor
        for _ in range(60):
            training.step()
    out, err = capsys.readouterr()
    causes = [finding.cause for finding in monitor.findings if finding.until is None]
    assert causes and out == "" and all(f"holter  {cause}" in err for cause in causes)


# The stream -----------------------------------------------------------------------------------------------------


def test_nothing_in_a_name_reaches_a_terminal_as_a_command() -> None:
    """P25: control and bidirectional characters are written out, and markup is text."""
    hostile = "a\x1b[2J\x07\r\n\u202e\x9b[bold]\ud800"
    for stream in (io.StringIO(), Terminal()):
        sink = Console(stream, every=1)
        sink.alert(Finding(hostile, "layer", 0, 0, layer=hostile, advice=hostile, evidence={hostile: hostile}))
        sink.alert(Finding(hostile, "layer", 0, 0, layer=hostile, until=3))
        sink.write(Record(0, 0.0, {"val_loss" + hostile: 1.0}, one_layer(hostile, np.ones(3), 0.5)))
        sink.close()
        # What is left after the colours and the cleaning of a line is harmless.
        text = re.sub(r"\r\x1b\[2K|\x1b\[[\d;]*m", "", stream.getvalue())
        assert not CONTROL.search(text) and text.count("\\x1b[2J") >= 6 and "[bold]" in text
        assert text.encode("utf-8")
    assert CONTROL.search(hostile), "the gate would pass on anything"


def test_a_terminal_gets_colours_and_a_clean_line_and_a_file_gets_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        Console(stream).alert(DEAD)
    assert terminal.getvalue().startswith("\r\x1b[2K") and "\x1b[33mdead-units" in terminal.getvalue()
    assert "\x1b" not in file.getvalue() and "\r" not in file.getvalue()
    monkeypatch.setenv("TERM", "dumb")
    dumb = Terminal()
    Console(dumb).alert(DEAD)
    assert "\x1b" not in dumb.getvalue()


def test_only_whole_lines_are_written_each_block_at_once(run: Run) -> None:
    terminal = Terminal()
    send(run, Console(terminal, every=10))
    assert len(terminal.writes) == 5 + len(run.findings) and all(text.endswith("\n") for text in terminal.writes)


@pytest.mark.parametrize("cells", [40, 60, 80, 100, 200])
def test_lines_fit_the_terminal(run: Run, cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """E1: at the usual width norm, mean and std are all there."""
    monkeypatch.setenv("COLUMNS", str(cells))
    terminal = Terminal()
    sink = Console(terminal, every=20)
    sink.alert(DEAD)
    send(run, sink)
    text = re.sub(r"\r\x1b\[2K|\x1b\[[\d;]*m", "", terminal.getvalue())
    assert max(map(len, text.splitlines())) <= cells
    titles = next(line for line in text.splitlines() if line.startswith(" gradients")).split()
    assert cells < 80 or titles == ["gradients", "norm", "mean", "std", "update", "ratio"]


def test_standard_error_is_looked_up_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    sink, replaced = Console(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", replaced)
    sink.alert(DEAD)
    assert "dead-units" in replaced.getvalue()
    monkeypatch.setattr(sys, "stderr", None)
    sink.alert(DEAD)


def test_a_stream_that_knows_few_letters_gets_them_written_out() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "ascii", errors="strict")
    Console(stream).alert(Finding("dead-units", "layer", 0, 0, layer="größe"))
    assert b"gr\\xf6\\xdfe" in raw.getvalue()


def test_closing_prints_what_waits_once_and_leaves_the_stream_open() -> None:
    stream = io.StringIO()
    sink = Console(stream, every=1)
    sink.write(Record(0, 0.0))
    sink.close()
    assert stream.getvalue() == "", "a record without anything"
    sink.write(Record(1, 0.0, {"loss": 0.5}))
    sink.close()
    sink.close()
    assert stream.getvalue() == "holter  step 1  loss 0.5\n" and not stream.closed


def test_arguments_that_cannot_work_are_refused_at_once() -> None:
    makes: list[Callable[[], Sink]] = [
        lambda: Console(every=0),
        lambda: Console(every=True),
        lambda: Console(every="10"),  # type: ignore[arg-type]
        lambda: Console(layers=-1),
        lambda: Console("stderr"),  # type: ignore[arg-type]
    ]
    for make_sink in makes:
        with pytest.raises(ValueError, match="give"):
            make_sink()
