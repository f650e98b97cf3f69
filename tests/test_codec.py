"""Entries to bytes and back: the same entry, whatever it holds; and what is no entry is refused, never believed."""

from __future__ import annotations

import json
import pickle
import struct
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import numpy as safetensors_numpy

from holter import codec as module
from holter.codec import Decoder, Encoder
from holter.frames import write_frame
from holter.history import History
from holter.journal import Journal
from holter.record import Ending, Entry, LayerRows, Problem, Record
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows

HOSTILE = (
    "\x00",
    "a\x00b",
    "../../etc",
    "<script>",
    "\u202egnp.exe",
    "\ud800",
    "=cmd()",
    "",
    "\u5c64" * 9,
    "x" * 65536,
)


def fingerprint(entry: Entry) -> tuple[Any, ...]:
    """Everything an entry holds, comparable: NaN equals NaN, and -0.0 is 0.0."""
    if not isinstance(entry, Record):
        return type(entry).__name__, *(repr(value) for value in vars(entry).values())
    rows = []
    for role, layer_rows in entry.rows.items():
        histograms = layer_rows.rows.histograms
        dense = b"" if histograms is None else histograms.dense().tobytes()
        extras = [(name, extra.astype(float).tobytes()) for name, extra in layer_rows.extras.items()]
        values = (layer_rows.rows.values + 0.0).tobytes()
        rows.append((role, layer_rows.layers, values, extras, histograms is None, dense))
    scalars = [(name, struct.pack("<d", value)) for name, value in entry.scalars.items()]
    return entry.step, repr(entry.time), scalars, rows, dict(entry.notes), entry.segment, entry.late


def fingerprints(entries: Sequence[Entry]) -> list[tuple[Any, ...]]:
    return [fingerprint(entry) for entry in entries]


names = st.text(max_size=12) | st.sampled_from(HOSTILE)
numbers = st.floats() | st.sampled_from([float("nan"), float("inf"), -0.0, 5e-324])
moments = st.floats(allow_nan=False)


@st.composite
def some_layer_rows(draw: st.DrawFn) -> LayerRows:
    layers = tuple(draw(st.lists(names, max_size=4, unique=True)))
    columns = draw(st.lists(numbers, min_size=len(COLUMNS), max_size=len(COLUMNS)))
    values = np.tile(np.array(columns), (len(layers), 1)) if draw(st.booleans()) else np.zeros((len(layers), 11))
    tensors = [draw(st.lists(st.floats(width=32), max_size=5)) for _ in layers]
    kinds = st.sampled_from(["<f8", ">f8", "<f4", "<i4", "?"])  # whatever comes, float64 is written
    named = draw(st.dictionaries(names, kinds, max_size=2))
    extras = {name: np.arange(len(layers)).astype(kind) for name, kind in named.items()}
    return LayerRows(layers, Rows(values, draw(st.sampled_from([None, Histograms.of(tensors)]))), extras)


records = st.builds(
    Record,
    step=st.integers(-(2**53) + 1, 2**53 - 1),
    time=moments,
    scalars=st.dictionaries(names, numbers, max_size=4),
    rows=st.dictionaries(names, some_layer_rows(), max_size=3),
    notes=st.dictionaries(names, names, max_size=3),
    segment=st.integers(0, 9),
    late=st.booleans(),
)
problems = st.builds(Problem, step=st.integers(0, 9), time=moments, where=names, what=names)
endings = st.builds(Ending, time=moments, state=names, error=names, dropped=st.integers(0, 2**40))


def there_and_back(entries: Sequence[Entry]) -> list[Entry]:
    encoder, decoder = Encoder(), Decoder()
    decoded = [decoder.decode(blob) for entry in entries for blob in encoder.encode(entry)]
    return [entry for entry in decoded if entry is not None]


def is_faithful(entries: Sequence[Entry]) -> bool:
    return fingerprints(there_and_back(entries)) == fingerprints(entries)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(entries=st.lists(records | problems | endings, max_size=5))
