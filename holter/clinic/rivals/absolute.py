"""The absolute thresholds of the requirements (C2-C5, E2, E32, E33), each as it stands, with no baseline."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from holter.clinic.rivals.alarms import UNNAMED, Flags, Floats, in_order, series, told, told_of_layers
from holter.diagnosis.finding import Finding
from holter.history import History

VANISHED, CONSECUTIVE = 1e-7, 3  # C2
EXPLODED = 100.0  # C3
JUMP = 10.0  # C4
WINDOW, VARIED, PLATEAU = 10, 2.0, 0.99  # C5
LARGE_RATIO, SMALL_RATIO = 0.1, 1e-7  # E2
SPIKE, FALLEN, SPREAD = 10.0, 0.1, 100.0  # E33
LEAST_NORM, MOST_NORM = 0.001, 100.0  # E33
SLOWER = 5.0  # E32: throughput down by 80 %


def absolute(history: History) -> tuple[Finding, ...]:
    rules = (_gradients, _norm, _loss, _ratios, _throughput)
    return in_order(finding for rule in rules for finding in rule(history))


def _gradients(history: History) -> Iterator[Finding]:
    steps, layers, norms = series(history, "gradient", "norm")
    if not len(steps):
        return
    small = norms < VANISHED
    lasting = small.copy()
    for back in range(1, CONSECUTIVE):
        lasting[back:] &= small[:-back]
        lasting[:back] = False
    yield from told_of_layers(steps, layers, lasting, "vanishing-gradient")
    yield from told_of_layers(steps, layers, norms > EXPLODED, UNNAMED)
    jumps = np.zeros_like(small)
    with np.errstate(divide="ignore", invalid="ignore"):
        change = norms[1:] / norms[:-1]
        spread = np.fmax.reduce(norms, axis=1) / np.fmin.reduce(np.where(norms > 0, norms, np.nan), axis=1)
    jumps[1:] = (change > JUMP) | (change < 1 / JUMP)
    yield from told_of_layers(steps, layers, jumps, UNNAMED)
    yield from told(steps, spread > SPREAD, UNNAMED, "layer")


def _norm(history: History) -> Iterator[Finding]:
    steps, norms = history.scalar("gradient_norm")
    if len(norms):
        out = (norms > MOST_NORM) | (norms < LEAST_NORM) | (norms < FALLEN * norms[0])
        yield from told(steps, out, UNNAMED, "optimizer")


def _loss(history: History) -> Iterator[Finding]:
    steps, losses = history.scalar("loss")
    if len(losses) < WINDOW:
        return
    windows = np.lib.stride_tricks.sliding_window_view(losses, WINDOW)
    yield from told(steps, ~np.isfinite(losses), UNNAMED, "loss")
    yield from told(steps, _late(windows.std(axis=1) > VARIED * np.abs(windows.mean(axis=1))), UNNAMED, "loss")
    flat: Flags = windows.min(axis=1) > PLATEAU * windows[:, 0]
    yield from told(steps, _late(flat), UNNAMED, "loss")
    before: Floats = np.median(windows[:-1], axis=1)
    yield from told(steps[WINDOW:], losses[WINDOW:] > SPIKE * before, UNNAMED, "loss")


def _late(alarms: Flags) -> Flags:
    """Of windows: known at the last of their steps."""
    return np.concatenate([np.zeros(WINDOW - 1, dtype=bool), alarms])


def _ratios(history: History) -> Iterator[Finding]:
    steps, layers, ratios = series(history, "update", "planned_ratio")
    yield from told_of_layers(steps, layers, ratios > LARGE_RATIO, "lr-too-high", "lr")
    yield from told_of_layers(steps, layers, ratios < SMALL_RATIO, "lr-too-low", "lr")


def _throughput(history: History) -> Iterator[Finding]:
    steps, seconds = history.scalar("step_time")
    if len(seconds) > WINDOW:
        usual = float(np.median(seconds[1 : WINDOW + 1]))
        yield from told(steps, seconds > SLOWER * usual, "throughput-drop", "performance")
