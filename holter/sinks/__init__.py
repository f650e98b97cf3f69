"""Sinks: where records and findings go besides the journal. A sink has write, alert and close; they compose.

What a sink writes with is imported when it is made, and not before.
"""

from typing import TYPE_CHECKING, Any

from holter.random_state import random_state_kept
from holter.sinks.background import Background
from holter.sinks.fanout import Fanout
from holter.sinks.memory import Memory
from holter.sinks.mlflow import MLflow
from holter.sinks.sink import Sink
from holter.sinks.tensorboard import TensorBoard
from holter.sinks.trackio import Trackio
from holter.sinks.wandb import WandB

if TYPE_CHECKING:
    from holter.sinks.console import Console as Console

__all__ = ["Background", "Console", "Fanout", "MLflow", "Memory", "Sink", "TensorBoard", "Trackio", "WandB"]


def __getattr__(name: str) -> Any:
    if name != "Console":
        raise AttributeError(f"module 'holter.sinks' has no attribute {name!r}")
    with random_state_kept():  # rich draws a number as it is loaded
        from holter.sinks.console import Console
    return Console
