"""The machine under a training: memory, processors, GPU.

Everything here reads files, NVML or torch's own counters and waits for no device. It belongs on the writer's thread:
a look takes tens of microseconds, NVML at times milliseconds. What cannot be read is absent, "not observed", never 0.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holter.loader_workers import LoaderWorkers

# NVML's bits for what slows a busy GPU down against the user's will. Idleness and clocks that someone chose are not
# among them. https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html
THROTTLE = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}

_HEAP_SHARE = 1e-3  # of the time, at most, in which glibc counts its free pieces and nobody can allocate


def throttle_words(bits: float) -> tuple[str, ...]:
    """The words for the bits of a `machine/gpu_throttled`.

    >>> throttle_words(68.0)
    ('power cap', 'heat (hardware)')
    """
    return tuple(word for bit, word in THROTTLE.items() if int(bits) & bit)


class Machine:
    """This process, its loader workers and its device, at most every `every` seconds. For one thread, not the
    training's.

    Memory in bytes, temperature in degrees Celsius, power in watts, shares from 0 to 1; of memory and processor time
    that of the workers is not counted in.
    """

    def __init__(self, device: torch.device | None = None, *, every: float = 1.0) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._every, self._looked = every, -float("inf")
        self._cores = _cores()
        self._clock, self._processor = time.perf_counter(), time.process_time()
        self._waited = _waited()
        self._workers, self._heap = LoaderWorkers(), Heap()
        self._nvml: Nvml | None = None
        self._told = ""
        self._throttled: tuple[str, ...] = ()  # at the last look, until it is told
        self._process = os.getpid()

    def notes(self) -> dict[str, str]:
        """What slowed the GPU down at the last look; and why NVML's numbers are not observed, told once."""
        told = {"gpu_throttled": ", ".join(self._throttled)} if self._throttled else {}
        self._throttled = ()
        note = self._nvml.note if self._nvml is not None else ""
        if note != self._told:
            self._told = note
            told["gpu"] = f"not observed: {note}"
        return told

    def scalars(self) -> dict[str, float]:
        """The numbers of now; empty when the last look was a moment ago, and in a forked child."""
        now = time.perf_counter()
        if now - self._looked < self._every or os.getpid() != self._process:
            return {}
        self._looked = now
        found = {**_process_memory(), **self._heap.scalars(now), **self._processors(now), **self._gpu()}
        self._throttled = throttle_words(found.get("machine/gpu_throttled", 0.0))
        return found

    def close(self) -> None:
        if self._nvml is not None:
            self._nvml.close()

    def _processors(self, now: float) -> dict[str, float]:
        """Return the share of its cores that this process has used since the last look, and that its loader workers
        have; and the share of the time in which its main thread could run and had no core."""
        used, passed = time.process_time() - self._processor, now - self._clock
        self._processor, self._clock = self._processor + used, now
        share = {"machine/cpu_share": used / passed / self._cores} if passed > 0 else {}
        before, self._waited = self._waited, _waited()
        if before is not None and self._waited is not None and passed > 0:
            share["machine/cpu_wait"] = min(max((self._waited - before) / passed, 0.0), 1.0)
        return {**share, "machine/cpu_cores": self._cores, **self._workers.scalars(passed, self._cores)}

    def _gpu(self) -> dict[str, float]:
        if self._device is None or not torch.cuda.is_initialized():
            return {}
        if self._nvml is None:
            self._nvml = Nvml(self._device)  # here, since loading it may take long
        return {**_gpu_memory(self._device), **self._nvml.scalars()}


