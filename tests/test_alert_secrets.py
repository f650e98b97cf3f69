"""P24: addresses hold passwords and tokens, and none of that is kept or shown anywhere."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import holter
from holter import alerts
from holter.alerts import Alert
from holter.diagnosis.finding import Finding
from holter.sinks import Memory
from tests.models import make
from tests.post_offices import PATIENCE, WebServer, mail_server, refusing_port, web_server

FOUND = Finding("dead-relu", "layer", 40, 52, layer="encoder.3", advice="Lower the rate.")
CANARY = "cAnAry"


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[WebServer]:
    monkeypatch.setattr(alerts, "PAUSES", (0.01, 0.02, 0.03))
    with web_server() as server:
        yield server


@pytest.fixture
def mail() -> Iterator[SimpleNamespace]:
    with mail_server() as server:
        yield server


def _rest(place: str) -> str:
    return f"/{CANARY}path-{place}?token={CANARY}query&-to={CANARY}sent"


def _leaks(
    web: WebServer, mail: SimpleNamespace, path: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> dict[str, str]:
    """Where canaries turn up after a training whose alerts were delivered, and were not, to addresses full of them."""
    user = f"{CANARY}user:{CANARY}pass@"
    sink = Memory()
    addresses = [
        web.url(_rest("a"), user=user),
        web.url(_rest("b"), "http", user),
        f"json://{user}127.0.0.1:{refusing_port()}{_rest('c')}",
        f"mailto://{user}127.0.0.1:{mail.port}?from={CANARY}@here.example&to={CANARY}@there.example&mode=insecure",
        f"mailto://{user}127.0.0.1:{refusing_port()}?from={CANARY}@here.example&to={CANARY}@there.example&mode=insecure",
    ]
    errors = []
    with caplog.at_level(logging.DEBUG):
        for loud in ("apprise", "urllib3", "holter"):
            logging.getLogger(loud).setLevel(1)
        training = make("mlp")
        options: dict[str, Any] = {"run": path / "run", "sinks": [sink], "alerts": addresses}
        training.monitor = holter.watch(training.model, training.optimizer, **options)
        training.step()
        training.monitor._alert(FOUND)
        delivered = [web.take(), web.take(), mail.got.get(timeout=PATIENCE)]
        training.monitor.close()
        for bad in (f"nothing://{user}{CANARY}", CANARY, f"slack://{CANARY}", f"https://{user}h:{CANARY}/", 7):
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
        "repr": repr(Alert(addresses[0])),
    }
    assert files and "send an alert" in said["log"]
    return {place: text for place, text in {**files, **said, **found}.items() if CANARY.lower() in text.lower()}


def test_no_secret_of_an_address_is_kept_anywhere(
    web: WebServer, mail: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    """P24."""
    assert _leaks(web, mail, tmp_path, caplog, capfd) == {}


def test_libraries_that_are_let_speak_are_seen_to_leak(
    web: WebServer,
    mail: SimpleNamespace,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P24: the planted twin."""
    monkeypatch.setattr(alerts, "_quiet", contextlib.nullcontext)
    assert "log" in _leaks(web, mail, tmp_path, caplog, capfd)


def test_others_may_log_as_they_like_and_nothing_of_it_stays(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("apprise")
    before = list(logger.filters)
    with caplog.at_level(logging.DEBUG, "apprise"), alerts._quiet():
        logger.warning("mine")
        other = threading.Thread(target=logger.warning, args=("of another thread",))
        other.start()
        other.join()
    assert caplog.messages == ["of another thread"] and logger.filters == before
