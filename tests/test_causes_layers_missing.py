"""The rules of the layers see only a part of what could be recorded, and never fail over it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

import holter
from holter.diagnosis.doctor import Doctor
from holter.diagnosis.suspicion import Case, Suspicion
from holter.record import LayerRows, Record
from holter.statistics.rows import Rows
from tests.layer_trainings import RULES, Words, stack, train


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[holter.Run]:
    torch.manual_seed(0)
    paths = [tmp_path_factory.mktemp(name) / "run" for name in ("words", "stack")]
    train(paths[0], Words(layers=2), steps=50, activations=5, weights=10, updates=5)
    train(paths[1], stack(4), steps=50, activations=5, weights=10, updates=5)
    return [holter.open_run(path) for path in paths]


def holes(records: list[Record], seed: int) -> Iterator[Record]:
    """Roles, layers and whole steps are missing by chance, and numbers are not numbers."""
    chance = random.Random(seed)
    gone = {
        role for role in ("gradient", "weight", "update", "activation", "batch", "attention") if chance.random() < 0.2
    }
    for record in records:
        if chance.random() < 0.1:
            continue
        rows = {
            role: _thinned(one, chance)
            for role, one in record.rows.items()
            if role not in gone and chance.random() > 0.1
        }
        scalars = {name: value if chance.random() > 0.1 else float("nan") for name, value in record.scalars.items()}
        notes = record.notes if chance.random() < 0.7 else {}
        yield replace(record, rows=rows, scalars=scalars, notes=notes)


def _thinned(rows: LayerRows, chance: random.Random) -> LayerRows:
    kept = [place for place in range(len(rows.layers)) if chance.random() > 0.1]
    values = rows.rows.values[kept].copy()
    values[[chance.random() < 0.05 for _ in kept]] = 0
    extras = {name: one[kept].copy() for name, one in rows.extras.items() if chance.random() > 0.05}
    for one in extras.values():
        one[[chance.random() < 0.1 for _ in kept]] = np.nan
    return LayerRows(tuple(rows.layers[place] for place in kept), Rows(values), extras)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("knows_layers", [True, False])
def test_rules_do_not_fail_over_what_is_missing(runs: list[holter.Run], seed: int, knows_layers: bool) -> None:
    for run in runs:
        doctor = Doctor(run.info if knows_layers else {}, rules=RULES)
        for record in holes(run.records, seed):
            doctor.take(record)
        doctor.finish()
        failed = [finding for finding in doctor.findings if finding.cause == "monitor-degraded"]
        assert not failed, failed


def test_a_rule_that_fails_would_be_seen(runs: list[holter.Run]) -> None:
    def broken(case: Case) -> list[Suspicion]:
        raise IndexError(case.step)

    doctor = Doctor(runs[0].info, rules=(broken,))
    for record in runs[0].records:
        doctor.take(record)
    doctor.finish()
    assert [finding.cause for finding in doctor.findings] == ["monitor-degraded"]
