"""A thread that computes alone, whatever number of threads torch uses elsewhere.

A thread that asks torch for something large gets helpers of its own (OpenMP's), which stay as long as it does. While
there are more of those than processors, the helpers of the training go to sleep after every operation in place of
waiting for the next: steps of some milliseconds took half as long again. And where no thread can be begun any more,
OpenMP ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path

import torch


def compute_alone() -> None:
    """From now on the calling thread has no helpers; no other thread notices. Nothing happens where that is not to be
    had: torch itself can set the number only for all threads that are to come, and MKL's ways with it."""
    torch.get_num_threads()  # sets it in a thread that torch sees for the first time: what follows must come after
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).omp_set_num_threads(1)
    with contextlib.suppress(AttributeError, OSError, TypeError):
        library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        ctypes.CDLL(str(library)).MKL_Set_Num_Threads_Local(1)
