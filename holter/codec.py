"""Entries to bytes and back: one safetensors blob an entry, its words as JSON in the blob's metadata.

Data is never code: nothing is read here but numbers and JSON.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from holter.proportion import Proportion
from holter.record import MOST_STEPS, Ending, Entry, LayerRows, Problem, Record
from holter.statistics.histogram import SIZE, Histograms
from holter.statistics.rows import COLUMNS, Rows

Arrays = dict[str, npt.NDArray[Any]]
Layers = tuple[str, ...]
_KEY = "holter"
# The kinds of numbers that an entry holds, in safetensors' order, and their names there.
_KINDS = _INTEGER, _FLOAT, _PLACE, _BUCKET = tuple(map(np.dtype, ("<i8", "<f8", "<u4", "<u2")))
_KIND_NAMES = ("I64", "F64", "U32", "U16")
_write_compactly = json.JSONEncoder(separators=(",", ":")).encode
HEADER_LENGTH = 8  # bytes at the beginning of a blob that say how long its words are
SIGN = b'{"__metadata__":{"holter":"{'  # how those begin. No text in them can look like it: its quotes are escaped


# Times its own bytes that are written before a table is repeated for the first time, and then each time.
_SOON, _AGAIN = 16, 1024


class _Table:
    """The names that a role has had so far, under the number of the frame that lists them."""

    def __init__(self, number: int, role: str, names: Layers) -> None:
        self.number, self.role, self.names = number, role, names
        self.place = {name: place for place, name in enumerate(names)}

    def pack(self) -> bytes:
        return _pack({"kind": "layers", "number": self.number, "role": self.role, "layers": list(self.names)}, {})


class Encoder:
    """Encodes entries for one file. A role's layer names are written apart, in a frame of their own, and referred to.

    A new name makes a new table of all names so far, so that layers that come and go, as experts do, are places in
    one table and not a table each. A table is repeated now and then, and before the ending: without it no other frame
    could be read.
    """

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}
        self._count = 0
        self._written = 0  # bytes
        self._due: dict[str, int] = {}  # for each role, the bytes after which its table is repeated
        self._is_told = True  # all tables stand behind the last record

    def copy(self) -> Encoder:
        """A twin to encode with, so that a failed write can be forgotten."""
        twin = Encoder.__new__(Encoder)
        twin.__dict__.update(self.__dict__)  # what it refers to is replaced, never changed
        return twin

    def encode(self, entry: Entry) -> list[bytes]:
        """The blobs to append: layer tables that the file does not hold yet, then the entry itself."""
        if isinstance(entry, Ending):
            tables = [] if self._is_told else [self._repeated(role) for role in self._tables]
            self._is_told = True
            return [*tables, _pack({"kind": "ending", **asdict(entry)}, {})]
        if isinstance(entry, Problem):
            return [_pack({"kind": "problem", **asdict(entry)}, {})]
        tables = [blob for role, rows in entry.rows.items() for blob in self._table(role, rows.layers)]
        blobs = [*tables, self._record(entry)]
        self._written += sum(map(len, blobs))
        self._is_told = False
        return blobs

    def _table(self, role: str, layers: Layers) -> list[bytes]:
        known = self._tables.get(role)
        if known is not None and (layers == known.names or all(name in known.place for name in layers)):
            return [self._repeated(role)] if self._written >= self._due[role] else []
        names = tuple(dict.fromkeys((*(known.names if known else ()), *layers)))
        self._tables = {**self._tables, role: _Table(self._count, role, names)}
        self._count += 1
        return [self._repeated(role, _SOON)]

    def _repeated(self, role: str, wait: int = _AGAIN) -> bytes:
        blob = self._tables[role].pack()
        self._due = {**self._due, role: self._written + wait * len(blob)}
        return blob

    def _record(self, record: Record) -> bytes:
        arrays: Arrays = {"scalars": np.array(list(record.scalars.values()), _FLOAT)}
        roles = []
        for place, (role, layer_rows) in enumerate(record.rows.items()):
            rows = layer_rows.rows
            # Most columns of most steps are zero throughout (NaNs, Infs): those are left out, but for one, since a
            # reader makes no row for which the file has no number.
            used = [i for i in range(len(COLUMNS)) if rows.values[:, i].any()] or [0]
            arrays[f"{place}.values"] = np.asarray(rows.values[:, used].T, _FLOAT)
            if rows.histograms is not None:
                arrays[f"{place}.offsets"] = np.asarray(rows.histograms.offsets, _INTEGER)
                arrays[f"{place}.buckets"] = np.asarray(rows.histograms.buckets, _BUCKET)
                arrays[f"{place}.counts"] = np.asarray(rows.histograms.counts, _INTEGER)
            if layer_rows.extras:
                arrays[f"{place}.extras"] = np.array(list(layer_rows.extras.values()), _FLOAT)
            table = self._tables[role]
            if layer_rows.layers != table.names:
                places = [table.place[name] for name in layer_rows.layers]
                arrays[f"{place}.places"] = np.array(places, _PLACE)
            words_of = {"role": role, "layers": table.number, "columns": [COLUMNS[i] for i in used]}
            roles.append({**words_of, "extras": list(layer_rows.extras)} if layer_rows.extras else words_of)
        words = {
            "kind": "record",
            "step": record.step,
            "time": record.time,
            "segment": record.segment,
            "late": record.late,
            "scalars": list(record.scalars),
            "notes": dict(record.notes),
            "roles": roles,
        }
        return _pack(words, arrays)


class Decoder:
    """Decodes the blobs of one file, in their order. A blob that is no entry raises ValueError.

    Of records that would take too much memory for a file of `size` bytes a part is left out, and `left_out` counts it.
    """

    def __init__(self, size: float = math.inf) -> None:
        self.size, self.left_out = size, 0
        self._proportion = Proportion()
        self._names: dict[str, str] = {}  # of scalars: one object for all records that have it
        self._layers: dict[int, Layers] = {}
        self._newest: dict[str, Layers] = {}  # of each role; tables before it are its beginning

    def decode(self, blob: bytes, *, partly: bool = False) -> Entry | None:
        """The entry, or None for a table of layers. UnknownLayers where the table of a record is not known; `partly`
        leaves out the rows that need it."""
        try:
            words, arrays = _unpack(blob)
            return self._entry(words, arrays, partly)
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError, SafetensorError) as error:
            raise ValueError(f"not an entry of a journal: {error!r}") from error

    def _entry(self, words: Mapping[str, Any], arrays: Arrays, partly: bool) -> Entry | None:
        _check_types(words)
        kind = words["kind"]
        fields = {name: value for name, value in words.items() if name != "kind"}
        if kind == "layers":
            self._take_table(words["number"], words["role"], _names(words["layers"]))
            return None
        if kind == RESERVE:
            return None
        if kind == "ending":
            return Ending(**fields)
        if kind == "problem":
            return Problem(**fields)
        if kind == "record":
            found = self._record(words, arrays, partly)
            fitting = self._proportion.fit(found, self.size)
            self.left_out += fitting is not found
            return fitting
        raise ValueError(f"unknown kind of entry {kind!r}")

    def _take_table(self, number: int, role: str, names: Layers) -> None:
        if self._layers.get(number) != names:  # one object for all records that refer to it
            self._layers[number] = names
        if len(names) >= len(self._newest.get(role, ())):
            self._newest[role] = self._layers[number]

    def _record(self, words: Mapping[str, Any], arrays: Arrays, partly: bool) -> Record:
        if max(abs(words["step"]), abs(words["segment"])) >= MOST_STEPS:
            raise ValueError(f"no training has a step {words['step']} in segment {words['segment']}")
        if len(words["roles"]) > _MOST_ROLES:
            raise ValueError("more roles than a record can have")
        rows = {}
        for place, role in enumerate(words["roles"]):
            try:
                rows[role["role"]] = self._rows(place, role, arrays)
            except UnknownLayers:
                if not partly:
                    raise
        return Record(
            step=words["step"],
            time=words["time"],
            scalars={self._names.setdefault(name, name): one for name, one in _scalars(words, arrays).items()},
            rows=rows,
            notes=dict(zip(words["notes"], _names(list(words["notes"].values())), strict=True)),
            segment=words["segment"],
            late=words["late"],
        )

    def _rows(self, place: int, role: Mapping[str, Any], arrays: Arrays) -> LayerRows:
        _check_types(role)
        found = _floats(arrays[f"{place}.values"], len(role["columns"]))
        layers = self._layers_of(place, role, arrays, found.shape[1])
        values = np.zeros((len(layers), len(COLUMNS)))
        for column, numbers in zip(role["columns"], found, strict=True):
            values[:, COLUMNS.index(column)] = numbers
        histograms = None
        if f"{place}.offsets" in arrays:
            parts = (arrays[f"{place}.{part}"] for part in ("offsets", "buckets", "counts"))
            histograms = _histograms(len(layers), *parts)
        extras = {}
        if "extras" in role:
            if len(role["extras"]) > _MOST_EXTRAS:
                raise ValueError("more extras than a role can have")
            extra = _floats(arrays[f"{place}.extras"], len(role["extras"]))
            extras = dict(zip(_names(role["extras"]), extra, strict=True))
        return LayerRows(layers, Rows(values, histograms), extras)

    def _layers_of(self, place: int, role: Mapping[str, Any], arrays: Arrays, count: int) -> Layers:
        layers = self._layers.get(role["layers"])
        is_older = layers is None  # its table is lost: a newer one of the role begins like it
        if layers is None:
            layers = self._newest.get(role["role"], ())
        if f"{place}.places" in arrays:
            places = arrays[f"{place}.places"]
            if places.dtype != _PLACE or places.shape != (count,):
                raise ValueError("places of layers of the wrong kind")
            if is_older and places.max(initial=0) >= len(layers):
                raise UnknownLayers(role["layers"])
            return tuple(layers[i] for i in places.tolist())
        if is_older and count > len(layers):
            raise UnknownLayers(role["layers"])
        layers = layers[:count] if is_older else layers
        if len(layers) != count:
            raise ValueError(f"{count} rows for {len(layers)} layers")
        return layers


# Of a record, and of a role: there are about ten of each. Readers keep series of each of them.
_MOST_ROLES, _MOST_EXTRAS = 256, 256


class UnknownLayers(ValueError):
    """The table of layers that a record refers to was not read."""


def _floats(found: npt.NDArray[Any], columns: int) -> npt.NDArray[np.float64]:
    """As they were written: what is narrower, or fits only by being repeated, would take more memory than the file."""
    if found.dtype != _FLOAT or found.ndim != 2 or len(found) != columns or (found.shape[1] and not columns):
        raise ValueError(f"an array of {found.dtype} and shape {found.shape} in place of {columns} columns")
    return found


# What is read may come from anyone: a name that is no text or a step that is no number must not get any further.
_TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("step", "segment", "dropped", "number"), int),
    **dict.fromkeys(("where", "what", "state", "error", "role"), str),
    "time": (int, float),
    "late": bool,
}


def _check_types(words: Mapping[str, Any]) -> None:
    for name, value in words.items():
        if not isinstance(value, _TYPES.get(name, object)) or (isinstance(value, int) and abs(value) >= 2**63):
            raise ValueError(f"{name} cannot be a {type(value).__name__} like this")


def _names(found: Any) -> tuple[str, ...]:
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise ValueError("names must be a list of texts")
    return tuple(found)


def _histograms(layers: int, *arrays: npt.NDArray[Any]) -> Histograms:
    offsets, buckets, counts = arrays
    if [(array.dtype.name, array.ndim) for array in arrays] != [("int64", 1), ("uint16", 1), ("int64", 1)]:
        raise ValueError("histograms of the wrong kind")
    spans = len(offsets) == layers + 1 and offsets[0] == 0 and offsets[-1] == len(buckets) == len(counts)
    if not spans or (np.diff(offsets) < 0).any() or (buckets >= SIZE).any():
        raise ValueError("histograms that do not fit together")
    return Histograms(offsets, buckets, counts)


def _pack(words: Mapping[str, Any], arrays: Arrays) -> bytes:
    """What safetensors' own writer makes of them, byte by byte, in less time: a record is made at every step."""
    header: dict[str, Any] = {"__metadata__": {_KEY: json.dumps(words)}}
    data, place = [], 0
    for kind, name in sorted((_KINDS.index(array.dtype), name) for name, array in arrays.items()):
        array, end = arrays[name], place + arrays[name].nbytes
        header[name] = {"dtype": _KIND_NAMES[kind], "shape": array.shape, "data_offsets": (place, end)}
        data.append(array.tobytes())
        place = end
    text = _write_compactly(header).encode()
    text += b" " * (-len(text) % HEADER_LENGTH)
    return b"".join((len(text).to_bytes(HEADER_LENGTH, "little"), text, *data))


