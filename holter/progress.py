"""A quiet progress bar for `monitor.batches(loader, progress=True)`: one line in the terminal behind stderr.

Nothing at all where that is no terminal, as in a notebook, a file or a batch job. The training thread only counts; a
few times a second it draws, to a terminal opened anew so that a write never waits: what cannot be written is left out.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from holter.words import duration, number

_PACE_SECONDS = 0.25
_LINE_PACES = 4  # times that, between two lines that passes of a moment leave
_LONGEST_BAR = 30  # cells
_CLEAN_LINE, _NEW_LINE = "\r\x1b[2K", "\n"

Known = Callable[[], Mapping[str, float]]
Failed = Callable[[str, BaseException], None]  # told what could not be done, and why


class _Pace:
    """Of the process, as its terminal is one: where epochs take a moment, none of them alone would ever be due."""

    due: float | None = None  # None before the first pass


_pace = _Pace()


class Progress:
    """Of one pass over a loader. Nothing of it raises: what fails is told to `failed`, and the bar ends.

    `known` gives the newest scalars that have been read off the device, or nothing.
    """

    def __init__(self, terminal: Terminal, total: int | None, known: Known, failed: Failed) -> None:
        self._terminal: Terminal | None = terminal
        self._total, self._known, self._failed = total, known, failed
        self._count, self._is_drawn = 0, False
        self._began = time.perf_counter()
        if _pace.due is None:
            _pace.due = self._began + _PACE_SECONDS

    def passed(self) -> None:
        """A batch goes to the training."""
        self._count += 1
        if self._terminal is not None and time.perf_counter() >= (_pace.due or 0.0):
            _pace.due = time.perf_counter() + _PACE_SECONDS
            self._draw(self._count - 1)

    def end(self) -> None:
        """No more of them. Of passes that take no time only some leave a line."""
        if self._is_drawn:
            self._draw(self._count, is_over=True)
            if time.perf_counter() - self._began < _PACE_SECONDS:
                _pace.due = time.perf_counter() + _LINE_PACES * _PACE_SECONDS
        self._close()

    def _draw(self, done: int, *, is_over: bool = False) -> None:
        if self._terminal is None:
            return
        try:
            seconds = time.perf_counter() - self._began
            columns, loss = self._terminal.columns - 1, self._known().get("loss")
            line = bar_line(done, self._total, seconds, loss, columns, is_over=is_over)
            self._terminal.write(f"{_CLEAN_LINE}{line}{_NEW_LINE if is_over else ''}")
            self._is_drawn = True
        except Exception as error:
            self._close()
            self._failed("show the progress", error)

    def _close(self) -> None:
        terminal, self._terminal = self._terminal, None
        if terminal is not None:
            with contextlib.suppress(OSError):
                terminal.close()


def bar_line(
    done: int, total: int | None, seconds: float, loss: float | None, columns: int, *, is_over: bool = False
) -> str:
    """As much of it as fits.

    >>> bar_line(50, 200, 10.0, 2.3456, 60)
    'batch 50/200 ━━━━──────────  25 %  5/s  loss 2.35  30 s left'
    >>> bar_line(50, None, 10.0, 2.3456, 60, is_over=True)
    'batch 50  5/s  loss 2.35  in 10 s'
    """
    pace = done / seconds if seconds > 0 else 0.0
    words = [f"{pace:.3g}/s"] if done else []
    words += [f"loss {number(loss)}"] if loss is not None else []
    words += [f"in {duration(seconds)}"] if is_over else []
    if total is None:
        return "  ".join([f"batch {done:,}", *words])[:columns]
    words += [f"{duration((total - done) / pace)} left"] if pace and done < total and not is_over else []
    head, part = f"batch {done:,}/{total:,} ", min(done / max(total, 1), 1.0)
    tail = "  ".join([f" {part:>4.0%}".replace("%", " %"), *words])
    cells = min(max(columns - len(head) - len(tail), 0), _LONGEST_BAR)
    full = round(cells * part)
    return f"{head}{'━' * full}{'─' * (cells - full)}{tail}"[:columns]


# The terminal ---------------------------------------------------------------------------------------------------


class Terminal:
    """The one behind a stream, opened anew: its writes do not wait, whatever the stream's do."""

    def __init__(self, stream: TextIO) -> None:
        """OSError where that cannot be."""
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        flags = os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        self._file = os.open(os.ttyname(stream.fileno()), flags)

    @property
    def columns(self) -> int:
        return os.get_terminal_size(self._file).columns or 80

    def write(self, text: str) -> None:
        with contextlib.suppress(BlockingIOError):  # stopped by Ctrl-S, or nobody reads: the next line will do
            os.write(self._file, text.encode(self._encoding, "replace"))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def progress_of(loader: Any, known: Known, failed: Failed) -> Progress | None:
    """For a pass over this loader; None where nothing is to be shown."""
    stream = sys.stderr
    try:
        if not stream.isatty():
            return None
        terminal = Terminal(stream)
    except Exception:  # closed, none at all, one that cannot be opened anew, or whatever stands in for it
        return None
    return Progress(terminal, _length(loader), known, failed)


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except Exception:  # a loader's own, which may raise anything, also where it has the method
        return None
