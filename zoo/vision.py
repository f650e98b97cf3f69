"""Makes torchvision importable beside a torch without CUDA: its wheels on PyPI link libtorch_cuda.

Importing it, and so transformers or timm, then fails at operators that nobody declared.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch


def make_torchvision_importable() -> None:
    """Declare the two operators that its import asks for, where its library cannot be loaded.

    They have no implementation: no training here calls them.
    """
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    try:
        for library in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(library)
    except OSError:
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
