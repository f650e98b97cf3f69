"""A comparison as plain JSON: for scripts, and for the page that draws it. What is not finite is null."""

from __future__ import annotations

from typing import Any

from holter.comparison.comparing import CURVES, Comparison, Curve, Pair, RatioMap, Side
from holter.comparison.series import thin
from holter.comparison.words import change, evidence_sentences, judged_until, parting_sentences, table_rows
from holter.diagnosis.finding import Finding
from holter.diagnosis.titles import title_of
from holter.report.drawing import matrix
from holter.summary import as_json

_POINTS = 600  # of a curve: more than a screen can tell apart
_LOG_CURVES = ("loss", "gradient_norm")


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Everything but the curves, for scripts."""
    found: dict[str, Any] = as_json(comparison)
    for side in found["sides"]:
        del side["curves"]
    for pair in found["pairs"]:
        del pair["ratios"]
    return {"regressed": comparison.regressed, **found}


def comparison_view(comparison: Comparison) -> dict[str, Any]:
    """Everything that a page shows: sentences, tables, aligned curves, and maps of layers by steps."""
    rows = table_rows(comparison)
    return {
        "by": comparison.by,
        "level": as_json(comparison.level),
        "regressed": comparison.regressed,
        "runs": [_run(side) for side in comparison.sides],
        "table": [
            {"name": row.name, "texts": list(row.texts), "numbers": as_json(row.numbers), "change": change(row)}
            for row in rows
        ],
        "pairs": [_pair(pair, comparison) for pair in comparison.pairs],
        "curves": [_curves(comparison, name) for name in CURVES if _has(comparison, name)],
    }


def _run(side: Side) -> dict[str, Any]:
    return {
        "name": side.name,
        "state": side.state,
        "steps": side.steps,
        "notes": list(side.notes),
        "findings": [_finding(one) for one in side.findings],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {**as_json(finding), "title": title_of(finding.cause)}


def _pair(pair: Pair, comparison: Comparison) -> dict[str, Any]:
    return {
        "name": pair.name,
        "reference": comparison.sides[0].name,
        "verdict": as_json(pair.verdict),
        "judged": as_json(pair.judged),
        "parting": [*parting_sentences(pair.partings, comparison.by), *filter(None, [judged_until(pair, comparison)])],
        "partings": as_json(pair.partings),
        "setup": as_json(pair.setup),
        "went": [_finding(one) for one in pair.changes.went],
        "came": [_finding(one) for one in pair.changes.came],
        "stayed": [{"was": _finding(was), "now": _finding(now)} for was, now in pair.changes.stayed],
        "evidence": list(evidence_sentences(pair)),
        "map": _map(pair.ratios) if pair.ratios is not None else None,
    }


def _has(comparison: Comparison, name: str) -> bool:
    return any(name in side.curves for side in comparison.sides)


def _curves(comparison: Comparison, name: str) -> dict[str, Any]:
    runs = [{"name": side.name, **_curve(side.curves[name])} for side in comparison.sides if name in side.curves]
    return {"name": name, "title": name.replace("_", " "), "log": _is_log(comparison, name), "runs": runs}


def _is_log(comparison: Comparison, name: str) -> bool:
    """Where nothing is negative: an axis of logarithms would leave it out."""
    curves = [side.curves[name].values for side in comparison.sides if name in side.curves]
    return name in _LOG_CURVES and not any((values <= 0).any() for values in curves)


def _curve(curve: Curve) -> dict[str, Any]:
    kept = thin(curve.values, _POINTS)
    parts = {"steps": curve.steps, "places": curve.places, "values": curve.values}
    return {part: as_json(values[kept].tolist()) for part, values in parts.items()}


def _map(ratios: RatioMap) -> dict[str, Any]:
    return {
        "title": "gradient norm, other over reference, log10",
        "layers": list(ratios.layers),
        "steps": ratios.steps.tolist(),
        "places": as_json(ratios.places.tolist()),
        "values": matrix(ratios.values),
    }
