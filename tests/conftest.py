"""Shared by all tests."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator

import pytest
import torch

from holter import monitor

os.environ.pop("COLUMNS", None)  # workers of pytest get one, and tables would be as narrow as that
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anyone imports Triton: its kernels then run on the CPU


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """The models here are tiny: threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest) -> Iterator[None]:
    """A machine that stands still for a second is no fault of the code: who waits for a file waits longer here.

    Not where a test is about something that hangs; those are marked `hurried`.
    """
    with pytest.MonkeyPatch.context() as patched:
        if request.node.get_closest_marker("hurried") is None:
            patched.setattr(monitor, "_CLOSE_SECONDS", 20.0)
            patched.setattr(monitor.Monitor.flush, "__defaults__", (20.0,))
        yield


@pytest.fixture(scope="session")
def _forks_train() -> None:
    """Skip where torch's autograd refuses a fork of a process that has used it: its build for CUDA does."""
    _train_a_little()
    child = multiprocessing.get_context("fork").Process(target=_train_a_little)
    child.start()
    child.join()
    if child.exitcode:
        pytest.skip("torch's autograd cannot run in a fork of a process that has used it")


def _train_a_little() -> None:
    torch.ones(1, requires_grad=True).sum().backward()
