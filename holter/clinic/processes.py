"""Work in forked processes, each in a fresh state; what one raises, or that it died, is told and holds up nobody."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Done(Generic[Task, Result]):
    """What became of a task: its result, or the words of what went wrong."""

    task: Task
    result: Result | None = None
    error: str = ""


def in_processes(work: Callable[[Task], Result], tasks: Iterable[Task], jobs: int) -> Iterator[Done[Task, Result]]:
    """Each task in a process of its own, so many at a time, as they get done.

    A process is forked, so that torch is imported once; it shares no state that a task could change for another.
    """
    context = multiprocessing.get_context("fork")
    waiting, running = iter(tasks), dict[Connection, tuple[Task, BaseProcess]]()
    try:
        while True:
            while len(running) < jobs and (task := next(waiting, None)) is not None:
                ours, theirs = context.Pipe(duplex=False)
                process: BaseProcess = context.Process(target=_run, args=(work, task, theirs))
                process.start()
                theirs.close()
                running[ours] = task, process
            if not running:
                return
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                yield _collect(ready, *running.pop(ready))
    finally:
        for _, left in running.values():
            left.terminate()


def _run(work: Callable[[Any], Any], task: Any, pipe: Connection) -> None:
    try:
        message = work(task), ""
    except Exception as error:
        # The last line of ours, not the one deep inside numpy or torch.
        frames = traceback.extract_tb(error.__traceback__)
        where = next((frame for frame in reversed(frames) if "/holter/" in frame.filename), frames[-1])
        message = None, f"{type(error).__name__}: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"
    pipe.send(message)


def _collect(pipe: Connection, task: Task, process: BaseProcess) -> Done[Task, Any]:
    try:
        result, error = pipe.recv()
    except EOFError:  # it died before it could say anything
        process.join()
        return Done(task, error=f"its process ended with code {process.exitcode}")
    process.join()
    return Done(task, result, error)
