"""One training in a process of its own, bare or watched: python -m zoo.worker NAME OUT [--watched] [--fault NAME]

`zoo.processes` starts it, with an environment that keeps packages off the network. The bare run never imports Holter.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import tempfile
import traceback
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
from torch import nn

from zoo.reference import Reference
from zoo.result import Result, Seen, Told, write
from zoo.trainee import Trainee, Watch, modules_of
from zoo.trainings import find
from zoo.vision import make_torchvision_importable

if TYPE_CHECKING:
    from holter.diagnosis.finding import Finding

SEED = 17


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("out", type=Path)
    parser.add_argument("--watched", action="store_true")
    parser.add_argument("--fault")
    asked = parser.parse_args()
    out = asked.out.resolve()
    with tempfile.TemporaryDirectory(prefix="zoo-") as scratch:
        os.environ["HF_HOME"] = scratch
        os.chdir(scratch)  # packages write beside where they are started
        try:
            result = train(asked.name, asked.fault, asked.watched, Path(scratch))
        except Exception:
            result = Result(error=traceback.format_exc())
        write(result, out)


def train(name: str, fault: str | None, is_watched: bool, directory: Path) -> Result:
    make_torchvision_importable()
    training = find(name)
    if fault is not None and fault not in training.faults:
        raise ValueError(f"{name} has no fault {fault!r}; it has {', '.join(training.faults) or 'none'}")
    settle()
    reference = Reference(measures=not is_watched)
    trainee = Trainee(directory, reference, fault, is_watched)
    modules = modules_of(training.run(trainee))
    seen = tuple(_watched(watch) if is_watched else _bare(watch) for watch in trainee.watches)
    return Result(seen=seen, hashes=_hashes(modules), seconds=reference.seconds)


def settle() -> None:
    """Make the training the same at every call."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    random.seed(SEED)
    numpy.random.seed(SEED)  # noqa: NPY002  # packages draw from the global state
    torch.manual_seed(SEED)


def _bare(watch: Watch) -> Seen:
    track = watch.track
    return Seen(track.steps, dict(enumerate(track.norms)), dict(enumerate(track.clipped)))


def _watched(watch: Watch) -> Seen:
    """Everything that Holter says, by whichever way: alerts, the monitor at its end, the stored run."""
    import holter

    monitor = watch.monitor_of()
    if monitor is None or watch.run is None or watch.told is None:
        return Seen(0, own=("no training was begun under this monitor",))
    monitor.close()
    run = holter.open_run(watch.run)
    live, stored = [*watch.told.findings, *monitor.findings], holter.diagnose(run)
    own = [f"{one.severity}: {one.advice}" for one in (*live, *stored) if one.where == "monitor"]
    own += [f"{name}: {note}" for record in run.records for name, note in record.notes.items() if _is_gap(note)]
    steps = run.history.steps.tolist()
    if steps != list(range(len(steps))):
        own.append(f"steps are not 0 to {len(steps) - 1}")

    def by_step(name: str) -> dict[int, float]:
        return dict(zip(*(values.tolist() for values in run.history.scalar(name)), strict=True))

    return Seen(
        steps=len(steps),
        norms=by_step("gradient_norm"),
        clipped=by_step("gradient_norm_clipped"),
        losses=tuple(by_step("loss").values()),
        findings=_told(live, stored),
        own=tuple(dict.fromkeys(own)),
        dropped=monitor.dropped,
        state=run.state,
    )


def _told(live: Iterable[Finding], stored: Iterable[Finding]) -> tuple[Told, ...]:
    """What the stored run says, in its order; then what was only said live."""
    found: dict[tuple[str, str | None, str], Told] = {}
    for one in (one for one in stored if one.where != "monitor"):
        found.setdefault((one.cause, one.layer, one.severity), _as_told(one))
    for one in (one for one in live if one.where != "monitor"):
        found.setdefault((one.cause, one.layer, one.severity), replace(_as_told(one), live=True))
    return tuple(found.values())


def _as_told(one: Finding) -> Told:
    alternatives, evidence = tuple(one.alternatives), str(dict(one.evidence))
    return Told(one.cause, one.where, one.severity, one.layer, one.since, alternatives, one.advice, evidence)


def _is_gap(note: object) -> bool:
    return isinstance(note, str) and note.startswith("not observed")


def _hashes(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Of every parameter and buffer, by module and name."""
    found = {}
    for place, module in enumerate(modules):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            plain = tensor.detach().cpu().contiguous().reshape(-1)
            raw = plain.view(torch.uint8) if plain.numel() else plain
            found[f"{place}.{name}"] = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
    return found


if __name__ == "__main__":
    main()
