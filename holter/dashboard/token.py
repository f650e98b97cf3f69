"""How the token comes here and how the browser gets it: never on a command line, which all users of a machine see."""

from __future__ import annotations

import html
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LONGEST = 4096  # bytes
_LEAD_ON = '<!doctype html><meta charset="utf-8"><title>Holter</title><meta http-equiv="refresh" content="0;url={}">\n'


def token_in(path: Path) -> str:
    """The token that a file holds. ValueError where there is none, or where others may read it as well."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            mode = os.fstat(file).st_mode
            found = os.read(file, _LONGEST)
        finally:
            os.close(file)
    except OSError as error:
        raise ValueError(f"cannot read the token in {path}: {error.strerror or error}") from error
    if os.name == "posix" and mode & 0o077:
        raise ValueError(f"other users may read or change the token in {path}: chmod 600 {path}")
    try:
        token = found.decode().strip()
    except UnicodeDecodeError:
        token = ""
    if not token:
        raise ValueError(f"there is no token in {path}: it should hold one line of text")
    return token


@contextmanager
def private_page(address: str) -> Iterator[str]:
    """The URL of a page that leads on to an address and that nobody else can read, for as long as this lasts."""
    directory = tempfile.mkdtemp(prefix="holter-")  # for its owner alone
    try:
        page = Path(directory) / "open.html"
        with os.fdopen(os.open(page, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(_LEAD_ON.format(html.escape(address)))
        yield page.as_uri()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
