"""The command line: what it shows is what the run holds, and what is wrong is one line."""

from __future__ import annotations

import copy
import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from rich.cells import cell_len
from torch import nn

import holter
from holter.cli import main
from holter.frames import AROUND, BEGIN, HEAD
from holter.glance import glance
from holter.journal import Journal, JournalReader, read_backwards
from holter.record import Ending, LayerRows, Record
from holter.statistics.rows import COLUMNS, Rows
from holter.summary import summarise
from tests import sick_trainings

HOSTILE = [
    "[bold]x[/bold]",
    "\x1b[31mred",
    "\u202eevil",
    "a\nb",
    "a\rb",
    "\x07",
    "\u2028",
    "\x9b2J",
    "\ud800",
    "x" * 3000,
]


class Named(nn.Module):
    """Linear layers of width 4 in a row, under any names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


def record(
    path: Path, names: list[str] | None = None, steps: int = 5, scale: dict[str, float] | None = None, **options: Any
) -> Path:
    """A real run; `scale` multiplies the gradient of a part at every step, and leaves the weights alone."""
    torch.manual_seed(0)
    model = Named(names or ["a", "b", "c"])
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with holter.watch(model, optimizer, run=path, **{"weights": 2, "budget": None, **options}) as monitor:
        for _ in range(steps):
            loss = model(torch.randn(8, 4)).square().mean()
            loss.backward()
            for name, factor in (scale or {}).items():
                model.parts[name].weight.grad.mul_(factor)  # type: ignore[union-attr, operator]
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
            if scale:
                model.load_state_dict(start)
    return path


def call(*arguments: str | Path, code: int = 0, width: int | None = None) -> Result:
    environment = {"COLUMNS": str(width)} if width else {}
    result = CliRunner().invoke(main, [str(argument) for argument in arguments], env=environment)
    assert result.exit_code == code, result.output
    return result


def parse(result: Result) -> Any:
    """Strict JSON: NaN and Infinity are refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(result.stdout, parse_constant=refuse)


def lines_of(result: Result, part: str) -> list[str]:
    return [line for line in result.stdout.splitlines() if part in line]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("runs") / "healthy")


# holter runs --------------------------------------------------------------------------------------------------


def test_runs_tells_state_steps_loss_and_model(tmp_path: Path) -> None:
    for place, steps in enumerate((1, 7)):
        record(tmp_path / f"run{place}", steps=steps)
    for place, steps in enumerate((1, 7)):
        _, losses = holter.open_run(tmp_path / f"run{place}").history.scalar("loss")
        (line,) = lines_of(call("runs", tmp_path), f"run{place}")
        assert line.split()[:4] == [f"run{place}", "finished", str(steps), f"{losses[-1]:.3g}"]
        assert "Named" in line and " 48 " in line
    assert [run["steps"] for run in parse(call("runs", tmp_path, "--json"))] == [7, 1], "newest first"


def test_one_damaged_run_never_hides_another(tmp_path: Path) -> None:
    """P18: each line says what is wrong with its own run."""
    good = record(tmp_path / "good", steps=3)
    for name in ("newer", "no info", "cut", "wild info", "journal is a directory", "noise"):
        shutil.copytree(good, tmp_path / name)
    (tmp_path / "newer" / "rank-0.journal").write_bytes(b"HOLTER\x63\x00" + bytes(64))
    (tmp_path / "no info" / "run.json").write_text("{")
    os.truncate(tmp_path / "cut" / "rank-0.journal", 3)
    (tmp_path / "wild info" / "run.json").write_text('{"created": 1e300, "model": [], "parameters": "x", "layers": 3}')
    (tmp_path / "journal is a directory" / "rank-0.journal").unlink()
    (tmp_path / "journal is a directory" / "rank-0.journal").mkdir()
    (tmp_path / "noise" / "rank-0.journal").write_bytes(os.urandom(500))
    (tmp_path / "not a run").mkdir()
    result = call("runs", tmp_path)
    assert lines_of(result, "good")[0].split()[1:3] == ["finished", "3"]
    assert lines_of(result, "no info")[0].split()[2:4] == ["finished", "3"]
    assert "run.json is missing" in result.stdout
    # Where a text is broken depends on the length of the directory's name.
    assert "unreadable" in lines_of(result, "newer")[0] and "journal format 99" in " ".join(result.stdout.split())
    assert "upgrade it with `pip install -U holter`" in " ".join(result.stdout.split())
    for name in ("cut", "wild info", "noise", "journal is"):
        assert lines_of(result, name), name
    assert "not a run" not in result.stdout


