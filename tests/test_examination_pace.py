"""How the diagnosis takes the interpreter: a little at a time, then it rests, unless it is late or somebody waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from holter import examination
from holter.examination import Examination
from holter.record import Record


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


def test_an_empty_purse_saves_longer_where_many_records_wait(
    clock: SimpleNamespace, examined: Examination, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each first record after a rest costs several times as much as the next: many small rests would never catch up."""
    clock.worked = 2 * examination.ADVANCE_SECONDS + examined.elapsed
    few = examined._take((Record(0, 0.0, {}), False))
    monkeypatch.setattr(examination, "_LATE", -1)
    many = examined._take((Record(0, 0.0, {}), False))
    assert few is not None and many is not None and 0 < few < many


def test_a_full_purse_pays_at_once(clock: SimpleNamespace, examined: Examination) -> None:
    assert examined._take((Record(0, 0.0, {}), False)) is None


def test_what_is_not_finite_is_not_kept_waiting_by_an_empty_purse(
    clock: SimpleNamespace, examined: Examination
) -> None:
    clock.worked = 2 * examination.ADVANCE_SECONDS + examined.elapsed
    assert examined._take((Record(0, 0.0, {"loss": 1.0}), False))
    examined._urgent = 1  # as `post` says of a loss that is lost
    assert examined._take((Record(0, 0.0, {"loss": 1.0}), False)) is None
    assert examined._take((Record(1, 0.0, {"loss": float("nan")}), False)) is None
    assert examined._take((Record(2, 0.0, {"loss": float("nan")}), False)) is None, "which ends the step before"
    clock.worked += 10 * examined.elapsed + 1
    assert examined._take((Record(3, 0.0, {"loss": float("nan")}), False)), "and then it saves again"


def test_a_loss_that_is_lost_is_urgent_once(examined: Examination) -> None:
    for step, loss in enumerate((1.0, float("nan"), float("nan"))):
        examined.post(Record(step, 0.0, {"loss": loss}))
        if step == 1:
            assert examined._urgent == 1 or examined._last_step == 2
    examined.catch_up(5.0)
    assert examined._urgent is None


def test_a_training_that_goes_back_before_what_was_lost_hurries_no_more(
    clock: SimpleNamespace, examined: Examination
) -> None:
    examined._urgent = 9
    for step in (9, 4):
        assert examined._take((Record(step, 0.0, {"loss": 1.0}), False)) is None
    assert examined._urgent is None
