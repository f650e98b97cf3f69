"""Shared by all tests."""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"  # before anyone imports Triton: its kernels run here without a GPU

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The models here are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)
