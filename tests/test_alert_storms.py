"""P23, P28: more findings than anyone can read are counted and told together, and none of them is lost."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import holter
from holter import alerts
from holter.diagnosis.finding import Finding
from tests import post_offices
from tests.models import differences
from tests.post_offices import HANGS, Told, WebServer, all_of, count, finding_at, unwatched, watched

web = post_offices.web


def _storm(post: Callable[[Finding], None], are_alike: bool) -> None:
    """10,000 findings, as fast as they can be posted."""
    for number in range(10_000):
        place = number % 100
        cause, others = (f"cause-{place % 40}", ()) if are_alike else (f"cause-{number}", (f"other-{number}",))
        severity = "critical" if number == 5000 else "warning"
        post(finding_at(number, severity, cause=cause, layer=f"h.{place}", alternatives=others))


def _check_storm(web: WebServer) -> SimpleNamespace:
    """The summary; every finding is counted once, in the titles and in the lines."""
    got = all_of(web.got)
    assert len(got) == alerts.MOST + 1 and web.requests == len(got)
    summary: SimpleNamespace = got[-1]
    assert sum(count(one.title) for one in got) == 10_000 and summary.type == "failure"
    lines = re.findall(r"^(?:critical: |warning: |and )([\d,]+) (?:x|of) ", summary.message, re.MULTILINE)
    assert sum(int(count.replace(",", "")) for count in lines) == 10_000 - alerts.MOST
    assert len(summary.message) < 3000
    return summary


@pytest.mark.parametrize("are_alike", [True, False])
def test_ten_thousand_findings_are_told_together_and_none_is_lost(web: WebServer, are_alike: bool) -> None:
    """P23, P28. Whatever came is forgotten again."""
    told = Told(web.alert())
    _storm(told.sink.alert, are_alike)
    told.sink.close()
    summary = _check_storm(web)
    cause = "cause-0" if are_alike else "cause-5000"
    other = "other causes" if not are_alike else cause
    assert f"\ncritical: 1 x {other}, the first in h.0 since step 5,000\nwarning: " in summary.message
    (one,) = told.sink._recipients
    assert max(len(one._news._known), len(one._news._leading)) <= alerts.MOST_KNOWN and not one._open
    assert sum(map(count, all_of(told.notes))) == 10_000 and not all_of(told.failed)


def test_ten_thousand_findings_leave_the_training_alone(web: WebServer, tmp_path: Path) -> None:
    """P1, P16, P23: found beside the training, while that goes on."""
    training = watched(tmp_path / "run", web.alert())
    storm = threading.Thread(target=_storm, args=(training.monitor._writer.alert, True))
    storm.start()
    for _ in range(100):
        training.step()
    storm.join()
    training.monitor.close()
    assert differences(unwatched(100), training) == []
    assert _check_storm(web).title == "Holter: 9,994 more findings, first of all cause-0 in h.0"
    assert training.monitor.findings == () and training.monitor.dropped == 0
    assert holter.open_run(tmp_path / "run").problems == []


def test_an_address_that_hangs_has_few_messages_waiting(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """P16: what is found meanwhile is counted, and told as such."""
    monkeypatch.setattr(alerts, "WINDOW_SECONDS", 0.0)
    monkeypatch.setattr(alerts, "CLOSE_SECONDS", 0.0)
    web.script = [HANGS]
    told = Told(web.alert())
    for step in range(1000):
        told.sink.alert(finding_at(step))
    assert len(told.sink._recipients[0]._open) == alerts.MOST_WAITING + 1
    told.sink.close()
    assert sum(map(count, all_of(told.notes))) == 1000 and len(all_of(told.failed)) == 1
    told.sink.alert(finding_at(2000))
    assert all_of(told.notes) == [
        "unconfirmed: alerts[0] (json) was closed already: warning: lr-jump in lr since step 2,000"
    ]


def test_the_summary_goes_out_once_there_is_room_for_it(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "WINDOW_SECONDS", 0.5)
    told = Told(web.alert())
    for step in range(alerts.MOST + 3):
        told.sink.alert(finding_at(step))
    titles = [web.take().title for _ in range(alerts.MOST + 1)]
    assert titles[-1] == "Holter: 3 more findings, first of all lr-jump in lr" and "more" not in "".join(titles[:-1])
    told.sink.alert(finding_at(99))
    assert "since step 99" in web.take().title, "and then it goes on as before"
    told.sink.close()
