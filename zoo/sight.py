"""What is seen of a training once it is over: of the bare one by torch, of the watched one by Holter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from zoo.result import Seen, Told
from zoo.trainee import Watch

if TYPE_CHECKING:
    from holter.diagnosis.finding import Finding


def seen_bare(watch: Watch) -> Seen:
    track = watch.track
    return Seen(track.steps, dict(enumerate(track.norms)), dict(enumerate(track.clipped)))


def seen_watched(watch: Watch) -> Seen:
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
        attached=watch.by,
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


def hashes(modules: Iterable[nn.Module]) -> dict[str, str]:
    """Of every parameter and buffer, by module and name."""
    found = {}
    for place, module in enumerate(modules):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            plain = tensor.detach().cpu().clone(memory_format=torch.contiguous_format).reshape(-1)
            raw = plain.view(torch.uint8) if plain.numel() else plain
            found[f"{place}.{name}"] = hashlib.sha256(raw.numpy().tobytes()).hexdigest()
    return found
