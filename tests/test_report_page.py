"""The page of a run in a real browser: what it says, what a click and a key do, and that it reaches for nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from holter.report.document import report, view_of
from tests.browser import brightness, chromium, fits, see_everything, tab_to, visit, wait_for_fault, wait_until
from tests.page_views import empty_view, hostile_view, scalars_view, wide_view
from tests.sick_trainings import Net, healthy, train
from tests.strip_chart import until_a_layer_opens

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

PHONE = {"width": 380, "height": 760}
CELLS = ".strip-chart .heatmaplayer image"
HOSTILE = (
    '<img src=x onerror="window.hurt = 1">',
    "</script><script>window.hurt = 1</script><!--",
    "\"';window.hurt = 1//`${window.hurt = 1}`",
    '<a href="javascript:window.hurt = 1">x</a><b>y</b><br>&lt;',  # plotly reads a little markup
    "layer\u202etxt.exe\u2066\u200f\x00\x1b[31m",
    "<svg onload=window.hurt=1>" + "a" * 65_536,
    "__proto__",
    "",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def sick(browser: Browser, folder: Path) -> str:
    """Of a training whose first layer dies at step 30."""
    torch.manual_seed(0)
    model = Net()

    def after(step: int) -> None:
        if step == 30:
            torch.nn.init.constant_(model.encoder.bias, -100.0)

    return write(folder / "sick.html", view_of(train(folder / "sick-run", model, steps=60, after=after)))


@pytest.fixture(scope="module")
def well(browser: Browser, folder: Path) -> str:
    torch.manual_seed(0)
    return write(folder / "well.html", view_of(healthy(folder / "well-run", steps=60)))


def write(path: Path, view: dict[str, Any]) -> str:
    path.write_text(report(view), "utf-8")
    return path.as_uri()


def see_strip(page: Page) -> None:
    page.locator(".strip-chart").scroll_into_view_if_needed()
    page.locator(CELLS).first.wait_for(state="attached")


def row_at(page: Page, layer: str) -> tuple[float, float]:
    """Where on the screen the row of a layer is: beside its label, in the middle of the strip chart."""
    see_strip(page)
    label = page.locator(".strip-chart .ytick text", has_text=layer).first
    label.scroll_into_view_if_needed()
    words, cells = label.bounding_box(), page.locator(".strip-chart .nsewdrag").bounding_box()
    assert words is not None and cells is not None
    return cells["x"] + cells["width"] / 2, words["y"] + words["height"] / 2


def open_row(page: Page, layer: str) -> None:
    until_a_layer_opens(page, lambda: page.mouse.click(*row_at(page, layer)))


def opened_layer(page: Page) -> str:
    page.locator(".panel").wait_for()
    return page.locator("#layer-title").inner_text()


def colors_of(page: Page) -> tuple[str, str]:
    """Of the page, and of the labels of its first chart."""
    page.locator("main .plot .xtick text").first.wait_for(state="attached")
    body = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return body, page.locator("main .plot .xtick text").first.evaluate("(node) => getComputedStyle(node).fill")


# What it says -----------------------------------------------------------------------------------------------------


def test_the_page_of_a_sick_run_says_what_is_wrong_since_when_and_what_to_change(browser: Browser, sick: str) -> None:
    """C14: no errors, and no request but for the file."""
    with visit(browser, sick) as seen:
        see_everything(seen.page)
        assert "critical" in seen.page.locator(".verdict .mark").inner_text().lower()
        assert "Dead ReLU in encoder since step 31." in seen.page.locator(".sentence").inner_text()
        card = seen.page.locator(".finding").inner_text()
        for words in ("Dead", "encoder", "since step 31", "confidence", "holter.replace_activations"):
            assert words in card
        assert seen.page.locator(".finding .plot .main-svg").count() > 0
        assert "step 31" in seen.page.locator("#events").inner_text()
        assert seen.faults == [] and seen.requests == [sick]


def test_the_page_of_a_healthy_run_says_so(browser: Browser, well: str) -> None:
    """C14"""
    with visit(browser, well) as seen:
        see_everything(seen.page)
        assert seen.page.locator(".verdict .mark").inner_text() == "Healthy"
        assert seen.page.locator("#findings").is_hidden()
        for part in ("layers", "curves", "flow", "activations", "machine", "health", "thresholds"):
            assert seen.page.locator(f"#{part}").is_visible(), part
        assert seen.faults == [] and seen.requests == [well]


def test_findings_are_marked_in_the_strip_chart(browser: Browser, sick: str) -> None:
    """A dashed line through all rows where it began, a mark in the row of the layer, and the number of the finding."""
    with visit(browser, sick) as seen:
        see_strip(seen.page)
        plot = seen.page.evaluate(
            "(({layout, data}) => ({layout, data}))(document.querySelector('.strip-chart .plot'))"
        )
        lines = [one for one in plot["data"] if one.get("line", {}).get("dash") == "dash"]
        labels = plot["layout"]["yaxis"]["ticktext"]
        assert [(one["x"][:2], one["y"][:2]) for one in lines] == [([31, 31], [-0.5, len(labels) - 0.5])]
        assert [note["text"] for note in plot["layout"]["annotations"]] == ["1"]
        marks = [(one["x"], [labels[row] for row in one["y"]]) for one in plot["data"] if one.get("mode") == "markers"]
        assert marks == [([31], ["encoder.weight"])]


@pytest.mark.parametrize(
    "view", [empty_view(), scalars_view(), {"run": {"name": "bare"}}], ids=["empty", "scalars", "bare"]
)
def test_a_run_with_little_in_it_still_has_a_page(browser: Browser, folder: Path, view: dict[str, Any]) -> None:
    with visit(browser, write(folder / "little.html", view)) as seen:
        see_everything(seen.page)
        assert view["run"]["name"] in seen.page.locator("h1").inner_text()
        assert "No layers were recorded" in seen.page.locator("#layers").inner_text()
        assert seen.page.locator("#curves .plot .main-svg").count() > 0 or not view.get("scalars")
        assert seen.faults == []


# What a click does ------------------------------------------------------------------------------------------------


def test_a_click_on_the_strip_chart_opens_that_very_layer(browser: Browser, sick: str) -> None:
    """With its series in every map and its histograms; before, the pointer is told layer, step and value."""
    with visit(browser, sick) as seen:
        page = seen.page
        for layer in ("encoder.weight", "branch.2.bias", "head.bias"):
            x, y = row_at(page, layer)
            page.mouse.move(x - 9, y)
            page.mouse.move(x, y)
            page.locator(".tip").wait_for()
            name, value = page.locator(".tip").inner_text().split("\n")
            assert name == layer and re.fullmatch(r"step \d+: [-\d.e]+", value)
            open_row(page, layer)
            assert opened_layer(page) == layer
            assert page.locator(".panel .plot.series").count() >= 5
            page.locator(".panel .plot.histogram").first.scroll_into_view_if_needed()
            page.locator(".panel .plot.histogram .heatmaplayer image").first.wait_for(state="attached")
            page.keyboard.press("Escape")
        assert seen.faults == []


def test_quick_clicks_on_two_rows_are_no_double_click(browser: Browser, sick: str) -> None:
    with visit(browser, sick) as seen:
        page = seen.page
        first, second = row_at(page, "encoder.weight"), row_at(page, "head.bias")

        def click_both() -> None:
            page.mouse.click(*first)
            page.keyboard.press("Escape")
            page.mouse.click(*second)

        until_a_layer_opens(page, click_both)
        assert opened_layer(page) == "head.bias" and seen.faults == []


def test_of_two_hundred_layers_one_is_found_by_its_name(browser: Browser, folder: Path) -> None:
    """Zero and not finite have colours of their own and a legend."""
    with visit(browser, write(folder / "wide.html", wide_view())) as seen:
        page = seen.page
        see_strip(page)
        cells = page.evaluate(
            "(({z}) => [z[10][150], z[20][400], z[9][5]])(document.querySelector('.strip-chart .plot').data[0])"
        )
        assert cells == [0, 1, None]
        said = page.locator(".strip .legend").inner_text()
        assert all(word in said for word in ("zero", "not finite", "not measured"))
        page.locator("#layer-search").fill("blocks.17.mlp")
        wait_until(page, "document.querySelector('.strip-chart .plot').data[0].z.length === 1")
        assert "1 of 200 layers" in page.locator(".strip .row").inner_text()
        page.locator("#layer-search").press("Enter")
        assert opened_layer(page) == "blocks.17.mlp.weight"
        page.locator("#layer-search").fill("no such layer")
        assert "No layer has this" in page.locator(".strip").inner_text()
        assert seen.faults == []


def test_charts_over_steps_are_zoomed_together(browser: Browser, sick: str) -> None:
    """By number, and by dragging in one of them."""
    ends = "[...document.querySelectorAll('#curves .plot')].map((one) => one._fullLayout.xaxis.range.map(Math.round))"
    with visit(browser, sick) as seen:
        page = seen.page
        see_everything(page)
        page.locator("[aria-label='first step']").fill("20")
        page.locator("[aria-label='last step']").fill("40")
        page.keyboard.press("Enter")
        wait_until(page, f"{ends}.every(([from, to]) => from === 20 && to === 40)")
        page.get_by_role("button", name="All steps").click()
        wait_until(page, f"{ends}.every(([from, to]) => from <= 0 && to >= 59)")
        page.locator("#curves .nsewdrag").first.scroll_into_view_if_needed()
        box = page.locator("#curves .nsewdrag").first.bounding_box()
        assert box is not None
        page.mouse.move(box["x"] + box["width"] * 0.25, box["y"] + 50)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 52, steps=5)
        page.mouse.up()
        wait_until(page, f"{ends}.every(([from, to]) => from > 12 && from < 18 && to > 27 && to < 33)")


# Keyboard, themes, widths -----------------------------------------------------------------------------------------


def test_the_keyboard_alone_opens_layers_switches_a_map_and_closes(browser: Browser, sick: str) -> None:
    with visit(browser, sick) as seen:
        page = seen.page
        wait_until(page, "window.Plotly")
        tab_to(page, ".chip[aria-label='update ratio']")
        page.keyboard.press("Enter")
        assert page.locator(".chip[aria-pressed=true]").get_attribute("aria-label") == "update ratio"
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "update ratio"
        tab_to(page, ".strip-chart")
        for _ in range(3):
            page.keyboard.press("ArrowDown")
        third, fourth = page.locator(".layer-list li").all_text_contents()[2:4]
        assert page.locator(".readout").inner_text().startswith(f"{third}, step ")
        page.keyboard.press("Enter")
        assert opened_layer(page) == third
        page.keyboard.press("Escape")
        assert page.locator(".panel").is_hidden()
        assert page.evaluate("document.activeElement.matches('.strip-chart')")
        tab_to(page, ".layers summary")
        page.keyboard.press("Enter")
        tab_to(page, ".layer-list li:nth-child(4) button")
        page.keyboard.press("Enter")
        assert opened_layer(page) == fourth
        assert seen.faults == []


def test_the_theme_follows_the_system_and_a_button(browser: Browser, sick: str) -> None:
    """Page and charts alike, and the choice outlives a reload."""
    found = {}
    for scheme, other in (("light", "dark"), ("dark", "light")):
        with visit(browser, sick, color_scheme=scheme) as seen:
            found[scheme] = colors_of(seen.page)
            tab_to(seen.page, ".theme")
            seen.page.keyboard.press("Enter")
            found[f"{other} by the button"] = colors_of(seen.page)
            if scheme == "light":
                seen.page.reload()
                assert colors_of(seen.page) == found["dark by the button"]
            assert seen.faults == []
    assert found["light"] == found["light by the button"] and found["dark"] == found["dark by the button"]
    assert brightness(found["light"][0]) > 200 > 100 > brightness(found["dark"][0])
    assert brightness(found["light"][1]) < brightness(found["dark"][1])


def test_a_phone_does_not_scroll_sideways(browser: Browser, well: str) -> None:
    with visit(browser, well, viewport=PHONE, has_touch=True, is_mobile=True) as seen:
        see_everything(seen.page)
        assert fits(seen.page)
        seen.page.touchscreen.tap(*row_at(seen.page, "head.bias"))
        assert opened_layer(seen.page) == "head.bias"
        assert fits(seen.page)
        assert seen.faults == []


def test_on_paper_every_chart_is_drawn_without_scrolling(browser: Browser, sick: str) -> None:
    with visit(browser, sick, color_scheme="dark") as seen:
        assert len(seen.page.pdf()) > 50_000
        undrawn = "[...document.querySelectorAll('main .plot')].filter((plot) => !plot.querySelector('.main-svg'))"
        assert seen.page.evaluate(f"{undrawn}.length") == 0
        assert seen.faults == []


# Updates in place -------------------------------------------------------------------------------------------------


def test_a_newer_view_keeps_what_the_reader_is_looking_at(browser: Browser, sick: str) -> None:
    """The map, the open layer, the place on the page and the focus; only what is new changes."""
    with visit(browser, sick) as seen:
        page = seen.page
        see_everything(page)
        page.locator(".chip[aria-label='update ratio']").click()
        open_row(page, "head.weight")
        place = "document.querySelector('.strip-chart').getBoundingClientRect().top"
        page.evaluate("document.querySelector('.chip[aria-pressed=true]').focus({preventScroll: true})")
        page.evaluate("window.kept = document.querySelector('.strip-chart .plot')")
        before = page.evaluate(place)
        page.evaluate(
            """() => {
              const view = JSON.parse(document.getElementById('view').textContent);
              view.run.steps = 61;
              view.verdict.sentence = 'Something else.';
              view.maps[0].title = 'changed';
              view.scalars.loss.values[59] = 77;
              Holter.showRun(view);
            }"""
        )
        assert page.locator(".sentence").inner_text() == "Something else."
        assert "61" in page.locator(".facts").first.inner_text()
        assert page.locator(".chip[aria-pressed=true]").get_attribute("aria-label") == "update ratio"
        assert opened_layer(page) == "head.weight"
        assert page.evaluate("window.kept === document.querySelector('.strip-chart .plot')")
        assert page.evaluate(place) == pytest.approx(before, abs=1)
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "update ratio"
        page.locator("#curves .plot").first.scroll_into_view_if_needed()
        wait_until(page, "document.querySelector('#curves .plot').data.at(-1).y[59] === 77")
        assert seen.faults == []


def test_what_the_view_only_names_is_fetched_when_it_is_chosen(browser: Browser, sick: str) -> None:
    """As on a dashboard: `loadMap` for a strip chart, `layerDetail` for a layer."""
    with visit(browser, sick) as seen:
        page = seen.page
        page.evaluate(
            """() => {
              const view = JSON.parse(document.getElementById('view').textContent);
              const last = view.maps.pop();
              view.more_maps = [{...last, values: undefined, layers: undefined, steps: undefined, title: 'fetched'}];
              window.asked = [];
              Holter.showRun(view, {
                loadMap: async (id) => { window.asked.push(id); return last; },
                layerDetail: async (layer) => { window.asked.push(layer); return {histograms: {}, series: [
                  {id: 'finer', title: 'a finer series', log: false, steps: [1, 2, 3], values: [1, 2, 3]}]}; },
              });
            }"""
        )
        page.locator(".chip[aria-label=fetched]").click()
        wait_until(page, "document.querySelector('.strip-chart .plot').data?.[0].z.length === 2")
        open_row(page, "inputs")
        page.locator(".panel figcaption", has_text="a finer series").wait_for()
        assert page.evaluate("window.asked") == ["batch/rms", "inputs"]
        assert seen.faults == []


# Hostile names ----------------------------------------------------------------------------------------------------


def test_a_hostile_name_stays_a_name(browser: Browser, folder: Path) -> None:
    """P22: in every text of the page, in its charts and in the panel of its layer; on a phone, where room is scarce."""
    view = hostile_view(HOSTILE[1])
    with visit(browser, write(folder / "hostile.html", view), viewport=PHONE) as seen:
        page = seen.page
        sent = json.loads(page.evaluate("document.getElementById('view').textContent"))
        assert {**sent, "maps": [{**one, "values": 0} for one in sent["maps"]]} == {
            **view,
            "maps": [{**one, "values": 0} for one in view["maps"]],
        }
        for name in HOSTILE:
            page.evaluate("(view) => Holter.showRun(view)", hostile_view(name))
            see_everything(page)
            page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
            page.locator(".layer-list button").first.click(force=True)
            opened_layer(page)
            assert not page.evaluate("window.hurt"), name[:80]
            assert page.locator("#page img, #page script, #page a[href^=javascript]").count() == 0
            assert "\u202e" not in page.locator("#page").inner_text()
            assert fits(page), name[:80]
            page.keyboard.press("Escape")
        assert seen.faults == []


# The gate itself --------------------------------------------------------------------------------------------------


def test_a_planted_fault_is_noticed(browser: Browser, well: str) -> None:
    """Errors, outside requests and what the policy refuses: none of them passes as a page without faults."""
    with visit(browser, well) as seen:
        wait_until(seen.page, "window.Plotly")
        assert seen.faults == []
        for fault in (
            "console.error('planted')",
            "throw new Error('planted')",
            "fetch('http://127.0.0.1:9/planted').catch(() => null)",
            "document.body.append(Object.assign(new Image(), {src: 'https://example.invalid/planted.png'}))",
            "document.body.setAttribute('style', 'color: red')",
            "document.body.append(Object.assign(document.createElement('script'), {textContent: '1'}))",
        ):
            seen.errors.clear()
            seen.requests.clear()
            seen.page.evaluate(f"() => {{ setTimeout(() => {{ {fault}; }}); }}")
            wait_for_fault(seen)
            assert seen.faults != [], fault


def test_an_outside_request_is_noticed_where_no_policy_refuses_it(browser: Browser, folder: Path) -> None:
    page = folder / "open.html"
    page.write_text("<!doctype html><title>open</title><img src='http://127.0.0.1:9/planted.png'>", "utf-8")
    with visit(browser, page.as_uri()) as seen:
        assert seen.outside == ["http://127.0.0.1:9/planted.png"]
