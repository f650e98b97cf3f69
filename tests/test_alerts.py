"""E25: alerts reach a real mail server and a real web server, once an incident, and never get in the training's way."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import holter
from holter import alerts, monitor
from holter.alert_words import Tally, message_of
from holter.alerts import Alert, Alerts, News
from holter.diagnosis.finding import Finding
from holter.glance import glance
from holter.sinks import Memory
from tests import post_offices, test_examination
from tests.models import differences, make
from tests.post_offices import (
    DIES,
    FAILS,
    HANGS,
    PATIENCE,
    SLOW,
    TAKES,
    MailServer,
    Told,
    WebServer,
    all_of,
    count,
    deliveries,
    finding_at,
    refusing_port,
    unwatched,
    watched,
)
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

mail, web = post_offices.mail, post_offices.web


# What arrives --------------------------------------------------------------------------------------------------------


def test_a_mail_says_what_where_since_when_why_what_to_do_and_in_which_run(mail: MailServer) -> None:
    """E25. The layer's name would add a header of its own, if it could (P22)."""
    told = Told(mail.url())
    told.sink.alert(Finding(**{**vars(FOUND), "layer": "encoder\r\nBcc: thief@there.example"}))
    recipients, message = mail.take()
    assert recipients == ["me@there.example"] and message["Bcc"] is None
    assert message["Subject"] == r"Holter: warning: dead-relu in encoder\r\nBcc: thief@there.example since step 40"
    body = message.get_body(("plain", "html")).get_content()
    for words in ("since step 40", "zero share 0.97", "kind ReLU", "Lower the rate to 0.001", "vanishing-gradient"):
        assert words in body
    assert str(Path("runs/heron").absolute()) in body
    assert told.notes.get(timeout=PATIENCE).startswith("sent to alerts[0] (mailto): warning: dead-relu in encoder")
    told.sink.close()
    assert not all_of(told.failed)


def test_a_plain_web_address_gets_json_at_all_of_it(web: WebServer) -> None:
    told = Told(web.alert("/hooks/a%20b?token=c%26d&x=", scheme="http", user="me:p%40ss@"))
    told.sink.alert(FOUND)
    got = web.take()
    assert got.path == "/hooks/a%20b?token=c%26d&x=" and got.headers["Authorization"] == "Basic bWU6cEBzcw=="
    assert got.title == "Holter: warning: dead-relu in encoder.3 since step 40" and got.type == "warning"
    assert got.message.startswith("dead-relu in encoder.3 since step 40. Warning.\n")
    told.sink.close()


def test_each_address_is_told_what_is_severe_enough_for_it(web: WebServer) -> None:
    told = Told(web.alert("/usual"), web.alert("/grave", "critical"), web.alert("/all", "info"))
    for step, severity in enumerate(("info", "warning", "critical")):
        told.sink.alert(finding_at(step, severity))
    told.sink.alert(Finding("monitor-degraded", "monitor", 0, 0, severity="critical"))
    told.sink.close()
    got = [(one.path, one.type) for one in all_of(web.got)]
    usual, grave = [("/usual", "warning"), ("/usual", "failure")], [("/grave", "failure")]
    everything = [("/all", "info"), ("/all", "warning"), ("/all", "failure")]
    assert sorted(got) == sorted([*usual, *grave, *everything])


def test_an_incident_is_told_once_when_it_gets_worse_and_when_it_is_over() -> None:
    news = News("warning")
    first = finding_at(4, alternatives=("b",))
    assert news.take(first) and not news.take(first)
    led_by_another = finding_at(6, cause="b", alternatives=("lr-jump", "c"))
    assert not news.take(led_by_another)
    worse = finding_at(6, "critical", cause="b", alternatives=("lr-jump",))
    assert news.take(worse) and not news.take(first), "less severe again is no news"
    over = finding_at(4, "critical", until=90)
    assert news.take(over) and not news.take(over) and not news.take(worse)
    assert news.take(finding_at(200, alternatives=("b",))), "the next is another"
    assert not news.take(finding_at(300, "info", until=310)) and news.take(finding_at(300, until=400))


