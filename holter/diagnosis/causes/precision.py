"""The precision: numbers too large or too small for float16, updates that rounding swallows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.diagnosis.chart import Chart, column, until_news
from holter.diagnosis.evidence import most_zeros, rate_of
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Flags, Floats, Integers, Series, overall_median
from holter.words import number, share

_HALF = "float16"
_LARGEST, _SMALLEST = 65504.0, 2.0**-24  # that float16 can hold
_LATELY = 20  # steps in which skips are counted
_SKIPS = 4  # of them: a scaler that tries a larger scale skips one, and at first a few
_SEARCH = 40  # steps in a row, from 2^24 down to nothing and below
_GRID = 2**11  # steps of the smallest number: above that float16 has its full precision
_ZEROS = 0.1  # of a gradient
_LOST = 0.5  # of the values that should have changed
_ALL_THE_WAY = 0.05  # of its start: a loss that has come down so far has little left to learn
_FEW_VALUES = 20.0  # of a sample that must have had a gradient
_SAMPLED = 4096.0


# Too large --------------------------------------------------------------------------------------------------------


def overflow(case: Case) -> Iterator[Suspicion]:
    """fp16-overflow: the scaler skips step after step though it has found its scale before, or never finds one.

    Skips at the start, and one now and then where the scale is tried out, are how a scaler works.
    """
    chart = case.chart
    steps, skipped = column(chart.scalar("skipped"))
    if not len(skipped):
        yield from _without_scaler(case)
        return
    flags: Flags = skipped > 0
    if not flags[-_LATELY:].any():
        return
    since = _skips_since(chart, steps, flags)
    if since is None:
        return
    layer, largest = _near_the_limit(chart, since)
    lately = flags[steps >= since][-_LATELY:]
    scale = float(chart.scalar("loss_scale").values[-1, 0]) if len(chart.scalar("loss_scale")) else float("nan")
    place = f" in {layer} (values up to {number(largest)})" if layer else ""
    yield Suspicion(
        "fp16-overflow",
        "precision",
        since,
        0.95 if layer or lately.sum() >= 2 * _SKIPS else 0.75,
        Kind.FACT,
        layer=layer,
        severity="critical",
        evidence={"skipped": int(lately.sum()), "of": len(lately), "loss_scale": scale, "largest": largest},
        advice=f"Since step {since:,} {share(float(lately.mean()))} of the steps are skipped and the loss scale is "
        f"down to {number(scale)}: float16 overflows{place}, beyond {_LARGEST:,.0f}. Use bfloat16, or run that part in "
        "float32 (torch.autocast(enabled=False)).",
        check="It worked if no step is skipped for a hundred steps and the loss scale holds.",
    )


def _skips_since(chart: Chart, steps: Integers, flags: Flags) -> int | None:
    """The first of the skips that go on, or None where they are those of a search."""
    series = chart.scalar("skipped")
    taken = np.flatnonzero(~flags)
    if not len(taken):
        scale = chart.scalar("loss_scale")
        is_hopeless = len(flags) >= _SEARCH or (len(scale) > 0 and len(flags) > 8 and scale.values[-1, 0] < 1)
        return int(steps[0]) if is_hopeless else None
    is_whole = series.seen == len(series)
    searched = int(taken[0]) if is_whole else 0  # until then it looked for its scale
    found = np.flatnonzero(flags & (np.arange(len(flags)) > searched))
    fallen, start = _fall(chart, int(steps[searched]))
    found = found[steps[found] >= start]
    if not len(found) or len(flags) - found[-1] > 2 * _LATELY:
        return None
    is_constant = (found >= len(flags) - _SKIPS - 2).sum() >= _SKIPS and fallen >= _SKIPS - 1
    is_near = len(found) >= 2 and fallen >= 2 and _near_the_limit(chart, int(steps[found[0]]))[0] is not None
    # Trying a larger scale moves it up and down by one power of two; it does not lead down.
    return int(steps[found[0]]) if is_constant or is_near or fallen > _SKIPS else None


def _fall(chart: Chart, since: int) -> tuple[float, int]:
    """By how many powers of two the scale has fallen since a step, and when it was last at its highest."""
    scales = chart.scalar("loss_scale")
    values = scales.since(since)[:, 0]
    if not len(values):
        return float(_SKIPS), since
    last = len(values) - 1 - int(np.argmax(values[::-1]))
    return float(np.log2(values.max() / max(values[-1], 1e-30))), int(scales.steps[len(scales) - len(values) + last])


def _near_the_limit(chart: Chart, since: int) -> tuple[str | None, float]:
    """The first layer that puts out values near what float16 can hold, or beyond, and the largest of them."""
    near = chart.table("activation", "near_overflow")
    if not len(near):
        return None, float("nan")
    rows = near.steps >= since - 100  # looks are rare
    if not rows.any():
        return None, float("nan")
    with np.errstate(all="ignore"):
        bad = np.fmax.reduce(near.values[rows], axis=0) > 0
    tops, broken = chart.table("activation", "abs_max"), chart.table("activation", "nonfinite")
    bad |= np.nanmax(np.nan_to_num(broken.values[rows]), axis=0) > 0
    layers = [name for name, is_bad in zip(near.names, bad.tolist(), strict=True) if is_bad]
    inner = [name for name in layers if not any(other.startswith(f"{name}.") for other in layers)]
    for name in chart.in_depth(inner):
        largest = tops.values[rows][:, tops.names.index(name)]
        return name, float(np.nanmax(largest)) if np.isfinite(largest).any() else float("inf")
    return None, float("nan")


def _without_scaler(case: Case) -> Iterator[Suspicion]:
    """A loss that is not finite after a layer came near the limit of float16."""
    chart = case.chart
    if np.isfinite(chart.latest("loss")):
        return
    near, losses = chart.table("activation", "near_overflow"), chart.scalar("loss")
    if not len(near) or not len(losses):
        return
    bad = np.flatnonzero(~np.isfinite(losses.values[:, 0]))
    since = int(losses.steps[bad[0]])
    layer, largest = _near_the_limit(chart, since)
    # What broke in float32 is infinite, or near 1e38.
    if layer is None or not _LARGEST / 2 <= largest <= _LARGEST:
        return
    yield Suspicion(
        "fp16-overflow",
        "precision",
        since,
        0.85,
        Kind.FACT,
        layer=layer,
        severity="critical",
        evidence={"largest": largest, "limit": _LARGEST},
        advice=f"{layer} put out {number(largest)} before the loss ceased to be finite at step {since:,}; float16 ends "
        f"at {_LARGEST:,.0f}. Use bfloat16, or run that layer in float32.",
        check="It worked if the loss stays finite and near_overflow is 0.",
    )


# Too small --------------------------------------------------------------------------------------------------------


def underflow(case: Case) -> Iterator[Suspicion]:
    """fp16-underflow: gradients with many exact zeros whose largest value is a few times the smallest of float16.

    Multiples of that number are a grid on which no float32 lies by chance. Units that are dead make zeros too, but
    beside values of the usual size.
    """
    chart = case.chart
    if most_zeros(chart) < _ZEROS:
        return
    zeros, tops = chart.table("gradient", "zero_share"), chart.table("gradient", "abs_max")
    if not (tops.values[-1] * _scales(chart, zeros.steps[-1:]) < _GRID * _SMALLEST).any():
        return
    if not _may_be_half(chart, zeros.names).any():
        return
    flushed = _flushed(chart, zeros, tops, 64)
    run = _run(np.asarray(flushed.any(axis=1)))
    if run >= 24:  # it may have begun before
        flushed = _flushed(chart, zeros, tops, len(zeros))
        run = _run(np.asarray(flushed.any(axis=1)))
    if run < 2:
        return
    flushed = flushed[-40:]
    since = int(zeros.steps[len(zeros) - run])
    flushed[-1] = flushed.any(axis=0)
    layers = chart.in_depth(name for name, is_bad in zip(zeros.names, flushed[-1].tolist(), strict=True) if is_bad)
    if chart.parameters and not any(chart.is_matrix(name) for name in layers):
        return  # the bias of attention's keys has no gradient but for rounding
    worst = float(np.nanmax(zeros.values[-40:, flushed[-1]]))
    largest = float(np.nanmax(tops.values[-40:, flushed[-1]]))
    # So that the largest of them is where float16 is at its best, with room for a hundredfold.
    power = int(np.floor(np.log2(64 / max(largest, _SMALLEST))))
    yield Suspicion(
        "fp16-underflow",
        "precision",
        since,
        0.9 if run >= 3 else 0.7,
        Kind.FACT,
        layer=layers[0],
        evidence={"layers": len(layers), "zeros": worst, "largest": largest, "smallest_float16": _SMALLEST},
        advice=f"Up to {share(worst)} of the gradient is exactly zero in {layers[0]}"
        f"{f' and {len(layers) - 1} more' if len(layers) > 1 else ''}, and its largest value is {number(largest)}: "
        f"float16 ends at {number(_SMALLEST)}. Scale the loss, torch.amp.GradScaler(init_scale=2.0**{power}), or use "
        "bfloat16.",
        check="It worked if the share of zeros in the gradients falls to that of dead units.",
    )


def _flushed(chart: Chart, shares: Series, largest: Series, most: int) -> Flags:
    """Which gradients have lost values below the smallest of float16, in the last so many looks: [looks, layers]."""
    steps, zeros, tops = shares.steps[-most:], shares.values[-most:], largest.values[-most:]
    grid = tops * (_scales(chart, steps) / _SMALLEST)[:, None]
    may_be = _may_be_half(chart, largest.names)
    with np.errstate(invalid="ignore"):
        is_on_grid = (grid >= 1) & (grid < _GRID) & (np.abs(grid - np.round(grid)) < 1e-9 * grid) & may_be
        many, nothing = (zeros >= _ZEROS) & may_be, (tops == 0) & may_be
    # One tensor may be on it by chance, as bfloat16 has numbers with few digits; several near its first steps are not.
    proof = (is_on_grid.sum(axis=1) >= 2) & (is_on_grid & (grid < 64)).any(axis=1) & (many | nothing).any(axis=1)
    is_half = _is_half(chart, largest)
    if not is_half and proof[-8:].sum() < 2:
        return np.zeros(grid.shape, dtype=bool)
    proof |= is_half & (nothing | ~may_be).all(axis=1)
    return np.asarray((is_on_grid & many & (is_half | proof[:, None])) | (nothing & proof[:, None]))


def _run(holds: Flags, gap: int = 40) -> int:
    """How many values at the end hold, but for a few in a row that do not."""
    held = np.flatnonzero(holds)
    if not len(held) or len(holds) - held[-1] > gap:
        return 0
    breaks = np.flatnonzero(np.diff(held) > gap)
    return len(holds) - int(held[breaks[-1] + 1 if len(breaks) else 0])


def _scales(chart: Chart, steps: Integers) -> Floats:
    """The loss scale at these steps: by so much gradients were divided."""
    series = chart.scalar("loss_scale")
    if not len(series):
        return np.ones(len(steps))
    places = np.clip(np.searchsorted(series.steps, steps), 0, len(series) - 1)
    found: Floats = series.values[places, 0]
    return found


@until_news
def _may_be_half(chart: Chart, names: tuple[str, ...]) -> Flags:
    """Whose gradients may be float16 numbers: none where layers were looked at and none computed in it. A recurrent
    layer may do so and put out float32. Rows of an embedding that a batch does not use have no gradient in any format.
    """
    seen = {chart.activation_dtype(name) for name in names} | {chart.dtype(name) for name in names}
    is_half = _HALF in seen or (None in seen and "bfloat16" not in seen)
    found = [is_half and chart.part(name) != "embedding" for name in names]
    return np.array(found, dtype=bool)


def _is_half(chart: Chart, largest: Series) -> bool:
    """Whether gradients are float16 numbers: as layers compute, or their weights are, or a scaler says, or most of
    their largest values have the 11 binary digits of float16 and not the 8 of bfloat16."""
    if len(chart.scalar("loss_scale")) or any(
        _HALF in (chart.dtype(name), chart.activation_dtype(name)) for name in largest.names
    ):
        return True
    tops = largest.opening[:8]
    digits = np.frexp(tops[np.isfinite(tops) & (tops > 0)])[0] * 2**11
    fits = digits == np.round(digits)
    return len(fits) > 0 and bool(fits.mean() > 0.5 and (digits[fits] / 8 != np.round(digits[fits] / 8)).any())


# Lost in rounding -------------------------------------------------------------------------------------------------


def update_lost(case: Case) -> Iterator[Suspicion]:
    """bf16-update-lost: weights in half precision most of whose values keep their bits though the step would change
    them. At the end of a schedule, where the rate is next to nothing, little is lost by it, and a loss that has come
    down all the way is a note: what there was to learn was learnt."""
    chart = case.chart
    if not _in_half(chart, chart.now("update", "unchanged")[0]):
        return
    series = chart.table("update", "unchanged")
    half = _in_half(chart, series.names)
    if len(series) < 2:
        return
    lost, sizes = _lost_share(chart, series, half)
    known = np.where(np.isnan(lost), 0, sizes)
    with np.errstate(all="ignore"):
        overall = np.where(np.isnan(lost), 0, lost * sizes).sum(axis=1) / known.sum(axis=1)
    if not (overall[-2:] >= _LOST).all() or not _rate_counts(chart):
        return
    since = int(series.steps[len(series) - _run(overall >= _LOST, gap=1)])
    worst = int(np.argmax(np.where(np.isnan(lost[-1]), -1, lost[-1])))
    layer, part = series.names[half[worst]], float(overall[-1])
    if lost[-1, worst] == 1 and (lost[-1] >= _LOST).sum() == 1 and len(half) > 2:
        return  # one tensor that is never written is another trouble
    kind = chart.dtype(layer)
    yield Suspicion(
        "bf16-update-lost",
        "precision",
        since,
        0.9,
        Kind.FACT,
        severity="info" if _has_learnt(chart) else "warning",
        evidence={"unchanged": part, "worst_layer": layer, "worst": float(lost[-1, worst]), "dtype": kind},
        advice=f"{share(part)} of all half-precision weights that had a gradient kept their bits at step "
        f"{series.steps[-1]:,} (the largest share is {share(float(lost[-1, worst]))}, of {layer}): "
        f"updates are smaller than the rounding of {kind} ({'0.4' if kind == 'bfloat16' else '0.05'} % of a weight). "
        "Keep weights in float32 and use torch.autocast, or an optimizer with float32 master weights or stochastic "
        "rounding.",
        check="It worked if `unchanged` is near the share of zeros in the gradient.",
    )


@until_news
def _in_half(chart: Chart, names: tuple[str, ...]) -> list[int]:
    return [place for place, name in enumerate(names) if chart.dtype(name) in ("bfloat16", "float16")]


def _lost_share(chart: Chart, series: Series, half: list[int]) -> tuple[Floats, Floats]:
    """Of the values that have a gradient, the share that keeps its bits, [looks, layers], NaN where it is not known;
    and how many values each layer has.

    What has no gradient may stay as it is: rows of an embedding that the batch does not use.
    """
    unchanged = series.values[-64:, half]
    planned = chart.table("update", "planned_ratio").values[-64:, half]
    gradients = chart.table("gradient", "zero_share")
    places = {name: place for place, name in enumerate(gradients.names)}
    zeros = np.full(len(half), np.nan)
    for at, place in enumerate(half):
        column_ = gradients.values[-16:, places[series.names[place]]] if series.names[place] in places else zeros[:0]
        zeros[at] = overall_median(column_[np.isfinite(column_)]) if np.isfinite(column_).any() else np.nan
    sizes = np.array([float(np.prod(chart.shape(series.names[place]))) for place in half])
    with np.errstate(all="ignore"):
        lost: Floats = (unchanged - zeros) / (1 - zeros)
        lost[:, (1 - zeros) * np.minimum(sizes, _SAMPLED) < _FEW_VALUES] = np.nan
        lost[~(planned > 0)] = np.nan
    return lost, sizes


def _rate_counts(chart: Chart) -> bool:
    _, rates = rate_of(chart)
    return not len(rates) or bool(rates[-1] > 0.2 * max(rates.max(), chart.peak_rate))


def _has_learnt(chart: Chart) -> bool:
    losses = chart.scalar("loss")
    opening, late = losses.opening[:5, 0], losses.values[-20:, 0]
    if losses.seen < 25 or not (opening > 0).all() or not (late > 0).all():
        return False
    return overall_median(late) < _ALL_THE_WAY * overall_median(opening)


RULES = (overflow, underflow, update_lost)
