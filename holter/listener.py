"""Listener: what a capture reports of a training, and to whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from holter.clipping import Clip
from holter.compiled_calls import Called


class Listener(Protocol):
    def training_forward(self, called: Called) -> None: ...

    def part_forward(self) -> None: ...

    def forward_ended(self) -> None: ...

    def before_step(self, optimizer: Optimizer, has_closure: bool) -> None: ...

    def after_step(self, optimizer: Optimizer, gradients_at: str | None) -> None:
        """`gradients_at`: closure or replay, if the gradients were computed inside the step."""

    def torch_clips(self, parameters: Sequence[Tensor], clip: Clip | None) -> None: ...

    def skipped_step(self, optimizer: Optimizer) -> None: ...

    def step_raised(self) -> None: ...
