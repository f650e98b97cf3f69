"""A run as three tables, Parquet or CSV, with one schema for every run: a thousand of them are one glob.

    SELECT run, layer, max(norm) FROM 'runs/*/export/*.rows.parquet' WHERE role = 'gradient' GROUP BY ALL

A run is read and written piece by piece, so its length is no matter. Files appear whole or not at all.
"""

from __future__ import annotations

import csv
import io
import re
import secrets
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from holter.damage import Damage, told_of
from holter.journal import JournalReader
from holter.record import LayerRows, Record
from holter.run import Run
from holter.statistics.histogram import FINITE, FIRST_NONFINITE, HALF, LOWER, UPPER, Floats, Histograms
from holter.statistics.rows import COLUMNS, STATISTICS

BATCH = 1 << 16  # lines that are held before they are written

Lines = dict[str, Any]  # column -> its cells: a list of texts, or an array


@dataclass(frozen=True)
class Table:
    """A table's name, and its columns with their kinds: text, integer, number or flag."""

    name: str
    columns: Mapping[str, str]


_PLACE = {"run": "text", "rank": "integer", "segment": "integer", "step": "integer", "time": "number"}
# Where a measured column and a statistic share a name (count, min, max), the statistic is it.
NUMBERS = (*(name for name in COLUMNS if name not in STATISTICS), *STATISTICS)

SCALARS = Table("scalars", {**_PLACE, "name": "text", "value": "number", "late": "flag"})
ROWS = Table("rows", {**_PLACE, "role": "text", "layer": "text", **dict.fromkeys(NUMBERS, "number")})
HISTOGRAMS = Table(
    "histograms",
    {**_PLACE, "role": "text", "layer": "text", "lower": "number", "upper": "number", "count": "integer"},
)
# What rows cannot hold, such as the ratio of an update: an open set of names, so a line each.
EXTRAS = Table("extras", {**_PLACE, "role": "text", "layer": "text", "name": "text", "value": "number"})
TABLES = (SCALARS, ROWS, HISTOGRAMS, EXTRAS)


@dataclass(frozen=True)
class Exported:
    path: Path
    lines: int


def export(
    run: Run, form: str, directory: Path | None = None, tell: Callable[[str], None] = lambda damage: None
) -> list[Exported]:
    """Writes the tables of a run as `<directory>/<run>.<table>.<form>`; into RUN/export where none is named.

    `tell` is given a sentence about what of its journals could not be read.
    """
    if form not in WRITERS:
        raise ValueError(f"cannot export to {form!r}: there are {', '.join(WRITERS)}")
    name = run.path.resolve().name
    directory = run.path / "export" if directory is None else directory
    directory.mkdir(parents=True, exist_ok=True)
    files = {table.name: _File(directory / f"{name}.{table.name}.{form}") for table in TABLES}
    try:
        with ExitStack() as closing:
            for table in TABLES:
                files[table.name].open(WRITERS[form], table, closing)
            readers = [(rank, JournalReader(path)) for rank, path in run.journals]
            for rank, record in _stream(readers):
                for table, lines in _lines_of(name, rank, record):
                    files[table.name].add(lines)
            for file in files.values():
                file.flush()
        damage = sum((reader.damage for _, reader in readers), Damage())
        if told := told_of(damage, sum(reader.unreadable_bytes for _, reader in readers)):
            tell(told)
        return [file.publish() for file in files.values()]
    finally:
        for file in files.values():
            file.draft.unlink(missing_ok=True)


def _stream(readers: Sequence[tuple[int, JournalReader]]) -> Iterator[tuple[int, Record]]:
    """Every record of every rank, one at a time."""
    for rank, reader in readers:
        for entry in reader.read():
            if isinstance(entry, Record):
                yield rank, entry


# A record's lines in each table -------------------------------------------------------------------------------


def _lines_of(run: str, rank: int, record: Record) -> Iterator[tuple[Table, Lines]]:
    place = {"run": run, "rank": rank, "segment": record.segment, "step": record.step, "time": record.time}
    yield SCALARS, _lines(place | {"late": record.late}, _scalars(record))
    for role, layer_rows in record.rows.items():
        yield ROWS, _lines(place | {"role": role}, _rows(layer_rows))
        for name, values in layer_rows.extras.items():
            yield (
                EXTRAS,
                _lines(place | {"role": role, "name": name}, {"layer": list(layer_rows.layers), "value": values}),
            )
        if layer_rows.rows.histograms is not None:
            yield HISTOGRAMS, _lines(place | {"role": role}, _histograms(layer_rows.layers, layer_rows.rows.histograms))


def _lines(same: Mapping[str, Any], different: Lines) -> Lines:
    """Lines of which some columns are the same throughout."""
    count = len(next(iter(different.values())))
    repeated = {
        name: [value] * count if isinstance(value, str) else np.full(count, value) for name, value in same.items()
    }
    return {**repeated, **different}


def _scalars(record: Record) -> Lines:
    return {"name": list(record.scalars), "value": np.array(list(record.scalars.values()), dtype=np.float64)}


def _rows(layer_rows: LayerRows) -> Lines:
    rows = layer_rows.rows
    numbers = {name: rows.derive(name) if name in STATISTICS else rows.column(name) for name in NUMBERS}
    return {"layer": list(layer_rows.layers), **numbers}


def _histograms(layers: Sequence[str], histograms: Histograms) -> Lines:
    """A line an occupied bucket."""
    sizes = np.diff(histograms.offsets).tolist()
    return {
        "layer": [layer for layer, size in zip(layers, sizes, strict=True) for _ in range(size)],
        "lower": _LOWER[histograms.buckets],
        "upper": _UPPER[histograms.buckets],
        "count": histograms.counts,
    }


