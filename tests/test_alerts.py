"""E25: alerts reach a real mail server and a real web server, once an incident, and never get in the training's way."""

from __future__ import annotations

import itertools
import queue
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holter
from holter import alerts, monitor
from holter.alert_words import Tally, message_of
from holter.alerts import Alert, Alerts, News
from holter.diagnosis.finding import Finding
from holter.glance import glance
from holter.problems import Complaint
from holter.sinks import Memory
from tests import test_examination
from tests.models import Training, differences, make
from tests.post_offices import DIES, FAILS, HANGS, PATIENCE, TAKES, WebServer, mail_server, refusing_port, web_server
from tests.test_examination import JUMP, Sick

FOUND = Finding(
    cause="dead-relu",
    where="layer",
    since=40,
    step=52,
    layer="encoder.3",
    evidence={"zero_share": 0.97, "kind": "ReLU"},
    advice="Lower the rate to 0.001.",
    alternatives=("vanishing-gradient",),
)


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(alerts, "PAUSES", (0.01, 0.02, 0.03))
    with web_server() as server:
        yield server


@pytest.fixture
def mail() -> Iterator[SimpleNamespace]:
    with mail_server() as server:
        yield server


class Told:
    """Alerts and what they say of their deliveries."""

    def __init__(self, *addresses: str | Alert) -> None:
        self.sent: queue.Queue[str] = queue.Queue()
        self.failed: queue.Queue[str] = queue.Queue()
        self.sink = Alerts(addresses)
        self.sink.begin(Path("runs/heron"), self.sent.put, self._failed)

    def _failed(self, where: str, error: BaseException) -> None:
        assert where == "send an alert" and isinstance(error, Complaint)
        self.failed.put(str(error))


def _all(got: queue.Queue[Any]) -> list[Any]:
    return [got.get_nowait() for _ in range(got.qsize())]


def _finding(step: int, severity: str = "warning", **more: Any) -> Finding:
    return Finding(**{"cause": "lr-jump", "where": "lr", "since": step, "step": step, "severity": severity, **more})


# What arrives --------------------------------------------------------------------------------------------------------


def test_a_mail_says_what_where_since_when_why_what_to_do_and_in_which_run(mail: SimpleNamespace) -> None:
    """E25. The layer's name would add a header of its own, if it could (P22)."""
    told = Told(f"mailto://127.0.0.1:{mail.port}?from=holter@here.example&to=me@there.example&mode=insecure")
    told.sink.alert(Finding(**{**vars(FOUND), "layer": "encoder\r\nBcc: thief@there.example"}))
    recipients, message = mail.got.get(timeout=PATIENCE)
    assert recipients == ["me@there.example"] and message["Bcc"] is None
    assert message["Subject"] == r"Holter: warning: dead-relu in encoder\r\nBcc: thief@there.example since step 40"
    body = message.get_body(("plain", "html")).get_content()
    for words in ("since step 40", "zero share 0.97", "kind ReLU", "Lower the rate to 0.001", "vanishing-gradient"):
        assert words in body
    assert str(Path("runs/heron").absolute()) in body
    assert told.sent.get(timeout=PATIENCE).startswith("sent to alerts[0] (mailto): warning: dead-relu in encoder")
    told.sink.close()
    assert not _all(told.failed)


def test_a_plain_web_address_gets_json_at_all_of_it(web: WebServer) -> None:
    told = Told(web.url("/hooks/a%20b?token=c%26d&x=", scheme="http", user="me:p%40ss@"))
    told.sink.alert(FOUND)
    got = web.take()
    assert got.path == "/hooks/a%20b?token=c%26d&x=" and got.headers["Authorization"] == "Basic bWU6cEBzcw=="
    assert got.title == "Holter: warning: dead-relu in encoder.3 since step 40" and got.type == "warning"
    assert got.message.startswith("dead-relu in encoder.3 since step 40. Warning.\n")
    told.sink.close()


