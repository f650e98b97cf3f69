"""Two or more runs side by side: where they part, what was set up differently, what went and came, and which is better.

The first run is the reference; each other is compared with it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from holter.comparison.measures import Measures, gradient_norms, last_validation, measure, validation_name
from holter.comparison.partings import Partings, common_layers, find_partings
from holter.comparison.reading import Reading, read_run
from holter.comparison.series import common_level, judge_levels, last_level, steps_to
from holter.comparison.setup import Difference, setup_differences
from holter.comparison.tracks import AXES, Axis, Track
from holter.comparison.verdict import (
    BAD_ENDS,
    OTHER_LOSS,
    Changes,
    Evidence,
    Judged,
    Verdict,
    changes_of,
    regressions_of,
    verdict_of,
)
from holter.diagnosis.finding import Finding
from holter.run import Run
from holter.series import Floats, Integers
from holter.verdicts import compare_gradient_distributions, validate_fix_effectiveness

CURVES = ("loss", "gradient_norm", "learning_rate", "step_time")
_WINDOW = 50  # last losses and norms that C10 and C11 look at
_MAP_COLUMNS = 400


@dataclass(frozen=True, eq=False)
class Curve:
    """A scalar of a run: at which steps, where they stand on the axis of the comparison, and its values."""

    steps: Integers
    places: Floats
    values: Floats


@dataclass(frozen=True, eq=False)
class RatioMap:
    """log10 of the other's gradient norm over the reference's: [layers, steps]; NaN where one was not measured."""

    layers: tuple[str, ...]
    steps: Integers
    places: Floats
    values: Floats


@dataclass(frozen=True)
class Side:
    """One of the runs. `notes` say what of it could not be read, or was never recorded."""

    name: str
    path: str
    state: str
    steps: int
    measures: Measures
    steps_to_level: int | None
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    curves: dict[str, Curve] = field(repr=False, compare=False)


@dataclass(frozen=True)
class Pair:
    """The reference and one other."""

    name: str
    partings: Partings
    setup: tuple[Difference, ...]
    changes: Changes
    judged: Judged | None
    evidence: Evidence
    verdict: Verdict
    ratios: RatioMap | None = field(repr=False, compare=False)


@dataclass(frozen=True)
class Comparison:
    """`level` is a training loss that all runs reached, where there is one; `steps_to_level` tells how soon."""

    by: Axis
    level: float | None
    sides: tuple[Side, ...]
    pairs: tuple[Pair, ...]

    @property
    def regressed(self) -> bool:
        return any(pair.verdict.regressions for pair in self.pairs)


def compare(*runs: Run | str | os.PathLike[str], by: Axis = "step") -> Comparison:
    """Compares runs, or the directories of runs, with the first of them.

    >>> compare("runs/before", "runs/after").pairs[0].verdict.sentence  # doctest: +SKIP
    'The fix worked: “jump of the learning rate” is gone, and the last loss is better: 0.158 ± 0.012, …'
    """
    if len(runs) < 2:
        raise ValueError(f"a comparison needs two runs or more, got {len(runs)}")
    if by not in AXES:
        raise ValueError(f"runs are aligned by {', '.join(AXES)}, not by {by!r}")
    readings = [read_run(run) for run in runs]
    tracks = [Track(name, reading, by) for name, reading in zip(_names(readings), readings, strict=True)]
    losses = [track.scalar("loss")[1] for track in tracks]
    level, validation = common_level(losses), validation_name(tracks)
    sides = tuple(_side(track, level, validation) for track in tracks)
    pairs = tuple(
        _pair((tracks[0], track), (sides[0], side)) for track, side in list(zip(tracks, sides, strict=True))[1:]
    )
    return Comparison(by, level, sides, pairs)


def _names(runs: Sequence[Reading]) -> list[str]:
    """Short, but no two alike: with the directories that tell them apart, and no more of their paths; or numbered."""
    paths = [run.path.resolve() for run in runs]
    for parts in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-parts:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    return [name if names.count(name) == 1 else f"{name} ({place})" for place, name in enumerate(names, 1)]


def _side(track: Track, level: float | None, validation: str | None) -> Side:
    (steps, losses), run = track.scalar("loss"), track.reading
    return Side(
        name=track.name,
        path=str(run.path),
        state=run.state,
        steps=len(track),
        measures=measure(track, validation),
        steps_to_level=steps_to(losses, level, steps) if level is not None else None,
        findings=run.findings,
        notes=tuple(_notes(track)),
        curves={name: _curve(track, name) for name in CURVES if name in track.scalars},
    )


def _notes(track: Track) -> list[str]:
    run, said = track.reading, []
    if not run.info:
        said.append("its run.json is missing or damaged: nothing is known of its model")
    if damage := run.integrity.sentence:
        said.append(damage[0].lower() + damage[1:].rstrip("."))
    if not len(track):
        said.append("it has no steps")
        return said
    if run.state in ("running", *BAD_ENDS):
        said.append(
            "it is still running" if run.state == "running" else f"it {run.state} after {run.steps[-1] + 1:,} steps"
        )
    said += [] if "loss" in track.scalars else ["no loss was logged"]
    said += [] if "gradient" in track.roles else ["no gradients of layers were measured"]
    thinned = [f"one in {run.span(role):,} ({role.replace('_', ' ')})" for role in track.roles if run.span(role) > 1]
    if thinned:
        said.append(f"it is long: not all steps of its layers are compared, but {', '.join(thinned)}; all else is")
    return said


def _curve(track: Track, name: str) -> Curve:
    steps, values = gradient_norms(track) if name == "gradient_norm" else track.scalar(name)
    return Curve(steps, track.places(steps), values)


def _pair(tracks: tuple[Track, Track], sides: tuple[Side, Side]) -> Pair:
    partings = find_partings(*tracks)
    changes = changes_of(sides[0].findings, sides[1].findings)
    judged = _judge(tracks, sides[0].measures, {one.cause for one in (*changes.went, *changes.came)})
    setup = setup_differences((tracks[0].reading.info, tracks[1].reading.info), tracks)
    regressions = regressions_of(
        changes, judged, (sides[0].state, sides[1].state), (sides[0].measures, sides[1].measures)
    )
    is_same = partings.compared > 0 and partings.difference is None and len(tracks[0]) == len(tracks[1])
    verdict = verdict_of(changes, judged, regressions, is_same)
    return Pair(sides[1].name, partings, setup, changes, judged, _evidence(*tracks), verdict, _ratios(*tracks))


def _judge(tracks: tuple[Track, Track], reference: Measures, changed: set[str]) -> Judged | None:
    """The loss on other data where there is one, up to the last place that both have reached."""
    end = _common_end(*tracks)
    trained = [_until(track, track.scalar("loss"), end) for track in tracks]
    held = [_until(track, track.scalar(reference.validation or ""), end) for track in tracks]
    levels = [last_level(values) for values in trained]
    name, first = "last loss", trained[0]
    has_held = all(map(len, held))
    if has_held:
        name, first = f"last {reference.validation}", held[0] if len(held[0]) > 1 else trained[0]
        levels = [last_validation(values, level) for values, level in zip(held, levels, strict=True)]
    if levels[0] is None or levels[1] is None:
        return None
    outcome = judge_levels(levels[0], levels[1], float(first[0]) if len(first) else float("nan"))
    outcome = "other" if changed & OTHER_LOSS and not has_held else outcome
    steps = tracks[0].steps
    return Judged(name, levels[0], levels[1], outcome, int(steps[tracks[0].places(steps) <= end][-1]))


def _common_end(ours: Track, theirs: Track) -> float:
    """The last place up to which both have a loss: that of the last step of all may never have been written."""
    ends = [track.places(track.scalar("loss")[0])[-1:] for track in (ours, theirs)]
    return min(float(end[0]) if len(end) else track.end for track, end in zip((ours, theirs), ends, strict=True))


def _until(track: Track, series: tuple[Integers, Floats], end: float) -> Floats:
    steps, values = series
    return values[track.places(steps) <= end]


def _evidence(ours: Track, theirs: Track) -> Evidence:
    end = _common_end(ours, theirs)
    norms = [_until(track, gradient_norms(track), end)[-_WINDOW:] for track in (ours, theirs)]
    losses = [_until(track, track.scalar("loss"), end) for track in (ours, theirs)]
    has_losses = all(map(len, losses))
    return Evidence(
        compare_gradient_distributions(norms[0], norms[1]) if all(map(len, norms)) else None,
        validate_fix_effectiveness(losses[0], losses[1], _WINDOW) if has_losses else None,
        (_mean(losses[0]), _mean(losses[1])) if has_losses else None,
    )


def _mean(losses: Floats) -> float:
    """Of as many of the last as C11 looks at."""
    with np.errstate(all="ignore"):
        return float(losses[-_WINDOW:].mean())


def _ratios(ours: Track, theirs: Track) -> RatioMap | None:
    """Of gradient norms, at no more steps than a page can show."""
    if not all("gradient" in track.roles for track in (ours, theirs)):
        return None
    (steps, _), layers, (left, right) = common_layers(ours, theirs, "gradient", "norm")
    if not (len(steps) and layers):
        return None
    with np.errstate(all="ignore"):
        ratios = np.log10(right) - np.log10(left)
    ratios[~np.isfinite(ratios)] = np.nan  # where one of them is zero there is no ratio
    starts = np.unique(np.linspace(0, len(steps), min(_MAP_COLUMNS, len(steps)), endpoint=False).astype(np.int64))
    known = np.add.reduceat(np.isfinite(ratios).astype(np.float64), starts, axis=0)
    sums = np.add.reduceat(np.nan_to_num(ratios), starts, axis=0)
    with np.errstate(all="ignore"):
        return RatioMap(layers, steps[starts], ours.places(steps[starts]), (sums / known).T)
