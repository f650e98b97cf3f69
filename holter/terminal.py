"""What commands share: the terminal that they print to, JSON for scripts, failures of the disk in a line."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

FOUND = 3  # exit code of --fail-on: 1 says that something could not be done, 2 that a command was not understood


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
