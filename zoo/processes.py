"""Trainings in processes of their own: bare, then watched, a few pairs side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zoo.listing import Listed
from zoo.listing import read as read_listing
from zoo.result import Result
from zoo.result import read as read_result

SECONDS = 400  # a training takes less than 60 on two free cores
ROOT = Path(__file__).parent.parent

# No network, no telemetry, no GPU, one thread; hashes of strings that are equal in both runs.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "WANDB_MODE": "disabled",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "YOLO_OFFLINE": "True",
    "PYTHONWARNINGS": "ignore",
    "MPLBACKEND": "agg",
    "PYTHONHASHSEED": "0",
}


@dataclass(frozen=True)
class Task:
    name: str
    fault: str | None = None


@dataclass(frozen=True)
class Pair:
    """Both runs of one training; a planted fault is only watched."""

    task: Task
    bare: Result | None
    watched: Result


def run_all(tasks: Iterable[Task], jobs: int, kept: Path | None) -> Iterator[Pair]:
    """Yield pairs as they are done. What workers wrote is left in `kept`, where that is given."""
    with tempfile.TemporaryDirectory(prefix="zoo-results-") as scratch, ThreadPoolExecutor(jobs) as pool:
        folder = kept or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for future in as_completed([pool.submit(partial(_run, task, folder)) for task in tasks]):
            yield future.result()


def list_all(modules: Iterable[str], jobs: int) -> list[Listed]:
    with tempfile.TemporaryDirectory(prefix="zoo-listing-") as scratch, ThreadPoolExecutor(jobs) as pool:
        found = pool.map(partial(_list, folder=Path(scratch)), modules)
        return [one for listed in found for one in listed]


def _list(module: str, folder: Path) -> list[Listed]:
    out = folder / f"{module}.json"
    error = _call(["zoo.listing", module, str(out)], out)
    return [Listed(f"{module}/*", error=error)] if error else read_listing(out.read_text())


def _run(task: Task, folder: Path) -> Pair:
    if task.fault is not None:
        return Pair(task, None, _train(task, folder, is_watched=True))
    return Pair(task, _train(task, folder, is_watched=False), _train(task, folder, is_watched=True))


def _train(task: Task, folder: Path, is_watched: bool) -> Result:
    words = [task.name, *([task.fault] if task.fault else []), "watched" if is_watched else "bare"]
    out = folder / ("-".join(words).replace("/", ".").replace(" ", "-") + ".json")
    arguments = ["zoo.worker", task.name, str(out)]
    arguments += ["--watched"] * is_watched + (["--fault", task.fault] if task.fault else [])
    error = _call(arguments, out)
    return Result(error=error) if error else read_result(out)


def _call(arguments: list[str], out: Path) -> str:
    """Run a module that writes `out`; return why it did not."""
    out.unlink(missing_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, **QUIET, "PYTHONPATH": path}
    log = out.with_suffix(".log")
    with log.open("w") as told:
        try:
            command = [sys.executable, "-m", *arguments]
            done = subprocess.run(command, stdout=told, stderr=told, timeout=SECONDS, env=environment)
        except subprocess.TimeoutExpired:
            return f"took more than {SECONDS} s"
    words = log.read_text("utf-8", "replace").strip()
    return "" if out.exists() else f"ended with {done.returncode}: {words[-2000:]}"
