"""Training: one training as its package's users would write it, and the faults that can be planted in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from zoo.trainee import Trainee


@dataclass(frozen=True)
class Fault:
    """A planted fault: the causes that name it rightly, and the layers that do, as a shell pattern (None: any)."""

    causes: tuple[str, ...]
    layer: str | None = None


@dataclass(frozen=True)
class Training:
    """`run` trains and returns the module or modules that were trained. `steps` is what a person would count: what is
    stepped between two training forwards is one training step; of several watched models, their sum.

    `run` looks at `trainee.fault`: None, or the name of one of `faults`, which it then plants.
    """

    name: str  # "package/training"
    run: Callable[[Trainee], nn.Module | Sequence[nn.Module]]
    steps: int
    faults: Mapping[str, Fault] = field(default_factory=dict)
