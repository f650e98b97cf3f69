"""`holter report`: one file that opens offline, whatever the run is called and whatever state it is in."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from holter.cli import main
from holter.journal import Journal
from holter.record import Record
from holter.report.document import embedded, report, view_of
from holter.run import journal_path
from tests import sick_trainings

HOSTILE = (
    "</script><script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"onload="alert(1)',
    "a\u2028b\u2029c",
    "\x1b[31mred",
    "\u202egpj.exe",
    "<!--",
    "é\ud800",
    "x" * 65536,
)


class _Elements(HTMLParser):
    """What a browser would find: elements with their attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self._open: tuple[str, dict[str, str | None]] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open = (tag, dict(attrs)) if tag in ("script", "style", "title") else None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.texts.append((*self._open, data))

    def handle_endtag(self, tag: str) -> None:
        self._open = None


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sick_trainings.dead_relu(tmp_path_factory.mktemp("runs") / "dead")


def _run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def test_the_report_is_one_file_that_reaches_out_to_nothing(sick: Path, tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    result = _run(sick, "-o", target)
    assert result.exit_code == 0, result.output
    assert "page.html" in result.output and "step" in result.output

    page = _Elements(target.read_text("utf-8"))
    for tag, attributes in page.found:
        for name in ("src", "href", "action", "data", "srcset"):
            assert (attributes.get(name) or "data:").startswith(("data:", "#")), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)


def test_only_what_is_in_the_file_may_run(sick: Path) -> None:
    """P22: a script without its hash in the policy is not run, and there is no way around it."""
    page = _Elements(report(view_of(sick)))
    policy = next(str(a["content"]) for tag, a in page.found if a.get("http-equiv") == "Content-Security-Policy")
    assert "unsafe-inline" not in policy and "unsafe-eval" not in policy and "default-src 'none'" in policy
    codes = [text for tag, attributes, text in page.texts if tag == "script" and "type" not in attributes]
    assert len(codes) >= 3
    for code in codes:
        assert base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() in policy


def test_the_data_in_the_page_is_the_view(sick: Path) -> None:
    view = view_of(sick)
    page = _Elements(report(view))
    data = next(text for tag, attributes, text in page.texts if attributes.get("type") == "application/json")
    assert json.loads(data) == json.loads(json.dumps(view))


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_names_stay_data(name: str, tmp_path: Path) -> None:
    """P22: as the names of scalars, models and, as far as a file system takes them, runs."""
    safe = re.sub(r"[/\0\ud800-\udfff]", "_", name)[:60]
    run = tmp_path / safe
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"model": name, "optimizers": [name], "versions": {name: name}}))
    journal = Journal(journal_path(run, 0, 0))
    text = name.encode("utf-8", "replace").decode()
    for step in range(3):
        journal.append(Record(step, 0.0, {"loss": 1.0, text: 2.0}))
    journal.close()

    view = view_of(run)
    page = _Elements(report(view))
    assert text in view["scalars"]
    harmless = _Elements(report({**view, "run": {**view["run"], "name": "x", "model": "x"}, "scalars": {}}))
    assert [tag for tag, _ in page.found] == [tag for tag, _ in harmless.found]
    result = _run(run, "-o", tmp_path / "page.html")
    assert result.exit_code == 0 and "\x1b" not in result.output and "\u202e" not in result.output


def test_data_cannot_end_its_element() -> None:
    for name in HOSTILE:
        text = embedded({"name": name})
        assert "<" not in text and "\u2028" not in text and json.loads(text) == {"name": name}


@pytest.mark.parametrize("state", ["empty", "no run", "missing"])
def test_what_cannot_be_shown_is_said_in_one_line(state: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    if state != "missing":
        run.mkdir()
    if state == "empty":
        (run / "run.json").write_text("{}")
    result = _run(run, "-o", tmp_path / "page.html")
    if state == "empty":
        assert result.exit_code == 0 and "Too early" in result.output
    else:
        assert result.exit_code == 1 and result.output.count("\n") == 1 and "holter" in result.output


def test_a_place_that_cannot_be_written_is_named(sick: Path, tmp_path: Path) -> None:
    result = _run(sick, "-o", tmp_path / "nowhere" / "page.html")
    assert result.exit_code == 1 and "-o" in result.output and "Traceback" not in result.output


def test_pictures_come_beside_the_page(sick: Path, tmp_path: Path) -> None:
    """C14"""
    result = _run(sick, "-o", tmp_path / "page.html", "--png")
    assert result.exit_code == 0, result.output
    pictures = list((tmp_path / "page-charts").glob("*.png"))
    assert {"loss.png", "gradient-flow.png"} <= {path.name for path in pictures}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


@pytest.mark.parametrize("package", ["plotly", "jinja2"])
def test_a_missing_package_is_named_with_the_way_out(package: str, sick: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from importlib.machinery import PathFinder
found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.split('.')[0] == {package!r} else found(name, *rest)
from holter.cli import main
main(['report', sys.argv[1], '-o', sys.argv[2]])
"""
    run = [sys.executable, "-c", code, str(sick), str(tmp_path / "page.html")]
    result = subprocess.run(run, capture_output=True, text=True)
    assert result.returncode == 1 and "holter[report]" in result.stderr and "Traceback" not in result.stderr


def test_reading_a_run_for_its_page_needs_no_torch(sick: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from holter.report.document import view_of; from pathlib import Path\nview_of(Path(sys.argv[1]))\n"
    )
    code += "assert not {'torch', 'plotly', 'jinja2', 'matplotlib'} & set(sys.modules)"
    result = subprocess.run([sys.executable, "-c", code, str(sick)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_gate_for_addresses_sees_one() -> None:
    page: Any = _Elements('<p><img src="https://example.org/x.png" onload="x()"></p>')
    assert page.found[1][1]["src"].startswith("https") and "onload" in page.found[1][1]
