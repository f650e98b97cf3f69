"""A sink that keeps everything in memory: for tests, notebooks and runs that are not stored."""

from __future__ import annotations

from holter.diagnosis.finding import Finding
from holter.record import Record


class Memory:
    def __init__(self) -> None:
        self.records: list[Record] = []
        self.findings: list[Finding] = []
        self.closed = False

    def write(self, record: Record) -> None:
        self.records.append(record)

    def alert(self, finding: Finding) -> None:
        self.findings.append(finding)

    def close(self) -> None:
        self.closed = True
