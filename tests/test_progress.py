"""The quiet bar of `monitor.batches(loader, progress=True)`, in a real terminal, in none, and in one that fails."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import holter
from holter import progress
from holter.progress import Progress, Terminal, bar_line, progress_of
from holter.words import number
from tests.models import differences, make, mlp

_END = "<end>"
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Pseudo:
    """A real terminal that stands behind a text stream."""

    def __init__(self, columns: int = 80) -> None:
        self.parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.stream = os.fdopen(child, "w", encoding="utf-8")

    def shown(self) -> str:
        """All that was written since the last time: a terminal hands it on when it likes, but in its order."""
        self.stream.write(_END)
        self.stream.flush()
        found = b""
        while not found.endswith(_END.encode()):
            found += os.read(self.parent, 1 << 16)
        return found.decode().removesuffix(_END)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pseudo]:
    found = Pseudo()
    # Not sys.stderr itself: pytest puts its own there before a test is called.
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found.stream))
    yield found
    found.stream.close()
    os.close(found.parent)


@pytest.fixture(autouse=True)
def first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process in which nothing was drawn yet."""
    monkeypatch.setattr(progress, "_pace", progress._Pace())


@pytest.fixture
def always_due(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is drawn, so that nothing depends on how long a step takes."""
    monkeypatch.setattr(progress, "_PACE_SECONDS", 0.0)


def train(loader: Any, *, shown: bool = True, run: Path | bool = False) -> holter.Monitor:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with holter.watch(model, optimizer, run=run) as monitor:
        for x in monitor.batches(loader, progress=shown):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
    return monitor


def data(count: int = 20) -> list[torch.Tensor]:
    return [torch.randn(4, 12) for _ in range(count)]


@pytest.mark.usefixtures("always_due")
def test_one_line_says_how_far_it_is_and_ends_with_the_pass(terminal: Pseudo) -> None:
    """Issue 7, 3: batches, pace and time left where the loader knows its length."""
    train(data(20))
    text = terminal.shown()
    frames = CONTROL.sub("", text).split("\r")
    assert any(re.search(r"batch 10/20 ━+─+  50 %  [\d.e+]+/s  .*left", frame) for frame in frames)
    assert re.fullmatch(r"batch 20/20 ━+ 100 %  .*in .* m?s", frames[-2]), frames[-2:]
    assert text.endswith("\n") and text.count("\n") == 1


@pytest.mark.usefixtures("always_due")
def test_a_loader_without_a_length_is_counted(terminal: Pseudo) -> None:
    train(x for x in data(7))
    text = CONTROL.sub("", terminal.shown())
    assert "batch 3  " in text and "left" not in text and "batch 7  " in text.split("\r")[-2]


@pytest.mark.usefixtures("always_due")
def test_it_is_off_unless_asked_for(terminal: Pseudo) -> None:
    train(data(5), shown=False)
    assert terminal.shown() == ""


def test_a_short_pass_leaves_no_line(terminal: Pseudo, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PACE_SECONDS", 1e6)
    train(data(5))
    assert terminal.shown() == ""


def test_epochs_that_take_a_moment_show_a_line_now_and_then(terminal: Pseudo, monkeypatch: pytest.MonkeyPatch) -> None:
    """70 ms each, by a clock that goes 10 ms a batch: none of them alone is ever due."""
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    for _ in range(60):
        bar = progress_of(range(7), dict, lambda *told: pytest.fail(str(told)))
        assert bar is not None
        for _ in range(7):
            bar.passed()
            now[0] += 0.01
        bar.end()
    lines = CONTROL.sub("", terminal.shown()).split("\n")[:-1]
    assert len(lines) == 4  # in 4.2 seconds: one after a moment, then one a second
    assert all(re.search(r"\rbatch 7/7 ━+ 100 %  100/s  in 70 ms\r?$", line) for line in lines), lines


@pytest.mark.usefixtures("always_due")
def test_nothing_is_written_where_stderr_is_no_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    train(data(5))
    out, err = capfd.readouterr()
    assert out == err == ""


@pytest.mark.usefixtures("always_due")
def test_nothing_is_written_in_a_notebook(terminal: Pseudo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose stderr is no terminal, though the file behind it is that of the server."""
    stream = SimpleNamespace(isatty=lambda: False, fileno=terminal.stream.fileno, encoding="utf-8")
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stream))
    train(data(5))
    assert terminal.shown() == ""


