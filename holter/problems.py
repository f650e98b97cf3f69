"""Problems: Holter's own failures, contained. Each different one is kept, told and logged once."""

from __future__ import annotations

import logging
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType

from holter.record import Problem

MOST = 100  # different ones; a monitor that fails in ever new ways must not fill the memory
_logger = logging.getLogger("holter")


class Complaint(Exception):
    """Something refused in Holter's own words, which are safe to keep."""


class Problems:
    """Collects what went wrong, from any thread. Adding never raises."""

    def __init__(self, tell: Callable[[Problem], None]) -> None:
        self._tell = tell
        self._known: dict[tuple[str, str], Problem] = {}
        self.step = 0  # the step being taken, so that a problem can say when it was

    def __iter__(self) -> Iterator[Problem]:
        return iter(list(self._known.values()))

    def __len__(self) -> int:
        return len(self._known)

    def contained(self, where: str) -> _Contained:
        """`with problems.contained("read a step"):` around what must not reach the training."""
        return _Contained(self, where)

    def add(self, where: str, error: BaseException) -> None:
        try:
            what = describe(error)
            if (where, what) in self._known or len(self._known) >= MOST:
                return
            problem = self._known[where, what] = Problem(self.step, time.time(), where, what)
            _logger.warning("training goes on, but Holter could not %s: %s", where, what)
            self._tell(problem)
        except Exception as failure:
            self.last_failure = failure  # telling failed too; kept for a debugger, there is nobody left to tell


class _Contained:
    """A block whose failure becomes a problem. KeyboardInterrupt and SystemExit are the user's, and pass."""

    def __init__(self, problems: Problems, where: str) -> None:
        self._problems, self._where = problems, where

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._problems.add(self._where, error)
        return True


def describe(error: BaseException) -> str:
    """The class and place of an error, not its message: that may hold what must not be kept (P24)."""
    if isinstance(error, Complaint):
        return str(error)
    if isinstance(error, OSError) and error.errno:  # one warning for a full disk, wherever it is met
        return f"{type(error).__name__}: {os.strerror(error.errno)}"
    frames = traceback.extract_tb(error.__traceback__)
    place = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
