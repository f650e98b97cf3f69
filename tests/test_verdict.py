"""A run in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from holter.clinic.case import CAUSES
from holter.diagnosis.finding import Finding
from holter.diagnosis.titles import heading_of, title_of
from holter.report.verdict import first_sentence, ranked, verdict_of


def _finding(cause: str = "dead-relu", **more: object) -> Finding:
    known: dict[str, object] = {"where": "layer", "layer": "h.0", "since": 122, "step": 130, "severity": "warning"}
    return Finding(cause=cause, advice="Lower the rate to 1e-3. Then look again.", **{**known, **more})  # type: ignore[arg-type]


def test_a_sick_run_says_what_since_when_and_what_to_change() -> None:
    found = verdict_of([_finding()], "finished", 500)
    assert found.sentence == "Dead ReLU in h.0 since step 122. Lower the rate to 1e-3."
    assert (found.state, found.severity) == ("sick", "warning")


def test_the_most_severe_finding_leads_and_the_others_are_counted() -> None:
    worse = _finding("nan-in-data", where="data", layer=None, severity="critical", since=200)
    found = verdict_of([_finding(), worse, _finding("overfitting", where="data", layer=None)], "finished", 500)
    assert found.sentence.startswith("NaN in the data since step 200.")
    assert found.sentence.endswith("2 more findings.") and found.severity == "critical"


def test_of_equals_the_one_that_goes_on_leads_and_then_the_first() -> None:
    over, late, early = _finding(until=150, since=1), _finding(since=300), _finding(since=200)
    assert ranked([over, late, early]) == [early, late, over]


@pytest.mark.parametrize(
    ("state", "steps", "expected"),
    [
        ("running", 5, "unknown"),
        ("finished", 0, "unknown"),
        ("finished", 500, "healthy"),
        ("running", 500, "healthy"),
        ("failed", 500, "unknown"),
        ("crashed", 500, "unknown"),
    ],
)
def test_silence_is_health_only_where_enough_was_seen_and_it_ended_well(state: str, steps: int, expected: str) -> None:
    found = verdict_of([], state, steps)
    assert found.state == expected and found.severity is None
    assert ("no sign of life" in found.sentence) == (state == "crashed")


def test_what_failed_of_holter_is_no_illness_but_is_told() -> None:
    hindered = _finding("monitor-degraded", where="monitor", layer=None)
    found = verdict_of([hindered], "finished", 500)
    assert found.state == "healthy" and "hindered" in found.sentence
    assert verdict_of([hindered, _finding()], "finished", 500).state == "sick"


def test_a_finding_that_is_only_info_is_no_illness() -> None:
    assert verdict_of([_finding(severity="info")], "finished", 500).state == "healthy"


def test_an_advice_without_end_is_cut_at_a_word() -> None:
    cut = first_sentence("word " * 100)
    assert len(cut) <= 240 and cut.endswith("word …")
    assert first_sentence("") == "" and first_sentence("Use 0.5 of it. Then") == "Use 0.5 of it."


def test_every_cause_has_words_without_hyphens_of_its_id() -> None:
    for cause in CAUSES:
        assert not title_of(cause).startswith("lr") and heading_of(cause)[0] == heading_of(cause)[0].upper()
    assert len({title_of(cause) for cause in CAUSES}) == len(CAUSES)


def test_no_file_of_the_page_is_missing_from_the_report() -> None:
    from holter.report.document import PAGE, SCRIPTS, STYLE

    assert {path.name for path in Path(PAGE).iterdir()} == {"shell.html", STYLE.name, *SCRIPTS}
