"""A stored run, sent to a sink as if it trained now: whole or in part."""

from __future__ import annotations

from holter.run import Run
from holter.sinks import Sink


def send(run: Run, sink: Sink, first: int = 0, last: int | None = None) -> tuple[int, int]:
    """Sends the steps from `first` to `last`, and what was found in them; returns how many of each. Closes the sink.

    Where a resume took steps again, both are sent, in the order in which they were taken.
    """
    findings = [one for one in run.findings if first <= one.step and (last is None or one.step <= last)]
    waiting, steps = sorted(findings, key=lambda finding: finding.step), 0
    try:
        for record in run.records:
            if record.step < first or (last is not None and record.step > last):
                continue
            while waiting and waiting[0].step < record.step:
                sink.alert(waiting.pop(0))
            sink.write(record)
            steps += not record.late
        for finding in waiting:
            sink.alert(finding)
    finally:
        sink.close()
    return steps, len(findings)


def span(text: str) -> tuple[int, int | None]:
    """
    >>> span("10:20"), span("10:"), span(":20"), span(":")
    ((10, 20), (10, None), (0, 20), (0, None))
    """
    first, colon, last = text.partition(":")
    if not colon or not all(part == "" or part.isdecimal() for part in (first, last)):
        raise ValueError(f"--steps {text}: give the first and the last step, such as 100:200, 100: or :200")
    return int(first or 0), int(last) if last else None
