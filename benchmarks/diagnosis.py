"""What the live diagnosis takes of a step: python -m benchmarks.diagnosis [--run RUN] [--live 60]

Processor time of the doctor alone, a step of a training of 148 layers like the GPT-2 of 124 million parameters: rows of
gradients at every step, of updates and of the optimizer's state at every tenth, of weights and activations at every
hundredth. The records are made up, of a training that is well, or come from a stored run. With --live they are posted
at the pace of a training with steps of 107 ms, and the thread is measured with its breaths and its wakings.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from holter.diagnosis.doctor import Doctor
from holter.examination import Examination
from holter.record import EXECUTION_ORDER, LayerRows, Record
from holter.run import open_run
from holter.statistics.rows import COLUMNS, Rows

STEP_SECONDS = 0.107
PHASES = (50, 220, 1000, 5000)  # steps, each from the first on

_BLOCKS, _WIDTH = 12, 768
_IN_A_BLOCK = (
    ("ln_1", "norm", "LayerNorm", (_WIDTH,)),
    ("attn.c_attn", "attention", "Conv1D", (_WIDTH, 3 * _WIDTH)),
    ("attn.c_proj", "attention", "Conv1D", (_WIDTH, _WIDTH)),
    ("ln_2", "norm", "LayerNorm", (_WIDTH,)),
    ("mlp.c_fc", "ffn", "Conv1D", (_WIDTH, 4 * _WIDTH)),
    ("mlp.c_proj", "ffn", "Conv1D", (4 * _WIDTH, _WIDTH)),
)


def made_up_info() -> dict[str, Any]:
    """What run.json would say: 148 parameters."""
    layers = [
        {"name": "wte.weight", "shape": [50257, _WIDTH], "part": "embedding", "tied_to": ["lm_head.weight"]},
        {"name": "wpe.weight", "shape": [1024, _WIDTH], "part": "embedding"},
    ]
    for block, (name, part, module, shape) in itertools.product(range(_BLOCKS), _IN_A_BLOCK):
        for kind, size in (("weight", list(shape)), ("bias", [shape[-1]])):
            layers.append({"name": f"h.{block}.{name}.{kind}", "shape": size, "part": part, "module": module})
    layers += [{"name": f"ln_f.{kind}", "shape": [_WIDTH], "part": "norm"} for kind in ("weight", "bias")]
    return {"layers": [{"dtype": "float32", "selected": True, **layer} for layer in layers]}


class _Patient:
    """A training that is well: every norm wavers about a level that changes slowly."""

    def __init__(self, info: dict[str, Any]) -> None:
        self._chance = np.random.default_rng(0)
        self._parameters = tuple(layer["name"] for layer in info["layers"])
        self._modules = tuple(dict.fromkeys(name.rpartition(".")[0] for name in self._parameters))
        blocks = [f"h.{block}" for block in range(_BLOCKS)]
        self._attentions = tuple(f"{block}.attn" for block in blocks)
        self._activations = (*self._modules, *blocks, *self._attentions)
        self._levels = 10 ** self._chance.normal(-2, 0.5, len(self._parameters))
        self._order = json.dumps([*self._modules, *self._parameters])

    def records(self, steps: int) -> Iterator[Record]:
        """As they are written: what is logged of a step comes after it."""
        for step in range(steps):
            notes = {EXECUTION_ORDER: self._order} if step == 0 else {}
            yield Record(step, STEP_SECONDS * step, self._scalars(step), dict(self._rows(step)), notes)
            yield Record(step, STEP_SECONDS * step, {"loss": self._near(2 + 9 * 0.99**step)}, late=True)

    def _near(self, level: float) -> float:
        return float(level * np.exp(self._chance.normal(0, 0.02)))

    def _scalars(self, step: int) -> dict[str, float]:
        stages = {f"time/{stage}": self._near(0.02) for stage in ("forward", "backward", "optimizer", "other")}
        machine = {"machine/process_memory": self._near(4e9), "machine/cpu_share": 0.5} if step % 10 == 0 else {}
        rates = {"learning_rate": 1e-4 * min(1.0, (step + 1) / 100), "weight_decay": 0.01, "optimizer_step": step + 1.0}
        norms = {"gradient_norm": self._near(0.5), "gradient_nonfinite": 0.0, "monitor_cost": self._near(2e-4)}
        return rates | norms | machine | stages | {"step_time": self._near(STEP_SECONDS)}

    def _rows(self, step: int) -> Iterator[tuple[str, LayerRows]]:
        names, count, waver = self._parameters, len(self._parameters), self._chance.normal(0, 0.1, len(self._levels))
        yield "gradient", _layer_rows(names, self._levels * np.exp(waver))
        if step % 10 == 0:
            ratios = 1e-3 * np.exp(waver)
            extras = {
                "ratio": ratios,
                "planned_ratio": ratios,
                "weight_norm": np.full(count, 30.0) * np.exp(waver / 50),
            }
            extras |= {"unchanged": np.zeros(count), "cosine": waver}
            yield "update", _layer_rows(names, 1e-3 * self._levels, extras)
            yield "momentum", _layer_rows(names, 0.3 * self._levels)
            extras = {"rms_ratio": 1 + 0.1 * waver, "below_eps": np.zeros(count)}
            yield "second_moment", _layer_rows(names, self._levels**2, extras)
        if step % 100 == 0:
            yield from self._looks(count)

    def _looks(self, count: int) -> Iterator[tuple[str, LayerRows]]:
        extras = {name: np.ones(count) for name in ("requires_grad", "held", "has_gradient")}
        yield "weight", _layer_rows(self._parameters, np.full(count, 30.0), extras)
        modules = len(self._activations)
        flat = {name: np.zeros(modules) for name in ("dead", "saturated", "near_overflow", "dead_lasting")}
        extras = flat | {"rank": np.full(modules, 200.0), "spread": np.full(modules, 0.9)}
        yield "activation", _layer_rows(self._activations, np.exp(self._chance.normal(0, 0.1, modules)), extras)
        extras = {name: np.full(_BLOCKS, 4.0) for name in ("max_logit", "entropy")}
        yield "attention", _layer_rows(self._attentions, np.ones(_BLOCKS), extras)


def _layer_rows(names: tuple[str, ...], norms: Any, extras: dict[str, Any] | None = None) -> LayerRows:
    """Rows of so many tensors of 1,000 values each with these norms."""
    count, values = 1000.0, np.zeros((len(names), len(COLUMNS)))
    size = norms / count**0.5
    for name, column in (("count", count), ("sum_abs", 0.8 * count * size), ("sum_squares", norms**2)):
        values[:, COLUMNS.index(name)] = column
    values[:, COLUMNS.index("min")], values[:, COLUMNS.index("max")] = -3 * size, 3 * size
    return LayerRows(names, Rows(values), extras or {})


def milliseconds(records: Iterable[Record], info: dict[str, Any]) -> tuple[np.ndarray, Doctor]:
    """Of the doctor, by step."""
    doctor = Doctor(info)
    spent: list[float] = []
    for record in records:
        began = time.thread_time()
        doctor.take(record)
        taken = time.thread_time() - began
        if record.late and spent:
            spent[-1] += taken
        else:
            spent.append(taken)
    return 1e3 * np.array(spent), doctor


def live(records: Iterable[Record], info: dict[str, Any], seconds: float, share: float) -> None:
    """The thread, at the pace of a training."""
    examined = Examination(info, share, None, lambda finding: None, lambda what, error: print(what, error))
    began = time.monotonic()
    for record in records:
        if not record.late:
            time.sleep(max(0.0, began + STEP_SECONDS * record.step - time.monotonic()))
        examined.post(record)
        elapsed = time.monotonic() - began
        if record.late and record.step % 100 == 99:
            cost = f"{100 * examined.seconds / elapsed:.3f} % of the time, {1e3 * examined.seconds:.0f} ms"
            print(f"live, {elapsed:5.1f} s: {cost}, {examined.backlog} records wait", flush=True)
        if elapsed > seconds:
            break
    examined.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", help="a stored run in place of records that are made up")
    parser.add_argument("--rounds", type=int, default=3, help="the fastest one counts (default 3)")
    parser.add_argument("--live", type=float, default=0.0, help="seconds (default 0: not at all)")
    given = parser.parse_args()
    if given.run:
        run = open_run(given.run)
        info, stored = dict(run.info), list(run.records)
    else:
        info = made_up_info()
        stored = list(_Patient(info).records(max(PHASES)))
    if given.live:
        live(stored, info, given.live, 0.0018)
        return
    rounds = [milliseconds(stored, info) for _ in range(given.rounds)]
    for phase in [phase for phase in PHASES if phase <= len(rounds[0][0])]:
        cost = min(float(spent[:phase].mean()) for spent, _ in rounds)
        share = 100 * cost / (1e3 * STEP_SECONDS)
        print(f"first {phase:5,} steps: {cost:.3f} ms a step, {share:.3f} % of a step of 107 ms", flush=True)
    print(f"{len(rounds[0][1].findings)} findings")


if __name__ == "__main__":
    main()