def _unpack(blob: bytes) -> tuple[Mapping[str, Any], Arrays]:
    """safetensors' numpy reader drops the metadata, so its JSON header is read here."""
    until = HEADER_LENGTH + int.from_bytes(blob[:HEADER_LENGTH], "little")
    header = read_json(blob[HEADER_LENGTH:until].decode("ascii"))
    words = header["__metadata__"][_KEY]
    if not words.isascii():  # as it is written: a single character beyond would make each of them take four bytes
        raise ValueError("words that are not ASCII")
    return read_json(words), safetensors_numpy.load(blob)


def read_json(text: str) -> Any:
    """JSON whose values take no more than a small multiple of its length. ValueError where it is none or no such.

    An empty list takes 64 bytes, so that there may be one for every 16 characters.
    """
    if _has_many_lists(text) and _has_many_lists(_TEXTS.sub("", text), len(text)):
        raise ValueError("words of lists in lists")
    return json.loads(text)


_TEXTS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_LIST_BYTES, _FEW_BYTES = 16, 1024


def _has_many_lists(text: str, length: int = 0) -> bool:
    return (text.count("[") + text.count("{")) * _LIST_BYTES > max(length, len(text)) + _FEW_BYTES


def is_table(blob: bytes) -> bool:
    """Whether a blob, or a frame, lists layers, by how it begins."""
    return _TABLE_BEGIN in blob[:80]


