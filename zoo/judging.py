"""What is wrong with a training that was watched, and whether a planted fault was named. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zoo.result import Result, Seen, Told
from zoo.training import Fault

TOLERANCE = 1e-5  # of norms, relative


@dataclass(frozen=True)
class Row:
    """A healthy training. `faults` is what fails it, in sentences."""

    name: str
    faults: tuple[str, ...]
    steps: int = 0
    counted: int = 0
    recorded: int = 0
    is_equal: bool = False
    norm_error: float = math.nan
    measured: float = 0.0  # the share of steps whose norm was recorded
    findings: tuple[Told, ...] = ()
    own: tuple[str, ...] = ()
    losses: tuple[float, float] = (math.nan, math.nan)
    attached: str = ""
    slowdown: float = math.nan  # seconds watched over seconds bare; the machine is shared, so it fails nothing


@dataclass(frozen=True)
class Planted:
    """A fault, and what was answered. `error` where the training did not run at all."""

    name: str
    fault: str
    causes: tuple[str, ...]
    answer: Told | None
    is_named: bool
    is_among_three: bool
    is_placed: bool
    error: str = ""


def incidents(findings: Iterable[Told]) -> tuple[Told, ...]:
    return tuple(one for one in findings if one.severity != "info")


def judge(name: str, steps: int, bare: Result, watched: Result) -> Row:
    """Return the row of a healthy training: everything that Holter got wrong in it."""
    for kind, result in (("bare", bare), ("watched", watched)):
        if result.error:
            return Row(name, (f"the {kind} run failed: {_last_line(result.error)}",), steps)
    counted, recorded = (sum(one.steps for one in result.seen) for result in (bare, watched))
    findings = tuple(told for one in watched.seen for told in one.findings)
    own = tuple(words for one in watched.seen for words in one.own)
    errors = [error for pair in zip(bare.seen, watched.seen, strict=False) for error in norm_errors(*pair)]
    measured = sum(len(one.norms) for one in watched.seen)
    row = Row(
        name=name,
        faults=(),
        steps=steps,
        counted=counted,
        recorded=recorded,
        is_equal=bool(bare.hashes) and bare.hashes == watched.hashes,
        norm_error=max(errors, default=math.nan),
        measured=measured / recorded if recorded else 0.0,
        findings=findings,
        own=own,
        losses=_ends([loss for one in watched.seen for loss in one.losses]),
        attached=", ".join(dict.fromkeys(one.attached for one in watched.seen if one.attached)),
        slowdown=watched.seconds / bare.seconds if bare.seconds > 0 else math.nan,
    )
    return Row(**{**vars(row), "faults": (*_faults(row), *_ending_faults(watched.seen))})


def _faults(row: Row) -> Iterable[str]:
    if row.counted != row.steps:
        yield f"torch counts {row.counted} steps, its author {row.steps}"
    if row.recorded != row.counted:
        yield f"{row.recorded} of {row.counted} steps recorded"
    if not row.is_equal:
        yield "weights differ from those of the bare run"
    if row.measured == 0:
        yield "no gradient norm was recorded"
    elif not row.norm_error <= TOLERANCE:  # NaN is no proof
        yield f"a norm is off by {row.norm_error:.1e}"
    for one in incidents(row.findings):
        yield f"false alarm, {one.severity}: {one.cause} in {one.layer or one.where} since step {one.since}"


def _ending_faults(seen: Iterable[Seen]) -> Iterable[str]:
    for one in seen:
        if one.dropped:
            yield f"{one.dropped} records were dropped"
        if one.state != "finished":
            yield f"the run ended as {one.state!r}"
        yield from (f"of itself: {words}" for words in one.own if words.startswith(("warning:", "critical:")))


def norm_errors(bare: Seen, watched: Seen) -> list[float]:
    """Return |ours - torch's| / torch's of every norm that was recorded; infinite where torch has no such step."""
    errors = [_error(norm, bare.norms.get(step)) for step, norm in watched.norms.items()]
    return errors + [_error(norm, bare.clipped.get(step)) for step, norm in watched.clipped.items()]


def _error(ours: float, torchs: float | None) -> float:
    if torchs is None:
        return math.inf
    if ours == torchs or (math.isnan(ours) and math.isnan(torchs)):
        return 0.0
    error = abs(ours - torchs) / torchs if torchs else math.inf
    return math.inf if math.isnan(error) else error


def judge_planted(name: str, fault: str, truth: Fault, watched: Result) -> Planted:
    """Return whether the first incident names the fault; scored as in the clinic."""
    found = incidents(told for one in watched.seen for told in one.findings)
    answer = found[0] if found else None
    if watched.error or answer is None:
        error = _last_line(watched.error)
        return Planted(name, fault, truth.causes, answer, False, False, False, error)
    named = (answer.cause, *answer.alternatives)[:3]
    is_placed = truth.layer is None or (answer.layer is not None and fnmatchcase(answer.layer, truth.layer))
    among = any(cause in truth.causes for cause in named)
    return Planted(name, fault, truth.causes, answer, answer.cause in truth.causes, among, is_placed)


def share_named(planted: Iterable[Planted]) -> float:
    named = [one.is_named for one in planted]
    return sum(named) / len(named) if named else math.nan


def _ends(losses: list[float]) -> tuple[float, float]:
    """Return the means of the first and the last tenth."""
    length = max(1, len(losses) // 10)
    return (_mean(losses[:length]), _mean(losses[-length:]))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else ""