def _edges() -> tuple[Floats, Floats]:
    """Lower and upper edge of every bucket; an infinity stands between itself, NaN between NaNs."""
    place = np.arange(len(FINITE))
    infinity = np.where(place < HALF, np.inf, -np.inf)
    odd = np.where(place % HALF == FIRST_NONFINITE, infinity, np.nan)
    return np.where(FINITE, LOWER, odd), np.where(FINITE, UPPER, odd)


_LOWER, _UPPER = _edges()


# Files --------------------------------------------------------------------------------------------------------


class TableWriter(Protocol):
    def write(self, batch: Sequence[Lines]) -> None: ...

    def close(self) -> None: ...


class _File:
    """A file that bears another name until it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Nobody can guess it, and so nobody can put a link in its place.
        self.draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        self._waiting: list[Lines] = []
        self._waiting_lines = self._lines = 0

    def open(self, open_writer: Callable[[BinaryIO, Table], TableWriter], table: Table, closing: ExitStack) -> None:
        self._writer = open_writer(closing.enter_context(self.draft.open("xb")), table)
        closing.callback(self._writer.close)

    def add(self, lines: Lines) -> None:
        self._waiting.append(lines)
        self._waiting_lines += len(lines["run"])
        if self._waiting_lines >= BATCH:
            self.flush()

    def flush(self) -> None:
        if self._waiting_lines:
            self._writer.write(self._waiting)
        self._lines += self._waiting_lines
        self._waiting, self._waiting_lines = [], 0

    def publish(self) -> Exported:
        self.draft.replace(self._path)
        return Exported(self._path, self._lines)


class CsvWriter:
    """Numbers are written so that they read back the same; names cannot become formulas of a spreadsheet."""

    def __init__(self, file: BinaryIO, table: Table) -> None:
        self._columns = table.columns
        self._file = io.TextIOWrapper(file, newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        self._writer.writerow(table.columns)

    def write(self, batch: Sequence[Lines]) -> None:
        for lines in batch:
            cells = [
                map(_guarded, lines[name]) if kind == "text" else lines[name].tolist()
                for name, kind in self._columns.items()
            ]
            self._writer.writerows(zip(*cells, strict=True))

    def close(self) -> None:
        self._file.close()


_FORMULA_SIGNS = "=+-@\N{MINUS SIGN}"
_BEHIND_A_SEPARATOR = re.compile(r"([;|\t][\s\"']*)(?=[=+\-@])")  # some locales split a line there
_PASSED_OVER = "\"'`|,;"  # before such a sign, by one program or another; and blanks, controls, what is not seen


def _guarded(text: str) -> str:
    """Text that a spreadsheet takes for text: an apostrophe before what it would run, and before the whole cell.

    >>> _guarded("=1"), _guarded(" |=1"), _guarded("block.0-1")
    ("'=1", "' |'=1", 'block.0-1')
    >>> _guarded("a;=1")
    "a;'=1"
    """
    valid = _valid(text).replace("\0", "\\x00")  # many readers end a cell there, and Python 3.10 does not write it
    if valid[:1].isalnum():  # nearly all names
        return str(_BEHIND_A_SEPARATOR.sub(r"\1'", valid))
    before = next((place for place, sign in enumerate(valid) if not _is_passed_over(sign)), len(valid))
    if _plain(valid[before : before + 1]) in tuple(_FORMULA_SIGNS):
        return f"'{valid[:before]}'{valid[before:]}" if before else f"'{valid}"
    return f"'{valid}" if valid.startswith(("\t", "\r", "\n")) else valid


def _is_passed_over(sign: str) -> bool:
    kind = unicodedata.category(sign)
    return kind[0] in "ZC" or kind in ("Pi", "Pf") or _plain(sign) in _PASSED_OVER


def _plain(sign: str) -> str:
    """What it stands for, where it is a full-width, a small or a raised one."""
    return unicodedata.normalize("NFKC", sign)


def _valid(text: str) -> str:
    """Text that is sure to be UTF-8; half of a surrogate pair is written out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class ParquetWriter:
    """zstd, and the bytes of numbers split by their place, which makes them compress."""

    def __init__(self, file: BinaryIO, table: Table) -> None:
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError as error:
            raise ValueError("Parquet needs pyarrow: pip install 'holter[parquet]', or export to csv") from error
        kinds = {
            "text": pyarrow.string(),
            "integer": pyarrow.int64(),
            "number": pyarrow.float64(),
            "flag": pyarrow.bool_(),
        }
        self._columns = table.columns
        self._schema = pyarrow.schema([(name, kinds[kind]) for name, kind in table.columns.items()])
        self._to_table = pyarrow.table
        self._writer = parquet.ParquetWriter(
            file,
            self._schema,
            compression="zstd",
            use_dictionary=[name for name, kind in table.columns.items() if kind != "number"],
            use_byte_stream_split=[name for name, kind in table.columns.items() if kind == "number"],
        )

    def write(self, batch: Sequence[Lines]) -> None:
        columns: Lines = {}
        for name, kind in self._columns.items():
            parts = [lines[name] for lines in batch]
            columns[name] = (
                [_valid(text) for part in parts for text in part] if kind == "text" else np.concatenate(parts)
            )
        self._writer.write_table(self._to_table(columns, schema=self._schema))

    def close(self) -> None:
        self._writer.close()


WRITERS: Mapping[str, Callable[[BinaryIO, Table], TableWriter]] = {"parquet": ParquetWriter, "csv": CsvWriter}
