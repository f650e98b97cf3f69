"""Background: work in order on a thread of its own; posting never blocks, and what is lost is counted.

Nothing here looks at a clock to tell right from wrong: events say what has happened, and a hanging worker hangs
until the test lets it go. PATIENCE only bounds how long a broken program is waited for.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from holter.background import Background, Soon

PATIENCE = 20.0


class Worker:
    """Work that can be held up: notes what it was given, and waits at the gate while that is shut."""

    def __init__(self) -> None:
        self.begun: list[object] = []
        self.done: list[object] = []
        self.gate, self.arrived = threading.Event(), threading.Event()
        self.gate.set()

    def __call__(self, item: object) -> float | None:
        self.begun.append(item)
        self.arrived.set()
        assert self.gate.wait(PATIENCE)
        self.done.append(item)
        return None

    def hang(self) -> None:
        self.gate.clear()
        self.arrived.clear()


def never(error: BaseException) -> None:
    raise AssertionError(error)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def start(work: Callable[[object], float | None], failed: Callable[[BaseException], None] = never, **bounds: int):
    return Background(work, failed, name="holter-test", **bounds)


def posted_while_hanging(background_class: type[Background], worker: Worker) -> bool:
    """Whether posting returns although the work on the first item never ends. Asked on a thread that may hang."""
    worker.hang()
    background, through = background_class(worker, never, name="holter-test"), threading.Event()

    def post() -> None:
        for item in range(100):
            background.post(item)
        through.set()

    threading.Thread(target=post, daemon=True).start()
    assert worker.arrived.wait(PATIENCE)
    returned = through.wait(0.1 if background_class is not Background else PATIENCE)
    still_hanging = worker.done == []
    worker.gate.set()
    background.close(PATIENCE)
    return returned and still_hanging


class Blocking(Background):
    """The planted fault: posting works the item off itself, as a sink without a thread does."""

    def post(self, item: object, size: int = 0) -> bool:
        self._work(item)
        return True


def test_posting_never_waits_for_work_that_hangs() -> None:
    """P16: a hundred items are posted while the first is still being worked on."""
    assert posted_while_hanging(Background, Worker())
    assert not posted_while_hanging(Blocking, Worker())


def test_items_are_worked_on_in_their_order(worker: Worker) -> None:
    """Records of a file must not change places."""
    background = start(worker)
    for item in range(2000):
        assert background.post(item)
    assert background.flush(PATIENCE)
    assert worker.done == list(range(2000)) and background.dropped == 0 and len(background) == 0
    assert background.close(PATIENCE) == 0


def test_items_of_several_threads_all_arrive_each_threads_in_order(worker: Worker) -> None:
    """Problems and sinks post from other threads than the training's."""
    background = start(worker, most_items=10_000)
    threads = [
        threading.Thread(target=lambda name=name: [background.post((name, i)) for i in range(300)]) for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert background.close(PATIENCE) == 0
    for name in "abcd":
        assert [i for who, i in worker.done if who == name] == list(range(300))


@pytest.mark.parametrize(
    ("bounds", "size", "fits"),
    [({"most_items": 5}, 0, 5), ({"most_bytes": 100}, 30, 3), ({"most_items": 2, "most_bytes": 100}, 1, 2)],
)
def test_what_does_not_fit_is_dropped_and_counted(bounds: dict[str, int], size: int, fits: int, worker: Worker) -> None:
    """P16: the queue has room for so many items and so many bytes, the one being worked on among them."""
    worker.hang()
    background = start(worker, **bounds)
    taken = [background.post(item, size) for item in range(20)]
    assert taken == [True] * fits + [False] * (20 - fits)
    assert background.dropped == 20 - fits and len(background) == fits
    worker.gate.set()
    assert background.flush(PATIENCE)
    assert worker.done == list(range(fits))  # the oldest are kept: a series without a hole at its start
    assert background.post("more", size) and background.close(PATIENCE) == 0
    assert worker.done[-1] == "more" and background.dropped == 20 - fits


def test_what_is_larger_than_the_bound_gets_through_an_empty_queue(worker: Worker) -> None:
    """P6: the histograms of ten thousand layers are larger than any queue should be, and are not lost for ever."""
    worker.hang()
    background = start(worker, most_bytes=100)
    assert background.post("huge", 1000)
    assert background.post("small", 1) and not background.post("another", 100)  # beside it there is room as ever
    worker.gate.set()
    assert background.close(PATIENCE) == 0 and worker.done == ["huge", "small"]


def test_an_item_is_tried_again_until_it_is_done_and_holds_its_place() -> None:
    """P13: a full disk is tried again; what comes after waits its turn."""
    tries: list[str] = []

    def work(item: object) -> float | None:
        tries.append(str(item))
        return 0.001 if item == "b" and tries.count("b") < 4 else None

    background = start(work)
    for item in "abc":
        background.post(item)
    assert background.flush(PATIENCE)
    assert "".join(tries) == "abbbbc"
    background.close(PATIENCE)


def test_work_that_raises_is_reported_and_the_next_item_is_worked_on() -> None:
    """P1: one bad record does not stop the journal; even telling of it may fail, and sys.exit() ends nothing."""
    told: list[type[BaseException]] = []
    done: list[float] = []

    def work(item: object) -> None:
        if item == "exit":
            sys.exit(3)
        done.append(1 / item)

    def failed(error: BaseException) -> None:
        told.append(type(error))
        raise RuntimeError("nobody listens")

    background = start(work, failed)
    for item in (1, 0, 2, "exit", 4):
        background.post(item)
    assert background.flush(PATIENCE)
    assert done == [1.0, 0.5, 0.25] and told == [ZeroDivisionError, SystemExit]
    assert background.close(PATIENCE) == 0


# Flushing and closing ---------------------------------------------------------------------------------------------


def test_flush_says_whether_everything_is_done(worker: Worker) -> None:
    """P12: what it says is what a caller believes to be in the file."""
    background = start(worker)
    assert background.flush(0.0)
    worker.hang()
    background.post(1)
    assert not background.flush(0.0) and not background.flush(0.01)
    worker.gate.set()
    assert background.flush(PATIENCE) and worker.done == [1]
    background.close(PATIENCE)


def test_flush_never_calls_given_up_items_done() -> None:
    """P12: after a disk that never worked, closing gives up, and flush does not claim otherwise."""
    background = start(lambda item: 60.0)
    background.post(1)
    assert background.close(0.05) == 1
    background._thread.join(PATIENCE)
    assert not background._thread.is_alive()
    assert not background.flush(0.0)


def interrupted(call: Callable[[], object], at: int) -> bool:
    """Whether a Ctrl-C came at this call or return of a function within the call: there Python looks for signals."""
    seen = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        frame.f_trace_lines = False
        seen += event in ("call", "return")
        if seen == at:
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("name", ["post", "flush", "waiting", "clear"])
def test_an_interrupt_at_any_moment_does_not_stop_the_thread(name: str, worker: Worker) -> None:
    """P1: in a notebook the training goes on after it, and what it records must still be written."""
    background = start(worker)
    calls: dict[str, Callable[[], object]] = {
        "post": lambda: background.post(0),
        "flush": lambda: background.flush(PATIENCE),
        "waiting": lambda: background.waiting,
        "clear": background.clear,
    }
    at = 1
    while interrupted(calls[name], at):
        worker.arrived.clear()
        background.post(at)
        assert worker.arrived.wait(PATIENCE / 10) and not background._flushes
        at += 1
    assert at > 2  # it was interrupted in the middle
    background.close(PATIENCE)


def test_flush_from_its_own_thread_does_not_wait_for_itself() -> None:
    """A sink that calls back must not hang for ever."""
    answers: list[bool] = []
    background: Background[object] = start(lambda item: answers.append(background.flush(PATIENCE)))
    background.post(1)
    assert background.flush(PATIENCE) and answers == [False]
    background.close(PATIENCE)


def test_close_finishes_what_is_queued_and_takes_nothing_more(worker: Worker) -> None:
    """P15: what was posted before is done, what is posted after is dropped and counted; twice is harmless."""
    worker.hang()
    background = start(worker)
    for item in range(5):
        background.post(item)
    background.stop(PATIENCE)
    assert not background.post("late") and background.dropped == 1
    worker.gate.set()
    assert background.close(PATIENCE) == 0 and worker.done == [0, 1, 2, 3, 4]
    assert background.close(PATIENCE) == 0 and not background._thread.is_alive()


def test_close_gives_up_on_work_that_hangs_and_says_what_is_left(worker: Worker) -> None:
    """P15: the item that hangs and those behind it; and the thread does not keep the process alive."""
    worker.hang()
    background = start(worker)
    for item in range(5):
        background.post(item)
    assert worker.arrived.wait(PATIENCE)
    assert background.close(0.01) == 5 and worker.done == []
    assert background._thread.daemon
    worker.gate.set()
    background._thread.join(PATIENCE)
    assert worker.done == [0]  # it was under way; the others' time was over


def test_the_beginning_of_the_end_is_tried_at_once_and_then_at_the_pace_that_was_asked_for() -> None:
    """P13, P15: a pause of an hour does not hold close() up, and closing does not hammer on a disk that fails."""
    pauses, tries = iter([3600.0, *[0.05] * 1000]), []
    tried = threading.Event()

    def work(item: object) -> float:
        tries.append(item)
        tried.set()
        return next(pauses)

    background = start(work)
    background.post(1)
    assert tried.wait(PATIENCE)
    assert background.close(0.5) == 1
    background._thread.join(PATIENCE)
    assert 2 <= len(tries) <= 1 + 1 + 0.5 / 0.05  # a slow machine tries less often, never more


# Idle -------------------------------------------------------------------------------------------------------------


def test_idle_is_called_now_and_then_and_outside_the_lock(worker: Worker) -> None:
    """P16: it touches the disk, which may hang: posting must not wait for that. What it raises is contained."""
    idling, release, posted = threading.Event(), threading.Event(), threading.Event()

    def idle() -> None:
        idling.set()
        assert release.wait(PATIENCE)
        raise OSError("the disk is gone")

    background = Background(worker, never, name="holter-test", idle=idle, idle_seconds=0.001)
    assert idling.wait(PATIENCE)
    threading.Thread(target=lambda: (background.post(1), posted.set()), daemon=True).start()
    assert posted.wait(PATIENCE) and worker.done == []  # idle still hangs, and the post went through
    release.set()
    assert background.flush(PATIENCE) and worker.done == [1]
    idling.clear()
    assert idling.wait(PATIENCE)  # and it is called again
    background.close(PATIENCE)


def test_after_a_long_wait_it_sleeps_at_once_and_after_a_short_one_it_stays_awake(worker: Worker) -> None:
    """A thread that looks in vain takes a core from the training each time."""
    background = Background(worker, never, name="holter-test", pace_seconds=0.003, awake_seconds=0.2, idle_seconds=3600)
    waits, wait = list[float | None](), background._changed.wait
    sleeps = threading.Event()

    def noted(seconds: float | None = None) -> bool:
        waits.append(seconds)
        if seconds == 3600:
            sleeps.set()
        return wait(seconds)

    background._changed.wait = noted  # type: ignore[method-assign]

    def first_wait_after(item: object) -> float | None:
        sleeps.clear()
        background.post(item)
        assert sleeps.wait(PATIENCE)
        found, waits[:] = waits[0], []
        return found

    assert sleeps.wait(PATIENCE)
    waits.clear()
    assert first_wait_after("seldom") == 3600
    worker.hang()
    background.post("one")
    assert worker.arrived.wait(PATIENCE)
    background.post("and another")
    waits.clear()
    sleeps.clear()
    worker.gate.set()
    assert sleeps.wait(PATIENCE) and waits[0] == 0.003
    background.close(PATIENCE)


# Forked children --------------------------------------------------------------------------------------------------

FORKED = """
import os, sys, threading
from holter.background import Background, Soon
done, gate, begun = [], threading.Event(), threading.Event()
def work(item):
    begun.set()
    gate.wait(20)
    done.append((os.getpid(), item))
background = Background(work, print, name="holter-test")
background.post("parent")
begun.wait(20)
locked = sys.argv[1] == "locked"
if locked:
    background._changed.acquire()  # as if another thread held it at the moment of the fork
child = os.fork()
if child == 0:
    answers = background.post("child"), background.flush(20.0), background.close(20.0), background.stop(20.0)
    os._exit(0 if answers == (False, False, 0, None) and done == [] and background.dropped == 0 else 7)
if locked:
    background._changed.release()
_, status = os.waitpid(child, 0)
gate.set()
assert background.flush(20.0)
print(os.waitstatus_to_exitcode(status), done == [(os.getpid(), "parent")])
"""
UNAWARE = "import os\nos.getpid = lambda process=os.getpid(): process\n"


def forked(script: str, how: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", script, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=Path(__file__).parent.parent)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("how", ["free", "locked"])
def test_a_forked_child_does_nothing_and_never_hangs(how: str) -> None:
    """P14: even if the lock was held when it was forked; the parent's own item is done once, by the parent."""
    assert forked(FORKED, how) == "0 True"


def test_a_child_that_does_not_know_it_is_one_is_noticed() -> None:
    """P14: the planted twin: the process number says the same in both."""
    assert forked(UNAWARE + FORKED.replace("20.0)", "0.1)"), "free") == "7 True"


def test_a_post_is_a_reason_to_try_again_what_may_wait() -> None:
    """Results of a device are looked for when the next step is posted, or when someone waits; not again and again."""
    tried = [threading.Event() for _ in range(3)]
    left = iter(tried)

    def work(item: object) -> float | None:
        event = next(left, None) if item == "results" else None
        if event is None:
            return None
        event.set()
        return Soon(10 * PATIENCE)

    background: Background[object] = Background(work, lambda error: None, name="test")
    background.post("results")
    assert tried[0].wait(PATIENCE) and not tried[1].wait(0.05)
    background.post("next")
    assert tried[1].wait(PATIENCE)
    assert background.flush(PATIENCE) and tried[2].is_set()  # who waits for the end is not kept waiting
    assert background.close(PATIENCE) == 0
