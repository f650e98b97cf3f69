"""python -m zoo: trains, judges, prints the tables, and fails where Holter was wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from zoo.judging import Planted, Row, judge, judge_planted
from zoo.listing import Listed
from zoo.processes import Pair, Task, list_all, run_all
from zoo.table import document, failures, healthy_table, planted_table, summary
from zoo.trainings import MODULES, modules_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="zoo", description=__doc__)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names, as a shell pattern; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--list", action="store_true", help="names, steps and faults")
    parser.add_argument("--healthy", action="store_true", help="no planted faults")
    parser.add_argument("--faults", action="store_true", help="planted faults alone")
    parser.add_argument("--into", type=Path, help="write the tables to this file")
    parser.add_argument("--keep", type=Path, help="keep results and logs in this directory")
    asked = parser.parse_args()
    chosen = [one for one in list_all(_modules(asked.only), asked.jobs) if one.error or _is_asked(one.name, asked.only)]
    if asked.list:
        for one in chosen:
            print(one.error or one.name, one.steps, *(f"[{fault}]" for fault in one.faults))
        return 0
    if not chosen:
        parser.error(f"no training is called {' or '.join(asked.only)}: see --list")
    broken = [Row(one.name, (f"cannot be imported: {one.error}",)) for one in chosen if one.error]
    chosen = [one for one in chosen if not one.error]
    tasks = [] if asked.faults else [Task(one.name) for one in chosen]
    tasks += [] if asked.healthy else [Task(one.name, fault) for one in chosen for fault in one.faults]
    rows, planted = _train(chosen, tasks, asked.jobs, asked.keep)
    rows = [*rows, *broken]
    print("\n".join(["", healthy_table(rows), *([planted_table(planted)] if planted else []), summary(rows, planted)]))
    if asked.into is not None:
        asked.into.write_text(document(rows, planted))
    wrong = failures(rows, planted)
    print(*(f"- {words}" for words in wrong), sep="\n")
    return 1 if wrong else 0


def _is_asked(name: str, patterns: Sequence[str] | None) -> bool:
    return patterns is None or any(fnmatchcase(name, pattern) for pattern in patterns)


def _modules(patterns: Sequence[str] | None) -> list[str]:
    """Return the files that can hold what is asked for, so that no other package is imported."""
    packages = [pattern.split("/")[0] for pattern in patterns or ["*"]]
    found = (MODULES if set(package) & set("*?[") else modules_of(package) for package in packages)
    return list(dict.fromkeys(module for modules in found for module in modules))


def _train(
    chosen: Sequence[Listed], tasks: Sequence[Task], jobs: int, kept: Path | None
) -> tuple[list[Row], list[Planted]]:
    known = {one.name: one for one in chosen}
    rows: dict[Task, Row] = {}
    planted: dict[Task, Planted] = {}
    for pair in run_all(tasks, jobs, kept):
        task = pair.task
        if task.fault is not None:
            truth = known[task.name].faults[task.fault]
            planted[task] = judge_planted(task.name, task.fault, truth, pair.watched)
        else:
            rows[task] = _judged(known[task.name], pair)
        said = planted[task].answer if task.fault is not None else rows[task].faults or "passes"
        print(f"{task.name} {task.fault or ''}: {said}", file=sys.stderr, flush=True)
    return [rows[task] for task in tasks if task in rows], [planted[task] for task in tasks if task in planted]


def _judged(training: Listed, pair: Pair) -> Row:
    assert pair.bare is not None
    return judge(training.name, training.steps, pair.bare, pair.watched)


if __name__ == "__main__":
    sys.exit(main())
