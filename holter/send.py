"""A stored run, sent to a sink as if it trained now: whole or in part."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from holter.diagnosis.finding import Finding
from holter.record import Record
from holter.run import Run
from holter.sinks import Sink
from holter.sinks.sink import TellsEnding

WAYS_OUT = {
    "tensorboard": "name a directory you may write, where there is room, with -o",
    "wandb": "`wandb login` first, or set WANDB_MODE=offline and `wandb sync` later",
    "mlflow": "see that MLFLOW_TRACKING_URI names a store or server that answers, and lets you write",
    "trackio": "see that TRACKIO_DIR names a directory you may write, where there is room",
}


class NotSent(Exception):
    """A sink failed with an error of this kind. Its words are not repeated: they may hold an address or a password."""


def send(run: Run, sink: Sink, first: int = 0, last: int | None = None) -> tuple[int, int]:
    """Sends the steps from `first` to `last`, and what was found in them; returns how many of each. Closes the sink.

    A finding that is over is told twice, as it was while training: at its step, and at the last at which it was seen.
    Where a resume took steps again, both are sent, in the order in which they were taken. Raises NotSent.
    """

    def is_asked(step: int) -> bool:
        return first <= step and (last is None or step <= last)

    findings = [one for one in run.findings if is_asked(one.step)]
    waiting = [(step, one) for step, one in _as_they_came(findings) if is_asked(step)]
    records = records_in(run, first, last)
    try:
        _write(records, waiting, sink)
        if isinstance(sink, TellsEnding):
            sink.will_end(run.state)
        sink.close()
    except Exception as error:
        raise NotSent(type(error).__name__) from error
    return sum(not record.late for record in records), len(findings)


def records_in(run: Run, first: int, last: int | None) -> list[Record]:
    found = [record for record in run.records if first <= record.step and (last is None or record.step <= last)]
    if not found:
        steps = [record.step for record in run.records]
        has = f"steps {min(steps):,} to {max(steps):,}" if steps else "no steps"
        raise ValueError(f"there is nothing to send: the run has {has}")
    return found


def _write(records: list[Record], waiting: list[tuple[int, Finding]], sink: Sink) -> None:
    try:
        for record in records:
            while waiting and waiting[0][0] < record.step:
                sink.alert(waiting.pop(0)[1])
            sink.write(record)
        for _, finding in waiting:
            sink.alert(finding)
    except BaseException:
        with suppress(Exception):  # the first error is the one to tell
            sink.close()
        raise


def _as_they_came(findings: list[Finding]) -> list[tuple[int, Finding]]:
    """With the step at which each is told."""
    began = [(one.step, replace(one, until=None)) for one in findings]
    over = [(max(one.step, one.until), one) for one in findings if one.until is not None]
    return sorted(began + over, key=lambda told: told[0])


def span(text: str) -> tuple[int, int | None]:
    """
    >>> span("10:20"), span("10:"), span(":20"), span(":")
    ((10, 20), (10, None), (0, 20), (0, None))
    """
    first, colon, last = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, last)):
        raise ValueError(f"--steps {text}: give the first and the last step, such as 100:200, 100: or :200")
    return int(first or 0), int(last) if last else None
