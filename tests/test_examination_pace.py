"""How the diagnosis takes the interpreter: a little at a time, then it rests, unless it is late or somebody waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from holter import examination
from holter.examination import Examination


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """The clock of the thread, and the breaths that it took."""
    found = SimpleNamespace(worked=0.0, breaths=[])
    fake = SimpleNamespace(thread_time=lambda: found.worked, sleep=found.breaths.append, monotonic=time.monotonic)
    monkeypatch.setattr(examination, "time", fake)
    return found


@pytest.fixture
def examined() -> Iterator[Examination]:
    one = Examination({}, 1.0, None, lambda finding: None, lambda what, error: None)
    yield one
    one.close(5.0)


def test_where_few_records_wait_it_rests_ten_times_as_long_as_it_worked(
    clock: SimpleNamespace, examined: Examination
) -> None:
    for worked in (1e-3, 6e-4, 5.0):
        clock.worked += worked
        examined._breathe()
    assert clock.breaths == pytest.approx([1e-2, 6e-3, 2e-2])  # no breath is longer than 20 ms


def test_it_draws_no_breath_for_next_to_nothing_but_adds_that_up(clock: SimpleNamespace, examined: Examination) -> None:
    """A breath takes the processor for as long as a rule does."""
    for _ in range(7):
        clock.worked += 1.5e-4
        examined._breathe()
    assert clock.breaths == pytest.approx([6e-3])


def test_where_more_wait_it_only_draws_breath(
    clock: SimpleNamespace, examined: Examination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_FEW", -1)
    clock.worked += 1e-3
    examined._breathe()
    assert clock.breaths == [5e-5]


def test_it_does_not_rest_while_somebody_waits_for_it_nor_make_up_for_that_later(
    clock: SimpleNamespace, examined: Examination
) -> None:
    examined._hurry(1)
    clock.worked += 1.0
    examined._breathe()
    assert clock.breaths == []
    examined._hurry(-1)
    clock.worked += 6e-4
    examined._breathe()
    assert clock.breaths == pytest.approx([6e-3])
