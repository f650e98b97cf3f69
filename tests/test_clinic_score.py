"""The score of a diagnosis, on findings made by hand whose figures are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from holter.clinic.accuracy import as_markdown, document, sheets
from holter.clinic.case import CAUSES, Case, Recipe
from holter.clinic.rivals import RIVALS
from holter.clinic.score import (
    EARLY,
    Outcome,
    answer,
    confusion,
    is_placed,
    left_band,
    onset_error,
    same_place,
    score,
)
from holter.clinic.training import Hooks
from holter.diagnosis.finding import Finding
from holter.history import History
from holter.record import Record

RECIPE = Recipe("mlp", "momentum", seed=0, steps=200)


def sick(cause: str, onset: int = 100, **more: object) -> Case:
    return Case(f"{cause}/mlp/momentum/dev-1", "sick", RECIPE, Hooks, "development", cause=cause, where=CAUSES[cause],
                onset=onset, shows=more.pop("shows", onset), **more)  # type: ignore[arg-type]  # fmt: skip


def healthy(name: str = "healthy/lr-jump/mlp/momentum/dev-1") -> Case:
    kind = "control" if name.startswith("control") else "twin"
    return Case(name, kind, RECIPE, Hooks, "development")  # type: ignore[arg-type]


def finding(cause: str, since: int = 100, step: int | None = None, **more: object) -> Finding:
    where = CAUSES.get(cause, "optimizer")
    return Finding(cause, where, since=since, step=since if step is None else step, **more)  # type: ignore[arg-type]


def of(case: Case, *findings: Finding, left: int | None = None) -> Outcome:
    return Outcome(case, findings, steps=200, left_band=left)


def test_a_perfect_diagnosis_is_perfect() -> None:
    found = score([of(sick("lr-jump", shows_at_once=True), finding("lr-jump", 100, 102)), of(healthy())])
    assert (found.recall, found.precision, found.top1, found.top3, found.location) == (1, 1, 1, 1, 1)
    assert (found.onset_error, found.delay, found.false_per_thousand) == (0, 2, 0)


def test_a_silent_diagnosis_finds_nothing_and_errs_in_nothing() -> None:
    found = score([of(sick("lr-jump")), of(healthy())])
    assert found.recall == found.top1 == found.top3 == found.false_per_thousand == 0
    assert math.isnan(found.precision) and math.isnan(found.onset_error)


def test_figures_of_several_runs() -> None:
    """Four sick: right, right by its alternative, wrong, silent. Two healthy of 200 steps: one incident, one note."""
    outcomes = [
        of(sick("lr-jump", shows_at_once=True), finding("lr-jump", 101, 104)),
        of(sick("batch-corrupt", shows_at_once=True), finding("lr-jump", 100, 110, alternatives=("batch-corrupt",))),
        of(sick("nan-in-data"), finding("zero-grad-missing", 103)),
        of(sick("dead-relu")),
        of(healthy(), finding("lr-too-low", 50)),
        of(healthy("control/lora/lora/adam/dev-1"), finding("lr-too-low", 50, severity="info")),
    ]
    found = score(outcomes)
    assert found.recall == 0.75
    assert (found.top1, found.top3) == (0.25, 0.5)
    assert found.precision == 0.75  # of four incidents the one in a healthy run is wrong
    assert found.location == pytest.approx(1 / 4)  # only the first names the place; what is missed has none
    assert found.onset_error == 1
    assert found.delay == 7  # of 4 and 10
    assert found.false_per_thousand == 1000 / 400
    assert (found.silent_controls, found.controls) == (1, 1)


def test_what_was_told_before_the_fault_is_no_answer_but_a_false_incident() -> None:
    early = of(sick("lr-jump"), finding("lr-jump", 100 - EARLY - 1))
    assert answer(early) is None
    assert (score([early]).recall, score([early]).precision) == (0, 0)
    assert answer(of(sick("lr-jump"), finding("lr-jump", 100 - EARLY))) is not None


def test_a_second_incident_must_name_the_fault() -> None:
    """One fault is one incident: what else is told of it counts against the precision."""
    right = of(sick("lr-jump"), finding("lr-jump"), finding("lr-jump", 120), finding("dead-relu", 140))
    assert score([right]).precision == pytest.approx(2 / 3)


def test_notes_and_what_holter_says_of_itself_are_no_incidents() -> None:
    degraded = Finding("monitor-degraded", "monitor", since=10, step=10)
    found = score([of(healthy(), degraded, finding("lr-jump", severity="info"))])
    assert found.false_per_thousand == 0


def test_look_alikes_count_as_right() -> None:
    outcome = of(sick("init-too-small", also_right=("vanishing-gradient",)), finding("vanishing-gradient"))
    assert score([outcome]).top1 == 1
    assert confusion([outcome]) == {("init-too-small", "init-too-small"): 1}


def test_confusion_tells_what_was_taken_for_what() -> None:
    outcomes = [of(sick("lr-jump"), finding("batch-corrupt")), of(sick("lr-jump")), of(healthy(), finding("lr-jump"))]
    assert confusion(outcomes) == {("lr-jump", "batch-corrupt"): 1, ("lr-jump", "nothing"): 1}


@pytest.mark.parametrize(
    ("found", "true", "same"),
    [
        ("layers.1", "layers.1", True),
        ("layers.1.weight", "layers.1", True),
        ("layers.1", "layers.1.weight", True),
        ("layers.10", "layers.1", False),
        ("layers", "layers.1.weight", False),
        (None, "layers.1", False),
    ],
)
def test_places(found: str | None, true: str, same: bool) -> None:
    assert same_place(found, true) is same


def test_a_layer_must_be_named_where_the_fault_has_one() -> None:
    case = sick("dead-relu", layer=("layers.1", "activations.1"))
    assert is_placed(case, finding("dead-relu", layer="activations.1"))
    assert not is_placed(case, finding("dead-relu", layer="layers.3"))
    assert not is_placed(case, finding("dead-relu"))
    assert not is_placed(case, finding("lr-jump", layer="layers.1"))


def test_an_onset_may_lie_anywhere_up_to_where_the_fault_shows() -> None:
    case = sick("scheduler-stepped-too-often", onset=0, shows=70)
    assert [onset_error(case, finding("lr-jump", since)) for since in (0, 40, 70, 75)] == [0, 0, 0, 5]


def test_the_lead_is_counted_to_where_the_loss_leaves_or_the_run_ends() -> None:
    slow = sick("residual-growth", slow=True)
    assert score([of(slow, finding("residual-growth", 100, 130), left=170)]).lead == 40
    assert score([of(slow, finding("residual-growth", 100, 130))]).lead == 70
    assert score([of(slow, left=170)]).lead == 0


def test_a_loss_leaves_its_band_where_it_stays_above_its_twin() -> None:
    random = np.random.default_rng(0)
    twin = 1 + 0.05 * random.standard_normal(300)
    worse = twin + np.maximum(0, np.arange(300) - 150) * 0.01
    left = left_band(worse.tolist(), twin.tolist(), onset=100)
    assert left is not None and 150 < left < 180
    assert left_band(twin.tolist(), twin.tolist(), onset=100) is None
    spiked = twin.copy()
    spiked[200] = 50.0  # a single step is no leaving
    assert left_band(spiked.tolist(), twin.tolist(), onset=100) is None
    gone = twin.copy()
    gone[180:] = np.nan
    assert left_band(gone.tolist(), twin.tolist(), onset=100) is not None


def test_the_document_tells_every_judge_and_every_confusion() -> None:
    ours = [of(sick("lr-jump"), finding("lr-jump")), of(sick("dead-relu"), finding("lr-jump")), of(healthy())]
    text = document({"Holter": ours, "ZClip": [of(one.case) for one in ours]}, "held-out")
    assert "| Holter | 100 % |" in text and "| ZClip | 0 % |" in text
    assert "| dead-relu | lr-jump | 1 |" in text
    assert "Incidents in healthy runs\n\nNone." in text
    assert all(as_markdown(sheet) for sheet in sheets({"Holter": ours}))


# Rivals -----------------------------------------------------------------------------------------------------------


def history(norms: list[float], rate: float = 1e-3, losses: list[float] | None = None) -> History:
    values = losses or [2.0 - 0.005 * i for i in range(len(norms))]
    return History(
        Record(step=i, time=float(i), scalars={"loss": loss, "gradient_norm": norm, "learning_rate": rate})
        for i, (norm, loss) in enumerate(zip(norms, values, strict=True))
    )


def calm(length: int = 120) -> list[float]:
    return (1 + 0.05 * np.random.default_rng(1).standard_normal(length)).tolist()


@pytest.mark.parametrize("rival", ["7-sigma norm", "ZClip"])
def test_rules_of_the_norm_see_a_spike_and_the_step_of_it(rival: str) -> None:
    spiked = calm()
    spiked[80] = 30.0
    assert 80 in [found.since for found in RIVALS[rival](history(spiked))]


def test_seven_sigma_is_silent_without_a_spike() -> None:
    assert RIVALS["7-sigma norm"](history(calm())) == ()


def test_umlaut_judges_rates_by_their_size_alone() -> None:
    assert RIVALS["UMLAUT"](history(calm())) == ()
    found = RIVALS["UMLAUT"](history(calm(), rate=0.05))
    assert [(one.cause, one.since) for one in found] == [("lr-too-high", 0)]


@pytest.mark.parametrize("rival", ["AutoTrainer", "SageMaker Debugger", "UMLAUT", "absolute thresholds"])
def test_a_loss_that_is_not_a_number_is_seen_by_most(rival: str) -> None:
    lost = [2.0 - 0.005 * i for i in range(60)] + [math.nan] * 60
    assert 60 in [found.since for found in RIVALS[rival](history(calm(), losses=lost))]


@pytest.mark.parametrize("rival", RIVALS)
def test_every_rival_bears_an_empty_history(rival: str) -> None:
    assert RIVALS[rival](History()) == ()
