"""The trainings of one file: python -m zoo.worker MODULE FOLDER [--only PATTERN] [--healthy] [--reuse bare] ...

`zoo.processes` starts it, with an environment that keeps packages off the network. The file and its packages are
imported once; then every training, bare or watched, is a process of its own, forked from here. The bare run never
imports Holter.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import numpy
import torch
import torch._dynamo  # every optimizer imports it at its first step: once, before trainings are forked

from zoo.reference import Reference
from zoo.result import Listed, Result, result_file, write, write_listed
from zoo.sight import hashes, seen_bare, seen_watched
from zoo.trainee import Trainee, modules_of
from zoo.training import Training
from zoo.trainings import load
from zoo.vision import make_torchvision_importable

SEED = 17
SECONDS = 600  # a training takes less than 60 on two free cores

Task = tuple[Training, str | None, bool]  # what, with which fault, whether it is watched


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", action="append")
    parser.add_argument("--reuse", choices=("bare", "all"))
    for option in ("--healthy", "--faults", "--list"):
        parser.add_argument(option, action="store_true")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    make_torchvision_importable()
    try:
        trainings = [one for one in load(asked.module) if is_asked(one.name, asked.only)]
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)
    write_listed([Listed(one.name, one.steps, one.faults) for one in trainings], folder / f"{asked.module}.list.json")
    tasks = [task for one in trainings for task in tasks_of(one)] if not asked.list else []
    if asked.reuse is not None:
        old = [task for task in tasks if (folder / result_file(task[0].name, *task[1:])).exists()]
        tasks = [task for task in tasks if task not in old or (asked.reuse == "bare" and task[2])]
    for task in tasks:
        stale = folder / result_file(task[0].name, *task[1:])
        stale.unlink(missing_ok=True)
        shutil.rmtree(stale.with_suffix(""), ignore_errors=True)
    for training, fault, is_watched in tasks:
        if not (asked.healthy if fault else asked.faults):
            run_apart(training, fault, is_watched, folder / result_file(training.name, fault, is_watched))


def is_asked(name: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def tasks_of(training: Training) -> Iterator[Task]:
    yield training, None, False
    yield training, None, True
    for fault in training.faults:
        yield training, fault, True


def run_apart(training: Training, fault: str | None, is_watched: bool, out: Path) -> None:
    """Train in a forked process; its end is waited for, but not for ever."""
    started = time.monotonic()
    child = os.fork()
    if child == 0:
        _train_and_leave(training, fault, is_watched, out)
    status = None
    while status is None and time.monotonic() - started < SECONDS:
        found, ended = os.waitpid(child, os.WNOHANG)
        status = ended if found else None
        time.sleep(0.05)
    if status is None:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not out.exists():
        why = f"took more than {SECONDS} s" if status is None else f"its process ended with status {status}"
        write(Result(error=why), out)
    words = (training.name, f"with {fault}" if fault else "watched" if is_watched else "bare")
    print(*words, f"{time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def _train_and_leave(training: Training, fault: str | None, is_watched: bool, out: Path) -> None:
    """Never returns to the host's loop."""
    code = 1
    try:
        with out.with_suffix(".log").open("w") as log, tempfile.TemporaryDirectory(prefix="zoo-") as scratch:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            os.environ["HF_HOME"] = scratch
            os.chdir(scratch)  # packages write beside where they are started
            try:
                result = train(training, fault, is_watched, Path(scratch))
            except Exception:
                result = Result(error=traceback.format_exc())
            write(result, out)
            for run in Path(scratch).glob("run-*"):
                shutil.copytree(run, out.with_suffix("") / run.name, dirs_exist_ok=True)
            os.chdir("/")
        code = 0
    finally:
        os._exit(code)


def train(training: Training, fault: str | None, is_watched: bool, directory: Path) -> Result:
    settle()
    reference = Reference(measures=not is_watched)
    trainee = Trainee(directory, reference, fault, is_watched)
    modules = modules_of(training.run(trainee))
    seen = tuple(seen_watched(watch) if is_watched else seen_bare(watch) for watch in trainee.watches)
    return Result(seen=seen, hashes=hashes(modules), seconds=reference.seconds)


def settle() -> None:
    """Make the training the same at every call."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    random.seed(SEED)
    numpy.random.seed(SEED)  # noqa: NPY002  # packages draw from the global state
    torch.manual_seed(SEED)


if __name__ == "__main__":
    main()