def _cores() -> float:
    """Cores that this process may use: by its affinity, and by the quota of its container (cgroup v2)."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):  # no cgroup v2: no quota that we could know
        return cores


def _waited() -> float | None:
    """Return the seconds for which the main thread has waited for a core, by Linux's scheduler; None elsewhere."""
    try:
        return int(Path("/proc/self/schedstat").read_text("ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


class Heap:
    """The bytes that this process has freed and glibc keeps: they are resident, and no part of what is in use.

    glibc counts its free pieces one by one and holds the lock of the heap meanwhile. Measured: 0.3 us for 100 pieces,
    1 ms for 25,000, 40 ms for 214,000. Where that takes long, it is asked less often.
    """

    def __init__(self) -> None:
        self._next = -float("inf")
        try:
            self._ask: Callable[[], _Mallinfo] | None = ctypes.CDLL(None).mallinfo2  # releases the GIL
            self._ask.restype = _Mallinfo
        except (AttributeError, OSError, TypeError):  # another C library, a glibc before 2.33, or Windows
            self._ask = None

    def scalars(self, now: float) -> dict[str, float]:
        if self._ask is None or now < self._next:
            return {}
        began = time.perf_counter()
        free = float(self._ask().fordblks)
        self._next = now + (time.perf_counter() - began) / _HEAP_SHARE
        return {"machine/process_memory_free": free}


class _Mallinfo(ctypes.Structure):
    """struct mallinfo2 of glibc's malloc.h."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks")),
        *((name, ctypes.c_size_t) for name in ("uordblks", "fordblks", "keepcost")),
    ]


def _process_memory() -> dict[str, float]:
    """Resident memory now and at its peak. Without /proc only the peak can be known."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
        status = Path("/proc/self/status").read_text("utf-8", "replace")
    except OSError:
        return _peak_by_resource()
    now = float(pages * os.sysconf("SC_PAGE_SIZE"))
    # Not ru_maxrss: on Linux a process inherits that of whoever started it.
    peak = next((1024.0 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), None)
    # The two files may be a moment apart, and the kernel sums its counters lazily.
    highest = {"machine/process_memory_peak": max(peak, now)} if peak is not None else _peak_by_resource()
    return {"machine/process_memory": now, **highest}


def _peak_by_resource() -> dict[str, float]:
    try:
        import resource
    except ImportError:  # Windows
        return {}
    unit = 1.0 if sys.platform == "darwin" else 1024.0
    return {"machine/process_memory_peak": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def _gpu_memory(device: torch.device) -> dict[str, float]:
    """What torch's allocator holds, by its own counters. The peak is since the user last reset it."""
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # memory_stats() without flattening 100 of them
    if not stats:
        return {}
    allocated = stats["allocated_bytes"]["all"]
    return {
        "machine/gpu_memory": float(allocated["current"]),
        "machine/gpu_memory_peak": float(allocated["peak"]),
        "machine/gpu_memory_reserved": float(stats["reserved_bytes"]["all"]["current"]),
        "machine/gpu_memory_total": float(torch.cuda.get_device_properties(device).total_memory),
    }


class Nvml:
    """NVIDIA's own numbers of one GPU, by the optional package nvidia-ml-py. The first failure switches it off."""

    def __init__(self, device: torch.device) -> None:
        self.note = ""
        self._library: Any = None
        self._readings: dict[str, Callable[[], float]] = {}
        try:
            import pynvml

            pynvml.nvmlInit()
            self._library = pynvml
            self._readings = _readings(pynvml, _handle(pynvml, device))
        except ImportError:
            self.note = "the package nvidia-ml-py is not installed (pip install holter[gpu])"
        except Exception as error:  # of the driver or of an older package, whatever its class
            self._switch_off(error)

    def scalars(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, read in list(self._readings.items()):
            try:
                found[name] = read()
            except Exception as error:
                if not isinstance(error, self._library.NVMLError_NotSupported):
                    self._switch_off(error)
                    return found
                del self._readings[name]  # this GPU has no such number; it has others
        return found

    def close(self) -> None:
        library, self._library, self._readings = self._library, None, {}
        if library is not None:
            try:
                library.nvmlShutdown()
            except Exception as error:  # the driver is gone already
                self.note = self.note or f"NVML could not be closed ({type(error).__name__})"

    def _switch_off(self, error: Exception) -> None:
        self.note = f"NVML failed ({type(error).__name__})"
        self.close()


def _handle(pynvml: Any, device: torch.device) -> Any:
    """By the GPU's own id: its number in CUDA is another one where CUDA_VISIBLE_DEVICES hides some."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is not None:
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        raise LookupError("this torch does not tell which GPU it uses")
    return pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)


def _readings(pynvml: Any, handle: Any) -> dict[str, Callable[[], float]]:
    def throttled() -> float:
        return float(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & sum(THROTTLE))

    return {
        "machine/gpu_utilisation": lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
        "machine/gpu_temperature": lambda: float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
        "machine/gpu_power": lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000.0,  # it gives milliwatts
        "machine/gpu_throttled": throttled,
    }
