"""Records as no training should make them, and some do: for rules that must say something of them, or nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from holter.record import ACTIVATION_DTYPES, EXECUTION_ORDER, LayerRows, Record
from holter.statistics.histogram import Histograms
from holter.statistics.rows import COLUMNS, Rows

Floats = npt.NDArray[np.float64]

EXTRAS: Mapping[str, Sequence[str]] = {
    "gradient": (),
    "weight": ("requires_grad", "held", "has_gradient"),
    "update": ("ratio", "weight_norm", "planned_ratio", "unchanged", "cosine"),
    "activation": ("dead", "dead_lasting", "saturated", "near_overflow", "rank", "spread"),
    "momentum": (),
    "second_moment": ("below_eps", "rms_ratio"),
    "batch": ("size", "label_entropy"),
    "attention": ("max_logit", "entropy"),
}
SCALARS = (
    "loss",
    "gradient_norm",
    "gradient_nonfinite",
    "learning_rate",
    "learning_rate/1",
    "weight_decay",
    "clip_norm",
    "clip_max_norm",
    "loss_scale",
    "skipped",
    "optimizer_step",
    "step_time",
    "time/data",
    "time/backward",
    "batch/size",
    "batch/repeated",
    "logit_mean",
    "logit_log_sum_exp",
    "tokens_per_second",
    "val/loss",
    "machine/process_memory",
    "machine/process_memory_free",
    "machine/cpu_wait",
    "machine/gpu_memory",
    "machine/gpu_memory_total",
    "machine/gpu_throttled",
    "machine/loader_workers",
)
MODULES = ("Linear", "Conv2d", "BatchNorm2d", "Embedding", "GRU", "Own", "")
PARTS = ("attention", "ffn", "embedding", "norm", "output", "conv", "recurrent", "other")
SHAPES: tuple[list[int], ...] = ([8, 4], [4], [], [0], [0, 3], [1, 1], [1], [16, 1, 3, 3])
FLAGS = ("dead", "dead_lasting", "saturated", "unchanged", "requires_grad", "held", "has_gradient", "below_eps")
ODD = (0.0, -0.0, np.nan, np.inf, -np.inf, -1.0, 1e-320, 1e-30, 1e30, 1e300, 2.0**-24)


def rows_of(arrays: Mapping[str, npt.ArrayLike], extras: Mapping[str, Floats] | None = None) -> LayerRows:
    """What would be measured of these arrays."""
    values = np.zeros((len(arrays), len(COLUMNS)))
    flat = [np.ravel(np.asarray(array, dtype=np.float64)) for array in arrays.values()]
    with np.errstate(all="ignore"):
        for place, array in enumerate(flat):
            known = array[np.isfinite(array)]
            counts = [len(array), (array == 0).sum(), np.isnan(array).sum()]
            infinite = [(array == np.inf).sum(), (array == -np.inf).sum()]
            sums = [known.sum(), np.abs(known).sum(), (known**2).sum(), (known**4).sum()]
            ends = [known.min(initial=np.inf), known.max(initial=-np.inf)]
            values[place] = [*counts, *infinite, *sums, *ends]
    return LayerRows(tuple(arrays), Rows(values, Histograms.of(flat)), extras or {})


@dataclass
class Oddity:
    """How the records of one history are drawn."""

    seed: int
    steps: int = 60
    wild: float = 0.05  # share of the values that are odd
    missing: float = 0.1  # share of roles, scalars and layers that a step lacks
    constant: bool = False
    scalars: tuple[str, ...] = SCALARS
    roles: tuple[str, ...] = tuple(EXTRAS)
    layers: int = 5
    jumps: bool = False  # steps with gaps, and others again after a resume
    random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def info(self) -> dict[str, Any]:
        """Of run.json; some of it is not there."""
        layers = [
            {
                "name": name,
                "shape": SHAPES[int(self.random.integers(len(SHAPES)))],
                "module": MODULES[int(self.random.integers(len(MODULES)))],
                "part": PARTS[int(self.random.integers(len(PARTS)))],
                "dtype": ("float32", "float16", "bfloat16", "")[int(self.random.integers(4))],
            }
            for name in self.names("gradient")
        ]
        whole = {"layers": layers, "total_steps": 100, "parameters": 10**6}
        return {key: value for key, value in whole.items() if self.random.random() > self.missing}

    def names(self, role: str) -> list[str]:
        if role == "batch":
            return ["inputs", "targets"]
        modules = [f"h.{place}" for place in range(self.layers)]
        if role in ("activation", "attention"):
            return [*modules, "model"]
        return [f"{module}.{part}" for module in modules for part in ("weight", "bias")]

    def values(self, count: int, flags: bool = False) -> Floats:
        if self.constant:
            return np.ones(count)
        found = self.random.random(count) if flags else np.exp(2 * self.random.standard_normal(count))
        if flags:
            found = np.where(self.random.random(count) < 0.5, np.round(found), found)
        odd = self.random.random(count) < self.wild
        found[odd] = self.random.choice(ODD, int(odd.sum()))
        return found

    def role(self, role: str) -> LayerRows:
        names = [name for name in self.names(role) if self.random.random() >= self.missing]
        arrays = {name: self.values(8) * (1 if role == "batch" else self.random.choice([1, -1], 8)) for name in names}
        extras = {name: self.values(len(names), name in FLAGS) for name in EXTRAS[role]}
        return rows_of(arrays, extras)

    def records(self) -> Iterator[Record]:
        step, segment = 0, 0
        for _ in range(self.steps):
            told = [name for name in self.scalars if self.random.random() >= self.missing]
            scalars = dict(zip(told, self.values(len(told)).tolist(), strict=True))
            roles = [role for role in self.roles if self.random.random() >= self.missing]
            notes = self._notes() if self.random.random() < 0.1 else {}
            yield Record(step, float(step), scalars, {role: self.role(role) for role in roles}, notes, segment)
            step += 1
            if self.jumps and self.random.random() < 0.1:
                step, segment = max(0, step + int(self.random.integers(-20, 60))), segment + 1

    def _notes(self) -> dict[str, str]:
        names = [*self.names("activation"), *self.names("gradient")]
        self.random.shuffle(names)
        return {EXECUTION_ORDER: json.dumps(names), ACTIVATION_DTYPES: json.dumps({"float16": names[:3]})}