def test_a_run_of_another_version_fits_into_80_cells_too(tmp_path: Path) -> None:
    record(tmp_path / "2026-11-15_09-30-12-heron", steps=1)
    (tmp_path / "2026-11-15_09-30-12-heron" / "rank-0.journal").write_bytes(b"HOLTER\x63\x00")
    result = call("runs", tmp_path, width=80)
    assert all(cell_len(line) <= 80 for line in result.stdout.splitlines())
    words = re.sub(r"\s+", "", result.stdout)
    assert "2026-11-15_09-30-12-heron" in words and "pipinstall-Uholter" in words


def newest(path: Path) -> tuple[int, float | None]:
    """The last step and loss, by reading everything."""
    records = [entry for entry in JournalReader(path).read() if isinstance(entry, Record)]
    losses = [r.scalars["loss"] for r in records if "loss" in r.scalars]
    return (records[-1].step + 1 if records else 0), (losses[-1] if losses else None)


def test_a_glance_sees_what_a_whole_reading_sees_wherever_the_file_is_cut(healthy: Path, tmp_path: Path) -> None:
    """P12: the journal ends at any byte; the end is found without its beginning, and as the reader finds it."""
    shutil.copytree(healthy, tmp_path / "run")
    journal = tmp_path / "run" / "rank-0.journal"
    whole = journal.read_bytes()
    steps = set()
    for size in [*range(0, len(whole), 61), *range(len(whole) - 200, len(whole) + 1)]:
        journal.write_bytes(whole[:size])
        seen = glance(holter.open_run(journal.parent))
        assert (seen.steps, seen.loss) == newest(journal), f"cut at {size}"
        assert seen.state == ("finished" if size == len(whole) else "running")
        steps.add(seen.steps)
    assert steps == {0, 1, 2, 3, 4, 5}


def test_values_that_arrive_late_do_not_take_steps_back_in_the_list(tmp_path: Path) -> None:
    """P32: times of a device and of collectives come after records of later steps."""
    journal = Journal(tmp_path / "rank-0.journal")
    for step in range(9):
        journal.append(Record(step, 1e9 + step, {"loss": 9.0 - step}))
    journal.append(Record(5, 1e9 + 9, {"machine/collective_time": 0.1}, late=True))
    journal.close()
    run = holter.open_run(tmp_path)
    assert glance(run).steps == 9 == int(run.history.latest().steps[-1]) + 1 and glance(run).loss == 1.0


