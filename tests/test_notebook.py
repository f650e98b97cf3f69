"""What a notebook shows of a Monitor, a Run and a Finding: parsed as a browser would, and held against the run."""

from __future__ import annotations

import base64
import html
import re
import struct
import zlib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holter
from holter import notebook
from holter.diagnosis.finding import Finding
from holter.journal import Journal
from holter.notebook import finding_html, monitor_html, run_html
from holter.record import Ending, LayerRows, Record
from holter.report.strip_svg import Strip, strip_svg
from holter.report.verdict import verdict_of
from holter.run import journal_path, write_info
from holter.statistics.rows import COLUMNS, Rows
from tests import sick_trainings
from tests.hostile_names import hostile_names
from tests.sick_trainings import Net, batches

HOSTILE = ["<" * 65536, "\n" * 1000, *hostile_names()]
ELEMENTS = {"div", "span", "b", "p", "svg", "g", "image", "text", "path", "rect", "circle", "title"}


@dataclass
class Page(HTMLParser):
    """Elements, attributes and text of a page; faults are what could run, load or break out."""

    shown: str
    text: str = ""
    faults: list[str] = field(default_factory=list)
    images: list[str] = field(default_factory=list)
    open: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.shown)
        self.close()
        self.faults += [f"{tag} is not closed" for tag in self.open]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ELEMENTS:
            self.faults.append(f"element {tag}")
        for name, value in attributes:
            if name.startswith("on") or name in ("src", "srcdoc", "action") or "script:" in (value or ""):
                self.faults.append(f"attribute {name}")
            if name == "href":
                self.images.append(value or "")
                if not (value or "").startswith("data:image/png;base64,"):
                    self.faults.append(f"href {value}")
            if name == "style" and ("url(" in (value or "") or "expression" in (value or "")):
                self.faults.append(f"style {value}")
        self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"closes {tag}")

    def handle_data(self, data: str) -> None:
        self.text += data
        if not data.isprintable():
            self.faults.append(f"text {data!r}")

    def handle_comment(self, data: str) -> None:
        self.faults.append("a comment")


