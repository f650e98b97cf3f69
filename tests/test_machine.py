"""Machine: its numbers are those of psutil, of torch and of NVML; what cannot be read is absent."""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from holter import machine as machine_module
from holter.machine import THROTTLE, Machine, throttle_words

CUDA = torch.device("cuda", 1)
GPU = {"machine/gpu_utilisation", "machine/gpu_temperature", "machine/gpu_power", "machine/gpu_throttled"}
MEMORY = {f"machine/gpu_memory{what}" for what in ("", "_peak", "_reserved", "_total")}
PROCESS = {"machine/process_memory", "machine/process_memory_peak", "machine/cpu_share", "machine/cpu_cores"}
PROCESS |= {"machine/loader_workers"}
PROCESS |= {"machine/cpu_wait"}  # of Linux
FREE = "machine/process_memory_free"  # of glibc 2.33 and later, and not at every look
SLOWED = {"gpu_throttled": "power cap, heat (hardware)"}


# This process ---------------------------------------------------------------------------------------------------


def memory_is_wrong() -> bool:
    """Whether resident memory is more than 20 % from psutil's, now and when 200 MB have been added."""
    found = []
    for megabytes in (0, 200):
        held = np.ones(megabytes << 17)
        ours, theirs = Machine().scalars()["machine/process_memory"], psutil.Process().memory_info().rss
        found.append(abs(ours - theirs) > 0.2 * theirs)
        del held
    return any(found)


def test_resident_memory_is_psutils() -> None:
    assert not memory_is_wrong()


def test_memory_in_the_wrong_unit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sysconf", lambda name: 1024)
    assert memory_is_wrong()


def test_the_peak_stays() -> None:
    before = Machine().scalars()
    with mmap.mmap(-1, 200 << 20) as fresh:  # an array may come to lie where the heap holds pages already
        np.frombuffer(fresh, np.uint8)[:: mmap.PAGESIZE] = 1
    after = Machine().scalars()
    assert after["machine/process_memory_peak"] >= before["machine/process_memory"] + 150e6
    assert after["machine/process_memory"] <= after["machine/process_memory_peak"]


def test_without_proc_only_the_peak_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "Path", lambda path: Path("/nowhere" + path))
    found = Machine().scalars()
    assert set(found) - {FREE} == PROCESS - {"machine/process_memory", "machine/cpu_wait"}
    assert found["machine/process_memory_peak"] > 0.5 * psutil.Process().memory_info().rss


def test_what_is_freed_between_pieces_that_are_kept_is_resident_and_free() -> None:
    """Pieces of 16 KiB, of which every other one is freed; the heap may have had room for them before."""
    kept = [torch.zeros(4096) for _ in range(16_000)]
    full = Machine(every=0.0).scalars()
    del kept[::2]
    freed = Machine(every=0.0).scalars()
    resident, free = (freed[name] - full[name] for name in ("machine/process_memory", FREE))
    assert free > 0.8 * 8_000 * 16384 and resident > -0.2 * 8_000 * 16384
    del kept