def test_a_glance_reads_only_the_end_of_a_journal(healthy: Path, tmp_path: Path) -> None:
    shutil.copytree(healthy, tmp_path / "run")
    journal = tmp_path / "run" / "rank-0.journal"
    steps, loss = newest(journal)
    whole = bytearray(journal.read_bytes())
    whole[100 : len(whole) // 2] = bytes(len(whole) // 2 - 100)
    journal.write_bytes(whole)
    assert newest(journal) == (steps, loss), "a whole reading goes on behind the damage"
    assert (glance(holter.open_run(journal.parent)).steps, glance(holter.open_run(journal.parent)).loss) == (
        steps,
        loss,
    )


def test_reading_backwards_gives_every_frame_once(healthy: Path) -> None:
    journal = healthy / "rank-0.journal"
    blobs = list(read_backwards(journal))
    data = journal.read_bytes()
    place = BEGIN
    for blob in reversed(blobs):
        assert data[place + HEAD : place + HEAD + len(blob)] == blob
        place += AROUND + len(blob)
    assert place == len(data)


@pytest.mark.parametrize("place", [0.0, 0.5])
def test_damage_in_a_journal_is_told_and_does_not_hide_how_the_run_ended(
    healthy: Path, tmp_path: Path, place: float
) -> None:
    shutil.copytree(healthy, tmp_path / "run")
    journal = tmp_path / "run" / "rank-0.journal"
    data = bytearray(journal.read_bytes())
    data[max(200, int(place * len(data)))] ^= 1
    journal.write_bytes(data)
    run = holter.open_run(tmp_path / "run")
    assert run.unreadable_bytes and run.state == "finished" == glance(run).state
    told = call("diagnose", run.path)
    assert "torn or damaged" in told.output and "bytes unreadable. The rest was read" in told.output
    assert "goes on" not in told.output
    assert ("no step to examine" in told.output) == (not len(run.history))
    said = parse(call("diagnose", run.path, "--json"))
    assert said["unreadable_bytes"] == run.unreadable_bytes and said["state"] == "finished"


def test_a_run_that_nobody_touches_any_more_has_crashed(healthy: Path, tmp_path: Path) -> None:
    shutil.copytree(healthy, tmp_path / "run")
    journal = tmp_path / "run" / "rank-0.journal"
    os.truncate(journal, journal.stat().st_size - 1)
    assert lines_of(call("runs", tmp_path), "run ")[-1].split()[1] == "running"
    os.utime(journal, (time.time() - 3600,) * 2)
    assert lines_of(call("runs", tmp_path), "run ")[-1].split()[1] == "crashed"
    assert holter.open_run(tmp_path / "run").state == "crashed"


def test_a_resumed_run_tells_its_newest_segment(tmp_path: Path) -> None:
    record(tmp_path / "run", steps=9)
    record(tmp_path / "run", steps=2)
    assert parse(call("runs", tmp_path, "--json"))[0]["steps"] == 2
    record(tmp_path / "run", steps=0)
    assert parse(call("runs", tmp_path, "--json"))[0]["steps"] == 2, "a segment without steps takes nothing away"


def test_no_runs_yet_is_no_error(tmp_path: Path) -> None:
    assert "holter demo" in call("runs", tmp_path).stdout


# holter show --------------------------------------------------------------------------------------------------


def test_show_gives_the_numbers_of_the_history(healthy: Path) -> None:
    shown = parse(call("show", healthy, "--json"))
    history = holter.open_run(healthy).history
    _, losses = history.scalar("loss")
    assert (shown["steps"], shown["state"], shown["model"]) == (5, "finished", "Named")
    loss = shown["scalars"]["loss"]
    assert (loss["first"], loss["last"], loss["highest"]) == (losses[0], losses[-1], losses.max())
    assert [role["role"] for role in shown["roles"]] == ["gradient", "update", "weight", "activation"]
    assert [role["measure"] for role in shown["roles"]] == ["norm", "ratio", "norm", "rms"]
    for role in shown["roles"]:
        _, layers, measures = history.series(role["role"], role["measure"])
        median = np.median(measures[-1])
        (siblings,) = role["siblings"]
        assert siblings == {
            "kind": "layers" if role["role"] == "activation" else "matrices",
            "count": 3,
            "median": pytest.approx(median),
            "spread": pytest.approx(measures[-1].max() / measures[-1].min()),
        }
        for line in role["layers"]:
            column = measures[:, layers.index(line["layer"])]
            assert (line["value"], line["looks"]) == (column[-1], len(column))
            assert line["median"] == np.median(column)
            assert (line["lowest"], line["highest"]) == (column.min(), column.max())
            assert line["change"] == pytest.approx(column[-1] / column[0])
            assert line["siblings"] == pytest.approx(column[-1] / median)
            for name in ("norm", "mean", "std", "rms", "min", "max", "zero_share", "nonfinite"):
                values = history.series(role["role"], name)[2][:, layers.index(line["layer"])]
                assert line[name] == values[-1], name
            for name, value in line["extras"].items():
                values = history.series(role["role"], name)[2][:, layers.index(line["layer"])]
                assert value == (values[-1] if np.isfinite(values[-1]) else None), name


def test_the_worst_layers_come_first(tmp_path: Path) -> None:
    """A6: a layer 100 times smaller than its siblings is plain to see, a non-finite one even more."""
    names = [f"part{place}" for place in range(9)]
    scale = {"part3": 1e-3, "part5": math.nan, "part7": 100.0}
    run = record(tmp_path / "run", names, scale=scale, weights=None, updates=None, activations=None)
    (role,) = summarise(holter.open_run(run)).roles
    ordered = [layer.layer.split(".")[1] for layer in role.layers]
    assert ordered[0] == "part5" and set(ordered[1:3]) == {"part3", "part7"}
    assert math.isnan(role.layers[0].norm), "without a finite value there is no norm, not one of 0"
    text = call("show", run).stdout
    assert text.index("part5") < min(text.index("part3"), text.index("part7"))
    assert "1 not finite" in " ".join(text.split())
    sign, line = lines_of(call("show", run), "part5")
    assert sign.startswith(" not finite  parts.part5.weight (gradient)") and "first in step 0" in sign
    assert "nan" in line and "80 since 0" in line, "16 values at 5 steps"


def test_a_bias_is_not_held_against_a_matrix(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400))
    nn.init.constant_(model[0].bias, 1e-6)
    nn.init.constant_(model[1].bias, 1e-6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with holter.watch(model, optimizer, run=tmp_path / "run", weights=1, updates=None, activations=None):
        model(torch.ones(1, 400)).sum().backward()
        optimizer.step()
    roles = {role.role: role for role in summarise(holter.open_run(tmp_path / "run")).roles}
    assert {siblings.kind: siblings.count for siblings in roles["weight"].siblings} == {"matrices": 2, "biases": 2}
    assert not any(layer.is_far for layer in roles["weight"].layers)


def test_the_rest_is_counted_and_shown_when_asked_for(tmp_path: Path) -> None:
    names = [f"part{place:02}" for place in range(20)]
    run = record(tmp_path / "run", names, steps=2, weights=None, updates=None, activations=None)
    rows = re.findall(r"parts\.part\d\d\.weight", call("show", run).stdout)
    assert len(rows) == 15
    far = sum(layer.is_far for layer in summarise(holter.open_run(run)).roles[0].layers[15:])
    assert ("… and 5 more layers within 10×" in call("show", run).stdout) == (far == 0)
    everything = call("show", run, "--all").stdout
    assert {f"parts.{name}.weight" for name in names} == set(re.findall(r"parts\.part\d\d\.weight", everything))
    assert "more layers" not in everything


def test_layers_that_are_cut_off_though_far_away_are_counted_as_such(tmp_path: Path) -> None:
    names = [f"part{place:02}" for place in range(50)]
    run = record(
        tmp_path / "run",
        names,
        steps=1,
        scale=dict.fromkeys(names[:20], 1e-09),
        weights=None,
        updates=None,
        activations=None,
    )
    far = sum(layer.is_far for layer in summarise(holter.open_run(run)).roles[0].layers[15:])
    assert far >= 5
    assert f"… and 35 more layers, {far} of them more than 10×" in call("show", run).stdout


def test_the_rest_is_not_called_near_the_median_where_it_is_not_finite(tmp_path: Path) -> None:
    names = [f"part{place:02}" for place in range(20)]
    run = record(
        tmp_path / "run",
        names,
        steps=2,
        scale=dict.fromkeys(names, math.nan),
        weights=None,
        updates=None,
        activations=None,
    )
    text = call("show", run).stdout
    assert "… and 5 more layers, 5 of them not finite" in text and "within" not in text
    assert lines_of(call("show", run), "gradient  ")[0].split()[1:4] == ["nan", "→", "nan"], "a norm, not one of 0"


def test_biases_that_start_at_zero_are_nothing_odd(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with holter.watch(model, optimizer, run=tmp_path / "run", weights=1, updates=None, activations=None):
        (0 * model(torch.ones(2, 4)).sum()).backward()
        optimizer.step()
    gradient, weight = summarise(holter.open_run(tmp_path / "run")).roles
    assert not any(layer.is_far for layer in weight.layers)
    assert [layer.norm for layer in gradient.layers] == [0, 0, 0, 0]
    assert "1 exactly zero" in " ".join(call("show", tmp_path / "run", "--role", "weight").stdout.split())


def test_one_role_can_be_asked_for(healthy: Path) -> None:
    assert [role["role"] for role in parse(call("show", healthy, "--role", "weight", "--json"))["roles"]] == ["weight"]
    text = call("show", healthy, "--role", "weight").stdout
    assert "\nweight " in text and "\ngradient " not in text.split("recorded")[1]


@pytest.mark.parametrize("options", [[], ["--json"], ["--all"]], ids=lambda options: " ".join(options) or "plain")
def test_every_kind_of_run_can_be_shown(options: list[str], tmp_path: Path) -> None:
    """Empty, of one layer, of one step, without rows, all NaN, without run.json, with zeros."""
    model = nn.Linear(2, 2)
    holter.watch(model, torch.optim.SGD(model.parameters()), run=tmp_path / "empty").close()
    record(tmp_path / "one layer", ["a"], steps=1)
    record(tmp_path / "scalars only", budget=0)
    record(tmp_path / "all nan", scale=dict.fromkeys("abc", math.nan))
    record(tmp_path / "zeros", scale=dict.fromkeys("abc", 0.0))
    (tmp_path / "bare").mkdir()
    shutil.copy(tmp_path / "one layer" / "rank-0.journal", tmp_path / "bare")
    (tmp_path / "info only").mkdir()
    shutil.copy(tmp_path / "one layer" / "run.json", tmp_path / "info only")
    for path in tmp_path.iterdir():
        result = call("show", path, *options)
        parse(result) if "--json" in options else None
    assert "No layers were measured" in call("show", tmp_path / "empty").stdout
    assert "3 exactly zero" in call("show", tmp_path / "zeros").stdout


def test_rows_that_hold_no_numbers_are_passed_over(tmp_path: Path) -> None:
    """What is read may come from anyone."""
    journal = Journal(tmp_path / "rank-0.journal")
    values = np.full((2, len(COLUMNS)), np.nan)
    values[1] = 1.0
    journal.append(Record(0, 0.0, {"loss": math.inf}, {"gradient": LayerRows(("void", "full"), Rows(values))}))
    journal.close()
    result = call("show", tmp_path)
    assert "full" in result.stdout and "void" not in result.stdout


def test_what_was_lost_and_what_went_wrong_is_in_the_header(healthy: Path, tmp_path: Path) -> None:
    shutil.copytree(healthy, tmp_path / "run")
    with (tmp_path / "run" / "rank-0.journal").open("ab") as file:
        file.write(b"x" * 77)
    assert "77 bytes unreadable" in call("show", tmp_path / "run").stdout
    model = nn.Linear(2, 2)
    with holter.watch(model, torch.optim.SGD(model.parameters()), run=tmp_path / "wrong") as monitor:
        monitor.log(loss="not a number")
    text = " ".join(call("show", tmp_path / "wrong").stdout.split())
    assert "Holter could not log loss: it is a str, not a number" in text


def test_a_failed_training_is_told_with_its_error(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ZeroDivisionError), holter.watch(model, torch.optim.SGD(model.parameters()), run=tmp_path / "r"):
        raise ZeroDivisionError
    assert "failed with ZeroDivisionError" in call("show", tmp_path / "r").stdout


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("failed", "The training failed after 4 steps, with RuntimeError."),
        (
            "crashed",
            "The training gave no sign of life any more after 4 steps: it was killed, or its machine went down.",
        ),
        ("running", "The training goes on, 4 steps so far."),
        ("interrupted", "The training was interrupted after 4 steps."),
        ("finished", ""),
    ],
)
def test_diagnose_says_first_how_the_training_ended(state: str, told: str, tmp_path: Path) -> None:
    """A run that was killed is no healthy one, whatever was recorded until then."""
    journal = Journal(tmp_path / "rank-0.journal")
    for step in range(4):
        journal.append(Record(step, float(step), {"loss": 1.0}))
    if state in ("failed", "interrupted", "finished"):
        journal.append(Ending(4.0, state, "RuntimeError" if state == "failed" else ""))
    journal.close()
    if state == "crashed":
        os.utime(tmp_path / "rank-0.journal", (1e9, 1e9))
    text = call("diagnose", tmp_path).stdout
    assert text.startswith(told)
    assert ("Nothing that was recorded says why." in text) == (state in ("failed", "crashed"))
    assert ("Nothing is wrong" in text) == (state not in ("failed", "crashed"))
    found = parse(call("diagnose", tmp_path, "--json"))
    assert (found["state"], found["steps"]) == (state, 4)
    assert found["error"] == ("RuntimeError" if state == "failed" else "")


