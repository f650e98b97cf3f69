"""A host process for each file of trainings, a few at a time; what they found, read back."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from zoo.result import Listed, Result, read, read_listed, result_file

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
class Done:
    """A training with its results; those that were not asked for are None. By fault: runs with one planted."""

    listed: Listed
    bare: Result | None
    watched: Result | None
    planted: dict[str, Result]


def run_all(modules: Iterable[str], options: Sequence[str], jobs: int, kept: Path | None) -> Iterator[list[Done]]:
    """Yield what each file has, as it is done. `options` choose (see `zoo.worker`); results are left in `kept`."""
    with tempfile.TemporaryDirectory(prefix="zoo-results-") as scratch, ThreadPoolExecutor(jobs) as pool:
        folder = kept or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        hosted = partial(_host, options=options, folder=folder)
        for future in as_completed([pool.submit(hosted, module) for module in modules]):
            yield future.result()


def _host(module: str, options: Sequence[str], folder: Path) -> list[Done]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "zoo.worker", module, str(folder), *options]
    listing, log = folder / f"{module}.list.json", folder / f"{module}.log"
    listing.unlink(missing_ok=True)
    with log.open("w") as told:
        host = subprocess.run(command, stdout=told, env={**os.environ, **QUIET, "PYTHONPATH": path})
    if not listing.exists():
        words = log.read_text("utf-8", "replace").strip() or f"its process ended with {host.returncode}"
        return [Done(Listed(f"{module}/*", error=words.splitlines()[-1]), None, None, {})]
    return [_read(listed, folder) for listed in read_listed(listing)]


def _read(listed: Listed, folder: Path) -> Done:
    def result(fault: str | None, is_watched: bool) -> Result | None:
        file = folder / result_file(listed.name, fault, is_watched)
        return read(file) if file.exists() else None

    planted = {fault: found for fault in listed.faults if (found := result(fault, True)) is not None}
    return Done(listed, result(None, False), result(None, True), planted)
