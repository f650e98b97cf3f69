"""holter clinic run, show, score: what they do, once the command line has read its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from holter.clinic.accuracy import as_rich, document, sheets
from holter.clinic.case import Case
from holter.clinic.cases import all_cases
from holter.clinic.judging import judge_all, judges
from holter.clinic.processes import Done
from holter.clinic.score import Outcome
from holter.clinic.storing import directory_of, is_current, is_stored, select, store_all

Result = TypeVar("Result")


def run(console: Console, *, only: str | None, split: str, jobs: int, root: Path) -> int:
    """Trains what is missing or was made by other code; returns how many cases failed."""
    cases = select(all_cases(), only, split)
    missing = [case for case in cases if not is_current(case, root)]
    if len(cases) > len(missing):
        console.print(f"{len(cases) - len(missing)} of {len(cases)} cases are there already, made by this code")
    failed = [done for done in _shown(console, store_all(missing, root, jobs), len(missing), "Training") if done.error]
    for done in failed:
        console.print(f"[bold red]failed[/] {done.task.id}: {done.error}", highlight=False)
    done_now = len(missing) - len(failed)
    console.print(f"{done_now} trained into {root}" + (f", {len(failed)} failed" if failed else ""))
    return len(failed)


def show(console: Console, named: str | None, root: Path) -> None:
    """Lists the cases, or shows one."""
    cases = all_cases()
    exact = next((case for case in cases if case.id == named), None)
    if exact is not None:
        console.print(_one(exact, root))
        return
    table = Table("case", "kind", "cause", "onset", "place", "steps", "stored", box=None, pad_edge=False)
    for case in select(cases, named, "all"):
        stored = "yes" if is_current(case, root) else "by other code" if is_stored(case, root) else ""
        place = ", ".join(case.layers) or case.where or ""
        onset = str(case.onset) if case.cause else ""
        table.add_row(case.id, case.kind, case.cause or "", onset, place, str(case.recipe.steps), stored)
    console.print(table)


def _one(case: Case, root: Path) -> Table:
    table = Table(title=case.id, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    known = {
        "cause": case.cause or "healthy",
        "where": case.where,
        "layers": ", ".join(case.layers) or None,
        "onset": case.onset if case.cause else None,
        "shows": case.shows if case.cause else None,
        "also right": ", ".join(case.also_right) or None,
        "twin": case.twin,
        "half": case.split,
        "fault": getattr(case.hooks, "func", case.hooks).__name__,
        **{name: value for name, value in vars(case.recipe).items() if value is not None},
        "run": directory_of(case, root) if is_stored(case, root) else "not trained yet: holter clinic run",
    }
    for name, value in known.items():
        if value is not None:
            table.add_row(name, str(value))
    return table


def score(
    console: Console,
    *,
    split: str,
    only: str | None,
    jobs: int,
    root: Path,
    into: Path | None,
    rivals: bool,
    train: bool,
) -> int:
    """Prints how well the diagnosis does, and the rules of others; returns how many cases could not be judged."""
    failed = run(console, only=only, split=split, jobs=jobs, root=root) if train else 0
    cases = [case for case in select(all_cases(), only, split) if is_stored(case, root)]
    if not cases:
        raise ValueError(f"no cases of {split} are stored in {root}: train them with `holter clinic run`")
    stale = sum(not is_current(case, root) for case in cases)
    if stale:
        console.print(f"[yellow]{stale} of {len(cases)} cases were made by other code[/]")
    by = judges(rivals)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in by}
    for done in _shown(console, judge_all(cases, root, by, jobs), len(cases), "Judging"):
        if done.result is None:
            failed += 1
            console.print(f"[bold red]not judged[/] {done.task.id}: {done.error}", highlight=False)
        else:
            for name, outcome in done.result.items():
                outcomes[name].append(outcome)
    _tell(console, outcomes, split, into)
    return failed


def _tell(console: Console, outcomes: dict[str, list[Outcome]], split: str, into: Path | None) -> None:
    # As they got done, which differs from time to time: in the clinic's own order the document stays the same.
    place = {case.id: number for number, case in enumerate(all_cases())}
    for found in outcomes.values():
        found.sort(key=lambda outcome: place[outcome.case.id])
    for sheet in sheets(outcomes):
        console.print(as_rich(sheet), "")
    if into is not None:
        into.write_text(document(outcomes, split), "utf-8")
        console.print(f"written to {into}")


def _shown(
    console: Console, work: Iterable[Done[Case, Result]], total: int, words: str
) -> Iterator[Done[Case, Result]]:
    """Passes on what gets done, with a bar in a terminal and a line now and then elsewhere."""
    if not console.is_terminal:
        for count, done in enumerate(work, 1):
            if count == total or count % max(1, total // 20) == 0:
                console.print(f"{words} {count}/{total}")
            yield done
        return
    columns = (
        TextColumn(words),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    # Refreshed by hand: a thread of the bar's would be copied into every process that is forked meanwhile.
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("", total=total)
        for done in work:
            bar.update(task, advance=1, description=done.task.id, refresh=True)
            yield done
