"""W&B without a network, and what it has stored of a run: entries in LevelDB's log format, records by its protobufs.

W&B 0.31 has no reader of its own in Python: its service reads these files.
"""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

_BLOCK, _HEADER = 32768, struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4  # kinds of parts after which an entry is complete


@dataclass
class Stored:
    """`rows` by W&B's own step: without what it adds to each."""

    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    alerts: list[Any] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    is_finished: bool = False
    exit_code: int = 0

    def of(self, tag: str) -> list[tuple[int, Any]]:
        """(holter/step, value) of each row that has this tag."""
        return [(row["holter/step"], row[tag]) for _, row in self.rows if tag in row]


@contextmanager
def offline(directory: Path) -> Iterator[Any]:
    """The package; its files go to this directory. It reads the environment once: what was before is torn down."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"MODE": "offline", "DIR": str(directory), "SILENT": "true", "PROJECT": "test"}.items():
            patch.setenv(f"WANDB_{name}", value)
        wandb: Any = import_module("wandb")
        wandb.teardown()
        yield wandb
        wandb.teardown()


def read(directory: Path, run_id: str) -> Stored:
    """Of a run that is finished: its service ends the file a moment later, and tells nobody."""
    until = time.monotonic() + 30
    while not (stored := _read(directory, run_id)).is_finished:
        assert time.monotonic() < until, f"{run_id} was never finished"
        time.sleep(0.01)
    return stored


def _read(directory: Path, run_id: str) -> Stored:
    (path,) = directory.glob(f"wandb/*-{run_id}/run-{run_id}.wandb")
    new_record = import_module("wandb.proto.wandb_internal_pb2").Record
    stored = Stored()
    for entry in _entries(path.read_bytes()):
        record = new_record.FromString(entry)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            row = {name: value for name, value in _items(record.history.item) if not name.startswith("_")}
            stored.rows.append((record.history.step.num, row))
        elif kind == "alert":
            stored.alerts.append(record.alert)
        elif kind == "metric":
            stored.metrics[record.metric.name or record.metric.glob_name] = record.metric
        elif kind == "summary":
            stored.summary |= dict(_items(record.summary.update))
        elif kind == "exit":
            stored.is_finished, stored.exit_code = True, record.exit.exit_code
    return stored


def _items(items: Any) -> Iterator[tuple[str, Any]]:
    """A histogram comes in parts: their names are those of its place in the row."""
    found: dict[str, Any] = {}
    for item in items:
        name, *rest = item.nested_key or [item.key]
        value = json.loads(item.value_json)
        if rest:
            found.setdefault(name, {})[rest[0]] = value
        else:
            found[name] = value
    yield from found.items()


def _entries(data: bytes) -> Iterator[bytes]:
    """As far as it is written."""
    place, parts = 7, b""
    while place < len(data):
        left = _BLOCK - place % _BLOCK
        if left < _HEADER.size:  # a header is never split
            place += left
            continue
        if len(data) - place < _HEADER.size:
            return
        checksum, length, kind = _HEADER.unpack_from(data, place)
        place += _HEADER.size
        part = data[place : place + length]
        if len(part) < length:
            return
        assert zlib.crc32(part, zlib.crc32(bytes([kind]))) == checksum, f"damaged at {place}"
        place, parts = place + length, parts + part
        if kind in (_WHOLE, _LAST):
            yield parts
            parts = b""
