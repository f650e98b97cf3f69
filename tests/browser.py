"""A real browser for tests: Debian's chromium, driven by Playwright. Where it is missing, tests are skipped."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

# What the policy of a page refuses is an error, also where the browser would only have counted it.
_WATCH_POLICY = """
document.addEventListener('securitypolicyviolation', (event) =>
  console.error(`refused by the policy: ${event.violatedDirective} ${event.blockedURI}`));
"""


_PATIENCE = 30.0  # seconds, where the machine is busy; nothing here waits that long


@contextmanager
def chromium() -> Iterator[Browser]:
    """One browser; a test skips with the reason where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        # Tests may run as root in a container, where chromium has no sandbox and little shared memory.
        browser = driver.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"]
        )
        yield browser
        browser.close()


class Visit:
    """A page that was opened, with everything that went wrong on it."""

    def __init__(self, page: Page, home: str) -> None:
        self.page = page
        self.home = home
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(f"{error}\n{error.stack}"))
        page.on("dialog", self._dismiss)
        page.on("request", lambda request: self.requests.append(request.url))

    def _dismiss(self, dialog: Dialog) -> None:
        self.errors.append(f"a dialog: {dialog.message}")
        dialog.dismiss()

    @property
    def outside(self) -> list[str]:
        """Requests to anything but the page itself (or the server that it came from)."""
        return [url for url in self.requests if not url.startswith((self.home, "data:", "blob:"))]

    @property
    def faults(self) -> list[str]:
        return [*self.errors, *(f"a request to {url}" for url in self.outside)]


@contextmanager
def visit(browser: Browser, url: str, home: str | None = None, **context: Any) -> Iterator[Visit]:
    """Opens a page in a context of its own: no storage and no theme of an earlier test. `home` is what its requests may
    begin with, the page itself where nothing is said; the rest are options of Playwright's contexts."""
    options: dict[str, Any] = {"viewport": {"width": 1280, "height": 900}, "reduced_motion": "reduce", **context}
    opened = browser.new_context(**options)
    try:
        page = opened.new_page()
        page.add_init_script(_WATCH_POLICY)
        page.set_default_timeout(_PATIENCE * 1000)
        found = Visit(page, home or url)
        page.goto(url)
        yield found
    finally:
        opened.close()


def wait_until(page: Page, expression: str) -> None:
    """Until it is true of the page, looking at every frame. Playwright's own way evaluates strings inside the page,
    which the policy of ours refuses."""
    deadline = time.monotonic() + _PATIENCE
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, f"never true: {expression}"
        page.evaluate("new Promise((done) => requestAnimationFrame(done))")


def tab_to(page: Page, selector: str, most: int = 200) -> None:
    """Presses Tab until the element has the focus; fails where the keyboard does not reach it."""
    for _ in range(most):
        if page.evaluate("(selector) => document.activeElement.matches(selector)", selector):
            return
        page.keyboard.press("Tab")
    raise AssertionError(f"{selector} is not reached by {most} presses of Tab")


def see_everything(page: Page) -> None:
    """Scrolls through the page until every chart is drawn."""
    wait_until(page, "window.Plotly")
    page.evaluate(
        """async () => {
          for (const plot of document.querySelectorAll('main .plot')) {
            if (!plot.checkVisibility()) continue;
            plot.scrollIntoView({behavior: 'instant', block: 'center'});
            while (!plot.querySelector('.main-svg')) await new Promise((done) => requestAnimationFrame(done));
          }
        }"""
    )


def fits(page: Page) -> bool:
    """Whether the page is no wider than the screen."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


def brightness(color: str) -> float:
    """Of a color as the browser computes it, `rgb(…)`: 0 to 255."""
    return sum(map(float, re.findall(r"[\d.]+", color)[:3])) / 3


def wait_for_fault(seen: Visit) -> None:
    """The browser reports in its own time: a few frames are given to it."""
    for _ in range(100):
        if seen.faults:
            return
        seen.page.evaluate("new Promise((done) => requestAnimationFrame(done))")
