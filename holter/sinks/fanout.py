"""One sink made of several. A member that raises is cut off, closed and reported; the others go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from holter.diagnosis.finding import Finding
from holter.problems import Complaint
from holter.record import Record
from holter.sinks.sink import Sink


class Fanout:
    def __init__(self, sinks: Sequence[Sink], failed: Callable[[Sink, Exception], None]) -> None:
        self.sinks = list(sinks)
        self._failed = failed

    def write(self, record: Record) -> None:
        self._each(lambda sink: sink.write(record))

    def alert(self, finding: Finding) -> None:
        self._each(lambda sink: sink.alert(finding))

    def close(self) -> None:
        for sink in self.sinks:
            error = _failure(sink.close)
            if error is not None:
                self._failed(sink, error)
        self.sinks.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            error = _failure(partial(call, sink))
            if error is not None:
                self.sinks.remove(sink)
                self._failed(sink, error)
                _failure(sink.close)  # so that what it wrote is whole; it is known to be broken, and not told again


def _failure(call: Callable[[], None]) -> Exception | None:
    try:
        call()
    except KeyboardInterrupt:  # the user's
        raise
    except Exception as error:
        return error
    except BaseException as error:  # sys.exit() in a sink is for that sink alone
        return Complaint(type(error).__name__)
    return None
