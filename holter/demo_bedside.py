"""At the bedside of a training: a sink that shows every step and tells what the doctor says, the moment it is said."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from holter.demo_progress import progress_on
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.finding import Finding
from holter.diagnosis.render import render_findings
from holter.record import Record
from holter.run import open_run

_LINES = 6  # that are printed where there is no terminal
_LATEST_SECONDS = 5.0  # that the sinks' thread may take after the training
_BORDERS = {"critical": "red", "warning": "yellow"}

OnStep = Callable[[int, Mapping[str, float]], None]  # its number, and the scalars that are known of it
OnFinding = Callable[[Finding, str], None]  # and when it was said


class Bedside:
    """A sink with a doctor of its own. `on_finding` is called once for each cause that an incident is taken for."""

    def __init__(self, run: Path, on_step: OnStep, on_finding: OnFinding) -> None:
        self._run, self._on_step, self._on_finding = run, on_step, on_finding
        self._doctor: Doctor | None = None
        self._told: set[tuple[int, str]] = set()  # number of the incident, and cause
        self._scalars: dict[str, float] = {}  # of the step that was last taken
        self._taken = 0
        self._lock, self._closed = threading.Lock(), threading.Event()

    def write(self, record: Record) -> None:
        with self._lock:
            if not self._closed.is_set():
                self._take(record)

    def alert(self, finding: Finding) -> None:
        """What the monitor itself says is in its findings; here speaks the doctor."""

    def close(self) -> None:
        self._closed.set()

    def finish(self) -> tuple[Finding, ...]:
        """After the training: the last word. What a slow machine kept from coming through the sink is read back."""
        self._closed.wait(_LATEST_SECONDS)
        with self._lock:
            self._closed.set()
            for record in open_run(self._run).records[self._taken :]:
                self._take(record)
            doctor = self._doctor or Doctor({})
            doctor.finish()
            self._tell(doctor)
        return doctor.findings

    def _take(self, record: Record) -> None:
        if self._doctor is None:
            self._doctor = Doctor(open_run(self._run).info)
        self._taken += 1
        # What is logged after a step, as the loss here, may come in a record of its own.
        self._scalars = {**(self._scalars if record.late else {}), **record.scalars}
        if "loss" in record.scalars:
            self._on_step(record.step, self._scalars)
        self._doctor.take(record)
        self._tell(self._doctor)

    def _tell(self, doctor: Doctor) -> None:
        incidents = [finding for finding in doctor.findings if finding.where != "monitor"]
        for number, finding in enumerate(incidents):
            if finding.severity != "info" and (number, finding.cause) not in self._told:
                again = ", on second thoughts" if any(number == told for told, _ in self._told) else ""
                self._told.add((number, finding.cause))
                self._on_finding(finding, f"at step {doctor.chart.step:,}{again}")


@contextmanager
def steps_on(console: Console, steps: int) -> Iterator[OnStep]:
    """Shows the training."""
    with progress_on(console, steps, _LINES) as show:
        yield lambda step, scalars: show(step + 1, _describe(scalars))


def _describe(scalars: Mapping[str, float]) -> str:
    loss, norm = (scalars.get(name, float("nan")) for name in ("loss", "gradient_norm"))
    return f"loss {loss:6.3g}  gradient norm {norm:6.3g}"


def print_finding(console: Console, finding: Finding, when: str, remark: str) -> None:
    """As `holter diagnose` prints it, in a frame where there is a terminal."""
    told = Group(render_findings((finding,), finding.step + 1), Text(remark, "bold"))
    if console.is_terminal:
        border = _BORDERS.get(finding.severity, "dim")
        console.print(Panel(told, title=f"Holter, {when}", title_align="left", border_style=border))
    else:
        console.print(Group(Text(f"Holter, {when}:"), told))