def pixels(uri: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[rows, columns, RGB] of a PNG of 8 bits with a palette, read by hand."""
    data, place, chunks = base64.b64decode(uri.partition(",")[2]), 8, dict[bytes, bytes]()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    while place < len(data):
        length, kind = struct.unpack(">I4s", data[place : place + 8])
        chunks[kind] = data[place + 8 : place + 8 + length]
        (checksum,) = struct.unpack(">I", data[place + 8 + length : place + 12 + length])
        assert checksum == zlib.crc32(kind + chunks[kind])
        place += 12 + length
    width, height = struct.unpack(">II", chunks[b"IHDR"][:8])
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
    return np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)[lines[:, 1:]]


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return sick_trainings.repeated_batch(tmp_path_factory.mktemp("runs") / "sick")


# A run, a finding, a monitor ------------------------------------------------------------------------------------


def test_a_run_shows_its_verdict_its_strip_and_its_findings(sick: Path) -> None:
    """Issue 7, 5"""
    run = holter.open_run(sick)
    page = Page(run._repr_html_())
    findings = run.findings
    assert findings and not page.faults
    assert verdict_of(findings, run.state, len(run.history)).sentence in page.text
    for finding in findings:
        assert finding.cause in page.text and finding.advice in page.text
    for layer in run.history.layers("gradient"):
        assert layer in page.text
    assert len(page.images) == 2  # the cells, and the shades of the legend


def test_a_finding_shows_itself(sick: Path) -> None:
    finding = holter.open_run(sick).findings[0]
    page = Page(finding._repr_html_())
    assert not page.faults
    assert finding.severity in page.text and f"since step {finding.since}" in page.text and finding.advice in page.text


@pytest.mark.parametrize("stored", [True, False])
def test_a_monitor_shows_the_training_that_it_watches(stored: bool, tmp_path: Path) -> None:
    """While it trains, and after it; the training is not touched."""
    model, data = Net(), batches()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    monitor = holter.watch(model, optimizer, run=tmp_path / "r" if stored else False, budget=None)
    assert "No gradients have been measured yet" in Page(monitor._repr_html_()).text
    for _ in range(25):
        x, y = next(data)
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert monitor.flush()
    before, step = {name: value.clone() for name, value in model.state_dict().items()}, monitor.step
    page = Page(monitor._repr_html_())
    assert not page.faults and "25 steps" in page.text and "encoder.weight" in page.text and "(watching)" in page.text
    assert monitor.step == step and all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    monitor.close()
    assert re.search(r"monitor \(closed\).*, 25 steps", Page(monitor._repr_html_()).text)


def test_a_long_run_is_shown_without_reading_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A monitor keeps nothing of its journal in memory; a run that is too long to examine on sight says so."""
    write_info(tmp_path, {})
    journal = Journal(journal_path(tmp_path, 0, 0))
    for step in range(3000):
        journal.append(Record(step, 0.0, {}, {"gradient": rows(("a", "b"), [1.0, 2.0])}))
    journal.close()
    assert 500 < len(notebook._sampled(tmp_path, 0)) <= 2 * notebook._MOST_SAMPLED + 10
    page = Page(monitor_html(tmp_path, 0, (), (), "watching", 3000))
    assert not page.faults and "3,000 steps" in page.text and pixels(page.images[0]).shape[:2] == (2, 240)
    assert notebook._sampled(tmp_path, 1) == []
    monkeypatch.setattr(notebook, "_MOST_EXAMINED", 2999)
    assert "not examined" in Page(run_html(holter.open_run(tmp_path))).text


def test_a_monitor_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: neither for the writer nor for the diagnosis, which wait for the device."""
    model = Net()
    with holter.watch(model, torch.optim.SGD(model.parameters(), 0.1), run=False) as monitor:
        for name in ("flush", "history", "findings"):
            monkeypatch.setattr(holter.Monitor, name, property(lambda self: pytest.fail("it waits")))
        assert "Too early to say" in monitor._repr_html_()
        monkeypatch.undo()


def test_a_resumed_run_shows_the_line_that_survived(tmp_path: Path) -> None:
    write_info(tmp_path, {})
    for segment, (first, count, size) in enumerate([(0, 30, 1.0), (10, 10, 100.0)]):
        journal = Journal(journal_path(tmp_path, 0, segment))
        for step in range(first, first + count):
            journal.append(Record(step, 0.0, {}, {"gradient": rows(("a",), [size])}, segment=segment))
        journal.close()
    page = Page(holter.open_run(tmp_path)._repr_html_())
    assert "step 19" in page.text and "step 29" not in page.text
    assert pixels(page.images[0]).shape[:2] == (1, 20)


# Whatever it holds ----------------------------------------------------------------------------------------------


def rows(layers: tuple[str, ...], norms: list[float]) -> LayerRows:
    values = np.zeros((len(layers), len(COLUMNS)))
    values[:, COLUMNS.index("count")] = 1
    values[:, COLUMNS.index("sum_squares")] = np.square(norms)
    return LayerRows(layers, Rows(values))


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """P22: 500 strings as run, layer, cause, advice, evidence and error: markup, RTL, NUL, 64 KiB."""
    path = tmp_path / "<script>run\u202e"
    path.mkdir()
    write_info(path, {"model": HOSTILE[0]})
    journal = Journal(journal_path(path, 0, 0))
    for step in range(3):
        journal.append(
            Record(step, 0.0, {}, {"gradient": rows(tuple(HOSTILE), [1.0 + i for i in range(len(HOSTILE))])})
        )
    journal.append(Ending(0.0, "<b>failed", HOSTILE[1]))
    journal.close()
    assert not (faults := Page(run_html(holter.open_run(path))).faults), faults
    for name in HOSTILE:
        finding = Finding(
            name, "layer", 1, 2, layer=name, advice=name, evidence={name: name, "number": 1.0}, alternatives=(name,)
        )
        page = Page(finding_html(finding))
        assert not page.faults and len(page.shown) < 30_000, (name[:40], page.faults)
        strip = Strip([name, "b"], [0, 1, 2], np.ones((2, 3)))
        assert not (faults := Page(strip_svg(strip, [finding], name)).faults), (name[:40], faults)
    script = "<script>alert(1)</script>"
    assert script in Page(finding_html(Finding(script, "loop", 0, 0))).text
    assert Page(f"<div>{script}</div>").faults, "the gate would pass on anything"


@pytest.mark.parametrize("damage", ["run.json", "torn", "garbage", "empty"])
def test_a_damaged_run_shows_what_is_there(damage: str, tmp_path: Path) -> None:
    write_info(tmp_path, {})
    file = journal_path(tmp_path, 0, 0)
    journal = Journal(file)
    for step in range(5):
        journal.append(Record(step, 0.0, {}, {"gradient": rows(("a", "b"), [1.0, 2.0])}))
    journal.close()
    if damage == "run.json":
        (tmp_path / "run.json").write_text("{")
    elif damage == "torn":
        file.write_bytes(file.read_bytes()[:-7])
    else:
        file.write_bytes(b"" if damage == "empty" else b"\xff" * 100)
    page = Page(holter.open_run(tmp_path)._repr_html_())
    steps = {"run.json": 5, "torn": 4}.get(damage, 0)
    assert not page.faults and f"{steps} steps" in page.text


def test_what_cannot_be_shown_is_a_sentence(tmp_path: Path) -> None:
    """P1"""
    run = holter.open_run(sick_trainings.healthy(tmp_path / "r", steps=3))
    for file in (tmp_path / "r").iterdir():
        file.unlink()
    (tmp_path / "r").rmdir()
    page = Page(run._repr_html_())
    assert page.text == "This run could not be shown: FileNotFoundError." and not page.faults
    broken: Any = object()
    assert "the training goes on: TypeError" in monitor_html(None, 0, broken, (), "watching", 0)
    assert "the training goes on: FileNotFoundError" in monitor_html(tmp_path / "r", 0, (), (), "watching", 0)
    assert "could not be shown" in finding_html(broken)


def test_a_run_without_gradients_says_so(tmp_path: Path) -> None:
    write_info(tmp_path, {})
    assert "No gradients have been measured yet" in holter.open_run(tmp_path)._repr_html_()


# The strip ------------------------------------------------------------------------------------------------------


def test_the_strip_is_small_whatever_the_run() -> None:
    """Fewer than 150 kB: of 5,000 layers and 20,000 steps of noise, the worst there is for a picture."""
    noise = np.exp(np.random.default_rng(0).normal(size=(5000, 2000)) * 5)
    strip = Strip([f"layer.{i}.{'x' * 500}" for i in range(5000)], range(0, 20_000, 10), noise)
    findings = [Finding(f"cause-{i}", "loop", i, i, advice="x" * 9999) for i in range(500)]
    page = Page(strip_svg(strip, findings, "gradient norm"))
    assert len(page.shown.encode()) < 150_000 and not page.faults


def test_every_cell_has_the_colour_of_its_value() -> None:
    values = np.array([[1e-3, 1e-2, 1e-1, 1.0], [0.0, np.inf, np.nan, 1e3]])
    shown = pixels(Page(strip_svg(Strip(["a", "b"], [0, 1, 2, 3], values))).images[0])
    assert shown.shape == (2, 4, 3)
    brightness = shown[0].sum(axis=1)
    assert (np.diff(brightness.astype(int)) > 0).all(), "viridis gets lighter with the value"
    assert shown[1, 0].tolist() == [0x8A] * 3 and shown[1, 1].tolist() == [0xD8, 0x1B, 0x60]
    assert shown[1, 3].sum() > shown[0, 3].sum()


def test_a_finding_is_marked_at_its_onset_and_layer() -> None:
    strip = Strip(["encoder.weight", "head.weight"], [*range(100)], np.ones((2, 100)))
    shown = strip_svg(strip, [Finding("lr-jump", "layer", 50, 51, layer="head")])
    lines = [float(x) for x in re.findall(r'<path d="M([\d.]+) ', shown)]
    (image,) = re.findall(r'<image x="(\d+)" y="[\d.]+" width="(\d+)" height="([\d.]+)"', shown)[:1]
    left, width = float(image[0]), float(image[1])
    assert lines and all(abs(x - (left + width / 2)) < 1 for x in lines)
    rings = {float(y) for y in re.findall(r'<circle cx="[\d.]+" cy="([\d.]+)"', shown)}
    names = {html.unescape(text): float(y) for y, text in re.findall(r'y="([\d.]+)"[^>]*>([a-z.]+)</text>', shown)}
    assert len(rings) == 1 and abs(names["head.weight"] - rings.pop()) < 6
    assert "lr-jump since 50" in shown


def test_a_pointer_over_a_row_is_told_its_layer_and_its_course() -> None:
    values = np.array([[1.0, np.nan, 0.25], [0.0, np.inf, np.inf], [np.nan] * 3])
    shown = strip_svg(Strip(['<b>"a"', "b", "c"], [0, 5, 1000], values))
    told = [html.unescape(text) for text in re.findall(r"<title>(.*?)</title>", shown)]
    courses = ["1 at step 0 → 0.25 at step 1,000", "0 at step 0 → not finite at step 1,000", "not measured"]
    assert told == [f"{name}: {course}" for name, course in zip(['<b>"a"', "b", "c"], courses, strict=True)]
    rows = [
        (float(y), float(height)) for y, height in re.findall(r'<rect x="220" y="([\d.]+)".*?height="([\d.]+)"', shown)
    ]
    (image,) = re.findall(r'<image x="\d+" y="([\d.]+)" width="\d+" height="([\d.]+)"', shown)[:1]
    assert rows[0][0] == float(image[0]) and sum(height for _, height in rows[:3]) == pytest.approx(float(image[1]))
    many = strip_svg(Strip([f"layer.{i}" for i in range(1600)], [0], np.ones((1600, 1))))
    assert "<title>layer.0 and 9 more: 1 at step 0</title>" in many


def test_steps_that_were_not_measured_show_what_was_last_known() -> None:
    shown = pixels(Page(strip_svg(Strip(["a"], [0, 8], np.array([[1.0, 100.0]])))).images[0])
    assert shown.shape[1] == 9 and (shown[0, :8] == shown[0, 0]).all() and (shown[0, 8] != shown[0, 0]).any()


@pytest.mark.parametrize("values", [np.nan, 0.0, np.inf, -1.0, 1e-300, 1e300])
def test_a_strip_of_one_value_is_drawn(values: float) -> None:
    page = Page(strip_svg(Strip(["a"], [7], np.full((1, 1), values))))
    assert not page.faults and pixels(page.images[0]).shape[:2] == (1, 1)
    assert strip_svg(Strip([], [], np.zeros((0, 0)))) == ""
