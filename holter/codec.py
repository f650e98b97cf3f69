"""Entries to bytes and back: one safetensors blob an entry, its words as JSON in the blob's metadata.

Data is never code: nothing is read here but numbers and JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors import numpy as safetensors_numpy

from holter.record import Ending, Entry, LayerRows, Problem, Record
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


class _Table:
    """The names that a role has had so far, under the number of the frame that lists them."""

    def __init__(self, number: int, names: Layers) -> None:
        self.number, self.names = number, names
        self.place = {name: place for place, name in enumerate(names)}


class Encoder:
    """Encodes entries for one file. A role's layer names are written once, in a frame of their own, and referred to.

    A new name makes a new table of all names so far, so that layers that come and go, as experts do, are places in
    one table and not a table each.
    """

    def __init__(self) -> None:
        self._tables: dict[str, _Table] = {}
        self._count = 0

    def copy(self) -> Encoder:
        """A twin to encode with, so that a failed write can be forgotten."""
        twin = Encoder()
        twin._tables, twin._count = dict(self._tables), self._count
        return twin

    def encode(self, entry: Entry) -> list[bytes]:
        """The blobs to append: layer tables that the file does not hold yet, then the entry itself."""
        if isinstance(entry, Ending):
            return [_pack({"kind": "ending", **asdict(entry)}, {})]
        if isinstance(entry, Problem):
            return [_pack({"kind": "problem", **asdict(entry)}, {})]
        tables = [blob for role, rows in entry.rows.items() for blob in self._new_table(role, rows.layers)]
        return [*tables, self._record(entry)]

    def _new_table(self, role: str, layers: Layers) -> list[bytes]:
        known = self._tables.get(role)
        if known is not None and (layers == known.names or all(name in known.place for name in layers)):
            return []
        names = tuple(dict.fromkeys((*(known.names if known else ()), *layers)))
        self._tables[role] = _Table(self._count, names)
        self._count += 1
        return [_pack({"kind": "layers", "number": self._tables[role].number, "layers": list(names)}, {})]

    def _record(self, record: Record) -> bytes:
        arrays: Arrays = {"scalars": np.array(list(record.scalars.values()), _FLOAT)}
        roles = []
        for place, (role, layer_rows) in enumerate(record.rows.items()):
            rows = layer_rows.rows
            # Most columns of most steps are zero throughout (NaNs, Infs): those are left out.
            used = [i for i in range(len(COLUMNS)) if rows.values[:, i].any()]
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
    """Decodes the blobs of one file, in their order. A blob that is no entry raises ValueError."""

    def __init__(self) -> None:
        self._layers: dict[int, Layers] = {}

    def decode(self, blob: bytes) -> Entry | None:
        """The entry, or None for a table of layers."""
        try:
            words, arrays = _unpack(blob)
            return self._entry(words, arrays)
        except (KeyError, TypeError, IndexError, AttributeError, RecursionError, SafetensorError) as error:
            raise ValueError(f"not an entry of a journal: {error!r}") from error

    def _entry(self, words: Mapping[str, Any], arrays: Arrays) -> Entry | None:
        _check_types(words)
        kind = words["kind"]
        fields = {name: value for name, value in words.items() if name != "kind"}
        if kind == "layers":
            self._layers[words["number"]] = _names(words["layers"])
            return None
        if kind == "ending":
            return Ending(**fields)
        if kind == "problem":
            return Problem(**fields)
        if kind == "record":
            return self._record(words, arrays)
        raise ValueError(f"unknown kind of entry {kind!r}")

    def _record(self, words: Mapping[str, Any], arrays: Arrays) -> Record:
        rows = {role["role"]: self._rows(place, role, arrays) for place, role in enumerate(words["roles"])}
        return Record(
            step=words["step"],
            time=words["time"],
            scalars=dict(zip(_names(words["scalars"]), arrays["scalars"].astype(np.float64).tolist(), strict=True)),
            rows=rows,
            notes=dict(zip(words["notes"], _names(list(words["notes"].values())), strict=True)),
            segment=words["segment"],
            late=words["late"],
        )

    def _rows(self, place: int, role: Mapping[str, Any], arrays: Arrays) -> LayerRows:
        _check_types(role)
        layers = self._layers[role["layers"]]
        if f"{place}.places" in arrays:
            layers = tuple(layers[i] for i in arrays[f"{place}.places"].tolist())
        values = np.zeros((len(layers), len(COLUMNS)))
        for column, found in zip(role["columns"], arrays[f"{place}.values"], strict=True):
            values[:, COLUMNS.index(column)] = found
        histograms = None
        if f"{place}.offsets" in arrays:
            parts = (arrays[f"{place}.{part}"] for part in ("offsets", "buckets", "counts"))
            histograms = _histograms(len(layers), *parts)
        extras = {}
        if "extras" in role:
            found = arrays[f"{place}.extras"].astype(np.float64)
            extras = dict(zip(_names(role["extras"]), found, strict=True))
        return LayerRows(layers, Rows(values, histograms), extras)


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
    header = json.loads(blob[HEADER_LENGTH:until].decode())  # bytes would make json guess at an encoding
    return json.loads(header["__metadata__"][_KEY]), safetensors_numpy.load(blob)


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
        if words["kind"] == "record":
            scalars = dict(zip(words["scalars"], arrays["scalars"].tolist(), strict=True))
            return {**words, "scalars": scalars}
        return dict(words)
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError, SafetensorError) as error:
        raise ValueError(f"not an entry of a journal: {error!r}") from error