def test_exit_codes_tell_findings_from_mistakes(tmp_path: Path) -> None:
    """For CI: 0 nothing found, 1 it could not be read, 2 not understood, 3 found."""
    sick = sick_trainings.repeated_batch(tmp_path / "sick")
    assert holter.open_run(sick).findings
    call("diagnose", sick, "--fail-on", "info", code=3)
    call("diagnose", sick, code=0)
    call("diagnose", sick_trainings.healthy(tmp_path / "healthy"), "--fail-on", "info", code=0)
    call("diagnose", sick, "--fail-on", "anything", code=2)
    call("diagnose", tmp_path / "missing", "--fail-on", "info", code=1)
    for command in ("diagnose", "compare"):
        assert "Exit with code 3" in " ".join(call(command, "--help").stdout.split())


def in_terminal(*arguments: str | Path, width: int) -> str:
    """What a real terminal of this width gets, colours and all."""
    parent, child = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(width), "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "holter", *map(str, arguments)]
    with subprocess.Popen(command, stdout=child, stderr=child, stdin=child, env=environment) as process:
        os.close(child)
        output = b""
        while True:
            try:
                output += (chunk := os.read(parent, 1 << 16))
            except OSError:  # how Linux tells the end of a terminal
                break
            if not chunk:
                break
        os.close(parent)
    assert process.returncode == 0, output
    return output.decode()


