"""The lines about a run as a whole: how it stands, how it went, where the time and the memory went."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holter.scalar_summary import Course, Scalars
from holter.summary import Summary
from holter.tables import shorten, sparkline
from holter.words import amount, duration, number, printable, share, size, stage_name

STATE_STYLES = {
    "finished": "green",
    "running": "cyan",
    "failed": "bold red",
    "crashed": "bold red",
    "unreadable": "bold red",
    "interrupted": "yellow",
    "stopped": "yellow",
    "ended": "yellow",
}
SEVERITY_STYLES = {"critical": "bold red", "warning": "yellow", "info": "dim", "": ""}
_VALIDATIONS = 4  # that are shown
_SHORT = 60  # seconds
_NAME_CELLS = 24  # a name among them may take


def render_header(summary: Summary) -> RenderableType:
    """A line for each thing that is known."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, line in (*_about(summary), *_courses(summary.scalars), *_work(summary.scalars), *_record(summary)):
        if line:
            grid.add_row(title, line)
    return grid


def _about(summary: Summary) -> Iterator[tuple[str, Text]]:
    yield "run", Text(printable(summary.path), "bold")
    yield "state", _state_line(summary)
    yield "model", _model_line(summary)
    yield "optimizer", _optimizer_line(summary)


def _state_line(summary: Summary) -> Text:
    by = "by" if summary.state == "stopped" else "with"
    error = f" {by} {printable(summary.error)}" if summary.error else ""
    steps = f"{summary.steps:,} step{'' if summary.steps == 1 else 's'} in {duration(summary.scalars.seconds)}"
    again = f", in {summary.segments} segments" if summary.segments > 1 else ""
    line = Text(printable(summary.state) + error, STATE_STYLES.get(summary.state, ""))
    return line.append(f"  {steps}{again}" if summary.steps else "", "not bold default")


def _model_line(summary: Summary) -> Text:
    words = [
        summary.model,
        f"{amount(summary.parameters)} parameters" if summary.parameters is not None else "",
        *(f"{name} {version}" for name, version in summary.versions.items() if name == "torch"),
    ]
    return Text(printable(", ".join(filter(None, words))) or "unknown: run.json is missing or damaged")


def _optimizer_line(summary: Summary) -> Text:
    kinds = Counter(summary.optimizers)  # one per parameter is a page of the same name
    optimizer = " and ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.items())
    scalars = summary.scalars
    words = [f"{optimizer} with {summary.scheduler}" if optimizer and summary.scheduler else optimizer]
    words += [_rates(scalars.learning_rates)] if scalars.learning_rates else []
    decays = sorted(set(scalars.weight_decays))
    words += [f"weight decay {' and '.join(map(number, decays))}"] if any(decays) else []
    counted = scalars.optimizer_step
    words += [f"settings {summary.optimizer_settings}"] if summary.optimizer_settings else []
    words += [f"at its step {counted:,}"] if counted is not None and counted != summary.steps else []
    return Text(printable(", ".join(filter(None, words))))


def _rates(groups: tuple[Course, ...]) -> str:
    """Of the group with the highest rate, and how many others there are."""
    course = max(groups, key=lambda group: group.highest)
    others = len({(group.first, group.last, group.highest) for group in groups}) - 1
    first, last, highest = map(number, (course.first, course.last, course.highest))
    if first == last == highest:
        words = f"rate {last}"
    else:
        words = f"rate {first} → {last}" + (f", highest {highest}" if highest not in (first, last) else "")
    return words + (f", lower in {others} more group{'s' if others > 1 else ''}" if others else "")


# How it went ----------------------------------------------------------------------------------------------------


