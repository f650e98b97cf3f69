"""On what a benchmark ran: enough to compare figures, nothing about whose machine it is."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import holter

_PACKAGES = ("torch", "triton", "transformers", "numpy", "tensorboard", "wandb")
ROOT = Path(__file__).parent.parent


def describe(device: torch.device) -> dict[str, str | None]:
    return {
        "machine": device_name(device),
        "device": device.type,
        "processor_cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "holter": holter.__version__,
        **{package: _version(package) for package in _PACKAGES},
        "commit": _output("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} processor"


def result_path(machine: str, date: str) -> Path:
    """With day and time, so that no result replaces another."""
    name = re.sub(r"[^a-z0-9]+", "-", machine.lower()).strip("-")
    return ROOT / "benchmarks" / "results" / f"{name}-{date[:16].replace(':', '')}.json"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _output(*command: str) -> str | None:
    """What a command prints, or None where it is not there or has nothing to say."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
