"""Sinks: where records and findings go besides the journal. A sink has write, alert and close; they compose.

What a sink writes with is imported when it is made, and not before.
"""

from holter.sinks.background import Background
from holter.sinks.console import Console
from holter.sinks.fanout import Fanout
from holter.sinks.memory import Memory
from holter.sinks.mlflow import MLflow
from holter.sinks.sink import Sink
from holter.sinks.tensorboard import TensorBoard
from holter.sinks.trackio import Trackio
from holter.sinks.wandb import WandB

__all__ = ["Background", "Console", "Fanout", "MLflow", "Memory", "Sink", "TensorBoard", "Trackio", "WandB"]
