"""monitor.batches: the batches are the loader's own, and so is its end."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from holter.stages import Stages, batches


class Waits:
    def __init__(self) -> None:
        self.told: list[str] = []

    def wait_began(self) -> None:
        self.told.append("began")

    def waited(self, seconds: float) -> None:
        assert seconds >= 0
        self.told.append("waited")


def test_batches_are_the_loaders_own_at_every_iteration() -> None:
    data, waits = [object(), object(), None], Waits()
    wrapped = batches(data, waits)
    assert len(wrapped) == 3  # type: ignore[arg-type]
    for _ in range(2):
        assert all(ours is theirs for ours, theirs in zip(wrapped, data, strict=True))
    assert waits.told == 2 * 4 * ["began", "waited"]  # the end of the data is an answer too


def test_a_loader_without_a_length_has_none() -> None:
    wrapped = batches(iter([1, 2]), Waits())
    assert not hasattr(wrapped, "__len__") and bool(wrapped) and list(wrapped) == [1, 2]


class Loader:
    """Gives a new generator each time, and knows whether it was closed."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.closed, self.error = 0, error

    def __iter__(self) -> Iterator[int]:
        try:
            yield 1
            if self.error is not None:
                raise self.error
            yield 2
        finally:
            self.closed += 1


def leave(wrapped: Any) -> None:
    for _ in wrapped:
        break


def test_leaving_the_loop_ends_the_loaders_generator() -> None:
    loader = Loader()
    leave(batches(loader, Waits()))
    assert loader.closed == 1


def test_an_iterator_of_the_users_own_goes_on_after_a_break() -> None:
    """As with a plain for statement; closing it, the planted fault, would lose the second half."""
    numbers = (number for number in range(4))
    leave(batches(numbers, Waits()))
    assert list(batches(numbers, Waits())) == [1, 2, 3]


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), GeneratorExit()])
def test_what_a_loader_raises_passes_unchanged(error: BaseException) -> None:
    loader, waits = Loader(error), Waits()
    with pytest.raises(type(error)) as caught:
        list(batches(loader, waits))
    assert caught.value is error and loader.closed == 1


def test_what_the_loop_raises_ends_the_loader() -> None:
    loader = Loader()
    with pytest.raises(ZeroDivisionError):
        for _ in batches(loader, Waits()):
            1 / 0  # noqa: B018
    assert loader.closed == 1


def test_a_batch_is_let_go_before_the_next_is_asked_for() -> None:
    alive: list[bool] = []

    def loader() -> Iterator[Tensor]:
        tensor = torch.ones(1)
        gone = weakref.ref(tensor)
        yield tensor
        del tensor
        alive.append(gone() is not None)
        yield torch.ones(1)

    iterator = iter(batches(loader(), Waits()))
    next(iterator)
    next(iterator)
    assert alive == [False]


def slow_collate(items: list[Tensor]) -> Tensor:
    time.sleep(0.02)
    return torch.stack(items)


def test_a_loader_with_workers_gives_the_same_batches_and_ends_them() -> None:
    data = torch.arange(24.0).reshape(12, 2)
    loader = torch.utils.data.DataLoader(list(data), 4, num_workers=1, collate_fn=slow_collate)  # type: ignore[arg-type]
    stages = Stages()
    wrapped = batches(loader, stages)
    assert len(wrapped) == 3  # type: ignore[arg-type]
    iterator: Any = iter(wrapped)
    found = [next(iterator)]
    workers = iterator.gi_frame.f_locals["iterator"]._workers
    found += iterator
    assert torch.equal(torch.cat(found), data)
    assert not any(worker.is_alive() for worker in workers)
    times = stages.finish().seconds()
    assert times["data"] / times["whole"] > 0.9
    leave(wrapped)
