"""One sink made of several. A member that raises is cut off and reported; the others go on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from holter.diagnosis.finding import Finding
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
        self._each(lambda sink: sink.close())
        self.sinks.clear()

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in list(self.sinks):
            try:
                call(sink)
            except Exception as error:
                self.sinks.remove(sink)
                self._failed(sink, error)
