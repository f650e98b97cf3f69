"""Sinks: where records and findings go besides the journal. A sink has write, alert and close; they compose."""

from holter.sinks.background import Background
from holter.sinks.fanout import Fanout
from holter.sinks.memory import Memory
from holter.sinks.sink import Sink

__all__ = ["Background", "Fanout", "Memory", "Sink"]
