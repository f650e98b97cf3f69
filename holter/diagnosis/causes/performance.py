"""Performance: waiting for data, memory that grows, steps that have become slow. Nothing of it harms what is learnt."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.diagnosis.chart import Chart, column, until_news
from holter.diagnosis.suspicion import Case, Kind, Suspicion
from holter.series import Flags, Floats, Integers, Series, overall_median, slope
from holter.words import duration, share, size, stage_name

_STEPS = 20  # steps that show a wait is no accident
_WAITS = 0.5  # of the time of a step
_SHORTEST = 1e-3  # seconds of waiting that are worth a word
_SLOW = 2.0  # times the usual
_BEFORE = 32  # steps that tell the usual
_LASTING = 1.0  # seconds: what else runs on a machine comes and goes
_LOOKS = 4  # at the memory in use: it is looked at once a second
_RESIDENT_LOOKS = 16  # where only resident memory is known: an allocator keeps what is freed, and fills up for seconds
_GROWN = 0.15  # of the memory at first
_LONG = 120  # steps that show that their time climbs
_LEAST = 64 * 2**20  # bytes: less may be the monitor's own, or an allocator that keeps pieces
_CROWDED = 0.5  # of the time that steps have gained, spent waiting for a processor: with other processes it was 0.99
_CLIMBS = 2.0  # times the time of a step at first, in steady growth


# Waiting for data -------------------------------------------------------------------------------------------------


def waits_for_data(case: Case) -> Iterator[Suspicion]:
    """data-loading-bound: most of the time of most steps goes by before the loader gives its batch."""
    chart = case.chart
    steps, waits = column(chart.scalar("time/data"))
    if len(waits) < _STEPS:
        return
    recent = waits[-_STEPS:]
    if not overall_median(recent) > _SHORTEST:
        return
    whole = _whole(chart, steps)
    if len(whole) != len(waits):
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = waits / whole
    if not overall_median(shares[-_STEPS:]) > _WAITS or not (shares[-_STEPS:] > _WAITS).mean() >= 0.8:
        return
    since, part = int(steps[_begun(shares > _WAITS)]), overall_median(shares[-_STEPS:])
    wait = overall_median(recent)
    workers = chart.scalar("machine/loader_workers")
    used = int(workers.values[-1, 0]) if len(workers) else 0
    more = f"more than the {used} workers" if used else "num_workers=4 or more"
    yield Suspicion(
        "data-loading-bound",
        "performance",
        since,
        0.95,
        Kind.FACT,
        evidence={"share": part, "wait": wait, "step_time": overall_median(whole[-_STEPS:]), "workers": used},
        advice=f"{share(part)} of each step is spent waiting for its batch ({duration(wait)} of "
        f"{duration(overall_median(whole[-_STEPS:]))}): give the DataLoader {more}, pin_memory=True and "
        "persistent_workers=True, or prepare the data beforehand.",
        check="It worked if time/data is a small part of step_time.",
    )


def _whole(chart: Chart, steps: Integers) -> Floats:
    """The time of these steps: the sum of their stages, or what the clock says."""
    parts = [series for name, series in chart.scalars("time/").items() if name.count("/") == 1]
    same = [series.values[:, 0] for series in parts if np.array_equal(series.steps, steps)]
    if len(same) > 1:
        total: Floats = np.sum(same, axis=0)
        return total
    times = chart.scalar("step_time")
    return times.values[:, 0] if np.array_equal(times.steps, steps) else np.zeros(0)


def _begun(holds: Flags, gap: int = 6) -> int:
    """The first of the values at the end that hold, but for a few in a row that do not."""
    held = np.flatnonzero(holds)
    breaks = np.flatnonzero(np.diff(held) > gap)
    return int(held[breaks[-1] + 1 if len(breaks) else 0]) if len(held) else len(holds)


# Memory -----------------------------------------------------------------------------------------------------------


def memory_grows(case: Case) -> Iterator[Suspicion]:
    """memory-growth: memory climbs look after look and does not settle, or the steps take longer and longer as they do
    where each goes back through all before it."""
    for name in ("machine/gpu_memory", "machine/process_memory"):
        found = _memory_climb(case.chart, name)
        if found is not None and found.last - found.first >= _LEAST:
            yield _growth(case.chart, name, found)
            return
    times, what = case.chart.scalar("time/backward"), "What follows the forward (loss and backward)"
    if not len(times):
        times, what = case.chart.scalar("step_time"), "A step"
    found = _climb(times, _LONG, _CLIMBS, 0.4) if len(times) >= _LONG else None
    if (
        found is not None
        and _in_order(times.values[-_LONG:, 0])
        and not _batch_changed(case.chart, int(times.steps[0]))
    ):
        yield _slower(found, what)


@until_news
def _memory_climb(chart: Chart, name: str) -> _Climb | None:
    series = chart.scalar(name)
    free = chart.scalar(f"{name}_free")
    least = _LOOKS if len(free) or "gpu" in name else _RESIDENT_LOOKS
    if len(series) < least or (len(free) and _climb(series, least, 1 + _GROWN, 0.75) is None):
        return None
    used = _in_use(series, free) if len(free) else series
    return _climb(used, least, 1 + _GROWN, 0.75) if len(used) >= least else None


def _in_use(resident: Series, free: Series) -> Series:
    """Return resident memory without what was freed and not given back, where both are known."""
    steps, mine, its = np.intersect1d(resident.steps, free.steps, return_indices=True)
    found = Series(resident.names)
    found.extend(steps, resident.values[mine] - free.values[its])
    return found


class _Climb:
    """A steady rise: since when, from what to what, and how much a step."""

    def __init__(self, since: int, first: float, last: float, rate: float) -> None:
        self.since, self.first, self.last, self.rate = since, first, last, rate


def _climb(series: Series, least: int, times: float, even: float) -> _Climb | None:
    """The steady rise at the end of a series, unless it settles."""
    steps, values = column(series)
    late = values[-least:]
    half = least // 2
    if not overall_median(values[-3:]) > times * values.min():
        return None
    if not late[half:].mean() > 1.02 * late[:half].mean() or not np.isfinite(values).all():
        return None
    parts = np.array([overall_median(part) for part in np.array_split(late, 4)])
    places = np.array([np.mean(part) for part in np.array_split(steps[-least:], 4)])
    rises = np.diff(parts) / np.diff(places)
    # What fills up rises ever more slowly.
    if not (rises > 0).all() or not rises[-1] > even * rises.max():
        return None
    start = _rise_began(steps, values, least)
    first, last = overall_median(values[start : start + 3]), overall_median(values[-3:])
    rate = slope(steps[start:], values[start:])
    # A line must explain it: what comes in one jump is another matter.
    line = values[start:].mean() + rate * (steps[start:] - steps[start:].mean())
    left = float(np.abs(values[start:] - line).mean())
    if not last > times * first or not left < 0.2 * (last - first):
        return None
    return _Climb(int(steps[start]), first, last, rate)


def _in_order(values: Floats) -> bool:
    """Whether nearly every value is above those before it (Spearman): another process on the machine is not so neat."""
    ranks = np.argsort(np.argsort(values))
    return bool(np.corrcoef(ranks, np.arange(len(values)))[0, 1] > 0.9)


def _rise_began(steps: Integers, values: Floats, least: int) -> int:
    """Where the line through the last values meets the level before them; the start where it always rose."""
    rate = slope(steps[-least:], values[-least:])
    level = float(values[:2].min() if least < 8 else overall_median(values[: least // 4]))
    middle = float(values[-least:].mean())
    meets = float(steps[-least:].mean()) - (middle - level) / rate if rate > 0 else float(steps[0])
    return int(np.clip(np.searchsorted(steps, meets), 0, len(values) - least))


def _growth(chart: Chart, name: str, found: _Climb) -> Suspicion:
    where = "GPU" if "gpu" in name else "process"
    total = chart.scalar("machine/gpu_memory_total")
    room = float(total.values[-1, 0]) - found.last if where == "GPU" and len(total) else float("nan")
    left = f", and is full in about {room / found.rate:,.0f} steps" if room > 0 and found.rate > 0 else ""
    return Suspicion(
        "memory-growth",
        "performance",
        found.since,
        0.85,
        Kind.PATTERN,
        evidence={"memory": name, "first": found.first, "now": found.last, "per_step": found.rate},
        advice=f"The memory of the {where} has grown from {size(int(found.first))} to {size(int(found.last))} since "
        f"step {found.since:,}, {size(int(found.rate))} a step{left}: keep numbers, not tensors with their graph "
        "(loss.item() or loss.detach()), and look at lists that grow with each step.",
        check="It worked if the memory stays level.",
    )


def _slower(found: _Climb, what: str) -> Suspicion:
    return Suspicion(
        "memory-growth",
        "performance",
        found.since,
        0.65,
        Kind.PATTERN,
        evidence={"first": found.first, "now": found.last, "per_step": found.rate},
        advice=f"{what} takes longer with every step, {duration(found.first)} at step {found.since:,} and "
        f"{duration(found.last)} now: it may go back through the graphs of all steps before. Detach what is carried "
        "from one step to the next (hidden states, running losses).",
        check="It worked if the time of a step stays level.",
    )


# Throughput -------------------------------------------------------------------------------------------------------


def slowed_down(case: Case) -> Iterator[Suspicion]:
    """throughput-drop: from one step on all take twice as long, with as much in a batch and the model as it was."""
    chart = case.chart
    steps, times = column(chart.scalar("step_time"))
    if len(times) < _BEFORE + _STEPS:
        return
    late = times[-_STEPS:]
    level = overall_median(times[-_BEFORE - _STEPS : -_STEPS])
    opening = overall_median(chart.scalar("step_time").opening[8:, 0])
    usual = min(level, opening)
    least = 1 / (1 - case.limits.throughput_drop)
    if not overall_median(late) > least * usual or not np.quantile(late, 0.1) > 1.4 * usual:
        return
    is_slow = times > 0.5 * (1 + least) * usual
    place = _begun(is_slow, gap=2)
    before = times[max(0, place - _BEFORE) : place]
    slow = times[place:]
    if len(before) < _BEFORE // 2 or len(slow) < _STEPS or slow.sum() < _LASTING or case.step - int(steps[place]) > 300:
        return
    was, now = overall_median(before), overall_median(slow)
    if not _are_two_states(before, slow):
        return
    since = int(steps[place])
    if _batch_changed(chart, since - _BEFORE):
        return
    stage = _slower_stage(chart, since)
    if stage == "data":
        return  # that is what waits for data
    waits = _waits_more(chart, since, was, now)
    yield _crowded(since, was, now, waits) if waits > _CROWDED else _slowed(case, since, was, now, stage)


def _slowed(case: Case, since: int, was: float, now: float, stage: str | None) -> Suspicion:
    throttled = case.chart.scalar("machine/gpu_throttled")
    is_hot = bool(len(throttled) and throttled.values[-1, 0] > 0)
    return Suspicion(
        "throughput-drop",
        "performance",
        since,
        0.85,
        Kind.PATTERN,
        severity="critical" if now > was / (1 - case.limits.critical_throughput_drop) else "warning",
        evidence={"before": was, "now": now, "stage": stage, "throttled": is_hot},
        advice=f"A step takes {duration(now)} since step {since:,}, {duration(was)} before, with as much in a batch"
        f"{f'; most of it is in {stage_name(stage)}' if stage else ''}"
        f"{'; the GPU is throttled' if is_hot else ''}: look for another process on the machine, heat or a power cap, "
        "a slow disk, or a debugging switch (anomaly detection, synchronisation) that was turned on.",
        check=f"It worked if step_time is back near {duration(was)}.",
    )


def _waits_more(chart: Chart, since: int, was: float, now: float) -> float:
    """Return the part of the time that a step has gained in which the main thread waits for a processor; 0 if that is
    not recorded."""
    series = chart.scalar("machine/cpu_wait")
    before, after = series.before(since, _BEFORE), series.since(since)
    if not len(after) or not now > was:
        return 0.0
    usual = overall_median(before) if len(before) else 0.0
    return (overall_median(after) * now - usual * was) / (now - was)


def _crowded(since: int, was: float, now: float, waits: float) -> Suspicion:
    """A note: other processes have taken the processors, which is no fault of the training."""
    return Suspicion(
        "throughput-drop",
        "performance",
        since,
        0.85,
        Kind.PATTERN,
        severity="info",
        evidence={"before": was, "now": now, "waits_for_processor": waits},
        advice=f"A step takes {duration(now)} since step {since:,}, {duration(was)} before. In "
        f"{share(min(waits, 1.0))} of the added time the main thread waits for a processor: other processes use the "
        "machine, or this one has more threads than cores. Run fewer at a time, or give each its own cores.",
        check=f"It worked if step_time is back near {duration(was)}.",
    )


def _are_two_states(before: Floats, slow: Floats) -> bool:
    """Apart from each other, and each of them even; what creeps up, or is slow now and then, is another matter."""
    was, now = overall_median(before), overall_median(slow)
    is_apart = np.quantile(before, 0.9) < np.quantile(slow, 0.05) and (slow > 1.5 * was).mean() > 0.95
    creeps = overall_median(slow[len(slow) // 2 :]) > 1.4 * overall_median(slow[: len(slow) // 2])
    # Processes that compete for a processor make steps of all lengths, and do so for a moment.
    is_even = np.quantile(slow, 0.9) < 2 * np.quantile(slow, 0.1)
    least = _SLOW if slow.sum() > 10 * _LASTING else 1.25 * _SLOW
    return bool(is_apart and is_even and not creeps and now >= least * was)


def _slower_stage(chart: Chart, since: int) -> str | None:
    """The stage of a step that has gained most time."""
    gains = {}
    for name, series in chart.scalars("time/").items():
        before, after = series.before(since, _BEFORE), series.since(since)
        if len(before) and len(after) and name.count("/") == 1:
            gains[name.removeprefix("time/")] = float(overall_median(after) - overall_median(before))
    return max(gains, key=lambda name: gains[name]) if gains else None


def _batch_changed(chart: Chart, since: int) -> bool:
    """Whether batches have become larger since, in examples or in values."""
    sizes = [chart.scalar("batch/size").since(since)]
    counts = chart.table("batch", "count").since(since)
    sizes += [counts[:, place : place + 1] for place in range(counts.shape[1])]
    for values in sizes:
        known = values[np.isfinite(values)]
        if len(known) >= 4 and overall_median(known[-8:]) > 1.15 * overall_median(known[:8]):
            return True
    return False


RULES = (waits_for_data, memory_grows, slowed_down)
