"""Where the time of a step goes: waiting for data, forward, backward, optimizer, and everything else.

The training thread tells moments; each one ends a stretch and opens the next. On the CPU a stretch is measured by the
clock. On CUDA, where the host runs ahead, it is measured on the device, between two timing events on the training's
own stream: nobody waits for them, they are read when they have passed. The stretches of a step add up to the whole.

**Waiting for data** costs a device only what it stands idle for. An event before the loader is asked and one when it
has answered bound that: with work still queued the device meets both at the same moment, and the wait was free; with
an empty queue it meets them as far apart as it stood idle. So of a wait counts min(host's wait, time between the two).

What the moments cannot tell: the loss counts as backward, since it lies behind the forward. So does what a closure
does after its forward, the update of its optimizer included. A second backward after an optimizer's step, without
a forward, counts as other. Of a model on several devices the stream of one is timed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch

STAGES = ("data", "forward", "backward", "optimizer", "other")
PENDING = 64  # steps whose times nobody has read yet; the oldest is given up for the next one
_FOLD, _MOST = 128, 1024  # moments of one step: summed up in such portions; kept while the device has not got there
DEVICE_PACE = 10  # steps: on a device every moment is a call of CUDA, and what is known late a record of its own
_Event = torch.cuda.Event


class _Moment(NamedTuple):
    opens: str
    clock: float
    event: _Event | None  # on CUDA
    waited: float = 0.0  # of the stretch that ends here, the host waited so long for data

    def is_past(self) -> bool:
        return self.event is None or bool(self.event.query())


class StageTimes:
    """The times of one step; on CUDA they are known a little later. Read by one thread, whichever it is."""

    def __init__(
        self, moments: Sequence[_Moment], earlier: dict[str, float], observed: set[str], unused: deque[_Event]
    ) -> None:
        self._moments: Sequence[_Moment] | None = moments
        self._earlier, self._observed, self._unused = earlier, frozenset(observed), unused
        self._seconds: dict[str, float] = {}

    @property
    def is_expected(self) -> bool:
        """Whether there is something that nobody has read yet."""
        return bool(self._moments)

    def ready(self) -> bool:
        """Whether the device has done this step; never waits."""
        return all(moment.is_past() for moment in self._moments or ())

    def seconds(self) -> dict[str, float]:
        """Seconds by stage, and the `whole`; empty while not ready, and for a step that could not be observed.

        A stage that nobody has ever told of is absent, not 0: data without `batches`, forward and backward of a model
        whose forwards cannot be seen. Its time is in `other`.
        """
        moments = self._moments
        if moments and self.ready():
            spent = _sum(self._earlier, _spent(moments))
            self._seconds = {stage: spent.get(stage, 0.0) for stage in STAGES if stage in self._observed}
            self._seconds["whole"] = sum(spent.values())
            self._moments = None
            self._unused.extend(moment.event for moment in moments if moment.event is not None)
        return dict(self._seconds)

    def give_up(self) -> None:
        """Lets go of the events. They are not used again: who reads them at this moment still may."""
        self._moments = None


class Stages:
    """Told the moments of one training thread; costs a microsecond a moment on the CPU, an event record on CUDA.

    `device` is where the training computes; None or a CPU: the host's clock is the truth. It may be set at any time,
    and the next step is timed there. Other kinds of devices are asynchronous without these events: not observed.
    On CUDA one step in `pace` is timed: not those whose number is a multiple of it, at which others like to measure.
    """

    def __init__(self, device: torch.device | None = None, pace: int = 1) -> None:
        self.device, self._pace, self._steps = device, pace, 0
        self._timed_on: torch.device | None = None
        self._stage, self._observed = "other", {"other"}
        self._moments: list[_Moment] = []
        self._earlier: dict[str, float] = {}  # of this step, where it has very many moments
        self._has_events = False
        self._is_lost = False  # this step cannot be observed, or is not to be
        self._unused: deque[_Event] = deque(maxlen=_MOST)
        self._pending: deque[StageTimes] = deque(maxlen=PENDING)

    def forward_began(self) -> None:
        """Of a training forward; those of an evaluation are not told."""
        self._open("forward")

    def forward_ended(self) -> None:
        self._open("backward")

    def step_began(self) -> None:
        self._open("optimizer")

    def step_ended(self) -> None:
        self._open("other")

    def measuring(self) -> None:
        """What follows is Holter's own work, not the training's: other, until the next moment."""
        self._open("other")

    def wait_began(self) -> None:
        """Before the loader is asked. Without it, a wait on CUDA is bounded less tightly: by all since the moment
        before, where the device may have worked."""
        self._open(self._stage)

    def waited(self, seconds: float) -> None:
        """The loader took so long, until now."""
        self._open(self._stage, max(seconds, 0.0))
        self._observed.add("data")

    def finish(self) -> StageTimes:
        """The step is over and the next one begins: once for every record, after `step_ended` or a skipped step."""
        if self._moments:  # else nothing was told since the beginning
            self._open("other")
        moments = [] if self._is_lost else self._moments
        times = StageTimes(moments, self._earlier, self._observed, self._unused)
        self._steps += 1
        self._begin()
        if len(self._pending) == PENDING:
            self._pending[0].give_up()  # the append drops it
        self._pending.append(times)
        return times

    def _begin(self, early: float = 0.0) -> None:
        if self.device != self._timed_on:
            self._timed_on = self.device
            self._unused = deque(maxlen=_MOST)  # an event belongs to one device
        self._stage, self._moments, self._earlier = "other", [], {}
        kind = "cpu" if self._timed_on is None else self._timed_on.type
        self._has_events = kind == "cuda"
        is_due = kind == "cpu" or self._steps % self._pace == self._pace // 2
        self._is_lost = kind not in ("cpu", "cuda") or not is_due
        self._mark("other", early=early)

    def _open(self, stage: str, waited: float = 0.0) -> None:
        if not self._moments and not self._is_lost:
            self._begin(early=waited)  # the first step begins with the first thing told
        self._stage = stage
        self._observed.add(stage)
        self._mark(stage, waited)

    def _mark(self, opens: str, waited: float = 0.0, early: float = 0.0) -> None:
        clock = time.perf_counter() - early
        event = self._record_event() if self._has_events and not self._is_lost else None
        if self._is_lost:
            self._moments = []
            return
        self._moments.append(_Moment(opens, clock, event, waited))
        if len(self._moments) % _FOLD == 0:
            self._fold()

    def _record_event(self) -> _Event | None:
        if torch.cuda.is_current_stream_capturing():
            self._is_lost = True  # it would become part of the CUDA graph
            return None
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._timed_on))
        return event

    def _fold(self) -> None:
        """Sums up the first part of a step that has very many micro-batches, so that its moments stay bounded."""
        past = self._moments[:_FOLD]
        if past[-1].is_past() and all(moment.is_past() for moment in past):
            self._earlier = _sum(self._earlier, _spent(past))
            self._moments = self._moments[_FOLD - 1 :]
            self._unused.extend(moment.event for moment in past[:-1] if moment.event is not None)
        elif len(self._moments) >= _MOST:
            self._is_lost, self._moments = True, []


def _spent(moments: Sequence[_Moment]) -> dict[str, float]:
    """Seconds by stage between these moments, all of them past."""
    spent: dict[str, float] = {}
    for began, ended in pairwise(moments):
        length = _between(began, ended)
        data = min(ended.waited, length)
        spent["data"] = spent.get("data", 0.0) + data
        spent[began.opens] = spent.get(began.opens, 0.0) + length - data
    return spent


def _between(began: _Moment, ended: _Moment) -> float:
    if began.event is None or ended.event is None:
        return ended.clock - began.clock
    return max(
        1e-3 * float(began.event.elapsed_time(ended.event)), 0.0
    )  # events of two streams may pass in another order


def _sum(first: dict[str, float], second: dict[str, float]) -> dict[str, float]:
    return {stage: first.get(stage, 0.0) + second.get(stage, 0.0) for stage in STAGES}


# The loader -----------------------------------------------------------------------------------------------------

Batch = TypeVar("Batch")


class StageLog:
    """Stage times as scalars of the step they belong to: at once on the CPU, late on CUDA."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, StageTimes]] = deque(maxlen=PENDING)

    def add(self, step: int, times: StageTimes) -> dict[str, float]:
        """The scalars that are known already."""
        found = _named(times.seconds())
        if not found and times.is_expected:
            self._waiting.append((step, times))
        return found

    def arrived(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Scalars that have become known, with their step."""
        while self._waiting and self._waiting[0][1].ready():
            step, times = self._waiting.popleft()
            if found := _named(times.seconds()):
                yield step, found


def _named(seconds: dict[str, float]) -> dict[str, float]:
    return {f"time/{stage}": seconds[stage] for stage in STAGES if stage in seconds}


Batch_co = TypeVar("Batch_co", covariant=True)


class Waits(Protocol):
    """Who is told of waits: Stages, or what contains its failures. Nothing it does may raise into the training."""

    def wait_began(self) -> None: ...

    def waited(self, seconds: float) -> None: ...


class Bar(Protocol):
    """Who shows how far one pass is. Nothing it does may raise either."""

    def passed(self) -> None: ...

    def end(self) -> None: ...


class Batches(Generic[Batch_co]):
    """Yields what a loader yields, each time it is iterated, and tells how long the loader took."""

    def __init__(
        self,
        loader: Iterable[Batch_co],
        waits: Waits,
        loaded: Callable[[Any], None] | None = None,
        bar: Callable[[], Bar | None] | None = None,
    ) -> None:
        self._loader, self._waits, self._loaded, self._bar = loader, waits, loaded, bar

    def __iter__(self) -> Iterator[Batch_co]:
        began = self._ask()
        iterator = iter(self._loader)  # a DataLoader starts its workers here
        bar = self._bar() if self._bar is not None else None
        try:
            while True:
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                finally:
                    self._waits.waited(time.perf_counter() - began)
                if self._loaded is not None:
                    self._loaded(batch)
                if bar is not None:
                    bar.passed()
                yield batch
                del batch  # as in a plain loop, the loader may have its memory back for the next one
                began = self._ask()
        finally:
            # Let go, as a for statement does: a generator or workers of ours end here, a user's own iterator goes on.
            del iterator
            if bar is not None:
                bar.end()

    def _ask(self) -> float:
        self._waits.wait_began()
        return time.perf_counter()


class SizedBatches(Batches[Batch_co]):
    """Of a loader that knows its length."""

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # `batches` has looked


def batches(
    loader: Iterable[Batch],
    waits: Waits,
    loaded: Callable[[Any], None] | None = None,
    bar: Callable[[], Bar | None] | None = None,
) -> Batches[Batch]:
    """`for batch in batches(loader, stages):` in place of `for batch in loader:`, for the loader of the training.

    Exceptions of the loader pass unchanged; `len` works where the loader has one. `loaded` is shown every batch, and
    must not raise either. `bar` makes what shows the progress of a pass.
    """
    kind: type[Batches[Batch]] = SizedBatches if hasattr(loader, "__len__") else Batches
    return kind(loader, waits, loaded, bar)
