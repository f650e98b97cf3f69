"""The data: values that are not finite, in any micro-batch of a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Flags, Integers, Series

_LATELY = 40  # steps for which an accident that is over is still told


def not_finite(case: Case) -> Iterator[Suspicion]:
    """nan-in-data: a batch with NaN or infinite values, and a loss or gradient that has caught it."""
    series = case.chart.table("batch", "nonfinite")
    with np.errstate(invalid="ignore"):
        bad = series.values > 0
    bad[:, _on_purpose(series)] = False
    rows = np.flatnonzero(bad.any(axis=1))
    if not len(rows):
        yield from _not_finite_unmeasured(case)
        return
    since = _cluster(series.steps[rows])
    first = np.flatnonzero(series.steps == since)[0]
    layers = [name for name, is_bad in zip(series.names, bad[first], strict=True) if is_bad]
    count = float(np.nansum(series.values[first][bad[first]]))
    evidence = {"tensors": layers, "values": count, "batches": len(rows)}
    yield from _nan_in_data(case, since, int(series.steps[rows[-1]]), f"{layers[0]} held {count:,.0f}", evidence)


def _not_finite_unmeasured(case: Case) -> Iterator[Suspicion]:
    """In a micro-batch whose rows were not measured, of which no more is known."""
    for name, held in (("batch/first_nonfinite", "The batch"), ("batch/nonfinite", "A later micro-batch")):
        series = case.chart.scalar(name)
        with np.errstate(invalid="ignore"):
            steps = series.steps[series.values[:, 0] > 0] if len(series) else series.steps
        if len(steps) and not _on_purpose(series).any():
            which = "the first" if held == "The batch" else "not the first"
            evidence: dict[str, object] = {"batches": len(steps), "micro_batch": which}
            yield from _nan_in_data(case, _cluster(steps), int(steps[-1]), f"{held} held", evidence)
            return


def _nan_in_data(case: Case, since: int, last: int, held: str, evidence: dict[str, object]) -> Iterator[Suspicion]:
    caught = _caught(case, since)
    if caught is False or (case.step - last > _LATELY and not caught):
        return
    yield Suspicion(
        "nan-in-data",
        "data",
        since,
        0.98 if caught else 0.7,
        Kind.FACT,
        severity="critical",
        evidence=evidence,
        advice=f"{held} NaN or infinite values at step {since:,}, before any layer had one: "
        "drop such examples in the dataset (torch.isfinite(x).all()), or mend what divides by zero there.",
        check="It worked if `nonfinite` of the batch stays 0 and the loss is finite.",
    )


def _on_purpose(series: Series) -> Flags:
    """A mask of -inf comes with every batch."""
    with np.errstate(invalid="ignore"):
        always = np.asarray(((series.opening > 0) | np.isnan(series.opening)).all(axis=0))
    return always if len(series.opening) >= 3 else np.zeros(len(series.names), dtype=bool)


def _cluster(steps: Integers, gap: int = 60) -> int:
    """The first of the last steps that lie close together."""
    breaks = np.flatnonzero(np.diff(steps) > gap)
    return int(steps[breaks[-1] + 1 if len(breaks) else 0])


def _caught(case: Case, since: int) -> bool | None:
    """Whether loss or gradient were not finite in these steps; None where neither was recorded."""
    losses = case.chart.scalar("loss").since(since)[:3]
    gradients = case.chart.scalar("gradient_nonfinite").since(since)[:3]
    if not len(losses) and not len(gradients):
        return None
    return bool((~np.isfinite(losses)).any() or (gradients > 0).any())
