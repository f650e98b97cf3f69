"""The diagnosis in a process of its own: it takes seconds of computing that a server has not.

A line in names a run, a line out says what is wrong with it by now. Long runs are read in slices, so that no other
waits for them; where a run goes on, so does its doctor.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import signal
import sys
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path

import numpy as np

from holter.dashboard.process import READY
from holter.dashboard.wire import Answer, to_line
from holter.report.examining import Examined
from holter.report.reading import Follower
from holter.summary import as_json

SPARK = 48  # points of a spark line
_SLICE = 1.0  # seconds
_OPEN = 4  # runs that are kept open
_MEMORY = 3 << 30  # bytes
_BUCKETS = 64  # only the loss is drawn from this process


class Practice:
    """The runs that are under examination, the newest last."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Follower] = OrderedDict()

    def answer(self, path: str, seconds: float = _SLICE) -> Answer:
        follower = self._open.pop(path, None) or Follower(Path(path), buckets=_BUCKETS, examine=True)
        is_complete = follower.read_on(seconds)
        state = follower.run_state
        if not is_complete or state == "running":
            self._open[path] = follower
            while len(self._open) > _OPEN:
                self._open.popitem(last=False)
        examined = follower.examined() if is_complete else Examined()
        found, spark = follower.integrity, spark_of(follower)
        return Answer(examined, state, follower.digest.count, spark, is_complete, found.sentence, found.severity)


def spark_of(follower: Follower) -> tuple[float, ...]:
    """The loss in at most so many points."""
    loss = follower.digest.scalars.get("loss")
    if loss is None:
        return ()
    values = loss.last[:, 0].astype(np.float64)
    if len(values) > SPARK:
        values = values[np.linspace(0, len(values) - 1, SPARK).round().astype(np.int64)]
    return tuple(values.tolist())


def main() -> None:
    """Answers until nobody asks any more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the server, which then ends this
    with suppress(OSError, ValueError):  # what asks for more is a run that was made to, and is told so
        resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with suppress(OSError):
        os.nice(10)  # a training on the same machine comes first
    asked: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_listen, args=(asked,), daemon=True).start()
    answers = sys.stdout
    sys.stdout = sys.stderr  # what anything else prints is no answer
    practice = Practice()
    print(READY.decode(), end="", file=answers, flush=True)
    while True:
        print(_reply(practice, asked.get()), file=answers, flush=True)


def _listen(asked: queue.Queue[str]) -> None:
    for line in sys.stdin:
        asked.put(line)
    os._exit(0)  # the server is gone, and with it the reason for whatever is being examined


def _reply(practice: Practice, line: str) -> str:
    try:
        question = json.loads(line)
        if "compare" in question:
            return _compared(question["compare"])
        return to_line(practice.answer(question["examine"]))
    except Exception as error:  # one run that cannot be examined does not end the examination of others
        return json.dumps({"trouble": str(error) or type(error).__name__})


def _compared(paths: list[str]) -> str:
    from holter.comparison.comparing import compare
    from holter.comparison.view import comparison_view

    return json.dumps(as_json(comparison_view(compare(*paths))), allow_nan=False)
