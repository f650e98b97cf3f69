"""The charts of a run page in a real browser: the numbers in them, where training was resumed, what cannot be drawn."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from holter.report.document import report
from tests import strip_chart
from tests.browser import chromium, see_everything, visit, wait_until
from tests.page_views import matrix, scalar, scalars_view, wide_view

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

STRIP = "document.querySelector('.strip-chart .plot')"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


def write(path: Path, view: dict[str, Any]) -> str:
    path.write_text(report(view), "utf-8")
    return path.as_uri()


def test_values_in_half_the_bytes_are_read_as_they_were(browser: Browser, tmp_path: Path) -> None:
    """Positive, negative, zero, infinite and unknown ones; those too far apart; and what the keyboard is told."""
    columns = 30
    values = 10 ** np.random.default_rng(0).normal(-3, 2, (24, columns))
    values[3, ::2] *= -1
    values[4, :4] = [0, np.inf, -np.inf, np.nan]
    far = 10 ** np.linspace(-44, 38, 24 * columns).reshape(24, columns)
    view = wide_view(24, columns)
    view["maps"][0]["values"], view["maps"][1]["values"] = matrix(values), matrix(far)
    rows = "Array.from({length: 24}, (_, row) => Array.from(Holter.matrix(map.values).row(row), String))"
    with visit(browser, write(tmp_path / "page.html", view)) as seen:
        found = seen.page.evaluate(
            f"JSON.parse(document.getElementById('view').textContent).maps.map((map) => [map.values.dtype, {rows}])"
        )
        assert [kind for kind, _ in found] == ["log", "f4"]
        for (_, table), expected in zip(found, (values, far), strict=True):
            actual = np.array([[float(cell.replace("Infinity", "inf")) for cell in row] for row in table])
            np.testing.assert_allclose(actual, expected.astype(np.float32), rtol=5.1e-4)
        page = seen.page
        page.locator(".strip-chart").focus()
        wait_until(page, f"{STRIP}.data")
        page.keyboard.press("ArrowDown")
        said = page.locator(".readout").inner_text().rsplit(" ", 1)[1]
        assert float(said.replace(",", "")) == pytest.approx(values[0, -1], rel=6e-3)
        assert seen.faults == []


def shapes(page: Page, plot: str) -> list[tuple[int, str]]:
    found = page.evaluate(f"{plot}.layout.shapes.map((one) => [one.x0, one.line.dash])")
    return [(step, dash) for step, dash in found]


def test_where_training_was_resumed_is_marked_and_said(browser: Browser, tmp_path: Path) -> None:
    """Dotted and thin in every chart over steps, other than findings, which are dashed; and not where it never was."""
    view = wide_view(24, 30)
    view["run"] |= {"segments": 7, "resumed": [12, 30, 60, 90, 120, 150]}
    view["findings"][0]["since"] = 48
    with visit(browser, write(tmp_path / "page.html", view)) as seen:
        page = seen.page
        see_everything(page)
        for part in ("#curves", ".strip .legend"):
            said = page.locator(f"{part} .resumes").inner_text()
            assert said == "resumed from a checkpoint at step 12, 30, 60, 90 and 2 more"
        steps = view["run"]["resumed"]
        marked = shapes(page, "document.querySelector('#curves .plot')")
        assert marked == [*((step, "dot") for step in steps), (48, "dash")]
        dotted = page.evaluate(f"{STRIP}.data.filter((one) => one.line?.dash === 'dot').map((one) => one.x)")
        assert [[step for step in line if step is not None][::2] for line in dotted] == [steps]
        page.evaluate("(view) => Holter.showRun(view)", wide_view(24, 30))
        wait_until(page, "document.querySelectorAll('.resumes').length === 0")
        assert shapes(page, "document.querySelector('#curves .plot')") == [(600, "dash")]
        assert seen.faults == []


def test_findings_that_begin_side_by_side_share_a_label(browser: Browser, tmp_path: Path) -> None:
    """And what failed of Holter's own has none, and no line through the training."""
    view = wide_view(24, 30)
    first = view["findings"][0]
    starts = [(40, "layer"), (41, "layer"), (42, "monitor"), (90, "layer"), (40, "layer"), (89, "layer")]
    view["findings"] = [{**first, "since": since, "where": where} for since, where in starts]
    with visit(browser, write(tmp_path / "page.html", view)) as seen:
        see_everything(seen.page)
        labels = seen.page.evaluate(f"{STRIP}.layout.annotations.map((one) => [one.x, one.text])")
        assert labels == [[40, "1 5 2"], [89, "6 4"]]
        assert [step for step, _ in shapes(seen.page, "document.querySelector('#curves .plot')")] == [40, 41, 89, 90]


def test_a_curve_without_a_point_is_not_in_the_legend_but_told(browser: Browser, tmp_path: Path) -> None:
    """Of a training that became NaN, and of one whose gradients are all zero at the end."""
    layers = ["a.weight", "b.weight"]
    curves = [
        {"name": "first", "step": 0, "values": [1.0, 2.0]},
        {"name": "middle", "step": 1500, "values": [0.0, 0.0]},
        {"name": "last", "step": 3000, "values": [None, None]},
    ]
    view = scalars_view()
    view["flow"] = [
        {"id": "gradient", "title": "gradient norm by depth", "layers": layers, "log": True, "curves": curves},
        {"id": "activation", "title": "size", "layers": layers, "log": True, "curves": curves[2:]},
    ]
    with visit(browser, write(tmp_path / "page.html", view)) as seen:
        see_everything(seen.page)
        flow = seen.page.locator("#flow")
        assert seen.page.evaluate("document.querySelector('#flow .plot').data.map((one) => one.name)") == [
            "first, step 0"
        ]
        assert "Not drawn: middle, step 1,500: zero throughout; last, step 3,000: nothing finite." in flow.inner_text()
        gone = seen.page.locator("#activations")
        assert "Not drawn: last, step 3,000: nothing finite." in gone.inner_text() and not gone.locator(".plot").count()
        view["flow"] = [{**view["flow"][0], "curves": curves[1:2]}]
        seen.page.evaluate("(view) => Holter.showRun(view)", view)
        see_everything(seen.page)
        assert "Not drawn" not in flow.inner_text()  # on an axis that is not logarithmic zero has its place
        assert seen.faults == []


