"""Shared by all tests."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.pop("COLUMNS", None)  # workers of pytest get one, and tables would be as narrow as that
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anyone imports Triton: its kernels then run on the CPU


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The models here are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)
