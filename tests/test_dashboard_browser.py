"""The dashboard in a real browser: what a person sees, clicks and is kept from. Debian's chromium by Playwright."""

from __future__ import annotations

import http.server
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from holter.journal import Journal
from holter.record import Ending
from holter.run import journal_path
from tests import strip_chart
from tests.browser import chromium, tab_to, visit, wait_until
from tests.dashboards import Served, record, served, write_run
from tests.hostile_names import file_names, hostile_names

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("seen")
    write_run(root / "before", steps=40, layers=("h.0.attention.weight", "h.0.mlp.weight"), created=1.79e9)
    write_run(root / "after", steps=60, created=1.79e9 + 100)
    write_run(root / "ended", state="failed", created=1.79e9 + 50)
    (root / "damaged").mkdir()
    (root / "damaged" / "run.json").write_text("{")
    write_run(root / "noise", steps=5, created=1.79e9 - 50)
    (root / "noise" / "rank-0.journal").write_bytes(b"x" * 5000)
    return root


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Served]:
    with served(root) as server:
        yield server


@contextmanager
def visited(browser: Browser, server: Served, path: str = "/", **how: Any) -> Iterator[Page]:
    """A page as a first visit leads to it. Fails on errors in the console and on requests to anywhere else."""
    with visit(browser, f"{server.address}/?token={server.token}", server.address, **how) as visited:
        page = visited.page
        page.wait_for_selector(".run")
        if path != "/":
            page.goto(server.address + path)
        yield page
        assert page.evaluate("window.pwned") is None
        assert visited.faults == []


def names(page: Page) -> list[str]:
    return [node.inner_text() for node in page.query_selector_all(".run .name")]


def test_the_first_visit_leads_to_the_list_and_leaves_no_token_in_the_address(browser: Browser, server: Served) -> None:
    """P21"""
    with visited(browser, server) as page:
        assert page.url == f"{server.address}/"
        assert set(names(page)) == {"before", "after", "ended", "damaged", "noise"}
        assert names(page).index("after") < names(page).index("ended") < names(page).index("before")
        page.wait_for_selector(".run .mark:not(.unknown)")  # a verdict, as soon as it is known
        page.wait_for_selector(".run .spark path")
        row = page.locator(".run", has=page.get_by_role("link", name="noise"))
        assert row.locator(".mark.critical").inner_text().strip() == "Unreadable"
        assert "Nothing in its journals can be read" in row.inner_text()
        assert page.evaluate("document.cookie") == ""  # not for scripts


def test_runs_are_found_by_name_and_by_layer(browser: Browser, server: Served) -> None:
    with visited(browser, server) as page:
        page.fill("#search", "attention")
        wait_until(page, "document.querySelectorAll('.run').length === 1")
        assert names(page) == ["before"]
        page.wait_for_selector(".found >> text=h.0.attention.weight")
        page.fill("#search", "no such thing")
        page.wait_for_selector("text=No run fits.")
        page.fill("#search", "aft")
        wait_until(page, "document.querySelector('.run .name')?.textContent === 'after'")


def test_two_runs_that_are_ticked_are_compared(browser: Browser, server: Served) -> None:
    with visited(browser, server) as page:
        page.get_by_label("Compare before").check()
        page.get_by_label("Compare after").check()
        page.get_by_role("link", name="Compare 2 runs").click()
        page.wait_for_selector("h1 >> text=after against before")
        page.wait_for_selector("section.verdict .sentence")
        page.locator("[data-chart=loss]").scroll_into_view_if_needed()
        page.wait_for_selector("[data-chart=loss] svg.main-svg")
        page.get_by_role("link", name="All runs").click()
        page.wait_for_selector(".run")


def test_the_page_of_a_run_opens_a_layer_by_a_click_on_the_heat_map(browser: Browser, server: Served) -> None:
    with visited(browser, server, "/run/before") as page:
        page.wait_for_selector("h1 >> text=before")
        strip_chart.see(page)
        strip_chart.click(page, 0.5, 0.1)
        page.wait_for_selector(".panel:not([hidden]) .plot.series svg.main-svg")
        assert "h.0." in page.inner_text("#layer-title")
        page.keyboard.press("Escape")
        page.get_by_role("button", name=re.compile("^weight norm$|^norm$")).last.click()
        page.wait_for_selector('.strip .chip[data-key="map weight/norm"][aria-pressed="true"]')
        wait_until(page, "document.querySelector('.strip-chart svg.main-svg') !== null")


