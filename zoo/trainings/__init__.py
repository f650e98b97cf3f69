"""Every file of trainings. Each is named after its package, and is imported in processes of its own only."""

from __future__ import annotations

from importlib import import_module

from zoo.training import Training

MODULES: tuple[str, ...] = (
    "transformers_text",  # the longest come first: files are trained side by side
    "transformers_other",
    "accelerate",
    "diffusers",
    "fastai",
    "gpytorch",
    "lightly",
    "lightning",
    "peft",
    "pyro",
    "pytorch_forecasting",
    "pytorch_optimizer",
    "pytorch_tabnet",
    "schedulefree",
    "segmentation_models",
    "sentence_transformers",
    "skorch",
    "stable_baselines3",
    "timm",
    "torch_geometric",
    "torchrl",
    "trl",
    "ultralytics",
)


def modules_of(package: str) -> tuple[str, ...]:
    """Return the files of a package, by the first part of a training's name: "a-b" has a_b and a_b_more."""
    start = package.replace("-", "_")
    return tuple(name for name in MODULES if name == start or name.startswith(f"{start}_"))


def load(module: str) -> tuple[Training, ...]:
    found: tuple[Training, ...] = import_module(f"{__name__}.{module}").TRAININGS
    return found
