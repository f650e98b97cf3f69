"""E17: loader workers are counted as psutil counts them, and their processor time is psutil's."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import holter
from holter import loader_workers
from holter.loader_workers import LoaderWorkers
from tests.models import mlp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
WORKERS, SHARE = "machine/loader_workers", "machine/loader_cpu_share"


class Busy(Dataset):  # type: ignore[type-arg]
    """Every item costs some milliseconds of a processor."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.process_time() + 0.005
        while time.process_time() < until:
            pass
        return torch.full((12,), float(index))


def loader(workers: int, method: str | None = None) -> Iterator[torch.Tensor]:
    """A started one: every worker has made a batch."""
    batches = iter(DataLoader(Busy(), batch_size=1, num_workers=workers, multiprocessing_context=method))
    for _ in range(3 * max(workers, 1)):
        next(batches)
    return batches


def by_psutil() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.name() == "pt_data_worker"]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_live_workers_are_counted_however_they_were_started(method: str) -> None:
    look = LoaderWorkers()
    assert look.scalars(1.0, 1.0) == {WORKERS: 0.0}
    batches = loader(2, method)
    more = loader(1)
    assert look.scalars(1.0, 1.0)[WORKERS] == 3 == len(by_psutil())
    del batches, more
    assert look.scalars(1.0, 1.0) == {WORKERS: 0.0}


def test_processes_that_load_nothing_are_not_counted() -> None:
    other = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
    other.start()
    try:
        assert other.pid in {process.pid for process in psutil.Process().children()}
        assert LoaderWorkers().scalars(1.0, 1.0) == {WORKERS: 0.0}
    finally:
        other.kill()
        other.join()


def difference(look: Callable[[float, float], dict[str, float]]) -> float:
    """Processor seconds that two workers have used: by our share, less by psutil's counters."""
    batches = loader(2)
    look(1.0, 1.0)
    before = sum(sum(process.cpu_times()[:2]) for process in by_psutil())
    for _ in range(60):
        next(batches)
    found = look(2.0, 4.0)[SHARE] * 2.0 * 4.0
    return found - (sum(sum(process.cpu_times()[:2]) for process in by_psutil()) - before)


def test_their_processor_time_is_psutils() -> None:
    # 60 items take 0.3 seconds. Both count in ticks of 10 ms, and the workers go on between the two looks.
    assert min(abs(difference(LoaderWorkers().scalars)) for _ in range(3)) < 0.1


def test_processor_time_of_another_field_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the fields before utime and stime, faults of pages."""
    honest = Path.read_text

    def shifted(self: Path, *args: str) -> str:
        head, _, tail = honest(self, *args).rpartition(")")
        return f"{head}) {' '.join([tail.split()[0], *tail.split()[3:]])} 0 0"

    monkeypatch.setattr(loader_workers.Path, "read_text", shifted)
    assert all(abs(difference(LoaderWorkers().scalars)) > 0.1 for _ in range(3))


def test_a_number_that_is_used_again_is_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started 8 and then 9 ticks after the machine: what the first has used is not taken from the second's."""
    texts = [
        f"7 (pt_data_worker) S {' '.join(['0'] * 10)} {ticks} 0 {' '.join(['0'] * 6)} {start}"
        for ticks, start in ((500, 8), (300, 9))
    ]
    process = type("Process", (), {"pid": 7})()
    monkeypatch.setattr(loader_workers.multiprocessing.process, "_children", {process})
    look = LoaderWorkers()
    tick = 1 / loader_workers.os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(loader_workers.Path, "read_text", lambda self, *args: texts.pop(0))
    assert look.scalars(1.0, 1.0) == {WORKERS: 1.0}
    assert look.scalars(1.0, 1.0)[SHARE] == pytest.approx(300 * tick)


@pytest.mark.parametrize("text", ["", "7 (pt_data_worker) Z " + "0 " * 40, "7 (a) (pt_data_worker) S " + "0 " * 40])
def test_what_is_no_live_worker_is_not_counted(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process = type("Process", (), {"pid": 7})()
    monkeypatch.setattr(loader_workers.multiprocessing.process, "_children", {process})
    look = LoaderWorkers()
    monkeypatch.setattr(loader_workers.Path, "read_text", lambda self, *args: text)
    assert look.scalars(1.0, 1.0) == {WORKERS: 0.0}


def test_where_it_cannot_be_seen_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(loader_workers, "Path", lambda path: Path("/nowhere" + path))
        assert LoaderWorkers().scalars(1.0, 1.0) == {}
    monkeypatch.delattr(torch.multiprocessing, "_set_thread_name")
    assert LoaderWorkers().scalars(1.0, 1.0) == {}


def test_a_training_tells_its_workers() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with holter.watch(model, optimizer, run=False) as monitor:
        batches = loader(2)
        model(next(batches)).sum().backward()
        optimizer.step()
    assert monitor.history.scalar(WORKERS)[1].tolist() == [2.0]
