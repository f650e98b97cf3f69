"""Hostile names through the answers of the dashboard: they stay names. In a real browser: test_dashboard_browser.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from holter.journal import Journal
from holter.run import journal_path
from tests.dashboards import Served, record, served, strict, write_run
from tests.hostile_names import file_names, hostile_names


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under each of 500 names, and one whose layers and metrics have them all."""
    root = tmp_path_factory.mktemp("named")
    for name in file_names(500):
        (root / name).mkdir()
        (root / name / "run.json").write_text("{}")
    names = hostile_names(500)
    path = write_run(root / "all-of-them", steps=0, layers=names, state="running", model=names[0], created=1.8e9)
    journal = Journal(journal_path(path, 0, 1))
    for step in range(3):
        journal.append(record(step, names, **dict.fromkeys(names, 1.0)))
    journal.close()
    return root


@pytest.fixture(scope="module")
def hostile(named: Path) -> Iterator[Served]:
    with served(named) as server:
        yield server


def test_500_hostile_run_names_are_listed_and_opened(hostile: Served, named: Path) -> None:
    """P22: what they are called in an address is plain, and what is shown of them has nothing invisible."""
    runs = hostile.get("/api/runs")["runs"]
    assert len(runs) == len(list(named.iterdir())) >= 500
    for run in runs:
        assert re.fullmatch(r"[A-Za-z0-9_~][A-Za-z0-9_.-]*", run["id"])
        assert run["name"].isprintable()
    for run in runs[::25]:
        assert hostile.get(f"/api/run/{run['id']}")["run"]["name"] == run["name"]


def test_500_hostile_layers_and_metrics_come_through_as_they_are(hostile: Served) -> None:
    """P22: as data, in ASCII, and found again by their names."""
    names = hostile_names(500)
    answer = hostile.client.get("/api/run/all-of-them?map=gradient/norm")
    view = strict(answer.text)
    assert answer.text.isascii() and answer.headers["content-type"] == "application/json"
    assert set(names) <= set(view["maps"][0]["layers"]) and set(names) <= set(view["scalars"])
    for name in (one for one in names if len(one) < 2000 and one == one.encode("utf-8", "replace").decode()):
        detail = hostile.get(f"/api/run/all-of-them/layer?layer={quote(name, safe='')}")
        assert detail["layer"] == name and detail["series"], name


def test_no_name_ever_stands_in_the_text_of_a_page(hostile: Served) -> None:
    """P22: pages are the same for every run; scripts come from files alone."""
    pages = {hostile.client.get(f"/run/{run['id']}").text for run in hostile.get("/api/runs")["runs"][:50]}
    assert len(pages) == 1
    for page in (*pages, hostile.client.get("/").text, hostile.client.get("/compare?run=<script>").text):
        assert "pwned" not in page and "<script>" not in page and "style=" not in page
        assert all(" src=" in tag for tag in re.findall(r"<script[^>]*>", page))
