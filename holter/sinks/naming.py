"""Sinks by their names: for the command line, and for `watch(sinks=["wandb"])`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holter import sinks
from holter.sinks import MLflow, Sink, TensorBoard, Trackio, WandB

NAMES = ("console", "tensorboard", "wandb", "mlflow", "trackio")


def check(name: str) -> None:
    """Whether there is such a sink, and what it needs is installed."""
    if name not in NAMES:
        there_are = ", ".join(NAMES)
        raise ValueError(
            f"there is no sink {name!r}: there are {there_are}; or give an object with write, alert, close"
        )
    if name != "console" and find_spec(name) is None:
        raise ImportError(f"the sink {name!r} needs {name}: pip install 'holter[{name}]'")


def make(
    name: str, directory: Path, *, layers: int | str = 8, project: str | None = None, run_name: str | None = None
) -> Sink:
    """`directory` is for what is written to files of its own; `project` what W&B and Trackio call so, and MLflow an
    experiment. With a `run_name` the tool gets a new run of that name."""
    named: dict[str, Any] = {"project": project} if project else {}
    named |= {"name": run_name} if run_name else {}
    match name:
        case "console":
            return sinks.Console(layers=layers)
        case "tensorboard":
            return TensorBoard(directory / "tensorboard", layers=layers)
        case "wandb":
            return WandB(layers=layers, **named)
        case "mlflow":
            return MLflow(experiment=project, name=run_name, layers=layers)
        case "trackio":
            return Trackio(project or "holter", name=run_name, layers=layers)
    check(name)
    raise AssertionError("a name that was checked is made")
