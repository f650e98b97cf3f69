"""Case: one training of the clinic with what is known of it; Recipe: how a training is set up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from holter.clinic.training import Hooks

Split = Literal["development", "held-out"]
SPLITS: tuple[Split, ...] = ("development", "held-out")

# Every cause of the catalogue, and where it lies.
CAUSES = {
    "lr-too-high": "lr",
    "lr-jump": "lr",
    "lr-too-low": "lr",
    "scheduler-stepped-too-often": "lr",
    "warmup-missing": "lr",
    "clipping-missing": "optimizer",
    "clipping-too-tight": "optimizer",
    "zero-grad-missing": "loop",
    "accumulation-not-averaged": "loop",
    "optimizer-holds-other-parameters": "optimizer",
    "weight-not-written": "layer",
    "optimizer-state-lost": "optimizer",
    "adam-eps-dominates": "optimizer",
    "adam-second-moment-lag": "optimizer",
    "weight-decay-too-high": "optimizer",
    "vanishing-gradient": "layer",
    "init-too-large": "layer",
    "init-too-small": "layer",
    "init-symmetric": "layer",
    "dead-relu": "layer",
    "saturated-activation": "layer",
    "graph-detached": "layer",
    "layer-frozen": "layer",
    "representation-collapse": "layer",
    "residual-growth": "layer",
    "norm-batch-too-small": "layer",
    "batch-corrupt": "data",
    "input-scale": "data",
    "labels-corrupt": "data",
    "batch-repeated": "data",
    "data-not-shuffled": "data",
    "nan-in-data": "data",
    "double-softmax": "loss",
    "loss-sign": "loss",
    "loss-reduction": "loss",
    "fp16-overflow": "precision",
    "fp16-underflow": "precision",
    "bf16-update-lost": "precision",
    "attention-logit-growth": "layer",
    "output-logit-drift": "layer",
    "overfitting": "data",
    "data-loading-bound": "performance",
    "memory-growth": "performance",
    "throughput-drop": "performance",
}


@dataclass(frozen=True)
class Recipe:
    """A training without its fault: a seed, a model and its data, an optimizer, a schedule, a precision."""

    architecture: str
    optimizer: str
    seed: int
    steps: int = 300
    width: int = 64
    depth: int = 4
    batch: int = 32
    classes: int = 8
    examples: int = 4096
    rate: float = 1e-3
    weight_decay: float = 0.0
    eps: float = 1e-8
    beta2: float = 0.999
    clip: float | None = 1.0
    schedule: str = "constant"
    warmup: int = 0
    accumulate: int = 1  # micro-batches in a step
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    scaler: float | None = None  # its first scale
    activation: str | None = None  # None: the architecture's own
    norm: bool | None = None
    skip: bool = True
    validate: int | None = None  # every so many steps


@dataclass(frozen=True)
class Case:
    """One training and the truth about it.

    `onset` is the step at which the fault is put in, `shows` the first at which its evidence can be there: the same,
    but for what takes time. `also_right` are causes that the evidence cannot tell from this one.
    """

    id: str
    kind: Literal["sick", "twin", "control"]
    recipe: Recipe
    hooks: Callable[[], Hooks]
    split: Split
    cause: str | None = None  # None: healthy
    where: str | None = None
    layer: str | tuple[str, ...] | None = None
    onset: int = 0
    shows: int = 0
    also_right: tuple[str, ...] = ()
    slow: bool = False
    shows_at_once: bool = False
    changes_losses: bool = True  # False: only time or memory suffer
    twin: str | None = None

    @property
    def architecture(self) -> str:
        return self.recipe.architecture

    @property
    def optimizer(self) -> str:
        return self.recipe.optimizer

    @property
    def seed(self) -> int:
        return self.recipe.seed

    @property
    def layers(self) -> tuple[str, ...]:
        """Every layer that is a right answer; none where the fault lies in no layer."""
        return (self.layer,) if isinstance(self.layer, str) else self.layer or ()