def test_a_live_run_moves_and_its_end_is_seen(browser: Browser, tmp_path: Path) -> None:
    path = write_run(tmp_path / "live", steps=0, state="running")
    journal = Journal(journal_path(path, 0, 1))
    journal.append(record(0))
    with served(tmp_path) as server, visited(browser, server, "/run/live") as page:
        page.wait_for_selector("h1 >> text=running")
        page.wait_for_selector(".pulse.live")
        for step in range(1, 26):
            journal.append(record(step))
        wait_until(page, "/^26$/m.test(document.querySelector('.facts')?.innerText || '')")
        before = page.locator("[data-chart=loss]").get_attribute("aria-label")
        for step in range(26, 31):
            journal.append(record(step))
        wait_until(page, "/^31$/m.test(document.querySelector('.facts')?.innerText || '')")
        assert page.locator("[data-chart=loss]").get_attribute("aria-label") != before
        journal.append(Ending(1.79e9, "finished"))
        journal.close()
        page.wait_for_selector("h1 >> text=finished")
        page.wait_for_selector(".verdict .mark:not(.unknown)")


def test_what_is_zoomed_of_a_live_run_stays_until_it_is_reset(browser: Browser, tmp_path: Path) -> None:
    """P20: new steps come in behind it, also while the mouse still drags."""
    path = write_run(tmp_path / "live", steps=0, state="running")
    journal = Journal(journal_path(path, 0, 1))
    done = 0

    def train(until: int) -> None:
        nonlocal done
        for step in range(done, until):
            journal.append(record(step))
        done = until

    def seen(page: Page) -> None:
        wait_until(page, f"/^{done}$/m.test(document.querySelector('.facts')?.innerText || '')")

    train(101)
    with served(tmp_path) as server, visited(browser, server, "/run/live") as page:
        page.wait_for_selector(".pulse.live")
        strip_chart.grab(page)
        train(111)
        seen(page)
        page.mouse.up()
        strip_chart.wait_for_zoom(page, 27, 55)  # what lay under the mouse in the end
        for until in (121, 131):
            train(until)
            seen(page)
            strip_chart.wait_for_zoom(page, 27, 55)
        page.get_by_role("button", name="All steps").click()
        strip_chart.wait_for_all(page, 130)
        train(141)
        strip_chart.see(page)
        strip_chart.wait_for_all(page, 140)


@pytest.mark.parametrize("path", ["/", "/run/before"])
def test_dark_and_light_by_the_system_and_by_the_button(browser: Browser, server: Served, path: str) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for scheme in ("light", "dark"):
        with visited(browser, server, path, color_scheme=scheme) as page:
            page.wait_for_selector("h1")
            page.wait_for_selector(".theme")
            before = page.evaluate(ground)
            page.click(".theme")
            seen[scheme] = before, page.evaluate(ground)
    assert seen["light"] == tuple(reversed(seen["dark"])) and seen["light"][0] != seen["light"][1]


@pytest.mark.parametrize("path", ["/", "/run/before", "/compare?run=before&run=after"])
def test_a_telephone_shows_it_without_scrolling_sideways(browser: Browser, server: Served, path: str) -> None:
    with visited(browser, server, path, viewport={"width": 380, "height": 800}) as page:
        page.wait_for_selector("h1")
        page.wait_for_selector("section.verdict, .run")
        assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_the_keyboard_reaches_everything_on_the_list(browser: Browser, server: Served) -> None:
    with visited(browser, server) as page:
        for reached in (".theme", "#search", ".chip[data-key=All]", "[aria-label='Compare after']"):
            tab_to(page, reached)
        page.keyboard.press("Space")
        tab_to(page, "[aria-label='Compare ended']")
        page.keyboard.press("Space")
        tab_to(page, "a[href^='/compare']")
        tab_to(page, "a.name[href='/run/before']")
        page.keyboard.press("Enter")
        page.wait_for_url("**/run/before")


def test_a_server_that_is_gone_is_told(browser: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "run", steps=3)
    with served(tmp_path) as server:
        page = browser.new_page()
        page.goto(f"{server.address}/?token={server.token}")
        page.wait_for_selector(".run")
        server.process.terminate()
        page.wait_for_selector("text=The dashboard does not answer")
        assert page.query_selector(".run")  # what was there is still to be seen
        page.close()


