"""A process that computes for the server: it is asked by lines of JSON, and ends with the server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

import anyio

PATIENCE = 40.0  # seconds for an answer; one takes a second of reading, and a few where all is read
READY = b"ready\n"  # what it says first
_LINE = 256 << 20  # bytes of an answer
# The path of this process and not the working directory, where anyone may have put a module.
_PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from holter.dashboard.worker import main; main()"

_Said = TypeVar("_Said")


class Died(Exception):
    """It ended, said nothing for too long, or said what is no answer."""


class NotStarted(Died):
    """It never was: this machine has no memory, or this process no descriptors. No fault of what it is asked."""


class Process:
    """Started when it is first asked, and again after it died. One question at a time."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._process: asyncio.subprocess.Process | None = None

    async def ask(self, question: Any) -> bytes:
        """The line that it answers. Raises Died, and is then ready to be asked something else."""
        if self._process is None or self._process.returncode is not None:
            await self._in_time(self._start(), NotStarted)
        return await self._in_time(self._ask(question), Died)

    async def _in_time(self, work: Coroutine[Any, Any, _Said], failure: type[Died]) -> _Said:
        try:
            # asyncio.wait_for forgets that it was cancelled where the answer comes in that moment (before Python 3.12).
            with anyio.fail_after(self._patience):
                return await work
        except TimeoutError as error:
            await self.stop()
            raise failure(f"it said nothing for {self._patience:.0f} s") from error
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            await self.stop()
            raise failure(_words(error)) from error
        except asyncio.CancelledError:  # its answer would be taken for that to the next question
            await self.stop()
            raise

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            process.kill()  # it keeps nothing that could be lost
        await process.wait()

    async def _start(self) -> None:
        self._process = await _started()
        assert self._process.stdout is not None
        if await self._process.stdout.readline() != READY:
            raise ValueError("it ended before it began")

    async def _ask(self, question: Any) -> bytes:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(question).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line.endswith(b"\n"):
            raise ValueError("it ended")
        return line


async def _started() -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _PROGRAM, *sys.path),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_LINE,
        env={name: value for name, value in os.environ.items() if name != "HOLTER_TOKEN"},
    )


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
