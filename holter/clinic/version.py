"""Which code a stored case was made by: everything that its training imports, and not the rules that read it later."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch

_ROOTS = ("holter.clinic.cases", "holter.clinic.training")
_READERS = ("holter.diagnosis",)  # what is made of a run does not change the run


@cache
def code_version() -> str:
    """A hash of the sources and of torch's version: the same code makes the same case."""
    sources: dict[str, bytes] = {}
    waiting = list(_ROOTS)
    while waiting:
        module = waiting.pop()
        path = _source_of(module)
        if path is not None and module not in sources:
            sources[module] = path.read_bytes()
            waiting += _imported(sources[module], module)
    digest = hashlib.sha256(torch.__version__.encode())
    for module in sorted(sources):
        digest.update(module.encode() + sources[module])
    return digest.hexdigest()[:16]


def _imported(source: bytes, module: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source, module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _source_of(module: str) -> Path | None:
    """None where it is no module of Holter's, or only reads."""
    if not module.startswith("holter.") or module.startswith(_READERS):
        return None
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # a name within a module
        return None
    return Path(found.origin) if found is not None and found.origin else None
