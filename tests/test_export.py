"""`holter export`: what other tools read back is what the history holds."""

from __future__ import annotations

import csv
import errno
import math
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas
import pyarrow.parquet
import pytest
import torch
from torch import nn

import holter
from holter import export as export_module
from holter.export import EXTRAS, HISTOGRAMS, ROWS, SCALARS, TABLES, export
from holter.journal import Journal
from holter.record import Record
from holter.run import journal_path
from holter.statistics.histogram import bucket_of
from holter.statistics.rows import COLUMNS, STATISTICS

FORMS = ("parquet", "csv")


def record(path: Path, model: nn.Module, steps: int = 6, *, poison_at: int | None = None) -> Path:
    """A real run of a model that takes inputs of width 4."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with holter.watch(model, optimizer, run=path, weights=2, activations=5, histograms=3, budget=None) as monitor:
        for step in range(steps):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            if step == poison_at:
                weight, bias = (parameter.grad for parameter in list(model.parameters())[:2])
                assert weight is not None and bias is not None
                weight[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
                bias.fill_(math.nan)
            optimizer.step()
            optimizer.zero_grad()
            monitor.flush()  # so that what is logged now comes late
            monitor.log(loss=loss if step != 1 else math.nan)
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> holter.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    return holter.open_run(record(tmp_path_factory.mktemp("runs") / "first", model, poison_at=5))


# pandas 3 reads every digit by itself, and warns of those who ask for it; the last one for Python 3.10 is older.
EXACT: Any = {} if int(pandas.__version__.split(".")[0]) >= 3 else {"float_precision": "round_trip"}


def read(form: str, path: Path) -> pandas.DataFrame:
    return pandas.read_parquet(path) if form == "parquet" else pandas.read_csv(path, **EXACT)


def exported(run: holter.Run, form: str, directory: Path) -> dict[str, pandas.DataFrame]:
    files = export(run, form, directory)
    tables = {table.name: read(form, file.path) for table, file in zip(TABLES, files, strict=True)}
    assert [len(table) for table in tables.values()] == [file.lines for file in files]
    return tables


@pytest.mark.parametrize("form", FORMS)
def test_scalars_read_back_as_they_were_logged(form: str, run: holter.Run, tmp_path: Path) -> None:
    table = exported(run, form, tmp_path)["scalars"]
    assert list(table) == list(SCALARS.columns)
    assert set(table["name"]) == set(run.history.scalars) >= {"loss", "gradient_norm"}
    for name in run.history.scalars:
        steps, values = run.history.scalar(name)
        found = table[table["name"] == name]
        assert found["step"].tolist() == steps.tolist()
        np.testing.assert_array_equal(found["value"], values)
    late = {record.step: record.time for record in run.records if record.late}
    losses = table[table["name"] == "loss"]
    assert losses["late"].all() and not table[table["name"] == "gradient_norm"]["late"].any()
    assert dict(zip(losses["step"], losses["time"], strict=True)) == late
    assert (table["run"] == "first").all() and (table[["rank", "segment"]] == 0).all(axis=None)


@pytest.mark.parametrize("form", FORMS)
def test_rows_read_back_with_every_column_and_statistic(form: str, run: holter.Run, tmp_path: Path) -> None:
    table = exported(run, form, tmp_path)["rows"]
    assert list(table) == list(ROWS.columns)
    assert set(COLUMNS) | set(STATISTICS) <= set(table)
    assert set(table["role"]) == set(run.history.roles) == {"gradient", "update", "weight", "activation"}
    for role in run.history.roles:
        for statistic in STATISTICS:
            steps, layers, values = run.history.series(role, statistic)
            wide = table[table["role"] == role].pivot(index="step", columns="layer", values=statistic)
            assert wide.index.tolist() == steps.tolist()
            np.testing.assert_array_equal(wide[list(layers)], values, err_msg=f"{role} {statistic}")
    squares = np.stack([r.rows["gradient"].rows.column("sum_squares") for r in run.records if "gradient" in r.rows])
    np.testing.assert_array_equal(table[table["role"] == "gradient"]["sum_squares"], squares.ravel())


@pytest.mark.parametrize("form", FORMS)
def test_extras_read_back_by_name(form: str, run: holter.Run, tmp_path: Path) -> None:
    table = exported(run, form, tmp_path)["extras"]
    assert list(table) == list(EXTRAS.columns) and set(table["role"]) == {"update", "activation", "weight"}
    for role in ("update", "activation", "weight"):
        for name in run.history.extras(role):
            steps, layers, values = run.history.series(role, name)
            found = table[(table["role"] == role) & (table["name"] == name)]
            wide = found.pivot(index="step", columns="layer", values="value")
            assert wide.index.tolist() == steps.tolist()
            np.testing.assert_array_equal(wide[list(layers)], values, err_msg=name)


@pytest.mark.parametrize("form", FORMS)
def test_histograms_read_back_with_their_edges(form: str, run: holter.Run, tmp_path: Path) -> None:
    table = exported(run, form, tmp_path)["histograms"]
    assert list(table) == list(HISTOGRAMS.columns)
    lines = 0
    for role in run.history.roles:
        for layer in run.history.layers(role):
            for step, histogram in zip(*run.history.histogram(role, layer), strict=True):
                found = table[(table["role"] == role) & (table["layer"] == layer) & (table["step"] == step)]
                finite = found[np.isfinite(found["lower"])]
                middle = (finite["lower"] + finite["upper"]) / 2
                expected = dict(zip(histogram.buckets.tolist(), histogram.counts.tolist(), strict=True))
                buckets = bucket_of(middle.to_numpy()).tolist()
                assert dict(zip(buckets, finite["count"], strict=True)).items() <= expected.items()
                assert found["count"].sum() == histogram.count
                lines += len(found)
    assert lines == len(table) > 0


@pytest.mark.parametrize("form", FORMS)
def test_nan_and_infinities_are_counted_between_themselves(form: str, tmp_path: Path) -> None:
    run = holter.open_run(record(tmp_path / "poisoned", nn.Linear(4, 5), 4, poison_at=3))
    table = exported(run, form, tmp_path)["histograms"]
    odd = table[(table["step"] == 3) & (table["layer"] == "weight") & ~np.isfinite(table["lower"])]
    odd = odd[odd["role"] == "gradient"]
    edges = sorted(map(str, odd["lower"]))
    assert edges == ["-inf", "inf", "nan"] and edges == sorted(map(str, odd["upper"]))
    assert odd["count"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("form", FORMS)
def test_duckdb_reads_different_runs_with_one_glob(form: str, run: holter.Run, tmp_path: Path) -> None:
    torch.manual_seed(1)
    wide = nn.Sequential(nn.Linear(4, 9, bias=False), nn.Tanh(), nn.Linear(9, 3), nn.Linear(3, 1))
    second = holter.open_run(record(tmp_path / "second", wide, 3))
    for one in (run, second):
        export(one, form, tmp_path / "all")
    found = duckdb.sql(
        f"SELECT run, layer, max(norm) FROM '{tmp_path}/all/*.rows.{form}' WHERE role = 'gradient' AND step < 5 "
        "GROUP BY ALL"
    ).fetchall()
    expected = set()
    for one in (run, second):
        _, layers, norms = one.history.series("gradient", "norm")
        expected |= {(one.name, layer, norm) for layer, norm in zip(layers, norms[:5].max(axis=0), strict=True)}
    assert set(found) == expected


def test_every_run_has_the_same_parquet_schema(run: holter.Run, tmp_path: Path) -> None:
    """Also one that has recorded nothing yet; numbers are split by byte, and compressed with zstd."""
    model = nn.Linear(4, 1)
    holter.watch(model, torch.optim.SGD(model.parameters()), run=tmp_path / "empty").close()
    full, empty = (export(one, "parquet", tmp_path / "out") for one in (run, holter.open_run(tmp_path / "empty")))
    assert [file.lines for file in empty] == [0] * len(TABLES)
    for a, b in zip(full, empty, strict=True):
        assert pyarrow.parquet.read_schema(a.path).equals(pyarrow.parquet.read_schema(b.path))
    group = pyarrow.parquet.ParquetFile(full[1].path).metadata.row_group(0)
    columns = [group.column(place) for place in range(group.num_columns)]
    assert {column.compression for column in columns} == {"ZSTD"}
    assert all(("BYTE_STREAM_SPLIT" in c.encodings) == (c.physical_type == "DOUBLE") for c in columns)


def test_ranks_and_segments_keep_their_own_lines(tmp_path: Path) -> None:
    """P17: a resume repeats steps, and both times are there; every process has its lines."""
    model = nn.Linear(4, 1)
    record(tmp_path / "run", model, 4)
    record(tmp_path / "run", model, 2)
    shutil.copy(tmp_path / "run" / "rank-0.journal", tmp_path / "run" / "rank-3.journal")
    table = exported(holter.open_run(tmp_path / "run"), "parquet", tmp_path)["scalars"]
    losses = table[table["name"] == "loss"].groupby(["rank", "segment"])["step"].apply(list)
    assert losses.to_dict() == {(0, 0): [0, 1, 2, 3], (0, 1): [0, 1], (3, 0): [0, 1, 2, 3]}


@pytest.mark.parametrize("form", FORMS)
def test_a_run_is_written_batch_by_batch(
    form: str, run: holter.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = exported(run, form, tmp_path / "whole")
    sizes: list[int] = []
    writer = export_module.WRITERS[form]

    class Counting(writer):  # type: ignore[misc, valid-type]
        def write(self, batch: Any) -> None:
            sizes.append(sum(len(lines["run"]) for lines in batch))
            super().write(batch)

    monkeypatch.setattr(export_module, "BATCH", 10)
    monkeypatch.setattr(export_module, "WRITERS", {form: Counting})
    pieces = exported(run, form, tmp_path / "pieces")
    assert len(sizes) > 10 and max(sizes) < 200
    for name, table in whole.items():
        pandas.testing.assert_frame_equal(pieces[name], table)


@pytest.mark.parametrize("form", FORMS)
def test_a_failed_export_leaves_the_one_before_and_no_litter(
    form: str, run: holter.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(run, form, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    class Full(export_module.WRITERS[form]):  # type: ignore[misc, name-defined]
        def write(self, batch: Any) -> None:
            super().write(batch)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_module, "WRITERS", {form: Full})
    with pytest.raises(OSError, match="No space left"):
        export(run, form, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


HOSTILE = [
    "=cmd|' /C calc'!A0",
    "+1",
    "-1",
    "@SUM(A1)",
    "\t=1",
    "\r=1",
    "\n=1",
    'quote"d, comma',
    "\ud800",
    "x\x00y",
    "ſ漢",
]


class Hostile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4) for name in HOSTILE})
        for name in HOSTILE:  # the whole name of a layer, not only a part of it
            self.register_parameter(name, nn.Parameter(torch.ones(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, part in self.parts.items():
            x = part(x) * self.get_parameter(name)
        return x


@pytest.mark.parametrize("form", FORMS)
def test_hostile_names_stay_names(form: str, tmp_path: Path) -> None:
    """P22: no cell of a CSV is a formula, and whatever a layer is called can be read back."""
    run = holter.open_run(record(tmp_path / "=1+2", Hostile(), 2))
    paths = [file.path for file in export(run, form, tmp_path / "out")]
    if form == "parquet":
        layers = set(pandas.read_parquet(paths[1])["layer"])
        known = (*run.history.layers("gradient"), *run.history.layers("activation"))
        assert layers == {name.replace("\ud800", "\\ud800") for name in known}
        return
    for path in paths:
        assert b"\0" not in path.read_bytes()  # many readers end a cell there
        table = pandas.read_csv(path, engine="python", dtype=str, keep_default_na=False)
        texts = [name for name in table if name in ("run", "role", "layer", "name")]
        assert not table[texts].map(lambda cell: cell.startswith(tuple("=+-@\t\r\n"))).any(axis=None)
    assert set(table["run"]) == {"'=1+2"}
    assert "'@SUM(A1)" in set(table["layer"]) and "parts.@SUM(A1).weight" in set(table["layer"])


SIGNS = "=+-@＝＋－＠\u2212\ufe63\ufe66"
BEFORE = (
    "",
    " ",
    "  ",
    "\t",
    "\r\n",
    "\x0b",
    '"',
    "'",
    "|",
    '" |',
    "\u00a0",
    "\u3000",
    "\u200b",
    "\ufeff",
    "｜",
    "＂",
    "\u201c",
)


@pytest.mark.parametrize("before", BEFORE)
def test_a_cell_cannot_begin_with_a_formula_whatever_stands_before_it(before: str, tmp_path: Path) -> None:
    """P22: programs trim blanks, take off quotes and split at bars before they decide what is a formula."""
    record = Record(0, 1.0, {f"{before}{sign}SUM(1)": 1.0 for sign in SIGNS} | {f"name{before}=1": 1.0})
    journal = Journal(journal_path(tmp_path, 0, 0))
    journal.append(record)
    journal.close()
    path = export(holter.open_run(tmp_path), "csv", tmp_path / "out")[0].path
    with path.open(newline="", encoding="utf-8") as file:
        names = [line["name"] for line in csv.DictReader(file)]
    for name, sign in zip(names, SIGNS, strict=False):
        assert name.startswith("'") and name.endswith(f"'{sign}SUM(1)") and name.replace("'", "", 1).startswith(before)
    apart = "'" if before.endswith(("|", "\t")) else ""  # in some locales a cell begins behind it
    assert names[-1] == f"name{before}{apart}=1", "what is no formula stays as it is"


@pytest.mark.parametrize("separator", [";", "\t", "|", '; "'])
def test_no_cell_of_another_locale_is_a_formula(separator: str, tmp_path: Path) -> None:
    """P22: a name that a program with another separator takes for two cells."""
    journal = Journal(journal_path(tmp_path, 0, 0))
    journal.append(Record(0, 1.0, {f"a{separator}=cmd|' /C calc'!A0": 1.0, "a=b;c": 2.0}))
    journal.close()
    lines = export(holter.open_run(tmp_path), "csv", tmp_path / "out")[0].path.read_text("utf-8")
    cells = [cell.strip(' "') for line in lines.splitlines() for cell in line.split(separator.strip(' "') or "\t")]
    assert not [cell for cell in cells if cell[:1] in tuple("=+-@")] and "a=b;c" in lines


def test_the_name_of_a_draft_cannot_be_guessed_and_a_link_in_its_place_is_not_followed(
    run: holter.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts: list[str] = []
    real = Path.replace

    def noted(self: Path, target: Path) -> Path:
        drafts.append(self.name)
        return real(self, target)

    monkeypatch.setattr(Path, "replace", noted)
    for _ in range(2):
        export(run, "csv", tmp_path / "out")
    assert len(set(drafts)) == 2 * len(TABLES) and not any(str(os.getpid()) in name.split(".") for name in drafts)

    monkeypatch.setattr(export_module.secrets, "token_hex", lambda size: "known")
    (tmp_path / "victim").write_text("mine")
    for table in TABLES:
        (tmp_path / "out" / f".{run.name}.{table.name}.csv.known").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        export(run, "csv", tmp_path / "out")
    assert (tmp_path / "victim").read_text() == "mine"


def test_parquet_without_pyarrow_says_what_to_install(
    run: holter.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'holter\[parquet\]'"):
        export(run, "parquet", tmp_path)
    assert len(export(run, "csv", tmp_path)) == len(TABLES)


def test_an_unknown_form_is_refused_with_those_there_are(run: holter.Run, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parquet, csv"):
        export(run, "xlsx", tmp_path)


def test_a_run_is_exported_into_itself_and_stays_a_run(tmp_path: Path) -> None:
    run = holter.open_run(record(tmp_path / "run", nn.Linear(4, 1), 2))
    assert {file.path for file in export(run, "csv")} == {
        run.path / "export" / f"run.{table.name}.csv" for table in TABLES
    }
    assert len(holter.open_run(run.path).history) == 2
