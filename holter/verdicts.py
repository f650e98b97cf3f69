"""Judgements over plain numbers and names: series of norms or losses, names of layers. No torch, no state.

A series is anything that numpy reads as one-dimensional, one value a step; a step is a position in it. Every
threshold is a keyword argument, and the answers say which one spoke.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Series = Sequence[float] | npt.NDArray[np.floating]


@dataclass(frozen=True)
class Span:
    """Steps from `start` up to, not including, `stop`, and why they stand out."""

    start: int
    stop: int
    reason: str


@dataclass(frozen=True)
class LossCheck:
    """What is wrong with a loss now."""

    nonfinite: bool
    high_variance: bool
    plateau: bool

    @property
    def problems(self) -> tuple[str, ...]:
        """The names of the fields that are true; empty for a healthy loss."""
        return tuple(name for name, true in vars(self).items() if true)


@dataclass(frozen=True)
class GradientComparison:
    """Norms before and after a fix, and what the fix did."""

    mean_before: float
    mean_after: float
    std_before: float
    std_after: float
    vanishing_fixed: bool
    exploding_fixed: bool
    steadier: bool


@dataclass(frozen=True)
class FixEffect:
    """Losses before and after a fix: the slopes per step, and by how many percent the mean fell."""

    slope_before: float
    slope_after: float
    improvement_percent: float
    effective: bool


@dataclass(frozen=True)
class ClipAdvice:
    """The share of steps that were clipped, the `max_norm` to go on with, and why."""

    clipped_share: float
    max_norm: float
    reason: str


def find_vanishing(norms: Series, *, threshold: float = 1e-7, consecutive: int = 3) -> list[Span]:
    """Where the norm stayed below the threshold for `consecutive` steps or more.

    >>> find_vanishing([1.0, 1e-9, 1e-9, 0.0, 1.0])
    [Span(start=1, stop=4, reason='norm < 1e-07 for 3 steps')]
    """
    return [
        Span(start, stop, f"norm < {threshold:g} for {stop - start} steps")
        for start, stop in _runs(_series(norms) < threshold)
        if stop - start >= consecutive
    ]


def find_exploding(norms: Series, *, threshold: float = 100.0, growth: float = 1.5, consecutive: int = 5) -> list[Span]:
    """Where the norm was above the threshold, was not finite, or grew exponentially.

    Exponentially means: each of `consecutive` steps on end multiplied it by `growth` or more.

    >>> find_exploding([1.0, 250.0, 2.0])
    [Span(start=1, stop=2, reason='norm > 100')]
    >>> find_exploding([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    [Span(start=0, stop=6, reason='norm grew 1.5x or more at each of 5 steps')]
    """
    values = _series(norms)
    finite = np.isfinite(values)
    earlier, later = values[:-1], values[1:]
    grew = finite[1:] & (earlier > 0) & (later >= growth * earlier)
    found = [Span(*run, f"norm > {threshold:g}") for run in _runs(finite & (values > threshold))]
    found += [Span(*run, "norm is not finite") for run in _runs(~finite)]
    found += [
        # grew[i] speaks of the pair (i, i + 1), so n rises span n + 1 steps.
        Span(start, stop + 1, f"norm grew {growth:g}x or more at each of {stop - start} steps")
        for start, stop in _runs(grew)
        if stop - start >= consecutive
    ]
    return sorted(found, key=lambda span: span.start)


def find_unstable(norms: Series, *, factor: float = 10.0) -> list[Span]:
    """Where the norm changed by more than `factor`, up or down, from the step before.

    To or from zero is a change without bound; so is a step that turns non-finite or comes back.

    >>> find_unstable([1.0, 1.1, 20.0, 19.0])
    [Span(start=2, stop=3, reason='norm changed more than 10x from the step before')]
    """
    values = _series(norms)
    earlier, later = values[:-1], values[1:]
    changed = np.maximum(earlier, later) > factor * np.minimum(earlier, later)
    changed |= np.isfinite(earlier) != np.isfinite(later)
    reason = f"norm changed more than {factor:g}x from the step before"
    return [Span(start + 1, stop + 1, reason) for start, stop in _runs(changed)]


def check_loss(
    losses: Series, *, window: int = 10, variance_factor: float = 2.0, plateau_share: float = 0.99
) -> LossCheck:
    """Judges the last `window` losses; before there are as many, only whether the latest is finite.

    High variance: std > `variance_factor` x mean. Plateau: all of them > `plateau_share` of their first.

    >>> check_loss([2.0] * 10).problems
    ('plateau',)
    >>> check_loss([1.0, float("nan")]).problems
    ('nonfinite',)
    """
    values = _series(losses)
    recent = values[-window:]
    if len(recent) < window or not np.isfinite(recent).all():
        return LossCheck(bool(len(values)) and not np.isfinite(values[-1]), False, False)
    # Magnitudes, so that a loss below zero (a log-likelihood) is judged alike.
    floor = recent[0] - (1 - plateau_share) * abs(recent[0])
    return LossCheck(
        nonfinite=False,
        high_variance=bool(recent.std() > variance_factor * abs(recent.mean())),
        plateau=bool((recent > floor).all()),
    )


def compare_gradient_distributions(
    before: Mapping[str, float] | Iterable[float], after: Mapping[str, float] | Iterable[float]
) -> GradientComparison:
    """Compares norms, by layer or by step, before and after a fix.

    Vanishing is fixed where the mean rose 10x, exploding where it fell 10x (or became finite again); steadier
    means that the standard deviation halved.

    >>> compare_gradient_distributions({"a": 500.0, "b": 900.0}, {"a": 1.0, "b": 2.0}).exploding_fixed
    True
    """
    norms_before, norms_after = _norms(before), _norms(after)
    with np.errstate(all="ignore"):  # norms that are not finite give a mean and a std that say so
        mean_before, mean_after = float(norms_before.mean()), float(norms_after.mean())
        std_before, std_after = float(norms_before.std()), float(norms_after.std())
    was, now = (np.inf if np.isnan(mean) else mean for mean in (mean_before, mean_after))
    return GradientComparison(
        mean_before,
        mean_after,
        std_before,
        std_after,
        vanishing_fixed=bool(was < now < np.inf and now >= 10 * was),
        exploding_fixed=bool(now < was and 10 * now <= was),
        steadier=bool(std_after < std_before and 2 * std_after <= std_before),
    )


def validate_fix_effectiveness(losses_before: Series, losses_after: Series, window: int = 50) -> FixEffect:
    """Compares the last `window` losses before a fix with the last `window` after it.

    Slopes are least squares per step, over finite losses. The fix is effective where the losses after it are
    finite and either their mean is lower or those before were not finite.

    >>> validate_fix_effectiveness([2.0, 2.0, 2.0], [2.0, 1.5, 1.0])
    FixEffect(slope_before=0.0, slope_after=-0.5, improvement_percent=25.0, effective=True)
    """
    if window < 2:
        raise ValueError(f"a slope needs a window of at least 2 losses, got {window}")
    before, after = _series(losses_before)[-window:], _series(losses_after)[-window:]
    if not (len(before) and len(after)):
        raise ValueError(f"losses are needed before and after the fix, got {len(before)} and {len(after)}")
    with np.errstate(all="ignore"):
        was, now = before.mean(), after.mean()
        improvement = 100 * (was - now) / abs(was)
    effective = np.isfinite(now) and (now < was or not np.isfinite(was))
    return FixEffect(_slope(before), _slope(after), float(improvement), bool(effective))


def advise_max_norm(norms: Series, max_norm: float = 1.0) -> ClipAdvice:
    """The share of these norms (before clipping) that `max_norm` clips, and the `max_norm` to go on with.

    Start at 1.0; go down to 0.5 where norms still explode; go up to between 5 and 10 where most steps are
    clipped and none explodes: the clip is then a smaller learning rate in disguise.

    >>> advise_max_norm([0.5, 0.8, 3.0, 0.7], 1.0)
    ClipAdvice(clipped_share=0.25, max_norm=1.0, reason='25 % of steps clipped: keep it')
    >>> advise_max_norm([6.0, 7.0, 8.0], 1.0).max_norm
    7.0
    """
    values = _series(norms)
    if not len(values):
        return ClipAdvice(0.0, 1.0, "no steps yet: start at 1.0")
    share = float(np.mean(~(values <= max_norm)))  # NaN is not within the limit either
    clipped = f"{100 * share:.0f} % of steps clipped"
    if not np.isfinite(values).all():
        return ClipAdvice(share, max_norm, "some norms are not finite: no max_norm mends that, find their cause")
    if find_exploding(values):
        lower = next((limit for limit in (1.0, 0.5) if limit < max_norm), max_norm)
        how = f"lower it to {lower:g}" if lower < max_norm else "keep it and lower the learning rate"
        return ClipAdvice(share, lower, f"norms still explode: {how}")
    higher = float(np.clip(np.median(values), 5.0, 10.0))
    if share > 0.5 and higher > max_norm:
        return ClipAdvice(share, higher, f"{clipped} and none explodes: raise it to {higher:g}")
    return ClipAdvice(share, max_norm, f"{clipped}: keep it")


# One part of a dotted name, in lower case. The first category that matches a part wins; see `_category`.
_PARTS = {
    "attention": r".*(attn|attention).*|att|mha|sa|q|k|v|qkv|query|key|value|[qkv]_(proj|lin)|w[qkv]"
    r"|in_proj_(weight|bias)|(qkv|kv)_proj|query_key_value",
    "output": r"embed_out|.*unembed.*|(.*_)?(heads?|classifier|logits|outputs?)|cls|predictions|out|score"
    r"|proj_out|fc",
    "embedding": r".*emb(ed.*|s|eddings?)?|wte|wpe|shared|(cls|class)_token",
    "ffn": r"(.*_)?(mlp|ffn|ff|ffwd|feed_?forward|moe|experts?)(_.*)?|intermediate|densereludense"
    r"|(linear|fc|lin|w)\d+|c_fc|(gate|up|down|gate_up)_proj|dense_h_to_4h|dense_4h_to_h",
}
_CATEGORIES = {name: re.compile(pattern) for name, pattern in _PARTS.items()}
_NORM = re.compile(r".*norm.*|ln(_.*|\d*)|bn\d*")


def categorize_problem_layers(
    problem_layers: Mapping[str, object] | Iterable[object],
) -> dict[str, list[str]]:
    """Sorts parameter names by what they belong to: attention, ffn, embedding, output or other. None is lost.

    Takes names, (name, norm) pairs, or a mapping by name. A normalisation belongs to the block it sits in;
    one that stands between blocks is "other".

    >>> layers = categorize_problem_layers(["h.0.attn.c_attn.weight", "h.0.mlp.c_fc.bias", "ln_f.weight"])
    >>> layers["attention"], layers["ffn"], layers["other"]
    (['h.0.attn.c_attn.weight'], ['h.0.mlp.c_fc.bias'], ['ln_f.weight'])
    """
    sorted_names: dict[str, list[str]] = {c: [] for c in ("attention", "ffn", "embedding", "output", "other")}
    for layer in problem_layers:
        name = str(layer[0]) if isinstance(layer, tuple | list) else str(layer)
        sorted_names[_category(name)].append(name)
    return sorted_names


def _category(name: str) -> str:
    """Innermost part first: an attention's own mlp is an mlp."""
    parts = name.lower().split(".")
    for place in reversed(range(len(parts))):
        part, outer = parts[place], parts[:place]
        if _NORM.fullmatch(part):
            continue
        if part == "output" and any(one.isdecimal() for one in outer):
            # BERT: `layer.0.output` closes the feed-forward block, `layer.0.attention.output` the attention.
            if outer[-1].isdecimal():
                return "ffn"
            continue
        for category, pattern in _CATEGORIES.items():
            if pattern.fullmatch(part):
                return category
    return "other"


def _series(values: Series) -> Floats:
    series = np.asarray(values, dtype=np.float64)
    if series.ndim != 1:
        raise ValueError(f"a series has one value a step, got an array of shape {series.shape}")
    return series


def _norms(norms: Mapping[str, float] | Iterable[float]) -> Floats:
    values = np.fromiter(norms.values() if isinstance(norms, Mapping) else norms, dtype=np.float64)
    if not len(values):
        raise ValueError("there are no norms to compare: call backward() before compute_gradient_norms(model)")
    return values


def _runs(mask: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Stretches of True as (start, stop)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def _slope(values: Floats) -> float:
    steps = np.flatnonzero(np.isfinite(values))
    if len(steps) < 2:
        return float("nan")
    centred = steps - steps.mean()
    return float(centred @ values[steps] / (centred @ centred))