@example(entries=[Record(0, 0.0, {name: float("nan") for name in HOSTILE}, notes=dict.fromkeys(HOSTILE, "\x00"))])
@example(entries=[Record(0, 0.0, rows={"\ud800": LayerRows(HOSTILE, Rows(np.ones((len(HOSTILE), 11))))})])
def test_what_is_encoded_is_decoded_whatever_it_is(entries: list[Entry]) -> None:
    """P12, P22: hostile names, NaN and Inf, nothing at all: the same entries in the same order."""
    assert is_faithful(entries)


def unlike_safetensors(entries: Sequence[Entry]) -> tuple[int, set[str]]:
    """How many blobs safetensors' own writer would have written otherwise, and the kinds of arrays in all of them."""
    encoder, wrong, kinds = Encoder(), 0, set()
    honest = module._pack

    def pack(words: Any, arrays: dict[str, Any]) -> bytes:
        nonlocal wrong
        kinds.update(array.dtype.str for array in arrays.values())
        alike = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        wrong += honest(words, arrays) != blob_of(words, alike)
        return honest(words, arrays)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_pack", pack)
        assert all(encoder.encode(entry) for entry in entries)
    return wrong, kinds


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(entries=st.lists(records | problems | endings, max_size=4))
def test_a_blob_is_what_safetensors_writes(entries: list[Entry]) -> None:
    assert unlike_safetensors(entries)[0] == 0


def test_a_blob_with_all_kinds_of_numbers_is_what_safetensors_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, few = an_entry(), an_entry().rows["gradient"]
    extras = {"hash": np.array([1.0, 2.0]), "\u5c64": np.zeros(2)}
    rows = {"gradient": LayerRows(few.layers[::-1], few.rows), "update": LayerRows(few.layers, few.rows, extras)}
    entries = [whole, an_entry(rows=rows)]
    assert unlike_safetensors(entries) == (0, {kind.str for kind in module._KINDS})
    monkeypatch.setattr(module, "_KINDS", module._KINDS[::-1])  # the planted twin: another order
    monkeypatch.setattr(module, "_KIND_NAMES", module._KIND_NAMES[::-1])
    assert unlike_safetensors(entries)[0] > 0


def an_entry(**changes: Any) -> Record:
    rng = np.random.default_rng(0)
    rows = Rows(rng.normal(size=(2, len(COLUMNS))), Histograms.of([rng.normal(size=9), [0.0]]))
    fields = {"step": 3, "time": 1e9, "scalars": {"loss": 0.1}, "rows": {"gradient": LayerRows(("a\x00b", "c"), rows)}}
    return Record(**{**fields, **changes})


def plant_float32(pack: Callable[..., bytes]) -> Callable[..., bytes]:
    return lambda words, arrays: pack(words, {k: v.astype(np.float32).astype(v.dtype) for k, v in arrays.items()})


def plant_names_cut_at_nul(pack: Callable[..., bytes]) -> Callable[..., bytes]:
    return lambda words, arrays: pack(json.loads(json.dumps(words).replace("\\u0000b", "")), arrays)


def plant_forgotten_histogram(pack: Callable[..., bytes]) -> Callable[..., bytes]:
    return lambda words, arrays: pack(words, {k: v for k, v in arrays.items() if k != "0.offsets"})


