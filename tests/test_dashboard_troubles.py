"""What the pages say when a run cannot be read, and that they go on when it can. In a real browser."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holter.journal import Journal
from holter.run import journal_path
from tests.browser import chromium, wait_until
from tests.dashboards import Served, record, served, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TOLD = "document.querySelector('.trouble:not([hidden])')?.textContent || ''"
# The server refuses whatever is asked about a run, for as long as a file is there.
REFUSING = """
import holter.dashboard.app as app
from holter.dashboard.bodies import complaint
of_run, events = app.Dashboard._of_run, app.Dashboard.events
def refuses(plain):
    async def answer(self, request, *words):
        if os.path.exists({flag!r}):
            return complaint(request, 500, "no more of this")
        return await plain(self, request, *words)
    return answer
app.Dashboard._of_run, app.Dashboard.events = refuses(of_run), refuses(events)
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@contextmanager
def opened(browser: Browser, server: Served, path: str = "/") -> Iterator[Page]:
    """A page, without a look at its console: a browser counts every refusal as an error there."""
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{server.address}/?token={server.token}")
    page.wait_for_selector(".run")
    page.goto(server.address + path)
    yield page
    context.close()


def steps_are(page: Page, steps: int) -> None:
    wait_until(page, f"/^{steps}$/m.test(document.querySelector('.facts')?.innerText || '')")


def test_a_run_that_goes_away_is_told_and_followed_again_when_it_is_back(browser: Browser, tmp_path: Path) -> None:
    """P18"""
    path = write_run(tmp_path / "runs" / "live", steps=25, state="running")
    with served(tmp_path / "runs") as server, opened(browser, server, "/run/live") as page:
        steps_are(page, 25)
        path.rename(tmp_path / "away")
        wait_until(page, f"({TOLD}).includes('What you see is as it was')")
        wait_until(page, "!document.querySelector('.pulse.live')")
        steps_are(page, 25)  # what was there is still to be seen
        (tmp_path / "away").rename(path)
        journal = Journal(journal_path(path, 0, 1))
        for step in range(25, 30):
            journal.append(record(step))
        journal.close()
        steps_are(page, 30)
        wait_until(page, f"({TOLD}) === ''")
        page.wait_for_selector(".pulse.live")


def test_a_server_that_refuses_is_told_and_asked_again(browser: Browser, tmp_path: Path) -> None:
    flag = tmp_path / "refuse"
    path = write_run(tmp_path / "runs" / "live", steps=25, state="running")
    refusing = REFUSING.format(flag=str(flag))
    with served(tmp_path / "runs", refusing) as server, opened(browser, server, "/run/live") as page:
        steps_are(page, 25)
        flag.touch()
        journal = Journal(journal_path(path, 0, 1))
        journal.append(record(25))
        wait_until(page, f"({TOLD}).startsWith('No more of this')")
        page.reload()
        page.wait_for_selector(".note >> text=no more of this")  # where nothing was seen before
        flag.unlink()
        steps_are(page, 26)
        journal.append(record(26))
        journal.close()
        steps_are(page, 27)
        wait_until(page, f"({TOLD}) === ''")


def test_a_single_refusal_of_a_run_that_is_over_does_not_stay(browser: Browser, tmp_path: Path) -> None:
    """Nothing more is heard of it: the page asks again by itself."""
    write_run(tmp_path / "runs" / "done", steps=25)
    flag = tmp_path / "refuse"
    refusing = REFUSING.format(flag=str(flag)).replace("refuses(events)", "events")
    with served(tmp_path / "runs", refusing) as server, opened(browser, server, "/run/done") as page:
        page.wait_for_selector(".verdict .mark:not(.unknown)")
        flag.touch()
        page.reload()
        page.wait_for_selector(".note >> text=no more of this")
        # It asks when it is opened, and when it first hears of the run.
        wait_until(
            page, "performance.getEntriesByType('resource').filter((one) => one.responseStatus === 500).length > 1"
        )
        flag.unlink()
        steps_are(page, 25)


def test_a_loss_that_is_lost_and_a_diagnosis_that_rests_stand_in_the_list(browser: Browser, tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", steps=3, state="running")
    journal = Journal(journal_path(path, 0, 1))
    journal.append(record(3, loss=math.nan))
    journal.close()
    without_worker = "from holter.dashboard import process; process._PROGRAM = 'x'"
    with served(tmp_path, without_worker) as server, opened(browser, server) as page:
        page.wait_for_selector(".figure >> text=not finite")
        wait_until(page, f"({TOLD}).includes('cannot be started')")
