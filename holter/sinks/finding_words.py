"""Findings in the words that several tools are told them in; what a tool cannot show, its sink leaves out."""

from __future__ import annotations

from holter.diagnosis.finding import Finding


def key_of(finding: Finding) -> tuple[object, ...]:
    """What stays when a finding is told again because it is over. Holter's own problems differ only in their words."""
    words = finding.advice if finding.where == "monitor" else ""
    return finding.step, finding.cause, finding.severity, finding.layer, words


def title_of(finding: Finding) -> str:
    """
    >>> title_of(Finding("dead-layer", "layer", 3, 20, layer="head", until=90))
    'over: dead-layer in head'
    """
    over = "over: " if finding.until is not None else ""
    return f"{over}{finding.cause} in {finding.layer or finding.where}"


def words_of(finding: Finding) -> str:
    """
    >>> words_of(Finding("dead-layer", "layer", 3, 20, layer="head", advice="Look.", until=90))
    'warning: dead-layer in head since step 3. Look. (over: last seen at step 90)'
    """
    over = f" (over: last seen at step {finding.until})" if finding.until is not None else ""
    return f"{finding}{over}"