@pytest.mark.parametrize("plant", [plant_float32, plant_names_cut_at_nul, plant_forgotten_histogram])
def test_an_unfaithful_encoding_is_noticed(
    plant: Callable[[Callable[..., bytes]], Callable[..., bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """P12: the planted twins of the test above."""
    assert is_faithful([an_entry()])
    monkeypatch.setattr(module, "_pack", plant(module._pack))
    assert not is_faithful([an_entry()])


def test_names_of_layers_are_written_once() -> None:
    """A thousand names a step would be most of the file; layers that change are written again."""
    encoder = Encoder()
    other = {"gradient": LayerRows(("a", "d"), an_entry().rows["gradient"].rows)}
    entries = [an_entry(), an_entry(step=4), an_entry(step=5, rows=other), an_entry(step=6)]
    assert [len(encoder.encode(entry)) for entry in entries] == [2, 1, 2, 1]


def test_a_twin_of_an_encoder_can_be_forgotten() -> None:
    """P13: names count as written only when the write went through."""
    encoder = Encoder()
    assert len(encoder.copy().encode(an_entry())) == len(encoder.encode(an_entry())) == 2
    assert len(encoder.copy().encode(an_entry())) == 1


# What is no entry -------------------------------------------------------------------------------------------------

anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
GOOD: dict[str, Any] = {
    "kind": "record",
    "step": 1,
    "time": 1.0,
    "segment": 0,
    "late": False,
    "scalars": ["loss"],
    "notes": {"at": "clip"},
    "roles": [{"role": "gradient", "layers": 0, "columns": ["count"]}],
}
ARRAYS: dict[str, Any] = {
    "scalars": np.ones(1),
    "0.values": np.ones((1, 2)),
    "0.offsets": np.array([0, 1, 2]),
    "0.buckets": np.array([3, 4], dtype=np.uint16),
    "0.counts": np.array([5, 6]),
}
odd_arrays = st.sampled_from(
    [np.zeros(0), np.ones((2, 2)), np.array([0, 9, 2]), np.array([-1, 1, 2]), np.array([9999, 1], dtype=np.uint16)]
)


def blob_of(words: object, arrays: dict[str, Any]) -> bytes:
    return bytes(safetensors_numpy.save(arrays, {"holter": json.dumps(words)}))


def read_everything(entry: Entry | None) -> None:
    """Whatever a reader of a run may do with an entry that was let in."""
    if isinstance(entry, Problem | Ending):
        assert f"{entry}" and {entry}
    if isinstance(entry, Record):
        history = History([entry])
        assert len(history.steps) <= 1 and history.segments is not None and history.latest() is not None
        for name in history.scalars:
            assert history.scalar(name)[1].dtype == np.float64 and isinstance(name, str)
        for role in history.roles:
            _, layers, _ = history.series(role, "norm")
            for layer in layers:
                for found in history.histogram(role + "", layer + "")[1]:
                    found.quantile(0.5), found.edges(), found.count
        assert all(isinstance(text, str) for pair in entry.notes.items() for text in pair)


def holds_against(words: object, arrays: dict[str, Any]) -> None:
    """A blob is refused with a ValueError, or all of it can be read."""
    decoder = Decoder()
    decoder.decode(blob_of({"kind": "layers", "number": 0, "role": "gradient", "layers": ["a", "b"]}, {}))
    try:
        entry = decoder.decode(blob_of(words, arrays))
    except ValueError:
        return
    read_everything(entry)


@settings(max_examples=400, deadline=None)
@given(
    changes=st.dictionaries(
        st.sampled_from([*GOOD, "where", "what", "state", "number", "layers", "x"]), anything, max_size=3
    ),
    kind=st.sampled_from(["record", "record", "problem", "ending", "layers", None]),
    odd=st.dictionaries(st.sampled_from([*ARRAYS]), odd_arrays | st.none(), max_size=2),
)
@example(changes={"step": "1"}, kind="record", odd={})
@example(changes={"step": 2**63}, kind="record", odd={})
@example(changes={"scalars": [["loss"]]}, kind="record", odd={})
@example(changes={"notes": {"at": ["clip"]}}, kind="record", odd={})
@example(changes={"roles": [{"role": ["x"], "layers": 0, "columns": ["count"]}]}, kind="record", odd={})
@example(changes={"roles": [{"role": 5, "layers": 0, "columns": ["count"]}]}, kind="record", odd={})
@example(changes={}, kind="record", odd={"0.offsets": np.array([0, 9, 2])})
@example(changes={}, kind="record", odd={"0.buckets": np.array([9999, 1], dtype=np.uint16)})
def test_what_is_no_entry_is_refused_and_never_half_believed(
    changes: dict[str, Any], kind: str | None, odd: dict[str, Any]
) -> None:
    """P25: a journal may come from anyone: wrong types, wrong sizes, missing parts."""
    arrays = {name: array for name, array in {**ARRAYS, **odd}.items() if array is not None}
    holds_against({**GOOD, **changes, **({"kind": kind} if kind else {})}, arrays)


@pytest.mark.parametrize("blob", [b"", b"\x00" * 7, b"\xff" * 64, b"{}", struct.pack("<Q", 8) + b'{"a":[]}'])
def test_bytes_that_are_no_blob_are_refused(blob: bytes) -> None:
    """P25: one kind of error for all of them, so that a reader stops there and keeps what it has."""
    nested = b'{"__metadata__":' + b"[" * 100_000
    for bad in (blob, struct.pack("<Q", len(nested)) + nested):
        with pytest.raises(ValueError):
            Decoder().decode(bad)


def test_without_the_checks_a_wrong_type_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """P25: the planted twin: what is read is believed."""
    wrong = [{"scalars": [5]}, {"notes": {"at": ["clip"]}}]
    for change in ({}, *wrong):
        holds_against({**GOOD, **change}, ARRAYS)
    monkeypatch.setattr(module, "_check_types", lambda words: None)
    monkeypatch.setattr(module, "_names", tuple)
    for change in wrong:
        with pytest.raises((AssertionError, TypeError, OverflowError, ValueError)):
            holds_against({**GOOD, **change}, ARRAYS)


# Data is never code -----------------------------------------------------------------------------------------------

AUDIT = """
import pickle, sys, zlib
from pathlib import Path
from holter.run import list_runs, open_run

def read(path):
    runs = list_runs(path.parent)
    run = open_run(path)
    history = run.history
    return len(runs), run.state, run.findings, run.layers, history.series("gradient", "norm"), history.scalar("loss")

seen = []
watched = ("pickle.find_class", "exec", "compile", "marshal.loads", "code.__new__", "os.system", "subprocess.Popen")
read(Path(sys.argv[1]))  # what is imported late is imported now: importing is running code
sys.addaudithook(lambda event, args: seen.append(event) if event in watched else None)
read(Path(sys.argv[2]))
clean = list(seen)
if len(sys.argv) > 3:  # the planted twin: a reader that trusts what it reads
    pickle.loads((Path(sys.argv[2]) / "run.json").read_bytes())
print(sorted(set(clean)), sorted(set(seen)))
"""


class Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, ("__import__('sys').stdout.write('owned')",)


def test_opening_a_hostile_run_runs_no_code(tmp_path: Path) -> None:
    """P25: the interpreter's own audit events: no unpickling, no compile, no exec while reading."""
    for name in ("good", "hostile"):
        (tmp_path / name).mkdir()
        journal = Journal(tmp_path / name / "rank-0.journal")
        journal.append(an_entry(scalars={"__import__('os').abort()": 1.0}))
        journal.close()
    payload = pickle.dumps(Exploit())
    (tmp_path / "good" / "run.json").write_text("{}")
    (tmp_path / "hostile" / "run.json").write_bytes(payload)
    with (tmp_path / "hostile" / "rank-0.journal").open("ab") as file:
        file.write(write_frame(payload, journal._number, 9))
    (tmp_path / "hostile" / "rank-0.1.journal").write_bytes(payload)

    def audited(*more: str) -> str:
        command = [sys.executable, "-c", AUDIT, str(tmp_path / "good"), str(tmp_path / "hostile"), *more]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert audited() == "[] []\n"
    trusting = audited("trust")
    assert trusting.startswith("owned[]") and "pickle.find_class" in trusting
