"""P23: alerts go to public addresses by https, and inside a network only where that was asked for."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from holter import alert_addresses, alerts
from holter.alert_addresses import PrivateAddress, is_public, service_of
from holter.alerts import Alert, Alerts
from tests import post_offices
from tests.post_offices import PATIENCE, TAKES, Told, WebServer, all_of, finding_at

web = post_offices.web
NAME = "hook.example"  # nobody's, by RFC 2606
TOKEN = "AbCdEfGhIjKlMnO"


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "100.128.0.1", "2606:4700::1111"])
def test_public_addresses_are_known_as_such(address: str) -> None:
    assert is_public(address)
    if ":" not in address:
        assert is_public(f"64:ff9b::{address}") and is_public(f"::ffff:{address}")


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.1.2.3", "100.64.0.1", "127.0.0.1", "127.255.0.1", "169.254.169.254", "172.16.0.1"),
        *("172.31.255.255", "192.0.0.1", "192.168.0.1", "198.18.0.1", "203.0.113.7", "224.0.0.1", "255.255.255.255"),
        *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12::1", "ff02::1", "2001:db8::1", "2002:a00:1::"),
        *("64:ff9b::10.0.0.1", "::ffff:127.0.0.1", "64:ff9b:1::1", "2001::1", "fec0::1"),
    ],
)
def test_addresses_that_are_not_for_everyone_are_known_as_such(address: str) -> None:
    """Python's `is_global` says otherwise of some."""
    assert not is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/x",
        "https://localhost/x",
        "jsons://LOCALHOST.:8500/v1/agent",
        "https://api.localhost/x",
        "https://10.0.0.1/x",
        "https://169.254.169.254/latest/meta-data",
        "https://[::1]:8500/x",
        "https://[fe80::1]/x",
        "https://[::ffff:10.0.0.1]/x",
        "https://[64:ff9b::a00:1]/x",
        "https://224.0.0.1/x",
        "jsons://2130706433/x",
        "jsons://0x7f000001/x",
        "xmls://192.168.1.1",
        "forms://192.168.1.1",
        f"gotifys://192.168.0.4/{TOKEN}",
        "ntfys://10.0.0.1/topic",
        "matrixs://user:secret@10.0.0.4/#room",
    ],
)
def test_an_address_inside_a_network_is_refused_unless_it_was_asked_for(url: str) -> None:
    with pytest.raises(ValueError, match=r"alerts\[0\] \(\w+\): this address is inside a .*Alert\(url, private=True\)"):
        Alerts([url])
    Alerts([Alert(url, private=True)])


@pytest.mark.parametrize("url", [f"http://{NAME}/x", f"json://{NAME}", f"xml://{NAME}", f"form://{NAME}"])
def test_what_goes_over_the_web_unencrypted_is_refused_unless_it_was_asked_for(url: str) -> None:
    with pytest.raises(ValueError, match=r"goes by https \(https:// or \w+s://\).*Alert\(url, private=True\)"):
        Alerts([url])
    Alerts([Alert(url, private=True)])


