"""Alerts: what is found, told to people by Slack, e-mail, a webhook or anything else that apprise reaches.

An incident is one message, another where it gets worse, and one when it is over. Every address has a thread of its own,
so that one that is slow, refuses or dies holds up neither the others nor the training; what it does not take is tried
again with growing pauses. What comes faster than a person can read is told together. Whether a message was delivered
stands in the journal; the addresses, which hold passwords and tokens, stand nowhere. To take a finding costs no more
than to count it, whatever the addresses do, so nothing needs to stand between this and who finds it.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from holter.alert_addresses import NotTaken, PrivateAddress, sender
from holter.alert_words import Message, Tally, message_of
from holter.background import Background
from holter.diagnosis.finding import SEVERITIES, Finding
from holter.problems import Complaint
from holter.record import Record
from holter.stopping import is_severe

MOST = 6  # messages that an address gets in WINDOW_SECONDS
WINDOW_SECONDS = 60.0
MOST_WAITING = 12  # messages for one address; what is found while they wait is told together
PAUSES = (1.0, 4.0, 16.0)  # seconds before each further try
CLOSE_SECONDS = 5.0
SAME_STEPS = 100  # within which a finding may be of an incident that began with another cause
MOST_KNOWN = 4096  # findings of which an address remembers that it was told
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]{0,31})://")
_logger = logging.getLogger("holter")

Key = TypeVar("Key")
Note = Callable[[str], None]
Failed = Callable[[str, BaseException], None]


@dataclass(frozen=True)
class Alert:
    """An address as apprise writes it, and how severe a finding must be to be told there: "critical", "warning" or
    "info". A plain https:// address gets a JSON object by POST. `private` allows a server inside your own network, and
    http://, which otherwise are refused; mail servers are where you say."""

    url: str = field(repr=False)  # it may hold a token
    least: str = "warning"
    private: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.url, str):
            raise ValueError(f"an alert goes to an address like 'slack://...', got a {type(self.url).__name__}")
        if self.least not in SEVERITIES:
            raise ValueError(f"least={self.least!r}: give one of {', '.join(map(repr, SEVERITIES))}")
        if not isinstance(self.private, bool):
            raise ValueError(f"private={self.private!r}: give True where the server is your own, or leave it out")

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
            send = sender(apprise, alert.url, name, alert.private)
            self._recipients.append(Recipient(name, send, alert.least))
        self._process = os.getpid()

    def begin(self, run: Path | None, note: Note, failed: Failed) -> None:
        """What the messages are about; `note` is told in a few words of each that was delivered or was not, and
        `failed`, once for each address, that one was not."""
        for one in self._recipients:
            one.run, one.note, one.failed = run, note, failed

    @property
    def seconds(self) -> float:
        """Processor time that sending has taken."""
        return sum(one.seconds for one in self._recipients)

    def write(self, record: Record) -> None:
        pass

    def alert(self, finding: Finding) -> None:
        """Never waits for an address, and never raises."""
        for one in self._recipients if self._is_here() else ():
            try:
                one.tell(finding)
            except Exception as error:
                one.broke(error)

    def close(self) -> None:
        """Tries once what is left, for a few seconds."""
        self.stop(CLOSE_SECONDS)
        self.wait(CLOSE_SECONDS)
        self.give_up()

    def stop(self, seconds: float) -> None:
        """Tries once what is left, for at most this long, without waiting for it."""
        for one in self._recipients:
            one.stop(seconds)

    def wait(self, seconds: float) -> None:
        """For what `stop` left to do."""
        until = time.monotonic() + seconds
        for one in self._recipients:
            one.wait(max(0.0, until - time.monotonic()))

    def give_up(self) -> None:
        """Reports what has not been answered by now."""
        for one in self._recipients if self._is_here() else ():
            one.give_up()

    def _is_here(self) -> bool:
        """A forked child has no threads that send, and maybe locks that nobody opens."""
        return os.getpid() == self._process


class _Letter:
    """To be delivered; without a message it is the summary of what is collected until it goes out."""

    def __init__(self, message: Message | None) -> None:
        self.message, self.tries = message, 0
        self.why = ""  # the last try failed


