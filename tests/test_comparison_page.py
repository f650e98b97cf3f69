"""A comparison as one file, in a real browser: its themes, a phone, and what of the disk it tells."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from PIL import Image

from holter.comparison.comparing import compare
from holter.comparison.document import comparison_page
from holter.comparison.view import comparison_view
from tests.browser import brightness, chromium, fits, see_everything, tab_to, visit
from tests.dashboards import Served, served, write_run
from tests.page_views import matrix
from tests.sick_trainings import healthy, repeated_batch

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BACKGROUND = "getComputedStyle(document.body).backgroundColor"
PAPER = "getComputedStyle(document.querySelector('.card')).backgroundColor"
# Whether two elements lie on each other.
OVERLAP = """([one, other]) => {
  const [a, b] = [one, other].map((name) => {
    const range = document.createRange();
    range.selectNodeContents(document.querySelector(name));
    return range.getBoundingClientRect();
  });
  return a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("a-place-of-mine")
    torch.manual_seed(0)
    long_name = "a-run-with-a-name-that-is-longer-than-a-phone-is-wide"
    return healthy(root / "well"), repeated_batch(root / long_name)


@pytest.fixture(scope="module")
def view(runs: tuple[Path, Path]) -> dict[str, Any]:
    return comparison_view(compare(*runs))


@pytest.fixture(scope="module")
def page(view: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("pages") / "compared.html", view)


def write(file: Path, view: dict[str, Any]) -> str:
    file.write_text(comparison_page(view), "utf-8")
    return file.as_uri()


def test_a_page_tells_names_and_no_paths(runs: tuple[Path, Path], view: dict[str, Any]) -> None:
    """P22: a page is shown to others: where its runs lie on a disk is none of their business."""
    text = json.dumps(view)
    assert runs[0].name in text and runs[1].name in text and "a-place-of-mine" not in text


def test_findings_are_called_as_people_read_them(view: dict[str, Any]) -> None:
    [pair] = view["pairs"]
    [found] = [one for one in pair["came"] if one["cause"] == "batch-repeated"]
    assert found["title"] == "the same batch again"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_theme_is_that_of_the_browser_until_the_button_is_pressed(browser: Browser, page: str, scheme: str) -> None:
    """P19: by the keyboard, charts and all; and it is kept."""
    with visit(browser, page, color_scheme=scheme) as seen:
        see_everything(seen.page)
        before = [brightness(seen.page.evaluate(what)) for what in (BACKGROUND, PAPER)]
        assert all((value > 128) == (scheme == "light") for value in before)
        button = seen.page.locator("button.theme")
        assert button.inner_text() == ("Dark theme" if scheme == "light" else "Light theme")
        tab_to(seen.page, "button.theme")
        seen.page.keyboard.press("Enter")
        after = [brightness(seen.page.evaluate(what)) for what in (BACKGROUND, PAPER)]
        assert all((value > 128) != (scheme == "light") for value in after)
        assert button.inner_text() == ("Light theme" if scheme == "light" else "Dark theme")
        assert not seen.faults
        seen.page.reload()
        assert (brightness(seen.page.evaluate(BACKGROUND)) > 128) != (scheme == "light")


def test_on_a_phone_nothing_is_covered(browser: Browser, page: str) -> None:
    with visit(browser, page, viewport={"width": 380, "height": 760}) as seen:
        see_everything(seen.page)
        assert fits(seen.page) and not seen.faults
        assert not seen.page.evaluate(OVERLAP, ["button.theme", "h1"])
        seen.page.evaluate("window.scrollTo(0, 400)")
        assert seen.page.evaluate("document.querySelector('button.theme').getBoundingClientRect().bottom < 0"), (
            "it goes"
        )


def edge(page: Page) -> tuple[float, float]:
    """How bright the right edge of the table of numbers is, and the middle of its left part: below its last line."""
    box = page.locator(".wide:has(.numbers)").bounding_box()
    assert box is not None
    picture = Image.open(BytesIO(page.locator(".wide:has(.numbers)").screenshot())).convert("L")
    height = int(box["height"]) - 10
    return float(picture.getpixel((int(box["width"]) - 5, height))), float(picture.getpixel((60, height)))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_a_phone_the_tables_of_two_runs_fit(
    browser: Browser, view: dict[str, Any], tmp_path: Path, scheme: str
) -> None:
    """P19: nothing is cut off where nothing says that there is more; names of layers have no spaces to break at."""
    [pair] = view["pairs"]
    layers = ", ".join(f"encoder.layers.{place}.self_attention.in_proj_weight" for place in range(6))
    setup = [{"what": "layers removed", "reference": layers, "other": "–", "since": 12_345}]
    page = write(tmp_path / "page.html", {**view, "pairs": [{**pair, "setup": setup}]})
    with visit(browser, page, viewport={"width": 380, "height": 760}, color_scheme=scheme) as seen:
        tables = seen.page.locator(".wide")
        assert tables.count() == 2
        for table in tables.all():
            assert table.evaluate("(box) => box.scrollWidth <= box.clientWidth")
        right, middle = edge(seen.page)
        assert right == middle, "a shadow, though there is no more"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_table_that_is_cut_off_shows_that_there_is_more(
    browser: Browser, view: dict[str, Any], tmp_path: Path, scheme: str
) -> None:
    """P19: of many runs on a phone: a shadow at the edge, until one has scrolled there."""
    rows = [{**row, "texts": row["texts"] * 4} for row in view["table"]]
    many = write(tmp_path / "many.html", {**view, "runs": view["runs"] * 4, "table": rows})
    with visit(browser, many, viewport={"width": 380, "height": 760}, color_scheme=scheme) as seen:
        table = seen.page.locator(".wide:has(.numbers)")
        assert table.evaluate("(box) => box.scrollWidth > box.clientWidth") and fits(seen.page)
        right, middle = edge(seen.page)
        assert abs(right - middle) > 10
        table.evaluate("(box) => { box.scrollLeft = 9999; }")
        right, middle = edge(seen.page)
        assert right == middle and fits(seen.page)
        last = table.locator("tr").nth(2).locator("td").last
        assert last.evaluate("(cell) => cell.getBoundingClientRect().right <= window.innerWidth")


# Which is the reference --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("served")
    for place, name in enumerate(("good", "b&d #2", "third")):
        write_run(root / name, steps=20 + 10 * place, created=1.79e9 + place)
    with served(root) as server:
        yield server


@pytest.mark.parametrize("width", [380, 1280])
def test_the_runs_are_swapped_by_the_keyboard_and_back(browser: Browser, server: Served, width: int) -> None:
    """E27: the older run may be the good one; whether a fix worked is asked from the other side."""
    with visit(
        browser,
        f"{server.address}/?token={server.token}",
        server.address,
        viewport={"width": width, "height": 800},
    ) as seen:
        page = seen.page
        page.wait_for_selector(".run")
        ids = {run["name"]: run["id"] for run in server.get("/api/runs")["runs"]}
        odd = ids["b&d #2"]
        page.goto(f"{server.address}/compare?run=good&run={odd}")
        for heading in ("good against b&d #2", "b&d #2 against good"):
            page.wait_for_selector(".swap a")
            tab_to(page, ".swap a")
            page.keyboard.press("Enter")
            page.wait_for_selector(f"h1 >> text={heading}")
            assert page.locator(".sides li").first.inner_text().startswith(heading.split(" against ")[1])
            assert fits(page)
        page.goto(f"{server.address}/compare?run=third&run=good&run={odd}")
        page.get_by_role("link", name="Reverse the order").click()
        page.wait_for_selector(".sides li:first-child >> text=b&d #2")
        assert not seen.faults


def test_a_file_offers_no_swap_that_it_could_not_do(browser: Browser, page: str) -> None:
    with visit(browser, page) as seen:
        assert seen.page.locator(".sides").count() == 1 and seen.page.locator(".swap").count() == 0


def test_the_gate_sees_a_button_that_lies_on_the_heading(browser: Browser, page: str) -> None:
    with visit(browser, page, viewport={"width": 380, "height": 760}) as seen:
        seen.page.evaluate("document.querySelector('h1').style.setProperty('padding', '0')")
        assert seen.page.evaluate(OVERLAP, ["button.theme", "h1"])


@pytest.mark.parametrize("is_told", [True, False])
def test_what_got_worse_is_said_once(browser: Browser, view: dict[str, Any], tmp_path: Path, is_told: bool) -> None:
    """P19: in a box of its own only where the sentence of the verdict leaves something out."""
    [pair] = view["pairs"]
    sentence = "Worse: lr-jump came; the training crashed." if is_told else "Worse: lr-jump came."
    verdict = {"state": "worse", "sentence": sentence, "regressions": ["lr-jump came", "the training crashed"]}
    with visit(browser, write(tmp_path / "page.html", {**view, "pairs": [{**pair, "verdict": verdict}]})) as seen:
        assert seen.page.locator(".verdict .sentence").inner_text() == sentence
        assert seen.page.locator(".pair .note").count() == (0 if is_told else 1)
        assert seen.page.locator("main").inner_text().count("the training crashed") == 1
        assert not seen.faults


@pytest.mark.parametrize("is_blank", [True, False])
def test_blank_cells_are_explained_where_there_are_any(
    browser: Browser, view: dict[str, Any], tmp_path: Path, is_blank: bool
) -> None:
    """P19"""
    [pair] = view["pairs"]
    values = np.full((len(pair["map"]["layers"]), len(pair["map"]["steps"])), -0.5)
    values[0, 0] = np.nan if is_blank else 0.5
    changed = {**pair, "parting": ["They part."], "map": {**pair["map"], "values": matrix(values)}}
    with visit(browser, write(tmp_path / "page.html", {**view, "pairs": [changed]})) as seen:
        caption = seen.page.locator("figure:has([data-chart=ratios]) figcaption").inner_text()
        assert "blue: smaller" in caption
        assert ("blank: zero, not finite or not measured in one of the two" in caption) == is_blank
        assert not seen.faults