@pytest.mark.parametrize("width", [80, 120])
def test_hostile_names_do_nothing_to_a_terminal(width: int, tmp_path: Path) -> None:
    """P22: markup is shown as it is; no escape, bell, bidirectional or control character of a name gets through."""
    directory = tmp_path / "\x1b]0;title\x07 [red]\u202e"
    run = record(directory / "run", HOSTILE, steps=2)
    shutil.copytree(run, directory / "=\x1b[2J[blink]")
    for arguments in (("show", run, "--all"), ("runs", directory)):
        output = in_terminal(*arguments, width=width)
        text = re.sub(r"\x1b\[[0-9;]*m", "", output)  # rich's own colours
        assert text != output, "no colours: this was no terminal"
        assert all(char.isprintable() or char in "\r\n" for char in text), [c for c in text if not c.isprintable()]
        lines = text.replace("\r\n", "\n").splitlines()
        assert all(cell_len(line) <= width for line in lines)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", in_terminal("show", run, "--all", width=width))
    assert "parts.[bold]x[/bold].weight" in shown and "\\x1b[31mred" in shown and "\\u202eevil" in shown
    assert "\\x1b]0;title\\x07" in re.sub(r"\s+", "", shown)


def test_wider_terminals_show_more_columns(healthy: Path) -> None:
    narrow, wide = (call("show", healthy, width=width).stdout for width in (60, 160))
    assert all(cell_len(line) <= 60 for line in narrow.splitlines())
    heads = [next(line for line in text.splitlines() if "vs siblings" in line).split() for text in (narrow, wide)]
    assert heads[0][:2] == ["layer", "norm"] and len(heads[0]) < len(heads[1])
    assert {"change", "trend", "median", "rms", "min", "max", "zeros"} <= set(heads[1])