def _courses(scalars: Scalars) -> Iterator[tuple[str, Text]]:
    if scalars.loss is not None:
        yield "loss", _course_line(scalars.loss).append(_lowest(scalars.loss), "dim")
    else:
        yield "loss", Text("not known: monitor.log(loss=loss) after each step", "dim")
    for name, course in list(scalars.validation.items())[:_VALIDATIONS]:
        line = Text() if name == "val_loss" else Text(f"{shorten(printable(name), _NAME_CELLS)} ")
        ends = _lowest(course) if "loss" in name else f"  highest {number(course.highest)}"
        yield "validation", line.append_text(_course_line(course)).append(ends, "dim")
    if scalars.gradient_norm is not None:
        clipped = scalars.clipped_share
        words = f"  clipped in {share(clipped)} of the steps" if clipped is not None else ""
        yield "gradient", _course_line(scalars.gradient_norm).append(words, "dim")
    if scalars.log_sum_exp is not None:
        first, last = number(scalars.log_sum_exp.first), number(scalars.log_sum_exp.last)
        yield "logits", Text(f"log-sum-exp {first if first == last else f'{first} → {last}'}")
    if scalars.loss_scale is not None:
        skipped = f", {share(scalars.skipped_share)} of the steps skipped" if scalars.skipped_share else ""
        if scalars.partly_skipped_share:
            skipped += f", in {share(scalars.partly_skipped_share)} by some of the optimizers alone"
        yield "loss scale", Text(f"{number(scalars.loss_scale.first)} → {number(scalars.loss_scale.last)}{skipped}")


def _course_line(course: Course) -> Text:
    ends = Text.assemble(_value(course.first), " → ", _value(course.last))
    return ends.append(f"  {sparkline(course.values, 24)}" if len(course.values) > 1 else "", "cyan")


def _value(value: float) -> tuple[str, str]:
    return number(value), "bold" if math.isfinite(value) else "bold red"


def _lowest(course: Course) -> str:
    return f"  lowest {number(course.lowest)} at step {course.lowest_step:,}"


# Time and memory ------------------------------------------------------------------------------------------------


def _work(scalars: Scalars) -> Iterator[tuple[str, Text]]:
    yield "batch", _batch_line(scalars)
    yield "time", _time_line(scalars)
    yield "memory", _memory_line(scalars)


def _batch_line(scalars: Scalars) -> Text:
    words = []
    if scalars.batch_size is not None:
        low, high = number(scalars.batch_size.lowest), number(scalars.batch_size.highest)
        words.append(f"{low if low == high else f'{low} to {high}'} examples")
    for name, course in scalars.speeds.items():
        words.append(f"{number(course.median)} {name.removesuffix('_per_second')} a second")
    again = scalars.batches_repeated
    line = Text(", ".join(words))
    return line.append(f"{', ' if words else ''}{again:,} seen before" if again else "", "yellow")


def _time_line(scalars: Scalars) -> Text:
    words = [f"{stage_name(stage)} {share(part)}" for stage, part in scalars.stages.items()]
    step = f"{duration(scalars.step_time.median)} a step" if scalars.step_time is not None else ""
    if not words or not step:
        return Text(step)
    return Text(f"{step}: {', '.join(words)}")


def _memory_line(scalars: Scalars) -> Text:
    words = []
    for name, title in (("process_memory", "process"), ("gpu_memory", "GPU")):
        now, peak = scalars.machine.get(name), scalars.machine.get(f"{name}_peak")
        total = scalars.machine.get(f"{name}_total")
        if now is not None:
            at_most = f", {size(int(peak))} at most" if peak is not None else ""
            words.append(f"{title} {size(int(now))}{at_most}{f' of {size(int(total))}' if total is not None else ''}")
    for name, title in (("cpu_share", "processor"), ("gpu_utilisation", "GPU")):
        if name in scalars.machine:
            words.append(f"{title} {share(scalars.machine[name])} busy")
    return Text("; ".join(words))


# The record itself ----------------------------------------------------------------------------------------------


def _record(summary: Summary) -> Iterator[tuple[str, Text]]:
    line = Text(f"{summary.records:,} steps")
    line.append(f", {summary.dropped:,} records dropped", "bold red" if summary.dropped else "")
    found = summary.integrity
    yield "recorded", line.append(f", {found.words or '0 bytes unreadable'}", SEVERITY_STYLES[found.severity])
    if summary.scalars.monitor_cost is not None:
        cost, seconds = summary.scalars.monitor_cost, summary.scalars.seconds
        line = Text(f"{share(cost)} of the time")
        if seconds < _SHORT:  # the budget has an advance, which is most of a run this short
            line.append(f"  {cost * seconds:.1f} s, the first looks and their set-up among them", "dim")
        yield "monitoring", line
    yield "activations", Text(printable(summary.activations), "dim")
    for problem in summary.problems:
        words = f"step {problem.step}: Holter could not {problem.where}: {problem.what}"
        yield "problem", Text(printable(words), "yellow")