_TABLE_BEGIN = rb"{\"kind\": \"layers\""


def is_record(blob: bytes) -> bool:
    try:
        return bool(read_words(blob)["kind"] == "record")
    except ValueError:
        return False


def read_words(blob: bytes) -> dict[str, Any]:
    """An entry's words alone, those of a record with its scalars by name and without its rows: for a quick look."""
    try:
        words, arrays = _unpack(blob)
        _check_types(words)
        return {**words, "scalars": _scalars(words, arrays)} if words["kind"] == "record" else dict(words)
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"not an entry of a journal: {error!r}") from error


def _scalars(words: Mapping[str, Any], arrays: Arrays) -> dict[str, float]:
    values = arrays["scalars"]
    if values.dtype != _FLOAT or values.ndim != 1:
        raise ValueError("scalars of the wrong kind")
    return dict(zip(_names(words["scalars"]), values.tolist(), strict=True))


# What is said of the end where there is no room for it ----------------------------------------------------------------

RESERVE = "reserve"  # a kind of entry: room for an ending, taken when a journal is created
_RESERVED = 1000  # bytes of its blob; a multiple of HEADER_LENGTH


def pack_reserve(problem: Problem | None = None, ending: Ending | None = None) -> bytes:
    """As long whatever it says; what does not fit is left out, the problem first, then the name of the error."""
    for told, end in ((problem, ending), (None, ending), (None, ending and replace(ending, error=""))):
        said = {"problem": asdict(told) if told else None, "ending": asdict(end) if end else None}
        words = {"kind": RESERVE, **said, "padding": ""}
        if (missing := _RESERVED - len(_pack(words, {}))) >= 0:
            return _pack({**words, "padding": "-" * missing}, {})
    raise ValueError("an ending that fits nowhere")


def unpack_reserve(blob: bytes) -> list[Problem | Ending]:
    """What was said in it: nothing where the end was written like any other entry."""
    try:
        words = read_words(blob)
        kinds = {"problem": Problem, "ending": Ending} if words["kind"] == RESERVE else {}
        found = [(kind, words[name]) for name, kind in kinds.items() if words[name] is not None]
        for _, fields in found:
            _check_types(fields)
        return [kind(**fields) for kind, fields in found]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not what is reserved for an ending: {error!r}") from error