def test_addresses_that_services_give_out_are_theirs() -> None:
    import apprise

    asset = apprise.AppriseAsset()
    slack = "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
    assert alerts._service(apprise, slack, asset).service_name == "Slack"
    assert alerts._service(apprise, "https://hooks.example/T1JJ3T3L2", asset).service_name == "JSON"


def test_who_redirects_gets_no_message(web: WebServer) -> None:
    """P23: a token is not handed on."""
    web.script = [307]
    told = Told(web.url())
    told.sink.alert(FOUND)
    assert told.failed.get(timeout=PATIENCE) and not _all(web.got)
    told.sink.close()


def test_each_address_is_told_what_is_severe_enough_for_it(web: WebServer) -> None:
    told = Told(web.url("/usual"), Alert(web.url("/grave"), "critical"), Alert(web.url("/all"), "info"))
    for step, severity in enumerate(("info", "warning", "critical")):
        told.sink.alert(_finding(step, severity))
    told.sink.alert(Finding("monitor-degraded", "monitor", 0, 0, severity="critical"))
    told.sink.close()
    got = [(one.path, one.type) for one in _all(web.got)]
    usual, grave = [("/usual", "warning"), ("/usual", "failure")], [("/grave", "failure")]
    everything = [("/all", "info"), ("/all", "warning"), ("/all", "failure")]
    assert sorted(got) == sorted([*usual, *grave, *everything])


def test_an_incident_is_told_once_when_it_gets_worse_and_when_it_is_over() -> None:
    news = News("warning")
    first = _finding(4, alternatives=("b",))
    assert news.take(first) and not news.take(first)
    led_by_another = _finding(6, cause="b", alternatives=("lr-jump", "c"))
    assert not news.take(led_by_another)
    worse = _finding(6, "critical", cause="b", alternatives=("lr-jump",))
    assert news.take(worse) and not news.take(first), "less severe again is no news"
    over = _finding(4, "critical", until=90)
    assert news.take(over) and not news.take(over) and not news.take(worse)
    assert news.take(_finding(200, alternatives=("b",))), "the next is another"
    assert not news.take(_finding(300, "info", until=310)) and news.take(_finding(300, until=400))


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\u202eb", "<script>x</script>\0", "x" * 65536, "=cmd|' /C calc'!A0"])
def test_names_cannot_do_anything_in_a_message(name: str) -> None:
    """P22."""
    hostile = _finding(1, layer=name, cause=name, evidence={name: name}, advice=name, alternatives=(name,))
    tally = Tally()
    tally.add(hostile)
    tally.add(hostile)
    for message in (message_of(hostile, Path("runs") / name), tally.message(Path("runs"))):
        assert message.title.isprintable() and all(line.isprintable() for line in message.text.splitlines())
        assert len(message.title) < 400 and len(message.about) < 400


# Servers that do not do their part -----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [[FAILS, TAKES], [DIES, TAKES], [FAILS, DIES, FAILS, TAKES]])
def test_what_is_not_taken_is_tried_again(web: WebServer, script: list[int]) -> None:
    web.script = script
    told = Told(web.url())
    told.sink.alert(FOUND)
    assert web.take().title.startswith("Holter: warning: dead-relu") and web.requests == len(script)
    told.sink.close()
    assert len(_all(told.sent)) == 1 and not _all(told.failed)


def test_what_is_never_taken_is_reported_and_the_others_get_theirs(web: WebServer) -> None:
    told = Told(f"json://127.0.0.1:{refusing_port()}?optional=yes", web.url())
    told.sink.alert(FOUND)
    assert web.take()
    words = told.failed.get(timeout=PATIENCE)
    assert words == "alerts[0] (json) did not take it in 4 tries: warning: dead-relu in encoder.3 since step 40"
    told.sink.close()
    assert _all(told.sent) == ["sent to alerts[1] (json): warning: dead-relu in encoder.3 since step 40"]