# Errors -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, healthy: Path) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("errors")
    (root / "no run").mkdir()
    (root / "file").write_text("x")
    shutil.copytree(healthy, root / "newer")
    (root / "newer" / "rank-0.journal").write_bytes(b"HOLTER\x03\x00")
    return {"root": root, "healthy": healthy}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("show {root}/nothing", "no such directory"),
        ("show {root}/no_run", "`holter runs` lists"),
        ("show {root}/file", "is not a run"),
        ("show {root}/newer", "pip install -U holter"),
        ("show {healthy} --role momentum", "there are gradient, update, weight, activation"),
        ("export {root}/nothing --to csv", "no such directory"),
        ("export {root}/newer --to csv", "pip install -U holter"),
        ("export {healthy} --to csv -o {root}/file", "-o"),
        ("export {healthy} --to parquet -o {root}/file/deeper", "-o"),
        ("export {healthy} --to csv -o /proc/nowhere", "-o"),
        ("runs {root}/nothing", "holter demo"),
        ("runs {root}/file", "is not a directory"),
        ("demo --run {root}/file", "--run"),
        ("demo --run /proc/nowhere", "--run"),
        ("show {root}/\x1b[31m\u202e", "\\x1b[31m\\u202e"),
    ],
)
def test_an_error_is_one_line_that_names_the_way_out(arguments: str, told: str, places: dict[str, Path]) -> None:
    words = [word.format(**places).replace("no_run", "no run") for word in arguments.split(" ")]
    result = call(*words, code=1)
    assert result.stdout == ""
    assert result.stderr.startswith("Error: ") and result.stderr.count("\n") == 1
    assert told in result.stderr
    assert result.stderr.rstrip("\n").isprintable()
    assert isinstance(result.exception, SystemExit)


