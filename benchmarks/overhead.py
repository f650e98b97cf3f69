"""What a monitor adds to a step of the demo's training: python -m benchmarks.overhead [--steps N] [--json FILE]

Two copies of the training, with the same weights and batches, take single steps in turn (without, with, with,
without, ...), so that whatever else the machine does hits both alike. A watched step ends when its record is in the
file: what the writing thread does is counted, though it would run beside the next step. The ratio is that of the
median steps; its interval comes from resampling the pairs. The mean of the middle half of the pairs, each by itself,
is steadier where the machine is shared. Processor time is that of all threads. The first line compares the training
with itself: that much is noise. A run spends a second in advance to see its beginning well; --skip 300 leaves those
pairs out, and shows how a training goes on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import holter
from benchmarks.machine import describe
from benchmarks.watched import leave_idle_time_out
from holter.demo import DemoSettings, Training

WARM_UP = 5  # pairs that are not counted at least: first steps allocate, plan and build tables
_ALONE: dict[str, Any] = {  # gradients and weights, and nothing else
    "budget": None,
    "diagnose": False,
    "updates": None,
    "optimizer_state": None,
    "activations": None,
    "stages": False,
    "machine": False,
}
CASES: dict[str, dict[str, Any] | None] = {
    "nothing (noise)": None,
    "rows every step": {**_ALONE, "every": 1, "weights": 100, "histograms": 100},
    "watch() as it comes": {},
    "histograms every step": {**_ALONE, "every": 1, "weights": 100, "histograms": 1},
    "all of it, no budget": {"budget": None},
}

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Result:
    """Milliseconds of the median step, and how much longer the second is, in percent."""

    case: str
    pairs: int
    without_ms: float
    with_ms: float
    added_percent: float  # by the ratio of the medians
    interval_percent: tuple[float, float]  # of that, 95 %
    middle_percent: float  # the mean of the middle half of the pairs, each by itself
    middle_interval_percent: tuple[float, float]  # of that, 95 %
    processor_percent: float  # as added_percent, by processor time
    own_account_percent: float | None  # what the monitor believes that it took
    rows_share: float | None  # of the steps whose gradients were measured
    diagnosis_percent: float | None = None  # of the time, its advance included, on the diagnosis


def measure(case: str, pairs: int, settings: DemoSettings | None = None, skip: int = WARM_UP) -> Result:
    options = CASES[case]
    settings = replace(settings or DemoSettings(), steps=pairs + skip)
    plain, watched = Training(settings), Training(settings)
    with tempfile.TemporaryDirectory() as directory:
        if options is None:
            times = _take_turns(partial(_step, plain), partial(_step, watched), settings.steps)
            return compare(case, times[skip:], None, None)
        run = Path(directory) / "run"
        with holter.watch(watched.model, watched.optimizer, run=run, **options) as monitor:
            times = _take_turns(partial(_step, plain), partial(_watched_step, watched, monitor), settings.steps)
            measured = int((monitor.history.series("gradient", "norm")[0] >= skip).sum())
            result = compare(case, times[skip:], 100 * monitor.cost, measured / pairs)
            return replace(result, diagnosis_percent=_diagnosis_percent(monitor))


def _diagnosis_percent(monitor: holter.Monitor) -> float | None:
    examination = monitor._examination
    if examination is None:
        return None
    return 100 * examination.seconds / examination.elapsed


def _step(training: Training) -> None:
    training.step(partial(torch.nn.utils.clip_grad_norm_, training.model.parameters()))


def _watched_step(training: Training, monitor: holter.Monitor) -> None:
    leave_idle_time_out(monitor)
    loss, _ = training.step(monitor.clip_grad_norm_)
    monitor.log(loss=loss)
    monitor.flush()


def _take_turns(first: Callable[[], None], second: Callable[[], None], pairs: int) -> Floats:
    """Seconds of every step by the clock and of the processor [pairs, 2 sides, 2]; the side that begins changes."""
    times = np.zeros((pairs, 2, 2))
    for pair in range(pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            began = time.perf_counter(), time.process_time()
            (first, second)[side]()
            times[pair, side] = time.perf_counter() - began[0], time.process_time() - began[1]
    return times


def compare(case: str, times: Floats, own_account: float | None, rows_share: float | None) -> Result:
    (without, processor_without), (with_, processor_with) = np.median(times, axis=0)
    resampled = np.random.default_rng(0).integers(len(times), size=(2000, len(times)))
    medians = np.median(times[resampled, :, 0], axis=1)  # [2000, 2]
    low, high = np.quantile(medians[:, 1] / medians[:, 0], (0.025, 0.975))
    pairs = np.log(times[:, 1, 0] / times[:, 0, 0])
    middle, middle_low, middle_high = np.exp([_middle(pairs), *np.quantile(_middle(pairs[resampled]), (0.025, 0.975))])
    return Result(
        case=case,
        pairs=len(times),
        without_ms=1e3 * float(without),
        with_ms=1e3 * float(with_),
        added_percent=_percent(with_ / without),
        interval_percent=(_percent(low), _percent(high)),
        middle_percent=_percent(middle),
        middle_interval_percent=(_percent(middle_low), _percent(middle_high)),
        processor_percent=_percent(processor_with / processor_without),
        own_account_percent=own_account,
        rows_share=rows_share,
    )


def _percent(ratio: float) -> float:
    return 100 * (float(ratio) - 1)


def _middle(values: Floats) -> Floats:
    """The mean of the middle half along the last axis."""
    quarter = values.shape[-1] // 4
    return np.asarray(np.sort(values, axis=-1)[..., quarter : values.shape[-1] - quarter].mean(axis=-1))


def _line(result: Result) -> str:
    low, high = result.interval_percent
    middle = "{:+.2f} % [{:+.2f}, {:+.2f}]".format(result.middle_percent, *result.middle_interval_percent)
    own = "" if result.own_account_percent is None else f", own account {result.own_account_percent:.2f} %"
    rows = "" if result.rows_share is None else f", rows in {100 * result.rows_share:.0f} % of the steps"
    diagnosis = "" if result.diagnosis_percent is None else f", diagnosis {result.diagnosis_percent:.2f} % of the time"
    return (
        f"{result.case:<22} {result.without_ms:7.1f} ms -> {result.with_ms:7.1f} ms  {result.added_percent:+5.2f} % "
        f"[{low:+.2f}, {high:+.2f}]  processor {result.processor_percent:+5.2f} %\n"
        f"{'':<22} middle half of pairs {middle}{own}{rows}{diagnosis}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="pairs of steps a case (default 100)")
    parser.add_argument("--skip", type=int, default=WARM_UP, help=f"pairs before those (default {WARM_UP})")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be given several times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the figures")
    arguments = parser.parse_args()
    parameters = sum(parameter.numel() for parameter in Training(DemoSettings()).model.parameters())
    print(f"ByteGPT, {parameters:,} parameters, torch {torch.__version__}, {torch.get_num_threads()} threads")
    results = []
    for case in arguments.case or CASES:
        results.append(measure(case, arguments.steps, skip=arguments.skip))
        print(_line(results[-1]), flush=True)
    if arguments.json is not None:
        machine = describe(torch.device("cpu"))
        figures = {"machine": machine, "parameters": parameters, "results": [asdict(result) for result in results]}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
