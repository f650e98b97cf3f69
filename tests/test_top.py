"""`holter top`: a frame is held against the stored run; the loop runs in a real terminal, beside a training."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.cells import cell_len
from rich.console import Console

import holter
from holter.diagnosis.chart import Chart, Moment
from holter.diagnosis.finding import Finding
from holter.following import LOOKS, Pulse, Vitals
from holter.journal import Journal
from holter.record import Ending, LayerRows, Problem, Record
from holter.run import STALE_SECONDS, journal_path, write_info
from holter.statistics.rows import COLUMNS, Rows
from holter.top import Frame, show_top
from holter.words import number
from tests import sick_trainings
from tests.hostile_names import hostile_names
from tests.sick_trainings import Net

HOSTILE = ["[bold]x[/bold]", "[/]", ":boom:", *hostile_names()]  # what rich would read as its own, first
SIZES = [(80, 24), (200, 60), (80, 12), (40, 10), (20, 5), (10, 2)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return sick_trainings.healthy(tmp_path_factory.mktemp("runs") / "healthy", total_steps=48)


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return sick_trainings.repeated_batch(tmp_path_factory.mktemp("runs") / "sick")


def vitals_of(path: Path) -> Vitals:
    follower = Pulse(path)
    assert follower.read_on()
    follower.finish()
    return follower.vitals(time.time())


def frame(vitals: Vitals, width: int = 120, height: int = 40) -> str:
    console = Console(width=width, height=height, force_terminal=True, highlight=False, color_system=None)
    with console.capture() as captured:
        console.print(Frame(vitals, height), end="")
    return captured.get()


def journal_of(path: Path, records: int, *, segment: int = 0, first: int = 0, time_of: float = 0.0) -> Journal:
    path.mkdir(parents=True, exist_ok=True)
    journal = Journal(journal_path(path, 0, segment))
    for step in range(first, first + records):
        journal.append(Record(step, time_of + 0.1 * step, {"loss": 1.0 / (step + 1)}, segment=segment))
    return journal


# What a frame says ----------------------------------------------------------------------------------------------


def test_a_frame_says_what_the_stored_run_says(healthy: Path) -> None:
    """Issue 7, 3: state, progress, loss, norm, rate, time, memory, worst layers."""
    run, text = holter.open_run(healthy), frame(vitals_of(healthy))
    losses = run.history.scalar("loss")[1]
    norms = run.history.scalar("gradient_norm")[1]
    assert f"step {len(run.history)} of 48" in text and "50 %" in text and "finished" in text
    assert re.search(rf"^loss +{number(losses[0])} → {number(losses[-1])} +[▁▂▃▄▅▆▇█]+", text, re.MULTILINE)
    assert re.search(rf"^gradient +{number(norms[0])} → {number(norms[-1])} ", text, re.MULTILINE)
    assert "a step" in text and "forward" in text and "process " in text
    assert "gradient, worst layers" in text and "encoder.weight" in text


def test_findings_and_advice_are_those_of_the_diagnosis(sick: Path) -> None:
    found = holter.open_run(sick).findings
    assert found, "nothing to compare"
    vitals = vitals_of(sick)
    assert vitals.findings == found
    text = " ".join(frame(vitals, 120, 60).split())
    for finding in found:
        assert finding.cause in text and finding.advice in text and f"since step {finding.since:,}" in text


def test_the_most_severe_finding_comes_first_and_what_does_not_fit_is_told(healthy: Path) -> None:
    causes = [Finding(f"cause-{i}", "loop", i, i, severity="info", advice="Wait. " * 40) for i in range(9)]
    worst = Finding("the-worst", "loop", 20, 21, severity="critical", advice="Act now.")
    vitals = replace(vitals_of(healthy), findings=(*causes, worst))
    text = frame(vitals, 80, 24)
    assert text.index(" the-worst") < text.index("cause-0")
    assert "and more: `holter diagnose`" in text
    assert "cause-8" in frame(vitals, 80, 80)


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_frame_fits_any_terminal(width: int, height: int, healthy: Path, sick: Path) -> None:
    for path in (healthy, sick):
        lines = frame(vitals_of(path), width, height).splitlines()
        assert 0 < len(lines) <= height
        assert max(map(cell_len, lines)) <= width
        assert path.name[-4:] in lines[0]


def test_a_larger_terminal_shows_more(sick: Path) -> None:
    small, large = (frame(vitals_of(sick), *size) for size in ((80, 24), (200, 60)))
    assert len(large.splitlines()) > len(small.splitlines())
    assert "worst layers" in small and large.count("worst layers") > small.count("worst layers")


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_hostile_names_do_nothing_to_a_frame(width: int, height: int, tmp_path: Path) -> None:
    """P22: run, model, layer, metric, cause, advice and error may hold anything."""
    path = tmp_path / "\x1b]0;title\x07[red]\u202e"
    path.mkdir()
    write_info(path, {"model": "\x1b[2J\u202e[blink]", "layers": [{"name": name, "shape": [2, 2]} for name in HOSTILE]})
    journal = Journal(journal_path(path, 0, 0))
    rows = LayerRows(tuple(HOSTILE), Rows(np.ones((len(HOSTILE), len(COLUMNS)))))
    for step in range(3):
        journal.append(Record(step, step, {f"val_{HOSTILE[step]}": 1.0}, {"gradient": rows, "\x1b[1m\u202e": rows}))
    journal.append(Problem(1, 0.0, "\x1b[5m", "[red]\x07"))
    journal.append(Ending(3.0, "failed", "\x1b[31mError\u202e"))
    journal.close()
    vitals = vitals_of(path)
    bad = [Finding(name, "layer", 0, 1, layer=name, advice=name, severity="critical") for name in HOSTILE]
    for shown in (vitals, replace(vitals, findings=tuple(bad))):
        text = frame(shown, width, height)
        assert all(char.isprintable() or char == "\n" for char in text)
        assert max(map(cell_len, text.splitlines())) <= width and len(text.splitlines()) <= height
    text = frame(vitals, 200, 60)
    assert "[bold]x[/bold]" in text and "\\x1b]0;title" in text, "the gate would pass on nothing"


def test_pace_and_time_left_are_those_of_the_newest_segment(tmp_path: Path) -> None:
    """A pause between two segments is no time that steps took, and the pace of the one before is past."""
    path = tmp_path / "resumed"
    path.mkdir()
    write_info(path, {"created": 0.0, "total_steps": 100})
    for segment, (first, pace, began) in enumerate([(0, 10.0, 1000.0), (40, 2.0, 90_000.0)]):
        journal = Journal(journal_path(path, 0, segment))
        for step in range(first, first + 40):
            journal.append(Record(step, began + (step - first) / pace, {"loss": 1.0}, segment=segment))
        # What is logged late says nothing about the pace.
        journal.append(Record(first + 39, began + 1e6, {"val_loss": 1.0}, segment=segment, late=True))
        journal.close()
    vitals = vitals_of(path)
    assert vitals.state == "running" and vitals.pace == pytest.approx(2.0)
    assert vitals.seconds_left == pytest.approx(20 / 2.0)
    assert "2 steps/s" in frame(vitals) and "10 s left" in frame(vitals)


def test_pace_and_times_are_told_without_exponents(tmp_path: Path) -> None:
    journal = Journal(journal_path(tmp_path, 0, 0))
    for step in range(30):
        journal.append(Record(step, step / 4321.0, {"loss": 1.0, "step_time": 0.0996}))
    journal.close()
    text = frame(vitals_of(tmp_path))
    assert "4,321 steps/s" in text and "100 ms a step" in text and "e+0" not in text


def test_a_segment_of_one_step_has_no_pace_yet(tmp_path: Path) -> None:
    path = tmp_path / "resumed"
    journal_of(path, 40).close()
    journal_of(path, 1, segment=1, first=40, time_of=9_000.0).close()
    vitals = vitals_of(path)
    assert vitals.pace is None and vitals.seconds_left is None and "steps/s" not in frame(vitals)


# What is followed -----------------------------------------------------------------------------------------------


def test_only_what_is_new_is_read_and_little_is_kept(tmp_path: Path) -> None:
    """A long run costs no more memory than a short one: 24 looks a role, 200 records, 50 problems, short lines."""
    path = tmp_path / "long"
    path.mkdir()
    journal, rows = Journal(journal_path(path, 0, 0)), LayerRows(("a", "b"), Rows(np.ones((2, len(COLUMNS)))))
    follower = Pulse(path)
    for step in range(3000):
        journal.append(Record(step, 0.1 * step, {"loss": 1.0 + step}, {"gradient": rows}))
        if step % 500 == 0:
            assert follower.read_on()
        journal.append(Problem(step, 0.0, "write", f"error {step}"))
    follower.read_on()
    vitals = follower.vitals(300.0)
    assert vitals.steps == 3000 and vitals.pace == pytest.approx(10.0)
    assert vitals.traces["loss"].first == 1.0 and vitals.traces["loss"].last == 3000.0
    assert len(vitals.traces["loss"].values) <= 400
    assert sum(finding.where == "monitor" for finding in vitals.findings) == 50
    assert vitals.roles[0].steps == LOOKS and len(follower._recent) == 200


def test_reading_can_be_cut_short_and_goes_on(healthy: Path) -> None:
    follower, steps = Pulse(healthy), []
    while not follower.read_on(0.0):
        vitals = follower.vitals(time.time(), all_is_read=False)
        steps.append(vitals.steps)
        assert "reading what is there" in frame(vitals)
    assert steps == sorted(steps) and len(set(steps)) > 5
    follower.finish()
    assert follower.vitals(time.time()).findings == holter.open_run(healthy).findings


def test_a_resume_that_repeats_steps_is_followed_as_the_stored_run_tells_it(tmp_path: Path) -> None:
    journal_of(tmp_path / "r", 30).close()
    follower = Pulse(tmp_path / "r")
    follower.read_on()
    assert follower.vitals(0.0).steps == 30
    journal_of(tmp_path / "r", 5, segment=1, first=10, time_of=50.0).close()
    follower.read_on()
    assert follower.vitals(0.0).steps == 15
    latest = holter.open_run(tmp_path / "r").history.latest()
    losses = follower.vitals(0.0).traces["loss"].values
    assert np.allclose(losses, latest.scalar("loss")[1]) and len(losses) == 15


def test_a_value_that_is_not_finite_stays_seen_however_long_the_run(tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.mkdir()
    journal = Journal(journal_path(path, 0, 0))
    for step in range(5000):
        journal.append(Record(step, step, {"loss": float("nan") if step == 1234 else 1.0 + step % 3}))
    assert "×" in frame(vitals_of(path))


@pytest.mark.parametrize("state", ["finished", "failed", "interrupted", "stopped"])
def test_an_ending_is_told_with_its_error(state: str, tmp_path: Path) -> None:
    journal = journal_of(tmp_path / "r", 5)
    journal.append(Ending(1.0, state, "OutOfMemoryError", dropped=3))
    text = frame(vitals_of(tmp_path / "r"))
    assert f"{state} {'by' if state == 'stopped' else 'with'} OutOfMemoryError" in text
    assert "3 records were dropped" in text


def test_damage_is_told_and_the_rest_is_shown(tmp_path: Path) -> None:
    journal_of(tmp_path / "r", 25).close()
    file = journal_path(tmp_path / "r", 0, 0)
    with file.open("ab") as torn:
        torn.write(b"\x50\0\0\0torn")
    os.utime(file, (time.time() - 2 * STALE_SECONDS,) * 2)
    text = frame(vitals_of(tmp_path / "r"))
    assert "crashed" in text and "run.json is missing or damaged" in text
    assert "Its journals are torn or damaged: 8 bytes unreadable. The rest was read." in text and "step 25" in text


def test_a_diagnosis_that_fails_is_told_and_the_rest_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r"
    path.mkdir()
    journal = Journal(journal_path(path, 0, 0))
    for step in range(25):
        journal.append(Record(step, step, {"loss": 1.0}))
    add = Chart.add

    def fail(chart: Chart, moment: Moment) -> None:
        if moment.step == 5:
            raise LookupError
        add(chart, moment)

    monkeypatch.setattr(Chart, "add", fail)
    text = frame(vitals_of(path))
    assert "The diagnosis failed with LookupError" in text and "step 25" in text


def test_a_run_that_is_taken_away_is_waited_for(tmp_path: Path) -> None:
    journal_of(tmp_path / "r", 5).close()
    follower = Pulse(tmp_path / "r")
    follower.read_on()
    (tmp_path / "r").rename(tmp_path / "elsewhere")
    assert follower.read_on() and follower.vitals(0.0).state == "waiting"
    (tmp_path / "elsewhere").rename(tmp_path / "r")
    assert follower.read_on() and follower.vitals(0.0).steps == 5


def test_an_empty_run_and_none_at_all_are_told(tmp_path: Path) -> None:
    write_info(tmp_path, {"model": "Net"})
    assert "empty" in frame(vitals_of(tmp_path))
    assert "waiting for it" in " ".join(frame(vitals_of(tmp_path / "later")).split())
    with pytest.raises(ValueError, match="no run at"):
        show_top(tmp_path / "later", Console(), once=True)


def test_without_a_terminal_it_is_one_frame(healthy: Path) -> None:
    done = subprocess.run([sys.executable, "-c", TOP, str(healthy)], capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stdout and done.stdout.count("healthy  finished") == 1 and done.stderr == ""


# In a terminal --------------------------------------------------------------------------------------------------

HOME = "\x1b[H"  # where a frame begins
TOP = """
import signal, sys
from rich.console import Console
from holter.top import show_top
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background of a shell would ignore it
show_top(sys.argv[1], Console())
"""


def train_as_told(path: Path, told: Connection) -> None:
    """Takes as many steps as it is told, and answers when they are in the journal; 0 ends it."""
    model, data = Net(), sick_trainings.batches()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    monitor = holter.watch(model, optimizer, run=path, total_steps=400)
    while steps := told.recv():
        for _ in range(steps):
            x, y = next(data)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
        monitor.flush()
        told.send(monitor.step)
    monitor.close()


class Trainer:
    """A real training in a process of its own: forked from a server that imports torch once and never trains."""

    def __init__(self, path: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, other = context.Pipe()
        self.process = context.Process(target=train_as_told, args=(path, other), daemon=True)
        self.process.start()

    def take(self, steps: int) -> int:
        """The number of the next step, once all of these are in the journal."""
        self._pipe.send(steps)
        assert self._pipe.poll(120)  # the first time torch is imported
        return int(self._pipe.recv())

    def finish(self) -> None:
        self._pipe.send(0)
        self.process.join(30)
        assert self.process.exitcode == 0

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Screen:
    """A real terminal with `holter top` in it."""

    def __init__(self, path: Path, width: int = 100, height: int = 30) -> None:
        self.parent, child = pty.openpty()
        self.resize(width, height)
        environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment |= {"TERM": "xterm-256color"}
        command = [sys.executable, "-c", TOP, str(path)]
        self.process = subprocess.Popen(
            command, stdin=child, stdout=child, stderr=child, env=environment, start_new_session=True
        )
        os.close(child)
        self.output = ""

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.parent, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def press(self, key: bytes) -> None:
        os.write(self.parent, key)

    def until(self, words: str) -> str:
        """What is shown from now on up to these words."""
        begin, end = len(self.output), time.monotonic() + 30
        while words not in self.output[begin:]:
            assert time.monotonic() < end, f"{words!r} never came: {self.output[begin:]}"
            if not self._read():
                raise AssertionError(f"{words!r} never came: {self.output[begin:]}")
        return self.output[begin:]

    def rest(self) -> str:
        """What it leaves, after the alternate screen."""
        while self._read():
            pass
        self.process.wait(60)
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.output.split("\x1b[?1049l")[-1]).replace("\r\n", "\n")

    def _read(self) -> bool:
        if not select.select([self.parent], [], [], 60)[0]:
            return False
        try:
            chunk = os.read(self.parent, 1 << 16)
        except OSError:  # how Linux tells the end of a terminal
            return False
        self.output += chunk.decode(errors="replace")
        return bool(chunk)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    found = Trainer(tmp_path / "live")
    yield found
    found.kill()


@pytest.fixture
def screen(tmp_path: Path) -> Iterator[Screen]:
    """With `holter top` of the run that the trainer writes, or will write."""
    found = Screen(tmp_path / "live")
    with found.process:
        yield found
        found.process.kill()
    with contextlib.suppress(OSError):  # a test may have closed it
        os.close(found.parent)


def test_a_live_training_is_followed_from_before_it_is_there_to_its_end(screen: Screen, tmp_path: Path) -> None:
    """Issue 7, 3"""
    screen.until("waiting for it")
    trainer = Trainer(tmp_path / "live")
    assert trainer.take(30) == 30
    screen.until("step 30 of 400")
    assert trainer.take(25) == 55
    screen.until("step 55 of 400")
    screen.resize(60, 16)
    trainer.take(1)
    screen.until("step 56 of 400")
    screen.until(HOME)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.output.split(HOME)[-2])  # a whole frame
    assert "step 56 of 400" in shown and len(shown.splitlines()) <= 16
    assert max(cell_len(line.rstrip()) for line in shown.splitlines()) <= 60
    trainer.finish()
    left = screen.rest()
    assert "finished" in left and "step 56 of 400" in left
    assert screen.process.returncode == 0 and len(left.splitlines()) <= 16


def test_q_ends_the_view_and_leaves_the_last_frame(trainer: Trainer, screen: Screen) -> None:
    trainer.take(25)
    screen.until("step 25 of 400")
    attributes = termios.tcgetattr(screen.parent)
    screen.press(b"q")
    left = screen.rest()
    assert "step 25 of 400" in left and "running" in left and screen.process.returncode == 0
    assert not attributes[3] & termios.ICANON, "it reads keys as they are pressed"
    assert trainer.take(1) == 26, "the training goes on"


def test_ctrl_c_ends_the_view_and_leaves_the_last_frame(trainer: Trainer, screen: Screen) -> None:
    trainer.take(25)
    screen.until("step 25 of 400")
    screen.process.send_signal(signal.SIGINT)
    left = screen.rest()
    assert "step 25 of 400" in left and "Traceback" not in screen.output and screen.process.returncode == 0


def test_the_view_ends_with_its_terminal(trainer: Trainer, screen: Screen) -> None:
    trainer.take(25)
    screen.until("step 25 of 400")
    os.close(screen.parent)
    screen.process.wait(60)


def test_a_killed_training_is_told_as_crashed(tmp_path: Path, trainer: Trainer, screen: Screen) -> None:
    trainer.take(25)
    screen.until("step 25 of 400")
    trainer.kill()
    os.utime(journal_path(tmp_path / "live", 0, 0), (time.time() - 2 * STALE_SECONDS,) * 2)  # no sign of life for long
    left = screen.rest()
    assert "crashed" in left and "no sign of life" in left and screen.process.returncode == 0


def test_the_net_of_these_tests_has_the_layers_they_look_for() -> None:
    assert "encoder.weight" in dict(Net().named_parameters())
