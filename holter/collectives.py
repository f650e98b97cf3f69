"""Time in collectives, as far as it can be had without touching anything of the user's: for a DDP model only.

torch.distributed has no public hook around its collectives; to time them one would have to replace its functions or
the user's process group, which a monitor must not do. DDP's reducer takes its own times: of its first 10 iterations
and then of every 100th. With FSDP, or where the module inside the DDP is watched, nothing is observed. The reducer's
logging data are a prototype of torch's: if they change, the same.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
from torch import nn

_FIRST, _PACE = 12, 20  # calls that look: the first ones, then every so many
_STEPS = 64  # whose ends are remembered, more than lie between two looks


class Reduction(NamedTuple):
    """The step whose gradients were reduced, and the scalars of it."""

    step: int
    scalars: dict[str, float]


class CollectiveClock:
    """For the training thread, after the optimizer's step: during a backward the reducer holds its lock, and a Python
    communication hook waits for the GIL meanwhile, so that another thread could block both. A look takes 100 us."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._calls = 0
        self._iteration: int | None = None  # that was told last
        self.restart()

    def restart(self) -> None:
        """What follows are steps of other numbers."""
        self._began = time.time_ns()
        self._ends: deque[tuple[int, int]] = deque(maxlen=_STEPS)  # numbers of steps and when they ended

    def look(self, step: int) -> Reduction | None:
        """`machine/collective_time`: seconds in which the gradients of one backward were reduced;
        `machine/collective_exposed`: those of them not hidden behind its computation.

        Of each iteration once. The reducer knows its times only when the next forward begins, so this is most often
        the step before the one that has just ended.
        """
        self._ends.append((step, time.time_ns()))
        self._calls += 1
        data = self._logging_data() if self._calls <= _FIRST or self._calls % _PACE == 0 else {}
        keys = ("iteration", "backward_comm_time", "backward_comm_time_end", "backward_compute_comm_overlap_time")
        known = [data[key] for key in keys if isinstance(data.get(key), int)]
        if len(known) < len(keys) or known[0] == self._iteration:
            return None
        self._iteration, comm, ended, overlap = known
        taken = self._step_of(ended)
        if taken is None:
            return None
        # In nanoseconds; clamped, since the two are taken by different events.
        exposed = 1e-9 * max(comm - overlap, 0)
        return Reduction(taken, {"machine/collective_time": 1e-9 * comm, "machine/collective_exposed": exposed})

    def _step_of(self, moment: int) -> int | None:
        """The step that was being taken then; None before the first."""
        if moment < self._began:
            return None
        return next((step for step, ended in self._ends if moment <= ended), None)

    def _logging_data(self) -> dict[str, Any]:
        model = self._model()
        if model is None or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return {}
        if not isinstance(model, nn.parallel.DistributedDataParallel):
            return {}
        read = getattr(model, "_get_ddp_logging_data", None)
        return dict(read()) if read is not None else {}