class SlowHeap:
    """One whose free pieces take glibc 20 ms to count."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> SimpleNamespace:
        self.asked += 1
        time.sleep(0.02)
        return SimpleNamespace(fordblks=5)


def test_a_heap_that_takes_long_to_count_is_asked_rarely() -> None:
    heap, slow = machine_module.Heap(), SlowHeap()
    heap._ask = slow
    found = [heap.scalars(now=float(second)) for second in range(60)]
    assert found[0] == {FREE: 5.0} and 2 <= slow.asked <= 3


def test_without_glibc_what_is_free_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FREE in Machine().scalars()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    assert set(Machine().scalars()) == PROCESS


def waiting_beside(rivals: int) -> float:
    """The share of a third of a second in which this process, on one core with so many others, had to wait."""
    core, allowed = min(os.sched_getaffinity(0)), os.sched_getaffinity(0)
    busy = [sys.executable, "-S", "-c", f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"]
    others = [subprocess.Popen(busy) for _ in range(rivals)]
    os.sched_setaffinity(0, [core])
    try:
        time.sleep(0.3)  # until they run
        machine = Machine(every=0.0)
        began = time.perf_counter()
        while time.perf_counter() - began < 0.35:
            pass
        return machine.scalars()["machine/cpu_wait"]
    finally:
        os.sched_setaffinity(0, allowed)
        for other in others:
            other.kill()
            other.wait()


def test_a_busy_process_waits_where_others_want_its_core() -> None:
    assert waiting_beside(3) > 0.5


def test_a_process_that_sleeps_does_not_wait() -> None:
    machine = Machine(every=0.0)
    time.sleep(0.3)
    assert machine.scalars()["machine/cpu_wait"] < 0.1


def share_while(busy: bool) -> float:
    """Processor time over wall time, by our share and by psutil's counters: the difference."""
    machine, process = Machine(every=0.0), psutil.Process()
    machine.scalars()
    began, before = time.perf_counter(), process.cpu_times()
    while time.perf_counter() - began < 0.3:
        if not busy:
            time.sleep(0.01)
    passed, after = time.perf_counter() - began, process.cpu_times()
    truth = (after.user + after.system - before.user - before.system) / passed
    found = machine.scalars()
    return abs(found["machine/cpu_share"] * found["machine/cpu_cores"] - truth)


