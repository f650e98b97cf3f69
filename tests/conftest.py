"""Shared by all tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The models here are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)