@pytest.mark.parametrize(
    "url",
    [
        f"https://{NAME}/x",
        "https://8.8.8.8/x",
        "https://[2606:4700::1111]/x",
        f"jsons://{NAME}",
        "slack://T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
        "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ",
        "discord://167772165/JHMHI8qBe7bk2ZwO5U711o3dV_js",
        "tgram://167772165:alphanumeric_alphanumeric_alphaaa/12315544/",
        "mailto://user:secret@gmail.com",
        "mailto://user:secret@10.0.0.25?from=me@here.example",
    ],
)
def test_public_services_and_mail_servers_are_taken_without_looking_anything_up(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token may look like the number of a host. There may be no network when a training begins."""
    monkeypatch.setattr(socket, "getaddrinfo", None)
    Alerts([url])


def test_addresses_that_services_give_out_are_theirs() -> None:
    import apprise

    asset = apprise.AppriseAsset()
    slack = "https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/TIiajkdnlazkcOXrIdevi7FQ"
    assert service_of(apprise, slack, asset).service_name == "Slack"
    assert service_of(apprise, "https://hooks.example/T1JJ3T3L2", asset).service_name == "JSON"


# While it is sent ----------------------------------------------------------------------------------------------------


def _names(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[str]:
    """All that is looked up from now on; each answer for NAME is given once, the last one then for ever."""
    asked: list[str] = []
    ask = socket.getaddrinfo

    def answer(host: str, *args: Any, **more: Any) -> list[Any]:
        asked.append(host)
        if host != NAME:
            return ask(host, *args, **more)
        said = answers[min(asked.count(NAME), len(answers)) - 1]
        return [found for one in said.split() for found in ask(one, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return asked


@pytest.mark.parametrize("answer", ["127.0.0.1", "8.8.8.8 127.0.0.1", "127.0.0.1 8.8.8.8"])
def test_a_name_that_leads_inside_is_not_followed(web: WebServer, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gotify's addresses may be unencrypted: a message would come through here."""
    asked = _names(monkeypatch, answer)
    url = web.url(f"/{TOKEN}", scheme="gotify", host=NAME)
    told = Told(url)
    told.sink.alert(finding_at(1))
    words = told.failed.get(timeout=PATIENCE)
    assert words.startswith("alerts[0] (gotify) leads into a network, which takes Alert(url, private=True): warning")
    told.sink.close()
    assert all_of(told.notes) == [f"unconfirmed: {words}"] and asked == [NAME], "once, as it would not help"
    if answer == "127.0.0.1":
        allowed = Told(Alert(url, private=True))
        allowed.sink.alert(finding_at(1))
        assert web.take().title.startswith("Holter: warning: lr-jump")
        allowed.sink.close()
        assert web.connections == 1, "the twin, and nobody before it"


def test_a_name_is_looked_up_once_and_its_answer_is_where_the_message_goes(
    web: WebServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One who answers with a public address first and another one then gets nowhere. The server here passes for one."""
    told = Told(web.url(f"/{TOKEN}", scheme="gotify", host=NAME))
    monkeypatch.setattr(alert_addresses, "is_public", lambda address: address == "127.0.0.1")
    asked = _names(monkeypatch, "127.0.0.1", "127.0.0.2")
    told.sink.alert(finding_at(1))
    assert web.take().headers["Host"] == f"{NAME}:{web.server_port}"
    told.sink.close()
    assert asked.count(NAME) == 1 and set(asked) == {NAME, "127.0.0.1"} and not all_of(told.failed)


def test_a_proxy_may_be_inside(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all that goes out goes by one, nothing else can be reached, and the name may be known only there."""
    for name in ("no_proxy", "NO_PROXY", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", web.url(scheme="http"))
    asked = _names(monkeypatch, "127.0.0.1")
    told = Told(f"gotify://{NAME}/{TOKEN}")
    told.sink.alert(finding_at(1))
    assert web.take().path.startswith(f"http://{NAME}/")
    told.sink.close()
    assert NAME not in asked and not all_of(told.failed)


def test_who_redirects_gets_no_message(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token is not handed on, whatever the address says."""
    monkeypatch.setattr(alerts, "PAUSES", ())
    web.script = [307, TAKES]
    told = Told(web.alert("?redirect=yes"))
    told.sink.alert(finding_at(1))
    assert told.failed.get(timeout=PATIENCE)
    told.sink.close()
    assert web.requests == 1 and not all_of(web.got)


def test_others_connect_as_they_like(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks at alerts' connections lets those of the user's own code be."""
    import requests

    _names(monkeypatch, "127.0.0.1")
    with pytest.raises(PrivateAddress), alert_addresses._only_public(), pytest.raises(requests.ConnectionError):
        requests.post(web.url(scheme="http"), json={}, timeout=PATIENCE)
    assert requests.post(web.url(scheme="http", host=NAME), json={}, timeout=PATIENCE).status_code == TAKES


@pytest.mark.parametrize(("rest", "seconds"), [("", 30.0), ("?rto=2&cto=2", 30.0), ("?rto=3600&cto=3600", 3600.0)])
@pytest.mark.parametrize("scheme", ["json", "mailto"])
def test_an_answer_is_waited_for(scheme: str, rest: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """P28: at least so long, for who gets no answer sends again."""
    made = []
    find = service_of

    def keep(*args: Any) -> Any:
        made.append(find(*args))
        return made[-1]

    monkeypatch.setattr(alert_addresses, "service_of", keep)
    where = f"jsons://{NAME}/" if scheme == "json" else "mailto://me:secret@gmail.com/"
    Alerts([where + rest])
    assert made[0].socket_read_timeout == made[0].socket_connect_timeout == seconds