# Hostile -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("hostile-names")
    for name in file_names(500):
        (root / name).mkdir()
        (root / name / "run.json").write_text('{"model": "<img src=x onerror=window.pwned=1>"}')
    listed = hostile_names(500)
    for place in ("all", "others"):
        path = write_run(root / place, steps=0, layers=listed, state="running", model=listed[0], created=1.8e9)
        journal = Journal(journal_path(path, 0, 1))
        for step in range(3):
            journal.append(record(step, listed, **dict.fromkeys(listed, 1.0)))
        journal.append(Ending(1.79e9, "finished", error=listed[1]))
        journal.close()
    with served(root) as server:
        yield server


def test_500_hostile_names_of_runs_are_only_names(browser: Browser, hostile: Served) -> None:
    """P22: 0 scripts, 0 requests elsewhere."""
    with visited(browser, hostile) as page:
        while page.is_visible(".more"):
            page.click(".more")
        assert page.evaluate("document.querySelectorAll('.run').length") >= 500
        assert (
            page.evaluate("document.querySelectorAll('#page script, #page iframe, #page img, #page style').length") == 0
        )
        page.fill("#search", "<script>")
        wait_until(page, "document.querySelectorAll('.run').length < 500")


def test_500_hostile_names_of_layers_and_metrics_are_only_names(browser: Browser, hostile: Served) -> None:
    """P22"""
    with visited(browser, hostile, "/run/all") as page:
        page.locator(".strip-chart").scroll_into_view_if_needed()
        page.wait_for_selector(".strip-chart svg.main-svg")
        for place in range(12):
            page.evaluate(f"window.scrollTo(0, {place} * 900)")
        page.locator("details.layers summary").click()
        page.locator(".layer-list button").nth(3).click()
        page.wait_for_selector(".panel:not([hidden]) .plot.series svg.main-svg")
        assert page.evaluate("document.querySelectorAll('#page script, #page iframe, #page img').length") == 0
    with visited(browser, hostile, "/compare?run=all&run=others") as page:
        page.wait_for_selector("section.verdict .sentence")


@contextmanager
def another_site(page: str) -> Iterator[str]:
    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: Any) -> None:
            pass

    site = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site)
    threading.Thread(target=site.serve_forever, daemon=True).start()
    yield f"http://localhost:{site.server_port}/"
    site.shutdown()
    site.server_close()


ATTACK = """<body><script>
  const found = [];
  const loaded = (kind, node, path) => new Promise((done) => {
    node.onload = () => { found.push(kind); done(); };
    node.onerror = done;
    node.src = 'HOME' + path;
    document.body.append(node);
  });
  const fetched = (how) => fetch('HOME/api/runs', { credentials: 'include', ...how }).then((answer) => answer.text())
    .then((text) => { if (text) found.push('fetch ' + text); }, () => 0);
  const streamed = new Promise((done) => {
    const source = new EventSource('HOME/api/run/before/events', { withCredentials: true });
    source.onmessage = () => { found.push('stream'); done(); };
    source.onerror = () => { source.close(); done(); };
  });
  const framed = new Promise((done) => {
    const frame = document.createElement('iframe');
    frame.onload = () => { if (frame.contentWindow.length || frame.contentDocument) found.push('frame'); done(); };
    frame.src = 'HOME/';
    document.body.append(frame);
  });
  window.done = Promise.all([
    fetched({}), fetched({ mode: 'no-cors' }), fetched({ method: 'POST' }), streamed, framed,
    loaded('image', new Image(), '/static/icon.svg'),
    loaded('script', document.createElement('script'), '/static/dom.js'),
  ]).then(() => found);
</script>"""


def test_another_site_gets_nothing_although_the_browser_is_known(browser: Browser, server: Served) -> None:
    """P21: by fetch, image, script, frame and stream; from the same machine under another port."""
    attack = ATTACK.replace("HOME", server.address)
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{server.address}/?token={server.token}")
    page.wait_for_selector(".run")
    with another_site(attack) as site:
        page.goto(site)
        assert page.evaluate("window.done") == []
    context.close()


def test_the_printed_address_works_as_a_link_in_another_site(browser: Browser, server: Served) -> None:
    """As in the terminal of a notebook. A plain link, which brings no token, does not."""
    link = f'<a id=good href="{server.address}/?token={server.token}">x</a><a id=bare href="{server.address}/">y</a>'
    context = browser.new_context()
    page = context.new_page()
    with another_site(link) as site:
        page.goto(site)
        page.click("#bare")
        page.wait_for_selector("text=may not ask")
        page.goto(site)
        page.click("#good")
        page.wait_for_selector(".run")
        assert page.url == f"{server.address}/"
    context.close()