@pytest.mark.usefixtures("always_due")
@pytest.mark.parametrize("kind", ["closed", "none"])
def test_a_program_without_stderr_trains_on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1"""
    with open(os.devnull, "w") as closed:
        pass
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=closed if kind == "closed" else None))
    assert train(data(5)).step == 5


@pytest.mark.usefixtures("always_due")
def test_the_loss_is_the_newest_that_is_known(terminal: Pseudo) -> None:
    known = {"loss": 2.3456}
    bar = progress_of([0] * 4, lambda: known, lambda *_: None)
    assert bar is not None
    bar.passed()
    assert "loss 2.35" in terminal.shown()
    known = {"loss": float("nan")}
    bar.passed()
    assert "loss nan" in terminal.shown()
    bar.end()


def test_of_what_is_logged_only_the_loss_is_kept_for_the_bar(tmp_path: Path) -> None:
    """A record has dozens of scalars, and there is one at every step."""
    training = make("mlp")
    model, optimizer = training.model, training.optimizer
    with holter.watch(model, optimizer, run=tmp_path / "run") as monitor:
        for value in (3.0, 2.0):
            optimizer.step()
            monitor.log(loss=value, accuracy=0.5)
    assert dict(monitor._writer.newest) == {"loss": 2.0}


@pytest.mark.usefixtures("always_due")
def test_a_failure_ends_the_bar_and_is_told(terminal: Pseudo) -> None:
    """P1"""
    failures: list[tuple[str, BaseException]] = []

    def broken() -> dict[str, float]:
        raise RuntimeError("no scalars")

    bar = Progress(Terminal(terminal.stream), 4, broken, lambda *told: failures.append(told))
    for _ in range(3):
        bar.passed()
    bar.end()
    assert [(what, str(error)) for what, error in failures] == [("show the progress", "no scalars")]
    assert terminal.shown() == ""


@pytest.mark.usefixtures("always_due")
def test_a_terminal_that_nobody_reads_never_holds_the_training_up(terminal: Pseudo) -> None:
    """P1: far more is drawn than a terminal holds; a write that waited would hang here."""
    bar = progress_of(range(10_000), dict, lambda *told: pytest.fail(str(told)))
    assert bar is not None
    for _ in range(10_000):
        bar.passed()
    bar.end()
    with pytest.raises(BlockingIOError):  # it is full indeed
        os.set_blocking(terminal.stream.fileno(), False)
        os.write(terminal.stream.fileno(), b"x" * (1 << 20))
        os.write(terminal.stream.fileno(), b"x" * (1 << 20))


@pytest.mark.usefixtures("always_due")
def test_a_terminal_that_goes_away_ends_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: the window of the training is closed."""
    failures: list[str] = []
    pseudo = Pseudo()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=pseudo.stream))
    bar = progress_of([0] * 9, dict, lambda what, error: failures.append(what))
    assert bar is not None
    bar.passed()
    os.close(pseudo.parent)
    for _ in range(5):
        bar.passed()
    bar.end()
    pseudo.stream.close()
    assert failures == ["show the progress"]


@pytest.mark.usefixtures("always_due")
def test_a_break_ends_the_line_and_exceptions_pass(terminal: Pseudo) -> None:
    monitor = holter.watch(model := mlp(), torch.optim.SGD(model.parameters(), 0.01), run=False)
    for place, _ in enumerate(monitor.batches(data(9), progress=True)):
        if place == 4:
            break
    assert terminal.shown().endswith("\n")
    with pytest.raises(KeyError):
        for _ in monitor.batches(data(9), progress=True):
            raise KeyError
    monitor.close()


@pytest.mark.usefixtures("always_due")
def test_the_training_is_the_same_with_the_bar(terminal: Pseudo) -> None:
    """P1: bit by bit, losses and weights."""
    trained = []
    for shown in (False, True):
        training = make("mlp")
        monitor = holter.watch(training.model, training.optimizer, run=False)
        training.monitor = monitor
        for _ in monitor.batches(range(6), progress=shown):
            training.step()
        monitor.close()
        trained.append(training)
    assert "batch 6/6" in terminal.shown() and not differences(*trained)


@pytest.mark.parametrize("columns", [200, 80, 40, 12, 1, 0])
@pytest.mark.parametrize("total", [None, 0, 3, 10**9])
def test_a_line_fits_any_width(columns: int, total: int | None) -> None:
    for done in (0, 3, 10**9):
        for seconds in (0.0, 1e-9, 12.5, 1e9):
            for loss in (None, float("nan"), float("inf"), -1e300):
                line = bar_line(done, total, seconds, loss, columns)
                assert len(line) <= columns and line.isprintable()


@pytest.mark.usefixtures("always_due")
def test_only_the_first_process_of_several_shows_a_bar(terminal: Pseudo) -> None:
    monitor = holter.watch(model := mlp(), torch.optim.SGD(model.parameters(), 0.01), run=False)
    for rank in (1, 0):
        monitor._rank = rank
        assert len(list(monitor.batches(data(3), progress=True))) == 3
        assert ("batch 3/3" in terminal.shown()) == (rank == 0)
    monitor.close()


@pytest.mark.usefixtures("always_due")
def test_the_loss_of_a_training_is_shown_once_it_is_read(terminal: Pseudo) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with holter.watch(model, optimizer, run=False) as monitor:
        for x in monitor.batches(data(3), progress=True):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)
            assert monitor.flush()
    assert f"loss {number(float(loss.detach()))}" in terminal.shown().split("\r")[-2]


def test_a_stream_that_only_looks_like_a_terminal_is_no_trouble(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1"""

    class Pretender:
        def isatty(self) -> bool:
            return True

        def fileno(self) -> int:
            raise RuntimeError("there is no file behind this stream")

    monkeypatch.setattr("sys.stderr", Pretender())
    assert progress_of([1, 2], dict, lambda *_: None) is None
