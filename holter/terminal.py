"""What commands share: the terminal that they print to, JSON for scripts, failures of the disk in a line."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from holter.run import Run

FOUND = 3  # exit code of --fail-on: 1 says that something could not be done, 2 that a command was not understood


UNREADABLE = 1


def readable(run: Run) -> Run:
    """Return the run. ValueError, and so exit code 1, if nothing in its journals can be read."""
    if run.state == "unreadable":
        raise ValueError(unreadable(str(run.path), run.integrity.sentence))
    return run


def unreadable(name: str, sentence: str) -> str:
    """Return what is said of a run of which nothing can be read."""
    return f"{name}: {sentence} Restore its journals from a copy if there is one, or train again"


def about(error: OSError) -> str:
    return f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)


def console() -> Console:
    from rich.console import Console

    # Into a pipe or a file goes the whole width: what reads there does not mind long lines.
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160
    return Console(highlight=False, width=width)


def print_json(value: Any) -> None:
    from holter.summary import as_json

    click.echo(json.dumps(as_json(value), indent=1, allow_nan=False))
