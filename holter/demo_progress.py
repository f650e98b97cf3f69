"""How far a demonstration is: a live bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Show = Callable[[int, str], None]  # steps that are done, and what is said of the last one


@contextmanager
def progress_on(console: Console, steps: int, lines: int) -> Iterator[Show]:
    """About so many `lines` where there is no terminal, the first and the last step among them."""

    def print_line(done: int, said: str) -> None:
        if done in (1, steps) or done % max(1, steps // lines) == 0:
            console.print(f"step {done:>3}/{steps}  {said}")

    if not console.is_terminal:
        yield print_line
        return
    columns = (
        TextColumn("step {task.completed:>3.0f}/{task.total:.0f}"),
        BarColumn(bar_width=None),
        TextColumn("{task.description}"),
        TimeRemainingColumn(compact=True),
    )
    with Progress(*columns, console=console, expand=True) as bar:
        task = bar.add_task("", total=steps)
        yield lambda done, said: bar.update(task, completed=done, description=said)