def test_an_incident_takes_in_neither_what_comes_much_later_nor_what_is_worse() -> None:
    """P28: a trouble that lasts is no reason to keep quiet about the next, though that may have the same cause."""
    news = News("warning")
    assert news.take(finding_at(12, "critical", cause="lr-too-high"))
    assert not news.take(finding_at(90, "critical", cause="lr-jump", alternatives=("lr-too-high",))), "the twin: soon"
    dead = {"cause": "dead-relu", "where": "layer", "alternatives": ("lr-too-high",)}
    assert news.take(finding_at(50_010, "critical", **dead))
    assert news.take(finding_at(60_000, "warning", cause="spike"))
    assert news.take(finding_at(60_001, "critical", cause="diverged", alternatives=("spike",)))


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\u202eb", "<script>x</script>\0", "x" * 65536, "=cmd|' /C calc'!A0"])
def test_names_cannot_do_anything_in_a_message(name: str) -> None:
    """P22."""
    hostile = finding_at(1, layer=name, cause=name, evidence={name: name}, advice=name, alternatives=(name,))
    tally = Tally()
    tally.add(hostile)
    tally.add(hostile)
    for message in (message_of(hostile, Path("runs") / name), tally.message(Path("runs"))):
        assert message.title.isprintable() and all(line.isprintable() for line in message.text.splitlines())
        assert len(message.title) < 400 and len(message.about) < 400