def _watched(run: Path, *addresses: str | Alert) -> Training:
    training = make("mlp")
    training.monitor = holter.watch(training.model, training.optimizer, run=run, alerts=addresses)
    return training


def _unwatched(steps: int) -> Training:
    training = make("mlp")
    for _ in range(steps):
        training.step()
    return training


@pytest.mark.parametrize("does", [HANGS, DIES, FAILS])
def test_a_server_that_never_answers_holds_up_neither_training_nor_close(
    web: WebServer, does: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, P15, P28: the training is the same to the bit, the end is told, and so is that nobody heard the alert."""
    monkeypatch.setattr(alerts, "PAUSES", (60.0,))
    web.script = [does]
    training = _watched(tmp_path / "run", web.url())
    for step in range(20):
        training.step()
        training.monitor._alert(_finding(step))
    began = time.monotonic()
    training.monitor.close()
    assert time.monotonic() - began <= 2.0
    assert differences(_unwatched(20), training) == []
    run = holter.open_run(tmp_path / "run")
    problems = [problem for problem in run.problems if problem.where == "send an alert"]
    assert problems and all(problem.what.startswith("alerts[0] (json) ") for problem in problems)
    assert run.state == "finished" and len(run.history) == 20
    assert any(finding.cause == "monitor-degraded" for finding in training.monitor.findings)


SCRIPT = """
import sys
from holter.alerts import Alerts
from holter.diagnosis.finding import Finding
Alerts([sys.argv[1]]).alert(Finding("lr-jump", "lr", 1, 2))
sys.stdin.readline()
"""


def test_a_process_ends_while_a_server_keeps_its_alert_waiting(web: WebServer) -> None:
    """P15: the address says to wait for an hour."""
    web.script = [HANGS]
    script = [sys.executable, "-c", SCRIPT, web.url("?rto=3600&cto=3600")]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert web.asked.wait(PATIENCE)
        assert process.communicate("end\n", timeout=PATIENCE)[1] == "" and process.returncode == 0


# Too many ------------------------------------------------------------------------------------------------------------


def test_ten_thousand_findings_leave_the_training_alone_and_are_told_together(web: WebServer, tmp_path: Path) -> None:
    """P23, P28."""
    training = _watched(tmp_path / "run", web.url())
    for step in range(100):
        training.step()
        for place in range(100):
            number = 100 * step + place
            severity = "critical" if number == 5000 else "warning"
            training.monitor._alert(_finding(number, severity, cause=f"cause-{place % 40}", layer=f"h.{place}"))
    training.monitor.close()
    assert differences(_unwatched(100), training) == []
    got = _all(web.got)
    assert len(got) == alerts.MOST + 1 and web.requests == len(got)
    summary = got[-1]
    assert summary.title == "Holter: 9,994 more findings, first of all cause-0 in h.0" and summary.type == "failure"
    assert "\ncritical: 1 x cause-0, the first in h.0 since step 5,000\nwarning: 300 x " in summary.message
    assert "other causes" in summary.message and len(summary.message) < 3000
    assert training.monitor.findings == () and training.monitor.dropped == 0


def test_the_summary_goes_out_once_there_is_room_for_it(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "WINDOW_SECONDS", 0.5)
    told = Told(web.url())
    for step in range(alerts.MOST + 3):
        told.sink.alert(_finding(step))
    titles = [web.take().title for _ in range(alerts.MOST + 1)]
    assert titles[-1] == "Holter: 3 more findings, first of all lr-jump in lr" and "more" not in "".join(titles[:-1])
    told.sink.alert(_finding(99))
    assert "since step 99" in web.take().title, "and then it goes on as before"
    told.sink.close()


# A training that goes wrong ------------------------------------------------------------------------------------------


def _deliveries(run: holter.Run) -> list[str]:
    return [record.notes["alerts"] for record in run.records if "alerts" in record.notes]


def test_a_jump_of_the_rate_is_told_while_it_trains_and_the_delivery_is_in_the_journal(
    web: WebServer, tmp_path: Path
) -> None:
    """E25, P28."""
    sick = Sick(tmp_path / "run", alerts=[web.url(), Alert(web.url("/grave"), "critical")])
    sick.train(JUMP + 20)
    sick.until_known()
    got = [web.take(), web.take()]
    assert sorted(one.path for one in got) == ["/", "/grave"]
    assert all(one.title == f"Holter: critical: lr-jump in lr since step {JUMP}" for one in got)
    assert f"Run: {tmp_path / 'run'}" in got[0].message and "The rate rose" in got[0].message
    sick.monitor.close()
    assert not _all(web.got), "once"
    run = holter.open_run(tmp_path / "run")
    assert sorted(_deliveries(run)) == [
        f"sent to alerts[{place}] (json): critical: lr-jump in lr since step {JUMP}" for place in (0, 1)
    ]
    assert run.state == "finished" and len(run.history) == JUMP + 20
    assert list(map(repr, run.findings)) == list(map(repr, sick.monitor.findings)), "notes change no diagnosis"


def test_it_is_told_that_a_trouble_is_over(web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E25: one broken batch, and nothing wrong any more."""
    sick = Sick(tmp_path / "run", alerts=[web.url()])
    sick.train(JUMP - 20)
    x, y = next(sick.data)
    sick.data = itertools.chain([(100 * x, y)], sick.data)
    sick.train(10)
    sick.until_known()
    assert web.take().title == f"Holter: warning: batch-corrupt in data since step {JUMP - 20}"
    monkeypatch.setattr(test_examination, "JUMP", -1)
    sick.train(150)
    sick.monitor.close()
    (over,) = _all(web.got)
    assert over.type == "success" and over.title.startswith("Holter: over: batch-corrupt in data from step")
    run = holter.open_run(tmp_path / "run")
    assert len(_deliveries(run)) == 2 and run.state == "finished"


def test_what_is_found_last_is_told_too_and_stands_in_the_journal(web: WebServer, tmp_path: Path) -> None:
    """P28: the run is so short that it is over before the diagnosis has looked."""
    sick = Sick(tmp_path / "run", alerts=[web.url()])
    sick.train(JUMP + 6)
    sick.monitor.close()
    assert [one.title for one in _all(web.got)] == [f"Holter: critical: lr-jump in lr since step {JUMP}"]
    run = holter.open_run(tmp_path / "run")
    assert len(_deliveries(run)) == 1
    assert (glance(run).state, glance(run).steps, run.state) == ("finished", JUMP + 6, "finished")


def test_only_the_first_process_tells_the_world(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "rank_of_process", lambda: 1)
    memory = Memory()
    sick = Sick(tmp_path / "run", alerts=[web.url()], sinks=[memory])
    sick.train(JUMP + 20)
    sick.monitor.close()
    assert [finding.cause for finding in sick.monitor.findings] == ["lr-jump"]
    assert web.requests == 0 and memory.records == []


# What makes no sense -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"alerts": "slack://x"}, "give a list of addresses"),
        ({"alerts": None}, "give a list of addresses"),
        ({"alerts": ["nothing://x"]}, r"alerts\[0\] \(nothing\): apprise can make nothing of this address"),
        ({"alerts": ["json://x"], "diagnose": False}, "alerts need the live diagnosis"),
        ({"alerts": ["json://x"], "budget": 0}, "alerts need the live diagnosis"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, Any], told: str, tmp_path: Path) -> None:
    training = make("mlp")
    with pytest.raises(ValueError, match=told):
        holter.watch(training.model, training.optimizer, **{"run": tmp_path / "run", **more})
    assert not (tmp_path / "run").exists()


def test_a_severity_that_does_not_exist_isrefusing_port() -> None:
    with pytest.raises(ValueError, match="least='loud': give one of 'info', 'warning', 'critical'"):
        Alert("json://x", "loud")


def test_without_apprise_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ImportError, match=r"pip install 'holter\[alerts\]'"):
        Alerts(["json://x"])
