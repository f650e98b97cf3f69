"""The strip chart of a run page as a person handles it: dragged over, clicked, and what is seen in it then."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.browser import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Page

PLOT = "document.querySelector('.strip-chart .plot')"
# What plotly has drawn: the layout that it was given is written into by others too.
STEPS = f"{PLOT}._fullLayout.xaxis.range"


def place(page: Page, across: float, down: float) -> tuple[float, float]:
    """A place in the cells, as shares of their width and height."""
    box = page.locator(".strip-chart .nsewdrag").bounding_box()
    assert box is not None
    return box["x"] + across * box["width"], box["y"] + down * box["height"]


def see(page: Page) -> None:
    page.locator(".strip-chart").scroll_into_view_if_needed()
    page.locator(".strip-chart .nsewdrag").wait_for()


def grab(page: Page, down: float = 0.0) -> None:
    """Drags from a quarter of the steps to half of them, over `down` of the rows, and holds on."""
    see(page)
    page.mouse.move(*place(page, 0.25, 0.3))
    page.mouse.down()
    page.mouse.move(*place(page, 0.5, 0.3 + down), steps=5)


def drag(page: Page, down: float = 0.0) -> None:
    grab(page, down)
    page.mouse.up()
    wait_for_first_click(page)


def click(page: Page, across: float, down: float) -> None:
    """Opens a layer."""

    def attempt() -> None:
        wait_for_first_click(page)
        page.mouse.move(*place(page, across, down))
        page.mouse.click(*place(page, across, down))

    until_a_layer_opens(page, attempt)


def until_a_layer_opens(page: Page, attempt: Callable[[], None]) -> None:
    """While plotly draws, long on a busy machine, a click goes nowhere: then once more."""
    panel = page.locator(".panel")
    for _ in range(5):
        attempt()
        until = time.monotonic() + 5
        while time.monotonic() < until:
            if panel.is_visible():
                return
            page.wait_for_timeout(50)
    raise AssertionError("no layer opens")


def wait_for_first_click(page: Page) -> None:
    """Until plotly does not take the next click for the second of two."""
    wait_until(page, f"Date.now() - {PLOT}._mouseDownTime > Holter.charts.DOUBLE_CLICK")


def wait_for_zoom(page: Page, first: int, last: int) -> None:
    """Until only steps about those are seen."""
    near = 0.1 * (last - first)
    wait_until(page, f"Math.abs({STEPS}[0] - {first}) < {near} && Math.abs({STEPS}[1] - {last}) < {near}")


def wait_for_all(page: Page, last: int) -> None:
    wait_until(page, f"{STEPS}[0] <= 0 && {STEPS}[1] >= {last}")
