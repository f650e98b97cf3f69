"""Holter: a monitor for neural-network training. Records every step, and says what is wrong, where and why."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holter.diagnosis.finding import Finding as Finding
    from holter.history import History as History
    from holter.monitor import Monitor as Monitor
    from holter.monitor import watch as watch
    from holter.run import Run as Run
    from holter.run import list_runs as list_runs
    from holter.run import open_run as open_run

__version__ = "0.1.0"

# Public name -> its module. Loaded on first use, so that reading a stored run never imports torch.
_HOMES = {
    "watch": "monitor",
    "Monitor": "monitor",
    "open_run": "run",
    "list_runs": "run",
    "Run": "run",
    "History": "history",
    "Finding": "diagnosis.finding",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holter' has no attribute {name!r}")
    value = getattr(import_module(f"holter.{_HOMES[name]}"), name)
    globals()[name] = value  # asked once, known from then on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
