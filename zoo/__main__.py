"""python -m zoo: trains, judges, prints the tables, and fails where Holter was wrong."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from zoo.judging import Planted, Row, judge, judge_planted
from zoo.processes import Done, run_all
from zoo.table import document, failures, healthy_table, planted_table, summary
from zoo.trainings import MODULES, modules_of


def main() -> int:
    parser = argparse.ArgumentParser(prog="zoo", description=__doc__)
    parser.add_argument("--only", action="append", metavar="PATTERN", help="names, as a shell pattern; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="files of trainings at a time")
    parser.add_argument("--list", action="store_true", help="names, steps and faults")
    parser.add_argument("--healthy", action="store_true", help="no planted faults")
    parser.add_argument("--faults", action="store_true", help="planted faults alone")
    parser.add_argument("--into", type=Path, help="write the tables to this file")
    parser.add_argument("--keep", type=Path, help="keep results, logs and runs in this directory")
    parser.add_argument("--reuse", choices=("bare", "all"), help="what --keep has is not trained again")
    asked = parser.parse_args()
    options = [f"--{name}" for name in ("list", "healthy", "faults") if getattr(asked, name)]
    options += [f"--reuse={asked.reuse}"] * (asked.reuse is not None)
    options += [f"--only={pattern}" for pattern in asked.only or ()]
    hosts = run_all(_modules(asked.only), options, asked.jobs, asked.keep)
    done = [one for found in hosts for one in found]
    if asked.list:
        for one in done:
            print(one.listed.name, one.listed.error or one.listed.steps, *(f"[{fault}]" for fault in one.listed.faults))
        return 0
    rows, planted = _rows(done), _planted(done)
    if not rows and not planted:
        parser.error(f"nothing is called {' or '.join(asked.only or ['*'])}: see --list")
    print("\n".join([healthy_table(rows), *([planted_table(planted)] if planted else []), summary(rows, planted)]))
    if asked.into is not None:
        asked.into.write_text(document(rows, planted))
    wrong = failures(rows, planted)
    print(*(f"- {words}" for words in wrong), sep="\n")
    return 1 if wrong else 0


def _modules(patterns: Sequence[str] | None) -> list[str]:
    """Return the files that can hold what is asked for, so that no other package is imported."""
    packages = [pattern.split("/")[0] for pattern in patterns or ["*"]]
    found = (MODULES if set(package) & set("*?[") else modules_of(package) for package in packages)
    return list(dict.fromkeys(module for modules in found for module in modules))


def _rows(done: Iterable[Done]) -> list[Row]:
    rows = []
    for one in done:
        name, steps = one.listed.name, one.listed.steps
        if one.listed.error:
            rows.append(Row(name, (f"cannot be imported: {one.listed.error}",)))
        elif one.bare is not None and one.watched is not None:
            rows.append(judge(name, steps, one.bare, one.watched))
    return sorted(rows, key=lambda row: row.name)


def _planted(done: Iterable[Done]) -> list[Planted]:
    found = [
        judge_planted(one.listed.name, fault, one.listed.faults[fault], result)
        for one in done
        for fault, result in one.planted.items()
    ]
    return sorted(found, key=lambda planted: (planted.name, planted.fault))


if __name__ == "__main__":
    sys.exit(main())
