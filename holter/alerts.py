"""Alerts: what is found, told to people by Slack, e-mail, a webhook or anything else that apprise reaches.

An incident is one message, another where it gets worse, and one when it is over. Every address has a thread of its own,
so that one that is slow, refuses or dies holds up neither the others nor the training; what it does not take is tried
again with growing pauses. What comes faster than a person can read is told together. Whether a message was delivered
stands in the journal; the addresses, which hold passwords and tokens, stand nowhere.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import re
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from holter.alert_words import Message, Tally, message_of
from holter.background import Background
from holter.diagnosis.finding import SEVERITIES, Finding
from holter.problems import Complaint
from holter.record import Record
from holter.stopping import is_severe

MOST = 6  # messages that an address gets in WINDOW_SECONDS
WINDOW_SECONDS = 60.0
PAUSES = (1.0, 4.0, 16.0)  # seconds before each further try
CLOSE_SECONDS = 5.0
_LOUD = ("apprise", "requests", "urllib3")  # loggers that are told addresses
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,31})://")
_logger = logging.getLogger("holter")

Sent = Callable[[str], None]
Failed = Callable[[str, BaseException], None]


@dataclass(frozen=True)
class Alert:
    """An address as apprise writes it, and how severe a finding must be to be told there: "critical", "warning" or
    "info". A plain https:// address gets a JSON object by POST."""

    url: str = field(repr=False)  # it may hold a token
    least: str = "warning"

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise ValueError(f"an alert goes to an address like 'slack://...', got a {type(self.url).__name__}")
        if self.least not in SEVERITIES:
            raise ValueError(f"least={self.least!r}: give one of {', '.join(map(repr, SEVERITIES))}")

    @property
    def scheme(self) -> str:
        """All of an address that may be shown."""
        found = _SCHEME.match(self.url)
        return found[1].lower() if found else ""


class Alerts:
    """A sink that sends findings to these addresses. Holter's own troubles are not among them."""

    def __init__(self, addresses: Sequence[str | Alert]) -> None:
        if isinstance(addresses, str | bytes) or not isinstance(addresses, Sequence) or not addresses:
            raise ValueError("alerts: give a list of addresses, such as ['slack://...', 'mailto://...', 'https://...']")
        try:
            apprise = importlib.import_module("apprise")
        except ImportError as error:
            raise ImportError("alerts need apprise: pip install 'holter[alerts]'") from error
        alerts = [one if isinstance(one, Alert) else Alert(one) for one in addresses]
        self._recipients = []
        for place, alert in enumerate(alerts):
            name = f"alerts[{place}] ({alert.scheme or 'no scheme'})"
            self._recipients.append(Recipient(name, _sender(apprise, alert.url, name), alert.least))

    def begin(self, run: Path | None, sent: Sent, failed: Failed) -> None:
        """What the messages are about, and who is told in a few words of each that was delivered or was not."""
        for one in self._recipients:
            one.run, one.sent, one.failed = run, sent, failed

    def write(self, record: Record) -> None:
        pass

    def alert(self, finding: Finding) -> None:
        for one in self._recipients:
            one.tell(finding)

    def close(self) -> None:
        """Tries once what is left, for a few seconds."""
        until = time.monotonic() + CLOSE_SECONDS
        for one in self._recipients:
            one.stop(CLOSE_SECONDS)
        for one in self._recipients:
            one.wait(max(0.0, until - time.monotonic()))
        self.give_up()

    def give_up(self) -> None:
        """Reports what has not been answered by now."""
        for one in self._recipients:
            one.give_up()


class _Letter:
    """To be delivered; without a message it is the summary of what is collected until it goes out."""

    def __init__(self, message: Message | None) -> None:
        self.message, self.tries = message, 0


class Recipient:
    """One address: what it has been told, what it will be, and the thread that does it, begun when there is need."""

    def __init__(self, name: str, send: Callable[[Message], bool], least: str) -> None:
        self.run: Path | None = None
        self.sent: Sent = lambda words: None
        self.failed: Failed = _log
        self._name, self._send, self._news = name, send, News(least)
        self._tally = Tally()
        self._times: deque[float] = deque(maxlen=MOST)  # by the clock: of the newest messages
        self._open: list[_Letter] = []  # neither delivered nor given up
        self._queue: Background[_Letter] | None = None
        self._closing = False
        self._guard = threading.Lock()

    def tell(self, finding: Finding) -> None:
        if not self._news.take(finding):
            return
        with self._guard:
            if not self._tally.total and self._pause() == 0.0:
                self._times.append(time.monotonic())
                self._post(_Letter(message_of(finding, self.run)))
            else:
                self._tally.add(finding)
                if self._tally.total == 1:
                    self._post(_Letter(None))

    def stop(self, seconds: float) -> None:
        self._closing = True
        if self._queue is not None:
            self._queue.stop(seconds)

    def wait(self, seconds: float) -> None:
        if self._queue is not None:
            self._queue.wait(seconds)

    def give_up(self) -> None:
        for letter in list(self._open):
            self._settle(letter, "had not answered when the training ended")

    def _pause(self) -> float:
        """Seconds until another message may go out."""
        is_full = len(self._times) == MOST
        return max(0.0, self._times[0] + WINDOW_SECONDS - time.monotonic()) if is_full else 0.0

    def _post(self, letter: _Letter) -> None:
        if self._queue is None:
            self._queue = Background(self._deliver, self._broke, name="holter-alert-sender")
        self._open.append(letter)
        self._queue.post(letter)

    # On the thread ----------------------------------------------------------------------------------------------

    def _deliver(self, letter: _Letter) -> float | None:
        """None when there is nothing more to do for it, or the seconds until the next try."""
        if letter.message is None:
            pause = 0.0 if self._closing else self._pause()
            if pause > 0:
                return pause
            with self._guard:
                letter.message, self._tally = self._tally.message(self.run), Tally()
                self._times.append(time.monotonic())
        if self._was_sent(letter.message):
            self._settle(letter, None)
            return None
        letter.tries += 1
        if not self._closing and letter.tries <= len(PAUSES):
            return PAUSES[letter.tries - 1]
        self._settle(letter, f"did not take it in {letter.tries} {'try' if letter.tries == 1 else 'tries'}")
        return None

    def _was_sent(self, message: Message) -> bool:
        try:
            return self._send(message)
        except Exception:  # whose words may hold the address: that it failed is all that is kept of it
            return False

    def _settle(self, letter: _Letter, trouble: str | None) -> None:
        """Says once what became of it."""
        with self._guard:
            if letter not in self._open:
                return
            self._open.remove(letter)
            about = letter.message.about if letter.message is not None else f"{self._tally.total:,} more findings"
        if trouble is None:
            self.sent(f"sent to {self._name}: {about}")
        else:
            self.failed("send an alert", Complaint(f"{self._name} {trouble}: {about}"))

    def _broke(self, error: BaseException) -> None:
        self.failed("send an alert", Complaint(f"{self._name} failed with {type(error).__name__}"))


