"""The worker processes of torch's data loaders: how many live, and how much of the processors they take.

Which processes are this one's is known by multiprocessing, which starts them whatever the method; that they are
loader workers, by the name that torch gives them. Both are only read. Where that cannot be, nothing is observed.
"""

from __future__ import annotations

import multiprocessing.process
import os
from pathlib import Path

import torch.multiprocessing

_NAME = "pt_data_worker"


class LoaderWorkers:
    """For one thread, not the training's: a look reads one small file for each process that was started."""

    def __init__(self) -> None:
        # As old as the names of the workers: without it a count of none would be no observation.
        has_names = hasattr(torch.multiprocessing, "_set_thread_name")
        self._observed = has_names and Path("/proc/self/stat").is_file()
        self._seconds: dict[tuple[int, str], float] | None = None  # of each worker at the last look

    def scalars(self, passed: float, cores: float) -> dict[str, float]:
        """`machine/loader_workers`, and `machine/loader_cpu_share`: of so many cores, in the seconds that have passed
        since the last look. A worker that ended in between is not in it."""
        if not self._observed:
            return {}
        last, self._seconds = self._seconds, _workers()
        found = {"machine/loader_workers": float(len(self._seconds))}
        if last is not None and self._seconds and passed > 0:
            used = sum(seconds - last.get(worker, 0.0) for worker, seconds in self._seconds.items())
            found["machine/loader_cpu_share"] = used / passed / cores
        return found


def _workers() -> dict[tuple[int, str], float]:
    """Processor time in seconds of every live worker, by its number and the time of its start: numbers are reused."""
    children = list(getattr(multiprocessing.process, "_children", ()))
    found = {}
    for process in children:
        try:
            text = Path(f"/proc/{process.pid}/stat").read_text("utf-8", "replace")
        except OSError:  # it has ended
            continue
        # pid (name) state ppid ...; a name may hold spaces and brackets. See proc_pid_stat(5)
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        if head.partition("(")[2] == _NAME and len(fields) > 19 and fields[0] not in "ZX":
            ticks = int(fields[11]) + int(fields[12])  # utime and stime
            found[process.pid, fields[19]] = ticks / os.sysconf("SC_CLK_TCK")
    return found
