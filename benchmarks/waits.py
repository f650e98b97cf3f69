"""Whether watching waits for the device, and what it keeps of its memory. Needs CUDA."""

from __future__ import annotations

import gc
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

import holter
from benchmarks.models import Trainable
from benchmarks.turns import told
from benchmarks.watched import EVERY_STEP, NOTHING, Training, Variant

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
_WARNING = "called a synchronizing CUDA operation"
_ERROR_STEPS = 20
_BIG_STEPS, _SMALL_STEPS = 50, 1000
_SMALL_WARM_UP = 400  # by then all looks at activations are kept that tell a dead unit from an idle one


@dataclass(frozen=True)
class Waits:
    """A variant -> what was counted in so many steps of it. The model's own waits are in all of them."""

    steps: int
    warned: dict[str, int]  # torch's sync debug mode: waits that torch itself knows to be some
    traced: dict[str, dict[str, int]]  # calls of WAITS by the profiler's trace, of every thread
    refused: dict[str, str | None]  # what 20 steps from the clip on met where a wait is an error; None: nothing


@dataclass(frozen=True)
class Memory:
    """Bytes of device memory."""

    peak: dict[str, int]  # a variant -> the most that was allocated while one copy alone took 5 steps
    peak_ratio: dict[str, float]  # to the training that nobody watches
    growth: dict[str, int]  # over 50 steps of the model, after 10
    small_model_growth: int  # over 1,000 steps of a small model, watched at every step, after 400


def measure_waits(trainings: Mapping[str, Training], steps: int) -> Waits:
    warned: dict[str, int] = {}
    traced: dict[str, dict[str, int]] = {}
    refused: dict[str, str | None] = {}
    for name, training in trainings.items():
        try:
            warned[name] = _warned(training.step, steps)
            traced[name] = _traced(training.step, steps)
            refused[name] = _refused(training)
        except Exception as error:
            told(f"counting the waits of {name}", error)
    return Waits(steps, warned, traced, refused)


def _warned(step: Callable[[], None], steps: int) -> int:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum(_WARNING in str(warning.message) for warning in caught)


def _traced(step: Callable[[], None], steps: int) -> dict[str, int]:
    """The profiler waits for the device itself when it ends; that is in the counts of every variant."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
    found = Counter(event.name for event in profile.events())
    return {name: found[name] for name in WAITS}


def _refused(training: Training) -> str | None:
    """From the clip to the log, that is wherever Holter has a part: the forward of a model may wait by itself."""
    known = _findings(training.monitor)
    try:
        for _ in range(_ERROR_STEPS):
            loss = training.backward()
            torch.cuda.set_sync_debug_mode("error")
            try:
                training.finish(loss)
            finally:
                torch.cuda.set_sync_debug_mode("default")
    except RuntimeError as error:
        return str(error).splitlines()[0]
    new = [advice for advice in _findings(training.monitor) if advice not in known]
    return new[0] if new else None


def _findings(monitor: holter.Monitor | None) -> list[str]:
    """A wait of Holter's own raises inside it and is contained, so it shows as a finding."""
    if monitor is None:
        return []
    monitor.flush()
    return [finding.advice for finding in monitor.findings]


def measure_memory(trained: Trainable, device: torch.device) -> Memory:
    variants = {
        NOTHING: Variant(),
        "watch()": Variant(watch={}),
        "watch(every=1, budget=None)": Variant(watch=EVERY_STEP),
    }
    peak: dict[str, int] = {}
    growth: dict[str, int] = {}
    for name, variant in variants.items():
        try:
            peak[name], growth[name] = _peak_and_growth(variant, trained, device)
        except Exception as error:
            told(f"the memory of {name}", error)
    least = peak.get(NOTHING)
    ratios = {name: bytes_ / least for name, bytes_ in peak.items()} if least else {}
    return Memory(peak, ratios, growth, _small_model_growth(device))


def _peak_and_growth(variant: Variant, trained: Trainable, device: torch.device) -> tuple[int, int]:
    _settle(None)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        training = Training(variant, trained, device, Path(directory) / "run", stack)
        for _ in range(5):
            training.step()
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return peak, _growth(training.step, training.monitor, _BIG_STEPS, device)


def _small_model_growth(device: torch.device) -> int:
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(32, 64, device=device)
    with ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "run"
        monitor = stack.enter_context(holter.watch(model, optimizer, run=run, **EVERY_STEP))

        def step() -> None:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.log(loss=loss)

        return _growth(step, monitor, _SMALL_STEPS, device, warm_up=_SMALL_WARM_UP)


def _growth(
    step: Callable[[], None], monitor: holter.Monitor | None, steps: int, device: torch.device, warm_up: int = 10
) -> int:
    for _ in range(warm_up):  # first steps allocate what is kept
        step()
    _settle(monitor)
    before = torch.cuda.memory_allocated(device)
    for _ in range(steps):
        step()
    _settle(monitor)
    return torch.cuda.memory_allocated(device) - before


def _settle(monitor: holter.Monitor | None) -> None:
    torch.cuda.synchronize()
    if monitor is not None:
        monitor.flush(10.0)
    gc.collect()