@pytest.mark.parametrize("busy", [True, False])
def test_the_processor_share_is_psutils(busy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_cores", lambda: 4.0)
    assert min(share_while(busy) for _ in range(3)) < 0.1  # psutil counts in ticks of 10 ms


def test_a_share_of_another_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", time.perf_counter)  # then it is always busy
    assert min(share_while(False) for _ in range(3)) > 0.1


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 8.0), ("150000 100000", 1.5), ("", 8.0)])
def test_cores_are_those_of_the_container(
    quota: str, cores: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(machine_module, "Path", lambda path: tmp_path / Path(path).name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(8))
    assert machine_module._cores() == cores


def test_it_looks_at_most_once_in_a_while_and_never_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(every=0.05)
    assert set(machine.scalars()) - {FREE} == PROCESS and machine.scalars() == {}
    time.sleep(0.06)
    assert set(machine.scalars()) - {FREE} == PROCESS
    time.sleep(0.06)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert machine.scalars() == {}


# The GPU --------------------------------------------------------------------------------------------------------


class NotSupported(Exception):
    pass


class Lost(Exception):
    pass


class FakeNvml:
    """Two GPUs as nvidia-ml-py gives them. `broken` maps a call to what it raises."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError_NotSupported = NotSupported

    def __init__(self) -> None:
        self.broken: dict[str, Exception] = {}
        self.open = 0
        self.bits = 0x1 | 0x4 | 0x40

    def _say(self, call: str, value: Any) -> Any:
        if call in self.broken:
            raise self.broken[call]
        return value

    def nvmlInit(self) -> None:
        self._say("init", None)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1
        self._say("shutdown", None)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        return int(self._say("handle", {"GPU-second": 1, "GPU-first": 0}[uuid]))

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return self._say("utilisation", SimpleNamespace(gpu=(10, 87)[handle], memory=1))

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:
        return int(self._say("temperature", (30, 65)[handle]))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:
        return int(self._say("power", (50_000, 412_345)[handle]))

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:
        return int(self._say("throttle", self.bits))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A machine with CUDA and NVML: torch's device 1 is the GPU "second"."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)  # type: ignore[arg-type]
    stats = {"allocated_bytes": {"all": {"current": 3, "peak": 5}}, "reserved_bytes": {"all": {"current": 8}}}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    properties = SimpleNamespace(total_memory=80, uuid="second")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    return fake


def gpu(machine: Machine) -> dict[str, float]:
    return {name: value for name, value in machine.scalars().items() if name.startswith("machine/gpu")}


FULL = {
    "machine/gpu_memory": 3,
    "machine/gpu_memory_peak": 5,
    "machine/gpu_memory_reserved": 8,
    "machine/gpu_memory_total": 80,
    "machine/gpu_utilisation": 0.87,
    "machine/gpu_temperature": 65,
    "machine/gpu_power": 412.345,
    "machine/gpu_throttled": 0x44,
}


def test_the_gpus_numbers_are_nvmls_and_torchs(nvml: FakeNvml) -> None:
    machine = Machine(CUDA, every=0.0)
    assert nvml.open == 0  # nothing is loaded on the training thread
    assert gpu(machine) == pytest.approx(FULL) and machine.notes() == SLOWED
    assert machine.notes() == {}, "told with the look that saw it"
    assert all(type(value) is float for value in machine.scalars().values())
    machine.close()
    machine.close()
    assert nvml.open == 0 and set(gpu(machine)) == MEMORY


def test_another_gpus_numbers_are_found(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "_handle", lambda pynvml, device: 0)
    assert gpu(Machine(CUDA)) != pytest.approx(FULL)


def test_without_an_id_the_number_is_trusted_only_if_all_gpus_are_visible(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu(Machine(CUDA)) == pytest.approx(FULL)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert set(gpu(Machine(CUDA))) == MEMORY


def test_a_number_that_this_gpu_lacks_is_absent_alone(nvml: FakeNvml) -> None:
    nvml.broken["power"] = NotSupported()
    machine = Machine(CUDA, every=0.0)
    for _ in range(2):
        assert set(gpu(machine)) == (MEMORY | GPU) - {"machine/gpu_power"}
    assert machine.notes() == SLOWED


@pytest.mark.parametrize("call", ["utilisation", "temperature", "power", "throttle"])
def test_a_failure_in_the_middle_switches_nvml_off_quietly(
    call: str, nvml: FakeNvml, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(CUDA, every=0.0)
    assert set(gpu(machine)) == MEMORY | GPU
    nvml.broken = {call: Lost("secret"), "shutdown": Lost()}
    assert MEMORY <= set(gpu(machine)) < MEMORY | GPU
    nvml.broken = {}
    assert set(gpu(machine)) == MEMORY and nvml.open == 0
    assert machine.notes() == {"gpu": "not observed: NVML failed (Lost)"} and set(machine.scalars()) >= PROCESS
    assert machine.notes() == {}, "once"
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_a_failure_that_is_not_contained_is_found(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module.Nvml, "_switch_off", lambda self, error: (_ for _ in ()).throw(error))
    nvml.broken["power"] = Lost()
    with pytest.raises(Lost):
        Machine(CUDA).scalars()


@pytest.mark.parametrize("call", ["init", "handle"])
def test_nvml_that_cannot_be_opened_is_not_observed(call: str, nvml: FakeNvml) -> None:
    nvml.broken[call] = Lost()
    machine = Machine(CUDA, every=0.0)
    for _ in range(2):
        assert set(gpu(machine)) == MEMORY
    assert nvml.open == 0 and machine.notes() == {"gpu": "not observed: NVML failed (Lost)"}


def test_nvml_that_is_not_installed_is_not_observed(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    machine = Machine(CUDA, every=0.0)
    assert set(gpu(machine)) == MEMORY and "not installed" in machine.notes()["gpu"]


def test_without_a_gpu_there_are_no_numbers_of_one(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in (None, torch.device("cpu")):
        assert set(Machine(device).scalars()) - {FREE} == PROCESS
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)  # and if nobody has, neither do we
    assert set(Machine(CUDA).scalars()) - {FREE} == PROCESS and nvml.open == 0


def test_throttle_bits_have_words() -> None:
    assert throttle_words(0.0) == () == throttle_words(float(0x1 | 0x2 | 0x100))  # idle, clocks that someone chose
    assert throttle_words(float(0x4 | 0x40)) == ("power cap", "heat (hardware)")
    assert len(throttle_words(float(sum(THROTTLE)))) == 5
