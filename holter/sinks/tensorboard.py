"""TensorBoard: scalars, histograms and findings as event files, by tensorboard's own writer. Needs no torch.

A histogram keeps our buckets: no value is binned again, and its extremes and moments are those that were measured.
TensorBoard itself shows ten texts of a tag unless it is started with `--samples_per_plugin text=1000`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from holter.diagnosis.finding import Finding
from holter.random_state import random_state_kept
from holter.record import Floats, Record
from holter.sinks.panels import FEW, Panel, Panels, histogram_tag, quantiles
from holter.statistics.histogram import Histogram
from holter.statistics.rows import COLUMNS
from holter.words import number, printable

FLUSH_SECONDS = 2.0  # after which a reader sees what was written
_FINDINGS = "findings"
_GRADIENTS = histogram_tag("gradient", "")  # how the tags of those begin whose quantiles are shown as curves, too
_MOMENTS = [COLUMNS.index(name) for name in ("min", "max", "sum", "sum_squares")]


class TensorBoard:
    """Writes event files into `directory`; `layers` (a number or "all") and `every` as `Panels` says.

    Scalars are kept in single precision, as TensorBoard does. Write or alert after close raises OSError.
    """

    def __init__(self, directory: str | os.PathLike[str], *, layers: int | str = FEW, every: int = 1) -> None:
        self._panels = Panels(layers, every)
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise ValueError(f"directory={directory!r}: give the one that TensorBoard will read, such as 'tb/my-run'")
        try:
            with random_state_kept():
                writing = import_module("tensorboard.summary.writer.event_file_writer")
                self._event = import_module("tensorboard.compat.proto.event_pb2")
                self._summary = import_module("tensorboard.compat.proto.summary_pb2")
                self._text_pb = import_module("tensorboard.plugins.text.summary_v2").text_pb
        except ImportError as error:
            raise ImportError("the TensorBoard sink needs tensorboard: pip install 'holter[tensorboard]'") from error
        try:
            self._writer: Any = writing.EventFileWriter(os.fspath(directory), flush_secs=FLUSH_SECONDS)
        except OSError as error:
            why = error.strerror or type(error).__name__
            raise ValueError(f"cannot write to {os.fspath(directory)!r} ({why}): give another directory") from error
        self._time: float | None = None  # of the last record
        self._segment: int | None = None
        self._last_texts: list[int] = []  # steps of the last text of each tag

    def write(self, record: Record) -> None:
        panel = self._panels.of(record)
        self._time = record.time
        self._begin_again(record)
        values = [*self._scalars(panel), *self._histograms(panel, record)]
        if values:
            self._add(record.step, summary=self._summary.Summary(value=values))

    def alert(self, finding: Finding) -> None:
        """A text at the step at which it was known; one that is over, at the last at which it was seen."""
        self._panels.note(finding)
        step = finding.step if finding.until is None else finding.until
        self._add(step, summary=self._text_pb(self._text_tag(step), _text(finding)))
        self._writer.flush()  # what follows a finding may be a crash

    def close(self) -> None:
        self._writer.close()

    def _add(self, step: int, **content: Any) -> None:
        moment = time.time() if self._time is None else self._time
        self._writer.add_event(self._event.Event(wall_time=moment, step=int(step), **content))

    def _begin_again(self, record: Record) -> None:
        """A resume may take steps again: readers then forget the ones of before, from this step on."""
        if self._segment is not None and record.segment > self._segment:
            start = self._event.SessionLog(status=self._event.SessionLog.START)
            self._add(record.step, session_log=start)
        self._segment = record.segment

    def _scalars(self, panel: Panel) -> Iterator[Any]:
        scalars = dict(panel.scalars)
        for tag, histogram in panel.histograms.items():
            if tag.startswith(_GRADIENTS):
                scalars.update({f"{tag}/{name}": value for name, value in quantiles(histogram).items()})
        for tag, value in scalars.items():
            yield self._summary.Summary.Value(tag=_legible(tag), simple_value=float(value))

    def _histograms(self, panel: Panel, record: Record) -> Iterator[Any]:
        if not panel.histograms:
            return
        for role, rows in record.rows.items():
            for place, layer in enumerate(rows.layers):
                tag = histogram_tag(role, layer)
                if tag in panel.histograms:
                    proto = self._histogram(panel.histograms[tag], rows.rows.values[place])
                    if proto is not None:
                        yield self._summary.Summary.Value(tag=_legible(tag), histo=proto)

    def _histogram(self, histogram: Histogram, row: Floats) -> Any:
        counts, edges = histogram.edges()
        if not len(counts):  # no value is finite
            return None
        low, high, total, squares = row[_MOMENTS].tolist()
        return self._summary.HistogramProto(
            # Readers draw the outermost buckets up to these; rows that were scaled may miss them by a bucket.
            min=min(max(low, edges[0]), edges[1]),
            max=max(min(high, edges[-1]), edges[-2]),
            num=counts.sum(),
            sum=total,
            sum_squares=squares,
            # A bucket has its upper limit only: an empty one before the first keeps the lowest edge.
            bucket_limit=edges.tolist(),
            bucket=[0.0, *counts.tolist()],
        )

    def _text_tag(self, step: int) -> str:
        """The first tag that has no text at this step or after it: TensorBoard's data server drops those when an
        earlier step follows, for it takes that for a resume."""
        lane = next((i for i, last in enumerate(self._last_texts) if last < step), len(self._last_texts))
        self._last_texts[lane : lane + 1] = [step]
        return f"{_FINDINGS}/{lane + 1}" if lane else _FINDINGS


def _legible(tag: str) -> str:
    """A name may hold what no event file can."""
    return tag if tag.isprintable() else printable(tag)


def _text(finding: Finding) -> str:
    """In markdown: what, where and since when, then the advice, the evidence and what else it could be."""
    place = f" in `{printable(finding.layer).replace('`', ' ')}`" if finding.layer else ""
    over = "" if finding.until is None else f", **over**: last seen at step {finding.until:,}"
    known = f"known at step {finding.step:,}, confidence {finding.confidence:.0%}"
    parts = [
        f"**{finding.severity}: {printable(finding.cause)}**{place} since step {finding.since:,}{over} ({known})",
        printable(finding.advice),
        ", ".join(
            f"{printable(name.replace('_', ' '))} {_value(value)}" for name, value in finding.further_evidence.items()
        ),
        f"or: {', '.join(map(printable, finding.alternatives))}" if finding.alternatives else "",
    ]
    return "\n\n".join(part for part in parts if part)


def _value(value: object) -> str:
    return number(float(value)) if isinstance(value, int | float) else printable(str(value))
