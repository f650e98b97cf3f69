"""A small part of the clinic at every test run: the accuracy of the diagnosis must not fall without anyone noticing."""

from __future__ import annotations

from pathlib import Path

import pytest

from holter.clinic.cases import all_cases
from holter.clinic.score import Outcome, Score, score
from holter.clinic.storing import store
from holter.diagnosis.causes import RULES
from holter.diagnosis.doctor import Doctor
from holter.run import open_run

# Quick ones: of the rate, the optimizer, the loop, the wiring, the data and the loss. Others need longer trainings.
SICK = (
    "lr-jump/mlp/momentum/dev-1",
    "clipping-too-tight/mlp/momentum/dev-1",
    "zero-grad-missing/tanh/sgd/dev-4",
    "graph-detached/mlp/momentum/dev-1",
    "batch-corrupt/mlp/momentum/dev-1",
    "batch-repeated/mlp/momentum/dev-1",
    "labels-corrupt/mlp/momentum/dev-1",
    "loss-sign/mlp/momentum/dev-1",
)
HEALTHY = (
    "healthy/lr-jump/mlp/momentum/dev-1",
    "control/frozen-backbone/frozen/momentum/dev-2",
    "control/tiny-batches/mlp/sgd/dev-1",
    "control/lora/lora/adamw/dev-1",
)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clinic")
    chosen = [case for case in all_cases() if case.id in (*SICK, *HEALTHY)]
    assert len(chosen) == len(SICK) + len(HEALTHY)
    for case in chosen:
        store(case, root)
    return root


def judged(root: Path, rules: int) -> Score:
    """By so many of the rules."""
    cases = [case for case in all_cases() if case.id in (*SICK, *HEALTHY)]
    outcomes = []
    for case in cases:
        run = open_run(root / case.id)
        doctor = Doctor(run.info, RULES[:rules])
        for record in run.records:
            doctor.take(record)
        doctor.finish()
        outcomes.append(Outcome(case, doctor.findings, len(run.history), None))
    return score(outcomes)


def is_good_enough(found: Score) -> bool:
    return found.recall >= 0.9 and found.top1 >= 0.8 and found.location >= 0.8 and found.false_per_thousand == 0


def test_the_diagnosis_is_as_good_as_it_was(stored: Path) -> None:
    found = judged(stored, len(RULES))
    assert is_good_enough(found), found
    assert found.onset_error <= 2 and found.silent_controls == found.controls == 3


def test_with_half_of_the_rules_it_would_be_noticed(stored: Path) -> None:
    """The planted fault of the gate above."""
    assert not is_good_enough(judged(stored, len(RULES) // 2))