def test_wrong_options_are_refused_before_anything_happens(healthy: Path) -> None:
    for words in (
        ["export", str(healthy)],
        ["export", str(healthy), "--to", "xlsx"],
        ["demo", "--steps", "0"],
        ["shwo"],
    ):
        assert "Usage: " in call(*words, code=2).stderr


# The real program ---------------------------------------------------------------------------------------------


def shell(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, **environment, "HOLTER": f"{sys.executable} -m holter"}
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=everything, timeout=110)


def test_help_and_version_load_neither_torch_nor_rich_nor_numpy() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from holter.cli import main\n"
        "for option in ('--help', '--version'): assert CliRunner().invoke(main, [option]).exit_code == 0\n"
        "print(sorted({'torch', 'rich', 'numpy', 'pyarrow', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
    assert re.fullmatch(r"holter \d+\.\d+\.\d+\S*\n", call("--version").stdout)


def test_showing_a_run_does_not_load_torch(healthy: Path) -> None:
    code = "import sys; from holter.cli import main; main(['show', sys.argv[1]], standalone_mode=False)"
    code += "; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(healthy)], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0 and "parts.a.weight" in done.stdout, done.stderr


@pytest.mark.parametrize("command", ["show {} --all", "show {} --json", "runs {}/.."])
def test_a_reader_that_goes_away_is_no_error(command: str, healthy: Path) -> None:
    done = shell(f"$HOLTER {command.format(healthy)} | {{ exec 0<&-; sleep 1; }}")
    assert done.stderr == ""


def test_a_terminal_without_unicode_gets_question_marks_and_no_traceback(healthy: Path) -> None:
    done = shell(f"$HOLTER show {healthy} && $HOLTER runs {healthy.parent}", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and done.stderr == ""
    assert "?" in done.stdout and "parts.a.weight" in done.stdout


def test_a_whole_story_in_the_shell(healthy: Path, tmp_path: Path) -> None:
    shutil.copytree(healthy, tmp_path / "run")
    done = shell(f"cd {tmp_path} && $HOLTER runs . && $HOLTER show run && $HOLTER export run --to csv -o out")
    assert done.returncode == 0 and done.stderr == ""
    assert (tmp_path / "out" / "run.rows.csv").is_file()
    assert "out/run.rows.csv  30 lines" in done.stdout, "gradients at 5 steps, weights at 3, the others at 1"
    failed = shell("$HOLTER show nowhere")
    assert failed.returncode == 1 and failed.stderr.startswith("Error: ") and failed.stdout == ""
