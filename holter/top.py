"""`holter top`: a training as it runs, in a terminal. Frames are made of Vitals alone; the loop is at the end.

Names come from the user's model and disk, and may hold anything: all of them pass through `printable`.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from holter.diagnosis.finding import Finding
from holter.following import Pulse, Trace, Vitals
from holter.header import STATE_STYLES
from holter.layer_summary import Layer, Role
from holter.layer_tables import layer_table
from holter.record import is_validation
from holter.report.verdict import first_sentence, place_of, ranked, verdict_of
from holter.run import find_run, is_run
from holter.tables import logarithms, shorten, sparkline
from holter.words import amount, duration, number, printable, share, size, stage_name

_POLL_SECONDS = 0.5
_TITLE_CELLS, _VALUE_CELLS = 10, 20
_MOST_LAYERS = 15  # of a role
_LEAST_BAR = 8  # cells
_WIDE = 20.0  # times from the lowest value to the highest, from which on the scale is logarithmic
_LEAST_ROOM, _ROOM = 6, 8  # lines that the layers of a role need, and that each of several has
_FIRST_ROLES = ("gradient", "update", "activation", "attention", "weight")
_SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim"}
_STAGE_STYLES = {
    "data": "yellow",
    "forward": "blue",
    "backward": "cyan",
    "optimizer": "magenta",
    "other": "bright_black",
}
_PLAIN_HEIGHT = 200  # where there is no terminal, nothing has to fit

Lines = list[list[Segment]]


class Frame:
    """One picture of a run, as high and as wide as there is room; None where it may be as high as it likes."""

    def __init__(self, vitals: Vitals, height: int | None = None, hint: str = "") -> None:
        self._vitals, self._height, self._hint = vitals, height, hint

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.update(height=None)

        def lines_of(*parts: RenderableType) -> Lines:
            return console.render_lines(Group(*parts), free, pad=False) if parts else []

        vitals, height = self._vitals, self._height or _PLAIN_HEIGHT
        lines = lines_of(*_head(vitals, options.max_width))
        hint = lines_of(_one_line(self._hint, "dim")) if self._hint else []
        room = height - len(lines) - len(hint)
        rest = lines_of(_one_line("          … and more: `holter diagnose` tells all", "dim"))
        told = _that_fits([lines_of(*parts) for parts in _told(vitals)], room - _room_of_layers(vitals, room), rest)
        shown = lines_of(*_layers(vitals, room - len(told)))
        lines = [*lines, *told, *shown][: height - len(hint)] + hint
        yield from (segment for line in lines[:height] for segment in (*line, Segment.line()))


def _that_fits(variants: Sequence[Lines], room: int, rest: Lines) -> Lines:
    """The first that fits; of the last one as much as does, and that there is a rest."""
    cut = [*variants[-1][: max(room - len(rest), 0)], *rest] if room > len(rest) else []
    return next((lines for lines in variants if len(lines) <= room), cut)


def _one_line(text: str, style: str = "") -> Text:
    return Text(text, style, no_wrap=True, overflow="ellipsis")


# How it stands --------------------------------------------------------------------------------------------------


def _head(vitals: Vitals, width: int) -> Iterator[RenderableType]:
    yield _title(vitals, width)
    if vitals.state == "waiting":
        yield Text(f"There is no run here yet: waiting for it.\n{printable(str(vitals.path))}", "yellow")
        return
    yield _progress(vitals, width)
    yield from (Text(sentence, "yellow") for sentence in vitals.damage)
    yield _verdict(vitals)
    grid = Table.grid(padding=(0, 1))
    grid.add_column(style="dim", no_wrap=True, min_width=_TITLE_CELLS)
    grid.add_column(no_wrap=True, overflow="ellipsis")
    for title, line in (*_courses(vitals, width), *_work(vitals, width)):
        grid.add_row(Text(title), line)  # as text: a string would be read as markup
    if grid.row_count:
        yield Text()
        yield grid


def _title(vitals: Vitals, width: int) -> RenderableType:
    by = "by" if vitals.state == "stopped" else "with"
    state = f"{printable(vitals.state)}{f' {by} {printable(vitals.error)}' if vitals.error else ''}"
    model, parameters = vitals.info.get("model"), vitals.info.get("parameters")
    about = [printable(model)] if isinstance(model, str) else []
    about += [f"{amount(parameters)} parameters"] if isinstance(parameters, int) else []
    line = _one_line("").append(shorten(printable(vitals.path.name), width // 2), "bold")
    line.append(f"  {state}", STATE_STYLES.get(vitals.state, "yellow"))
    return line.append(f"  {', '.join(about)}", "dim")


def _progress(vitals: Vitals, width: int) -> Text:
    """A bar where it is known how far it goes."""
    if vitals.state == "reading":
        return _one_line(f"reading what is there: {share(1 - vitals.unread)}, up to step {vitals.steps:,}", "cyan")
    total, left = vitals.total_steps, vitals.seconds_left
    words = [f"{number(vitals.pace)} steps/s"] if vitals.pace is not None else []
    words += [f"for {duration(vitals.seconds)}"] if vitals.seconds else []
    words += [f"{duration(left)} left"] if left is not None else []
    said = "  ".join(words)
    if total is None:
        return _one_line(f"step {vitals.steps:,}").append(f"  {said}", "dim")
    done = min(vitals.steps / total, 1.0)
    line = _one_line(f"step {vitals.steps:,} of {total:,}  ")
    cells = min(max(width - line.cell_len - len(said) - 9, 0), 60)
    full = round(cells * done)
    line.append("━" * full, "green" if done == 1 else "cyan").append("━" * (cells - full), "bright_black")
    return line.append(f" {share(done):>5}  ").append(said, "dim")


def _verdict(vitals: Vitals) -> Text:
    verdict = verdict_of(vitals.findings, vitals.state, vitals.steps)
    if verdict.state == "sick":  # what to change stands below, with the finding
        return Text(printable(first_sentence(verdict.sentence)), _SEVERITY_STYLES[verdict.severity or "info"])
    return Text(printable(verdict.sentence), "green" if verdict.state == "healthy" else "")


def _courses(vitals: Vitals, width: int) -> Iterator[tuple[str, Text]]:
    cells = max(width - _TITLE_CELLS - _VALUE_CELLS - 3, 1)
    clipped = vitals.scalars.clipped_share if vitals.scalars is not None else None
    words = {"gradient_norm": f"  clipped in {share(clipped)} of late" if clipped else ""}
    titles = {"loss": "loss", "gradient_norm": "gradient", "learning_rate": "rate"}
    for name in sorted(vitals.traces, key=lambda name: _place(name, (*titles, name))):
        said = words.get(name, "")
        line = _course(vitals.traces[name], max(cells - len(said), 1)).append(said, "dim")
        yield titles.get(name) or shorten(printable(name), _TITLE_CELLS), line
    if vitals.steps and "loss" not in vitals.traces:
        yield "loss", Text("not known: monitor.log(loss=loss) after each step", "dim")


def _place(name: str, order: Sequence[str]) -> tuple[int, str]:
    return (0 if is_validation(name) else order.index(name)) + (name != "loss"), name


def _course(trace: Trace, cells: int) -> Text:
    """First and last value, and the course between."""
    first, last = number(trace.first), number(trace.last)
    line = Text().append(f"{first} → " if first != last else "", "dim")
    line.append(last, "bold" if math.isfinite(trace.last) else "bold red")
    line.append(" " * (_VALUE_CELLS - line.cell_len))
    values = trace.values
    if len(values) < 2 or (values == values[0]).all():
        return line
    known = values[np.isfinite(values)]
    is_wide = len(known) > 0 and 0 < _WIDE * known.min() < known.max()  # one jump would flatten the rest
    return line.append(sparkline(logarithms(values) if is_wide else values, cells), "cyan")


def _work(vitals: Vitals, width: int) -> Iterator[tuple[str, Text]]:
    scalars = vitals.scalars
    if scalars is not None and scalars.step_time is not None:
        yield "time", _time(duration(scalars.step_time.median), scalars.stages, width - _TITLE_CELLS - 1)
    if memory := "; ".join(_memory(vitals)):
        yield "memory", Text(memory)


def _time(step: str, stages: Mapping[str, float], width: int) -> Text:
    """Of a step, and where it goes: as a bar where there is room for one."""
    line, room = Text(f"{step} a step"), width - len(step) - 9
    said = {stage: f" {stage_name(stage)} {share(part)}" for stage, part in stages.items()}
    for stage in sorted(stages, key=lambda stage: stages[stage]):  # in a narrow terminal the small ones are left out
        if sum(map(len, said.values())) > room:
            del said[stage]
    words = Text.assemble(*((text, _STAGE_STYLES[stage]) for stage, text in said.items()))
    cells = min(width - _VALUE_CELLS - words.cell_len - 1, 40)
    if cells >= _LEAST_BAR and stages:
        line.append(" " * (_VALUE_CELLS - line.cell_len))
        for stage, part in stages.items():
            line.append("█" * round(cells * part), _STAGE_STYLES[stage])
    return line.append(" ").append_text(words)


def _memory(vitals: Vitals) -> Iterator[str]:
    for name, title in (("process_memory", "process"), ("gpu_memory", "GPU")):
        used, total = (vitals.newest.get(f"machine/{name}{of}", math.nan) for of in ("", "_total"))
        if math.isfinite(used):
            yield f"{title} {size(int(used))}{f' of {size(int(total))}' if math.isfinite(total) else ''}"
    for name, title in (("cpu_share", "processor"), ("gpu_utilisation", "GPU")):
        if math.isfinite(busy := vitals.newest.get(f"machine/{name}", math.nan)):
            yield f"{title} {share(busy)} busy"


# What is wrong --------------------------------------------------------------------------------------------------


def _told(vitals: Vitals) -> list[list[RenderableType]]:
    """The findings, from all that is said of them to the least."""
    found = ranked(vitals.findings)
    if not found:
        return [[]]
    title = Text.assemble("\n", (f"{len(found)} finding{'s' * (len(found) != 1)}", "bold"))
    return [
        [title, *(part for finding in found for part in _finding(finding, finding.advice))],
        [title, *(part for finding in found for part in _finding(finding, first_sentence(finding.advice)))],
        [title, *(part for finding in found for part in _finding(finding, ""))],
    ]


def _finding(finding: Finding, advice: str) -> Iterator[RenderableType]:
    style = _SEVERITY_STYLES[finding.severity] if finding.until is None else "dim"
    line = _one_line("").append(f" {finding.severity:<8} {printable(finding.cause)}", style)
    line.append(
        f"{printable(place_of(finding))} since step {finding.since:,}", "bold" if finding.until is None else "dim"
    )
    line.append("" if finding.until is None else f", last seen at step {finding.until:,}", "dim")
    yield line.append(f"  confidence {finding.confidence:.0%}", "dim")
    if advice and finding.until is None:
        yield Padding(Text(printable(advice)), (0, 0, 0, 10))


# Layers ---------------------------------------------------------------------------------------------------------


def _room_of_layers(vitals: Vitals, room: int) -> int:
    """What findings leave to them: in a low terminal, nothing."""
    return _LEAST_ROOM if vitals.roles and room >= 2 * _LEAST_ROOM else 0


def _layers(vitals: Vitals, room: int) -> Iterator[RenderableType]:
    """The worst of each role, of as many roles as there is room for."""
    known = {role.role: role for role in vitals.roles}
    shown = [*(role for role in _FIRST_ROLES if role in known), *(role for role in known if role not in _FIRST_ROLES)]
    most_roles = max(room // _ROOM, int(room >= _LEAST_ROOM))
    roles = [known[role] for role in shown if role != "batch"][:most_roles]
    for role in roles:
        most = min(room // len(roles) - 3, _MOST_LAYERS)  # an empty line, a heading and the titles of the columns
        heading = Text.assemble(
            "\n",
            (f"{printable(role.role).replace('_', ' ')}, {'most idle' if role.in_depth else 'worst'} layers", "bold"),
            (f"  {len(role.layers):,} in all, as of step {role.last_step:,}", "dim"),
        )
        yield heading
        yield layer_table(role, _worst(role)[:most])


def _worst(role: Role) -> Sequence[Layer]:
    """Those that are read in depth have no siblings: the worst has the most idle units."""
    if not role.in_depth:
        return role.layers

    def idle(layer: Layer) -> float:
        return max(layer.extras.get(name, 0.0) for name in ("dead", "saturated", "near_overflow"))

    return sorted(role.layers, key=lambda layer: (layer.nonfinite == 0, -idle(layer)))


# The loop -------------------------------------------------------------------------------------------------------


def show_top(path: str | os.PathLike[str], console: Console, *, once: bool = False) -> str:
    """Follows a run until it is over, or until q or Ctrl-C, and leaves the last frame; returns its state.

    Without a terminal, and where `once` is asked for, it is one frame of what is there.
    """
    pulse = Pulse(_place_of(Path(path)))
    if once or not console.is_terminal:
        find_run(pulse.path)  # says what is wrong with what is no run
        pulse.read_on()
        pulse.finish()
        vitals = pulse.vitals(time.time())
        console.print(Frame(vitals), end="")
        return vitals.state
    vitals = Vitals(pulse.path)
    try:
        with _Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            for vitals in _follow(pulse, keys):
                live.update(Frame(vitals, console.height - 1, "q ends this view; the training goes on"), refresh=True)
    except KeyboardInterrupt:
        pass  # the last frame stands for what was known
    console.print(Frame(vitals, console.height - 1), end="")
    return vitals.state


def _follow(pulse: Pulse, keys: _Keys) -> Iterator[Vitals]:
    """What is known, again and again, until the run is over or q is pressed."""
    while True:
        all_is_read = pulse.read_on(_POLL_SECONDS)
        vitals = pulse.vitals(time.time(), all_is_read=all_is_read)
        if all_is_read and vitals.state not in ("running", "waiting", "empty"):
            pulse.finish()
            yield pulse.vitals(time.time())
            return
        yield vitals
        if keys.pressed("q", _POLL_SECONDS if all_is_read else 0.0):
            return


def _place_of(path: Path) -> Path:
    """By its directory, or by its name as `holter runs` lists it."""
    named = Path("runs") / path
    return named if not path.exists() and len(path.parts) == 1 and is_run(named) else path


class _Keys:
    """Keys as they are pressed, without Enter; none where there is no terminal to press them in."""

    def __enter__(self) -> _Keys:
        self._restore: list[Any] | None = None
        try:
            import termios
            import tty
        except ImportError:  # not everywhere
            return self
        with contextlib.suppress(OSError, ValueError, AttributeError, termios.error):  # stdin is no terminal
            self._restore = termios.tcgetattr(sys.stdin.fileno())
            tty.setcbreak(sys.stdin.fileno())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._restore is not None:
            import termios

            termios.tcsetattr(sys.stdin.fileno(), termios.TCSADRAIN, self._restore)

    def pressed(self, key: str, seconds: float) -> bool:
        """Whether this one is, within so many seconds."""
        if self._restore is None:
            time.sleep(seconds)
            return False
        if not select.select([sys.stdin], [], [], seconds)[0]:
            return False
        try:
            keys = os.read(sys.stdin.fileno(), 64)
        except OSError:
            keys = b""
        return not keys or key.encode() in keys.lower()  # nothing to read: the terminal is gone, and so is who looked
