"""How a training ended: by close(), by an error, or with the process, which nobody told us of."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable

from holter.stopping import TrainingStopped


def ending_of(kind: type[BaseException] | None, otherwise: str, error: BaseException | None = None) -> tuple[str, str]:
    """State and error of a training, by the exception that ended it; only its class is kept.

    Of one that a finding stopped, the finding is told: its words are Holter's own.

    >>> ending_of(ValueError, "finished")
    ('failed', 'ValueError')
    """
    if kind is None:
        return otherwise, ""
    if issubclass(kind, KeyboardInterrupt):
        return "interrupted", ""
    if issubclass(kind, SystemExit):
        return "ended", ""
    if isinstance(error, TrainingStopped):
        found = error.finding
        return "stopped", f"{found.cause} in {found.layer or found.where} since step {found.since}"
    return "failed", kind.__name__


class AtExit:
    """Calls `end` with state and error when the interpreter ends, unless it is cancelled before."""

    def __init__(self, end: Callable[[str, str], None]) -> None:
        self._end = end
        self._error_before = getattr(sys, "last_value", None)
        atexit.register(self._call)

    def cancel(self) -> None:
        atexit.unregister(self._call)

    def _call(self) -> None:
        # An error from before, as an interactive session keeps them, did not end this training.
        is_old = getattr(sys, "last_value", None) is self._error_before
        kind = None if is_old or hasattr(sys, "ps1") else getattr(sys, "last_type", None)
        self._end(*ending_of(kind, "ended", getattr(sys, "last_value", None)))