class Recipient:
    """One address: what it has been told, what it will be, and the thread that does it, begun when there is need."""

    def __init__(self, name: str, send: Callable[[Message], bool], least: str) -> None:
        self.run: Path | None = None
        self.note: Note = lambda words: None
        self.failed: Failed = _log
        self._name, self._send, self._news = name, send, News(least)
        self._tally = Tally()
        self._times: deque[float] = deque(maxlen=MOST)  # by the clock: of the newest messages
        self._open: list[_Letter] = []  # neither delivered nor given up
        self._queue: Background[_Letter] | None = None
        self._closing = self._has_failed = False
        # The garbage collector may end a training, and that fail, in the middle of this: it comes in again.
        self._guard = threading.RLock()

    @property
    def seconds(self) -> float:
        return self._queue.seconds if self._queue is not None else 0.0

    def tell(self, finding: Finding) -> None:
        with self._guard:
            letter = self._letter(finding) if self._news.take(finding) else None
            is_posted = letter is None or self._post(letter)
        if letter is not None and not is_posted:
            self._settle(letter, "was closed already")

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

    def broke(self, error: BaseException) -> None:
        self.failed("send an alert", Complaint(f"{self._name} failed with {type(error).__name__}"))

    def _letter(self, finding: Finding) -> _Letter | None:
        """None where one that waits will tell it."""
        if not self._tally.total and len(self._open) < MOST_WAITING and self._pause() == 0.0:
            self._times.append(time.monotonic())
            return _Letter(message_of(finding, self.run))
        self._tally.add(finding)
        return _Letter(None) if self._tally.total == 1 else None

    def _pause(self) -> float:
        """Seconds until another message may go out."""
        is_full = len(self._times) == MOST
        return max(0.0, self._times[0] + WINDOW_SECONDS - time.monotonic()) if is_full else 0.0

    def _post(self, letter: _Letter) -> bool:
        self._open.append(letter)
        if self._queue is None:
            if self._closing:
                return False
            self._queue = Background(self._deliver, self.broke, name="holter-alert-sender")
        return self._queue.post(letter)

    def _settle(self, letter: _Letter, trouble: str | None) -> None:
        """Says once what became of it."""
        with self._guard:
            if letter not in self._open:
                return
            self._open.remove(letter)
            about = self._written(letter).about
            is_first, self._has_failed = not self._has_failed, self._has_failed or trouble is not None
        if trouble is None:
            self.note(f"sent to {self._name}: {about}")
            return
        self.note(f"unconfirmed: {self._name} {trouble}: {about}")
        if is_first:  # of all of them the journal tells; one is enough to say that something is wrong
            self.failed("send an alert", Complaint(f"{self._name} {trouble}: {about}"))

    def _written(self, letter: _Letter) -> Message:
        if letter.message is None:
            letter.message, self._tally = self._tally.message(self.run), Tally()
            self._times.append(time.monotonic())
        return letter.message

    # On the thread ----------------------------------------------------------------------------------------------

    def _deliver(self, letter: _Letter) -> float | None:
        """None when there is nothing more to do for it, or the seconds until the next try."""
        if letter.message is None and not self._closing and (pause := self._pause()) > 0:
            return pause
        with self._guard:
            if letter not in self._open:  # given up meanwhile, and that is what was said of it
                return None
            message = self._written(letter)
        try:
            was_sent = self._send(message)
        except PrivateAddress:
            self._settle(letter, "leads into a network, which takes Alert(url, private=True)")
            return None
        except NotTaken as error:
            was_sent, letter.why = False, f" ({error})"
        except Exception:  # whose words may hold the address: that it failed is all that is kept of it
            was_sent = False
        letter.tries += 1
        if not was_sent and not self._closing and letter.tries <= len(PAUSES):
            return PAUSES[letter.tries - 1]
        # It may have come through all the same: that nobody said so is all that is known here.
        tries = f"{letter.tries} {'try' if letter.tries == 1 else 'tries'}"
        self._settle(letter, None if was_sent else f"did not confirm it in {tries}{letter.why}")
        return None


class _Incident:
    def __init__(self, severity: str, step: int) -> None:
        self.severity, self.step, self.is_over = severity, step, False  # the step at which it was last heard of
        self.causes: set[str] = set()  # that have led it


class News:
    """What is news of an incident: that it is there, that it is worse, that it is over. That another of its causes
    leads now is not. Costs the same however many there have been; who has been forgotten is news again."""

    def __init__(self, least: str) -> None:
        self._least = least
        self._known: dict[tuple[str, int], _Incident] = {}  # by cause and the step at which that was known
        self._leading: dict[str, _Incident] = {}  # of those that last: the newest of each cause

    def take(self, finding: Finding) -> bool:
        """Whether it is worth a message."""
        incident = self._incident(finding)
        if incident is None and not is_severe(finding, self._least):
            return False
        is_new = incident is None
        if incident is None:
            incident = _Incident(finding.severity, finding.step)
        self._remember(incident, finding)
        if incident.is_over:
            return False
        if finding.until is not None:
            self._end(incident)
            return True
        is_worse = SEVERITIES.index(finding.severity) > SEVERITIES.index(incident.severity)
        incident.severity = finding.severity if is_worse else incident.severity
        return is_new or is_worse

    def _incident(self, finding: Finding) -> _Incident | None:
        """The one that this finding is of: the same cause known since, or one of late that it names beside its own."""
        known = self._known.get((finding.cause, finding.step))
        if known is not None:
            return known
        others = (self._leading.get(cause) for cause in finding.alternatives)
        near = (one for one in others if one is not None and abs(finding.step - one.step) <= SAME_STEPS)
        return next(near, None)

    def _remember(self, incident: _Incident, finding: Finding) -> None:
        incident.step = max(incident.step, finding.step)
        self._known[finding.cause, finding.step] = incident
        if not incident.is_over:
            incident.causes.add(finding.cause)
            self._leading[finding.cause] = incident
        _forget_oldest(self._known)
        _forget_oldest(self._leading)

    def _end(self, incident: _Incident) -> None:
        incident.is_over = True
        for cause in incident.causes:
            if self._leading.get(cause) is incident:
                del self._leading[cause]


def _forget_oldest(kept: dict[Key, _Incident]) -> None:
    if len(kept) > MOST_KNOWN:
        del kept[next(iter(kept))]


def _log(where: str, error: BaseException) -> None:
    _logger.warning("training goes on, but Holter could not %s: %s", where, error)