# Servers that do not do their part -----------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [[FAILS, TAKES], [DIES, TAKES], [FAILS, DIES, FAILS, TAKES], [DIES, SLOW]])
@pytest.mark.parametrize("kind", ["web", "mail"])
def test_what_is_not_taken_is_tried_again(kind: str, script: list[int], request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(kind)
    server.script = script
    told = Told(Alert(server.url(), private=True))
    told.sink.alert(FOUND)
    assert server.take() and told.notes.get(timeout=PATIENCE).startswith("sent to ")
    told.sink.close()
    assert server.requests == len(script) and not all_of(told.notes) and not all_of(told.failed)


@pytest.mark.parametrize("kind", ["web", "mail"])
def test_a_slow_server_gets_an_alert_once(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P28. It answers, only later than apprise by itself would wait."""
    from apprise import URLBase
    from apprise.plugins.email.base import NotifyEmail

    monkeypatch.setattr(URLBase, "socket_read_timeout", 0.05)
    monkeypatch.setattr(NotifyEmail, "socket_connect_timeout", 0.05)
    server = request.getfixturevalue(kind)
    server.script = [SLOW]
    told = Told(Alert(server.url(), private=True))
    told.sink.alert(FOUND)
    assert told.notes.get(timeout=PATIENCE).startswith("sent to alerts[0] ")
    told.sink.close()
    assert server.requests == 1 and server.got.qsize() == 1 and not all_of(told.failed)


def test_what_is_never_taken_is_reported_and_the_others_get_theirs(web: WebServer) -> None:
    told = Told(Alert(f"json://127.0.0.1:{refusing_port()}?optional=yes", private=True), web.alert())
    told.sink.alert(FOUND)
    assert web.take()
    words = told.failed.get(timeout=PATIENCE)
    about = "warning: dead-relu in encoder.3 since step 40"
    assert words == f"alerts[0] (json) did not confirm it in 4 tries (no connection, or no answer): {about}"
    told.sink.close()
    assert sorted(all_of(told.notes)) == [f"sent to alerts[1] (json): {about}", f"unconfirmed: {words}"]


def test_what_a_server_answered_is_told(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alerts, "PAUSES", ())
    web.script = [FAILS]
    told = Told(web.alert())
    told.sink.alert(FOUND)
    assert "did not confirm it in 1 try (it answered 5" in told.failed.get(timeout=PATIENCE)
    told.sink.close()


@pytest.mark.hurried
@pytest.mark.parametrize("does", [HANGS, DIES, FAILS])
@pytest.mark.parametrize("kind", ["web", "mail"])
def test_a_server_that_never_answers_holds_up_neither_training_nor_close(
    kind: str, does: int, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1, P15, P28: the training is the same to the bit, the end is told, and so is that nobody heard the alerts."""
    server = request.getfixturevalue(kind)
    monkeypatch.setattr(alerts, "PAUSES", (60.0,))
    server.script = [does]
    training = watched(tmp_path / "run", Alert(server.url(), private=True))
    for step in range(20):
        training.step()
        training.monitor._writer.alert(finding_at(step))
    began = time.monotonic()
    training.monitor.close()
    assert time.monotonic() - began <= 2.0
    assert differences(unwatched(20), training) == []
    run = holter.open_run(tmp_path / "run")
    notes = deliveries(run)
    assert len(notes) == alerts.MOST + 1 and sum(map(count, notes)) == 20, "each finding, once"
    assert all(note.startswith("unconfirmed: alerts[0] ") for note in notes)
    (problem,) = [problem for problem in run.problems if problem.where == "send an alert"]
    assert f"unconfirmed: {problem.what}" in notes
    assert run.state == "finished" and len(run.history) == 20
    assert any(finding.cause == "monitor-degraded" for finding in training.monitor.findings)


def test_all_that_is_never_taken_stands_in_the_journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P28: more than the hundred problems that a monitor keeps."""
    for name, value in {"PAUSES": (), "MOST": 1000, "MOST_WAITING": 1000}.items():
        monkeypatch.setattr(alerts, name, value)
    training = watched(tmp_path / "run", Alert(f"json://127.0.0.1:{refusing_port()}", private=True))
    training.step()
    for step in range(130):
        training.monitor._writer.alert(finding_at(step))
    training.monitor.close()
    run = holter.open_run(tmp_path / "run")
    known = re.findall(r"since step (\d+)", "".join(deliveries(run)))
    assert sorted(map(int, known)) == list(range(130)) and len(run.problems) == 1


SCRIPT = """
import sys
from holter.alerts import Alert, Alerts
from holter.diagnosis.finding import Finding
Alerts([Alert(sys.argv[1], private=True)]).alert(Finding("lr-jump", "lr", 1, 2))
sys.stdin.readline()
"""


def test_a_process_ends_while_a_server_keeps_its_alert_waiting(web: WebServer) -> None:
    """P15: the address says to wait for an hour."""
    web.script = [HANGS]
    script = [sys.executable, "-c", SCRIPT, web.url("?rto=3600&cto=3600")]
    with subprocess.Popen(script, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert web.asked.wait(PATIENCE)
        assert process.communicate("end\n", timeout=PATIENCE)[1] == "" and process.returncode == 0


# A training that goes wrong ------------------------------------------------------------------------------------------


def test_a_jump_of_the_rate_is_told_while_it_trains_and_the_delivery_is_in_the_journal(
    web: WebServer, tmp_path: Path
) -> None:
    """E25, P28."""
    sick = Sick(tmp_path / "run", alerts=[web.alert(), web.alert("/grave", "critical")])
    sick.train(JUMP + 20)
    sick.until_known()
    got = [web.take(), web.take()]
    assert sorted(one.path for one in got) == ["/", "/grave"]
    assert all(one.title == f"Holter: critical: lr-jump in lr since step {JUMP}" for one in got)
    assert f"Run: {tmp_path / 'run'}" in got[0].message and "The rate rose" in got[0].message
    sick.monitor.close()
    assert not all_of(web.got), "once"
    run = holter.open_run(tmp_path / "run")
    assert sorted(deliveries(run)) == [
        f"sent to alerts[{place}] (json): critical: lr-jump in lr since step {JUMP}" for place in (0, 1)
    ]
    assert run.state == "finished" and len(run.history) == JUMP + 20
    assert list(map(repr, run.findings)) == list(map(repr, sick.monitor.findings)), "notes change no diagnosis"


def test_it_is_told_that_a_trouble_is_over(web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E25: one broken batch, and nothing wrong any more."""
    sick = Sick(tmp_path / "run", alerts=[web.alert()])
    sick.train(JUMP - 20)
    x, y = next(sick.data)
    sick.data = itertools.chain([(100 * x, y)], sick.data)
    sick.train(10)
    sick.until_known()
    assert web.take().title == f"Holter: warning: batch-corrupt in data since step {JUMP - 20}"
    monkeypatch.setattr(test_examination, "JUMP", -1)
    sick.train(150)
    sick.monitor.close()
    (over,) = all_of(web.got)
    assert over.type == "success" and over.title.startswith("Holter: over: batch-corrupt in data from step")
    run = holter.open_run(tmp_path / "run")
    assert len(deliveries(run)) == 2 and run.state == "finished"


def test_what_is_found_last_is_told_too_and_stands_in_the_journal(web: WebServer, tmp_path: Path) -> None:
    """P28: the run is so short that it is over before the diagnosis has looked."""
    sick = Sick(tmp_path / "run", alerts=[web.alert()])
    sick.train(JUMP + 6)
    sick.monitor.close()
    assert [one.title for one in all_of(web.got)] == [f"Holter: critical: lr-jump in lr since step {JUMP}"]
    run = holter.open_run(tmp_path / "run")
    assert len(deliveries(run)) == 1
    assert (glance(run).state, glance(run).steps, run.state) == ("finished", JUMP + 6, "finished")


def test_only_the_first_process_tells_the_world(
    web: WebServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "rank_of_process", lambda: 1)
    memory = Memory()
    sick = Sick(tmp_path / "run", alerts=[web.alert()], sinks=[memory])
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


def test_a_severity_that_does_not_exist_and_half_an_opt_in_are_refused() -> None:
    with pytest.raises(ValueError, match="least='loud': give one of 'info', 'warning', 'critical'"):
        Alert("json://x", "loud")
    with pytest.raises(ValueError, match="private='no': give True where"):
        Alert("json://x", private="no")  # type: ignore[arg-type]


def test_without_apprise_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "apprise", None)
    with pytest.raises(ImportError, match=r"pip install 'holter\[alerts\]'"):
        Alerts(["json://x"])
