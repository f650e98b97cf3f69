"""The words of a comparison: names of causes and numbers as anybody reads them, and each thing told once."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holter.comparison.comparing import Comparison, compare
from holter.comparison.measures import Measures
from holter.comparison.series import Level
from holter.comparison.verdict import Judged, changes_of, level, regressions_of, verdict_of
from holter.comparison.view import comparison_json, comparison_view
from holter.comparison.words import Row, change, evidence_sentences, parting_sentences
from holter.diagnosis.finding import Finding
from holter.diagnosis.titles import title_of
from holter.journal import Journal
from holter.record import Ending, LayerRows, Record
from holter.run import journal_path, write_info
from holter.statistics.rows import COLUMNS, Rows
from tests.test_comparison import text_of

LAYERS = ("first.weight", "last.weight")
STEPS, BROKEN = 40, 25
CAUSES = ("lr-jump", "unknown", "clipping-missing", "dead-relu", "lr-too-high")


def made(
    path: Path, *, broken: tuple[str, ...] = (), times: float = 1.0, role: str = "gradient", data: int = 0
) -> Path:
    """A run of which some layers are NaN from a step on, all of them, and whose losses are so many times as high."""
    path.mkdir()
    write_info(path, {"created": 0.0, "layers": [{"name": name, "shape": [4, 4]} for name in LAYERS]})
    journal = Journal(journal_path(path, 0, 0))
    for step in range(STEPS):
        values = np.zeros((2, len(COLUMNS)))
        values[:, COLUMNS.index("count")], values[:, COLUMNS.index("sum_squares")] = 16, 4.0 + 0.01 * (step % 3)
        for place in (LAYERS.index(name) for name in broken if step >= BROKEN):
            values[place, COLUMNS.index("sum_squares")], values[place, COLUMNS.index("nans")] = 0.0, 16
        rows = {role: LayerRows(LAYERS, Rows(values))}
        hashed = Rows(np.ones((1, len(COLUMNS))))
        rows["batch"] = LayerRows(("inputs",), hashed, {"hash": np.array([float(step + data)])})
        journal.append(Record(step, float(step), {"loss": times * 2.0 / (1 + 0.01 * step)}, rows))
    journal.append(Ending(0.0, "finished"))
    journal.close()
    return path


def told(comparison: Comparison) -> str:
    """All that a person reads: in the terminal, and the sentences of a page."""
    view = comparison_view(comparison)
    said = [[*pair["parting"], *pair["evidence"], pair["verdict"]["sentence"]] for pair in view["pairs"]]
    return " ".join([text_of(comparison, width=200), json.dumps(view["table"]), *chain(*said)])


# Causes -----------------------------------------------------------------------------------------------------------


def sentences(before: list[Finding], after: list[Finding], outcome: str) -> list[str]:
    judged = Judged("last loss", Level(1.0, 0.1, 20), Level(1.0, 0.1, 20), outcome, 99)
    nothing = Measures(*(None,) * 13)
    changes = changes_of(before, after)
    found = regressions_of(changes, judged, ("finished", "finished"), (nothing, nothing))
    return [verdict_of(changes, judged, found, False).sentence, *found]


@pytest.mark.parametrize("cause", CAUSES)
def test_sentences_call_causes_by_their_titles(cause: str) -> None:
    sick, worse = (Finding(cause, "layer", 5, 5, severity, "h.0") for severity in ("warning", "critical"))
    other = Finding("graph-detached", "layer", 5, 5, "warning")
    for before, after in (([], [sick]), ([sick], []), ([sick], [sick]), ([sick], [worse]), ([sick], [other])):
        for outcome in ("better", "worse", "same"):
            said = " ".join(sentences(before, after, outcome))
            assert f"“{title_of(cause)}” in h.0" in said
            assert cause not in said.replace(title_of(cause), "") and " came" not in said
    assert sentences([], [sick, other], "worse")[0].startswith(
        f"Worse: “{title_of(cause)}” in h.0, “cut off from the loss” are new; "
    )


def test_the_terminal_and_the_table_call_causes_by_their_titles_and_json_by_their_ids(tmp_path: Path) -> None:
    known = compare(made(tmp_path / "a"), made(tmp_path / "b"))
    sick = Finding("lr-jump", "lr", 5, 5, "critical")
    changed = replace(known.pairs[0], changes=changes_of([], [sick]))
    comparison = replace(known, sides=(known.sides[0], replace(known.sides[1], findings=(sick,))), pairs=(changed,))
    text = told(comparison)
    assert text.count("jump of the learning rate") == 3 and "lr-jump" not in text
    found = comparison_json(comparison)
    assert [one["cause"] for one in found["pairs"][0]["changes"]["came"]] == ["lr-jump"]


# What is not finite -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ["gradient", "update", "momentum", "weight"])
def test_the_norm_of_a_layer_that_is_not_finite_is_said_to_be_not_finite(tmp_path: Path, role: str) -> None:
    """The record holds the norm of the finite values, of which there are none: 0 would look like a dead layer."""
    runs = made(tmp_path / "well", role=role), made(tmp_path / "nan", broken=LAYERS[1:], role=role)
    pair = compare(*runs).pairs[0]
    layer = pair.partings.layer_difference
    assert layer is not None and (layer.step, layer.layer, layer.reference) == (BROKEN, LAYERS[1], 2.0024984394500787)
    said = parting_sentences(pair.partings, "step")
    assert any(f"{role} norm of {LAYERS[1]} 2 → not finite." in sentence for sentence in said), said
    assert not re.search(r"\b(nan|inf)\b|→ 0\b", " ".join(said))
    back = parting_sentences(compare(*reversed(runs)).pairs[0].partings, "step")
    assert any(f"{LAYERS[1]} not finite → 2." in sentence for sentence in back), back
    assert json.dumps(comparison_json(compare(*runs)), allow_nan=False)


def test_the_map_is_blank_where_a_norm_is_not_finite(tmp_path: Path) -> None:
    ratios = compare(made(tmp_path / "well"), made(tmp_path / "nan", broken=LAYERS[1:])).pairs[0].ratios
    assert ratios is not None
    assert np.isnan(ratios.values).tolist() == [[False] * STEPS, [step >= BROKEN for step in range(STEPS)]]


def test_two_runs_that_break_alike_do_not_differ(tmp_path: Path) -> None:
    both = made(tmp_path / "one", broken=LAYERS), made(tmp_path / "two", broken=LAYERS)
    assert compare(*both).pairs[0].partings.difference is None


def test_a_loss_that_is_not_finite_is_said_in_words_and_once(tmp_path: Path) -> None:
    """Its NaN is not equal to itself: the same parting is not told a second time for that."""
    comparison = compare(made(tmp_path / "well"), made(tmp_path / "ill", times=float("nan"), broken=LAYERS))
    text = told(comparison)
    assert "loss 2 → not finite" in text and not re.search(r"\b(nan|inf)\b", text)
    said = parting_sentences(comparison.pairs[0].partings, "step")
    assert sum("loss 2 → not finite" in sentence for sentence in said) == 1, said


# Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("was", "now", "expected"),
    [(3.03, 1981.0, "654×"), (2.38, 165.0, "69×"), (1981.0, 3.03, "0.0015×"), (2.0, 1.5, "−25 %"), (2.0, 2.0, "")],
)
def test_changes_are_told_without_exponents(was: float, now: float, expected: str) -> None:
    assert change(Row("largest gradient norm", ("", ""), (was, now))) == expected


def test_a_large_error_is_told_without_an_exponent() -> None:
    assert level(Level(165.2, 171.3, 20)) == "165 ± 170" and level(Level(2.38, 0.0584, 20)) == "2.38 ± 0.058"


def test_how_much_a_loss_changed_is_told_in_one_way(tmp_path: Path) -> None:
    """As a multiple in the table; over a few steps more it would be another number, and in percent a third."""
    comparison = compare(made(tmp_path / "low"), made(tmp_path / "high", times=68.7))
    text = told(comparison)
    assert "69×" in text and not re.search(r"[\d,]{4,} %|higher|lower", text)
    [losses] = [one for one in evidence_sentences(comparison.pairs[0]) if one.startswith("Losses")]
    numbers = [float(one) for one in re.findall(r"mean (\S+) → (\S+),", losses)[0]]
    expected: Any = np.mean([2.0 / (1 + 0.01 * step) for step in range(STEPS)])
    assert numbers == pytest.approx([expected, 68.7 * expected], rel=0.005)


def test_of_the_same_run_everything_is_the_same(tmp_path: Path) -> None:
    path = made(tmp_path / "run")
    text = told(compare(path, path))
    assert "Losses of the last steps: mean the same (1.69), slope a step the same (" in text
    assert "→" not in text.replace("run (1) → run (2)", "") and "0 %" not in text


# Plain words ------------------------------------------------------------------------------------------------------


def test_other_batches_are_told_in_plain_words(tmp_path: Path) -> None:
    comparison = compare(made(tmp_path / "a"), made(tmp_path / "b", data=7))
    text = told(comparison)
    assert "the first difference is at step 0: the two were given different batches." in text
    assert "different at 40 of 40 steps" in text and "others" not in text


def test_where_it_matters_is_told_in_plain_words(tmp_path: Path) -> None:
    first = compare(made(tmp_path / "a"), made(tmp_path / "b", times=3.0)).pairs[0]
    later = compare(tmp_path / "a", made(tmp_path / "c", times=1.000001, broken=LAYERS)).pairs[0]
    close = compare(tmp_path / "a", made(tmp_path / "d", times=1.000001)).pairs[0]
    much = "much more than such values change from one step to the next"
    assert parting_sentences(first.partings, "step")[-1] == f"From there on they are clearly apart, by {much}."
    assert f"From step {BROKEN} on they are clearly apart, by {much}: " in parting_sentences(later.partings, "step")[-1]
    assert parting_sentences(close.partings, "step")[-1] == f"They stay close: nothing differs for long by {much}."
