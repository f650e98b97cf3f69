"""P24: addresses hold passwords and tokens, and none of that is kept or shown anywhere."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

import holter
from holter import alert_addresses
from holter.alerts import Alert
from holter.diagnosis.finding import Finding
from holter.sinks import Memory
from tests import post_offices
from tests.models import make
from tests.post_offices import MailServer, WebServer, refusing_port

FOUND = Finding("dead-relu", "layer", 40, 52, layer="encoder.3", advice="Lower the rate.")
CANARY = "cAnAry"
BAD = (f"https://{CANARY}:{CANARY}@10.0.0.1/{CANARY}", f"http://{CANARY}.example/{CANARY}", f"http://[{CANARY}/")

mail, web = post_offices.mail, post_offices.web


def _rest(place: str) -> str:
    return f"/{CANARY}path-{place}?token={CANARY}query&-to={CANARY}sent"


def _leaks(
    web: WebServer, mail: MailServer, path: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> dict[str, str]:
    """Where canaries turn up after a training whose alerts were delivered, and were not, to addresses full of them."""
    user = f"{CANARY}user:{CANARY}pass@"
    sink = Memory()
    addresses = [
        web.alert(_rest("a"), user=user),
        web.alert(_rest("b"), scheme="http", user=user),
        Alert(f"json://{user}127.0.0.1:{refusing_port()}{_rest('c')}", private=True),
        mail.url(user, CANARY),
        mail.url(user, CANARY).replace(f":{mail.port}?", f":{refusing_port()}?"),
    ]
    errors = []
    with caplog.at_level(logging.DEBUG):
        for loud in ("apprise", "urllib3", "holter"):
            logging.getLogger(loud).setLevel(1)
        training = make("mlp")
        options: dict[str, Any] = {"run": path / "run", "sinks": [sink], "alerts": addresses}
        training.monitor = holter.watch(training.model, training.optimizer, **options)
        training.step()
        training.monitor._writer.alert(FOUND)
        delivered = [web.take(), web.take(), mail.take()]
        training.monitor.close()
        for bad in (f"nothing://{user}{CANARY}", CANARY, f"slack://{CANARY}", f"https://{user}h:{CANARY}/", 7, *BAD):
            with pytest.raises(ValueError) as refused:
                holter.watch(training.model, training.optimizer, run=False, alerts=[bad])
            errors.append(f"{refused.value!r} {refused.value.__context__!r} {refused.value.__cause__!r}")
        for loud in ("apprise", "urllib3", "holter"):
            logging.getLogger(loud).setLevel(logging.NOTSET)
    assert len(delivered) == 3 and any("send an alert" in finding.advice for finding in training.monitor.findings)
    files = {str(file): file.read_bytes().decode("latin-1") for file in path.rglob("*") if file.is_file()}
    log = "\n".join(record.getMessage() for record in caplog.records if record.name != "mail.log")  # the server's own
    said = {"log": log, "output": "".join(capfd.readouterr()), "errors": " ".join(errors)}
    found = {
        "findings": repr(training.monitor.findings),
        "told": repr(sink.findings),
        "repr": repr(addresses[0]),
    }
    assert files and "send an alert" in said["log"]
    return {place: text for place, text in {**files, **said, **found}.items() if CANARY.lower() in text.lower()}


def test_no_secret_of_an_address_is_kept_anywhere(
    web: WebServer, mail: MailServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    """P24."""
    assert _leaks(web, mail, tmp_path, caplog, capfd) == {}


def test_libraries_that_are_let_speak_are_seen_to_leak(
    web: WebServer,
    mail: MailServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P24: the planted twin."""
    monkeypatch.setattr(alert_addresses, "quiet", contextlib.nullcontext)
    assert "log" in _leaks(web, mail, tmp_path, caplog, capfd)


def test_others_may_log_as_they_like_and_nothing_of_it_stays(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("apprise")
    before = list(logger.filters)
    with caplog.at_level(logging.DEBUG, "apprise"), alert_addresses.quiet():
        logger.warning("mine")
        other = threading.Thread(target=logger.warning, args=("of another thread",))
        other.start()
        other.join()
    assert caplog.messages == ["of another thread"] and logger.filters == before
