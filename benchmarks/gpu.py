"""What watching costs on a GPU, beside other ways: python -m benchmarks.gpu [--only PART] [--model NAME ...]

Three parts, each runnable alone. observation: one look at all gradients of a model. training: real training steps.
python: the training thread, with 10,000 parameters. In the first two all contenders take turns, so that whatever
else the machine does hits all alike. docs/benchmarks.md says what is compared and what the figures mean.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import many_parameters, observation, steps
from benchmarks.machine import describe, result_path
from benchmarks.models import SHAPES
from benchmarks.table import render
from benchmarks.turns import told
from benchmarks.watched import VARIANTS

MODELS = (*SHAPES, "gpt2-plain")
Job = tuple[str, Callable[[], Any]]  # a label, and what returns a dataclass of figures, or None


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parser().parse_args(arguments)
    device = torch.device(options.device)
    machine = describe(device)
    path = options.json or result_path(str(machine["machine"]), str(machine["date"]))
    result: dict[str, Any] = {"machine": machine, "options": _plain(options), "failed": {}}
    for part in [options.only] if options.only else PARTS:
        result[part] = []
        for label, job in PARTS[part](options, device):
            _run(job, f"{part}, {label}", result[part], result["failed"])
            _free(device)
            _save(result, path)  # after each job: a later one that dies loses nothing
    print(f"\n{render(result)}\nThe figures are in {path.name}.")


def _run(job: Callable[[], Any], label: str, found: list[dict[str, Any]], failed: dict[str, str]) -> None:
    print(f"{label} ...", flush=True)
    began = time.perf_counter()
    try:
        figures = job()
    except Exception as error:
        failed[label] = told(label, error)
        return
    if figures is not None:
        found.append(asdict(figures))
    print(f"  {time.perf_counter() - began:.0f} s", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=PARTS, help="only this part")
    parser.add_argument("--model", nargs="+", choices=MODELS, help="default: gpt2 gpt2-xl; small without a GPU")
    parser.add_argument("--dtype", nargs="+", choices=observation.DTYPES, default=list(observation.DTYPES))
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, help="of the part training; default: all")
    parser.add_argument("--rounds", type=_at_least_one, help="of every part (default 50, 60 blocks of steps, 40 steps)")
    parser.add_argument("--limit", type=float, default=2.0, help="seconds a contender may take of a model (default 2)")
    parser.add_argument("--batch", type=int, help="sequences in a training step (default 16; 4 of small)")
    parser.add_argument("--length", type=int, help="tokens in a sequence (default 1024; 32 of small)")
    parser.add_argument("--parameters", type=int, default=10_000, help="of the model of the part python")
    parser.add_argument("--json", type=Path, metavar="FILE", help="default: benchmarks/results/<machine>-<date>.json")
    return parser


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(options).items() if name != "json"}


def _models(options: argparse.Namespace) -> list[str]:
    return options.model or (["gpt2", "gpt2-xl"] if options.device == "cuda" else ["small"])


def _observation(options: argparse.Namespace, device: torch.device) -> Iterator[Job]:
    plan = observation.Plan(rounds=options.rounds or 50, limit_seconds=options.limit)
    for model in (name for name in _models(options) if name in SHAPES):
        for dtype in options.dtype:
            yield f"{model} {dtype}", partial(observation.observe, model, dtype, device, plan)


def _training(options: argparse.Namespace, device: torch.device) -> Iterator[Job]:
    plan = steps.Plan(
        blocks=options.rounds or steps.Plan.blocks,
        batch=options.batch,
        length=options.length,
        variants=options.variant or (),
    )
    for model in _models(options):
        yield model, partial(steps.train, model, device, plan)


def _python(options: argparse.Namespace, device: torch.device) -> Iterator[Job]:
    for on in dict.fromkeys([torch.device("cpu"), device]):
        for variant in many_parameters.VARIANTS:
            job = partial(many_parameters.measure, variant, on, options.parameters, options.rounds or 40)
            yield f"{variant} on {on.type}", job


PARTS: dict[str, Callable[[argparse.Namespace, torch.device], Iterator[Job]]] = {
    "observation": _observation,
    "training": _training,
    "python": _python,
}


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _save(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