class _Incident:
    def __init__(self, severity: str) -> None:
        self.severity, self.is_over = severity, False
        self.known: set[tuple[str, int]] = set()  # causes that have led it, and when each was known

    @property
    def causes(self) -> set[str]:
        return {cause for cause, _ in self.known}


class News:
    """What is news of an incident: that it is there, that it is worse, that it is over. That another of its causes
    leads now is not."""

    def __init__(self, least: str) -> None:
        self._least = least
        self._incidents: list[_Incident] = []  # that last
        self._known: dict[tuple[str, int], _Incident] = {}

    def take(self, finding: Finding) -> bool:
        """Whether it is worth a message."""
        incident, is_over = self._incident(finding), finding.until is not None
        if incident is None and not is_severe(finding, self._least):
            return False
        is_new = incident is None
        if incident is None:
            incident = _Incident(finding.severity)
            self._incidents.append(incident)
        incident.known.add((finding.cause, finding.step))
        self._known[finding.cause, finding.step] = incident
        if incident.is_over:
            return False
        if is_over:
            incident.is_over = True
            self._incidents.remove(incident)
            return True
        is_worse = SEVERITIES.index(finding.severity) > SEVERITIES.index(incident.severity)
        incident.severity = finding.severity if is_worse else incident.severity
        return is_new or is_worse

    def _incident(self, finding: Finding) -> _Incident | None:
        """The one that this finding is of: the same cause known since, or one that it names beside its own."""
        known = self._known.get((finding.cause, finding.step))
        if known is not None or not finding.alternatives:
            return known
        return next((one for one in self._incidents if not one.causes.isdisjoint(finding.alternatives)), None)


# apprise ------------------------------------------------------------------------------------------------------------


def _sender(apprise: Any, url: str, name: str) -> Callable[[Message], bool]:
    """Sends a message there and says whether it was taken; ValueError where apprise can make nothing of the address."""
    # Sent from the thread that asks: a pool of apprise's own would keep the process from ending while a server hangs.
    # Who redirects a message would be given its token.
    asset = apprise.AppriseAsset(
        app_id="Holter", async_mode=False, service_timeout=0, http_redirects=False, storage_mode="memory"
    )
    service = _service(apprise, url, asset)
    if service is None:
        raise ValueError(
            f"{name}: apprise can make nothing of this address, which is not shown as it may hold a token. "
            "https://appriseit.com/services/ says how those of each service are written"
        )
    service.optional = False  # an address may say that its failures do not count: here they do
    with _quiet():
        box = apprise.Apprise(service, asset=asset)

    def send(message: Message) -> bool:
        with _quiet():
            said = {"title": message.title, "body": message.text, "notify_type": message.kind}
            return bool(box.notify(**said, body_format="text"))

    return send


def _service(apprise: Any, url: str, asset: Any) -> Any:
    """None where there is none, for whatever reason: an error's words may hold the address."""
    with _quiet(), contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it imports what python has deprecated, which may be an error here
        found = apprise.Apprise.instantiate(url, asset=asset)  # knows the https:// addresses of Slack and others
        webhook = _webhook(url) if found is None else None
        return apprise.Apprise.instantiate(webhook, asset=asset) if webhook is not None else found
    return None


def _webhook(url: str) -> dict[str, Any] | None:
    """An http:// or https:// address in apprise's words: a POST of JSON to all of it, query included."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return None
    return {
        "schema": "jsons" if parts.scheme == "https" else "json",
        "secure": parts.scheme == "https",
        "host": f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname,
        "port": parts.port,
        "user": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
        "fullpath": parts.path,
        "params": parse_qs(parts.query, keep_blank_values=True),
    }


class _Hush(logging.Filter):
    """Keeps back what this thread logs; others may use apprise or requests too, and go on as they were."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        return threading.get_ident() != self._thread


_hushing = threading.Lock()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """At the level DEBUG apprise and urllib3 log whole addresses (P24)."""
    hush = _Hush()
    known = list(logging.root.manager.loggerDict.items())
    loud = [one for name, one in known if name.split(".")[0] in _LOUD and isinstance(one, logging.Logger)]
    with _hushing:  # a new list each time: another thread may be going through the old one
        for logger in loud:
            logger.filters = [*logger.filters, hush]
    try:
        yield
    finally:
        with _hushing:
            for logger in loud:
                logger.filters = [one for one in logger.filters if one is not hush]


def _log(where: str, error: BaseException) -> None:
    _logger.warning("training goes on, but Holter could not %s: %s", where, error)
