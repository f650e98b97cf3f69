"""A comparison in sentences and cells, for the terminal and the page alike. Names are as they came: not printable."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holter.comparison.comparing import Comparison, Pair, Side
from holter.comparison.measures import Extreme
from holter.comparison.partings import Parting, Partings
from holter.comparison.tracks import Axis
from holter.comparison.verdict import level
from holter.diagnosis.finding import Finding
from holter.diagnosis.titles import title_of
from holter.words import duration, number, share, size, times

_SMALL = 1e-3  # a share: less reads as no change
_MOST_FALLEN = 0.995  # a share that `share` still tells from all
_CLEARLY = "much more than such values change from one step to the next"


@dataclass(frozen=True)
class Row:
    """One number of all runs, as text and as it is; None where it is not known."""

    name: str
    texts: tuple[str, ...]
    numbers: tuple[float | None, ...]


def parting_sentences(partings: Partings, by: Axis) -> list[str]:
    """Where the runs part, down to the last bit; in which layer; and from where on it matters."""
    if not partings.compared or not partings.steps:
        return ["The two have nothing in common that could be laid side by side."]
    seen = f"{partings.compared:,} series at {partings.steps:,} common steps"
    first, layer = partings.difference, partings.layer_difference
    if first is None:
        return [f"Nothing that was recorded differs, in {seen}."]
    said = [f"Of {seen} the first difference is at {_at(first, by)}: {_what(first)}."]
    if layer is not None and _key(layer) != _key(first):
        said.append(f"The first layer that differs is at {_at(layer, by)}: {_what(layer)}.")
    matters, layer_matters = partings.departure, partings.layer_departure
    if matters is None:
        return [*said, f"They stay close: nothing differs for long by {_CLEARLY}."]
    if (_key(matters), _key(layer_matters)) == (_key(first), _key(layer)):
        return [*said, f"From there on they are clearly apart, by {_CLEARLY}."]
    said.append(f"From {_at(matters, by)} on they are clearly apart, by {_CLEARLY}: {_what(matters)}.")
    if layer_matters is not None and _key(layer_matters) != _key(matters):
        said.append(f"The first layer that is clearly apart, at {_at(layer_matters, by)}: {_what(layer_matters)}.")
    return said


def _key(parting: Parting | None) -> tuple[str, str | None, int] | None:
    """What tells one from another; its values do not: a NaN is not equal to itself."""
    return None if parting is None else (parting.series, parting.layer, parting.step)


def _at(parting: Parting, by: Axis) -> str:
    same = by == "step" or parting.step == parting.other_step
    return f"step {parting.step:,}" + ("" if same else f" (of the other {parting.other_step:,})")


def _what(parting: Parting) -> str:
    together = f", with {parting.layers - 1:,} more at once" if parting.layers > 1 else ""
    if parting.series.endswith("hash"):  # a number that says nothing
        return "the two were given different batches"
    of = f" of {parting.layer}" if parting.layer is not None else ""
    was, now = _figure(parting.reference), _figure(parting.other)
    if was == now:  # they differ, though not in three digits
        was, now = f"{parting.reference:.9g}", f"{parting.other:.9g}"
    return f"{parting.series}{of} {was} → {now}{together}"


def _figure(value: float) -> str:
    return number(value) if math.isfinite(value) else "not finite"


def _from_to(was: float, now: float) -> str:
    told = _figure(was), _figure(now)
    return f"the same ({told[0]})" if told[0] == told[1] else f"{told[0]} → {told[1]}"


def judged_until(pair: Pair, comparison: Comparison) -> str:
    """Where one of them is longer, at which step they were judged; else nothing."""
    other = next(side for side in comparison.sides if side.name == pair.name)
    if pair.judged is None or other.steps == comparison.sides[0].steps:
        return ""
    return f"Judged as they were at step {pair.judged.at:,} of the reference, the last that both have reached."


def evidence_sentences(pair: Pair) -> Iterator[str]:
    """C10 and C11; whether a fix worked is said only where there was something to fix."""
    norms, losses, was_sick = pair.evidence.gradients, pair.evidence.losses, bool(pair.changes.went)
    if norms is not None:
        marks = ("vanishing_fixed", "exploding_fixed", "steadier")
        found = ", ".join(mark.replace("_", " ") for mark in marks if getattr(norms, mark))
        yield (
            f"Gradient norms of the last steps: mean {_from_to(norms.mean_before, norms.mean_after)}, "
            f"std {_from_to(norms.std_before, norms.std_after)}{f': {found}' if found and was_sick else ''}."
        )
    if losses is not None:
        # By how much it changed stands in the table, over a few steps less: told twice, it would be two numbers.
        means = f"mean {_from_to(*pair.evidence.loss_means)}, " if pair.evidence.loss_means is not None else ""
        effect = ": effective" if losses.effective else ": not effective"
        yield (
            f"Losses of the last steps: {means}slope a step "
            f"{_from_to(losses.slope_before, losses.slope_after)}{effect if was_sick else ''}."
        )


def finding_words(finding: Finding) -> str:
    place = f" in {finding.layer}" if finding.layer else ""
    return f"{title_of(finding.cause)}{place}, {finding.severity} since step {finding.since:,}"


def stayed_words(was: Finding, now: Finding) -> str:
    moved = f", was in {was.layer}" if was.layer != now.layer and was.layer else ""
    earlier = f", was since step {was.since:,}" if was.since != now.since else ""
    return f"{finding_words(now)}{moved}{earlier}"


def table_rows(comparison: Comparison) -> list[Row]:
    """Those of which at least one run knows something."""
    reached = f"steps to a loss of {number(comparison.level)}" if comparison.level is not None else ""
    sides = comparison.sides
    validation = sides[0].measures.validation or ""
    rows = [
        Row("state", tuple(side.state for side in sides), (None,) * len(sides)),
        _row(sides, "steps", lambda side: side.steps, lambda side: f"{side.steps:,}"),
        _row(sides, "last loss", lambda side: _mean(side.measures.last_loss), lambda s: level(s.measures.last_loss)),
        _row(sides, "best loss", *_extreme(lambda side: side.measures.best_loss)),
        _row(
            sides,
            f"last {validation}",
            lambda s: _mean(s.measures.last_validation),
            lambda s: level(s.measures.last_validation),
        ),
        _row(sides, f"best {validation}", *_extreme(lambda side: side.measures.best_validation)),
        _row(sides, reached, lambda side: side.steps_to_level, _reached),
        _row(sides, "largest gradient norm", *_extreme(lambda side: side.measures.largest_norm)),
        _plain(sides, "time of a step", "step_time", duration),
        _plain(sides, "samples a second", "samples_per_second", number),
        _plain(sides, "tokens a second", "tokens_per_second", number),
        _plain(sides, "memory of the process, at most", "process_memory", lambda value: size(int(value))),
        _plain(sides, "memory of the device, at most", "device_memory", lambda value: size(int(value))),
        _row(sides, "findings", lambda side: len(side.findings), lambda side: _causes(side.findings)),
    ]
    return [row for row in rows if row.name and any(text != "–" for text in row.texts)]


def _row(sides: tuple[Side, ...], name: str, value: Callable[[Side], float | None], text: Callable[[Side], str]) -> Row:
    numbers = tuple(None if (found := value(side)) is None else float(found) for side in sides)
    return Row(name, tuple(map(text, sides)), numbers)


def _plain(sides: tuple[Side, ...], name: str, part: str, text: Callable[[float], str]) -> Row:
    """A row of a measure that is a number, or None."""
    numbers: tuple[float | None, ...] = tuple(getattr(side.measures, part) for side in sides)
    return Row(name, tuple("–" if value is None else text(value) for value in numbers), numbers)


def _mean(found: object) -> float | None:
    return getattr(found, "mean", None)


def _extreme(find: Callable[[Side], Extreme | None]) -> tuple[Callable[[Side], float | None], Callable[[Side], str]]:
    def value(side: Side) -> float | None:
        found = find(side)
        return found.value if found is not None else None

    def text(side: Side) -> str:
        found = find(side)
        if found is None:
            return "–"
        told = number(found.value) if math.isfinite(found.value) else "not finite"
        return f"{told} at {found.step:,}"

    return value, text


def _reached(side: Side) -> str:
    return (
        "–"
        if side.measures.last_loss is None
        else "never"
        if side.steps_to_level is None
        else f"{side.steps_to_level:,}"
    )


def _causes(findings: tuple[Finding, ...]) -> str:
    return ", ".join(dict.fromkeys(title_of(finding.cause) for finding in findings)) or "none"


def change(row: Row) -> str:
    """From the reference to the other, of a number that has a size."""
    was, now = row.numbers[:2]
    if was is None or now is None or not (was > 0 and now > 0) or row.name in ("steps", "findings"):
        return ""
    if not (math.isfinite(was) and math.isfinite(now)) or was == now:
        return ""
    moved = now / was - 1
    if abs(moved) < _SMALL:
        return ""
    if not -_MOST_FALLEN < moved < 1:  # beyond, percent say little
        return times(now / was)
    return f"{'+' if moved > 0 else '−'}{share(abs(moved))}"