def test_what_was_also_logged_and_is_not_drawn_is_counted(browser: Browser, tmp_path: Path) -> None:
    view = scalars_view()
    view["scalars"] |= {f"mine_{place}": scalar(range(50), np.arange(50) + place) for place in range(30)}
    with visit(browser, write(tmp_path / "page.html", view)) as seen:
        assert seen.page.locator("#others .plot").count() == 24
        assert "6 more are not drawn." in seen.page.locator("#others").inner_text()
        assert seen.faults == []


def test_a_closer_look_that_could_not_read_everything_says_so(browser: Browser, tmp_path: Path) -> None:
    view = wide_view(24, 30)
    view["maps"][0]["thinned"] = [1500, 20000]
    with visit(browser, write(tmp_path / "page.html", view)) as seen:
        assert "24 layers, from 1,500 of 20,000 records" in seen.page.locator(".strip .row").inner_text()


@pytest.mark.parametrize("down", [0.0, 0.4], ids=["steps", "steps-and-rows"])
def test_a_drag_over_the_strip_chart_is_undone_by_the_button_and_by_a_double_click(
    browser: Browser, tmp_path: Path, down: float
) -> None:
    """P19: which opens no layer; a single click does, zoomed or not."""
    rows = f"{STRIP}._fullLayout.yaxis.range"
    with visit(browser, write(tmp_path / "page.html", wide_view(24, 101))) as seen:
        page = seen.page
        for undo in ("button", "double click"):
            strip_chart.drag(page, down)
            strip_chart.wait_for_zoom(page, 150, 300)
            assert (page.evaluate(rows) == [23.5, -0.5]) == (down == 0)
            if undo == "button":
                page.get_by_role("button", name="All steps").click()
            else:
                page.mouse.dblclick(*strip_chart.place(page, 0.7, 0.5))
            strip_chart.wait_for_all(page, 600)
            wait_until(page, f"String({rows}) === '23.5,-0.5'")
        strip_chart.wait_for_first_click(page)  # by then a single one would have acted
        assert page.locator(".panel").is_hidden()
        for is_zoomed in (False, True):
            if is_zoomed:
                strip_chart.drag(page, down)
                strip_chart.wait_for_zoom(page, 150, 300)
            strip_chart.click(page, 0.2, 0.5)
            page.keyboard.press("Escape")
        strip_chart.wait_for_zoom(page, 150, 300)
        assert seen.faults == []


def test_a_double_click_on_a_page_that_draws_for_long_opens_no_layer(browser: Browser, tmp_path: Path) -> None:
    with visit(browser, write(tmp_path / "page.html", wide_view(24, 101))) as seen:
        page = seen.page
        strip_chart.drag(page, 0.4)
        strip_chart.wait_for_zoom(page, 150, 300)
        # What a redraw of all charts takes on a slow machine, within the second click.
        page.evaluate("Holter.charts.onRange(() => { const end = Date.now() + 700; while (Date.now() < end); })")
        page.mouse.dblclick(*strip_chart.place(page, 0.7, 0.5))
        strip_chart.wait_for_all(page, 600)
        strip_chart.wait_for_first_click(page)
        assert page.locator(".panel").is_hidden() and seen.faults == []


def test_a_spike_does_not_flatten_the_rest_of_a_layer_that_became_zero(browser: Browser, tmp_path: Path) -> None:
    """P19: the panel has a logarithmic axis, with zero below all else; one without where values are alike or signed."""
    view = wide_view(24, 100)
    values = np.full((24, 100), 0.01)
    values[:, 50], values[:, 51:] = 40.0, 0.0
    view["maps"][0]["values"] = matrix(values)
    view["maps"][1]["values"] = matrix(np.linspace(1, 20, 100)[None] * np.ones((24, 1)))
    signed = {**view["maps"][1], "id": "update/cosine", "log": False, "values": matrix(values - 1)}
    view["maps"].append(signed)
    with visit(browser, write(tmp_path / "page.html", view)) as seen:
        page = seen.page
        page.locator("#layer-search").press("Enter")
        plots = "[...document.querySelectorAll('.panel .plot.series')]"
        wait_until(page, f"{plots}.length === 3 && {plots}.every((plot) => plot._fullLayout)")
        assert page.evaluate(f"{plots}.map((plot) => plot._fullLayout.yaxis.type)") == ["log", "linear", "linear"]
        drawn = page.evaluate(
            f"(({{data, layout}}) => ({{y: data.at(-1).y, text: data.at(-1).text, axis: layout.yaxis}}))({plots}[0])"
        )
        zero = drawn["axis"]["tickvals"][0]
        assert drawn["axis"]["ticktext"][0] == "0" and all(float(text) > 0 for text in drawn["axis"]["ticktext"][1:])
        assert drawn["y"][60] == zero < 0.01 == pytest.approx(drawn["y"][10], rel=1e-3)
        assert (drawn["text"][10], drawn["text"][50], drawn["text"][60]) == ("0.01", "40", "0")
        low, high = drawn["axis"]["range"]
        assert low < np.log10(zero) and (np.log10(0.01) - low) / (high - low) > 0.1
        assert seen.faults == []
